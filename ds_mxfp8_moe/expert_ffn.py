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

This file is the differentiable function. expert_math.py computes the rows, transport/ moves them, casts.py and
grouped_gemm.py choose the kernels.

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

import deepspeed.comm as dist
import torch
from deepspeed.utils.logging import warning_once

from .config import Recipe
from .expert_math import ExpertMath, Rows
from .experts import ROLES, ExpertFormula
from .mx import MXTensor
from .routing import Routes
from .transport import Transport, Wire
from .transport.deadline import tell_peers_on_error


@dataclass(frozen=True, eq=False)
class ExpertFFN:
    """What one layer's experts compute, in which recipe, over which transport.

    Attributes:
        min_tokens_per_expert: below it, the mean over the group, the layer computes unquantised. 0: it never does.
        timed: `timed("dispatch")` and `timed("combine")` give context managers around forward's exchanges.
    """

    formula: ExpertFormula
    recipe: Recipe
    transport: Transport
    num_local_experts: int
    min_tokens_per_expert: float = 0
    name: str = "MoE layer"
    timed: Callable[[str], AbstractContextManager] = field(default=lambda phase: nullcontext())

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
            return _ExpertFFNFunction.apply(self, tuple(layout), torch.is_grad_enabled(), routes.expert_TK,
                                            depends_on_x, x_TH, routes.weight_TK, *tensors)


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


def _warn_of_few_tokens(fewest: float) -> None:
    """Warns once for each threshold. The start-up lines name the threshold of each layer."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        when = "on every batch" if math.isinf(fewest) else f"where experts get fewer than {fewest:.0f} tokens each"
        warning_once(f"mxfp8_moe: MoE layers run the bf16 recipe {when}, because that is faster there. "
                     'Write "min_tokens_per_expert": 0 to have MXFP8 on every batch')


def _wire(recipe: Recipe, dtype: str) -> Wire:
    return Wire(dtype == "mxfp8", recipe.block_size, recipe.scaling_mode)


@lru_cache(maxsize=1024)
def _rows_in_words(hidden_size: int, dtype: torch.dtype, recipe: Recipe, fewest: float) -> str:
    """In words, what must be the same of the rows on all ranks."""
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


class _ExpertFFNFunction(torch.autograd.Function):

    @staticmethod
    def forward(ctx, ffn: ExpertFFN, layout, grad_enabled, expert_TK, depends_on_x, x_TH, weight_TK, *tensors):
        recipe, dtype, fewest = ffn.recipe, x_TH.dtype, ffn.min_tokens_per_expert
        # Within this function gradients are off, and what needs one does so under torch.no_grad too.
        backward = grad_enabled and any(ctx.needs_input_grad)
        experts = ExpertMath(ffn.formula, recipe, None, _unflatten(layout, tensors), dtype)
        # The device has the weights to quantise while the host waits for the counts, if this rank's speak for all.
        enough = expert_TK.numel() >= fewest * ffn.num_local_experts
        plan = ffn.transport.plan(expert_TK, ffn.num_local_experts,
                                  meanwhile=experts.quantize_ahead if enough else None,
                                  rows=_rows_in_words(x_TH.shape[1], dtype, recipe, fewest))
        if plan.tokens_per_expert < fewest:
            _warn_of_few_tokens(fewest)
            experts.recipe = recipe = _unquantized(recipe)
            experts.quantized_ahead.clear()
        experts.plan = plan

        def dispatch():
            with ffn.timed("dispatch"):
                return ffn.transport.dispatch(plan, x_TH, _wire(recipe, recipe.dispatch_fwd), weight_TK)

        y_PH, rows = experts.forward(dispatch, backward)
        with ffn.timed("combine"):
            y_TH, _ = ffn.transport.combine(plan, y_PH, _wire(recipe, recipe.combine_fwd), dtype)
        ctx.call = (ffn, layout, plan, recipe, dtype)
        ctx.kept = _Kept(ctx, rows, (depends_on_x, weight_TK, *tensors))
        return y_TH

    @staticmethod
    @torch.compiler.disable  # as forward, where autograd is compiled too
    @tell_peers_on_error
    def backward(ctx, g_TH):
        ffn, layout, plan, recipe, dtype = ctx.call
        rows, (depends_on_x, weight_TK, *tensors) = ctx.kept.read(ctx)
        _, _, _, _, _, needs_x, needs_weight, *needs_tensors = ctx.needs_input_grad
        with torch.no_grad(), _without_autocast(g_TH.device.type):
            experts = ExpertMath(ffn.formula, recipe, plan, _unflatten(layout, tensors), dtype)
            needs = _unflatten(layout, needs_tensors)
            needed = {role for role, need in needs.items() if (need if isinstance(need, bool) else any(need))}
            # Whoever needs it or not: what one rank needs must not decide what all of them exchange.
            wire_forth, wire_back = _wire(recipe, recipe.combine_bwd), _wire(recipe, recipe.dispatch_bwd)
            grads, (x_grad, weight_grad) = experts.backward(
                partial(ffn.transport.dispatch, plan, g_TH.to(dtype), wire_forth, phase="dispatch of the gradient"),
                partial(ffn.transport.start_combine, plan, wire=wire_back, dtype=dtype,
                        phase="combine of the gradient"),
                partial(ffn.transport.sms_beside, plan, g_TH.shape[1], dtype, wire_back), rows, needed)
            flat = []
            for role, size in layout:
                grad = grads.get(role)
                flat += [grad] if size == 0 else list(grad.unbind(0)) if grad is not None else [None] * size
        out = [x_grad, weight_grad, *flat]
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (g_TH, depends_on_x, weight_TK, *tensors)
            out = [g if g is None else _NoSecondDerivative.apply(g, *inputs) for g in out]
        wanted = (g if need else None for g, need in zip(out, (needs_x, needs_weight, *needs_tensors), strict=True))
        return None, None, None, None, _no_gradient(depends_on_x), *wanted


def _no_gradient(x: torch.Tensor) -> torch.Tensor | None:
    """None, for which autograd computes nothing. Compiled autograd takes tensors alone."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return torch.zeros_like(x) if getattr(compiled, "in_compiled_autograd_region", False) else None


class _Kept:
    """What backward needs, through save_for_backward: always the same tensors in the same order."""

    def __init__(self, ctx, rows: Rows, inputs: tuple):
        self.kinds, saved = [], []
        for value in rows:
            if isinstance(value, MXTensor):
                self.kinds.append((value.block_size, value.orig_dtype))
                saved += [value.qdata, value.scale_bytes]
            else:
                self.kinds.append(None)
                saved.append(value)
        ctx.save_for_backward(*saved, *inputs)

    def read(self, ctx) -> tuple[Rows, list]:
        saved, values = list(ctx.saved_tensors), []
        for kind in self.kinds:
            values.append(saved.pop(0) if kind is None else MXTensor(saved.pop(0), saved.pop(0), *kind))
        return Rows(*values), saved
