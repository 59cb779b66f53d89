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
Which kernels compute it: kernels.py.

Operands of the weight gradients dW1 = dpre^T x and dW2 = g^T h, which contract over rows:

    operand                 wgrad "hp"            wgrad "mxfp8"
    x, h                    dequantised MXFP8     MXFP8 re-scaled along the rows
    g that came as MXFP8    dequantised MXFP8     MXFP8 re-scaled along the rows
    g that came unquantised as it came            quantised along the rows; on Hopper, in blocks of 128, the MXFP8
    dpre, linear's w * g    in the tokens' dtype  form that dgrad reads, re-scaled

The biases' gradients are float32 sums of g and of dpre in the tokens' dtype.
"""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.utils.logging import warning_once

from . import kernels
from .activation import activate, activate_backward, add_weighted_bias, bias_rows, group_sums
from .config import Recipe
from .experts import ROLES, ExpertFormula
from .grouped_gemm import grouped_mm, grouped_mm_parts, grouped_mm_wgrad_rows
from .mx import MXTensor
from .routing import Routes
from .transport import Arrival, Feed, Pending, Plan, Transport, Wire
from .transport.deadline import tell_peers_on_error


@dataclass(frozen=True, eq=False)
class ExpertFFN:
    """What one layer's experts compute, in which recipe, over which transport.

    Attributes:
        min_tokens_per_expert: below it, the mean over the group, the layer computes unquantised; None: below what is
            faster quantised.
        timed: `timed("dispatch")` and `timed("combine")` give context managers around forward's exchanges, as far as
            they run alone.
    """

    formula: ExpertFormula
    recipe: Recipe
    transport: Transport
    num_local_experts: int
    min_tokens_per_expert: int | None = 0
    name: str = "MoE layer"
    timed: Callable[[str], AbstractContextManager] = field(default=lambda phase: nullcontext())

    def fewest_tokens(self, device: torch.device) -> float:
        """`fewest_tokens` of this layer."""
        return fewest_tokens(self.formula, self.recipe, self.min_tokens_per_expert, self.num_local_experts, device)

    @torch.compiler.disable  # sizes come from the host: torch.compile breaks its graph here and goes on behind
    @tell_peers_on_error
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
        with _without_autocast(device_type):
            return _Function.apply(self, tuple(layout), torch.is_grad_enabled(), routes.expert_TK, depends_on_x, x_TH,
                                   routes.weight_TK, *tensors)


def _without_autocast(device_type: str) -> AbstractContextManager:
    """Every dtype is chosen here; and autocast to one 16-bit dtype refuses to join tensors of the other."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _unflatten(layout: tuple, tensors: Sequence) -> dict:
    """The inverse of `ExpertFFN.__call__`'s flattening: role -> one stacked tensor or a list of E."""
    weights, start = {}, 0
    for role, size in layout:
        weights[role] = tensors[start] if size == 0 else list(tensors[start:start + size])
        start += max(size, 1)
    return weights


def _stack(value) -> torch.Tensor | None:
    """[E, ...] from what a role holds, dense."""
    return None if value is None else kernels.stacked([value]).contiguous()


