# SPDX-License-Identifier: Apache-2.0
"""The two hops of an expert-parallel group, and the wire of each."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import deepspeed.comm as dist
import torch
import torch.distributed
from torch.distributed import ProcessGroup

from ..ops.op_builder import nvlink as extension
from .deadline import ranks_of
from .nvshmem import wire_over_nvshmem
from .peer_memory import PeerMemory
from .wires import Alone, HostWire, PeerWire, RowWire


@dataclass(frozen=True, eq=False)
class Hops:
    """The two hops of an expert-parallel group, shared by its layers.

    Rank i of the group has the index i % G in node i // G.

    Attributes:
        group_ref: a weak reference to the process group.
        rank: this rank in the group.
        node_of: the node of each global rank.
        node_size: G.
        between: from here to the ranks of the same index in all nodes, this one included.
        inside: to the ranks of this node.
    """

    group_ref: ref
    rank: int
    node_of: dict
    node_size: int
    between: RowWire
    inside: RowWire

    @property
    def group(self) -> Any:
        """The process group. This object does not keep it alive."""
        return self.group_ref()

    @property
    def num_nodes(self) -> int:
        return len(self.between.ranks)

    def check(self) -> None:
        """Raises the error of an exchange that has failed by now."""
        for wire in (self.between, self.inside):
            wire.check()

    @staticmethod
    def of(group: ProcessGroup, node_size: int, between: str = "host", inside: str = "host") -> "Hops":
        """The group's hops. The first call by the same arguments makes them, and is collective.

        Args:
            node_size: divides the number of ranks. Equal on all of them.
            between, inside: the wire of each hop, "host", "peer_memory" or "nvshmem", which must be possible.
        """
        ranks, made, key = ranks_of(group), _OF_GROUP.setdefault(group, {}), (node_size, between, inside)
        if key not in made:
            node_of = {rank: i // node_size for i, rank in enumerate(ranks)}
            node, index = divmod(ranks.index(torch.distributed.get_rank()), node_size)
            hops = ranks[index::node_size], ranks[node * node_size:(node + 1) * node_size]
            made[key] = Hops.over(group, node_of, node_size, *(
                wire_of(wire, group, hop, node_of) for wire, hop in zip((between, inside), hops, strict=True)))
        return made[key]

    @staticmethod
    def over(group: ProcessGroup, node_of: dict, node_size: int, between: RowWire, inside: RowWire) -> "Hops":
        """Hops over these wires. If one of two PeerWires fails, the other one skips its exchanges."""
        if isinstance(between, PeerWire) and isinstance(inside, PeerWire):
            between.other, inside.other = inside, between
        return Hops(ref(group), dist.get_rank(group=group), node_of, node_size, between, inside)


def wire_of(kind: str, group: ProcessGroup, ranks: list, node_of: dict) -> RowWire:
    """A wire of one hop. Collective in the group where it is not "host".

    Args:
        kind: "host", "peer_memory" or "nvshmem".
        ranks: global ranks of the hop.
    """
    if len(ranks) == 1:
        return Alone(ranks)
    if kind == "host":
        return HostWire(group, ranks, node_of)
    if kind == "nvshmem":
        return wire_over_nvshmem(group, ranks, node_of)
    return PeerWire(PeerMemory.of(group, extension.try_load()[0], ranks, node_of))


# Of each process group, by node size and wires. Keyed weakly, so that an entry goes with its group: nothing in it may
# keep the group alive.
_OF_GROUP: WeakKeyDictionary = WeakKeyDictionary()
