# SPDX-License-Identifier: Apache-2.0
"""Wires: what carries the rows of one hop of the hierarchical transport, and the two hops of a group.

A hop takes place within a sub-group. Between nodes, it is the ranks of one index in their nodes (a rail). Inside a
node, it is the node's ranks. A wire brings each rank's rows to the places that `recv_splits` gives them, and tells
when they are there. How, is its own affair: through the host, or by stores and signals of kernels. The transport does
not depend on the order or the time in which rows arrive.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d as c10d

from .deadline import Nodes, all_to_all, deadline_for, ranks_of, set_deadline


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
        others = sum(send_splits) - send_splits[self.ranks.index(dist.get_rank())]
        self.sent_bytes += others * x.shape[1] * x.element_size()


class HostWire(RowWire):
    """The host's collectives: NCCL or gloo through deepspeed.comm, over whatever network these find.

    Arguments:
        group: the hop's process group.
        nodes: the whole group.
    """

    def __init__(self, group: Any, nodes: Nodes):
        self.group, self.nodes, self.ranks = group, nodes, ranks_of(group)

    def exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, where: str) -> torch.Tensor:
        self.count(x, send_splits)
        out = x.new_empty((sum(recv_splits), x.shape[1]))
        all_to_all(out, x, recv_splits, send_splits, self.group, where, self.nodes)
        return out


@dataclass(frozen=True, eq=False)
class Hops:
    """The two hops of an expert-parallel group, shared by its layers.

    Rank i of the group has the index i % G in node i // G.

    Attributes:
        nodes: the group, and the node of each of its ranks.
        node_size: G.
        between: from here to the ranks of the same index in all nodes, this one included.
        inside: to the ranks of this node.
    """

    nodes: Nodes
    node_size: int
    between: RowWire
    inside: RowWire

    @property
    def num_nodes(self) -> int:
        return len(self.between.ranks)

    @staticmethod
    def of(group: Any, node_size: int, name: str) -> "Hops":
        """The group's hops. The first call with a node size makes their process groups, and is collective.

        Args:
            node_size: divides the number of ranks. Equal on all of them.
            name: of the layer, for errors.
        """
        made = _OF_GROUP.setdefault(group, {})
        if node_size not in made:
            made[node_size] = _make(group, node_size, name)
        return made[node_size]


# By node size. Keyed weakly, so that an entry goes with its process group.
_OF_GROUP: WeakKeyDictionary = WeakKeyDictionary()


def _make(group: Any, node_size: int, name: str) -> Hops:
    ranks, G = ranks_of(group), node_size
    if len(ranks) % G:
        raise ValueError(f"{name}: {len(ranks)} ranks are no nodes of {G} ranks each")
    nodes = Nodes(group, {rank: i // G for i, rank in enumerate(ranks)})
    rails = [list(range(i, len(ranks), G)) for i in range(G)]
    insides = [list(range(i, i + G)) for i in range(0, len(ranks), G)]
    where = f"'choice of transport' of {name}"
    return Hops(nodes, G, *(HostWire(_sub_group(group, lists, where), nodes) for lists in (rails, insides)))


def _sub_group(group: Any, lists: list, where: str) -> Any:
    """The process group of this rank's list. `lists` (of ranks in `group`) are disjoint, and hold every rank."""
    device = torch.device(get_accelerator().current_device_name())
    seconds = set_deadline(group, device)
    timeout = None if seconds == float("inf") else timedelta(seconds=seconds)
    with deadline_for(group, device, where):
        # Only this group's ranks take part, so deepspeed.comm's new_group, which all ranks of the world call, would
        # wait for others. Where groups are split from NCCL's communicators, torch asks all ranks of the parent.
        if c10d._get_default_group().bound_device_id is not None:
            return torch.distributed.split_group(group, lists, timeout=timeout)
        ranks, me = ranks_of(group), dist.get_rank(group=group)
        mine = [ranks[i] for i in next(members for members in lists if me in members)]
        return torch.distributed.new_group(mine, timeout=timeout, use_local_synchronization=True)