class _Layer:
    """The arithmetic of one call: formula and recipe applied to rows.

    Attributes:
        plan: None until the rows are known.
        ahead: weights quantised before `forward_gemm` asks for them, in its order.
    """

    def __init__(self, formula: ExpertFormula, recipe: Recipe, plan: Plan | None, weights: dict, dtype: torch.dtype):
        self.formula, self.recipe, self.plan, self.dtype = formula, recipe, plan, dtype
        self.ahead: list[MXTensor] = []
        self.ups = [weights[role] for role in ("gate", "up") if role in weights]
        self.down = [weights[role] for role in ("down", ) if role in weights]
        self.up_bias_EG, self.down_bias_EH = self._up_bias(weights), _stack(weights.get("down_bias"))
        self.layout = "mlp" if formula.kind != "gated" else "gate_up" if formula.packed == "none" else formula.packed

    @staticmethod
    def _up_bias(weights: dict) -> torch.Tensor | None:
        biases = [_stack(weights.get(f"{role}_bias")) for role in ("gate", "up") if role in weights]
        if all(bias is None for bias in biases):
            return None
        known = next(bias for bias in biases if bias is not None)
        return torch.cat([torch.zeros_like(known) if bias is None else bias for bias in biases], dim=1)

    def quantized(self, x_PN: torch.Tensor) -> torch.Tensor:
        """The MXFP8 form of rows, for GEMMs that contract over the last axis; as it is in an unquantised recipe."""
        if not self.recipe.quantize_gemm or isinstance(x_PN, MXTensor):
            return x_PN
        return kernels.quantize(x_PN, self.recipe.block_size, self.recipe.scaling_mode, scale_k_major=True)

    def quantized_gradient(self, g_PN: torch.Tensor, wgrad: bool) -> tuple:
        """What the input gradient's and, if wanted, the weight gradient's GEMM read of a gradient, as the table above
        has it, and whether the latter is in column form."""
        if wgrad and self.reads_columns(g_PN):
            return *kernels.quantize_both(g_PN, self.recipe.block_size, self.recipe.scaling_mode), True
        rows = self.quantized(g_PN)
        return rows, rows if self.wgrad_quantized else g_PN, False

    def wgrad_operand(self, g_PN: torch.Tensor) -> tuple:
        """The latter two for a gradient that the weight gradient's GEMM alone reads."""
        if self.reads_columns(g_PN):
            return kernels.quantize_columns(g_PN, self.recipe.block_size, self.recipe.scaling_mode), True
        return self.quantized(g_PN) if self.wgrad_quantized else g_PN, False

    def reads_columns(self, g_PN: torch.Tensor) -> bool:
        """Whether the weight gradient's GEMM reads a gradient in column form, quantised along the rows."""
        return self.wgrad_quantized and not isinstance(g_PN, MXTensor) and not kernels.rescales_rows(
            g_PN.device, self.recipe.block_size)

    @property
    def wgrad_quantized(self) -> bool:
        return self.recipe.quantize_gemm and self.recipe.wgrad == "mxfp8"

    def quantize_ahead(self) -> None:
        """Quantises the weights of the calls of `forward_gemm` to come, which takes no plan."""
        if self.recipe.quantize_gemm:
            self.ahead = [self._quantized_weights(parts, transposed=False) for parts in (self.ups, self.down) if parts]

    def dispatch(self, transport: Transport, x_TH: torch.Tensor, wire: Wire, parts: list, transposed: bool,
                 **keys: Any) -> tuple:
        """Transport.start_dispatch of rows that the `forward_gemm` of these parts (`transposed`: the `dgrad_gemm`)
        reads first; no parts: something else does."""
        P, H, seconds = self.plan.num_rows, x_TH.shape[1], 0.0
        if parts and wire.mxfp8 and self.recipe.quantize_gemm:
            shapes = [kernels.first(part).shape for part in parts]
            columns = shapes[0][-1] if transposed else sum(shape[-2] for shape in shapes)
            seconds = kernels.gemm_beside_seconds(P, H, columns, wire.block_size, x_TH.device)
        return transport.start_dispatch(self.plan, x_TH, wire, gemm_seconds=seconds, **keys)

    def forward_gemm(self, x_PK: torch.Tensor, parts: list, arrival: Arrival | None = None) -> torch.Tensor:
        """Rows times the stacked weights: contracts over the weights' last axis. `arrival`: of the rows."""
        return self._gemm(x_PK, parts, False, arrival)

    def last_gemm(self, x_PK: torch.Tensor, parts: list, transport: Transport,
                  arrival: Arrival | None = None) -> tuple[torch.Tensor, Feed | None]:
        """`forward_gemm`, and how it feeds the combine of what it computes, if it does: not with an arrival."""
        if not self.recipe.quantize_gemm or arrival is not None:
            return self.forward_gemm(x_PK, parts, arrival), None
        mx = self._operand(parts, transposed=False)
        feed = transport.feed(self.plan, mx.shape[1], self.dtype, _wire(self.recipe, self.recipe.combine_fwd),
                              *kernels.fed_gemm_cost(x_PK, mx.shape[1]))
        return grouped_mm(x_PK, mx, self.plan.group_ends_E, self.dtype, self._covered, feed=feed), feed

    def dgrad_gemm(self, g_PN: torch.Tensor, parts: list, arrival: Arrival | None = None) -> torch.Tensor:
        """Contracts over the axis before it."""
        return self._gemm(g_PN, parts, True, arrival)

    def _gemm(self, x_PK: torch.Tensor, parts: list, transposed: bool, arrival: Arrival | None = None) -> torch.Tensor:
        if not self.recipe.quantize_gemm:
            return grouped_mm_parts(x_PK, parts, self.plan.group_ends_E, transposed, self._covered)
        try:
            return grouped_mm(x_PK, self._operand(parts, transposed), self.plan.group_ends_E, self.dtype,
                              self._covered, arrival=arrival)
        except BaseException:  # memory runs out: what the dispatch reads and writes must not be freed before it ends
            if arrival is not None:
                arrival.end()
            raise

    @property
    def _covered(self) -> bool:
        return self.plan.group_ends is not None and self.plan.group_ends[-1] == self.plan.num_rows

    def _operand(self, parts: list, transposed: bool) -> MXTensor:
        return self.ahead.pop(0) if self.ahead else self._quantized_weights(parts, transposed)

    def _quantized_weights(self, parts: list, transposed: bool) -> MXTensor:
        mx = kernels.quantize_weights(parts, self.recipe.block_size, self.recipe.scaling_mode, transposed)
        if mx.dtype == self.dtype:
            return mx
        # Outwardly of the tokens' dtype: in which it is dequantised where no kernel multiplies MXFP8.
        return MXTensor(mx.qdata, mx.scale_bytes, mx.block_size, self.dtype, mx.tiled)

    def wgrad_gemm(self, g: torch.Tensor, a_PK: torch.Tensor, dtype: torch.dtype, g_columns: bool,
                   beside: int = 0, parts: int = 1) -> torch.Tensor:
        """[E, N, K], or of several parts [parts, E, N / parts, K]. MXFP8 rows are dequantised or re-scaled on the way,
        as the recipe has it. `beside`: multiprocessors that it leaves to an exchange."""
        mode = self.recipe.scaling_mode if self.wgrad_quantized else None
        sms = kernels.multiprocessors(a_PK.device) - beside if beside else 0
        return grouped_mm_wgrad_rows(g, a_PK, self.plan.group_ends_E, dtype, mode, g_columns, sms, parts)

    def bias_rows(self, bias_EN: torch.Tensor) -> torch.Tensor:
        return bias_rows(bias_EN, self.plan.group_ends_E, self.plan.num_rows)

    def group_sums(self, x_PN: torch.Tensor, weight_P: torch.Tensor | None = None) -> torch.Tensor:
        return group_sums(x_PN, self.plan.group_ends_E, weight_P, self.plan.group_ends)

    def activation(self) -> dict:
        return {"activation": self.formula.activation, "layout": self.layout, "block_size": self.recipe.block_size,
                "scaling_mode": self.recipe.scaling_mode, "bias_EG": self.up_bias_EG, "ends_E": self.plan.group_ends_E}


