# SPDX-License-Identifier: Apache-2.0
"""One differentiable function: tokens and routes in, tokens out. What travels and what is multiplied is MXFP8.

Letters in tensor names: T tokens of this rank, K choices of a token, H hidden size, F FFN size, G width of the first
GEMM (2F where gate and up projections run as one, else F), E experts of this rank, P expert-sorted rows on this rank,
groups padded to 128 rows with zeros.

    forward    x_PH = dispatch(x_TH)         pre_PG = x_PH W1^T + b1     h_PF = w_P * act(pre_PG)
               y_PH = h_PF W2^T + w_P b2     y_TH = combine(y_PH)
    backward   g_PH = dispatch(g_TH)         t_PF = g_PH W2              dS_P = <t, act(pre)> + <g, b2>
               dpre_PG = t w act'(pre)       x_TH' = combine(dpre W1), with dS travelling beside it

The routing weight acts inside the activation, so combine adds plain rows and gradients travel unweighted, one copy a
rank. An expert of one Linear weighs its output rows instead.

Kept for backward: x_PH and h_PF in MXFP8, once; pre_PG in MXFP8 or the tokens' dtype (`recipe.preactivation`); the
expert weights themselves, quantised again in backward. In a recipe without quantisation, all in the tokens' dtype.

Operands of the weight gradients dW1 = dpre^T x and dW2 = g^T h, which contract over rows:

    operand                 wgrad "hp"            wgrad "mxfp8"
    x, h                    dequantised MXFP8     MXFP8 re-scaled along the rows
    g that came as MXFP8    dequantised MXFP8     MXFP8 re-scaled along the rows
    g that came unquantised as it came            quantised along the rows
    dpre, linear's w * g    in the tokens' dtype  quantised along the rows
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from deepspeed.utils.logging import warning_once

from .config import Recipe
from .experts import ACTIVATIONS, ROLES, ExpertFormula
from .grouped_gemm import grouped_mm, grouped_mm_wgrad
from .mx import MXTensor, quantize, quantize_tiles, transpose_rescale
from .routing import Routes
from .transport import Plan, Wire


def _silu_slope(x):
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _gelu_slope(x):
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh_slope(x):
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)


# Derivatives of experts.ACTIVATIONS, on float32.
SLOPES: dict[str, Callable] = {
    "relu": lambda x: (x > 0).to(x.dtype),
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "silu": _silu_slope,
}


@dataclass(frozen=True, eq=False)
class ExpertFFN:
    """What one layer's experts compute, in which recipe, over which transport.

    Attributes:
        timed: `timed("dispatch")` and `timed("combine")` give context managers around forward's exchanges.
    """

    formula: ExpertFormula
    recipe: Recipe
    transport: Any
    num_local_experts: int
    min_tokens_per_expert: int = 0
    name: str = "MoE layer"
    timed: Callable[[str], AbstractContextManager] = field(default=lambda phase: nullcontext())

    @torch.compiler.disable  # sizes come from the host: torch.compile breaks its graph here and goes on behind
    def __call__(self, x_TH: torch.Tensor, routes: Routes,
                 weights: dict[str, torch.Tensor | Sequence[torch.Tensor] | None]) -> torch.Tensor:
        """Sends tokens through their experts.

        Args:
            x_TH: [T, H] float32, bfloat16 or float16; T may be 0 and may differ between ranks.
            routes: of these T tokens.
            weights: for each of ROLES that the formula has, E tensors ([out, in], biases [out]) or one stacked
                [E, ...]. Every one of them gets a gradient, zeros where no token came.

        Returns:
            [T, H], x's dtype (under autocast, autocast's): sum over choices of weight * expert(x); 0 where no choice
            was kept. Collective: every rank of the group calls it, equally often.
        """
        device_type = x_TH.device.type
        if torch.is_autocast_enabled(device_type):
            x_TH = x_TH.to(torch.get_autocast_dtype(device_type))
        layout, tensors = [], []
        for role in ROLES:
            value = weights.get(role)
            if value is not None:
                stacked = isinstance(value, torch.Tensor)
                layout.append((role, 0 if stacked else len(value)))
                tensors += [value] if stacked else list(value)
        # A tensor that depends on x and keeps nothing of it alive: what a second derivative would have to pass.
        depends_on_x = x_TH[:0].clone()
        return _Function.apply(self, tuple(layout), routes.expert_TK, depends_on_x, x_TH, routes.weight_TK, *tensors)


def _unflatten(layout: tuple, tensors: Sequence) -> dict:
    """The inverse of `ExpertFFN.__call__`'s flattening: role -> one stacked tensor or a list of E."""
    weights, start = {}, 0
    for role, size in layout:
        weights[role] = tensors[start] if size == 0 else list(tensors[start:start + size])
        start += max(size, 1)
    return weights


