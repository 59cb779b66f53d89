# SPDX-License-Identifier: Apache-2.0
"""One differentiable function: tokens and routes in, tokens out. It sends and multiplies MXFP8.

Letters in tensor names: T tokens of this rank, K choices of a token, H hidden size, F FFN size, G width of the first
GEMM (2F where gate and up projections run as one, else F), E experts of this rank, P expert-sorted rows on this rank,
groups padded to 128 rows with zeros.

    forward    x_PH = dispatch(x_TH)         pre_PG = x_PH W1^T + b1     h_PF = w_P * act(pre_PG)
               y_PH = h_PF W2^T + w_P b2     y_TH = combine(y_PH)
    backward   g_PH = dispatch(g_TH)         t_PF = g_PH W2              dS_P = <t, act(pre)> + <g, b2>
               dpre_PG = t w act'(pre)       x_TH' = combine(dpre W1), with dS travelling beside it

The routing weight acts inside the activation. Combine therefore adds plain rows, and the gradient travels unweighted,
one copy to each rank. An expert of one Linear layer weights its output rows instead.

Backward needs x_PH and h_PF, which are kept in MXFP8, and pre_PG, which is kept in MXFP8 or in the tokens' dtype
(`recipe.preactivation`). The experts' weights are not copied: backward quantises them again. A recipe without
quantisation keeps everything in the tokens' dtype.

This file is the differentiable function. expert_math.py computes the rows, transport/ moves them, casts.py and
grouped_gemm.py choose the kernels.

The weight gradients dW1 = dpre^T x and dW2 = g^T h contract over rows. Their operands:

    operand                 wgrad "hp"            wgrad "mxfp8"
    x, h                    dequantised MXFP8     MXFP8 re-scaled along the rows
    g that came as MXFP8    dequantised MXFP8     MXFP8 re-scaled along the rows
    g that came unquantised as it came            quantised along the rows; on Hopper, in blocks of 128, the MXFP8
    dpre, linear's w * g    in the tokens' dtype  form that dgrad reads, re-scaled

The biases' gradients are float32 sums of g and of dpre in the tokens' dtype.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import deepspeed.comm as dist
import torch
from deepspeed.utils.logging import warning_once
from torch.autograd.function import once_differentiable

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
        min_tokens_per_expert: a call computes unquantised if the experts of the group get fewer tokens on average.
        timed: `timed("dispatch")` and `timed("combine")` return context managers. They surround the exchanges of
            forward.
    """

    formula: ExpertFormula
    recipe: Recipe
    transport: Transport
    num_local_experts: int
    min_tokens_per_expert: float = 0
    name: str = "MoE layer"
    timed: Callable[[str], AbstractContextManager] = field(default=lambda phase: nullcontext())

    @torch.compiler.disable  # the host decides sizes, so torch.compile breaks its graph here
    @tell_peers_on_error
    def __call__(self, x_TH: torch.Tensor, routes: Routes,
                 weights: dict[str, torch.Tensor | Sequence[torch.Tensor] | None]) -> torch.Tensor:
        """Sends tokens through their experts.

        Args:
            x_TH: [T, H] float32, bfloat16 or float16. T may be 0 and may differ between ranks.
            routes: the routes of these T tokens.
            weights: for each of ROLES that the formula has, E tensors ([out, in], biases [out]) or one stacked
                [E, ...]. Each of them gets a gradient. The gradient of an expert without tokens is zero.

        Returns:
            [T, H] in x's dtype, or in autocast's under autocast: the sum of weight * expert(x) over a token's choices.
            A token without choices gets 0. Collective: every rank of the group must call it.
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
        with _without_autocast(device_type):
            return _ExpertFFNFunction.apply(self, tuple(layout), torch.is_grad_enabled(), routes.expert_TK,
                                            x_TH, routes.weight_TK, *tensors)


def _without_autocast(device_type: str) -> AbstractContextManager:
    """This file chooses every dtype itself. Autocast to one 16-bit dtype also refuses to join tensors of the other."""
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
    """Describes the properties of rows that must be equal on all ranks."""
    wires = f"{recipe.dispatch_fwd}/{recipe.combine_fwd}, gradients {recipe.combine_bwd}/{recipe.dispatch_bwd}"
    blocks = f", blocks of {recipe.block_size}" if "mxfp8" in wires else ""
    return f"tokens of {hidden_size} {dtype} as {wires}{blocks}, bf16 below {fewest:g} an expert"


def _unquantized(recipe: Recipe) -> Recipe:
    return replace(recipe, quantize_gemm=False, wgrad="hp", dispatch_fwd="bf16", combine_fwd="bf16",
                   dispatch_bwd="bf16", combine_bwd="bf16", preactivation="bf16")


class _ExpertFFNFunction(torch.autograd.Function):

    @staticmethod
    def forward(ctx, ffn: ExpertFFN, layout, grad_enabled, expert_TK, x_TH, weight_TK, *tensors):
        recipe, dtype, fewest = ffn.recipe, x_TH.dtype, ffn.min_tokens_per_expert
        # In forward, torch.is_grad_enabled() is always False, and needs_input_grad ignores torch.no_grad.
        backward = grad_enabled and any(ctx.needs_input_grad)
        experts = ExpertMath(ffn.formula, recipe, None, _unflatten(layout, tensors), dtype)
        # The device quantises weights while the host waits for the counts. It does not if this rank's own number of
        # tokens suggests that the call will run unquantised.
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
        ctx.kept = _Kept(ctx, rows, tensors)
        return y_TH

    @staticmethod
    @torch.compiler.disable  # for compiled autograd, as in ExpertFFN.__call__
    @once_differentiable
    @tell_peers_on_error
    def backward(ctx, g_TH):
        ffn, layout, plan, recipe, dtype = ctx.call
        rows, tensors = ctx.kept.read(ctx)
        _, _, _, _, needs_x, needs_weight, *needs_tensors = ctx.needs_input_grad
        with _without_autocast(g_TH.device.type):
            experts = ExpertMath(ffn.formula, recipe, plan, _unflatten(layout, tensors), dtype)
            needs = _unflatten(layout, needs_tensors)
            needed = {role for role, need in needs.items() if (need if isinstance(need, bool) else any(need))}
            # The exchange takes place even if this rank needs no gradient of x: other ranks may need theirs.
            dispatch_wire, combine_wire = _wire(recipe, recipe.combine_bwd), _wire(recipe, recipe.dispatch_bwd)
            grads, (x_grad, weight_grad) = experts.backward(
                partial(ffn.transport.dispatch, plan, g_TH.to(dtype), dispatch_wire, phase="dispatch of the gradient"),
                partial(ffn.transport.start_combine, plan, wire=combine_wire, dtype=dtype,
                        phase="combine of the gradient"),
                partial(ffn.transport.sms_beside, plan, g_TH.shape[1], dtype, combine_wire), rows, needed)
            flat = []
            for role, size in layout:
                grad = grads.get(role)
                flat += [grad] if size == 0 else list(grad.unbind(0)) if grad is not None else [None] * size
        out = [x_grad, weight_grad, *flat]
        wanted = (g if need else None for g, need in zip(out, (needs_x, needs_weight, *needs_tensors), strict=True))
        return None, None, None, None, *wanted


class _Kept:
    """Passes rows and weights to backward through save_for_backward, which takes plain tensors."""

    def __init__(self, ctx, rows: Rows, weights: tuple):
        self.kinds, saved = [], []
        for value in rows:
            if isinstance(value, MXTensor):
                self.kinds.append((value.block_size, value.orig_dtype))
                saved += [value.qdata, value.scale_bytes]
            else:
                self.kinds.append(None)
                saved.append(value)
        ctx.save_for_backward(*saved, *weights)

    def read(self, ctx) -> tuple[Rows, list]:
        saved, values = list(ctx.saved_tensors), []
        for kind in self.kinds:
            values.append(saved.pop(0) if kind is None else MXTensor(saved.pop(0), saved.pop(0), *kind))
        return Rows(*values), saved
