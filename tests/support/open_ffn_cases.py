# SPDX-License-Identifier: Apache-2.0
"""Experts with functions between the GEMMs that no kernel knows, compared with a loop."""

import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ds_mxfp8_moe.compute.formula import LowRank
from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.ffn.open_ffn import OpenFFN, OpenFormula
from tests.support.expert_ffn_cases import FFN, HIDDEN, compare, formula, problem, transport

ADAPTER_RANK = 8


class Model(torch.nn.Module):
    """What a model may compute between and behind the GEMMs of its experts."""

    def __init__(self, case, hidden=HIDDEN, ffn=FFN):
        super().__init__()
        self.case, generator = case, torch.Generator().manual_seed(3)
        if case in ("hostile", "normed"):
            self.scale = torch.nn.Parameter(torch.rand(hidden, generator=generator) + 0.5)
        if case == "hostile":
            self.slope = torch.nn.Parameter(torch.rand(ffn, generator=generator) + 0.5)
            self.shift = torch.nn.Parameter(torch.rand(hidden, generator=generator))

    def between(self, pre):
        if self.case == "mlp":
            return F.mish(pre)
        if self.case == "hostile":  # NaN in a row of zeros, and so are its gradients
            pre = pre / pre.norm(dim=-1, keepdim=True) * pre.shape[-1]**0.5
        gate, up = (pre[..., 0::2], pre[..., 1::2]) if self.case == "in_turn" else pre.chunk(2, dim=-1)
        if self.case == "hostile":
            return torch.tanh(self.slope * gate) * up
        if self.case == "in place":
            return F.silu(gate).mul_(up)
        return (F.silu(gate) if self.case in ("silu", "normed") else F.softplus(gate)) * up

    def after(self, y):
        if self.case == "hostile":  # NaN at 0 in the gradient of scale, and another value than 0 everywhere
            return y / y.norm(dim=-1, keepdim=True) * self.scale * y.shape[-1]**0.5 + self.shift
        return F.rms_norm(y, y.shape[-1:], self.scale.to(y.dtype), eps=1e-6)

    def formula(self):
        after = self.after if hasattr(self, "scale") else None
        return OpenFormula(self.between, after, in_turn=self.case == "in_turn")


def make_adapters(experts):
    """Factors of each GEMM, float32, for all experts."""
    generator, (_, H), N = torch.Generator().manual_seed(5), experts[0]["up"].shape, len(experts)
    G = sum(experts[0][role].shape[0] for role in ("gate", "up") if role in experts[0])
    shapes = {"up": (H, G), "down": (experts[0]["down"].shape[1], H)}
    return {name: (torch.randn(N, ADAPTER_RANK, inside, generator=generator) / inside**0.5,
                   torch.randn(N, outside, ADAPTER_RANK, generator=generator) / 8)
            for name, (inside, outside) in shapes.items()}


def reference(case, experts, xs, routes, grads, adapters=None):
    """Output and gradients of all ranks, by a loop over experts in float32: as `compare` takes them; and the gradients
    of the model's parameters and of the adapters' factors."""
    model = Model(case, xs[0].shape[1], experts[0]["down"].shape[1])
    leaves = [{role: value.float().requires_grad_() for role, value in expert.items()} for expert in experts]
    factors = {name: [one.clone().requires_grad_() for one in pair] for name, pair in (adapters or {}).items()}
    xs = [x.float().requires_grad_() for x in xs]
    weights = [weight.clone().requires_grad_() for _, weight in routes]
    ys = [torch.zeros_like(x) for x in xs]

    def product(name, roles, rows, e):
        whole = torch.cat([leaves[e][role] for role in roles])
        bias = [leaves[e][f"{role}_bias"] for role in roles if f"{role}_bias" in leaves[e]]
        made = F.linear(rows, whole, torch.cat(bias) if bias else None)
        return made if adapters is None else made + rows @ factors[name][0][e].t() @ factors[name][1][e].t()

    for rank, (expert_TK, _) in enumerate(routes):
        for e in range(len(experts)):
            token, choice = torch.where(expert_TK == e)
            pre = product("up", [role for role in ("gate", "up") if role in leaves[e]], xs[rank][token], e)
            if case == "in_turn":
                pre = torch.stack(pre.chunk(2, dim=1), dim=2).flatten(1)
            y = product("down", ["down"], model.between(pre), e)
            y = model.after(y) if hasattr(model, "scale") else y
            ys[rank] = ys[rank].index_add(0, token, y * weights[rank][token, choice].unsqueeze(1))
    torch.autograd.backward(ys, [g.float() for g in grads])

    def grad(leaf):
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    return {"y": [y.detach() for y in ys], "x": [grad(x) for x in xs], "weight": [grad(w) for w in weights],
            "experts": [{role: grad(leaf) for role, leaf in expert.items()} for expert in leaves],
            "parameters": {name: grad(p) for name, p in model.named_parameters()},
            "factors": {name: [grad(one) for one in pair] for name, pair in factors.items()}}


