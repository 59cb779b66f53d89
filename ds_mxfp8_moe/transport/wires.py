# SPDX-License-Identifier: Apache-2.0
"""Wires: what carries the rows of one hop of the hierarchical transport.

A hop takes place among some ranks of the group. Between nodes, these are the ranks of one index in their nodes (a
rail). Inside a node, they are the node's ranks. A wire brings each rank's rows to the places that `recv_splits` gives
them, and returns when they are there, or will be for what the device does next. Each wire chooses its mechanism: the
host's collectives, or stores and signals of kernels. The transport does not depend on the order or the time in which
rows arrive.
"""

import itertools
from abc import ABC, abstractmethod
from typing import Any
from weakref import ref

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from .deadline import all_to_all, ranks_of
from .nvlink import ALIGNED, MOST_MULTIPROCESSORS, signature
from .peer_memory import PeerMemory, dense
from .rows import as_bytes

BYTES = 16  # that a thread of a kernel moves at a time
CHUNK_BYTES = 32 << 10  # least size of what one flag announces; 8 rounds of a team's threads


class RowWire(ABC):
    """Carries rows between the ranks of one hop.

    Attributes:
        ranks: global ranks of the hop, ascending.
        sent_bytes: bytes that this rank has sent to other ranks of the hop. Between nodes: bytes that left its node.
    """

    ranks: list
    sent_bytes: int = 0

    @abstractmethod
    def exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, where: str, most: int,
                 compared: bool = True, row_S: torch.Tensor | None = None) -> torch.Tensor:
        """Sends `send_splits[i]` rows of x to rank i of the hop. Returns the rows that arrive, in rank order.

        Args:
            row_S: int64 [S], which rows of x are sent, in rank order. None: all of them, in their order.
            where: the exchange, the layer and the hop, for errors. Equal on all ranks.
            most: no rank sends more rows to another one than this. Equal on all ranks of the group.
            compared: whether a wire that can do so compares `where` between ranks. The counts of a plan do it
                themselves, so that all ranks of the group raise.

        Raises:
            PeerError: a rank did not come in time, as far as the host waits for it.
        """

    def check(self) -> None:
        """Raises the error of an exchange that has failed by now. The host does not wait for the device."""
        return None

    def count(self, x: torch.Tensor, send_splits: tuple) -> None:
        """Adds to `sent_bytes` what `exchange` sends to others."""
        others = sum(send_splits) - send_splits[self.ranks.index(torch.distributed.get_rank())]
        self.sent_bytes += others * x.shape[1] * x.element_size()


class Alone(RowWire):
    """The wire of a hop with one rank. Nothing travels."""

    def __init__(self, ranks: list):
        self.ranks = ranks

    def exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, where: str, most: int,
                 compared: bool = True, row_S: torch.Tensor | None = None) -> torch.Tensor:
        return x if row_S is None else x.index_select(0, row_S)


class HostWire(RowWire):
    """The host's collectives: NCCL or gloo through deepspeed.comm, over whatever network these find.

    It is an all-to-all of the whole group, in which ranks of other hops get no rows. A hop has no process group of its
    own, since torch makes one safely only if all ranks of the world take part. Otherwise it derives the group's name
    from the number of groups that each rank has, which may differ between ranks.

    Arguments:
        group: the whole group.
        ranks: of the hop.
        node_of: the node of each rank of the group, for errors.
    """

    def __init__(self, group: ProcessGroup, ranks: list, node_of: dict):
        self._group, self.ranks, self.node_of = ref(group), ranks, node_of

    def exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, where: str, most: int,
                 compared: bool = True, row_S: torch.Tensor | None = None) -> torch.Tensor:
        self.count(x, send_splits)
        x = x if row_S is None else x.index_select(0, row_S)
        out = x.new_empty((sum(recv_splits), x.shape[1]))
        all_to_all(out, x, self._of_all(recv_splits), self._of_all(send_splits), self._group(), where, self.node_of)
        return out

    def _of_all(self, splits: tuple) -> tuple:
        """Rows of each rank of the group."""
        of_hop = dict(zip(self.ranks, splits, strict=True))
        return tuple(of_hop.get(rank, 0) for rank in ranks_of(self._group()))


class PeerWire(RowWire):
    """Stores into the memory of the peers, which are on one host with this rank: one kernel for each exchange.

    The host does not wait. Each wait of a kernel ends at the group's deadline (ops/csrc/nvlink/row_exchange.cu).

    Arguments:
        memory: the hop's staging.
        sms: multiprocessors that move rows at most.

    Attributes:
        other: the wire of the other hop, whose rows this one sends on. If an exchange of it has failed, this one does
            nothing.
    """

    def __init__(self, memory: PeerMemory, sms: int | None = None):
        self.memory, self.ranks = memory, memory.ranks
        self.other: RowWire | None = None
        self.sms = min(sms or MOST_MULTIPROCESSORS, memory.multiprocessors)

    REGIONS = 1  # of each rank in a half of the staging

    def check(self) -> None:
        self.memory.reports.check()

    def _row(self, x: torch.Tensor) -> int:
        """Bytes of a row as it travels."""
        return -(-x.shape[1] * x.element_size() // BYTES) * BYTES

    def _region(self, x: torch.Tensor, most: int) -> int:
        return -(-most * self._row(x) // ALIGNED) * ALIGNED

    def _half_bytes(self, x: torch.Tensor, most: int) -> int:
        return self.REGIONS * len(self.ranks) * self._region(x, most)

    def _launch(self, args: Any) -> None:
        self.memory.extension.row_exchange(args, self.sms, self.memory.stream())

    def exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, where: str, most: int,
                 compared: bool = True, row_S: torch.Tensor | None = None) -> torch.Tensor:
        memory, ext, width = self.memory, self.memory.extension, x.shape[1] * x.element_size()
        memory.reports.check()
        row = self._row(x)
        self.count(x, send_splits)
        sent = dense(as_bytes(x) if row == width else torch.nn.functional.pad(as_bytes(x), (0, row - width)))
        # A flag announces a chunk. There are at most MAX_CHUNKS of them between two ranks.
        chunk = max(CHUNK_BYTES, -(-most * row // ext.MAX_CHUNKS // BYTES) * BYTES)
        memory.reserve(self._half_bytes(x, most), where)
        out = torch.empty((sum(recv_splits), row), dtype=torch.uint8, device=x.device)
        group = memory.begin(signature("rows", row, most, where if compared else ""), where)
        other = self.other.memory.state.data_ptr() if isinstance(self.other, PeerWire) else 0
        rows = 0 if row_S is None else row_S.data_ptr()
        self._launch(ext.RowExchange(group=group, x=sent.data_ptr(), rows=rows, out=out.data_ptr(), other_state=other,
                                     send_at=_beginnings(send_splits, row, ext.MAX_RANKS),
                                     recv_at=_beginnings(recv_splits, row, ext.MAX_RANKS),
                                     row=row, region=self._region(x, most), chunk=chunk,
                                     chunks=-(-most * row // chunk)))
        if x.device.type == "cpu":  # the kernel has ended
            memory.reports.check()
        return out[:, :width].contiguous().view(-1).view(x.dtype).view(-1, x.shape[1])


def _beginnings(splits: tuple, row_bytes: int, most_ranks: int) -> list:
    """Where the rows of each rank begin, in bytes, and where the last ones end."""
    beginnings = [row_bytes * rows for rows in itertools.accumulate(splits, initial=0)]
    return beginnings + [0] * (most_ranks + 1 - len(beginnings))