def fewest_tokens(formula: ExpertFormula, recipe: Recipe, given: int | None, num_local_experts: int,
                  device: torch.device) -> float:
    """Mean tokens of an expert from which on a layer runs its recipe, below which bf16; equal on all ranks. `given`:
    the config's min_tokens_per_expert; without it, from where on the recipe is faster; inf: nowhere."""
    if not recipe.quantize_gemm:
        return 0
    if given is not None:
        return given
    shapes = formula.shapes()
    weights = sum(math.prod(shapes[role]) for role in ("gate", "up", "down") if role in shapes)
    return kernels.fewest_tokens(formula.hidden_size, formula.ffn_size, weights, num_local_experts, recipe.block_size,
                                 recipe.wgrad == "mxfp8", device)


def _warn_of_few_tokens(fewest: float) -> None:
    """Once a threshold: not for every layer and rank, whose start-up lines name theirs."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        few = "" if math.isinf(fewest) else f": on batches of fewer than {fewest:.0f} tokens per expert"
        warning_once(f'mxfp8_moe: MoE layers run the bf16 recipe{few}; with "min_tokens_per_expert": 0 they never do')


def _wire(recipe: Recipe, dtype: str) -> Wire:
    return Wire(dtype == "mxfp8", recipe.block_size, recipe.scaling_mode)


@lru_cache(maxsize=1024)
def _alike(hidden_size: int, dtype: torch.dtype, recipe: Recipe, fewest: float) -> str:
    """What has to be the same on all ranks for their rows to fit together, in words."""
    wires = f"{recipe.dispatch_fwd}/{recipe.combine_fwd}, gradients {recipe.combine_bwd}/{recipe.dispatch_bwd}"
    blocks = f", blocks of {recipe.block_size}" if "mxfp8" in wires else ""  # which devices choose, if not the config
    return f"tokens of {hidden_size} {dtype} as {wires}{blocks}, bf16 below {fewest:g} an expert"


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
    def forward(ctx, ffn: ExpertFFN, layout, grad_enabled, expert_TK, depends_on_x, x_TH, weight_TK, *tensors):
        recipe, dtype = ffn.recipe, x_TH.dtype
        # Within this function gradients are off, and what needs one does so under torch.no_grad too.
        backward = grad_enabled and any(ctx.needs_input_grad)
        fewest = ffn.fewest_tokens(x_TH.device)
        layer = _Layer(ffn.formula, recipe, None, _unflatten(layout, tensors), dtype)
        # The device has the weights to quantise while the host waits for the counts, if this rank's speak for all.
        enough = expert_TK.numel() >= fewest * ffn.num_local_experts
        plan = ffn.transport.plan(expert_TK, ffn.num_local_experts,
                                  meanwhile=layer.quantize_ahead if enough else None,
                                  rows=_alike(x_TH.shape[1], dtype, recipe, fewest))
        if plan.tokens_per_expert < fewest:
            _warn_of_few_tokens(fewest)
            layer.recipe = recipe = _unquantized(recipe)
            layer.ahead.clear()
        layer.plan = plan
        with ffn.timed("dispatch"):
            x_PH, weight_P, arrival = layer.dispatch(ffn.transport, x_TH, _wire(recipe, recipe.dispatch_fwd),
                                                     layer.ups, False, weight_TK=weight_TK)
        x_PH = layer.quantized(x_PH)
        pre_PG, feed = layer.forward_gemm(x_PH, layer.ups, arrival), None
        del arrival
        if not backward:
            x_PH = None
        if ffn.formula.kind == "linear":
            h_PF = pre_PG.new_empty(0)
            if layer.up_bias_EG is not None:
                pre_PG = (pre_PG + layer.bias_rows(layer.up_bias_EG)).to(pre_PG.dtype)
            y_PH = pre_PG.float() * weight_P.unsqueeze(1)
            pre_PG = pre_PG.new_empty(0)
        else:
            keep = backward and recipe.quantize_gemm and recipe.preactivation == "mxfp8"
            h_PF, kept_PG = activate(pre_PG, weight_P, quantized=recipe.quantize_gemm, keep=keep, **layer.activation())
            pre_PG = kept_PG if keep else pre_PG if backward else None
            if layer.down_bias_EH is None:
                y_PH, feed = layer.last_gemm(h_PF, layer.down, ffn.transport)
            else:
                y_PH = layer.forward_gemm(h_PF, layer.down)
                y_PH = add_weighted_bias(y_PH, layer.down_bias_EH, weight_P, plan.group_ends_E)
        with ffn.timed("combine"):
            y_TH, _ = ffn.transport.start_combine(plan, y_PH, _wire(recipe, recipe.combine_fwd), dtype,
                                                  feed=feed).result()
        ctx.call = (ffn, layout, plan, recipe, dtype)
        ctx.kept = _Kept(ctx, x_PH, pre_PG, h_PF, weight_P, (depends_on_x, weight_TK, *tensors))
        return y_TH

    @staticmethod
    @torch.compiler.disable  # as forward, where autograd is compiled too
    @tell_peers_on_error
    def backward(ctx, g_TH):
        ffn, layout, plan, recipe, dtype = ctx.call
        x_PH, pre_PG, h_PF, weight_P, (depends_on_x, weight_TK, *tensors) = ctx.kept.read(ctx)
        with torch.no_grad(), _without_autocast(g_TH.device.type):
            weights = _unflatten(layout, tensors)
            layer = _Layer(ffn.formula, recipe, plan, weights, dtype)
            needs = _unflatten(layout, ctx.needs_input_grad[7:])
            # Whoever needs it or not: what one rank needs must not decide what all of them exchange.
            back = partial(ffn.transport.start_combine, plan, wire=_wire(recipe, recipe.dispatch_bwd), dtype=dtype,
                           phase="combine of the gradient")
            # What reads the gradient's rows first; biases and a linear expert's weights read them otherwise.
            first = layer.down if layer.down_bias_EH is None else []
            forth = partial(layer.dispatch, ffn.transport, g_TH.to(dtype), _wire(recipe, recipe.combine_bwd), first,
                            True, phase="dispatch of the gradient")
            grads, (x_grad, weight_grad) = _backward_rows(layer, ffn.transport, forth, back, x_PH, pre_PG, h_PF,
                                                          weight_P, weights, needs)
            flat = []
            for role, size in layout:
                grad = grads.get(role)
                flat += [grad] if size == 0 else list(grad.unbind(0)) if grad is not None else [None] * size
        out = [x_grad, weight_grad, *flat]
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (g_TH, depends_on_x, weight_TK, *tensors)
            out = [g if g is None else _NoSecondDerivative.apply(g, *inputs) for g in out]
        needed = (g if need else None for g, need in zip(out, ctx.needs_input_grad[5:], strict=True))
        return None, None, None, None, _no_gradient(depends_on_x), *needed


def _no_gradient(x: torch.Tensor) -> torch.Tensor | None:
    """None, for which autograd computes nothing. Compiled autograd takes tensors alone."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return torch.zeros_like(x) if getattr(compiled, "in_compiled_autograd_region", False) else None


