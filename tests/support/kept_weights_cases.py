# SPDX-License-Identifier: Apache-2.0
"""Casts counted in calls with and without kept weights."""

import contextlib
from collections import Counter
from itertools import chain
from unittest import mock

import torch

from ds_mxfp8_moe.compute import casts
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.transport.local import Local
from tests.support.expert_ffn_cases import RECIPES, formula, problem


@contextlib.contextmanager
def counted():
    """Counts the casts of weights, by whether they are transposed."""
    counts, plain = Counter(), casts.quantize_weights

    def quantize_weights(stacks, block_size, scaling_mode, transposed=False):
        counts[transposed] += 1
        return plain(stacks, block_size, scaling_mode, transposed)

    with mock.patch.object(casts, "quantize_weights", quantize_weights):
        yield counts


def parameters_of(experts):
    return {role: [torch.nn.Parameter(e[role]) for e in experts] for role in experts[0]}


def calls(weights, kept, recipe="hp-128", name="swiglu", count=3, dtypes=(torch.bfloat16, ), device="cpu"):
    """Outputs and gradients of some calls in a row, with other tokens each."""
    results = []
    for seed in range(count):
        torch.manual_seed(seed)
        _, (x, ), (g, ), (routes, ) = problem(1, name, dtype=torch.bfloat16)
        dtype = dtypes[seed % len(dtypes)]
        x, g = x.to(device, dtype).requires_grad_(), g.to(device, dtype)
        routes = Routes(expert_TK=routes[0].to(device), weight_TK=routes[1].to(device), num_experts=len(weights["up"]))
        ffn = ExpertFFN(formula(name), RECIPES[recipe], Local(), len(weights["up"]), kept=kept)
        y = ffn(x, routes, weights)
        flat = list(chain(*weights.values()))
        results += [y.detach(), *torch.autograd.grad(y, [x, *flat], g)]
    return results


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
