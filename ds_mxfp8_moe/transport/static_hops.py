# SPDX-License-Identifier: Apache-2.0
"""The transport in two hops with a capacity: the host waits for nothing, and CUDA graphs can capture it.

Shapes depend on the number of tokens alone, and the device computes all sizes. Every rank learns all ranks' counts in
the exchange with which each plan begins. So all ranks find the same failures, and each one cuts its own groups as the
flat transport over NVLink does (ops/csrc/nvlink/route.cu).

    room    A token goes to a node once and to a rank once. So each pair of ranks in a hop has room for all tokens that
            can take this way, and `capacity_factor` limits the expert-sorted rows alone.
    drops   A choice that does not fit gets no place at its expert's rank. Its token still travels there.
    wires   Kernels read the number of rows on the device, and move these. The wire through the host does not know the
            number, and moves all the room.

Letters as in hierarchical.py. L is here N * T, and R is W * T: the room for rows that land, and for rows that arrive.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..routing import count
from .capacity import Findings, cut, padded_sizes, room_of
from .hierarchical import Hierarchical, HierarchicalPlan
from .rows import Sends, as_bytes, experts_there, wanted_by


@dataclass(frozen=True, kw_only=True)
class StaticHierarchical(Hierarchical):
    """Expert-parallel exchange in two hops with a capacity. All ranks must bring equally many tokens.

    Attributes:
        capacity_factor, on_overflow: as in NVLink.
    """

    capacity_factor: float
    on_overflow: str = "error"

    @property
    def _findings(self) -> Findings:
        return Findings.of(self.hops.group)

    @property
    def dropped(self) -> int:
        """As NVLink.dropped."""
        return self._findings.dropped.total(self.name)

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int, meanwhile: Callable[[], None] | None = None,
             rows: str = "") -> HierarchicalPlan:
        """See Transport. It never calls `meanwhile`."""
        (T, K), E, N, G = expert_TK.shape, num_local_experts, self.hops.num_nodes, self.hops.node_size
        (node, index), W, L = divmod(self.hops.rank, G), N * G, N * T
        self._check()
        call = zlib.crc32(repr((self.name, rows, T, K, E, self.capacity_factor, self.on_overflow)).encode())
        wanted_TN = wanted_by(expert_TK, G * E, N)

        # What this rank tells all ranks: its call, rows for each node and each rank, and choices of each expert.
        told = torch.cat([wanted_TN.new_full((1, ), call, dtype=torch.int64), wanted_TN.sum(0),
                          wanted_by(expert_TK, E, W).sum(0), count(expert_TK, W * E)])
        heard_W = self._tell(told.expand(W, -1).contiguous())
        call_W, counts_W = heard_W[:, 0], heard_W[:, 1:]
        another_W = call_W != call
        # Ranks in different calls exchange no rows, and none of them waits for rows that will not come.
        crossing_WN, needed_WW, of_expert_WE = torch.where(another_W.any(), 0, counts_W).split([N, W, W * E], dim=1)
        room = room_of(self.capacity_factor, T, K, W, E)
        of_mine_WE = of_expert_WE[:, self.hops.rank * E:(self.hops.rank + 1) * E]
        fits_E = cut(of_mine_WE.sum(0), room)
        self._tell_host(another_W, padded_sizes(of_expert_WE.sum(0)).view(W, E).sum(1), room,
                        of_mine_WE.sum() - fits_E.sum())
        self._check()

        # Rows that land at rank g of a node, out of node m, and are needed by rank d of the node.
        landing_MGND = needed_WW.reshape(N, G, N, G)
        inside_GND = landing_MGND.sum(0)
        to_node, from_node = crossing_WN[self.hops.rank].int(), crossing_WN[index::G, node].int()
        to_rank, from_rank = inside_GND[index, node].int(), inside_GND[:, node, index].int()
        between = sends_with_room(wanted_TN)
        ids_CK = experts_there(expert_TK, G * E, between)
        ids_LK = self._between(as_bytes(ids_CK), to_node, from_node, T, "expert ids").view(ids_CK.dtype)
        ids_LK = _those_that_came(ids_LK, from_node, G * E).long()
        inside = sends_with_room(wanted_by(ids_LK, E, G))
        local_SK = experts_there(ids_LK, E, inside)
        local_RK = self._inside(as_bytes(local_SK), to_rank, from_rank, L, "expert ids").view(local_SK.dtype)
        ends_E, slot_RK, source_P = places(_those_that_came(local_RK, from_rank, E),
                                           _sources(landing_MGND[:, :, node, index], L), of_mine_WE, fits_E, room)
        return HierarchicalPlan(
            num_tokens=T, top_k=K, tokens_per_expert=T * K / E, between=between, between_send_splits=to_node,
            between_recv_splits=from_node, between_most=T, inside=inside, inside_send_splits=to_rank,
            inside_recv_splits=from_rank, inside_most=L, group_ends_E=ends_E, slot_RK=slot_RK, source_P=source_P)

    def _check(self) -> None:
        self.hops.check()
        self._findings.check()

    def _tell_host(self, another_W: torch.Tensor, rows_W: torch.Tensor, room: int, dropped: torch.Tensor) -> None:
        """`another_W`: whether each rank is in another call. `rows_W`: the padded rows that each rank would get."""
        another = torch.where(another_W.any(), another_W.int().argmax() + 1, 0)
        most, rank = rows_W.max(0)
        full = torch.where(most > room, rank + 1, 0) if self.on_overflow == "error" else torch.zeros_like(rank)
        self._findings.tell(self.name, torch.stack([another, full, most]), dropped)


def sends_with_room(wanted_NW: torch.Tensor) -> Sends:
    """The rows to send, where each rank has room for N rows. Its rows come first, ascending. S is W * N.

    `Sends.row_S` of a place without a row is any row, or 0.
    """
    N, W = wanted_NW.shape
    wanted_WN = wanted_NW.t()
    rank_W1 = torch.arange(W, device=wanted_NW.device).unsqueeze(1)
    slot_WN = torch.where(wanted_WN, rank_W1 * N + wanted_WN.cumsum(1) - 1, W * N)
    row_N = torch.arange(N, device=wanted_NW.device)
    row_S = slot_WN.new_zeros(W * N + 1).scatter_(0, slot_WN.reshape(-1), row_N.repeat(W))[:W * N]
    return Sends(row_S, rank_W1.expand(W, N).reshape(-1), slot_WN)


def _those_that_came(ids_RK: torch.Tensor, rows_W: torch.Tensor, experts: int) -> torch.Tensor:
    """`ids_RK` with -1 in the room that holds no row, and for what is no expert: a failed exchange leaves anything.

    `rows_W`: how many rows each rank has sent.
    """
    W, room = rows_W.shape[0], ids_RK.shape[0] // rows_W.shape[0]
    came_WR = torch.arange(room, device=ids_RK.device) < rows_W.view(W, 1)
    return torch.where(came_WR.view(-1, 1) & (ids_RK < experts), ids_RK, -1)


def _sources(size_NG: torch.Tensor, room: int) -> torch.Tensor:
    """int64 [G * room]: the rank whose token each received row is. Rows come by (index in the node, node).

    `size_NG`: how many rows came from each rank, as (node, index in the node).
    """
    N, G = size_NG.shape
    ends_GN = size_NG.cumsum(0).t().contiguous()
    place_GR = torch.arange(room, device=size_NG.device).expand(G, room).contiguous()
    node_GR = torch.searchsorted(ends_GN, place_GR, right=True).clamp(max=N - 1)
    return (node_GR * G + torch.arange(G, device=size_NG.device).unsqueeze(1)).view(-1)


def places(local_RK: torch.Tensor, source_R: torch.Tensor, size_WE: torch.Tensor, fits_E: torch.Tensor,
           num_rows: int) -> tuple:
    """Sorts received choices by (expert, rank, token, choice), and drops those that do not fit.

    Of an expert that is cut, each rank keeps the same share of its choices, rounded to rows. It drops the last ones.

    Args:
        local_RK: local experts of received rows. -1: none. Rows of a rank are in ascending token.
        source_R: the rank that each row came from.
        size_WE: how many choices of each local expert came from each rank.
        fits_E: how many rows of each expert fit.
        num_rows: P.

    Returns:
        group_ends_E, slot_RK and source_P, as in Plan.
    """
    (R, K), (W, E), P, device = local_RK.shape, size_WE.shape, num_rows, local_RK.device
    padded_E = padded_sizes(fits_E)
    ends_E = padded_E.cumsum(0)
    size_EW, all_E1 = size_WE.t(), size_WE.sum(0).clamp(min=1).unsqueeze(1)
    upto_EW = size_EW.cumsum(1)
    fitting_EW, fitting_before_EW = (rows * fits_E.unsqueeze(1) // all_E1 for rows in (upto_EW, upto_EW - size_EW))
    # Of each (expert, rank), and one more for what is no choice: where its choices begin among all sorted ones, where
    # their places begin, and how many of them have a place.
    flat_size = size_EW.reshape(-1)
    first, place, fitting = (torch.cat([values.reshape(-1), values.new_zeros(1)]) for values in (
        flat_size.cumsum(0) - flat_size, (ends_E - padded_E).unsqueeze(1) + fitting_before_EW,
        fitting_EW - fitting_before_EW))
    key = torch.where(local_RK >= 0, local_RK.long() * W + source_R.unsqueeze(1), E * W).view(-1)
    order = key.argsort(stable=True)
    key = key.index_select(0, order)
    nth = torch.arange(R * K, device=device) - first.index_select(0, key)
    row = torch.where((nth >= 0) & (nth < fitting.index_select(0, key)), place.index_select(0, key) + nth, P)
    slot_RK = torch.empty_like(order).scatter_(0, order, row).view(R, K)
    return ends_E.int(), slot_RK, order.new_full((P + 1, ), R * K).scatter_(0, row, order)[:P]