class _Kept:
    """What backward needs, through save_for_backward: always the same tensors in the same order."""

    def __init__(self, ctx, x_PH, pre_PG, h_PF, weight_P, inputs):
        self.kinds, saved = [], []
        for value in (x_PH, pre_PG, h_PF):
            if isinstance(value, MXTensor):
                self.kinds.append((value.block_size, value.orig_dtype))
                saved += [value.qdata, value.scale_bytes]
            else:
                self.kinds.append(None)
                saved.append(value)
        ctx.save_for_backward(*saved, weight_P, *inputs)

    def read(self, ctx) -> tuple:
        saved, values = list(ctx.saved_tensors), []
        for kind in self.kinds:
            values.append(saved.pop(0) if kind is None else MXTensor(saved.pop(0), saved.pop(0), *kind))
        return *values, saved[0], saved[1:]


def _backward_rows(layer: _Layer, transport: Transport, forth: Callable[[], tuple], back: Callable[..., Pending], x_PH,
                   kept_PG, h_PF, weight_P, weights: dict, needs: dict) -> tuple[dict, tuple]:
    """Everything from the gradient's rows on, which `forth` brings: role -> stacked gradient, and what `back`, of the
    gradients of x_PH and weight_P, brings to the tokens."""
    grads = {}
    g_PH, _, arrival = forth()  # not held elsewhere: gone as soon as they have been used

    def needed(role):
        need = needs.get(role)
        return need if isinstance(need, bool) else need is not None and any(need)

    def dtype_of(role):
        return kernels.first(weights[role]).dtype

    if layer.formula.kind == "linear":
        t_PH = layer.dgrad_gemm(layer.quantized(g_PH), layer.ups).float()
        plain_g, plain_x = (kernels.dequantize(x, torch.float32) if isinstance(x, MXTensor) else x
                            for x in (g_PH, x_PH))
        weight = (t_PH * plain_x.float()).sum(-1)
        weighted_g = (plain_g.float() * weight_P.unsqueeze(1)).to(layer.dtype)
        if needed("up"):
            g_wgrad, columns = layer.wgrad_operand(weighted_g)
            grads["up"] = layer.wgrad_gemm(g_wgrad, x_PH, dtype_of("up"), columns)
        if layer.up_bias_EG is not None:
            weight += (plain_g.float() * layer.bias_rows(layer.up_bias_EG)).sum(-1)
            grads["up_bias"] = layer.group_sums(weighted_g).to(dtype_of("up_bias"))
        return grads, back(t_PH * weight_P.unsqueeze(1), weight_P=weight).result()

    if layer.down_bias_EH is not None:
        plain_g = kernels.dequantize(g_PH, torch.float32) if isinstance(g_PH, MXTensor) else g_PH
        down_bias_weight = (plain_g.float() * layer.bias_rows(layer.down_bias_EH)).sum(-1)
        grads["down_bias"] = layer.group_sums(plain_g, weight_P).to(dtype_of("down_bias"))
        del plain_g
    g_PH, g_wgrad, columns = layer.quantized_gradient(g_PH, needed("down"))
    t_PF = layer.dgrad_gemm(g_PH, layer.down, arrival)
    del g_PH, arrival
    if needed("down"):
        grads["down"] = layer.wgrad_gemm(g_wgrad, h_PF, dtype_of("down"), columns)
    del g_wgrad
    roles = [role for role in ("gate", "up") if role in weights]
    recipe, wants_ups = layer.recipe, any(needed(role) for role in roles)
    columns = wants_ups and layer.reads_columns(t_PF)
    wants_plain = not recipe.quantize_gemm or layer.up_bias_EG is not None or (
        wants_ups and not layer.wgrad_quantized)
    dpre = activate_backward(t_PF, kept_PG, weight_P, plain=wants_plain, rows=recipe.quantize_gemm, columns=columns,
                             **layer.activation())
    del t_PF
    weight = dpre.dweight_P if layer.down_bias_EH is None else dpre.dweight_P + down_bias_weight
    if layer.up_bias_EG is not None:
        for role, half in zip(roles, layer.group_sums(dpre.plain).chunk(len(roles), dim=1), strict=True):
            if f"{role}_bias" in weights:
                grads[f"{role}_bias"] = half.to(dtype_of(f"{role}_bias"))
    g_rows = dpre.rows if recipe.quantize_gemm else dpre.plain
    g_wgrad = dpre.columns if columns else g_rows if layer.wgrad_quantized else dpre.plain
    del dpre

    def ups_wgrad(beside: int = 0) -> None:
        # Each gradient by itself: autograd copies one that lies otherwise than a stacked parameter. Not if one of them
        # is not wanted: they share their memory.
        parts = len(roles) if all(map(needed, roles)) else 1
        both = layer.wgrad_gemm(g_wgrad, x_PH, dtype_of("up"), columns, beside, parts)
        grads.update(zip(roles, both.unbind(0) if parts > 1 else both.chunk(len(roles), dim=1), strict=True))

    beside = 0 if not wants_ups else transport.sms_beside(
        layer.plan, x_PH.shape[1], layer.dtype, _wire(recipe, recipe.dispatch_bwd),
        *kernels.wgrad_cost(g_wgrad, x_PH, len(layer.plan.group_ends_E), layer.wgrad_quantized))
    # Alone, in the order that takes less memory; bytes of P rows, G and H wide. The weight gradient first: dpre's rows
    # G P, x dequantised or dx 2 H P, the gradient 2 E G H, and dpre plain 2 G P or, with dx, weights quantised E G H.
    # dx first: dpre plain 2 G P, dx and x dequantised 4 H P, the gradient 2 E G H.
    (P, G), H, E = g_rows.shape, x_PH.shape[1], len(layer.plan.group_ends_E)
    first = wants_ups and not beside and g_wgrad is not g_rows and max(2 * G * P, E * G * H) < (G + 2 * H) * P
    if first:
        ups_wgrad()
        del g_wgrad
    dx_PH = layer.dgrad_gemm(g_rows, layer.ups)
    del g_rows
    pending = back(dx_PH, weight_P=weight, sms=beside)
    del dx_PH
    try:
        if wants_ups and not first:
            ups_wgrad(beside)
    finally:  # also when memory runs out: what the exchange reads and writes must not be freed before
        result = pending.result()
    return grads, result
