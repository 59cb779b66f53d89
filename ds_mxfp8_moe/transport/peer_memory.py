# SPDX-License-Identifier: Apache-2.0
"""Memory of every rank of a group that the kernels of all its ranks address: the NVLink transport's staging.

Providers of it are interchangeable, since kernels see a pointer for each rank and offsets. `Symmetric` is torch's
symmetric memory over CUDA's peer access, inside one node; multicast is never used. The tests bring another, for ranks
without GPUs.
"""

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from ..ops.device import multiprocessors
from .deadline import (
    LOOK_SECONDS,
    SAME_CALLS,
    PeerFailure,
    absence,
    answers_of_all,
    peer_failure,
    ranks_of,
    set_deadline,
    wait_for_device,
)

FIRST_BYTES = 8 << 20  # of a half: counts and the places of a first batch
SLACK = 1.25  # with which a half grows, since routing varies
CODES = ("", "timeout", "mismatch", "overflow")  # kernels.h, Code
# kernels.h, Kind
KINDS = ("", "counts", "places", "dispatch", "combine", "low_latency_dispatch", "low_latency_combine")
HISTORY = 64  # exchanges whose names are remembered
SIGNATURES = 4096  # whose Groups are kept: with a capacity, every number of tokens has signatures of its own

# One staging serves all layers of a group. Keyed weakly: it goes when its process group goes.
_OF_GROUP: WeakKeyDictionary = WeakKeyDictionary()


class Symmetric:
    """Staging in torch's symmetric memory."""

    @staticmethod
    def empty(size: int, device: torch.device) -> torch.Tensor:
        """uint8 [size] that other ranks may come to address."""
        import torch.distributed._symmetric_memory as symmetric_memory
        return symmetric_memory.empty(size, dtype=torch.uint8, device=device)

    @staticmethod
    def addresses(staging: torch.Tensor, group: Any) -> list[int]:
        """Where this rank addresses each rank's staging. Collective."""
        import torch.distributed._symmetric_memory as symmetric_memory
        return [int(pointer) for pointer in symmetric_memory.rendezvous(staging, group).buffer_ptrs]


