# SPDX-License-Identifier: Apache-2.0
"""Experts with low-rank factors, compared with merged weights."""

import torch

from ds_mxfp8_moe.compute.formula import LowRank
from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.transport.local import Local
from tests.support.expert_ffn_cases import BF16, RECIPES, formula, problem

SIZES = dict(hidden=256, ffn=512, tokens=(256, ), num_experts=4)


def run(recipe, dtype, device="cpu", merged=False, calls=1, rank=8):
    """Output, and gradients by name: of the tokens, of the routing weights and of the factors."""
    experts, (x, ), (g, ), ((expert_TK, weight_TK), ) = problem(1, "swiglu", dtype=dtype, **SIZES)
    weights = {role: torch.stack([e[role] for e in experts]).to(device) for role in experts[0]}
    factors = {}
    for name, (inside, outside) in {"up": (256, 2 * 512), "down": (512, 256)}.items():
        factors[f"{name} A"] = torch.randn(4, rank, inside) / inside**0.5
        factors[f"{name} B"] = torch.randn(4, outside, rank) / rank**0.5
    leaves = {"x": x, "weight": weight_TK} | {name: factor.to(dtype) for name, factor in factors.items()}
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in leaves.items()}
    adapters = {name: LowRank(leaves[f"{name} A"], leaves[f"{name} B"]) for name in ("up", "down")}
    if merged:
        delta = {name: b @ a for name, (a, b) in adapters.items()}
        gate, up = delta["up"].chunk(2, dim=1)
        weights = {"gate": weights["gate"] + gate, "up": weights["up"] + up, "down": weights["down"] + delta["down"]}
    ffn, found = ExpertFFN(formula("swiglu"), recipe, Local(), 4), []
    for _ in range(calls):
        y = ffn(leaves["x"], Routes(expert_TK=expert_TK.to(device), weight_TK=leaves["weight"], num_experts=4),
                weights, adapters=None if merged else adapters)
        grads = torch.autograd.grad(y, list(leaves.values()), g.to(device))
        found.append({"y": y.detach()} | dict(zip(leaves, grads, strict=True)))
    return found


def decibels(recipe, dtype, device="cpu"):
    """Beside merged weights in float32, without quantization."""
    (exact, ), (ours, ) = run(BF16, torch.float32, merged=True), run(recipe, dtype, device)
    return {name: sqnr_db(exact[name], ours[name].float().cpu()) for name in exact}


def assert_equals_merged_weights(recipe_name, dtype, device="cpu"):
    db = decibels(RECIPES[recipe_name], dtype, device)
    least = {torch.float32: 100, torch.bfloat16: 35}[dtype] if recipe_name == "bf16" else 20
    assert len(db) == 7 and min(db.values()) >= least, db
