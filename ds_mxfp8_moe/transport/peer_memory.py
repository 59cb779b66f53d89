# SPDX-License-Identifier: Apache-2.0
"""Staging: memory of every rank of a group, which the kernels of all its ranks address.

Kernels get a pointer for each rank. `Symmetric` allocates the memory as torch's symmetric memory, over CUDA's peer
access inside one host. It never uses multicast. `nvshmem.Heap` allocates it between hosts. The tests bring another
provider, for ranks without GPUs.
"""

import secrets
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ..ops.device import multiprocessors
from .deadline import SAME_CALLS, answers_of_all, default_store, failure_of_any, ranks_of
from .kernel_reports import KernelReports

FIRST_BYTES = 8 << 20  # size of a half at first: enough for the counts, and for the places of a first batch
SLACK = 1.25  # a half grows to this times what is needed, since routing varies

# By extension and the ranks that exchange: one staging serves all layers of a group, or of a hop. Keyed weakly, so
# that an entry is removed with its process group.
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
    def addresses(staging: torch.Tensor, group: ProcessGroup, ranks: list, name: str) -> list[int]:
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
            me, store = ranks.index(torch.distributed.get_rank()), c10d.PrefixStore(name, default_store())
            symmetric_memory._SymmetricMemory.set_group_info(name, me, len(ranks), store)
            staging.hop = torch.distributed.ProcessGroup(store, me, len(ranks))
            c10d._register_process_group(name, staging.hop)  # it only keeps a weak reference
            mapped = symmetric_memory._SymmetricMemory.rendezvous(staging, name)
        return [int(pointer) for pointer in mapped.buffer_ptrs]


