# SPDX-License-Identifier: Apache-2.0
"""Experts whose formula no fused kernel computes: the model's own code runs between MXFP8 GEMMs, under autograd.

The letters in tensor names are those of expert_ffn.py, and so are exchanges, GEMMs and casts. Each of them is an
autograd Function of its own here, and torch does the rest:

    x_PH = dispatch(x_TH)               pre_PG = x_PH W1^T + b1         h_PF = between(pre_PG)
    y_PH = after(h_PF W2^T + b2)        y_TH = combine(w_P * y_PH)

Without `after`, the routing weight multiplies h and b2 instead, as in expert_ffn.py. The second GEMM's backward then
reads the gradient as it came, in MXFP8. With `after`, it quantizes the gradient that comes out of `after`.

The model's functions get ones in padding rows, which they can compute. Their results there are dropped, so that the
gradients there are zeros. Neither reaches another row or a parameter.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..compute.activation import bias_rows, group_sums
from ..compute.formula import LowRank
from ..compute.grouped_gemm import plain
from ..compute.mx import MXTensor
from ..compute.recorded import Kept
from ..config import Recipe
from .call import ROLES_OF, Call, flattened, flattened_gradients, roles_needed, unflattened
from .expert_ffn import ExpertFFN, backward_of_call, row_format

# Stands for a routing weight of 0 on its way to the experts, where 0 marks padding. The smallest normal float32.
ZERO = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class OpenFormula:
    """What experts compute beside their GEMMs, in functions that autograd differentiates.

    Both functions compute each row alone. They may have parameters, and run under the caller's autocast.

    Attributes:
        between: takes the first GEMM's result [P, G], biases included, in the tokens' dtype. Returns [P, F].
        after: takes an expert's output [P, H] before the routing weight, in the tokens' dtype. Returns [P, H]. None:
            there is nothing.
        in_turn: `between` takes columns of gate and up in turn, first one of gate. Else it takes all of gate first.
    """

    between: Callable[[torch.Tensor], torch.Tensor]
    after: Callable[[torch.Tensor], torch.Tensor] | None = None
    in_turn: bool = False


@dataclass(frozen=True, eq=False)
class OpenFFN(ExpertFFN):
    """An ExpertFFN with an OpenFormula. It takes the same arguments, and returns the same.

    It records nothing to replay, and uses no `sum_of`.
    """

    formula: OpenFormula

    @property
    def function(self) -> Callable:
        return self._compute

    def _compute(self, call: Call, grad_enabled: bool, expert_TK: torch.Tensor, x_TH: torch.Tensor,
                 weight_TK: torch.Tensor, *flat: torch.Tensor) -> torch.Tensor:
        formula, dtype = self.formula, x_TH.dtype
        count = 2 * len(call.adapted)
        factors, weights = flat[:count], unflattened(call.layout, flat[count:])
        needed = grad_enabled and any(one.requires_grad for one in (x_TH, weight_TK, *flat))
        plan, call, projections = call.plan(expert_TK, x_TH, flat, needed)
        planned = _Planned(call, plan, call.kept(flat[count:], transposed=True))
        by_name = dict(zip(ROLES_OF, projections, strict=True))

        def multiply(x_PK: torch.Tensor, name: str) -> torch.Tensor:
            layout, tensors = flattened({role: weights.get(role) for role in ROLES_OF[name]})
            i = 2 * call.adapted.index(name) if name in call.adapted else count
            return _GroupedGEMM.apply(planned, by_name[name], name, layout, x_PK, *factors[i:i + 2], *tensors)

        def call_model(function: Callable, x_PN: torch.Tensor) -> torch.Tensor:
            with torch.autocast(x_PN.device.type, dtype) if call.autocast else nullcontext():
                return function(x_PN.masked_fill(padding_P1, 1)).masked_fill(padding_P1, 0)

        x_PH, weight_P1, padding_P1 = _Dispatch.apply(planned, x_TH, weight_TK)
        pre_PG = multiply(x_PH, "up")
        del x_PH
        if (bias_EG := by_name["up"].bias_EN()) is not None:
            pre_PG = (pre_PG + _BiasRows.apply(planned, bias_EG)).to(dtype)
        if formula.in_turn:
            pre_PG = torch.stack(pre_PG.chunk(2, dim=1), dim=2).flatten(1)
        h_PF = call_model(formula.between, pre_PG)
        del pre_PG
        weight_first = formula.after is None
        y_PH = multiply(h_PF * weight_P1 if weight_first else h_PF, "down")
        del h_PF
        if (bias_EH := by_name["down"].bias_EN()) is not None:
            bias_PH = _BiasRows.apply(planned, bias_EH)
            y_PH = y_PH + bias_PH * weight_P1 if weight_first else (y_PH + bias_PH).to(dtype)
        if not weight_first:
            y_PH = call_model(formula.after, y_PH) * weight_P1
        return _Combine.apply(planned, y_PH)


class _Planned(NamedTuple):
    """What forward and backward of one call share.

    Attributes:
        kept: the quantized weights that backwards share, by GEMM. None: they share none.
    """

    call: Call
    plan: Any
    kept: dict[str, MXTensor] | None

    @property
    def ffn(self) -> ExpertFFN:
        return self.call.ffn

    @property
    def recipe(self) -> Recipe:
        return self.call.math.recipe

    @property
    def dtype(self) -> torch.dtype:
        """Of the tokens."""
        return self.call.math.dtype


class _Dispatch(torch.autograd.Function):
    """Tokens and routing weights -> rows x_PH, routing weights [P, 1], and which rows are padding, bool [P, 1]."""

    @staticmethod
    def forward(ctx, call, x_TH, weight_TK):
        ctx.ffn, ctx.call = call.ffn, call
        sent_TK = torch.where(weight_TK == 0, ZERO, weight_TK.float())
        x_PH, weight_P = call.ffn.transport.dispatch(
            call.plan, x_TH, row_format(call.recipe, call.recipe.dispatch_fwd), sent_TK)
        weight_P1 = weight_P.unsqueeze(1)
        padding_P1 = weight_P1 == 0
        ctx.mark_non_differentiable(padding_P1)
        return x_PH, weight_P1.masked_fill(weight_P1 == ZERO, 0), padding_P1

    @staticmethod
    @backward_of_call
    def backward(ctx, g_PH, g_P1, _):
        call = ctx.call
        return None, *call.ffn.transport.combine(
            call.plan, g_PH.contiguous(), row_format(call.recipe, call.recipe.dispatch_bwd), call.dtype,
            g_P1.squeeze(1).contiguous(), phase="combine of the gradient")


class _Combine(torch.autograd.Function):
    """Weighted rows -> tokens."""

    @staticmethod
    def forward(ctx, call, y_PH):
        ctx.ffn, ctx.call = call.ffn, call
        return call.ffn.transport.combine(call.plan, y_PH.contiguous(),
                                          row_format(call.recipe, call.recipe.combine_fwd), call.dtype)[0]

    @staticmethod
    @backward_of_call
    def backward(ctx, g_TH):
        call = ctx.call
        return None, call.ffn.transport.dispatch(
            call.plan, g_TH.to(call.dtype), row_format(call.recipe, call.recipe.combine_bwd),
            phase="dispatch of the gradient")[0]


class _GroupedGEMM(torch.autograd.Function):
    """Rows, plain or MXFP8, times their experts' weights of one GEMM, with its adapter."""

    @staticmethod
    def forward(ctx, planned, projection, name, layout, x_PK, *tensors):
        math = planned.call.math
        x_PK = math.quantized(x_PK.contiguous())
        if x_PK.dtype != math.dtype:
            x_PK = MXTensor.of(x_PK.parts, math.dtype) if isinstance(x_PK, MXTensor) else x_PK.to(math.dtype)
        adapted = projection.adapter is not None
        kept = Kept.of(x_PK if adapted or any(ctx.needs_input_grad[5:]) else None)
        ctx.ffn, ctx.call = planned.ffn, (planned, name, layout, adapted, kept.tree)
        ctx.save_for_backward(*tensors, *kept.tensors)
        return math.gemm(x_PK, projection, planned.plan.group_ends_E)

    @staticmethod
    @backward_of_call
    def backward(ctx, g_PN):
        (planned, name, layout, adapted, tree), needs = ctx.call, ctx.needs_input_grad[5:]
        saved, factors = ctx.saved_tensors, 2 * adapted
        tensors, (x_PK, ) = saved[:len(needs)], Kept(tree, saved[len(needs):]).values()
        call = planned.call
        adapter = LowRank(*tensors[:factors]) if adapted else None
        projection = call.projection(name, unflattened(layout, tensors[factors:]), adapter)
        if planned.kept is not None:
            projection = call.quantized(projection, name, planned.kept, transposed=True)
        g_PN = g_PN if isinstance(g_PN, MXTensor) else g_PN.contiguous()
        dx_PK, by_role, of_adapter = call.math.product_backward(
            g_PN, x_PK, projection, planned.plan.group_ends_E, roles_needed(layout, needs[factors:]))
        flat = [*(of_adapter or ()), *flattened_gradients(layout, by_role)]
        return None, None, None, None, dx_PK, *(
            grad if need else None for grad, need in zip(flat, needs, strict=True))


class _BiasRows(torch.autograd.Function):
    """Biases [E, N] -> the bias of each row's expert, [P, N] float32, so that its gradient is not rounded either."""

    @staticmethod
    def forward(ctx, call, bias_EN):
        ctx.ffn, ctx.call, ctx.dtype = call.ffn, call, bias_EN.dtype
        return bias_rows(bias_EN.float(), call.plan.group_ends_E, call.plan.num_rows)

    @staticmethod
    @backward_of_call
    def backward(ctx, g_PN):
        return None, group_sums(plain(g_PN), ctx.call.plan.group_ends_E).to(ctx.dtype)
