# SPDX-License-Identifier: Apache-2.0
"""Router replay on GPUs, with recomputations on autograd's own thread."""

import deepspeed.comm as dist
import pytest

import ds_mxfp8_moe
from ds_mxfp8_moe import record_routes, replay_routes
from small_models import small_model
from tests.support import replay_cases, replay_recompute_cases
from tests.support.autoep_models import batch, ds_config

MXFP8 = {"enabled": True, "min_tokens_per_expert": 0}


def at_once(model_type: str) -> list[list[str]]:
    """What differs if routes are recorded, and if they are replayed."""
    model = small_model(model_type, attn_implementation="eager")
    engine = ds_mxfp8_moe.initialize(model=model, config=ds_config(MXFP8, 0, dist.get_world_size(),
                                                                   bf16={"enabled": True}))[0]
    ids = batch(0).to(engine.device)
    plain = replay_cases.outcome(engine.module, ids)
    with record_routes(engine) as routes:
        recorded = replay_cases.outcome(engine.module, ids)
    with replay_routes(engine, routes):
        replayed = replay_cases.outcome(engine.module, ids)
    return [replay_cases.different(plain, one) for one in (recorded, replayed)]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "lfm2_moe", "deepseek_v3", "gpt_oss"])
def test_the_same_bits_at_once(gpu_ranks, model_type):
    for found in gpu_ranks.run(at_once, model_type, seconds=240):
        assert found == [[], []]


def recomputed(family: str) -> list[str]:
    return replay_recompute_cases.recomputed(family, dist.get_world_size())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_recomputations_choose_what_their_forward_chose(gpu_ranks, family):
    for found in gpu_ranks.run(recomputed, family, seconds=240):
        assert found == []