def run_layer(recipe, case, adapted=False, stacked=True, device="cpu", fused=None, how=None, **kwargs):
    """One rank: forward and backward of its tokens; everything as float32. `fused`: a formula that ExpertFFN runs."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    experts, xs, grads, routes = problem(world, "gelu" if case == "mlp" else "swiglu", **kwargs)
    local = len(experts) // world
    mine = slice(rank * local, (rank + 1) * local)
    weights = {role: [e[role].to(device) for e in experts[mine]] for role in experts[0]}
    weights = {role: torch.stack(one).requires_grad_() if stacked else [w.requires_grad_() for w in one]
               for role, one in weights.items()}
    adapters = {name: LowRank(*(one[mine].to(device).requires_grad_() for one in pair))
                for name, pair in make_adapters(experts).items()} if adapted else None
    x = xs[rank].to(device).requires_grad_()
    expert_TK, weight = routes[rank][0].to(device), routes[rank][1].to(device).requires_grad_()
    model = Model(case, x.shape[1], experts[0]["down"].shape[1]).to(device)
    args = recipe, transport(world), local
    ffn = OpenFFN(model.formula(), *args) if fused is None else ExpertFFN(formula(fused), *args)

    def call(x, weight):
        return ffn(x, Routes(expert_TK=expert_TK, weight_TK=weight, num_experts=len(experts)), weights,
                   adapters=adapters)

    if how in ("reentrant", "not reentrant"):
        y = checkpoint(lambda *args: 1.0 * call(*args), x, weight, use_reentrant=how == "reentrant")
    else:
        y = call(x, weight)
    y.backward(grads[rank].to(device))
    expert_grads = [{role: (values.grad[e] if stacked else values[e].grad).float().cpu()
                     for role, values in weights.items()} for e in range(local)]
    return {"y": y.detach().float().cpu(), "x": x.grad.float().cpu(), "weight": weight.grad.cpu(),
            "experts": expert_grads, "parameters": {name: p.grad.cpu() for name, p in model.named_parameters()},
            "factors": {name: [one.grad.cpu() for one in pair] for name, pair in (adapters or {}).items()}}


def decibels(results, case, adapted=False, **kwargs):
    """The SQNR of the output and of each gradient beside plain float32."""
    experts, xs, grads, routes = problem(len(results), "gelu" if case == "mlp" else "swiglu", **kwargs)
    expected = reference(case, experts, xs, routes, grads, make_adapters(experts) if adapted else None)
    found = compare(results, expected)
    for name, grad in expected["parameters"].items():
        found[name] = sqnr_db(grad, sum(result["parameters"][name] for result in results))
    for name, pair in expected["factors"].items():
        for letter, grad, ours in zip("AB", pair, zip(*(r["factors"][name] for r in results), strict=True),
                                      strict=True):
            found[f"{name} {letter}"] = sqnr_db(grad, torch.cat(ours))
    return found


def run(ranks, recipe, case, **kwargs):
    return [run_layer(recipe, case, **kwargs)] if ranks is None else ranks.run(run_layer, recipe, case, **kwargs)


def assert_near_plain_torch(ranks, recipe, case, least, **kwargs):
    results = run(ranks, recipe, case, **kwargs)
    found = decibels(results, case, **{key: value for key, value in kwargs.items()
                                       if key not in ("stacked", "device", "how")})
    assert min(found.values()) >= least, found
    return results


def flat(result):
    """All tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [one for part in (result.values() if isinstance(result, dict) else result) for one in flat(part)]


LEAST = 19  # dB beside plain float32, in MXFP8
