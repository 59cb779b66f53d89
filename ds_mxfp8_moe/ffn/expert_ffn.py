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

This file is the differentiable function. expert_math.py computes the rows, and records what can be replayed.
transport/ moves the rows, compute/casts.py and compute/grouped_gemm.py choose the kernels.

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
from functools import lru_cache, partial, wraps
from itertools import chain
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.utils.logging import warning_once
from torch.autograd.graph import Node

from ..compute.executor import executor_for, put_together, taken_apart
from ..compute.formula import ROLES, ExpertFormula, LowRank
from ..compute.mx import MXTensor
from ..compute.routing import Routes
from ..compute.sums import Sum
from ..config import Recipe
from ..transport import Transport, Wire
from ..transport.deadline import naming_evaluation, tell_peers
from .expert_math import ExpertMath, Rows
from .frozen_weights import FrozenWeights
from .kept_weights import KeptWeights

# function(*args), of which torch.compile sees nothing: the host decides sizes in it.
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
        """Whether a whole forward or backward can be recorded. Else, what runs between two exchanges can be."""
        return self.transport.replayable_plan is not None and self.timed is None

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
        return _ExpertFFNFunction.apply(self, layout, tuple(adapters), frozen, torch.is_grad_enabled(),
                                        routes.expert_TK, x_TH, routes.weight_TK, *chain(*adapters.values()), *tensors)

    def _plan(self, experts: ExpertMath, expert_TK: torch.Tensor, x_TH: torch.Tensor, backward: bool) -> None:
        """Plans the exchange of a forward: sets the plan of `experts`. If they get few tokens, their recipe becomes
        the one without quantisation. `backward`: whether a backward follows."""

        def meanwhile():
            """While the host waits for the counts, the device quantises weights."""
            if not self.has_few_tokens(expert_TK):  # else the call will probably run unquantised
                experts.quantize_ahead()

        fewest = self.min_tokens_per_expert
        rows = _rows_in_words(x_TH.shape[1], x_TH.dtype, self.recipe, fewest, backward)
        experts.plan = self.transport.plan(expert_TK, self.num_local_experts, meanwhile, rows)
        if experts.plan.tokens_per_expert < fewest:
            _warn_of_few_tokens(fewest)
            experts.recipe, experts.keep, experts.quantized_weights = unquantized(self.recipe), False, {}


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


@lru_cache(maxsize=64)
def unquantized(recipe: Recipe) -> Recipe:
    """The recipe without any quantisation."""
    return replace(recipe, quantize_gemm=False, wgrad="hp", dispatch_fwd="bf16", combine_fwd="bf16",
                   dispatch_bwd="bf16", combine_bwd="bf16", preactivation="bf16")


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