def _stack(value) -> torch.Tensor | None:
    """[E, ...] from what a role holds."""
    if value is None or isinstance(value, torch.Tensor):
        return None if value is None else value.detach()
    return torch.stack([v.detach() for v in value])


class _Layer:
    """The arithmetic of one call: formula and recipe applied to rows. No state beyond its operands."""

    def __init__(self, formula: ExpertFormula, recipe: Recipe, plan: Plan, weights: dict, dtype: torch.dtype):
        self.formula, self.recipe, self.plan, self.dtype = formula, recipe, plan, dtype
        gate, up, self.down_EHF = (_stack(weights.get(role)) for role in ("gate", "up", "down"))
        gate_bias, up_bias, self.down_bias_EH = (_stack(weights.get(role))
                                                 for role in ("gate_bias", "up_bias", "down_bias"))
        self.up_EGH = up if gate is None else torch.cat([gate, up], dim=1)
        self.up_bias_EG = self._joined_bias(gate, up, gate_bias, up_bias)

    @staticmethod
    def _joined_bias(gate, up, gate_bias, up_bias):
        if gate is None or (gate_bias is None and up_bias is None):
            return up_bias
        zeros = up.new_zeros(up.shape[:2])
        return torch.cat([zeros if b is None else b for b in (gate_bias, up_bias)], dim=1)

    def quantized(self, x):
        """The MXFP8 form of rows, for GEMMs that contract over the last axis; as it is in an unquantised recipe."""
        if not self.recipe.quantize_gemm or isinstance(x, MXTensor):
            return x
        mx = quantize(x, self.recipe.block_size, self.recipe.scaling_mode)
        return MXTensor(mx.qdata, mx.scale, mx.block_size, self.dtype)

    def _weight(self, w_ENK: torch.Tensor, contract_rows: bool) -> torch.Tensor:
        """Weights rounded as their GEMM sees them, plain [E, N, K]; `contract_rows`: the GEMM sums over N, not K."""
        recipe = self.recipe
        if not recipe.quantize_gemm:
            return w_ENK.to(self.dtype)
        exact = torch.float32 if self.dtype == torch.float32 else torch.bfloat16
        if recipe.block_size == 128:
            return quantize_tiles(w_ENK, recipe.scaling_mode).dequantize(exact)
        if contract_rows:
            w_EKN = quantize(w_ENK.transpose(1, 2), recipe.block_size, recipe.scaling_mode)
            return w_EKN.dequantize(exact).transpose(1, 2)
        return quantize(w_ENK, recipe.block_size, recipe.scaling_mode).dequantize(exact)

    def forward_gemm(self, x_PK, w_ENK, bias_EN) -> torch.Tensor:
        out = grouped_mm(x_PK, self._weight(w_ENK, contract_rows=False).transpose(1, 2), self.plan.group_ends_E,
                         self.dtype)
        return out if bias_EN is None else (out + self.bias_rows(bias_EN)).to(self.dtype)

    def dgrad_gemm(self, g_PN, w_ENK) -> torch.Tensor:
        return grouped_mm(g_PN, self._weight(w_ENK, contract_rows=True), self.plan.group_ends_E, self.dtype)

    def wgrad_gemm(self, g_PN, a_PK, dtype) -> torch.Tensor:
        """[E, N, K]; operands by the table above."""
        if self.recipe.wgrad == "mxfp8":
            g_PN, a_PK = self._along_rows(g_PN), self._along_rows(a_PK)
        return grouped_mm_wgrad(g_PN, a_PK, self.plan.group_ends_E, dtype)

    def _along_rows(self, x_PN) -> torch.Tensor:
        block, mode = self.recipe.block_size, self.recipe.scaling_mode
        mx = transpose_rescale(x_PN, block, mode) if isinstance(x_PN, MXTensor) else quantize(x_PN.t(), block, mode)
        return mx.dequantize(torch.float32 if self.dtype == torch.float32 else torch.bfloat16).t()

    def bias_rows(self, bias_EN) -> torch.Tensor:
        """Each row's bias [P, N]. Padding rows get one too: their routing weight is 0."""
        rows = torch.arange(self.plan.num_rows, device=bias_EN.device)
        return bias_EN.index_select(0, torch.searchsorted(self.plan.group_ends_E, rows.int(), right=True))

    def group_sums(self, x_PN) -> torch.Tensor:
        """[E, N] float32: sums over each group's rows, in a fixed order."""
        starts = (0, *self.plan.group_ends[:-1])
        return torch.stack([x_PN[s:e].float().sum(0) for s, e in zip(starts, self.plan.group_ends, strict=True)])

    def _halves(self, pre_PG: torch.Tensor) -> tuple:
        first, second = pre_PG.float().chunk(2, dim=-1)
        return (second, first) if self.formula.packed == "up_gate" else (first, second)

    def hidden(self, pre_PG, weight_P) -> torch.Tensor:
        """w * act(pre), float32 [P, F]."""
        return self._activated(pre_PG) * weight_P.unsqueeze(1)

    def _activated(self, pre_PG) -> torch.Tensor:
        value = ACTIVATIONS[self.formula.activation]
        if self.formula.kind == "mlp":
            return value(pre_PG.float())
        gate_PF, up_PF = self._halves(pre_PG)
        return value(gate_PF) * up_PF

    def hidden_backward(self, t_PF, pre_PG, weight_P) -> tuple:
        """From t = g W2: dpre float32 [P, G], and <t, act(pre)> float32 [P]."""
        value, slope = ACTIVATIONS[self.formula.activation], SLOPES[self.formula.activation]
        t_PF = t_PF.float()
        dweight_P = (t_PF * self._activated(pre_PG)).sum(-1)
        t_PF = t_PF * weight_P.unsqueeze(1)
        if self.formula.kind == "mlp":
            return t_PF * slope(pre_PG.float()), dweight_P
        gate_PF, up_PF = self._halves(pre_PG)
        halves = [t_PF * up_PF * slope(gate_PF), t_PF * value(gate_PF)]
        if self.formula.packed == "up_gate":
            halves.reverse()
        return torch.cat(halves, dim=-1), dweight_P

    def keep_preactivation(self, pre_PG):
        if self.recipe.preactivation != "mxfp8":
            return pre_PG
        # Gate and up are quantised apart: no block lies in both.
        halves = 2 if self.formula.kind == "gated" else 1
        return quantize(pre_PG.unflatten(-1, (halves, -1)), self.recipe.block_size, self.recipe.scaling_mode)

    @staticmethod
    def read_preactivation(kept) -> torch.Tensor:
        return kept.dequantize(torch.float32).flatten(-2) if isinstance(kept, MXTensor) else kept