class PeerMemory:
    """A group's staging on this rank's current device, its state, and what the host knows of its exchanges.

    Args:
        group: a process group of 2 to 8 ranks on one node. Collective.
        extension: the loaded module of ops/csrc/nvlink.
        first_epoch: of the first exchange; tests begin just below 2^32.
        provider: as `Symmetric`.
    """

    def __init__(self, group: Any, extension: ModuleType, first_epoch: int = 1, provider: Any = Symmetric):
        self._group, self.extension, self._provider = ref(group), extension, provider
        self.rank, self.world_size = dist.get_rank(group=group), dist.get_world_size(group=group)
        self.device = torch.device(get_accelerator().current_device_name())
        self.epoch = first_epoch
        self.seconds = set_deadline(group, self.device)
        self.captured = False
        self.sent: tuple | None = None  # the exchange of which only the first half was launched: whose, and its name
        self._where: dict = {}
        self._first_epoch, self.state, self.side = first_epoch, None, None
        self._last: tuple = (None, None)  # the stream of the last launch, as kernels take it, and as torch knows it
        self.multiprocessors = multiprocessors(self.device) if self.device.type == "cuda" else 8
        self.serial = 0
        self.host_waits = 0
        self.generation = 0
        self.unchecked = False  # an exchange was launched that no host has waited for, and counts may not have fit
        self._allocate(FIRST_BYTES, "the first exchange")

    def _set_up(self) -> None:
        """What there is once beside the staging."""
        pinned = self.device.type == "cuda"
        if pinned:  # for exchanges beside GEMMs: first where a multiprocessor becomes free
            self.side = get_accelerator().Stream(priority=-1)
        # The host's, whatever torch.set_default_device says.
        self._failure = torch.zeros(8, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._failed = self._failure.numpy()
        self.host = torch.zeros(1 << 16, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.host_words = self.host.numpy()
        self.extension.load()
        self.state = torch.zeros(self.extension.STATE_WORDS, dtype=torch.int32, device=self.device)
        self.state[0] = _signed(self._first_epoch)

    @property
    def group(self) -> Any:
        """The process group, which this does not keep alive."""
        return self._group()

    @staticmethod
    def of(group: Any, extension: ModuleType) -> "PeerMemory":
        """The group's; made at the first call, which is collective."""
        if group not in _OF_GROUP:
            _OF_GROUP[group] = PeerMemory(group, extension)
        return _OF_GROUP[group]

    @staticmethod
    def wait_and_check_all() -> None:
        """`wait_and_check` for every group of this process."""
        for memory in list(_OF_GROUP.values()):
            memory.wait_and_check()

    def wait_and_check(self) -> None:
        """Raises what went wrong so far; waits for exchanges whose counts the host does not know. Others were waited
        for in their layer's forward."""
        if (self.unchecked or self.captured) and self.device.type == "cuda":  # replays pass no host
            self.unchecked = False
            self.host_waits += 1
            self.stream()
            done = get_accelerator().Event()
            done.record()
            wait_for_device(done, self.group, "the exchanges before an optimizer's step", self.seconds)
        self.check()

    def _allocate(self, half_bytes: int, where: str) -> None:
        """New staging. Collective: whoever is still in an exchange is waited for. Raises on every rank or on none."""
        get_accelerator().synchronize()
        if self.state is not None:
            self.check()
            # The kernels': of an exchange that was counted here, the launch may have failed, or memory run out before.
            self.epoch = int(self.state[0]) & 0xFFFFFFFF
        self._closed(where)
        half_bytes = -(-half_bytes // (1 << 20)) * (1 << 20)
        told = answers_of_all(self.group, (half_bytes, where), f"growth of the staging for {where}")
        if len(set(told)) > 1:
            each = ", ".join(f"rank {rank} {size} bytes for {what}"
                             for rank, (size, what) in zip(ranks_of(self.group), told, strict=True))
            raise RuntimeError(f"the ranks' staging is to grow differently: {each}; {SAME_CALLS}")
        # Until the new one is there: room for nothing, not even for an exchange of no rows.
        self.half_bytes, self._staging = -1, None
        header = self.extension.HALVES_AT

        def on_every_rank(step: Callable) -> Any:
            """What `step` returns, if it raises on no rank; when this returns, all ranks are through."""
            result, failure = None, ""
            try:
                result = step()
            except Exception as error:  # whatever the driver or the container refuses
                failure = f"{type(error).__name__}: {error}"
            failures = answers_of_all(self.group, failure, f"growth of the staging for {where}")
            for rank, failure in zip(ranks_of(self.group), failures, strict=True):
                if failure:
                    raise RuntimeError(f"{where}: no staging of {header + 2 * half_bytes} bytes, rank {rank}: "
                                       f"{failure}")
            return result

        def make() -> torch.Tensor:
            if self.state is None:
                self._set_up()
            return self._provider.empty(header + 2 * half_bytes, self.device)

        def share() -> list[int]:
            peers = self._provider.addresses(staging, self.group)
            # As if all had been through the exchange before this one.
            staging[:header].view(torch.int32).fill_(_signed(self.epoch - 1))
            get_accelerator().synchronize()
            return peers

        staging = on_every_rank(make)
        peers = on_every_rank(share)
        self._staging, self.half_bytes = staging, half_bytes
        # Before NCCL's watchdog, which knows no phase, would end the process; kernels count in 64 bits.
        timeout_ns = int(min(max(self.seconds - min(10.0, self.seconds / 4), 0.1) * 1e9, 2**63))
        self._template = self.extension.Group(
            peer=peers + [0] * (self.extension.MAX_RANKS - len(peers)), state=self.state.data_ptr(),
            failure=self._failure.data_ptr(), rank=self.rank, world=self.world_size, half_bytes=half_bytes,
            timeout_ns=timeout_ns)
        self.generation += 1
        self._groups: dict = {}

    def reserve(self, needed: int, where: str) -> None:
        """Sees that a half holds so many bytes: a number that every rank comes to alike, for it may be collective."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.captured = True
        if needed <= self.half_bytes:
            return
        if self.captured:
            raise RuntimeError(f"{where} needs {needed} bytes of staging on every rank and has {self.half_bytes}, "
                               "which cannot grow any more: a CUDA graph holds its address. Run the largest batch "
                               "once before the capture")
        self._allocate(int(needed * SLACK), where)

    def stream(self) -> int:
        """The current stream, as kernels are launched on it. What the group did on another one comes first: exchanges
        share the staging and its state. Graphs are put in order by whoever replays them."""
        if self.device.type != "cuda":
            return 0
        # torch.cuda.current_stream makes an object of it: some 30 us of the host.
        raw, (last_raw, last) = torch._C._cuda_getCurrentRawStream(self.device.index), self._last
        if raw != last_raw and not torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream(self.device)
            if last is not None:
                current.wait_stream(last)
            self._last = raw, current
        return raw

    def group_for(self, signature: int):
        """The kernels' Group for exchanges of one signature; as long as `generation` stays."""
        group = self._groups.get(signature)
        if group is None:
            if len(self._groups) >= SIGNATURES:
                self._groups.clear()
            group = self._groups[signature] = self.extension.Group(self._template, signature=signature)
        return group

    def _closed(self, where: str) -> None:
        if self.sent is not None:
            raise ValueError(f"{where}: what {self.sent[1]} sent is not received yet, and a group has one exchange at "
                             "a time: receive it first")

    def advance(self, where: str) -> None:
        """Counts an exchange that is about to be launched, on the current stream or on one that waits for it."""
        self._closed(where)
        self.stream()
        self._where[self.epoch] = where
        self._where.pop(self.epoch - HISTORY, None)
        self.epoch = self.epoch + 1 & 0xFFFFFFFF

    def begin(self, signature: int, where: str):
        """Both: the kernels' Group for the next exchange."""
        self.advance(where)
        return self.group_for(signature)

    def next_serial(self) -> int:
        """What `wait_for_counts` will wait for."""
        self.serial = self.serial % 0x7FFFFFFF + 1
        return self.serial

    def wait_for_counts(self, where: str) -> None:
        """The transport's only wait on the host: until `serial` stands in the first of `host_words`."""
        self.host_waits += 1
        start, left, counted = time.monotonic(), self.seconds, False
        while not counted and left > 0 and self._failed[0] == 0:  # Ctrl-C is heard between two waits
            counted = self.extension.wait_for_totals(self.host.data_ptr(), self.serial, self._failure.data_ptr(),
                                                     min(left, LOOK_SECONDS))
            left = start + self.seconds - time.monotonic()
        if counted:
            return
        self.check()
        raise peer_failure(self.group, f"'counts' of {where}, on the host", start)

    def check(self) -> None:
        """Raises what a kernel recorded. Costs no synchronisation: it sees what has happened by now."""
        if self._failed[0] == 0:
            return
        code, rank, peer, phase, epoch, detail = (int(word) & 0xFFFFFFFF for word in self._failed[:6])
        ranks = ranks_of(self.group)
        kind = KINDS[phase]
        where = kind if self.captured else self._where.get(epoch, kind)  # replays count on the device alone
        me, other = f"rank {ranks[rank]}", f"rank {ranks[peer]}"
        place = f"exchange {epoch} over NVLink, {where}"
        if CODES[code] == "overflow":
            raise PeerFailure(f"{me}: {place}: {other} would get {detail} rows, more than its capacity; nothing was "
                              'computed from what does not fit. Raise "capacity_factor", or leave it out')
        if CODES[code] == "mismatch":
            theirs = KINDS[detail & 255]
            why = "of another layer, or of other shapes or dtypes" if theirs == kind else f"'{theirs}'"
            raise PeerFailure(f"{me}: {place}: {other} is in another call, {why}: {SAME_CALLS}", (ranks[peer], ))
        what = f"{place} (phase {kind}, epoch {epoch})"
        deadline = "The deadline is DEEPSPEED_TIMEOUT (minutes), or timeout= of deepspeed.init_distributed"
        raise PeerFailure(f"{me} waited in vain for {other} in {what}: {absence(ranks[peer])}. {deadline}",
                          (ranks[peer], ))


def _signed(epoch: int) -> int:
    """A u32 as torch's int32 holds it."""
    epoch &= 0xFFFFFFFF
    return epoch - (1 << 32) if epoch >> 31 else epoch
