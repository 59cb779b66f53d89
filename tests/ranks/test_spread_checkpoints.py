# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of engines whose experts are spread: weights, float32 masters and moments come back bit for bit, experts
over all ranks, and so do the losses that follow."""

from itertools import cycle

import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.checkpoint.engine_checkpoints import CheckpointError
from tests.support import models
from tests.support.autoep_models import ds_config, engine_of, model
from tests.support.slow import slow_except
from tests.support.spread_checkpoints_cases import MXFP8, build, read, to_universal, written


def assert_goes_on_with(before, found, exactly=True):
    for (saved, losses), (loaded, values, after) in zip(cycle(before), found, strict=False):
        assert loaded and values.keys() == saved.keys()
        assert not [name for name in saved if not torch.equal(values[name], saved[name])]
        assert after == losses if exactly else after[0] == pytest.approx(losses[0], rel=3e-3)


@pytest.mark.parametrize("stage, family", slow_except(
    [(stage, family) for family in ("deepseek_v3", "gpt_oss") for stage in (0, 1, 2, 3)],
    (2, "deepseek_v3"), (3, "gpt_oss")))
def test_training_goes_on_with_the_same_bits(ranks2, tmp_path, stage, family):
    saved = ranks2.run(written, tmp_path, MXFP8, stage, 2, family)
    assert_goes_on_with(saved, ranks2.run(read, tmp_path, MXFP8, stage, 2, family))


@pytest.mark.parametrize("writer, reader, stage, ep_sizes, family", slow_except(
    [("ranks2", "ranks2", 2, (2, 1), "gpt_oss"), ("ranks4", "ranks2", 2, (4, 2), "qwen3_moe"),
     ("ranks2", "ranks4", 1, (2, 4), "gpt_oss"), ("ranks4", "ranks2", 3, (2, 2), "gpt_oss")],
    ("ranks2", "ranks2", 2, (2, 1), "gpt_oss")))
def test_universal_checkpoints_fit_other_ranks(request, tmp_path, writer, reader, stage, ep_sizes, family):
    saved = request.getfixturevalue(writer).run(written, tmp_path, MXFP8, stage, ep_sizes[0], family)
    to_universal(tmp_path)
    found = request.getfixturevalue(reader).run(read, tmp_path, MXFP8, stage, ep_sizes[1], family, "two_universal",
                                                checkpoint={"load_universal": True})
    assert_goes_on_with(saved, found, exactly=False)


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in ds_mxfp8_moe.export_weights(engine)}


def of_classic(zero: int, ep_size: int):
    return models.make_engine(models.Layout(zero=zero, ep_size=ep_size, config=models.ADAM), MXFP8)


def on_another_number_of_ranks(directory, make, stage: int) -> str:
    """The error of a run with all experts on each rank about the checkpoint of one whose ranks share them. Without the
    optimizer's states, it loads."""
    first, second = make(stage, ep_size=2), make(stage, ep_size=1)
    first.save_checkpoint(str(directory), tag="two")
    before = weights(second)
    with pytest.raises(CheckpointError) as error:
        second.load_checkpoint(str(directory))
    models.assert_same_bits(weights(second), before)
    if stage < 3:
        second.load_checkpoint(str(directory), load_optimizer_states=False)
        models.assert_same_bits(weights(second), weights(first))
    return str(error.value)


def of_autoep(stage: int, ep_size: int):
    return build(MXFP8, stage, ep_size, "qwen3_moe", seed=ep_size)


@pytest.mark.parametrize("make, stage", slow_except(
    [(of_autoep, 0), (of_autoep, 1), (of_autoep, 2), (of_autoep, 3), (of_classic, 1)], (of_autoep, 1)))
def test_other_ranks_for_experts_are_an_error_before_anything_is_copied(ranks2, tmp_path, make, stage):
    """ZeRO's partitions of experts have the same sizes then, with other experts in them."""
    for error in ranks2.run(on_another_number_of_ranks, tmp_path, make, stage):
        assert "on 2 ranks, and this run has them on 1" in error and "Nothing was copied" in error


def without_an_optimizer(directory) -> None:
    first, config = engine_of(model(), MXFP8), ds_config(MXFP8, ep_size=1)
    first.save_checkpoint(str(directory))
    del config["optimizer"]
    second = ds_mxfp8_moe.initialize(model=model(seed=1), config=config)[0]
    second.load_checkpoint(str(directory))
    models.assert_same_bits(weights(second), weights(first))


def test_an_engine_without_an_optimizer_takes_experts_of_other_ranks(ranks2, tmp_path):
    ranks2.run(without_an_optimizer, tmp_path)


def of_whole_experts(directory, stage: int) -> str:
    engine_of(model(), None, stage).save_checkpoint(str(directory))
    with pytest.raises(CheckpointError) as error:
        of_autoep(stage, 2).load_checkpoint(str(directory))
    return str(error.value)


@pytest.mark.parametrize("stage", slow_except([1, 3], 1))
def test_a_checkpoint_without_expert_parallelism_is_an_error_in_words(ranks2, tmp_path, stage):
    for error in ranks2.run(of_whole_experts, tmp_path, stage):
        assert 'as without "expert_parallel"' in error and "Nothing was copied" in error
