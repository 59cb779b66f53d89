# SPDX-License-Identifier: Apache-2.0
"""The transport of one rank that holds all experts: nothing travels, and the host waits for nothing.

It gives the same bits as the other transports: it quantizes tokens and rounds sums as if they traveled. It allocates
the most rows that the choices can need, because the host does not know the counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..compute import casts
from ..compute.mx import MXTensor
from ..compute.routing import count
from ..ops.device import has_kernels
from ..ops.mx_format import MXParts
from . import ROW_ALIGNMENT, RowFormat, Transport, padded, with_zero_row


class LocalPlan(NamedTuple):
    """What one forward's routing means.

    Attributes:
        group_ends_E: int32, the end of each expert's rows among the P.
        slot_TK: int32, the row of each choice. P where it was dropped.
        source_P: int32, the choice t * K + k of each row. T * K in padding rows.
    """

    group_ends_E: torch.Tensor
    slot_TK: torch.Tensor
    source_P: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.slot_TK.shape[0]

    @property
    def top_k(self) -> int:
        return self.slot_TK.shape[1]

    @property
    def tokens_per_expert(self) -> float:
        """Mean number of choices per expert, dropped ones included."""
        return self.slot_TK.numel() / self.group_ends_E.numel()

    @property
    def num_rows(self) -> int:
        """P."""
        return self.source_P.shape[0]


def most_rows(choices: int, experts: int) -> int:
    """P: the most rows that these choices can need. Each expert with a choice has at most 127 padding rows."""
    return (choices + (ROW_ALIGNMENT - 1) * min(experts, choices)) // ROW_ALIGNMENT * ROW_ALIGNMENT


def plan_rows(expert_TK: torch.Tensor, experts: int, num_rows: int) -> tuple:
    """ops.triton_kernels.local.plan_rows in plain torch: its oracle."""
    flat = expert_TK.reshape(-1)
    N, device, P = flat.numel(), flat.device, num_rows
    kept = (flat >= 0) & (flat < experts)
    sizes_E = count(flat, experts)
    padded_E = padded(sizes_E)
    ends_E = padded_E.cumsum(0)
    # Sorted by expert, dropped choices last. A choice's row is its place in that order, shifted by the padding.
    order = torch.where(kept, flat, experts).argsort(stable=True)
    shift_E = (ends_E - padded_E) - (sizes_E.cumsum(0) - sizes_E)
    row_N = torch.arange(N, device=device) + shift_E.index_select(0, flat.index_select(0, order).clamp(0, experts - 1))
    row_N = torch.where(kept.index_select(0, order), row_N, P)
    slot_N = torch.empty(N, dtype=torch.int32, device=device).scatter_(0, order, row_N.int())
    source = torch.full((P + 1, ), N, dtype=torch.int32, device=device).scatter_(0, row_N, order.int())
    return ends_E.int(), slot_N.view(expert_TK.shape), source[:P]


@dataclass(frozen=True)
class Local(Transport):
    """`name`: of the layer, for errors."""

    name: str = field(default="an expert-parallel exchange", compare=False)
    replayable = True

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int, meanwhile: Callable[[], None] | None = None,
             rows: str = "") -> LocalPlan:
        E = num_local_experts
        P = most_rows(expert_TK.numel(), E)
        if has_kernels(expert_TK.device):
            from ..ops.triton_kernels import local as kernels  # Triton is there on Linux alone
            return LocalPlan(*kernels.plan_rows(expert_TK.contiguous(), E, P))
        return LocalPlan(*plan_rows(expert_TK, E, P))

    def dispatch(self, plan: LocalPlan, x_TH: torch.Tensor, row_format: RowFormat,
                 weight_TK: torch.Tensor | None = None, phase: str = "dispatch") -> tuple:
        weight_TK = None if weight_TK is None else weight_TK.float().contiguous()
        if has_kernels(x_TH.device):
            from ..ops.triton_kernels import local as kernels
            x_PH, scale_BP, weight_P = kernels.dispatch_rows(
                x_TH.detach(), weight_TK, plan.slot_TK, plan.source_P,
                row_format.block_size if row_format.mxfp8 else 0, row_format.scaling_mode)
            if row_format.mxfp8:
                x_PH = MXTensor.of(MXParts(x_PH, scale_BP.t(), row_format.block_size), x_TH.dtype)
            return x_PH, weight_P
        if row_format.mxfp8:
            mx_TH = casts.quantize(x_TH, row_format.block_size, row_format.scaling_mode)
            data, scale = (self._expanded(plan, part.view(torch.uint8)) for part in (mx_TH.qdata, mx_TH.scale_bytes))
            x_PH = MXTensor.of(MXParts(data.view(torch.float8_e4m3fn), scale, row_format.block_size), x_TH.dtype)
        else:
            x_PH = self._expanded(plan, x_TH)
        if weight_TK is None:
            return x_PH, None
        return x_PH, with_zero_row(weight_TK.view(-1, 1)).view(-1).index_select(0, plan.source_P)

    def _expanded(self, plan: LocalPlan, x_TN: torch.Tensor) -> torch.Tensor:
        token_P = plan.source_P.div(plan.top_k, rounding_mode="floor")
        return with_zero_row(x_TN).index_select(0, token_P)

    def combine(self, plan: LocalPlan, y_PH: torch.Tensor, row_format: RowFormat, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        if has_kernels(y_PH.device):
            from ..ops.triton_kernels import local as kernels
            return kernels.combine_rows(y_PH, weight_P, plan.slot_TK, dtype,
                                        row_format.block_size if row_format.mxfp8 else 0, row_format.scaling_mode)
        y_PH = with_zero_row(y_PH)
        y_TH = y_PH.new_zeros((plan.num_tokens, y_PH.shape[1]), dtype=torch.float32)
        for slot_T in plan.slot_TK.unbind(1):
            y_TH += y_PH.index_select(0, slot_T)
        if row_format.mxfp8:
            y_TH = casts.quantize(y_TH, row_format.block_size, row_format.scaling_mode).dequantize()
        y_TH = (0.0 + y_TH.to(dtype).float()).to(dtype)  # as other transports round; -0 becomes 0
        if weight_P is None:
            return y_TH, None
        weight_TK = with_zero_row(weight_P.view(-1, 1)).view(-1).index_select(0, plan.slot_TK.view(-1))
        return y_TH, 0.0 + weight_TK.view(plan.slot_TK.shape)
