# SPDX-License-Identifier: Apache-2.0
"""Frozen weights in MXFP8 with the kernels, their recordings, and their memory."""

import pytest
import torch

from ds_mxfp8_moe.compute import recorded
from ds_mxfp8_moe.compute.formula import ExpertFormula
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.ffn.frozen_weights import FrozenWeights
from ds_mxfp8_moe.transport.local import Local
from tests.support.expert_ffn_cases import RECIPES
from tests.support.frozen_experts_cases import calls
from tests.support.slow import slow_unless


@pytest.mark.parametrize("recipe, routing, tokens", slow_unless(
    lambda recipe, routing, tokens: recipe == "hp-128" or (routing, tokens) == ("random", 50),
    ((recipe, *calls) for recipe in ("hp-128", "mxfp8-128")
     for calls in (("random", 50), ("one-expert", 50), ("nowhere", 50), ("random", 0)))))
def test_the_bits_of_kept_weights(one_rank, recipe, routing, tokens):
    kept = calls(False, recipe, routing, tokens, device="cuda")
    assert all(map(torch.equal, calls(True, recipe, routing, tokens, device="cuda"), kept))


@pytest.mark.parametrize("recipe", ["hp-128", "mxfp8-128", "hp-32"])
def test_replayed_calls_give_the_same_bits(one_rank, recipe):
    recorded._PROGRAMS.clear()
    with recorded.from_python():
        direct = calls(True, recipe, "random", device="cuda")
    assert not recorded._PROGRAMS
    for _ in range(2):  # the second time, with other memory
        assert all(map(torch.equal, calls(True, recipe, "random", device="cuda"), direct))
    programs = [program for found in recorded._PROGRAMS.values() for program, _ in found.values()]
    assert len(programs) == 2 and all(programs)


def test_layers_share_the_memory_of_one_transpose(one_rank):
    """Peak memory of forward and backward of 4 layers, of which one is 192 MiB: 128 in "up", 64 in "down"."""
    E, H, F, mib = 32, 2048, 1024, 2**20
    layers, of_others = [], torch.cuda.memory_allocated()
    for _ in range(4):
        layers.append(FrozenWeights(E, H, F, torch.bfloat16, "cuda"))
        for i in range(E):
            gate, up = (torch.randn(F, H, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            layers[-1].put(i, gate, torch.randn(H, F, dtype=torch.bfloat16, device="cuda"), up, "rceil")
    formula = ExpertFormula("gated", "silu", H, F, gate="gate", up="up", down="down")
    ffn = ExpertFFN(formula, RECIPES["hp-128"], Local(), E)
    x = torch.randn(256, H, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    routes = Routes(expert_TK=torch.randint(0, E, (256, 1), device="cuda"),
                    weight_TK=torch.ones(256, 1, device="cuda"), num_experts=E)

    def step():
        y = x
        for frozen in layers:
            y = ffn(y, routes, {}, frozen=frozen)
        y.sum().backward()

    for _ in range(2):  # the first one is recorded
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        extra = torch.cuda.max_memory_allocated() - before
    assert 4 * 192 * mib <= before - of_others <= 4 * 193 * mib + 64 * mib
    assert 128 * mib <= extra < (128 + 250) * mib  # rows are padded to 128 for each expert: 4096 of them
