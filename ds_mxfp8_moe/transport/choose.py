# SPDX-License-Identifier: Apache-2.0
"""Chooses the transport of an expert-parallel group. All its ranks choose the same, for the same reason.

The ranks of a group ask each other at its first choice, and keep the choice. A layer keeps its transport.
"""

import itertools
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup

from ..config import READERS, ConfigError, MXFP8MoEConfig
from ..ops.log import log
from ..ops.op_builder import nvlink as extension
from . import Transport, nvshmem
from .collective import Collective
from .deadline import answers_of_all, failure_of_any, ranks_of
from .hierarchical import Hierarchical
from .hops import Hops
from .local import Local
from .nvlink import MOST_MULTIPROCESSORS, NVLink
from .peer_memory import NoStaging, PeerMemory
from .releases import check_same_code, own_code

MOST_RANKS = 8  # in a group that exchanges over NVLink
# In a group that takes two hops by default. With more, a model (examples/benchmarks/results/scale.md) sees little
# left to save: a token's experts lie on most nodes.
MOST_NODES = 8
# By the value of "transport", in order of preference inside a host.
TRANSPORTS: dict[str, type[Transport]] = {"nvlink": NVLink, "collective": Collective, "hierarchical": Hierarchical}
# What is tried, in this order, for each value of "transport". Where nothing of it is possible: collective.
TRIED = {None: ("nvlink", "hierarchical"), "nvlink": ("nvlink", ), "hierarchical": ("hierarchical", "nvlink")}


class Place(NamedTuple):
    """Where a rank runs.

    Attributes:
        host: equal on ranks that can hand each other memory. They run on one kernel, in one container.
        gpu: id of its GPU, the same in all processes of the host.
        reached: ids of the GPUs whose memory this rank can address where another rank allocated it.
    """

    host: str
    gpu: str
    reached: frozenset


@dataclass(frozen=True)
class Asked:
    """The keys of the config by which a transport is chosen. All ranks of a group must ask for the same."""

    transport: str | None = None
    node_size: int | None = None
    wire: str = "host"
    capacity_factor: float | None = None


@dataclass(frozen=True)
class Obstacle:
    """Why something is not used.

    Attributes:
        to: what is not used, in words.
        reason: why, in words.
        broken: it should be possible, but something failed.
    """

    to: str
    reason: str
    broken: bool = False


@dataclass(frozen=True)
class Choice:
    """The transport of a group.

    Attributes:
        transport: "nvlink", "hierarchical" or "collective".
        obstacles: to what would have been preferred.
        nodes, node_size: for hierarchical: the number of nodes, and of the ranks of each.
        wires: for hierarchical: the wire between nodes and the one inside a node.
    """

    transport: str
    obstacles: tuple = ()
    nodes: int = 0
    node_size: int = 0
    wires: tuple = ("host", "host")


# Process group -> what was asked -> the choice. An entry is removed together with its process group.
_OF_GROUP: WeakKeyDictionary = WeakKeyDictionary()


def choose(group: ProcessGroup | None, name: str, config: MXFP8MoEConfig | None = None) -> Transport:
    """Returns the transport of one layer. Every rank of the group calls it.

    Args:
        group: the layer's expert-parallel process group. None means that this rank has all experts.
        name: of the layer, for errors.
        config: its keys about transports are read. None: the defaults.

    Raises:
        ConfigError: `capacity_factor` is given, and the group takes two hops. Raised on every rank of the group.
        RuntimeError: ranks run different code, or nvlink is requested and not possible. Raised on every rank of the
            group.
        ValueError: ranks of the group ask for different things. Raised on every rank of the group.
        PeerError: a rank of the group did not come to the first choice.
    """
    config = config or MXFP8MoEConfig()
    if group is None or dist.get_world_size(group=group) == 1:
        return Local(name)
    if config.transport == "collective":
        return Collective(group, name)
    asked = Asked(config.transport, config.node_size, config.wire or "host", config.capacity_factor)
    choices = _OF_GROUP.setdefault(group, {})
    if asked not in choices:
        choices[asked] = _decide(group, name, asked)
        _tell(group, choices[asked], asked, config)
    choice = choices[asked]
    if choice.transport == "nvlink":
        return NVLink(PeerMemory.of(group, extension.try_load()[0]), name, config.nvlink_sms or MOST_MULTIPROCESSORS,
                      config.capacity_factor, config.on_overflow)
    if asked.transport == "nvlink":
        raise RuntimeError(f"{name}: the transport nvlink cannot be used here: {in_words(choice)}. A layer can use "
                           '"transport": "collective" instead')
    if choice.transport == "hierarchical":
        return Hierarchical(Hops.of(group, choice.node_size, *choice.wires), name)
    return Collective(group, name)


def in_words(choice: Choice) -> str:
    """Why it is this transport."""
    obstacles = list(choice.obstacles)
    if choice.transport == "nvlink":
        why = "its ranks share a host, and their GPUs reach each other's memory"
    elif choice.transport == "hierarchical":
        between, inside = choice.wires
        why = f"{choice.nodes} nodes of {choice.node_size} ranks, wire {between}"
        if inside == "peer_memory":
            why += ", peer memory inside a node"
    else:
        why = obstacles.pop(0).reason
    return ". ".join([why, *(f"No {obstacle.to}, because {obstacle.reason}" for obstacle in obstacles)])


