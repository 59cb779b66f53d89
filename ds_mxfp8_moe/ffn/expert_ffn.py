# SPDX-License-Identifier: Apache-2.0
"""One differentiable function: tokens and routes in, tokens out. It sends and multiplies MXFP8.

Letters in tensor names: T tokens of this rank, K choices of a token, H hidden size, F FFN size, G width of the first
GEMM (2F where gate and up projections run as one, else F), E experts of this rank, P expert-sorted rows on this rank,
groups padded to 128 rows with zeros.

    forward    x_PH = dispatch(x_TH)         pre_PG = x_PH W1^T + b1     h_PF = w_P * act(pre_PG)
               y_PH = h_PF W2^T + w_P b2     y_TH = combine(y_PH)
    backward   g_PH = dispatch(g_TH)         t_PF = g_PH W2              dw_P = <t, act(pre)> + <g, b2>
               dpre_PG = t w act'(pre)       dx_PH = dpre_PG W1          dx_TH, dw_TK = combine(dx_PH, dw_P)

In code, dw is `dweight`. The routing weight acts inside the activation. Combine therefore adds plain rows, and the
gradient travels unweighted, one copy to each rank.

Backward needs x_PH and h_PF, which are kept in MXFP8, and pre_PG, which is kept in MXFP8 or in the tokens' dtype
(`recipe.preactivation`). The experts' weights are not copied: backward quantises them again. With `ExpertFFN.kept`,
calls share quantised weights instead. Weights that are held in MXFP8 alone (frozen_weights.py) are read as they are,
and backward transposes them for one GEMM at a time. A recipe without quantisation keeps everything in the tokens'
dtype.

This file is the differentiable function. expert_math.py computes the rows, transport/ moves them, compute/casts.py and
compute/grouped_gemm.py choose the kernels, and compute/recorded.py replays their launches.

The weight gradients dW1 = dpre^T x and dW2 = g^T h contract over rows. Their operands:

    operand                   wgrad "hp"              wgrad "mxfp8"
    x                         dequantised MXFP8       MXFP8 re-scaled along the rows
    h                         dequantised MXFP8       MXFP8 re-scaled along the rows
    g that came as MXFP8      dequantised MXFP8       MXFP8 re-scaled along the rows
    g that came unquantised   as it came              quantised along the rows (*)
    dpre                      in the tokens' dtype    quantised along the rows (*)

(*) On Hopper, with blocks of 128: quantised as dgrad reads it, then re-scaled along the rows.

The biases' gradients are float32 sums of g and of dpre in the tokens' dtype.

Adapters (`LowRank`) add (x A1^T) B1^T to pre, and (h A2^T) B2^T to y. They multiply dequantised rows in the tokens'
dtype. Their weights have gradients of their own, so that the experts' weights may be frozen.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from itertools import chain
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.utils.logging import warning_once
from torch.autograd.graph import Node

from ..compute import casts
from ..compute.formula import ROLES, ExpertFormula, LowRank
from ..compute.mx import MXTensor
from ..compute.recorded import Weights, flatten, recorded, unflatten
from ..compute.routing import Routes
from ..compute.sums import Sum
from ..config import Recipe
from ..transport import Transport, Wire
from ..transport.deadline import naming_evaluation, tell_peers
from .expert_math import ExpertMath, Gradients, Projection, Rows, unquantized
from .frozen_weights import FrozenWeights
from .kept_weights import KeptWeights

# function(*args), of which torch.compile sees nothing: the host decides sizes in it.
ROLES_OF = {"up": ("gate", "up"), "down": ("down", )}  # by GEMM
_outside_compile = torch.compiler.disable(lambda function, *args: function(*args))


@dataclass(frozen=True, eq=False)
class ExpertFFN:
    """What one layer's experts compute, in which recipe, over which transport.

    Attributes:
        min_tokens_per_expert: a call computes unquantised if the experts of the group get fewer tokens on average.
        timed: `timed("dispatch")` and `timed("combine")` return context managers, which surround the exchanges of
            forward. None times nothing.
        kept: the quantised weights of the layer, which calls share. None: every call quantises the weights.
        sum_of: tells in backward where a parameter's gradient goes, given the parameter and autograd's node that
            accumulates into its `grad`. Autograd gets a gradient that begins a sum, but none that is added to it.
            None, or a result of None: the gradient has its own memory.
        training: whether the layer is in training mode. An error in evaluation mode explains what may have caused it.
    """

    formula: ExpertFormula
    recipe: Recipe
    transport: Transport
    num_local_experts: int
    min_tokens_per_expert: float = 0
    name: str = "MoE layer"
    timed: Callable[[str], AbstractContextManager] | None = None
    kept: KeptWeights | None = None
    sum_of: Callable[[torch.nn.Parameter, Node], Sum | None] | None = None
    training: bool = True

    @property
    def recorded_whole(self) -> bool:
        """Whether a whole forward or backward is recorded. Else, what runs between two exchanges is."""
        return self.transport.replayable and self.timed is None

    def has_few_tokens(self, expert_TK: torch.Tensor) -> bool:
        """Whether a call computes unquantised, if all ranks of the group have as many choices."""
        return expert_TK.numel() / self.num_local_experts < self.min_tokens_per_expert

    def __call__(self, x_TH: torch.Tensor, routes: Routes,
                 weights: dict[str, torch.Tensor | Sequence[torch.Tensor] | None],
                 adapters: dict[str, LowRank] | None = None, frozen: FrozenWeights | None = None) -> torch.Tensor:
        """Sends tokens through their experts.

        Args:
            x_TH: [T, H] float32, bfloat16 or float16. T may be 0 and may differ between ranks.
            routes: the routes of these T tokens.
            weights: for each of ROLES that the formula has, E tensors ([out, in], biases [out]) or one stacked
                [E, ...]. Each of them gets a gradient. The gradient of an expert without tokens is zero.
            adapters: low-rank updates of the GEMMs "up" (which includes the gate) and "down", in x's dtype or another.
            frozen: weights that are held in MXFP8 alone. `weights` then has biases at most, and the call always
                runs the recipe, which multiplies MXFP8.

        Returns:
            [T, H] in x's dtype, or in autocast's under autocast: the sum of weight * expert(x) over a token's choices.
            A token without choices gets 0. Collective: every rank of the group must call it.
        """
        if torch.compiler.is_dynamo_compiling():
            return _outside_compile(self, x_TH, routes, weights, adapters, frozen)
        try:
            device_type = x_TH.device.type
            autocast = torch.is_autocast_enabled(device_type)
            if autocast:
                x_TH = x_TH.to(torch.get_autocast_dtype(device_type))
            adapters = {name: LowRank(*(factor.to(x_TH.dtype) for factor in factors))
                        for name, factors in (adapters or {}).items()}
            with torch.autocast(device_type, enabled=False) if autocast else nullcontext(), \
                    nullcontext() if self.training else naming_evaluation():
                return self._compute(x_TH, routes, weights, adapters, frozen and frozen.operands(), autocast)
        except Exception as error:
            tell_peers(error)
            raise

    def _compute(self, x_TH: torch.Tensor, routes: Routes, weights: dict, adapters: dict[str, LowRank],
                 frozen: dict[str, MXTensor] | None, autocast: bool) -> torch.Tensor:
        """The call, without autocast. `adapters`: in x's dtype. `autocast`: whether the caller has it enabled."""
        layout, tensors = flattened(weights)
        call = Call(self, ExpertMath(self.formula, self.recipe, x_TH.dtype), layout, tuple(adapters), frozen)
        return _ExpertFFNFunction.apply(call, torch.is_grad_enabled(), routes.expert_TK, x_TH, routes.weight_TK,
                                        *chain(*adapters.values()), *tensors)


