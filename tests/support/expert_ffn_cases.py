# SPDX-License-Identifier: Apache-2.0
"""Problems for the expert FFN, each recipe and formula, compared with the reference that rounds alike."""

import deepspeed.comm as dist
import torch

from ds_mxfp8_moe.compute.formula import ExpertFormula
from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.config import MXFP8MoEConfig, resolve
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.local import Local
from tests.support.reference_moe import reference

HIDDEN, FFN = 96, 160  # multiples of 32 but not of 128


def recipe(**keys):
    return resolve(MXFP8MoEConfig(enabled=True, **keys), "cpu")


BF16 = recipe(recipe="bf16")
RECIPES = {
    "bf16": BF16,
    "hp-32": recipe(scale_block_size=32),
    "hp-128": recipe(scale_block_size=128),
    "hp-32-floor": recipe(scale_block_size=32, scaling_mode="floor"),
    "mxfp8-32": recipe(recipe="mxfp8", scale_block_size=32),
    "mxfp8-128": recipe(recipe="mxfp8", scale_block_size=128),
    "all-wires-mxfp8": recipe(combine_fwd_dtype="mxfp8", dispatch_bwd_dtype="mxfp8"),
    "all-wires-bf16": recipe(dispatch_fwd_dtype="bf16", combine_bwd_dtype="bf16"),
    "bf16-preactivation": recipe(preactivation_dtype="bf16"),
}
FORMULAS = {
    "relu": dict(kind="mlp", activation="relu"),
    "gelu": dict(kind="mlp", activation="gelu"),
    "swiglu": dict(kind="gated", activation="silu"),
    "geglu": dict(kind="gated", activation="gelu_tanh"),
    "relu_squared": dict(kind="mlp", activation="relu_squared"),
    "swiglu_oai": dict(kind="gated", activation="swiglu_oai", alpha=1.702, limit=7.0),
    "packed-swiglu_oai": dict(kind="gated", activation="swiglu_oai", packed="up_gate", alpha=1.5, limit=5.0),
    "clamped-swiglu": dict(kind="gated", activation="silu", limit=5.0),
    "packed": dict(kind="gated", activation="silu", packed="gate_up"),
    "packed-reversed": dict(kind="gated", activation="silu", packed="up_gate"),
}


def formula(name):
    keys = dict(packed="none") | FORMULAS[name]
    return ExpertFormula(gate="gate", up="up", down="down", hidden_size=HIDDEN, ffn_size=FFN, **keys)