def _wire(recipe: Recipe, dtype: str) -> Wire:
    return Wire(dtype == "mxfp8", recipe.block_size, recipe.scaling_mode)


def _unquantized(recipe: Recipe) -> Recipe:
    return replace(recipe, quantize_gemm=False, wgrad="hp", dispatch_fwd="bf16", combine_fwd="bf16",
                   dispatch_bwd="bf16", combine_bwd="bf16", preactivation="bf16")


class _NoSecondDerivative(torch.autograd.Function):
    """Passes a first derivative on, and explains itself where somebody differentiates it again."""

    @staticmethod
    def forward(ctx, grad, *_depends_on):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("the MXFP8 expert FFN has no second derivative: leave the layer out of what is "
                           "differentiated twice ('exclude' in the mxfp8_moe section), or drop create_graph=True")


class _Function(torch.autograd.Function):

    @staticmethod
    def forward(ctx, ffn: ExpertFFN, layout, expert_TK, depends_on_x, x_TH, weight_TK, *tensors):
        plan = ffn.transport.plan(expert_TK, ffn.num_local_experts)
        recipe = ffn.recipe
        if recipe.quantize_gemm and plan.tokens_per_expert < ffn.min_tokens_per_expert:
            warning_once(f"{ffn.name}: some batches have fewer than min_tokens_per_expert = "
                         f"{ffn.min_tokens_per_expert} tokens per expert; it runs the bf16 recipe on them")
            recipe = _unquantized(recipe)
        layer = _Layer(ffn.formula, recipe, plan, _unflatten(layout, tensors), x_TH.dtype)
        with ffn.timed("dispatch"):
            x_PH, weight_P = ffn.transport.dispatch(plan, x_TH, _wire(recipe, recipe.dispatch_fwd), weight_TK)
        x_PH = layer.quantized(x_PH)
        pre_PG = layer.forward_gemm(x_PH, layer.up_EGH, layer.up_bias_EG)
        if ffn.formula.kind == "linear":
            h_PF = pre_PG.new_empty(0)
            y_PH = pre_PG.float() * weight_P.unsqueeze(1)
            pre_PG = pre_PG.new_empty(0)
        else:
            h_PF = layer.hidden(pre_PG, weight_P)
            h_PF = layer.quantized(h_PF) if recipe.quantize_gemm else h_PF.to(x_TH.dtype)
            pre_PG = layer.keep_preactivation(pre_PG) if any(ctx.needs_input_grad) else None
            y_PH = layer.forward_gemm(h_PF, layer.down_EHF, None)
            if layer.down_bias_EH is not None:
                y_PH = y_PH.float() + layer.bias_rows(layer.down_bias_EH) * weight_P.unsqueeze(1)
        with ffn.timed("combine"):
            y_TH, _ = ffn.transport.combine(plan, y_PH, _wire(recipe, recipe.combine_fwd), x_TH.dtype)
        ctx.call = (ffn, layout, plan, recipe, x_TH.dtype)
        ctx.kept = _Kept(ctx, x_PH, pre_PG, h_PF, weight_P, (depends_on_x, weight_TK, *tensors))
        return y_TH

    @staticmethod
    def backward(ctx, g_TH):
        ffn, layout, plan, recipe, dtype = ctx.call
        x_PH, pre_PG, h_PF, weight_P, (depends_on_x, weight_TK, *tensors) = ctx.kept.read(ctx)
        with torch.no_grad():
            weights = _unflatten(layout, tensors)
            layer = _Layer(ffn.formula, recipe, plan, weights, dtype)
            g_PH, _ = ffn.transport.dispatch(plan, g_TH.to(dtype), _wire(recipe, recipe.combine_bwd),
                                             phase="dispatch of the gradient")
            needs = _unflatten(layout, ctx.needs_input_grad[6:])
            grads = _backward_rows(layer, g_PH, x_PH, pre_PG, h_PF, weight_P, weights, needs)
            # Whoever needs it or not: what one rank needs must not decide what all of them exchange.
            x_grad, weight_grad = ffn.transport.combine(plan, grads["x"], _wire(recipe, recipe.dispatch_bwd), dtype,
                                                        grads["weight"], phase="combine of the gradient")
            flat = []
            for role, size in layout:
                grad = grads.get(role)
                flat += [grad] if size == 0 else list(grad.unbind(0)) if grad is not None else [None] * size
        out = [x_grad, weight_grad, *flat]
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (g_TH, depends_on_x, weight_TK, *tensors)
            out = [g if g is None else _NoSecondDerivative.apply(g, *inputs) for g in out]
        needed = (g if need else None for g, need in zip(out, ctx.needs_input_grad[4:], strict=True))
        return None, None, None, None, *needed


