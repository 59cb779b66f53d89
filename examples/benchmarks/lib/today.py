# SPDX-License-Identifier: Apache-2.0
"""The exchange as one writes it in PyTorch today, with a transport's three methods: one row for each choice of a
token, in bf16, gathered into expert order before and after an all_to_all_single.

Letters in tensor names as in ds_mxfp8_moe.transport; C: choices of this rank's tokens, R: rows received.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_mxfp8_moe.transport import ROW_ALIGNMENT, Transport


@dataclass(frozen=True, eq=False)
class TodayPlan:
    """Attributes:
        choice_C: the choice (token * K + k) in each row sent, ascending by (expert, token); None: the tokens stand so.
        place_C: the row sent of each choice.
        row_P: the received row at each of the expert-sorted places, R in padding.
        place_R: the inverse.
    """

    top_k: int
    send_splits: list
    recv_splits: list
    choice_C: torch.Tensor | None
    place_C: torch.Tensor
    row_P: torch.Tensor
    place_R: torch.Tensor
    group_ends: tuple
    group_ends_E: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.row_P.shape[0]


@dataclass(frozen=True)
class Today(Transport):
    """Over torch.distributed's group; every choice must have an expert, and rows travel unquantised."""

    group: dist.ProcessGroup

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int) -> TodayPlan:
        W, E, device = self.group.size(), num_local_experts, expert_TK.device
        flat = expert_TK.reshape(-1)
        choice_C = flat.argsort(stable=True)
        sent_WE = torch.bincount(flat, minlength=W * E).view(W, E)
        arriving_WE = torch.empty_like(sent_WE)
        dist.all_to_all_single(arriving_WE, sent_WE, group=self.group)
        sent, arriving = torch.stack([sent_WE, arriving_WE]).tolist()

        sizes = [sum(column) for column in zip(*arriving, strict=True)]
        ends, end = [], 0
        for size in sizes:
            end += -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
            ends.append(end)
        # Received rows stand by (rank, expert); wanted: by (expert, rank), every expert's padded.
        expert_R = torch.arange(E, device=device).repeat(W).repeat_interleave(arriving_WE.view(-1))
        order_R = expert_R.argsort(stable=True)
        shift_E = torch.tensor([0, *ends[:-1]], device=device) - (arriving_WE.sum(0).cumsum(0) - arriving_WE.sum(0))
        place = torch.arange(len(order_R), device=device) + shift_E[expert_R[order_R]]
        row_P = torch.full((end, ), len(order_R), device=device).scatter_(0, place, order_R)
        place_R = torch.empty_like(order_R).scatter_(0, order_R, place)
        here = torch.arange(len(flat), device=device)
        place_C = torch.empty_like(choice_C).scatter_(0, choice_C, here)
        in_order = expert_TK.shape[1] == 1 and torch.equal(choice_C, here)
        return TodayPlan(expert_TK.shape[1], [sum(counts) for counts in sent], [sum(counts) for counts in arriving],
                         None if in_order else choice_C, place_C, row_P, place_R, tuple(ends),
                         torch.tensor(ends, dtype=torch.int32, device=device))

    def dispatch(self, plan: TodayPlan, x_TH: torch.Tensor, wire=None, weight_TK=None, phase: str = "") -> tuple:
        rows_CH = x_TH
        if plan.choice_C is not None:
            rows_CH = x_TH.index_select(0, plan.choice_C.div(plan.top_k, rounding_mode="floor"))
        arrived = x_TH.new_empty(sum(plan.recv_splits) + 1, x_TH.shape[1])
        arrived[-1] = 0  # what padding reads
        dist.all_to_all_single(arrived[:-1], rows_CH, plan.recv_splits, plan.send_splits, group=self.group)
        return arrived.index_select(0, plan.row_P), None

    def combine(self, plan: TodayPlan, y_PH: torch.Tensor, wire=None, dtype: torch.dtype = torch.bfloat16,
                weight_P=None, phase: str = "") -> tuple:
        back = y_PH.new_empty(sum(plan.send_splits), y_PH.shape[1])
        dist.all_to_all_single(back, y_PH.index_select(0, plan.place_R), plan.send_splits, plan.recv_splits,
                               group=self.group)
        if plan.choice_C is not None:
            back = back.index_select(0, plan.place_C)
        return (back.view(-1, plan.top_k, y_PH.shape[1]).sum(1) if plan.top_k > 1 else back), None