class PeerMemory:
    """The staging of some ranks, and the order in which exchanges use it.

    The constructor is collective.

    Args:
        group: a process group. All its ranks call the constructor, and later `reserve`.
        extension: the loaded module of ops/csrc/nvlink.
        first_epoch: number of the first exchange. Tests start just below 2^32.
        provider: allocates the staging, as `Symmetric` does.
        ranks: 2 to 8 global ranks of the group, on one host: those that exchange with this one, and this one. Default:
            all ranks of the group.
        node_of: the node of each global rank of the group, for errors. None: they do not name nodes.

    Attributes:
        half_bytes: size of a half of the staging.
        generation: how often the staging was allocated.
        state: the kernels' State (kernels.h), on the device.
        reports: what the kernels tell the host.
        epoch: number of the next exchange.
        open: an exchange that was sent and is not received yet: its owner, and its name. None: there is none.
    """

    def __init__(self, group: ProcessGroup, extension: ModuleType, first_epoch: int = 1, provider: Any = Symmetric,
                 ranks: list | None = None, node_of: dict | None = None):
        self._group, self.extension, self._provider = ref(group), extension, provider
        self.ranks, self.node_of = ranks_of(group) if ranks is None else ranks, node_of
        self.rank, self.world_size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.device = torch.device(get_accelerator().current_device_name())
        self.multiprocessors = multiprocessors(self.device) if self.device.type == "cuda" else 8
        self.epoch, self.generation, self.open = first_epoch, 0, None
        self.state: torch.Tensor | None = None
        self.reports: KernelReports | None = None
        self._last: tuple = (None, None)  # the stream of the last launch: its raw handle, and torch's object
        self._allocate(FIRST_BYTES, "the first exchange")

    @property
    def group(self) -> Any:
        """The process group. This object does not keep it alive."""
        return self._group()

    @staticmethod
    def of(group: ProcessGroup, extension: ModuleType, ranks: list | None = None, node_of: dict | None = None,
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
        """`KernelReports.wait_and_check`, for exchanges on any stream."""
        if self.reports.checks_wait:
            self.stream()
        self.reports.wait_and_check()

    def _set_up(self) -> None:
        """Makes what does not change when the staging grows."""
        self.reports = KernelReports(self.group, self.extension, self.ranks, self.node_of, self.device)
        self.extension.load()
        self.state = torch.zeros(self.extension.STATE_WORDS, dtype=torch.int32, device=self.device)
        self.state[0] = _signed(self.epoch)

    def _allocate(self, half_bytes: int, where: str) -> None:
        """Allocates new staging. Collective. It waits for all exchanges, and raises on every rank or on none."""
        get_accelerator().synchronize()
        if self.state is not None:
            self.reports.check()
            # The kernels count the exchanges that were launched. The host may have counted one that was not.
            self.epoch = int(self.state[0]) & 0xFFFFFFFF
        self._closed(where)
        half_bytes = -(-half_bytes // (1 << 20)) * (1 << 20)
        needs = dict(zip(ranks_of(self.group),
                         answers_of_all(self.group, (half_bytes, where, f"ds_mxfp8_moe/{secrets.token_hex(8)}"),
                                        f"growth of the staging for {where}"), strict=True))
        if len({(size, what) for size, what, _ in needs.values()}) > 1:
            each = ", ".join(f"rank {rank} {size} bytes for {what}" for rank, (size, what, _) in needs.items())
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
            if failed := failure_of_any(self.group, failure, f"growth of the staging for {where}"):
                raise NoStaging(f"{where}: the staging of {header + 2 * half_bytes} bytes could not be allocated on "
                                f"{failed}")
            return result

        def share() -> list[int]:
            peers = self._provider.addresses(staging, self.group, self.ranks, needs[self.ranks[0]][2])
            # Every flag says that its rank has finished the exchange before this one.
            staging[:header].view(torch.int32).fill_(_signed(self.epoch - 1))
            get_accelerator().synchronize()
            return peers

        if self.state is None:
            on_every_rank(self._set_up)
        # NVSHMEM's allocation waits for all ranks, without a deadline: what may fail on one rank comes before it.
        staging = on_every_rank(lambda: self._provider.empty(header + 2 * half_bytes, self.device))
        peers = on_every_rank(share)
        self._staging, self.half_bytes = staging, half_bytes
        timeout_ns = int(min(self.reports.kernel_seconds * 1e9, 2**63))  # kernels count in 64 bits
        self._template = self.extension.Group(
            peer=peers + [0] * (self.extension.MAX_RANKS - len(peers)), state=self.state.data_ptr(),
            failure=self.reports.failure_address, rank=self.rank, world=self.world_size, half_bytes=half_bytes,
            timeout_ns=timeout_ns)
        self.generation += 1

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph captures what is launched."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def reserve(self, needed: int, where: str) -> None:
        """Makes room for `needed` bytes in a half. All ranks pass the same number, since this may be collective."""
        if self.capturing:
            self.reports.captured = True
        if needed <= self.half_bytes:
            return
        if self.reports.captured:
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
        if raw != last_raw and not self.capturing:
            current = torch.cuda.current_stream(self.device)
            if last is not None:
                current.wait_stream(last)
            self._last = raw, current
        return raw

    def group_for(self, signature: int):
        """The kernels' Group for exchanges of one signature. Valid until `generation` changes."""
        return self.extension.Group(self._template, signature=signature)

    def _closed(self, where: str) -> None:
        if self.open is not None:
            raise ValueError(f"{where}: the rows that {self.open[1]} sent are not received yet. Receive them first, "
                             "since a group has one exchange at a time")

    def advance(self, where: str) -> None:
        """Counts the next exchange. It is launched on the current stream, or on one that waits for that."""
        self._closed(where)
        self.stream()
        self.reports.name(self.epoch, where)
        self.epoch = self.epoch + 1 & 0xFFFFFFFF

    def begin(self, signature: int, where: str):
        """Counts the next exchange. Returns the kernels' Group for it."""
        self.advance(where)
        return self.group_for(signature)


def dense(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if it is not contiguous or does not begin at a multiple of 16 bytes, as kernels need it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _signed(epoch: int) -> int:
    """A u32 as torch's int32 holds it."""
    epoch &= 0xFFFFFFFF
    return epoch - (1 << 32) if epoch >> 31 else epoch
