# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of engines whose experts are spread: weights, float32 masters and moments come back bit for bit, experts
over all ranks, and so do the losses that follow."""

from itertools import cycle

import pytest
import torch

from tests.support.slow import slow_except
from tests.support.spread_checkpoints_cases import MXFP8, read, to_universal, written


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
