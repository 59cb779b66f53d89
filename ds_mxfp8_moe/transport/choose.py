# SPDX-License-Identifier: Apache-2.0
"""Chooses the transport of an expert-parallel group. All its ranks choose the same, for the same reason.

The ranks of a group ask each other at its first choice. Later choices look the answer up.
"""

import itertools
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from ..ops.op_builder import nvlink as extension
from . import Transport
from .collective import Collective
from .deadline import answers_of_all, ranks_of
from .local import Local
from .nvlink import NVLink
from .peer_memory import PeerMemory

MOST_RANKS = 8  # over NVLink


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


class Verdict(NamedTuple):
    """Whether a group takes NVLink, and the reason. `broken`: NVLink should be possible, but something failed."""

    nvlink: bool
    reason: str
    broken: bool = False


# Keyed weakly, so that an entry goes with its process group.
_OF_GROUP: WeakKeyDictionary = WeakKeyDictionary()


def choose(group: Any, name: str, requested: str | None = None, sms: int | None = None,
           capacity_factor: float | None = None, overlap: bool = True, on_overflow: str = "error") -> Transport:
    """Returns the transport of one layer. Every rank of the group calls it.

    Args:
        group: the layer's expert-parallel process group. None means that this rank has all experts.
        name: of the layer, for errors.
        requested: "collective" or "nvlink". None means nvlink where it is possible.
        sms, capacity_factor, overlap, on_overflow: for NVLink. In the config, `sms` is `nvlink_sms`.

    Raises:
        RuntimeError: nvlink is requested and not possible. Raised on every rank of the group.
        PeerFailure: a rank of the group did not come to the first choice.
    """
    if group is None or dist.get_world_size(group=group) == 1:
        return Local(name)
    if requested == "collective":
        return Collective(group, name)
    if group not in _OF_GROUP:
        _OF_GROUP[group] = _decide(group, name)
        if _OF_GROUP[group].nvlink or requested != "nvlink":  # else an error follows
            _tell(group, _OF_GROUP[group], {"nvlink_sms": sms, "capacity_factor": capacity_factor})
    verdict = _OF_GROUP[group]
    if verdict.nvlink:
        return NVLink(PeerMemory.of(group, extension.try_load()[0]), name, sms, capacity_factor, overlap,
                      on_overflow)
    if requested == "nvlink":
        raise RuntimeError(f"{name}: the transport nvlink cannot be used here: {verdict.reason}. A layer can use "
                           '"transport": "collective" instead')
    return Collective(group, name)


def _decide(group: Any, name: str) -> Verdict:
    """After each step all ranks exchange their answers, so that all of them start the next step, or none."""
    ranks, where = ranks_of(group), f"'choice of transport' of {name}"
    reason = _plain_obstacle(len(ranks)) or _apart(ranks, answers_of_all(group, _place(), where))
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
    """Why NVLink is not possible, by facts that are equal on all ranks. None if they allow it."""
    if get_accelerator().device_name() != "cuda":
        return "there is no CUDA device"
    if ranks > MOST_RANKS:
        return f"the group has {ranks} ranks, and nvlink supports at most {MOST_RANKS}"
    return None


def _place() -> Place:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    me = torch.cuda.current_device()
    ids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    reached = {ids[i] for i in range(len(ids)) if i != me and torch.cuda.can_device_access_peer(me, i)}
    if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1":  # torch's own switch, set by tests
        reached.add(ids[me])
    return Place(host, ids[me], frozenset(reached))


def _apart(ranks: list, places: list) -> str | None:
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


def _trial(group: Any, module: Any) -> str:
    """Allocates the group's staging. Returns the error, or ""."""
    try:
        PeerMemory.of(group, module)
    except Exception as error:  # the driver or the container may refuse; the group then takes the collective transport
        return f"peer memory cannot be set up: {type(error).__name__}: {error}"
    return ""


def _tell(group: Any, verdict: Verdict, of_nvlink: dict) -> None:
    """`of_nvlink`: values of the keys that only the transport nvlink reads."""
    ranks = ranks_of(group)
    if dist.get_rank() == 0 or (verdict.broken and dist.get_rank() == ranks[0]):
        name = "nvlink" if verdict.nvlink else "collective"
        warning = "WARNING: " if verdict.broken else ""
        print(f"mxfp8_moe: {warning}transport {name} between ranks {ranks}: {verdict.reason}", flush=True)
        for key in [key for key, value in of_nvlink.items() if value is not None and not verdict.nvlink]:
            print(f'mxfp8_moe: WARNING: "{key}" has no effect: only the transport nvlink reads it', flush=True)
