# SPDX-License-Identifier: Apache-2.0
"""The transport over deepspeed.comm (NCCL or gloo). It runs on every machine.

One forward makes three all-to-alls on the way out (counts, expert ids, rows) and one on the way back. Data, scales and
routing weights share one uint8 message. `Collective._read_counts` is the only place where the host waits for a GPU.

Every step exists twice, with the same bits: in plain torch, and in Triton kernels (`_dispatch`, `_combine`).
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from .. import casts
from ..mx import MXTensor
from ..ops.device import runs_triton
from ..routing import count
from . import ROW_ALIGNMENT, Plan, Transport, Wire, with_zero_row
from .deadline import SAME_CALLS, PeerFailure, all_to_all, ranks_of, set_deadline, wait_for_device


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A 2-D tensor as rows of uint8."""
    if x.numel() == 0:  # an empty tensor may have any strides, and view(dtype) refuses some
        return x.new_empty((x.shape[0], x.shape[1] * x.element_size()), dtype=torch.uint8)
    # view(-1) comes first, since a single column counts as contiguous at any stride, and view(dtype) refuses some.
    return x.contiguous().view(-1).view(torch.uint8).view(x.shape[0], -1)


def _split(message: torch.Tensor, parts: list) -> list:
    """Splits a message as `parts` were joined. Each part gets a row of zeros, and memory of its own, which is aligned
    for any dtype."""
    return [with_zero_row(part) for part in message.split([part.shape[1] for part in parts], dim=1)]


def _mx(data: torch.Tensor, scale: torch.Tensor, wire: Wire, dtype: torch.dtype) -> MXTensor:
    return MXTensor(data.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), wire.block_size, dtype)


