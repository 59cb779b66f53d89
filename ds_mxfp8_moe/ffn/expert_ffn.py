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
(`recipe.preactivation`). The experts' weights are not copied: backward quantizes them again. With `ExpertFFN.kept`,
calls share quantized weights instead. Weights that are held in MXFP8 alone (frozen_weights.py) are read as they are,
and backward transposes them for one GEMM at a time. Those in MXFP4 are unpacked for one GEMM at a time, in forward and
in backward. A recipe without quantization keeps everything in the tokens' dtype.

This file is the differentiable function. expert_math.py computes the rows, transport/ moves them, compute/casts.py and
compute/grouped_gemm.py choose the kernels, and compute/recorded.py replays their launches.

The weight gradients dW1 = dpre^T x and dW2 = g^T h contract over rows. Their operands:

    operand                   wgrad "hp"              wgrad "mxfp8"
    x                         dequantized MXFP8       MXFP8 re-scaled along the rows
    h                         dequantized MXFP8       MXFP8 re-scaled along the rows
    g that came as MXFP8      dequantized MXFP8       MXFP8 re-scaled along the rows
    g that came unquantized   as it came              quantized along the rows (*)
    dpre                      in the tokens' dtype    quantized along the rows (*)

(*) On Hopper, with blocks of 128: quantized as dgrad reads it, then re-scaled along the rows.

The biases' gradients are float32 sums of g and of dpre in the tokens' dtype.

Adapters (`LowRank`) add (x A1^T) B1^T to pre, and (h A2^T) B2^T to y. They multiply dequantized rows in the tokens'
dtype. Their weights have gradients of their own, so that the experts' weights may be frozen. With
`ExpertFFN.merge_aware`, the GEMMs of frozen weights multiply with the rounded sum of weights and B A instead, in
forward and for the gradient of the rows. A and B have the gradients that they have apart: rounding counts as none.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

from ..compute.formula import ExpertFormula, LowRank
from ..compute.recorded import Kept, recorded
from ..compute.routing import Routes
from ..compute.sums import Sum
from ..config import Recipe
from ..transport import RowFormat, Transport
from ..transport.deadline import naming_evaluation, tell_peers
from .call import Call, flattened, flattened_gradients, roles_needed, unflattened
from .expert_math import ExpertMath, Gradients, Projection
from .frozen_weights import FrozenWeights
from .kept_weights import KeptWeights

# function(*args), of which torch.compile sees nothing: the host decides sizes in it.
_outside_compile = torch.compiler.disable(lambda function, *args: function(*args))