def _tell(group: ProcessGroup, choice: Choice, asked: Asked, config: MXFP8MoEConfig) -> None:
    """Logs the choice on rank 0. If something is broken, the group's first rank logs it too. Logs nothing where
    an error follows."""
    ranks, transport = ranks_of(group), choice.transport
    broken = any(obstacle.broken for obstacle in choice.obstacles)
    speaks = dist.get_rank() == 0 or (broken and dist.get_rank() == ranks[0])
    if not speaks or (asked.transport == "nvlink" != transport):
        return
    refused = (asked.transport == "hierarchical" != transport
               or transport == "hierarchical" and choice.wires[0] != asked.wire)
    warning = "WARNING: " if broken or refused else ""
    log(f"mxfp8_moe: {warning}transport {transport} between ranks {ranks}: {in_words(choice)}")
    for key in ("nvlink_sms", "capacity_factor"):
        if getattr(config, key) is not None and transport not in READERS[key]:
            readers = " and ".join(READERS[key])
            log(f'mxfp8_moe: WARNING: "{key}" has no effect: read by {readers} alone')


def _decide(group: ProcessGroup, name: str, asked: Asked) -> Choice:
    """The choice on a group. After each step all ranks exchange their answers, so that all of them start the next
    step, or none."""
    ranks, where = ranks_of(group), f"'choice of transport' of {name}"
    codes, all_asked, places = zip(*answers_of_all(group, (own_code(), asked, _place()), where), strict=True)
    check_same_code(ranks, codes)
    _check_alike(name, ranks, all_asked)
    nodes = [place.host for place in places]
    if asked.node_size is not None:
        nodes = [rank // asked.node_size for rank in ranks]
    obstacles = ()
    for tried in TRIED[asked.transport]:
        if tried == "nvlink":
            choice = _nvlink(group, ranks, places, where)
        elif asked.transport is None and len(set(nodes)) == 1:
            continue
        else:
            choice = _hierarchical(group, name, places, nodes, asked, where)
        if choice.transport == tried:
            return replace(choice, obstacles=choice.obstacles + obstacles)
        obstacles += choice.obstacles
    return Choice("collective", obstacles)


def _check_alike(name: str, ranks: list, asked: Sequence[Asked]) -> None:
    """Raises ValueError if a rank asks for something else than the first one."""
    for rank, one in zip(ranks, asked, strict=True):
        for key, given, first in zip(fields(Asked), astuple(one), astuple(asked[0]), strict=True):
            if given != first:
                raise ValueError(f'{name}: "{key.name}" is {json.dumps(given)} on rank {rank} and {json.dumps(first)} '
                                 f"on rank {ranks[0]}: give every rank the same config")


def even_nodes(ranks: list, nodes: list) -> tuple[int, str | None]:
    """How many ranks each node has, if the group can exchange in two hops.

    Args:
        ranks: global ranks of the group, in its order.
        nodes: the node of each of them.

    Returns:
        The node size and None, or 0 and why two hops are not possible.
    """
    members = {}
    for rank, node in zip(ranks, nodes, strict=True):
        members.setdefault(node, []).append(rank)
    if len(members) == 1:
        return 0, "all ranks are on one node"
    in_order = [rank for of_node in members.values() for rank in of_node]
    if in_order != list(ranks):
        return 0, f"the ranks of a node are not consecutive in the group: {' and '.join(map(str, members.values()))}"
    sizes = sorted({len(of_node) for of_node in members.values()})
    if len(sizes) > 1:
        few, many = (next(m for m in members.values() if len(m) == size) for size in (sizes[0], sizes[-1]))
        return 0, f"its nodes have different numbers of ranks: ranks {few} are one node and ranks {many} another"
    return (0, "there is one rank a node") if sizes == [1] else (sizes[0], None)


def _hierarchical(group: ProcessGroup, name: str, places: Sequence, nodes: list, asked: Asked, where: str) -> Choice:
    """The choice hierarchical, or else collective, with the obstacle to hierarchical."""
    ranks = ranks_of(group)
    node_size, obstacle = even_nodes(ranks, nodes)
    if not obstacle and asked.transport is None and len(set(nodes)) > MOST_NODES:
        obstacle = (f"by our estimate, two hops are not faster between more than {MOST_NODES} nodes. "
                    '"transport": "hierarchical" uses them all the same')
    if obstacle:
        return Choice("collective", (Obstacle("hierarchical", obstacle), ))
    node_of = {rank: i // node_size for i, rank in enumerate(ranks)}
    of_nodes = [ranks[first:first + node_size] for first in range(0, len(ranks), node_size)]
    rails = [ranks[index::node_size] for index in range(node_size)]
    if asked.capacity_factor is not None:
        raise ConfigError(f'{name}: "capacity_factor" is {asked.capacity_factor}, but the transport is hierarchical, '
                          f"since ranks {ranks} are {len(of_nodes)} nodes of {node_size} ranks. Only nvlink supports "
                          '"capacity_factor": leave it out, or keep expert-parallel groups inside a node')
    wire, not_between = asked.wire, None
    not_inside = _no_peer_memory(group, ranks, places, of_nodes, node_of, where)
    if wire == "peer_memory":
        not_between = _no_peer_memory(group, ranks, places, rails, node_of, where)
    elif wire == "nvshmem":
        not_between = _plain_obstacle(len(of_nodes), "a hop", "the wire") or _no_nvshmem(group, rails, node_of, where)
    obstacles = []
    if not_inside and get_accelerator().device_name() != "cpu":
        obstacles.append(Obstacle("peer memory inside a node", not_inside))
    if not_between:
        obstacles.append(Obstacle(f"wire {wire}", not_between))
    return Choice("hierarchical", tuple(obstacles), len(of_nodes), node_size,
                   ("host" if not_between else wire, "host" if not_inside else "peer_memory"))


def _no_nvshmem(group: ProcessGroup, rails: list, node_of: dict, where: str) -> str | None:
    """Why ranks of these hops cannot exchange over NVSHMEM. None if all can: it is started, and has a staging."""
    reason = nvshmem.start(group, where)
    if reason:
        return reason
    mine = next(rail for rail in rails if dist.get_rank() in rail)
    try:
        nvshmem.wire_over_nvshmem(group, mine, node_of)
    except NoStaging as error:  # raised on every rank
        return str(error)
    return None


def _no_peer_memory(group: ProcessGroup, ranks: list, places: Sequence, hops: list, node_of: dict,
                    where: str) -> str | None:
    """Why ranks of one of these hops cannot exchange over peer memory. None if all can.

    `hops`: lists of ranks. Each rank of the group is in one of them.
    """
    place_of = dict(zip(ranks, places, strict=True))
    reasons = [_plain_obstacle(len(hops[0]), "a hop", "peer memory"),
               *(_apart(hop, [place_of[rank] for rank in hop]) for hop in hops)]
    mine = next(hop for hop in hops if dist.get_rank() in hop)
    return next(filter(None, reasons), None) or _failed(group, where, mine, node_of)


def _nvlink(group: ProcessGroup, ranks: list, places: Sequence, where: str) -> Choice:
    """The choice nvlink, or else collective, with the obstacle to nvlink."""
    reason = _plain_obstacle(len(ranks)) or _apart(ranks, places)
    if reason:
        return Choice("collective", (Obstacle("nvlink", reason), ))
    if failure := _failed(group, where):
        return Choice("collective", (Obstacle("nvlink", failure, broken=True), ))
    return Choice("nvlink")


def _failed(group: ProcessGroup, where: str, *hop: Any) -> str | None:
    """Why the extension or the staging does not work on a rank of the group. None if both do on all ranks.

    `hop`: for PeerMemory.of.
    """
    module, failure = extension.try_load()
    if failed := failure_of_any(group, failure, where):
        return failed
    try:
        PeerMemory.of(group, module, *hop)
    except Exception as error:  # the driver or the container may refuse; the group then takes another transport
        failure = f"peer memory cannot be set up: {type(error).__name__}: {error}"
    return failure_of_any(group, failure, where)


def _plain_obstacle(ranks: int, of: str = "the group", kernels: str = "nvlink") -> str | None:
    """Why these kernels cannot exchange between that number of ranks. None if they can.

    It reads only facts that are equal on all ranks. `of`, `kernels`: words for the reason.
    """
    if get_accelerator().device_name() != "cuda":
        return "there is no CUDA device"
    if ranks > MOST_RANKS:
        return f"{of} has {ranks} ranks, and {kernels} supports at most {MOST_RANKS}"
    return None


def _place() -> Place:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    if get_accelerator().device_name() != "cuda":
        return Place(host, "", frozenset())
    me = torch.cuda.current_device()
    ids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    reached = {ids[i] for i in range(len(ids)) if i != me and torch.cuda.can_device_access_peer(me, i)}
    if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1":  # torch's own switch, set by tests
        reached.add(ids[me])
    return Place(host, ids[me], frozenset(reached))


def _apart(ranks: list, places: Sequence) -> str | None:
    """Why two of the ranks do not reach each other's memory. None if all of them do."""
    for (rank, place), (other_rank, other) in itertools.permutations(zip(ranks, places, strict=True), 2):
        if place.host != other.host:
            return (f"ranks {rank} and {other_rank} are on different hosts, {place.host.split()[0]} and "
                    f"{other.host.split()[0]}")
        if other.gpu not in place.reached and place.gpu == other.gpu:
            return f"ranks {rank} and {other_rank} share a GPU"
        if other.gpu not in place.reached:
            return (f"the GPU of rank {rank} cannot reach the memory of the GPU of rank {other_rank}, or rank {rank} "
                    "does not see that GPU (CUDA_VISIBLE_DEVICES)")
    return None
