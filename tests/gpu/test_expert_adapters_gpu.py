# SPDX-License-Identifier: Apache-2.0
"""Adapters of the expert FFN with the kernels, and their recordings."""

import pytest
import torch

from ds_mxfp8_moe.compute import recorded
from tests.support.expert_adapters_cases import assert_equals_merged_weights, run
from tests.support.expert_ffn_cases import RECIPES


@pytest.mark.parametrize("recipe_name", ["bf16", "hp-32", "hp-128", "mxfp8-128", "all-wires-mxfp8"])
def test_equals_merged_weights(one_rank, recipe_name):
    assert_equals_merged_weights(recipe_name, torch.bfloat16, "cuda")


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("recipe_name", ["bf16", "hp-32", "hp-128"])
def test_replayed_calls_give_the_same_bits(one_rank, recipe_name, rank):
    recorded._PROGRAMS.clear()
    with recorded.from_python():
        (direct, ) = run(RECIPES[recipe_name], torch.bfloat16, "cuda", rank=rank)
    assert not recorded._PROGRAMS
    for found in run(RECIPES[recipe_name], torch.bfloat16, "cuda", calls=3, rank=rank):
        assert all(torch.equal(direct[name], found[name]) for name in direct)
    programs = [program for by_place in recorded._PROGRAMS.values() for program, _ in by_place.values()]
    assert len(programs) == 2 and all(programs)
