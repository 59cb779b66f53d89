# SPDX-License-Identifier: Apache-2.0
"""The staging of the NVLink transport: memory of every rank of a group, which the kernels of all its ranks address.

Kernels get a pointer for each rank. `Symmetric` allocates the memory as torch's symmetric memory, over CUDA's peer
access inside one node. It never uses multicast. The tests bring another provider, for ranks without GPUs.
"""

import secrets
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d as c10d

from ..ops.device import multiprocessors
from .capacity import MOST_DROPPING, RAISE, Dropped
from .deadline import (
    DEADLINE,
    LOOK_SECONDS,
    SAME_CALLS,
    PeerFailure,
    absence,
    answers_of_all,
    before_watchdog,
    peer_failure,
    ranks_of,
    set_deadline,
    wait_for_device,
)

FIRST_BYTES = 8 << 20  # size of a half at first: enough for the counts, and for the places of a first batch
SLACK = 1.25  # a half grows to this times what is needed, since routing varies
CODES = ("", "timeout", "mismatch", "overflow")  # kernels.h, Code
# kernels.h, Kind
KINDS = ("", "counts", "places", "dispatch", "combine", "low_latency_dispatch", "low_latency_combine", "rows")
HISTORY = 64  # how many exchanges are remembered by name

# By extension and the ranks that exchange: one staging serves all layers of a group, or of a hop. Keyed weakly, so
# that an entry goes with its process group.
_OF_GROUP: WeakKeyDictionary = WeakKeyDictionary()


class NoStaging(RuntimeError):
    """Staging could not be allocated on some rank. Raised on every rank of the group."""


class Symmetric:
    """Staging in torch's symmetric memory."""

    @staticmethod
    def empty(size: int, device: torch.device) -> torch.Tensor:
        """uint8 [size] that `addresses` can make known to the other ranks."""
        import torch.distributed._symmetric_memory as symmetric_memory
        return symmetric_memory.empty(size, dtype=torch.uint8, device=device)

    @staticmethod
    def addresses(staging: torch.Tensor, group: Any, ranks: list, name: str) -> list[int]:
        """The addresses of the stagings of `ranks`, as this rank's kernels use them. Collective.

        Args:
            ranks: global ranks of the group. No other rank's staging is mapped.
            name: equal on these ranks, and new.
        """
        import torch.distributed._symmetric_memory as symmetric_memory
        if ranks == ranks_of(group):
            mapped = symmetric_memory.rendezvous(staging, group)
        else:
            # torch looks a group's ranks and store up by its name. Depending on the release it finds them in what
            # set_group_info tells, or in a process group. One that cannot communicate is enough.
            me, store = ranks.index(torch.distributed.get_rank()), c10d.PrefixStore(name, c10d._get_default_store())
            symmetric_memory._SymmetricMemory.set_group_info(name, me, len(ranks), store)
            staging.hop = torch.distributed.ProcessGroup(store, me, len(ranks))
            c10d._register_process_group(name, staging.hop)  # it only keeps a weak reference
            mapped = symmetric_memory._SymmetricMemory.rendezvous(staging, name)
        return [int(pointer) for pointer in mapped.buffer_ptrs]


