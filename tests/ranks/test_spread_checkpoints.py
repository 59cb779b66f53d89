# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of engines whose experts are spread: weights, float32 masters and moments come back bit for bit, experts
over all ranks, and so do the losses that follow."""

from itertools import cycle

import pytest
import torch

from ds_mxfp8_moe.layers.experts import expert_blocks
from tests.support.autoep_models import train_engine
from tests.support.slow import slow_except
from tests.support.spread_checkpoints_cases import MXFP8, build, state, to_universal


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


def assert_goes_on_with(written, found, exactly=True):
    for (saved, losses), (loaded, values, after) in zip(cycle(written), found, strict=False):
        assert loaded and values.keys() == saved.keys()
        assert not [name for name in saved if not torch.equal(values[name], saved[name])]
        assert after == losses if exactly else after[0] == pytest.approx(losses[0], rel=3e-3)


@pytest.mark.parametrize("stage, family", slow_except(
    [(stage, family) for family in ("deepseek_v3", "gpt_oss") for stage in (0, 1, 2, 3)],
    (2, "deepseek_v3"), (3, "gpt_oss")))
def test_training_goes_on_with_the_same_bits(ranks2, tmp_path, stage, family):
    written = ranks2.run(write, tmp_path, stage, 2, family)
    assert_goes_on_with(written, ranks2.run(read, tmp_path, stage, 2, family))


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
    assert_goes_on_with(written, found, exactly=False)