def backward_of_call(function: Callable) -> Callable:
    """Decorates the backward of an autograd Function whose `ctx.ffn` is an ExpertFFN: it runs without autocast and
    without torch.compile, and has no second derivative. Peers get to know its errors."""

    @wraps(function)
    def backward(ctx, g, *grads):
        if torch.compiler.is_dynamo_compiling():  # for compiled autograd
            return _outside_compile(backward, ctx, g, *grads)
        try:
            if torch.is_grad_enabled():
                raise RuntimeError(f"{ctx.ffn.name} has no second derivative, for which create_graph=True asks: leave "
                                   "it out with 'exclude' in the mxfp8_moe section, or drop create_graph=True")
            autocast = torch.is_autocast_enabled(g.device.type)
            with torch.autocast(g.device.type, enabled=False) if autocast else nullcontext():
                return function(ctx, g, *grads)
        except Exception as error:
            tell_peers(error)
            raise

    return backward


class _ExpertFFNFunction(torch.autograd.Function):

    @staticmethod
    def forward(ctx, call, grad_enabled, expert_TK, x_TH, weight_TK, *tensors):
        # In forward, torch.is_grad_enabled() is always False, and needs_input_grad ignores torch.no_grad.
        backward, ffn = grad_enabled and any(ctx.needs_input_grad), call.ffn
        if ffn.recorded_whole:
            call = call.unquantized() if ffn.has_few_tokens(expert_TK) else call
            projections = call.projections(tensors, transposed=False)
            y_TH, rows, plan = _forward_whole(ffn.transport, ffn.num_local_experts, call.math, backward, x_TH,
                                              expert_TK, weight_TK, *projections)
        else:
            plan, call, projections = call.plan(expert_TK, x_TH, tensors, backward)
            y_TH, rows = _forward(ffn.transport, plan, call.math, backward, x_TH, weight_TK, *projections,
                                  ffn.timed or nullcontext)
        kept: list[torch.Tensor] = []
        tree = flatten((rows, plan), kept)
        # Autograd saves some other tensor than the parameter where activation checkpointing recomputes it.
        parameters = () if ffn.sum_of is None else tensors[2 * len(call.adapted):]
        ctx.ffn, ctx.call, ctx.kept = ffn, call, (tree, parameters)
        ctx.save_for_backward(*tensors, *kept)
        return y_TH

    @staticmethod
    @backward_of_call
    def backward(ctx, g_TH):
        ffn, call, (tree, parameters) = ctx.ffn, ctx.call, ctx.kept
        needs, saved = ctx.needs_input_grad[3:], ctx.saved_tensors
        count, first = len(needs) - 2, 2 * len(call.adapted)
        rows, plan = unflatten(tree, iter(saved[count:]))
        projections, sums = call.projections(saved[:count], transposed=True), {}
        if parameters:
            nodes = [node for node, _ in ctx.next_functions[-len(parameters):]]
            sums = _sums(ffn, call.layout, parameters, nodes, needs[2 + first:])
            projections = [one._replace(sums=tuple(map(sums.get, one.roles))) for one in projections]
        run = _backward_whole if ffn.recorded_whole else _backward
        needed = roles_needed(call.layout, needs[2 + first:])
        dx_TH, dweight_TK, gradients = run(ffn.transport, call.math, needed, g_TH, plan, rows, *projections)
        adapters = {"up": gradients.up_adapter, "down": gradients.down_adapter}
        by_role = gradients.by_role | {role: one.out_ENK for role, one in sums.items() if not one.begun}
        flat = [dx_TH, dweight_TK, *chain(*(adapters[name] for name in call.adapted)),
                *flattened_gradients(call.layout, by_role)]
        return None, None, None, *(grad if need else None for grad, need in zip(flat, needs, strict=True))