class PeerMemory:
    """A group's staging on this rank's current device, the state of its kernels, and what the host knows of exchanges.

    The constructor is collective.

    Args:
        group: a process group. All its ranks call the constructor, and later `reserve`.
        extension: the loaded module of ops/csrc/nvlink.
        first_epoch: number of the first exchange. Tests start just below 2^32.
        provider: allocates the staging, as `Symmetric` does.
        ranks: 2 to 8 global ranks of the group, on one host: those that exchange with this one, and this one. Default:
            all ranks of the group.
        node_of: the node of each global rank of the group, for errors. None: they do not name nodes.
    """

    def __init__(self, group: Any, extension: ModuleType, first_epoch: int = 1, provider: Any = Symmetric,
                 ranks: list | None = None, node_of: dict | None = None):
        self._group, self.extension, self._provider = ref(group), extension, provider
        self.ranks, self.node_of = ranks_of(group) if ranks is None else ranks, node_of
        self.rank, self.world_size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.device = torch.device(get_accelerator().current_device_name())
        self.epoch = first_epoch
        self.seconds = set_deadline(group, self.device)
        self.captured = False
        # Of an exchange that was sent and not received yet: the handle of its AllToAll, and its name.
        self.sent: tuple | None = None
        self._where: dict = {}
        self._first_epoch, self.state, self.side = first_epoch, None, None
        self._last: tuple = (None, None)  # the stream of the last launch: its raw handle, and torch's object
        self.multiprocessors = multiprocessors(self.device) if self.device.type == "cuda" else 8
        self.serial = 0
        self.host_waits = 0
        self.generation = 0
        self.unchecked = False  # an exchange with a capacity was launched, and the host has not waited for it
        self._allocate(FIRST_BYTES, "the first exchange")

    def _set_up(self) -> None:
        """Makes what does not change when the staging grows."""
        pinned = self.device.type == "cuda"
        if pinned:  # for exchanges beside GEMMs, with a high priority: they get the multiprocessors that become free
            self.side = get_accelerator().Stream(priority=-1)
        # device="cpu", since torch.set_default_device may name another.
        self._failure = torch.zeros(8, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._failed = self._failure.numpy()
        self.host = torch.zeros(1 << 16, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.host_words = self.host.numpy()
        self.dropped = Dropped(torch.zeros(MOST_DROPPING, dtype=torch.int64, device="cpu", pin_memory=pinned))
        self.extension.load()
        self.state = torch.zeros(self.extension.STATE_WORDS, dtype=torch.int32, device=self.device)
        self.state[0] = _signed(self._first_epoch)

    @property
    def group(self) -> Any:
        """The process group. This object does not keep it alive."""
        return self._group()

    @staticmethod
    def of(group: Any, extension: ModuleType, ranks: list | None = None, node_of: dict | None = None,
           provider: Any = Symmetric) -> "PeerMemory":
        """The PeerMemory of these ranks of the group. The first call makes it, and is collective in the group."""
        made, key = _OF_GROUP.setdefault(group, {}), (extension, *(ranks or ()))
        if key not in made:
            made[key] = PeerMemory(group, extension, ranks=ranks, node_of=node_of, provider=provider)
        return made[key]

    @staticmethod
    def wait_and_check_all() -> None:
        """`wait_and_check` for every group of this process."""
        for memory in [memory for made in list(_OF_GROUP.values()) for memory in made.values()]:
            memory.wait_and_check()

    def wait_and_check(self) -> None:
        """Raises the errors of exchanges so far. Waits for those with a capacity and for replays of CUDA graphs.

        In all other layers the host has waited for the counts. Errors of what came after them show there the next
        time. Called once in each step of the optimizer. Warns about dropped choices.
        """
        if (self.unchecked or self.captured) and self.device.type == "cuda":  # replays pass no host
            self.unchecked = False
            self.host_waits += 1
            self.stream()
            done = get_accelerator().Event()
            done.record()
            wait_for_device(done, self.group, "the exchanges before an optimizer's step", self.seconds)
        self.check()
        self.dropped.warn()

    def _allocate(self, half_bytes: int, where: str) -> None:
        """Allocates new staging. Collective. It waits for all exchanges, and raises on every rank or on none."""
        get_accelerator().synchronize()
        if self.state is not None:
            self.check()
            # The kernels count the exchanges that were launched. The host may have counted one that was not.
            self.epoch = int(self.state[0]) & 0xFFFFFFFF
        self._closed(where)
        half_bytes = -(-half_bytes // (1 << 20)) * (1 << 20)
        told = dict(zip(ranks_of(self.group),
                        answers_of_all(self.group, (half_bytes, where, f"ds_mxfp8_moe/{secrets.token_hex(8)}"),
                                       f"growth of the staging for {where}"), strict=True))
        if len({(size, what) for size, what, _ in told.values()}) > 1:
            each = ", ".join(f"rank {rank} {size} bytes for {what}" for rank, (size, what, _) in told.items())
            raise RuntimeError(f"the ranks need staging of different sizes: {each}. {SAME_CALLS}")
        # If the allocation fails, the next exchange allocates again, even an exchange of no rows.
        self.half_bytes, self._staging = -1, None
        header = self.extension.HALVES_AT

        def on_every_rank(step: Callable) -> Any:
            """Calls `step`. Returns its result after the call on all ranks, or raises on all if it raised on one."""
            result, failure = None, ""
            try:
                result = step()
            except Exception as error:  # the driver or the container may refuse
                failure = f"{type(error).__name__}: {error}"
            failures = answers_of_all(self.group, failure, f"growth of the staging for {where}")
            for rank, failure in zip(ranks_of(self.group), failures, strict=True):
                if failure:
                    raise NoStaging(f"{where}: the staging of {header + 2 * half_bytes} bytes could not be "
                                    f"allocated on rank {rank}: {failure}")
            return result

        def make() -> torch.Tensor:
            if self.state is None:
                self._set_up()
            return self._provider.empty(header + 2 * half_bytes, self.device)

        def share() -> list[int]:
            peers = self._provider.addresses(staging, self.group, self.ranks, told[self.ranks[0]][2])
            # Every flag says that its rank has finished the exchange before this one.
            staging[:header].view(torch.int32).fill_(_signed(self.epoch - 1))
            get_accelerator().synchronize()
            return peers

        staging = on_every_rank(make)
        peers = on_every_rank(share)
        self._staging, self.half_bytes = staging, half_bytes
        timeout_ns = int(min(self._kernels_wait * 1e9, 2**63))  # kernels count in 64 bits
        self._template = self.extension.Group(
            peer=peers + [0] * (self.extension.MAX_RANKS - len(peers)), state=self.state.data_ptr(),
            failure=self._failure.data_ptr(), rank=self.rank, world=self.world_size, half_bytes=half_bytes,
            timeout_ns=timeout_ns)
        self.generation += 1

    @property
    def _kernels_wait(self) -> float:
        """The deadline of kernels, in seconds."""
        return max(before_watchdog(self.seconds), 0.1)

    def reserve(self, needed: int, where: str) -> None:
        """Makes room for `needed` bytes in a half. All ranks pass the same number, since this may be collective."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.captured = True
        if needed <= self.half_bytes:
            return
        if self.captured:
            raise RuntimeError(f"{where} needs {needed} bytes of staging on every rank and has {self.half_bytes}. It "
                               "cannot grow, since a CUDA graph holds its address. Run the largest batch once before "
                               "the capture")
        self._allocate(int(needed * SLACK), where)

    def stream(self) -> int:
        """The raw handle of the current stream, for launches.

        If the group's last launch was on another stream, this one waits for it, since exchanges share the staging and
        its state. Whoever replays CUDA graphs puts them in order.
        """
        if self.device.type != "cuda":
            return 0
        # The raw handle, since torch.cuda.current_stream takes about 30 us of the host.
        raw, (last_raw, last) = torch._C._cuda_getCurrentRawStream(self.device.index), self._last
        if raw != last_raw and not torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream(self.device)
            if last is not None:
                current.wait_stream(last)
            self._last = raw, current
        return raw

    def group_for(self, signature: int):
        """The kernels' Group for exchanges of one signature. Valid until `generation` changes."""
        return self.extension.Group(self._template, signature=signature)

    def _closed(self, where: str) -> None:
        if self.sent is not None:
            raise ValueError(f"{where}: the rows that {self.sent[1]} sent are not received yet. Receive them first, "
                             "since a group has one exchange at a time")

    def advance(self, where: str) -> None:
        """Counts the next exchange. It is launched on the current stream, or on one that waits for that."""
        self._closed(where)
        self.stream()
        self._where[self.epoch] = where
        self._where.pop(self.epoch - HISTORY, None)
        self.epoch = self.epoch + 1 & 0xFFFFFFFF

    def begin(self, signature: int, where: str):
        """Counts the next exchange. Returns the kernels' Group for it."""
        self.advance(where)
        return self.group_for(signature)

    def next_serial(self) -> int:
        """The next value of `serial`, for which `wait_for_counts` waits."""
        self.serial = self.serial % 0x7FFFFFFF + 1
        return self.serial

    def wait_for_counts(self, where: str) -> None:
        """Waits on the host until the kernel has written `serial` to the first of `host_words`."""
        self.host_waits += 1
        start, left, counted = time.monotonic(), self.seconds, False
        while not counted and left > 0 and self._failed[0] == 0:  # Python handles Ctrl-C between two waits
            counted = self.extension.wait_for_totals(self.host.data_ptr(), self.serial, self._failure.data_ptr(),
                                                     min(left, LOOK_SECONDS))
            left = start + self.seconds - time.monotonic()
        if counted:
            return
        self.check()
        raise peer_failure(self.group, f"'counts' of {where}, on the host", start, self.seconds)

    def check(self) -> None:
        """Raises the error that a kernel has recorded by now. The host does not wait for the device."""
        if self._failed[0] == 0:
            return
        code, rank, peer, phase, epoch, detail = (int(word) & 0xFFFFFFFF for word in self._failed[:6])
        ranks = self.ranks
        kind = KINDS[phase]
        where = kind if self.captured else self._where.get(epoch, kind)  # replays count on the device alone
        me, other = f"rank {ranks[rank]}", f"rank {ranks[peer]}"
        if CODES[code] == "timeout" and self.node_of is not None:  # of one hop, in which not all ranks take part
            raise peer_failure(self.group, where, time.monotonic() - self._kernels_wait, self._kernels_wait,
                               self.node_of)
        place = f"exchange {epoch}, {where}" if self.node_of is None else where
        if CODES[code] == "overflow":
            raise PeerFailure(f"{me}: {place}: {other} would get {detail} rows, more than its capacity. Nothing was "
                              f'computed from the rows that do not fit. {RAISE}')
        if CODES[code] == "mismatch":
            theirs = KINDS[detail & 255]
            why = "of another layer, or of other shapes or dtypes" if theirs == kind else f"'{theirs}'"
            raise PeerFailure(f"{me}: {place}: {other} is in another call, {why}. {SAME_CALLS}", (ranks[peer], ))
        raise PeerFailure(f"{me} waited in {place} (phase {kind}) until the deadline, for {other}: "
                          f"{absence(ranks[peer])}. {DEADLINE}", (ranks[peer], ), at_deadline=True)


def dense(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if it is not contiguous or does not begin at a multiple of 16 bytes, as kernels need it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _signed(epoch: int) -> int:
    """A u32 as torch's int32 holds it."""
    epoch &= 0xFFFFFFFF
    return epoch - (1 << 32) if epoch >> 31 else epoch
