# SPDX-License-Identifier: Apache-2.0
"""The transport over deepspeed.comm (NCCL or gloo): small pieces composed, correct on every machine.

One forward makes three all-to-alls (counts, expert ids, rows) on the way out and one on the way back; data, scales and
routing weights share one uint8 message. The only device-to-host read is `Collective._read_counts`.
"""

from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch

from ..mx import MXTensor, quantize
from ..routing import count
from . import ROW_ALIGNMENT, Plan, Wire


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A 2-D tensor as rows of uint8."""
    if x.numel() == 0:  # strides of empty tensors are anything, which view(dtype) refuses
        return x.new_empty((x.shape[0], x.shape[1] * x.element_size()), dtype=torch.uint8)
    return x.contiguous().view(torch.uint8)


def _split(message: torch.Tensor, widths: list) -> list:
    """The parts of a message, each copied to memory of its own, where any dtype is aligned."""
    return [part.clone(memory_format=torch.contiguous_format) for part in message.split(widths, dim=1)]


def _pad_row(x: torch.Tensor) -> torch.Tensor:
    """Appends the row of zeros that out-of-range indices read."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index] for 2-D plain or MXFP8 rows; index len(x) reads zeros (scale byte 0)."""
    if isinstance(x, MXTensor):
        return x.with_parts(_rows(x.qdata.view(torch.uint8), index).view(x.qdata.dtype),
                            _rows(x.scale.view(torch.uint8), index).view(x.scale.dtype))
    return _pad_row(x).index_select(0, index)


