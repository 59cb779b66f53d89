# SPDX-License-Identifier: Apache-2.0
"""Calls of frozen experts beside kept weights, and of frozen experts in MXFP4 beside MXFP8."""

import torch

from ds_mxfp8_moe.compute.formula import LowRank
from ds_mxfp8_moe.compute.mxfp4 import MXFP4Weights, quantize
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.ffn.kept_weights import KeptWeights
from ds_mxfp8_moe.transport.local import Local
from tests.support.expert_ffn_cases import FFN, HIDDEN, RECIPES, formula, problem


def in_mxfp4(expert):
    """The weights of one expert of a problem, as a file in MXFP4 has them: of both GEMMs."""
    return {"up": quantize(torch.cat([expert["gate"], expert["up"]])), "down": quantize(expert["down"])}


def calls(frozen, recipe, routing, tokens=50, name="swiglu", count=3, device="cpu", files=None):
    """Outputs and gradients of some calls with the same frozen weights.

    `frozen`: held in the format of this class, or not if None. `files`: what `in_mxfp4` returns of an expert, changed
    by this function, stands for the weights.
    """
    experts, _, _, _ = problem(1, name, dtype=torch.bfloat16)
    stacks = {role: torch.nn.Parameter(torch.stack([e[role] for e in experts]).to(device), requires_grad=False)
              for role in experts[0]}
    held = None
    if frozen:
        held = frozen(len(experts), HIDDEN, FFN, torch.bfloat16, device)
        for i, expert in enumerate(experts):
            if files is None:
                held.put(i, expert["gate"], expert["down"], expert["up"], "rceil")
            for gemm, weight in files(in_mxfp4(expert)).items() if files else ():
                held.write(gemm, i, MXFP4Weights(*(part.to(device) for part in weight.buffers), weight.dtype))
    results = []
    for seed in range(count):
        torch.manual_seed(seed)
        _, (x, ), (g, ), (routes, ) = problem(1, name, dtype=torch.bfloat16, routing=routing, tokens=(tokens, ))
        x, weight_TK = (x * (seed + 1)).to(device).requires_grad_(), routes[1].to(device).requires_grad_()
        factors = [torch.randn(shape, dtype=torch.bfloat16).to(device).requires_grad_() for shape in (
            (8, 8, HIDDEN), (8, 2 * FFN, 8), (8, 8, FFN), (8, HIDDEN, 8))]
        y = ExpertFFN(formula(name), RECIPES[recipe], Local(), 8, kept=None if frozen else KeptWeights())(
            x, Routes(expert_TK=routes[0].to(device), weight_TK=weight_TK, num_experts=8), {} if frozen else stacks,
            adapters={"up": LowRank(*factors[:2]), "down": LowRank(*factors[2:])}, frozen=held)
        results += [y.detach(), *torch.autograd.grad(y, [x, weight_TK, *factors], g.to(device))]
    return results


def as_it_is(weights):
    return weights


def far_apart(weights):
    """With scales that tiles of MXFP8 do not hold exactly."""
    changed = {}
    for gemm, weight in weights.items():
        scales = weight.scale_bytes.clone()
        scales[::3] -= 18
        changed[gemm] = MXFP4Weights.of(weight.codes, scales, weight.dtype)
    return changed