class _Kept:
    """What backward needs, through save_for_backward: always the same tensors in the same order."""

    def __init__(self, ctx, x_PH, pre_PG, h_PF, weight_P, inputs):
        self.kinds, saved = [], []
        for value in (x_PH, pre_PG, h_PF):
            if isinstance(value, MXTensor):
                self.kinds.append((value.block_size, value.orig_dtype))
                saved += [value.qdata, value.scale]
            else:
                self.kinds.append(None)
                saved.append(value)
        ctx.save_for_backward(*saved, weight_P, *inputs)

    def read(self, ctx) -> tuple:
        saved, values = list(ctx.saved_tensors), []
        for kind in self.kinds:
            values.append(saved.pop(0) if kind is None else MXTensor(saved.pop(0), saved.pop(0), *kind))
        return *values, saved[0], saved[1:]


def _backward_rows(layer: _Layer, g_PH, x_PH, kept_PG, h_PF, weight_P, weights: dict, needs: dict) -> dict:
    """Everything between the two exchanges of backward: role -> stacked gradient, "x" [P, H], "weight" [P]."""
    grads = {}

    def needed(role):
        need = needs.get(role)
        return need if isinstance(need, bool) else need is not None and any(need)

    def dtype_of(role):
        value = weights[role]
        return (value if isinstance(value, torch.Tensor) else value[0]).dtype

    plain_g = g_PH.dequantize(torch.float32) if isinstance(g_PH, MXTensor) else g_PH
    if layer.formula.kind == "linear":
        t_PH = layer.dgrad_gemm(layer.quantized(g_PH), layer.up_EGH).float()
        plain_x = x_PH.dequantize(torch.float32) if isinstance(x_PH, MXTensor) else x_PH.float()
        weight = (t_PH * plain_x).sum(-1)
        weighted_g = (plain_g.float() * weight_P.unsqueeze(1)).to(layer.dtype)
        if needed("up"):
            grads["up"] = layer.wgrad_gemm(weighted_g, x_PH, dtype_of("up"))
        if layer.up_bias_EG is not None:
            weight += (plain_g.float() * layer.bias_rows(layer.up_bias_EG)).sum(-1)
            grads["up_bias"] = layer.group_sums(weighted_g).to(dtype_of("up_bias"))
        return {**grads, "x": t_PH * weight_P.unsqueeze(1), "weight": weight}

    pre_PG = layer.read_preactivation(kept_PG)
    t_PF = layer.dgrad_gemm(layer.quantized(g_PH), layer.down_EHF)
    dpre_PG, weight = layer.hidden_backward(t_PF, pre_PG, weight_P)
    if needed("down"):
        grads["down"] = layer.wgrad_gemm(g_PH, h_PF, dtype_of("down"))
    if layer.down_bias_EH is not None:
        weight += (plain_g.float() * layer.bias_rows(layer.down_bias_EH)).sum(-1)
        grads["down_bias"] = layer.group_sums(plain_g.float() * weight_P.unsqueeze(1)).to(dtype_of("down_bias"))
    rounded = dpre_PG.to(layer.dtype)
    grads["x"] = layer.dgrad_gemm(layer.quantized(dpre_PG) if layer.recipe.quantize_gemm else rounded, layer.up_EGH)
    grads["weight"] = weight
    roles = ("gate", "up") if "gate" in weights else ("up", )
    if any(needed(role) for role in roles):
        halves = layer.wgrad_gemm(rounded, x_PH, dtype_of("up")).chunk(len(roles), dim=1)
        grads.update(zip(roles, halves, strict=True))
    if layer.up_bias_EG is not None:
        for role, half in zip(roles, layer.group_sums(dpre_PG).chunk(len(roles), dim=1), strict=True):
            if f"{role}_bias" in weights:
                grads[f"{role}_bias"] = half.to(dtype_of(f"{role}_bias"))
    return grads
