# SPDX-License-Identifier: Apache-2.0
"""The transport in two hops with a capacity: the host waits for nothing, and CUDA graphs can capture it.

Shapes depend on the number of tokens alone, and the device computes all sizes. Every rank learns all ranks' counts in
the exchange with which each plan begins, so all ranks find the same failures. Each rank cuts its own groups, as the
flat transport over NVLink does (ops/csrc/nvlink/route.cu).

    room    A token goes to a node once, so there is room for all tokens between nodes. Inside a node, each pair of
            ranks has room for `capacity_factor` times its even share of the choices, as the expert-sorted rows have.
    drops   Rows that do not fit between two ranks of a node do not travel on. Then a choice that does not fit gets no
            place at its expert's rank. In both cases each rank keeps the same share, and loses its last ones.
    wires   Kernels read the number of rows on the device, and move these. The wire through the host does not know the
            number, and moves all the room.

Letters as in hierarchical.py. C, L, S and R count the room for rows. C and L are N * T.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..routing import count
from .capacity import Findings, cut, padded, padded_sizes, room_of, shares
from .hierarchical import Hierarchical, HierarchicalPlan
from .rows import Sends, as_bytes, experts_there, wanted_by


@dataclass(frozen=True, kw_only=True)
class StaticHierarchical(Hierarchical):
    """Expert-parallel exchange in two hops with a capacity. All ranks must bring equally many tokens.

    Attributes:
        capacity_factor, on_overflow: as in NVLink. Rows that do not fit between two ranks of a node count too.
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
        (node, index), W = divmod(self.hops.rank, G), N * G
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
        # Rows that land at rank g of a node, out of node m, and are needed by rank d of the node.
        landing_MGND = needed_WW.reshape(N, G, N, G)
        inside_GND = landing_MGND.sum(0)
        room, inside_room = room_of(self.capacity_factor, T, K, W, E), self._inside_room(T, K)
        self._find_failures(another_W, padded_sizes(of_expert_WE.sum(0)).view(W, E).sum(1), room,
                            inside_GND.amax(0).view(W), inside_room)
        self._check()

        to_node, from_node = crossing_WN[self.hops.rank].int(), crossing_WN[index::G, node].int()
        to_rank, from_rank = (rows_G.clamp(max=inside_room).int() for rows_G in (inside_GND[index, node],
                                                                                  inside_GND[:, node, index]))
        between = sends_with_room(wanted_TN, T)
        ids_CK = experts_there(expert_TK, G * E, between)
        ids_LK = self._between(as_bytes(ids_CK), to_node, from_node, T, "expert ids").view(ids_CK.dtype)
        ids_LK = _those_that_came(ids_LK, from_node, G * E).long()
        kept_ND, _ = shares(landing_MGND[:, index, node], to_rank)
        inside = sends_with_room(_first_rows(wanted_by(ids_LK, E, G), kept_ND), inside_room)
        local_SK = experts_there(ids_LK, E, inside)
        local_RK = self._inside(as_bytes(local_SK), to_rank, from_rank, inside_room,
                                "expert ids").view(local_SK.dtype)
        kept_NG, _ = shares(landing_MGND[:, :, node, index], from_rank)
        fits_E, slot_RK, source_P = places(_those_that_came(local_RK, from_rank, E), _sources(kept_NG, inside_room), W,
                                           E, room)
        if self.on_overflow == "drop":
            mine_E = of_expert_WE[:, self.hops.rank * E:(self.hops.rank + 1) * E].sum(0)
            self._findings.drop(self.name, mine_E.sum() - fits_E.sum())
        return HierarchicalPlan(
            num_tokens=T, top_k=K, tokens_per_expert=T * K / E, between=between, between_send_splits=to_node,
            between_recv_splits=from_node, between_most=T, inside=inside, inside_send_splits=to_rank,
            inside_recv_splits=from_rank, inside_most=inside_room, group_ends_E=padded_sizes(fits_E).cumsum(0).int(),
            slot_RK=slot_RK, source_P=source_P)

    def _inside_room(self, T: int, K: int) -> int:
        """How many rows fit between two ranks of a node."""
        share = math.ceil(self.capacity_factor * T * K / self.hops.node_size)
        return min(padded(share), self.hops.num_nodes * T)

    def _check(self) -> None:
        self.hops.check()
        self._findings.check()

    def _find_failures(self, another_W: torch.Tensor, rows_W: torch.Tensor, room: int, through_one_W: torch.Tensor,
                       inside_room: int) -> None:
        """Tells the host what all ranks find alike.

        Args:
            another_W: whether each rank is in another call.
            rows_W: the padded rows that each rank would get.
            through_one_W: the most rows that each rank would get through one rank of its node.
        """
        another = torch.where(another_W.any(), another_W.int().argmax() + 1, 0)
        found = [another, *(torch.zeros_like(another), ) * 4]
        if self.on_overflow == "error":
            (most, rank), (most_through, rank_through) = rows_W.max(0), through_one_W.max(0)
            full, full_through = most > room, most_through > inside_room
            found = [another, torch.where(full, rank + 1, torch.where(full_through, rank_through + 1, 0)),
                     torch.where(full, most, most_through), torch.where(full, room, inside_room), (~full).long()]
        self._findings.fail(self.name, torch.stack(found))


