# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of engines whose experts are spread: weights, float32 masters and moments come back bit for bit, experts
over all ranks, and so do the losses that follow."""

from itertools import cycle
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.experts import expert_blocks
from tests.support.autoep_models import autoep_layers, ds_config, gathered, model, train_engine
from tests.support.slow import slow_except

PLAIN = {"enabled": False}  # DeepSpeed's own AutoEP
MXFP8 = {"enabled": True}


def build(section, stage, ep_size, family="deepseek_v3", seed=0, **changes):
    """An engine in bfloat16 with float32 masters and Adam; plain DeepSpeed's own where the section is PLAIN."""
    config = ds_config(section, stage, ep_size, bf16={"enabled": True}, zero_allow_untested_optimizer=False,
                       optimizer={"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, **changes)
    initialize = deepspeed.initialize if section is PLAIN else ds_mxfp8_moe.initialize
    return initialize(model=model(family, seed=seed), config=config)[0]


def state(engine) -> dict[str, torch.Tensor]:
    """Weights, masters and moments by name; the experts of all ranks in one tensor."""
    layer = autoep_layers(engine.module)[0]
    if engine.zero_optimization_stage() in (1, 2):
        # DeepSpeed links parameters with moments after the step of the first group, before the experts' have any.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, p in engine.module.named_parameters():
        values = {"weight": gathered(p), "master": safe_get_full_fp32_param(p)}
        for moment in ("exp_avg", "exp_avg_sq"):
            values[moment] = safe_get_full_optimizer_state(p, moment)
        for kind, value in values.items():
            if ".experts.w" in name and layer.ep_size > 1:
                parts = [torch.empty_like(value) for _ in range(layer.ep_size)]
                dist.all_gather(parts, value.contiguous(), group=layer.ep_group)
                value = torch.cat(parts)
            found[f"{kind} of {name}"] = value.clone()
    return found


def to_universal(directory):
    """DeepSpeed's own tool, as its command line runs it; in this process, which has imported all it needs."""
    with mock.patch("sys.argv", ["ds_to_universal", "--input_folder", str(directory / "two"), "--output_folder",
                                 str(directory / "two_universal"), "--num_extract_workers", "1",
                                 "--num_merge_workers", "1", "--inject_missing_state"]):
        ds_to_universal.main(ds_to_universal.parse_arguments())


def state_of(engine):
    """In ZeRO-0, DeepSpeed tells no masters and moments: the losses have to do."""
    return state(engine) if engine.zero_optimization_stage() else {
        name: p.detach().clone() for name, p in engine.module.named_parameters()}


def write(directory, stage, ep_size, family):
    engine = build(MXFP8, stage, ep_size, family)
    train_engine(engine, range(2), rank=0)
    engine.save_checkpoint(str(directory), tag="two")
    return state_of(engine), train_engine(engine, range(2, 4), rank=0)


def read(directory, stage, ep_size, family, tag="two", **changes):
    engine = build(MXFP8, stage, ep_size, family, seed=1, **changes)
    assert list(expert_blocks(engine.module))
    path, _ = engine.load_checkpoint(str(directory), tag=tag)
    return path is not None, state_of(engine), train_engine(engine, range(2, 4), rank=0)


def check(written, found, exactly=True):
    for (saved, losses), (loaded, values, after) in zip(cycle(written), found, strict=False):
        assert loaded and values.keys() == saved.keys()
        assert not [name for name in saved if not torch.equal(values[name], saved[name])]
        assert after == losses if exactly else after[0] == pytest.approx(losses[0], rel=3e-3)


@pytest.mark.parametrize("stage, family", slow_except(
    [(stage, family) for family in ("deepseek_v3", "gpt_oss") for stage in (0, 1, 2, 3)],
    (0, "gpt_oss"), (2, "deepseek_v3"), (3, "gpt_oss")))
def test_training_goes_on_with_the_same_bits(ranks2, tmp_path, stage, family):
    written = ranks2.run(write, tmp_path, stage, 2, family)
    check(written, ranks2.run(read, tmp_path, stage, 2, family))


@pytest.mark.parametrize("writer, reader, stage, ep_sizes, family", slow_except(
    [("ranks2", "ranks2", 2, (2, 1), "gpt_oss"), ("ranks4", "ranks2", 2, (4, 2), "qwen3_moe"),
     ("ranks2", "ranks4", 1, (2, 4), "gpt_oss"), ("ranks4", "ranks2", 3, (2, 2), "gpt_oss")],
    ("ranks2", "ranks2", 2, (2, 1), "gpt_oss")))
def test_universal_checkpoints_fit_other_ranks(request, tmp_path, writer, reader, stage, ep_sizes, family):
    """Every rank trains with the same batches, so that the number of ranks changes no loss."""
    written = request.getfixturevalue(writer).run(write, tmp_path, stage, ep_sizes[0], family)
    to_universal(tmp_path)
    found = request.getfixturevalue(reader).run(read, tmp_path, stage, ep_sizes[1], family, "two_universal",
                                                checkpoint={"load_universal": True})
    check(written, found, exactly=False)