@dataclass(frozen=True, eq=False)
class ExpertFFN:
    """What one layer's experts compute, in which recipe, over which transport.

    Attributes:
        min_tokens_per_expert: a call computes unquantized if the experts of the group get fewer tokens on average.
        kept: the quantized weights of the layer, which calls share. None: every call quantizes the weights.
        sum_of: tells in backward where a parameter's gradient goes, given the parameter and autograd's node that
            accumulates into its `grad`. Autograd gets a gradient that begins a sum, but none that is added to it.
            None, or a result of None: the gradient has its own memory.
        merge_aware: whether adapters of frozen weights are merged into them, as in an export, for each GEMM.
        turns: parts of the tokens that are computed one after the other. Backward computes each part again, so what a
            part keeps for it exists for one part at a time. The result has the same bits as in one turn, where each
            turn has enough tokens per expert; gradients of weights are sums over the turns.
        training: whether the layer is in training mode. An error in evaluation mode explains what may have caused it.
    """

    formula: ExpertFormula
    recipe: Recipe
    transport: Transport
    num_local_experts: int
    min_tokens_per_expert: float = 0
    name: str = "MoE layer"
    kept: KeptWeights | None = None
    sum_of: Callable[[torch.nn.Parameter, Node], Sum | None] | None = None
    merge_aware: bool = False
    turns: int = 1
    training: bool = True

    def has_few_tokens(self, expert_TK: torch.Tensor) -> bool:
        """Whether a call computes unquantized, if all ranks of the group have as many choices."""
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
            frozen: weights that are held in MXFP8 or MXFP4 alone. `weights` then has biases at most, and the call
                always runs the recipe, which multiplies MXFP8.

        Returns:
            [T, H] in x's dtype, or in autocast's under autocast: the sum of weight * expert(x) over a token's choices.
            A token without choices gets 0. Collective: every rank of the group must call it.
        """
        if torch.compiler.is_dynamo_compiling():
            return _outside_compile(self, x_TH, routes, weights, adapters, frozen)
        if self.turns > 1:
            return self._in_turns(x_TH, routes, weights, adapters, frozen)
        with self.outside_autocast(x_TH.device.type) as autocast:
            x_TH = x_TH if autocast is None else x_TH.to(autocast)
            layout, tensors = flattened(weights)
            factors = [factor for adapter in (adapters or {}).values() for factor in adapter]
            call = Call(self, self.math(x_TH.dtype), layout, tuple(adapters or ()), frozen and frozen.operands(),
                        autocast)
            return self.function(call, torch.is_grad_enabled(), routes.expert_TK, x_TH, routes.weight_TK, *factors,
                                 *tensors)

    def _in_turns(self, x_TH: torch.Tensor, routes: Routes, *others: Any) -> torch.Tensor:
        """Every rank has as many turns, some maybe without tokens, since ranks meet in each."""
        turn = replace(self, turns=1)
        parts = zip(*(x.tensor_split(self.turns) for x in (x_TH, routes.expert_TK, routes.weight_TK)), strict=True)
        return torch.cat([checkpoint(turn, x, replace(routes, expert_TK=expert_TK, weight_TK=weight_TK), *others,
                                     use_reentrant=False, preserve_rng_state=False)
                          for x, expert_TK, weight_TK in parts])

    def math(self, dtype: torch.dtype) -> ExpertMath:
        """The arithmetic of a call whose tokens have this dtype."""
        return ExpertMath(self.formula, self.recipe, dtype)

    @property
    def function(self) -> Callable:
        """What computes a call."""
        return _ExpertFFNFunction.apply

    @contextmanager
    def outside_autocast(self, device_type: str) -> Iterator[torch.dtype | None]:
        """Within it, autocast is off, and its dtype is given, None if it was off before. Peers get to know errors."""
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        try:
            with torch.autocast(device_type, enabled=False) if autocast else nullcontext(), \
                    nullcontext() if self.training else naming_evaluation():
                yield autocast
        except Exception as error:
            tell_peers(error)
            raise


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
        if ffn.transport.replayable:
            call = call.unquantized() if ffn.has_few_tokens(expert_TK) else call
            projections = call.projections(tensors, transposed=False)
            y_TH, kept = _forward_whole(ffn.transport, ffn.num_local_experts, None, call.math, backward, x_TH,
                                        expert_TK, weight_TK, *projections)
        else:
            plan, call, projections = call.plan(expert_TK, x_TH, tensors, backward)
            y_TH, kept = _forward(ffn.transport, ffn.num_local_experts, plan, call.math, backward, x_TH, expert_TK,
                                  weight_TK, *projections)
        # Autograd saves some other tensor than the parameter where activation checkpointing recomputes it.
        parameters = () if ffn.sum_of is None else tensors[2 * len(call.adapted):]
        ctx.ffn, ctx.call, ctx.tree, ctx.parameters = ffn, call, kept.tree, parameters
        ctx.save_for_backward(*tensors, *kept.tensors)
        return y_TH

    @staticmethod
    @backward_of_call
    def backward(ctx, g_TH):
        ffn, call, parameters = ctx.ffn, ctx.call, ctx.parameters
        needs, saved = ctx.needs_input_grad[3:], ctx.saved_tensors
        count, first = len(needs) - 2, 2 * len(call.adapted)
        projections, sums = call.projections(saved[:count], transposed=True), {}
        if parameters:
            nodes = [node for node, _ in ctx.next_functions[-len(parameters):]]
            sums = _sums(ffn, call.layout, parameters, nodes, needs[2 + first:])
            projections = [one._replace(sums=tuple(map(sums.get, one.roles))) for one in projections]
        run = _backward_whole if ffn.transport.replayable else _backward
        needed = roles_needed(call.layout, needs[2 + first:])
        dx_TH, dweight_TK, gradients = run(ffn.transport, call.math, needed, g_TH, Kept(ctx.tree, saved[count:]),
                                           *projections)
        adapters = {"up": gradients.up_adapter, "down": gradients.down_adapter}
        by_role = gradients.by_role | {role: one.out_ENK for role, one in sums.items() if not one.begun}
        flat = [dx_TH, dweight_TK, *chain(*(adapters[name] for name in call.adapted)),
                *flattened_gradients(call.layout, by_role)]
        return None, None, None, *(grad if need else None for grad, need in zip(flat, needs, strict=True))


def row_format(recipe: Recipe, dtype: str) -> RowFormat:
    """The format in which rows of the config's `dtype`, "mxfp8" or "bf16", travel."""
    return RowFormat(dtype == "mxfp8", recipe.block_size, recipe.scaling_mode)