def sends_with_room(wanted_NW: torch.Tensor, room: int) -> Sends:
    """The rows to send, where each rank has room for `room` rows, and gets no more. Its rows come first, ascending.

    S is W * room. `Sends.row_S` of a place without a row is any row, or 0.
    """
    N, W = wanted_NW.shape
    wanted_WN = wanted_NW.t().contiguous()  # so that slot_WN is, as kernels read it
    rank_W1 = torch.arange(W, device=wanted_NW.device).unsqueeze(1)
    slot_WN = torch.where(wanted_WN, rank_W1 * room + wanted_WN.cumsum(1) - 1, W * room)
    row_N = torch.arange(N, device=wanted_NW.device)
    row_S = slot_WN.new_zeros(W * room + 1).scatter_(0, slot_WN.reshape(-1), row_N.repeat(W))[:W * room]
    return Sends(row_S, rank_W1.expand(W, room).reshape(-1), slot_WN)


def _first_rows(wanted_LD: torch.Tensor, kept_ND: torch.Tensor) -> torch.Tensor:
    """`wanted_LD` without the last rows of a node for a rank that do not fit. `kept_ND`: how many of them fit."""
    wanted_NTD = wanted_LD.view(kept_ND.shape[0], -1, kept_ND.shape[1])
    return (wanted_NTD & (wanted_NTD.cumsum(1) <= kept_ND.unsqueeze(1))).view(wanted_LD.shape)


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


def places(local_RK: torch.Tensor, source_R: torch.Tensor, ranks: int, experts: int, num_rows: int) -> tuple:
    """Sorts received choices by (expert, rank, token, choice), and drops those that do not fit into P rows.

    Args:
        local_RK: for each received row, the experts of this rank that it goes to; -1 is no expert. The rows of a
            sender are in the ascending order of their tokens.
        source_R: the rank that each row came from.
        ranks, experts, num_rows: W, E and P.

    Returns:
        int64 [E], how many rows each expert has. slot_RK and source_P, as in Plan.
    """
    (R, K), W, E, P = local_RK.shape, ranks, experts, num_rows
    key = torch.where(local_RK >= 0, local_RK.long() * W + source_R.unsqueeze(1), E * W).view(-1)
    size = count(key, E * W)
    size_WE = size.view(E, W).t()
    fits_E = cut(size_WE.sum(0), P)
    kept_WE, before_WE = shares(size_WE, fits_E)
    ends_E = padded_sizes(fits_E).cumsum(0)
    # Of each (expert, rank), and one more for what is no choice: where its choices begin among all sorted ones, where
    # their places begin, and how many of them have a place.
    first, place, kept = (torch.cat([values.reshape(-1), values.new_zeros(1)]) for values in (
        size.cumsum(0) - size, (before_WE + ends_E - padded_sizes(fits_E)).t(), kept_WE.t()))
    order = key.argsort(stable=True)
    key = key.index_select(0, order)
    nth = torch.arange(R * K, device=key.device) - first.index_select(0, key)
    row = torch.where(nth < kept.index_select(0, key), place.index_select(0, key) + nth, P)
    slot_RK = torch.empty_like(order).scatter_(0, order, row).view(R, K)
    return fits_E, slot_RK, order.new_full((P + 1, ), R * K).scatter_(0, row, order)[:P]