def _forward(transport: Transport, plan: Any, math: ExpertMath, backward: bool, x_TH: torch.Tensor,
             weight_TK: torch.Tensor, up: Projection, down: Projection,
             timed: Callable[[str], AbstractContextManager]) -> tuple[torch.Tensor, Rows]:
    """The output y_TH, and what backward needs."""
    recipe = math.recipe
    with timed("dispatch"):
        arrived = transport.dispatch(plan, x_TH, wire_of(recipe, recipe.dispatch_fwd), weight_TK)
    y_PH, rows = math.forward(*arrived, up, down, plan.group_ends_E, backward)
    del arrived  # which frees x_PH if no backward follows
    with timed("combine"):
        y_TH, _ = transport.combine(plan, y_PH, wire_of(recipe, recipe.combine_fwd), math.dtype)
    return y_TH, rows


@recorded
def _forward_whole(transport: Transport, num_local_experts: int, math: ExpertMath, backward: bool,
                   x_TH: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor, up: Projection,
                   down: Projection) -> tuple[torch.Tensor, Rows, Any]:
    """`_forward`, and its plan."""
    plan = transport.plan(expert_TK, num_local_experts)
    return *_forward(transport, plan, math, backward, x_TH, weight_TK, up, down, nullcontext), plan


def _backward(transport: Transport, math: ExpertMath, needed: frozenset[str], g_TH: torch.Tensor, plan: Any,
              rows: Rows, up: Projection, down: Projection) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """The gradients of x, of the routing weights and of the experts. `needed`: roles that need one."""
    recipe, ends_E, wants_ups = math.recipe, plan.group_ends_E, not needed.isdisjoint(up.roles)
    # The gradient of a combine is a dispatch, and the gradient of a dispatch a combine. Both take place even if this
    # rank needs no gradient of x: other ranks may need theirs.
    dispatch_wire, combine_wire = wire_of(recipe, recipe.combine_bwd), wire_of(recipe, recipe.dispatch_bwd)
    dpre = math.backward_to_dpre(
        transport.dispatch(plan, g_TH.to(math.dtype), dispatch_wire, phase="dispatch of the gradient")[0], rows, up,
        down, ends_E, needed)
    by_role = dpre.gradients.by_role
    ups_first = wants_ups and dpre.wgrad is not None and math.ups_first_takes_less(dpre, rows.x_PH.shape[1],
                                                                                   len(ends_E))
    if ups_first:
        by_role |= math.weight_gradients(dpre.wgrad, rows.x_PH, up, ends_E, needed, dpre.columns)
        dpre = dpre._replace(wgrad=None)
    dx_TH, dweight_TK = transport.combine(plan, math.backward_to_dx(dpre.rows, dpre.low_PR, up, ends_E), combine_wire,
                                          math.dtype, dpre.dweight_P, phase="combine of the gradient")
    if wants_ups and not ups_first:
        g = dpre.rows if dpre.wgrad is None else dpre.wgrad
        by_role |= math.weight_gradients(g, rows.x_PH, up, ends_E, needed, dpre.columns)
    return dx_TH, dweight_TK, dpre.gradients


