# SPDX-License-Identifier: Apache-2.0
"""Which transport the ranks of an expert-parallel group take, and why: all of them come to the same answer.

The ranks of a group ask each other once, at its first choice; after that a choice is a look into a table.
"""

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from ..ops.op_builder import nvlink as extension
from .collective import Collective
from .deadline import answers_of_all, ranks_of
from .nvlink import NVLink
from .peer_memory import PeerMemory

MOST_RANKS = 8  # over NVLink


class Place(NamedTuple):
    """Where a rank runs.

    Attributes:
        host: equal on ranks that can hand each other memory: one kernel's, in one container.
        gpu: its GPU, by an id that all processes of the host know it by.
        reached: GPUs whose memory its GPU addresses, of those that this process sees.
        may_share: whether torch lets ranks of one GPU share memory, as in tests.
    """

    host: str
    gpu: str
    reached: frozenset
    may_share: bool


class Verdict(NamedTuple):
    """Whether a group takes NVLink, and why; `broken` where it should have, and something failed."""

    nvlink: bool
    reason: str
    broken: bool = False


# What each group came to. Keyed weakly: it goes when its process group goes.
_OF_GROUP: WeakKeyDictionary = WeakKeyDictionary()


def choose(group: Any, name: str, requested: str | None = None, sms: int | None = None,
           capacity_factor: float | None = None, overlap: bool = True) -> Collective | NVLink:
    """The transport of one layer. Collective over the group at its first choice, unless "collective" is requested.

    Args:
        group: the layer's expert-parallel process group. None, or of one rank: nothing travels.
        name: the layer's, for errors.
        requested: "collective"; "nvlink"; or None, for nvlink wherever it is possible.
        sms, capacity_factor, overlap: NVLink's, as in the config (`nvlink_sms`).

    Raises:
        RuntimeError: nvlink is requested and impossible; on every rank of the group alike.
        PeerFailure: a rank of the group did not come to the first choice.
    """
    if group is None or requested == "collective" or dist.get_world_size(group=group) == 1:
        return Collective(group, name)
    if group not in _OF_GROUP:
        _OF_GROUP[group] = _decide(group, name)
        _tell(group, _OF_GROUP[group], capacity_factor)
    verdict = _OF_GROUP[group]
    if verdict.nvlink:
        return NVLink(PeerMemory.of(group, extension.try_load()[0]), name, sms, capacity_factor, overlap)
    if requested == "nvlink":
        raise RuntimeError(f'{name}: "transport" is "nvlink", which cannot be used here: {verdict.reason}. Mend that, '
                           'or write "transport": "collective", or leave the key out to have it chosen')
    return Collective(group, name)


def why(group: Any) -> str:
    """The reason of what `choose` came to for this group."""
    return _OF_GROUP[group].reason


def _decide(group: Any, name: str) -> Verdict:
    """Each step asks all ranks, so that none begins a step that another cannot follow."""
    reason = _plain_obstacle(dist.get_world_size(group=group))
    if reason:
        return Verdict(False, reason)
    ranks, where = ranks_of(group), f"'choice of transport' of {name}"
    reason = _apart(ranks, answers_of_all(group, _place(), where))
    if reason:
        return Verdict(False, reason)
    module, failure = extension.try_load()
    failures = answers_of_all(group, failure, where)
    if not any(failures):
        failures = answers_of_all(group, _trial(group, module), where)
    for rank, failure in zip(ranks, failures, strict=True):
        if failure:
            return Verdict(False, f"rank {rank}: {failure}", broken=True)
    return Verdict(True, "its ranks share a host, and their GPUs reach each other's memory")


def _plain_obstacle(ranks: int) -> str | None:
    """What rules NVLink out by facts that all ranks know."""
    if get_accelerator().device_name() != "cuda":
        return "there is no CUDA device"
    if ranks > MOST_RANKS:
        return f"the group has {ranks} ranks, and nvlink serves {MOST_RANKS} at most"
    return None


def _place() -> Place:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    me = torch.cuda.current_device()
    ids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    reached = frozenset(ids[i] for i in range(len(ids)) if i != me and torch.cuda.can_device_access_peer(me, i))
    may_share = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # torch's own switch
    return Place(host, ids[me], reached, may_share)


def _apart(ranks: list, places: list) -> str | None:
    """What keeps two ranks from each other's memory; None where nothing does."""
    for rank, place in zip(ranks, places, strict=True):
        for other_rank, other in zip(ranks, places, strict=True):
            if place.host != other.host:
                return (f"ranks {rank} and {other_rank} are on different hosts, {place.host.split()[0]} and "
                        f"{other.host.split()[0]}")
            if place.gpu == other.gpu and rank != other_rank and not (place.may_share and other.may_share):
                return f"ranks {rank} and {other_rank} share a GPU"
            if place.gpu != other.gpu and other.gpu not in place.reached:
                return (f"the GPU of rank {rank} cannot reach the memory of rank {other_rank}'s, or rank {rank} does "
                        "not see that GPU (CUDA_VISIBLE_DEVICES)")
    return None


def _trial(group: Any, module: Any) -> str:
    """Sets the group's staging up; returns what went wrong, or nothing."""
    try:
        PeerMemory.of(group, module)
    except Exception as error:  # whatever the driver or the container refuses: the collective transport serves
        return f"peer memory cannot be set up: {type(error).__name__}: {error}"
    return ""


def _tell(group: Any, verdict: Verdict, capacity_factor: float | None) -> None:
    ranks = ranks_of(group)
    if dist.get_rank() == 0 or (verdict.broken and dist.get_rank() == ranks[0]):
        name = "nvlink" if verdict.nvlink else "collective"
        warning = "WARNING: " if verdict.broken else ""
        print(f"mxfp8_moe: {warning}transport {name} between ranks {ranks}: {verdict.reason}", flush=True)
        if capacity_factor is not None and not verdict.nvlink:
            print('mxfp8_moe: WARNING: "capacity_factor" has no effect: the collective transport has no static mode, '
                  "and takes all tokens", flush=True)
