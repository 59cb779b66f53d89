# SPDX-License-Identifier: Apache-2.0
"""Router replay on GPUs: by the router's kernels and by torch, with recomputations on autograd's own thread."""

import deepspeed.comm as dist
import pytest
import test_replay
import test_replay_recompute
import torch
from autoep_models import batch, ds_config
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from preset_models import tiny_model

import ds_mxfp8_moe
from ds_mxfp8_moe import record_routes, replay_routes
from ds_mxfp8_moe.layers.router import route
from ds_mxfp8_moe.layers.routes import Turn

MXFP8 = {"enabled": True, "min_tokens_per_expert": 0}


def at_once(model_type: str) -> list[list[str]]:
    """What differs if routes are recorded, and if they are replayed."""
    model = tiny_model(model_type, attn_implementation="eager")
    engine = ds_mxfp8_moe.initialize(model=model, config=ds_config(MXFP8, 0, dist.get_world_size(),
                                                                   bf16={"enabled": True}))[0]
    ids = batch(0).to(engine.device)
    plain = test_replay.outcome(engine.module, ids)
    with record_routes(engine) as routes:
        recorded = test_replay.outcome(engine.module, ids)
    with replay_routes(engine, routes):
        replayed = test_replay.outcome(engine.module, ids)
    return [test_replay.different(plain, one) for one in (recorded, replayed)]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "lfm2_moe", "deepseek_v3", "gpt_oss", "phimoe"])
def test_the_same_bits_at_once(gpu_ranks, model_type):
    for found in gpu_ranks.run(at_once, model_type, seconds=240):
        assert found == [[], []]


def recomputed(family: str) -> list[str]:
    return test_replay_recompute.recomputed(family, dist.get_world_size())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_recomputations_choose_what_their_forward_chose(gpu_ranks, family):
    for found in gpu_ranks.run(recomputed, family, seconds=240):
        assert found == []


@pytest.mark.parametrize("groups", [None, 4], ids=["kernels", "torch"])
def test_the_host_does_not_wait_for_a_replayed_router(groups):
    router = TokenChoiceTopKRouter(64, 16, groups, 2, 4, "softmax", True, 1.0, False).cuda()
    x_TH = torch.randn(256, 64, device="cuda")
    chosen_TK = torch.arange(4, dtype=torch.int16, device="cuda").expand(256, 4)
    for mode in ("default", "error"):  # the first time compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            turn = Turn(chosen_TK, complete=True)
            weight_TK, expert_TK, _ = route(router, x_TH, None, turn)
            turn.note(expert_TK)
            weight_TK.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