_backward_whole = recorded(_backward)


def _sums(ffn: ExpertFFN, layout: tuple, parameters: Sequence[torch.Tensor], nodes: Sequence[Node],
          needs: Sequence[bool]) -> dict[str, Sum]:
    """Where the gradients of stacked weights go, by role. Without those that get memory of their own."""
    needed, node_of = unflattened(layout, needs), unflattened(layout, nodes)
    found = {role: ffn.sum_of(one, node_of[role]) for role, one in unflattened(layout, parameters).items()
             if needed[role] is True and not role.endswith("_bias")}
    found = {role: one for role, one in found.items() if one is not None}
    first = min((one.out_ENK.data_ptr() for one in found.values()), default=0)
    return {role: one._replace(place=one.out_ENK.data_ptr() - first) for role, one in found.items()}


# ---- what a call computes with ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Call:
    """What dispatch, arithmetic, combine and backward of one call share.

    Attributes:
        layout: of the weights, see `flattened`.
        adapted: the GEMMs that have adapters.
        frozen: FrozenWeights.operands. None: the weights are not held in MXFP8 alone.
    """

    ffn: ExpertFFN
    math: ExpertMath
    layout: tuple
    adapted: tuple[str, ...]
    frozen: dict[str, MXTensor] | None

    def unquantized(self) -> "Call":
        """The same call where experts get few tokens."""
        _warn_of_few_tokens(self.ffn.min_tokens_per_expert)
        return replace(self, math=replace(self.math, recipe=unquantized(self.math.recipe)))

    def plan(self, expert_TK: torch.Tensor, x_TH: torch.Tensor, tensors: Sequence[torch.Tensor],
             backward: bool) -> tuple[Any, "Call", list[Projection]]:
        """The plan of a forward's exchange; the call, unquantised if experts get few tokens; and its `projections`.

        `backward`: whether a backward follows.
        """
        ffn, ahead = self.ffn, []

        def meanwhile() -> None:
            """While the host waits for the counts, the device quantises weights."""
            if not ffn.has_few_tokens(expert_TK):  # else the call will probably run unquantised
                ahead.extend(self.projections(tensors, transposed=False, quantized=True))

        rows = _rows_in_words(x_TH.shape[1], x_TH.dtype, ffn.recipe, ffn.min_tokens_per_expert, backward)
        plan = ffn.transport.plan(expert_TK, ffn.num_local_experts, meanwhile, rows)
        call = self
        if plan.tokens_per_expert < ffn.min_tokens_per_expert:
            call = self.unquantized()
            ahead.clear()
        return plan, call, ahead or call.projections(tensors, transposed=False)

    def projections(self, tensors: Sequence[torch.Tensor], transposed: bool,
                    quantized: bool = False) -> list[Projection]:
        """The GEMMs "up" and "down". Their weights are quantised if the layer's calls share quantised weights.

        Args:
            tensors: adapters' factors, and flat weights.
            transposed: the GEMMs contract over the weights' second to last axis, as backward's do.
            quantized: quantises the weights in any case, if the recipe does.
        """
        count = 2 * len(self.adapted)
        adapters = {name: LowRank(*tensors[2 * i:2 * i + 2]) for i, name in enumerate(self.adapted)}
        by_role = unflattened(self.layout, tensors[count:])
        found = {name: self.projection(name, by_role, adapters.get(name)) for name in ROLES_OF}
        kept = self.kept(tensors[count:], transposed)
        if kept is None and quantized and self.math.recipe.quantize_gemm and self.frozen is None:
            kept = {}
        return [one if kept is None else self.quantized(one, name, kept, transposed) for name, one in found.items()]

    def kept(self, weights: Sequence[torch.Tensor], transposed: bool) -> dict[str, MXTensor] | None:
        """The quantised weights that the layer's calls share, by GEMM. None: they share none."""
        if self.ffn.kept is None or not self.math.recipe.quantize_gemm or self.frozen is not None:
            return None
        matrices = sum(size or 1 for role, size in self.layout if not role.endswith("_bias"))  # biases come last
        return self.ffn.kept.of(weights[:matrices], transposed)

    def quantized(self, one: Projection, name: str, kept: dict[str, MXTensor], transposed: bool) -> Projection:
        """The projection with quantised weights, which are in `kept` afterwards."""
        if name not in kept:
            kept[name] = self.math.quantize_weights(one.weights, transposed)
        return one._replace(weights=kept[name])

    def projection(self, name: str, by_role: dict, adapter: LowRank | None) -> Projection:
        """The GEMM of this name, with weights in high precision if they are not frozen in MXFP8."""
        bias_EN = joined_biases(by_role, name)
        if self.frozen is not None:
            weights = self.frozen[name]
            return Projection(ROLES_OF[name], weights.dtype, weights, True, bias_EN, adapter)
        roles = tuple(role for role in ROLES_OF[name] if role in by_role)
        stacks = tuple(by_role[role] for role in roles)
        weights = Weights(stacks, apart=self.math.recipe.quantize_gemm)
        return Projection(roles, casts.sample(stacks[0]).dtype, weights, False, bias_EN, adapter)


