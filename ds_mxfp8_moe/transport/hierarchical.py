# SPDX-License-Identifier: Apache-2.0
"""The transport of groups that span nodes. Every row takes two hops: between nodes, and inside a node (wires.py).

    dispatch    A token, quantized once, crosses to each node that serves one of its choices: once, to the rank of its
                own rank's index there. That rank passes the bytes on, unchanged, to the experts' ranks of its node.
    combine     At the experts' rank, a token's rows are added in float32, in ascending choice. The sums go in float32
                to the rank of the node through which the token came. That rank adds them in float32, in ascending
                rank, and rounds once to the row format: to a dtype, or to MXFP8. The token's own rank adds what
                arrives in float32, in ascending node, and rounds once.

What stays in a token's own node takes the same steps and is rounded alike. Scales, routing weights and expert ids
travel beside their rows. Dispatch gives the bits of the collective transport: an expert's rows are in ascending (rank,
token, choice). Combine gives its own bits, which are the same in every run. With one rank a node, they are those of
the collective transport.

The counts of a plan take the two hops too. Every rank learns the signatures of all, so that ranks in different calls
raise together. The host waits for a GPU once, for the counts.

Further letters in tensor names: N nodes, G ranks of a node, C rows that this rank sends to nodes, L rows that land
here for this node, S rows that it passes on inside the node.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from deepspeed.accelerator import get_accelerator

from ..compute.routing import count
from ..ops.op_builder import NVSHMEMBuilder
from . import RowFormat, Transport
from .deadline import check_same_calls, read_counts
from .hops import Hops
from .rows import (
    PLAIN,
    Sends,
    as_bytes,
    expand,
    experts_there,
    numbered,
    pack,
    padded_rows,
    padding,
    partial_sums,
    pass_on,
    sends,
    sort_by_expert,
    sums,
    wanted_by,
)
from .wires import RowWire


@dataclass(frozen=True, eq=False)
class Crossing:
    """The rows of one hop on their way out. On their way back, the splits change places.

    Attributes:
        sends: which rows go where. None: all, in rank order.
        send_splits, recv_splits: number of rows sent to and received from each rank of the hop.
        most: the most rows that any rank of the group sends to a rank of its hop. Equal on all ranks.
    """

    sends: Sends | None
    send_splits: tuple
    recv_splits: tuple
    most: int

    @property
    def back(self) -> "Crossing":
        return replace(self, send_splits=self.recv_splits, recv_splits=self.send_splits)


@dataclass(frozen=True, kw_only=True, eq=False)
class HierarchicalPlan:
    """What one forward's routing means for this rank. Immutable.

    Attributes:
        num_tokens, top_k, tokens_per_expert, group_ends_E, slot_RK, source_P: as in Plan.
        between: which tokens go to which node.
        inside: which of the rows that land here go to which rank of the node.
    """

    num_tokens: int
    top_k: int
    tokens_per_expert: float
    between: Crossing
    inside: Crossing
    group_ends_E: torch.Tensor
    slot_RK: torch.Tensor
    source_P: torch.Tensor

    @property
    def num_rows(self) -> int:
        """P: expert-sorted rows on this rank, padding included."""
        return self.source_P.shape[0]


@dataclass(frozen=True)
class Hierarchical(Transport):
    """Expert-parallel exchange in two hops.

    Attributes:
        hops: of the layer's group.
        name: of the layer, for errors.
    """

    hops: Hops
    name: str = "an expert-parallel exchange"

    @staticmethod
    def usable_here() -> tuple[bool, str]:
        accelerator = get_accelerator()
        wires = ("between hosts with the same number of ranks, at least two; wire host: "
                 f"{accelerator.communication_backend_name()} through deepspeed.comm")
        if accelerator.device_name() == "cuda":
            wires += f"; wire nvshmem: {NVSHMEMBuilder().status()[1]}"
        return True, wires

    def _cross(self, wire: RowWire, x: torch.Tensor, by: Crossing, phase: str, compared: bool = True,
               row_S: torch.Tensor | None = None) -> torch.Tensor:
        """One hop, over the wire of that hop. `compared`, `row_S`: as in RowWire.exchange."""
        hop = "between nodes" if wire is self.hops.between else "inside the node"
        where = f"{self._where(phase)}, hop {hop}"
        return wire.exchange(x, by.send_splits, by.recv_splits, where, by.most, compared, row_S)

    def _exchange_counts(self, sent_W: torch.Tensor) -> torch.Tensor:
        """Sends row w of `sent_W` to rank w, by both hops. Returns a row from each rank."""
        N, G, hops = self.hops.num_nodes, self.hops.node_size, self.hops
        to_nodes, to_ranks = (Crossing(None, (1, ) * ranks, (1, ) * ranks, 1) for ranks in (N, G))
        landed_NG = self._cross(hops.between, sent_W.reshape(N, -1), to_nodes, "counts", False).view(N, G, -1)
        landed_G = landed_NG.transpose(0, 1).reshape(G, -1)
        arrived_GN = self._cross(hops.inside, landed_G, to_ranks, "counts", False).view(G, N, -1)
        return arrived_GN.transpose(0, 1).reshape(N * G, -1)

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int, meanwhile: Callable[[], None] | None = None,
             rows: str = "") -> HierarchicalPlan:
        (T, K), E, N, G = expert_TK.shape, num_local_experts, self.hops.num_nodes, self.hops.node_size
        W, group = N * G, self.hops.group
        call = f" ({K} choices a token{rows and ', '}{rows})"
        wanted_TN = wanted_by(expert_TK, G * E, N)
        crossing_N, needed_W = wanted_TN.sum(0), wanted_by(expert_TK, E, W).sum(0)

        # Each rank gets the choices of each of its experts, and all get the same numbers: tokens of this rank,
        # signature, rows for each node, and rows for each rank.
        for_all = torch.cat([needed_W.new_full((1, ), T),
                             needed_W.new_full((1, ), zlib.crc32((self.name + call).encode())), crossing_N, needed_W])
        sent_W = torch.cat([count(expert_TK, W * E).view(W, E), for_all.expand(W, -1)], dim=1)
        received_W = self._exchange_counts(sent_W)
        of_expert_WE, tokens_W, signature_W, crossing_WN, needed_WW = received_W.split([E, 1, 1, N, W], dim=1)
        # Rows that land at rank g of a node, out of node m, and are needed by rank d of the node.
        landing_MGND = needed_WW.reshape(N, G, N, G)
        inside_GND = landing_MGND.sum(0)
        node, index = divmod(self.hops.rank, G)
        sizes_E = of_expert_WE.sum(0)
        of_device = []

        def launch_what_needs_no_counts() -> None:
            of_device.extend((numbered(wanted_TN), *padding(sizes_E)))
            if meanwhile is not None:
                meanwhile()

        counts = read_counts(torch.cat([crossing_N, crossing_WN[index::G, node], inside_GND[index, node],
                                        inside_GND[:, node, index], sizes_E, tokens_W.sum().view(1),
                                        crossing_WN.max().view(1), inside_GND.max().view(1), signature_W.view(-1)]),
                             group, self._where("counts"), launch_what_needs_no_counts, self.hops.node_of)
        self.hops.check()  # before counts that never arrived are used
        (to_node, from_node, to_rank, from_rank, sizes, (tokens_of_group, most_between, most_inside),
         signatures) = _split(counts, (N, N, G, G, E, 3, W))
        check_same_calls(group, signatures, self._where("counts") + call)
        pairs, ends_E, shift_E = of_device

        between = Crossing(sends(pairs, sum(to_node), N), to_node, from_node, most_between)
        ids_CK = experts_there(expert_TK, G * E, between.sends)
        ids_LK = self._cross(self.hops.between, as_bytes(ids_CK), between, "expert ids").view(ids_CK.dtype).long()
        # A failed exchange leaves anything. It must index nothing that is not there.
        ids_LK = torch.where(ids_LK < G * E, ids_LK, -1)
        pairs = numbered(wanted_by(ids_LK, E, G))
        pairs = pairs._replace(place=pairs.place.clamp(max=sum(to_rank)))
        inside = Crossing(sends(pairs, sum(to_rank), G), to_rank, from_rank, most_inside)
        local_SK = experts_there(ids_LK, E, inside.sends)
        local_RK = self._cross(self.hops.inside, as_bytes(local_SK), inside, "expert ids").view(local_SK.dtype)
        slot_RK, source_P = sort_by_expert(local_RK, sum(sizes), shift_E, padded_rows(sizes),
                                           _by_source(landing_MGND[:, :, node, index].t(), sum(from_rank)))
        return HierarchicalPlan(
            num_tokens=T, top_k=K, tokens_per_expert=tokens_of_group * K / (W * E), between=between, inside=inside,
            group_ends_E=ends_E.to(torch.int32), slot_RK=slot_RK, source_P=source_P)

    def dispatch(self, plan: HierarchicalPlan, x_TH: torch.Tensor, row_format: RowFormat,
                 weight_TK: torch.Tensor | None = None, phase: str = "dispatch") -> tuple:
        tokens = plan.between.sends
        message_C = pack(x_TH, row_format, weight_TK, tokens.row_S, tokens.slot_WN, plan.top_k)
        message_L = self._cross(self.hops.between, message_C, plan.between, phase)
        message_R = self._cross(self.hops.inside, message_L, plan.inside, phase, row_S=plan.inside.sends.row_S)
        return expand(message_R, x_TH.shape[1], row_format, x_TH.dtype, weight_TK is not None, plan.slot_RK,
                      plan.source_P)

    def combine(self, plan: HierarchicalPlan, y_PH: torch.Tensor, row_format: RowFormat, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        H, K, weights = y_PH.shape[1], plan.top_k, 0 if weight_P is None else plan.top_k
        message_R = partial_sums(y_PH, PLAIN, torch.float32, weight_P, plan.slot_RK)
        message_S = self._cross(self.hops.inside, message_R, plan.inside.back, phase)
        message_L = pass_on(message_S, H, row_format, dtype, weights, plan.inside.sends.slot_WN, K)
        message_C = self._cross(self.hops.between, message_L, plan.between.back, phase)
        y_TH, weight_TK = sums(message_C, H, row_format, dtype, weights, plan.between.sends.slot_WN, K)
        return y_TH, weight_TK if weights else None


def _split(values: list, sizes: tuple) -> list:
    """Consecutive parts of `values`, as tuples."""
    parts, start = [], 0
    for size in sizes:
        parts.append(tuple(values[start:start + size]))
        start += size
    return parts


def _by_source(size_GN: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int64 [R]: received rows in ascending rank of their token. They arrive by (index in the node, node).

    `size_GN`: how many rows arrived through each rank of this node, out of each node.
    """
    size = size_GN.reshape(-1)
    first_NG = (size.cumsum(0) - size).view(size_GN.shape).t()
    size = size_GN.t().reshape(-1)
    shift = first_NG.reshape(-1) - (size.cumsum(0) - size)
    every_R = torch.arange(num_rows, device=size.device)
    return every_R + torch.repeat_interleave(shift, size, output_size=num_rows)
