# SPDX-License-Identifier: Apache-2.0
"""Dithered weights with the kernels: replayed calls read the step of their replay."""

import pytest
from test_weight_rounding import check_steps

from ds_mxfp8_moe.ops.triton_kernels import recording


@pytest.mark.parametrize("name", ["swiglu", "gelu", "packed"])
@pytest.mark.parametrize("recipe", ["hp-32", "hp-128", "mxfp8-32", "mxfp8-128"])
def test_replays_follow_the_step(one_rank, recipe, name):
    recording._PROGRAMS.clear()
    check_steps(recipe, name, "cuda")
    assert recording._PROGRAMS