def joined_biases(by_role: dict, name: str) -> torch.Tensor | None:
    """The bias [E, N] of a GEMM's result. None: it has none."""
    biases = [casts.joined([by_role[f"{role}_bias"]]) if by_role.get(f"{role}_bias") is not None else None
              for role in ROLES_OF[name] if role in by_role or f"{role}_bias" in by_role]
    known = next((bias for bias in biases if bias is not None), None)
    if known is None or len(biases) == 1:
        return None if known is None else known.contiguous()
    return torch.cat([torch.zeros_like(known) if bias is None else bias for bias in biases], dim=1)


def _warn_of_few_tokens(fewest: float) -> None:
    """Warns once for each threshold. The start-up lines name the threshold of each layer."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        when = "on every batch" if math.isinf(fewest) else f"where experts get fewer than {fewest:.0f} tokens each"
        warning_once(f"mxfp8_moe: MoE layers run the bf16 recipe {when}, because that is faster there. "
                     'Write "min_tokens_per_expert": 0 to have MXFP8 on every batch')


def wire_of(recipe: Recipe, dtype: str) -> Wire:
    """The format in which rows of the config's `dtype`, "mxfp8" or "bf16", travel."""
    return Wire(dtype == "mxfp8", recipe.block_size, recipe.scaling_mode)


