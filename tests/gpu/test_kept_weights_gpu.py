# SPDX-License-Identifier: Apache-2.0
"""Kept quantized weights with the kernels, their recordings and CUDA graphs."""

from itertools import chain

import pytest
import torch

from ds_mxfp8_moe.compute import recorded
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.ffn.kept_weights import KeptWeights
from ds_mxfp8_moe.transport.local import Local
from tests.gpu.capture import capture
from tests.support.expert_ffn_cases import RECIPES, formula, problem
from tests.support.kept_weights_cases import calls, counted, equal, parameters_of


def weights_there(name):
    weights = parameters_of(problem(1, name, dtype=torch.bfloat16, bias=name == "gelu")[0])
    return {role: [torch.nn.Parameter(w.detach().cuda()) for w in values] for role, values in weights.items()}


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", ["hp-32", "hp-128", "mxfp8-32", "mxfp8-128"])
def test_replayed_calls_share_kept_weights(one_rank, recipe, name):
    recorded._PROGRAMS.clear()
    weights, kept = weights_there(name), KeptWeights()
    for _ in range(2):  # in the second round everything is replayed, casts too
        wanted = calls(weights, None, recipe, name, device="cuda")
        assert equal(calls(weights, kept, recipe, name, device="cuda"), wanted)
        for p in chain(*weights.values()):
            p.data.mul_(0.5)
        kept.clear()
    with counted() as count:
        calls(weights, kept, recipe, name, device="cuda")
    assert count.total() == 0
    programs = [program for found in recorded._PROGRAMS.values() for program, _ in found.values()]
    # Forward and backward of calls that quantize and of calls that do not; and four casts that are kept.
    assert len(programs) == 8 and None not in programs


def test_a_graph_reads_the_weights_of_its_replay(one_rank):
    weights, kept = weights_there("swiglu"), KeptWeights()
    _, (x, ), _, (routes, ) = problem(1, "swiglu", dtype=torch.bfloat16)
    x, experts = x.cuda(), len(weights["up"])
    routes = Routes(expert_TK=routes[0].cuda(), weight_TK=routes[1].cuda(), num_experts=experts)

    def run(kept):
        with torch.no_grad():
            return ExpertFFN(formula("swiglu"), RECIPES["hp-128"], Local(), experts, kept=kept)(x, routes, weights)

    run(kept)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        y = run(kept)
    for p in chain(*weights.values()):
        p.data.mul_(0.5)
    kept.clear()
    graph.replay()
    assert torch.equal(y, run(None)) and torch.equal(y, run(kept))