@dataclass(frozen=True)
class Collective(Transport):
    """Expert-parallel exchange over a process group.

    Attributes:
        group: of two ranks or more.
        name: of the layer, for errors.
    """

    group: Any
    name: str = "an expert-parallel exchange"

    @property
    def world_size(self) -> int:
        return dist.get_world_size(group=self.group)

    def _exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, phase: str) -> torch.Tensor:
        """Sends `send_splits[w]` rows of x to rank w. Returns the sum(recv_splits) rows that arrive, in rank order."""
        out = x.new_empty((sum(recv_splits), x.shape[1]))
        all_to_all(out, x, recv_splits, send_splits, self.group, self._where(phase))
        return out

    def _read_counts(self, counts: torch.Tensor, meanwhile: Callable[[], None]) -> list:
        """Reads counts on the host, which waits for the GPU here. `meanwhile`: called before the wait."""
        if counts.device.type == "cpu":  # as on GPUs, although the host has waited already
            meanwhile()
            return counts.tolist()
        on_host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
        on_host.copy_(counts, non_blocking=True)
        copied = get_accelerator().Event()
        copied.record()
        meanwhile()
        wait_for_device(copied, self.group, self._where("counts"), set_deadline(self.group, counts.device))
        return on_host.tolist()

    def _check_same_plan(self, signatures: list, call: str) -> None:
        """Raises PeerFailure, on every rank, if a rank is in the plan of another layer or of other rows."""
        if len(set(signatures)) > 1:
            ranks, me = ranks_of(self.group), dist.get_rank(group=self.group)
            others = tuple(rank for rank, one in zip(ranks, signatures, strict=True) if one != signatures[me])
            raise PeerFailure(f"ranks are in different calls: rank {ranks[me]} is in {self._where('counts')}{call}, "
                              f"and ranks {list(others)} are in another. {SAME_CALLS}", others)

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int,
             meanwhile: Callable[[], None] | None = None, rows: str = "") -> Plan:
        (T, K), W, E = expert_TK.shape, self.world_size, num_local_experts
        call = f" ({K} choices a token{rows and ', '}{rows})"
        device = expert_TK.device
        rank_TK = torch.where(expert_TK >= 0, expert_TK.div(E, rounding_mode="floor"), W)
        wanted_TW = torch.zeros((T, W + 1), dtype=torch.bool, device=device).scatter_(1, rank_TK, True)[:, :W]

        send_counts_W = wanted_TW.sum(0)
        message = torch.cat([send_counts_W.view(W, 1), count(expert_TK, W * E).view(W, E),
                             send_counts_W.new_full((W, 1), T),
                             send_counts_W.new_full((W, 1), zlib.crc32((self.name + call).encode()))], dim=1)
        ones = (1, ) * W
        arriving = self._exchange(message, ones, ones, "counts")
        sizes_E = arriving[:, 1:E + 1].sum(0)
        of_device = []

        def launch_what_needs_no_counts() -> None:
            # Rows are sent in the order of (rank, token). A wanted pair's slot is the number of those before it.
            wanted = wanted_TW.t().reshape(-1)
            padded_E = (sizes_E + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
            ends_E = padded_E.cumsum(0)
            shift_E = (ends_E - padded_E) - (sizes_E.cumsum(0) - sizes_E)
            of_device.extend((wanted, wanted.cumsum(0) - 1, torch.arange(W * T, device=device), ends_E, shift_E))
            if meanwhile is not None:
                meanwhile()

        counts = self._read_counts(torch.cat([send_counts_W, arriving[:, 0], sizes_E,
                                              arriving[:, E + 1].sum().view(1), arriving[:, E + 2]]),
                                   launch_what_needs_no_counts)
        wanted, place, pair, ends_E, shift_E = of_device
        self._check_same_plan(counts[-W:], call)
        send_splits, recv_splits = tuple(counts[:W]), tuple(counts[W:2 * W])
        group_sizes, tokens_of_group = counts[2 * W:2 * W + E], counts[2 * W + E]
        S, R, M = sum(send_splits), sum(recv_splits), sum(group_sizes)

        slot = torch.where(wanted, place, S)
        pair_S = slot.new_empty(S + 1).scatter_(0, slot, pair)[:S]
        send_token_S = pair_S % max(T, 1)
        send_rank_S = pair_S.div(max(T, 1), rounding_mode="floor")
        id_dtype = torch.int16 if E <= torch.iinfo(torch.int16).max else torch.int32
        expert_SK = expert_TK.index_select(0, send_token_S)
        own_SK = rank_TK.index_select(0, send_token_S) == send_rank_S.unsqueeze(1)
        local_SK = torch.where(own_SK, expert_SK - send_rank_S.unsqueeze(1) * E, -1).to(id_dtype)
        local_RK = self._exchange(_bytes(local_SK), send_splits, recv_splits, "expert ids").view(id_dtype)

        # Received choices are sorted by expert, in a stable order, and each group is padded to whole tiles.
        ends, end = [], 0
        for size in group_sizes:
            end += -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
            ends.append(end)
        flat = local_RK.reshape(-1)
        order = torch.where(flat < 0, E, flat).argsort(stable=True)[:M]
        place_M = torch.arange(M, device=device) + shift_E.index_select(0, flat.index_select(0, order).int())
        slot_RK = order.new_full((R * K, ), end).scatter_(0, order, place_M).view(R, K)
        source_P = order.new_full((end, ), R * K).scatter_(0, place_M, order)

        return Plan(num_tokens=T, top_k=K, tokens_per_expert=tokens_of_group * K / (W * E), send_splits=send_splits,
                    recv_splits=recv_splits, send_token_S=send_token_S, sent_slot_WT=slot.view(W, T),
                    group_ends=tuple(ends), group_ends_E=ends_E.to(torch.int32), slot_RK=slot_RK, source_P=source_P)

    def dispatch(self, plan: Plan, x_TH: torch.Tensor, wire: Wire, weight_TK: torch.Tensor | None = None,
                 phase: str = "dispatch") -> tuple:
        if runs_triton(x_TH):
            return self._dispatch(plan, x_TH, wire, weight_TK, phase)
        parts = [x_TH]
        if wire.mxfp8:
            mx_TH = casts.quantize(x_TH, wire.block_size, wire.scaling_mode)
            parts = [mx_TH.qdata, mx_TH.scale]
        if weight_TK is not None:
            parts.append(weight_TK.float())
        parts = [_bytes(part) for part in parts]
        message_S = torch.cat(parts, dim=1).index_select(0, plan.send_token_S)
        arrived = _split(self._exchange(message_S, plan.send_splits, plan.recv_splits, phase), parts)

        row_P = plan.source_P.div(plan.top_k, rounding_mode="floor")
        x_PH = arrived[0].index_select(0, row_P)
        if wire.mxfp8:
            x_PH = _mx(x_PH, arrived[1].index_select(0, row_P), wire, x_TH.dtype)
        else:
            x_PH = x_PH.view(x_TH.dtype)
        if weight_TK is None:
            return x_PH, None
        return x_PH, arrived[-1].view(torch.float32).view(-1).index_select(0, plan.source_P)

    def combine(self, plan: Plan, y_PH: torch.Tensor, wire: Wire, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        if runs_triton(y_PH):
            return self._combine(plan, y_PH, wire, dtype, weight_P, phase)
        H = y_PH.shape[1]
        y_PH = with_zero_row(y_PH)
        partial_RH = y_PH.new_zeros((plan.slot_RK.shape[0], H), dtype=torch.float32)
        for slot_R in plan.slot_RK.unbind(1):
            partial_RH += y_PH.index_select(0, slot_R)
        if wire.mxfp8:
            mx_RH = casts.quantize(partial_RH, wire.block_size, wire.scaling_mode)
            parts = [mx_RH.qdata, mx_RH.scale]
        else:
            parts = [partial_RH.to(dtype)]
        if weight_P is not None:
            weight_P = with_zero_row(weight_P.view(-1, 1))
            parts.append(weight_P.index_select(0, plan.slot_RK.view(-1)).view(plan.slot_RK.shape))
        parts = [_bytes(part) for part in parts]
        back = _split(self._exchange(torch.cat(parts, dim=1), plan.recv_splits, plan.send_splits, phase), parts)
        if wire.mxfp8:
            back_SH = _mx(back[0], back[1], wire, torch.float32).dequantize()
        else:
            back_SH = back[0].view(dtype)

        y_TH = back_SH.new_zeros((plan.num_tokens, H), dtype=torch.float32)
        for slot_T in plan.sent_slot_WT:
            y_TH += back_SH.index_select(0, slot_T)
        if weight_P is None:
            return y_TH.to(dtype), None
        weight_SK = back[-1].view(torch.float32)
        return y_TH.to(dtype), sum(weight_SK.index_select(0, slot_T) for slot_T in plan.sent_slot_WT)

    def _dispatch(self, plan: Plan, x_TH: torch.Tensor, wire: Wire, weight_TK: torch.Tensor | None,
                  phase: str) -> tuple:
        """`dispatch` in kernels. An MXFP8 result's scales are a view of K-block-major memory, as GEMMs read them."""
        from ..ops.triton_kernels import message, permute  # Triton exists on Linux alone
        data, scale = x_TH, None
        if wire.mxfp8:
            mx_TH = casts.quantize(x_TH, wire.block_size, wire.scaling_mode)
            data, scale = mx_TH.qdata, mx_TH.scale_bytes
        weight = None if weight_TK is None else weight_TK.float()
        sizes = (data.shape[1] * data.element_size(), *(0 if x is None else x.shape[1] for x in (scale, weight)))
        message_S = permute.pack_rows(data, scale, weight, plan.sent_slot_WT, plan.send_token_S.shape[0], plan.top_k)
        message_R = self._exchange(message_S, plan.send_splits, plan.recv_splits, phase)
        data, scale, weight = message.unpack_rows(message_R, *sizes)
        x_PH, scale_BP, weight_P = permute.expand_rows(data, scale, weight, plan.slot_RK, plan.source_P)
        x_PH = _mx(x_PH, scale_BP.t(), wire, x_TH.dtype) if wire.mxfp8 else x_PH.view(x_TH.dtype)
        return x_PH, None if weight_TK is None else weight_P

    def _combine(self, plan: Plan, y_PH: torch.Tensor, wire: Wire, dtype: torch.dtype, weight_P: torch.Tensor | None,
                 phase: str) -> tuple:
        """`combine` in kernels."""
        from ..ops.triton_kernels import unpermute
        block_size = wire.block_size if wire.mxfp8 else 0
        message_R = unpermute.combine_rows(y_PH, weight_P, plan.slot_RK, dtype, block_size, wire.scaling_mode)
        message_S = self._exchange(message_R, plan.recv_splits, plan.send_splits, phase)
        weights = 0 if weight_P is None else plan.top_k
        y_TH, weight_TK = unpermute.sum_rows(message_S, plan.sent_slot_WT, y_PH.shape[1], weights, plan.top_k, dtype,
                                             block_size)
        return y_TH, None if weight_P is None else weight_TK