@dataclass(frozen=True)
class Collective:
    """Expert-parallel exchange over the process group `group`; None means a group of this rank alone."""

    group: Any = None

    @property
    def world_size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(group=self.group)

    def _exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, phase: str) -> torch.Tensor:
        """All-to-all of rows: `send_splits[w]` rows of x go to rank w; returns sum(recv_splits) rows by rank."""
        if self.world_size == 1:
            return x
        out = x.new_empty((sum(recv_splits), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(recv_splits), list(send_splits), group=self.group)
        return out

    def _read_counts(self, counts: torch.Tensor) -> list:
        """The transport's one device-to-host read: the sizes of what follows."""
        return counts.tolist()

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int) -> Plan:
        """Plans the exchange of tokens routed to the global experts `expert_TK` (int64 [T, K], -1: nowhere)."""
        (T, K), W, E = expert_TK.shape, self.world_size, num_local_experts
        device = expert_TK.device
        rank_TK = torch.where(expert_TK >= 0, expert_TK.div(E, rounding_mode="floor"), W)
        wanted_TW = torch.zeros((T, W + 1), dtype=torch.bool, device=device).scatter_(1, rank_TK, True)[:, :W]

        send_counts_W = wanted_TW.sum(0)
        message = torch.cat([send_counts_W.view(W, 1), count(expert_TK, W * E).view(W, E),
                             send_counts_W.new_full((W, 1), T)], dim=1)
        ones = (1, ) * W
        arriving = self._exchange(message, ones, ones, "counts")
        counts = self._read_counts(torch.cat([send_counts_W, arriving[:, 0], arriving[:, 1:E + 1].sum(0),
                                              arriving[:, E + 1].sum().view(1)]))
        send_splits, recv_splits = tuple(counts[:W]), tuple(counts[W:2 * W])
        group_sizes, tokens_of_group = counts[2 * W:2 * W + E], counts[-1]
        S, R, M = sum(send_splits), sum(recv_splits), sum(group_sizes)

        # Rows to send in the order of (rank, token): each wanted pair's place is how many stand before it.
        wanted = wanted_TW.t().reshape(-1)
        slot = torch.where(wanted, wanted.cumsum(0) - 1, S)
        pair_S = slot.new_empty(S + 1).scatter_(0, slot, torch.arange(W * T, device=device))[:S]
        send_token_S = pair_S % max(T, 1)
        send_rank_S = pair_S.div(max(T, 1), rounding_mode="floor")
        expert_SK = expert_TK.index_select(0, send_token_S)
        own_SK = rank_TK.index_select(0, send_token_S) == send_rank_S.unsqueeze(1)
        local_SK = torch.where(own_SK, expert_SK - send_rank_S.unsqueeze(1) * E, -1).to(torch.int16)
        local_RK = self._exchange(_bytes(local_SK), send_splits, recv_splits, "expert ids")
        local_RK = local_RK.view(torch.int16).view(R, K).long()

        # Received choices sorted by expert, stable, each group padded to whole tiles.
        ends, end = [], 0
        for size in group_sizes:
            end += -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
            ends.append(end)
        flat = local_RK.reshape(-1)
        order = torch.where(flat < 0, E, flat).argsort(stable=True)[:M]
        sizes_E = torch.tensor(group_sizes, device=device)
        ends_E = torch.tensor(ends, device=device)
        padded_E = (sizes_E + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
        shift_E = (ends_E - padded_E) - (sizes_E.cumsum(0) - sizes_E)
        place_M = torch.arange(M, device=device) + shift_E.index_select(0, flat.index_select(0, order))
        slot_RK = flat.new_full((R * K, ), end).scatter_(0, order, place_M).view(R, K)
        source_P = flat.new_full((end, ), R * K).scatter_(0, place_M, order)

        return Plan(num_tokens=T, top_k=K, tokens_per_expert=tokens_of_group * K / (W * E), send_splits=send_splits,
                    recv_splits=recv_splits, send_token_S=send_token_S, sent_slot_WT=slot.view(W, T), own_SK=own_SK,
                    group_ends=tuple(ends), group_ends_E=ends_E.to(torch.int32), slot_RK=slot_RK, source_P=source_P)

    def dispatch(self, plan: Plan, x_TH: torch.Tensor, wire: Wire, weight_TK: torch.Tensor | None = None,
                 phase: str = "dispatch") -> tuple:
        """Brings tokens to their experts' ranks, each once per rank, quantised once when the wire is MXFP8.

        Returns:
            x_PH, expert-sorted rows, zero in the padding: MXTensor if `wire.mxfp8`, else of x_TH's dtype; and
            weight_P, float32 routing weight of each row (0 in the padding), or None without `weight_TK`.
        """
        H, K = x_TH.shape[1], plan.top_k
        parts = [x_TH]
        if wire.mxfp8:
            mx_TH = quantize(x_TH, wire.block_size, wire.scaling_mode)
            parts = [mx_TH.qdata, mx_TH.scale]
        message = [_bytes(part).index_select(0, plan.send_token_S) for part in parts]
        if weight_TK is not None:
            weight_SK = weight_TK.float().index_select(0, plan.send_token_S)
            message.append(_bytes(torch.where(plan.own_SK, weight_SK, 0.0)))
        widths = [part.shape[1] for part in message]
        arrived = self._exchange(torch.cat(message, dim=1), plan.send_splits, plan.recv_splits, phase)
        arrived = _split(arrived, widths)

        row_P = plan.source_P.div(K, rounding_mode="floor")
        rows = [_rows(part, row_P) for part in arrived[:len(parts)]]
        if wire.mxfp8:
            x_PH = MXTensor(rows[0].view(torch.float8_e4m3fn), rows[1].view(torch.float8_e8m0fnu), wire.block_size,
                            x_TH.dtype)
        else:
            x_PH = rows[0].view(x_TH.dtype).view(-1, H)
        if weight_TK is None:
            return x_PH, None
        weight_RK = arrived[-1].view(torch.float32).view(-1, K)
        return x_PH, _pad_row(weight_RK.reshape(-1, 1)).index_select(0, plan.source_P).squeeze(1)

    def combine(self, plan: Plan, y_PH: torch.Tensor, wire: Wire, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        """Brings expert-sorted rows back to their tokens' ranks and adds up what belongs to one token.

        Args:
            dtype: of the rows on an unquantised wire, and of the result.
            weight_P: float32 [P], a number for each row that returns beside it (the routing weights' gradient).

        Returns:
            y_TH in `dtype`, zeros for tokens without experts; and weight_TK float32, or None without `weight_P`.
        """
        partial_RH = torch.zeros((plan.slot_RK.shape[0], y_PH.shape[1]), dtype=torch.float32, device=y_PH.device)
        padded = _pad_row(y_PH)
        for k in range(plan.top_k):
            partial_RH += padded.index_select(0, plan.slot_RK[:, k])
        if wire.mxfp8:
            mx_RH = quantize(partial_RH, wire.block_size, wire.scaling_mode)
            message = [_bytes(mx_RH.qdata), _bytes(mx_RH.scale)]
        else:
            message = [_bytes(partial_RH.to(dtype))]
        if weight_P is not None:
            message.append(_bytes(_pad_row(weight_P.view(-1, 1)).index_select(0, plan.slot_RK.reshape(-1)).view(
                plan.slot_RK.shape)))
        widths = [part.shape[1] for part in message]
        back = self._exchange(torch.cat(message, dim=1), plan.recv_splits, plan.send_splits, phase)
        back = _split(back, widths)
        if wire.mxfp8:
            back_SH = MXTensor(back[0].view(torch.float8_e4m3fn), back[1].view(torch.float8_e8m0fnu),
                               wire.block_size).dequantize(torch.float32)
        else:
            back_SH = back[0].view(dtype).view(-1, y_PH.shape[1])

        y_TH = torch.zeros((plan.num_tokens, y_PH.shape[1]), dtype=torch.float32, device=y_PH.device)
        back_SH = _pad_row(back_SH)
        for slot_T in plan.sent_slot_WT:
            y_TH += back_SH.index_select(0, slot_T)
        if weight_P is None:
            return y_TH.to(dtype), None
        weight_SK = _pad_row(back[-1].view(torch.float32).view(-1, plan.top_k))
        weight_TK = sum(weight_SK.index_select(0, slot_T) for slot_T in plan.sent_slot_WT)
        return y_TH.to(dtype), weight_TK
