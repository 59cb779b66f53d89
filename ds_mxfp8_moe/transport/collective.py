# SPDX-License-Identifier: Apache-2.0
"""The transport over deepspeed.comm (NCCL or gloo). It runs on every machine.

One forward makes three all-to-alls on the way out (counts, expert ids, rows) and one on the way back. Data, scales and
routing weights share one uint8 message (rows.py). The host waits for a GPU once, for the counts.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup

from ..compute.routing import count
from . import Plan, RowFormat, Transport
from .deadline import all_to_all, check_same_calls, read_counts
from .rows import (
    as_bytes,
    expand,
    experts_there,
    numbered,
    pack,
    padded_rows,
    padding,
    partial_sums,
    sends,
    sort_by_expert,
    sums,
    wanted_by,
)


@dataclass(frozen=True)
class Collective(Transport):
    """Expert-parallel exchange over a process group.

    Attributes:
        group: of two ranks or more.
        name: of the layer, for errors.
    """

    group: ProcessGroup
    name: str = "an expert-parallel exchange"

    @staticmethod
    def usable_here() -> tuple[bool, str]:
        backend = get_accelerator().communication_backend_name()
        version = " " + ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""
        return True, f"{backend}{version} through deepspeed.comm"

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
        return read_counts(counts, self.group, self._where("counts"), meanwhile)

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int,
             meanwhile: Callable[[], None] | None = None, rows: str = "") -> Plan:
        (T, K), W, E = expert_TK.shape, self.world_size, num_local_experts
        call = f" ({K} choices a token{rows and ', '}{rows})"
        wanted_TW = wanted_by(expert_TK, E, W)
        send_counts_W = wanted_TW.sum(0)
        message = torch.cat([send_counts_W.view(W, 1), count(expert_TK, W * E).view(W, E),
                             send_counts_W.new_full((W, 1), T),
                             send_counts_W.new_full((W, 1), zlib.crc32((self.name + call).encode()))], dim=1)
        ones = (1, ) * W
        arriving = self._exchange(message, ones, ones, "counts")
        sizes_E = arriving[:, 1:E + 1].sum(0)
        of_device = []

        def launch_what_needs_no_counts() -> None:
            of_device.extend((numbered(wanted_TW), *padding(sizes_E)))
            if meanwhile is not None:
                meanwhile()

        counts = self._read_counts(torch.cat([send_counts_W, arriving[:, 0], sizes_E,
                                              arriving[:, E + 1].sum().view(1), arriving[:, E + 2]]),
                                   launch_what_needs_no_counts)
        pairs, ends_E, shift_E = of_device
        check_same_calls(self.group, counts[-W:], self._where("counts") + call)
        send_splits, recv_splits = tuple(counts[:W]), tuple(counts[W:2 * W])
        group_sizes, tokens_of_group = counts[2 * W:2 * W + E], counts[2 * W + E]

        to = sends(pairs, sum(send_splits), W)
        local_SK = experts_there(expert_TK, E, to)
        local_RK = self._exchange(as_bytes(local_SK), send_splits, recv_splits, "expert ids").view(local_SK.dtype)
        slot_RK, source_P = sort_by_expert(local_RK, sum(group_sizes), shift_E, padded_rows(group_sizes))
        return Plan(num_tokens=T, top_k=K, tokens_per_expert=tokens_of_group * K / (W * E), send_splits=send_splits,
                    recv_splits=recv_splits, send_token_S=to.row_S, sent_slot_WT=to.slot_WN,
                    group_ends_E=ends_E.to(torch.int32), slot_RK=slot_RK, source_P=source_P)

    def dispatch(self, plan: Plan, x_TH: torch.Tensor, row_format: RowFormat, weight_TK: torch.Tensor | None = None,
                 phase: str = "dispatch") -> tuple:
        message_S = pack(x_TH, row_format, weight_TK, plan.send_token_S, plan.sent_slot_WT, plan.top_k)
        message_R = self._exchange(message_S, plan.send_splits, plan.recv_splits, phase)
        return expand(message_R, x_TH.shape[1], row_format, x_TH.dtype, weight_TK is not None, plan.slot_RK,
                      plan.source_P)

    def combine(self, plan: Plan, y_PH: torch.Tensor, row_format: RowFormat, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        weights = 0 if weight_P is None else plan.top_k
        message_R = partial_sums(y_PH, row_format, dtype, weight_P, plan.slot_RK)
        message_S = self._exchange(message_R, plan.recv_splits, plan.send_splits, phase)
        y_TH, weight_TK = sums(message_S, y_PH.shape[1], row_format, dtype, weights, plan.sent_slot_WT, plan.top_k)
        return y_TH, weight_TK if weights else None