def _forward(transport: Transport, num_local_experts: int, plan: Any, math: ExpertMath, backward: bool,
             x_TH: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor, up: Projection,
             down: Projection) -> tuple[torch.Tensor, Kept]:
    """The output y_TH, and what backward needs: Rows and the plan. `plan`: None makes it."""
    recipe = math.recipe
    if plan is None:
        plan = transport.plan(expert_TK, num_local_experts)
    arrived = transport.dispatch(plan, x_TH, row_format(recipe, recipe.dispatch_fwd), weight_TK)
    y_PH, rows = math.forward(*arrived, up, down, plan.group_ends_E, backward)
    del arrived  # which frees x_PH if no backward follows
    y_TH, _ = transport.combine(plan, y_PH, row_format(recipe, recipe.combine_fwd), math.dtype)
    return y_TH, Kept.of(rows, plan)


def _backward(transport: Transport, math: ExpertMath, needed: frozenset[str], g_TH: torch.Tensor, kept: Kept,
              up: Projection, down: Projection) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """The gradients of x, of the routing weights and of the experts. `needed`: roles that need one."""
    rows, plan = kept.values()
    recipe, ends_E, wants_ups = math.recipe, plan.group_ends_E, not needed.isdisjoint(up.roles)
    # The gradient of a combine is a dispatch, and the gradient of a dispatch a combine. Both take place even if this
    # rank needs no gradient of x: other ranks may need theirs.
    dispatch_format, combine_format = row_format(recipe, recipe.combine_bwd), row_format(recipe, recipe.dispatch_bwd)
    dpre = math.backward_to_dpre(
        transport.dispatch(plan, g_TH.to(math.dtype), dispatch_format, phase="dispatch of the gradient")[0], rows, up,
        down, ends_E, needed)
    by_role = dpre.gradients.by_role
    ups_first = wants_ups and dpre.wgrad is not None and math.ups_first_takes_less(dpre, rows.x_PH.shape[1],
                                                                                   len(ends_E))
    if ups_first:
        by_role |= math.weight_gradients(dpre.wgrad, rows.x_PH, up, ends_E, needed, dpre.columns)
        dpre = dpre._replace(wgrad=None)
    dx_TH, dweight_TK = transport.combine(
        plan, math.backward_to_dx(dpre.rows, dpre.low_PR, up, ends_E), combine_format, math.dtype, dpre.dweight_P,
        phase="combine of the gradient")
    if wants_ups and not ups_first:
        g = dpre.rows if dpre.wgrad is None else dpre.wgrad
        by_role |= math.weight_gradients(g, rows.x_PH, up, ends_E, needed, dpre.columns)
    return dx_TH, dweight_TK, dpre.gradients


_forward_whole, _backward_whole = recorded(_forward), recorded(_backward)


def _sums(ffn: ExpertFFN, layout: tuple, parameters: Sequence[torch.Tensor], nodes: Sequence[Node],
          needs: Sequence[bool]) -> dict[str, Sum]:
    """Where the gradients of stacked weights go, by role. Without those that get memory of their own."""
    needed, node_of = unflattened(layout, needs), unflattened(layout, nodes)
    found = {role: ffn.sum_of(one, node_of[role]) for role, one in unflattened(layout, parameters).items()
             if needed[role] is True and not role.endswith("_bias")}
    found = {role: one for role, one in found.items() if one is not None}
    first = min((one.out_ENK.data_ptr() for one in found.values()), default=0)
    return {role: one._replace(place=one.out_ENK.data_ptr() - first) for role, one in found.items()}
