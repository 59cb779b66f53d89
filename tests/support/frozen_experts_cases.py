# SPDX-License-Identifier: Apache-2.0
"""Calls of frozen experts beside kept weights, of those in MXFP4 beside MXFP8, and with adapters merged into them."""

import torch

from ds_mxfp8_moe.compute.formula import LowRank
from ds_mxfp8_moe.compute.mxfp4 import MXFP4Weights, quantize
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.ffn.frozen_weights import FrozenWeights
from ds_mxfp8_moe.ffn.kept_weights import KeptWeights
from ds_mxfp8_moe.transport.local import Local
from tests.support.expert_ffn_cases import FFN, HIDDEN, RECIPES, formula, problem


def in_mxfp4(expert):
    """The weights of one expert of a problem, as a file in MXFP4 has them: of both GEMMs."""
    return {"up": quantize(torch.cat([expert["gate"], expert["up"]])), "down": quantize(expert["down"])}


def calls(frozen, recipe, routing, tokens=50, name="swiglu", count=3, device="cpu", files=None, merge_aware=False):
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
                held.write(gemm, slice(i, i + 1),
                           MXFP4Weights(*(part[None].to(device) for part in weight.buffers), weight.dtype))
    results = []
    for seed in range(count):
        torch.manual_seed(seed)
        _, (x, ), (g, ), (routes, ) = problem(1, name, dtype=torch.bfloat16, routing=routing, tokens=(tokens, ))
        x, weight_TK = (x * (seed + 1)).to(device).requires_grad_(), routes[1].to(device).requires_grad_()
        factors = [torch.randn(shape, dtype=torch.bfloat16).to(device).requires_grad_() for shape in (
            (8, 8, HIDDEN), (8, 2 * FFN, 8), (8, 8, FFN), (8, HIDDEN, 8))]
        y = ExpertFFN(formula(name), RECIPES[recipe], Local(), 8, kept=None if frozen else KeptWeights(),
                      merge_aware=merge_aware)(
            x, Routes(expert_TK=routes[0].to(device), weight_TK=weight_TK, num_experts=8), {} if frozen else stacks,
            adapters={"up": LowRank(*factors[:2]), "down": LowRank(*factors[2:])}, frozen=held)
        results += [y.detach(), *torch.autograd.grad(y, [x, weight_TK, *factors], g.to(device))]
    return results


def merge_aware_call(frozen, recipe, device="cpu", dtype=torch.bfloat16, size=0.1):
    """A call with merged adapters, and one with the merged weights, held without adapters: two lists of the output and
    of the gradients of tokens and routing weights. Then the first call's gradients of the adapters, and those of plain
    torch in float32, where the rounding of dequantized weights is straight through.

    `size`: of the update beside the weights.
    """
    experts, (x, ), (g, ), (routes, ) = problem(1, "swiglu", dtype=torch.bfloat16, tokens=(200, ))
    held, E = frozen(8, HIDDEN, FFN, torch.bfloat16, device), 8
    for i, expert in enumerate(experts):
        held.put(i, expert["gate"], expert["down"], expert["up"], "rceil")
    sizes = {"up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
    factors = [torch.randn(shape).div(shape[-1]**0.5).mul(size if i % 2 else 1).to(dtype)
               for i, shape in enumerate(shape for N, K in sizes.values() for shape in ((E, 8, K), (E, N, 8)))]
    merged = FrozenWeights(8, HIDDEN, FFN, torch.bfloat16, device)

    def run(weights, *leaves, merge_aware):
        leaves = [leaf.to(device).requires_grad_() for leaf in leaves]
        x, weight_TK, *low = leaves
        adapters = {name: LowRank(*low[2 * i:2 * i + 2]) for i, name in enumerate(sizes)} if low else {}
        for name, adapter in adapters.items():
            low_rank = LowRank(*(factor.detach() for factor in adapter))
            for i in range(E):
                merged.write(name, slice(i, i + 1), weights.tiles(name, slice(i, i + 1), {name: low_rank}))
        y = ExpertFFN(formula("swiglu"), RECIPES[recipe], Local(), 8, merge_aware=merge_aware)(
            x, Routes(expert_TK=routes[0].to(device), weight_TK=weight_TK, num_experts=8), {}, adapters=adapters,
            frozen=weights)
        return [y.detach(), *torch.autograd.grad(y, leaves, g.to(device))]

    y, dx, dweight, *found = run(held, x, routes[1], *factors, merge_aware=True)
    plain = run(merged, x, routes[1], merge_aware=False)

    leaves = [factor.float().requires_grad_() for factor in factors]
    straight = {}
    for i, name in enumerate(sizes):
        exact = held.tiles(name).dequantize(torch.float32).cpu() + leaves[2 * i + 1] @ leaves[2 * i]
        straight[name] = exact + (merged.tiles(name).dequantize(torch.float32).cpu() - exact).detach()
    total = torch.zeros(len(x), HIDDEN)
    for e in range(E):
        gate, up = (x.float() @ straight["up"][e].t()).chunk(2, dim=1)
        weight_T1 = (routes[1] * (routes[0] == e)).sum(1, keepdim=True)
        total = total + weight_T1 * ((torch.nn.functional.silu(gate) * up) @ straight["down"][e].t())
    wanted = torch.autograd.grad(total, leaves, g.float())
    return [y, dx, dweight], plain, found, wanted


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