@lru_cache(maxsize=1024)
def _rows_in_words(hidden_size: int, dtype: torch.dtype, recipe: Recipe, fewest: float, backward: bool) -> str:
    """Describes the properties of rows that must be equal on all ranks: the `rows` of Transport.plan.

    `backward`: whether a backward follows. A rank that evaluates alone would meet its peers' training otherwise.
    """
    wires = f"{recipe.dispatch_fwd}/{recipe.combine_fwd}, gradients {recipe.combine_bwd}/{recipe.dispatch_bwd}"
    mode = "" if backward else ", without gradients"
    blocks = f", blocks of {recipe.block_size}" if "mxfp8" in wires else ""
    return f"tokens of {hidden_size} {dtype} as {wires}{blocks}, bf16 below {fewest:g} an expert{mode}"


def flattened(weights: dict[str, torch.Tensor | Sequence[torch.Tensor] | None]) -> tuple[tuple, list[torch.Tensor]]:
    """The tensors of weights by role in a flat list, as autograd takes them, and their layout.

    The layout has a pair (role, size) for each role: `size` tensors, or one stacked tensor [E, ...] if `size` is 0.
    """
    layout, tensors = [], []
    for role in ROLES:
        value = weights.get(role)
        if isinstance(value, torch.Tensor):
            layout.append((role, 0))
            tensors.append(value)
        elif value is not None:
            layout.append((role, len(value)))
            tensors += value
    return tuple(layout), tensors


def unflattened(layout: tuple, flat: Sequence) -> dict:
    """The inverse of `flattened`: role -> one stacked tensor or a list of E."""
    found, start = {}, 0
    for role, size in layout:
        found[role] = flat[start] if size == 0 else list(flat[start:start + size])
        start += size or 1
    return found


def roles_needed(layout: tuple, needs: Sequence[bool]) -> frozenset[str]:
    """The roles of which a tensor needs a gradient. `needs`: of each tensor of the layout."""
    return frozenset(role for role, need in unflattened(layout, needs).items()
                     if (need if isinstance(need, bool) else any(need)))


def flattened_gradients(layout: tuple, grads: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """Stacked gradients by role in the order of `flattened`. None: a role has none."""
    flat = []
    for role, size in layout:
        grad = grads.get(role)
        flat += [grad] if size == 0 else list(grad.unbind(0)) if grad is not None else [None] * size
    return flat