def make_experts(name, num, bias, dtype, hidden=HIDDEN, ffn=FFN):
    kind = FORMULAS[name]
    if kind["kind"] == "mlp":
        shapes = {"up": (ffn, hidden), "down": (hidden, ffn)}
    elif "packed" in kind:
        shapes = {"up": (2 * ffn, hidden), "down": (hidden, ffn)}
    else:
        shapes = {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    experts = []
    for _ in range(num):
        expert = {role: torch.randn(shape) / shape[1]**0.5 for role, shape in shapes.items()}
        if "limit" in kind:  # one value in twelve is clamped, or one in five
            expert |= {role: 4 * value for role, value in expert.items() if role != "down"}
        expert = {role: value.to(dtype) for role, value in expert.items()}
        if bias:
            expert |= {f"{role}_bias": (torch.randn(shape[0]) / 4).to(dtype) for role, shape in shapes.items()}
        experts.append(expert)
    return experts


def make_routes(routing, tokens, top_k, num_experts):
    scores = torch.rand(tokens, num_experts)
    expert = scores.topk(top_k, dim=1).indices
    if routing == "dropped":
        expert = torch.where(torch.rand(expert.shape) < 0.3, -1, expert)
    elif routing == "one-expert":
        expert = torch.full_like(expert, -1)
        expert[:, 0] = num_experts - 2
    elif routing == "nowhere":
        expert = torch.full_like(expert, -1)
    return expert, torch.rand(tokens, top_k)


def problem(world, name, bias=False, dtype=torch.float32, routing="random", tokens=(50, 37, 61, 8), top_k=2,
            num_experts=8, **sizes):
    torch.manual_seed(7)
    experts = make_experts(name, num_experts, bias, dtype, **sizes)
    hidden = experts[0]["up"].shape[1]
    xs = [torch.randn(tokens[r], hidden).to(dtype) for r in range(world)]
    grads = [torch.randn(tokens[r], hidden).to(dtype) for r in range(world)]
    routes = [make_routes(routing, tokens[r], top_k, num_experts) for r in range(world)]
    return experts, xs, grads, routes


def in_one_buffer(experts: list) -> list:
    """The experts' parameters as ZeRO lays them: one behind the other in one storage."""
    flat = torch.cat([value.reshape(-1) for expert in experts for value in expert.values()])
    views = iter(flat.split([value.numel() for expert in experts for value in expert.values()]))
    return [{role: next(views).view(value.shape) for role, value in expert.items()} for expert in experts]


def alone(name, **keys):
    """Tokens, gradient, routes and trained weights of a rank that has all experts."""
    experts, (x, ), (g, ), (routes, ) = problem(1, name, dtype=torch.bfloat16, **keys)
    weights = {role: [e[role].requires_grad_() for e in experts] for role in experts[0]}
    return x, g, Routes(expert_TK=routes[0], weight_TK=routes[1], num_experts=len(experts)), weights


def transport(world):
    return Collective(dist.get_world_group()) if world > 1 else Local()


def run_layer(recipe, name, flat=False, stacked=False, device="cpu", **kwargs):
    """One rank: forward and backward of its tokens; returns everything as float32."""
    world, rank = dist.get_world_size(), dist.get_rank()
    experts, xs, grads, routes = problem(world, name, **kwargs)
    local = len(experts) // world
    mine = [{role: value.to(device) for role, value in expert.items()}
            for expert in experts[rank * local:(rank + 1) * local]]
    mine = in_one_buffer(mine) if flat else mine
    if stacked:
        weights = {role: torch.stack([e[role] for e in mine]).requires_grad_() for role in mine[0]}
    else:
        weights = {role: [e[role].detach().requires_grad_() for e in mine] for role in mine[0]}
    x = xs[rank].to(device).requires_grad_()
    expert_TK, weight = routes[rank][0].to(device), routes[rank][1].to(device).requires_grad_()
    ffn = ExpertFFN(formula(name), recipe, transport(world), local)
    y = ffn(x, Routes(expert_TK=expert_TK, weight_TK=weight, num_experts=len(experts)), weights)
    y.backward(grads[rank].to(device))
    expert_grads = [{role: (values.grad[e] if stacked else values[e].grad).float().cpu()
                     for role, values in weights.items()} for e in range(local)]
    storages = {weights[role].grad.untyped_storage().data_ptr() for role in weights} if stacked else {}
    return {"y": y.detach().float().cpu(), "x": x.grad.float().cpu(), "weight": weight.grad.cpu(),
            "experts": expert_grads, "storages of gradients": len(storages)}


def compare(results, expected):
    """Worst SQNR of output, input gradient, routing weight gradient and each role's gradient."""
    got = {key: torch.cat([r[key] for r in results]) for key in ("y", "x", "weight")}
    want = {key: torch.cat(expected[key]) for key in got}
    got_experts = [grads for r in results for grads in r["experts"]]
    for role in got_experts[0]:
        got[role] = torch.stack([g[role] for g in got_experts])
        want[role] = torch.stack([g[role] for g in expected["experts"]])
    return {key: sqnr_db(want[key], got[key]) for key in got}


def assert_equals_the_reference(ranks, recipe, name, least=45, rescales_rows=False, **kwargs):
    world = ranks.world_size
    results = ranks.run(run_layer, recipe, name, **kwargs)
    given = {key: value for key, value in kwargs.items() if key not in ("flat", "stacked", "device")}
    experts, xs, grads, routes = problem(world, name, **given)
    worst = compare(results, reference(formula(name), recipe, experts, xs, routes, grads, world, rescales_rows))
    assert min(worst.values()) >= least, worst
    return results