def flattened_gradients(layout: tuple, grads: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """Stacked gradients by role in the order of `flattened`. None: a role has none."""
    flat = []
    for role, size in layout:
        grad = grads.get(role)
        flat += [grad] if size == 0 else list(grad.unbind(0)) if grad is not None else [None] * size
    return flat


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
    def forward(ctx, ffn: ExpertFFN, layout, adapted, frozen, grad_enabled, expert_TK, x_TH, weight_TK, *tensors):
        # In forward, torch.is_grad_enabled() is always False, and needs_input_grad ignores torch.no_grad.
        backward = grad_enabled and any(ctx.needs_input_grad)
        recipe = unquantized(ffn.recipe) if ffn.recorded_whole and ffn.has_few_tokens(expert_TK) else ffn.recipe
        experts = _experts(ffn, recipe, layout, adapted, frozen, tensors, x_TH.dtype, x_TH.device,
                           transposed=False)
        call = partial(_forward, ffn, backward, experts)
        if ffn.recorded_whole:
            call = experts.step("whole forward", call, None, (backward, ffn.num_local_experts))
        made = call([expert_TK, x_TH, weight_TK])
        kinds, plan = made.pop("kinds and plan")
        y_TH, *kept = made.values()
        # Autograd saves some other tensor than the parameter where activation checkpointing recomputes it.
        parameters = () if ffn.sum_of is None else tensors[2 * len(adapted):]
        ctx.ffn, ctx.call = ffn, (experts.recipe, x_TH.dtype, layout, adapted, frozen, kinds, plan, parameters)
        ctx.save_for_backward(*tensors, *kept)
        return y_TH

    @staticmethod
    @backward_of_call
    def backward(ctx, g_TH):
        ffn, (recipe, dtype, layout, adapted, frozen, kinds, plan, parameters) = ctx.ffn, ctx.call
        needs, saved = ctx.needs_input_grad[6:], ctx.saved_tensors
        count = len(needs) - 2
        experts = _experts(ffn, recipe, layout, adapted, frozen, saved[:count], dtype, g_TH.device, transposed=True)
        if parameters:
            nodes = [node for node, _ in ctx.next_functions[-len(parameters):]]
            experts.sums = _sums(ffn, layout, parameters, nodes, needs[2 + 2 * len(adapted):])
        call = partial(_backward, ffn, experts, plan, kinds, layout, needs)
        if ffn.recorded_whole:
            call = experts.step("whole backward", call, None, (kinds, layout, needs))
        grads = call([g_TH, *saved[count:]])
        places = unflattened(layout, range(2 + 2 * len(adapted), len(needs)))
        grads |= {places[role]: one.out_ENK for role, one in experts.sums.items() if not one.begun}
        return None, None, None, None, None, None, *grads.values()


def _sums(ffn: ExpertFFN, layout: tuple, parameters: Sequence[torch.Tensor], nodes: Sequence[Node],
          needs: Sequence[bool]) -> dict[str, Sum]:
    """Where the gradients of stacked weights go, by role. Without those that get memory of their own."""
    needed, node_of = unflattened(layout, needs), unflattened(layout, nodes)
    found = {role: ffn.sum_of(one, node_of[role]) for role, one in unflattened(layout, parameters).items()
             if needed[role] is True and not role.endswith("_bias")}
    return {role: one for role, one in found.items() if one is not None}


def _experts(ffn: ExpertFFN, recipe: Recipe, layout: tuple, adapted: Sequence[str],
             frozen: dict[str, MXTensor] | None, tensors: Sequence[torch.Tensor], dtype: torch.dtype,
             device: torch.device, transposed: bool) -> ExpertMath:
    """The arithmetic of a forward or a backward, without its plan. `tensors`: adapters' factors, and flat weights.

    `transposed`: the GEMMs contract over the weights' second to last axis, as backward's do.
    """
    count = 2 * len(adapted)
    adapters = {name: LowRank(*tensors[2 * i:2 * i + 2]) for i, name in enumerate(adapted)}
    weights = unflattened(layout, tensors[count:])
    kept = kept_of(ffn, recipe, layout, tensors[count:], frozen, transposed)
    return ExpertMath(ffn.formula, recipe, None, weights, dtype, kept, adapters, executor_for(device), frozen)


def kept_of(ffn: ExpertFFN, recipe: Recipe, layout: tuple, tensors: Sequence[torch.Tensor],
            frozen: dict[str, MXTensor] | None, transposed: bool) -> dict[str, MXTensor] | None:
    """The quantised weights that calls share, as ExpertMath takes them. `tensors`: flat weights."""
    if ffn.kept is None or not recipe.quantize_gemm or frozen is not None:
        return None
    matrices = sum(size or 1 for role, size in layout if not role.endswith("_bias"))  # which come before biases
    return ffn.kept.of(tensors[:matrices], transposed)


def _forward(ffn: ExpertFFN, backward: bool, experts: ExpertMath, given: list) -> dict:
    """The output y_TH; the tensors that backward needs, by number; and their kinds, as `taken_apart` returns them,
    with the plan. The plan is None if its tensors were saved. Takes expert_TK, x_TH and weight_TK."""
    expert_TK, x_TH, weight_TK = given
    given.clear()
    dtype, timed = x_TH.dtype, ffn.timed or nullcontext
    ffn._plan(experts, expert_TK, x_TH, backward)
    plan, recipe = experts.plan, experts.recipe
    with timed("dispatch"):
        rows = [*ffn.transport.dispatch(plan, x_TH, wire_of(recipe, recipe.dispatch_fwd), weight_TK)]
    made = experts.step("forward", partial(experts.forward_rows, backward), tuple(experts.stacks), (backward, ))(rows)
    with timed("combine"):
        y_TH, _ = ffn.transport.combine(plan, made.pop("y_PH"), wire_of(recipe, recipe.combine_fwd), dtype)
    replayable = ffn.transport.replayable_plan is not None
    kept, kinds = taken_apart([*map(made.get, Rows._fields), *(plan if replayable else ())])
    return {"y_TH": y_TH, **dict(enumerate(kept)), "kinds and plan": (kinds, None if replayable else plan)}


def _backward(ffn: ExpertFFN, experts: ExpertMath, plan: Any, kinds: tuple, layout: tuple, needs: Sequence[bool],
              given: list) -> dict:
    """The gradients of x, of the routing weights, of the adapters' factors and of the weights, by number: None where
    `needs` is false. Takes the output's gradient and what `_forward` kept."""
    g_TH, *kept = given
    given.clear()
    values, recipe, dtype, adapted = put_together(kept, kinds), experts.recipe, experts.dtype, experts.adapters
    rows = Rows(*values[:len(Rows._fields)])
    experts.plan = plan = ffn.transport.replayable_plan(*values[len(rows):]) if plan is None else plan
    roles = unflattened(layout, needs[2 + 2 * len(adapted):])
    needed = {role for role, need in roles.items() if (need if isinstance(need, bool) else any(need))}
    # The gradient of a combine is a dispatch, and the gradient of a dispatch a combine. Both take place even if this
    # rank needs no gradient of x: other ranks may need theirs.
    dispatch_wire, combine_wire = wire_of(recipe, recipe.combine_bwd), wire_of(recipe, recipe.dispatch_bwd)
    grads, (x_grad, weight_grad) = experts.backward(
        partial(ffn.transport.dispatch, plan, g_TH.to(dtype), dispatch_wire, phase="dispatch of the gradient"),
        partial(ffn.transport.start_combine, plan, wire=combine_wire, dtype=dtype, phase="combine of the gradient"),
        partial(ffn.transport.sms_beside, plan, g_TH.shape[1], dtype, combine_wire), rows, needed)
    flat = [x_grad, weight_grad, *(factor for name in adapted for factor in experts.adapter_grads[name]),
            *flattened_gradients(layout, grads)]
    return dict(enumerate(grad if need else None for grad, need in zip(flat, needs, strict=True)))
