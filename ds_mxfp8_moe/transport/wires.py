# SPDX-License-Identifier: Apache-2.0
"""Wires: what carries the rows of one hop of the hierarchical transport, and the two hops of a group.

A hop takes place among some ranks of the group. Between nodes, these are the ranks of one index in their nodes (a
rail). Inside a node, they are the node's ranks. A wire brings each rank's rows to the places that `recv_splits` gives
them, and returns when they are there, or will be for what the device does next. How, is its own affair: through the
host, or by stores and signals of kernels. The transport does not depend on the order or the time in which rows arrive.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed

from .deadline import all_to_all, ranks_of


class RowWire(ABC):
    """Carries rows between the ranks of one hop.

    Attributes:
        ranks: global ranks of the hop, ascending.
        sent_bytes: bytes that this rank has sent to other ranks of the hop. Between nodes: bytes that left its node.
    """

    ranks: list
    sent_bytes: int = 0

    @abstractmethod
    def exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, where: str) -> torch.Tensor:
        """Sends `send_splits[i]` rows of x to rank i of the hop. Returns the rows that arrive, in rank order.

        Args:
            where: the exchange, the layer and the hop, for errors.

        Raises:
            PeerFailure: a rank did not come in time, as far as the host waits for it.
        """

    def count(self, x: torch.Tensor, send_splits: tuple) -> None:
        """Adds to `sent_bytes` what `exchange` sends to others."""
        others = sum(send_splits) - send_splits[self.ranks.index(torch.distributed.get_rank())]
        self.sent_bytes += others * x.shape[1] * x.element_size()


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

    def __init__(self, group: Any, ranks: list, node_of: dict):
        self.group, self.ranks, self.node_of = group, ranks, node_of

    def exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, where: str) -> torch.Tensor:
        self.count(x, send_splits)
        out = x.new_empty((sum(recv_splits), x.shape[1]))
        all_to_all(out, x, self._of_all(recv_splits), self._of_all(send_splits), self.group, where, self.node_of)
        return out

    def _of_all(self, splits: tuple) -> tuple:
        """Rows of each rank of the group."""
        of_hop = dict(zip(self.ranks, splits, strict=True))
        return tuple(of_hop.get(rank, 0) for rank in ranks_of(self.group))


@dataclass(frozen=True, eq=False)
class Hops:
    """The two hops of an expert-parallel group, shared by its layers.

    Rank i of the group has the index i % G in node i // G.

    Attributes:
        group: the process group.
        node_of: the node of each global rank.
        node_size: G.
        between: from here to the ranks of the same index in all nodes, this one included.
        inside: to the ranks of this node.
    """

    group: Any
    node_of: dict
    node_size: int
    between: RowWire
    inside: RowWire

    @property
    def num_nodes(self) -> int:
        return len(self.between.ranks)

    @staticmethod
    def of(group: Any, node_size: int, name: str) -> "Hops":
        """The group's hops.

        Args:
            node_size: divides the number of ranks. Equal on all of them.
            name: of the layer, for errors.
        """
        ranks, made = ranks_of(group), _OF_GROUP.setdefault(group, {})
        if len(ranks) % node_size:
            raise ValueError(f"{name}: {len(ranks)} ranks are no nodes of {node_size} ranks each")
        if node_size not in made:
            node_of = {rank: i // node_size for i, rank in enumerate(ranks)}
            node, index = divmod(ranks.index(torch.distributed.get_rank()), node_size)
            hops = ranks[index::node_size], ranks[node * node_size:(node + 1) * node_size]
            made[node_size] = Hops(group, node_of, node_size, *(HostWire(group, hop, node_of) for hop in hops))
        return made[node_size]


# By node size. Keyed weakly, so that an entry goes with its process group.
_OF_GROUP: WeakKeyDictionary = WeakKeyDictionary()
