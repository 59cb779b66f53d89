# SPDX-License-Identifier: Apache-2.0
"""What the kernels of exchanges tell the host: errors, counts of rows, and how many choices were dropped.

Kernels write it into host memory. The host looks there at each call, and before the optimizer's step.
"""

import time
from types import ModuleType
from weakref import ref

import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup

from ..ops.log import log
from .deadline import (
    DEADLINE,
    SAME_CALLS,
    PeerError,
    absence,
    before_watchdog,
    peer_failure,
    set_deadline,
    wait_for_device,
)

CODES = ("", "timeout", "mismatch", "overflow")  # kernels.h, Code
# kernels.h, Kind
KINDS = ("", "counts", "places", "dispatch", "combine", "low_latency_dispatch", "low_latency_combine", "rows")
HISTORY = 64  # how many exchanges are remembered by name
MOST_DROPPING = 4096  # layers of a group with a capacity
STEPS_BETWEEN_WARNINGS = 100  # about the choices that a layer dropped
SPIN_SECONDS = 0.1  # how long the host waits for counts before Python handles Ctrl-C and looks for errors


class Dropped:
    """How many choices each layer of a group has dropped, for the experts of this rank.

    Args:
        words: int64 [MOST_DROPPING] in host memory, zeros. The device writes them. CUDA graphs hold their addresses.
    """

    def __init__(self, words: torch.Tensor):
        self._words = words
        self._index: dict = {}
        self._warned: dict = {}  # of each layer: the step of its last warning, and the choices dropped until then
        self._steps = 0

    def address(self, name: str) -> int:
        """The address of the layer's int64."""
        if name not in self._index:
            if len(self._index) == MOST_DROPPING:
                raise ValueError(f"{name}: a group counts the dropped choices of {MOST_DROPPING} layers at most: "
                                 'leave "capacity_factor" out')
            self._index[name] = len(self._index)
        return self._words[self._index[name]].data_ptr()

    def total(self, name: str) -> int:
        """What this layer has dropped by now. The host does not wait."""
        return int(self._words[self._index[name]]) if name in self._index else 0

    def warn(self) -> None:
        """Called once a step. Logs a line for each layer that dropped choices, at most once in
        STEPS_BETWEEN_WARNINGS steps."""
        for name in self._index:
            step, before = self._warned.get(name, (self._steps - STEPS_BETWEEN_WARNINGS, 0))
            total = self.total(name)
            if total > before and self._steps - step >= STEPS_BETWEEN_WARNINGS:
                self._warned[name] = self._steps, total
                log(f"mxfp8_moe: WARNING: {name}: {total - before} choices for the experts of rank "
                    f"{torch.distributed.get_rank()} were dropped since the last such line: more rows came than "
                    'fit. To drop fewer, raise "capacity_factor"')
        self._steps += 1


class KernelReports:
    """What the kernels of exchanges between some ranks tell the host of this rank.

    Args:
        group: the process group.
        extension: the kernels' module.
        ranks: global ranks of the group that exchange with each other.
        node_of: the node of each global rank of the group, for errors. None: they do not name nodes.
        device: of the kernels.

    Attributes:
        counts: int32 in host memory. The kernel `totals` writes the counts of rows there.
        dropped: the choices that layers have dropped.
        seconds: the deadline of waits.
        captured: CUDA graphs hold exchanges. Replays of them pass no host.
        unchecked: an exchange with a capacity was launched, and the host has not waited for it.
        host_waits: how often the host has waited for the device.
    """

    def __init__(self, group: ProcessGroup, extension: ModuleType, ranks: list, node_of: dict | None,
                 device: torch.device):
        self._group, self._extension, self._ranks, self._node_of = ref(group), extension, ranks, node_of
        self._on_gpu = device.type == "cuda"
        self._failure = self._host_memory(8, torch.int32)
        self._failed = self._failure.numpy()
        self.counts = self._host_memory(1 << 16, torch.int32)
        self.dropped = Dropped(self._host_memory(MOST_DROPPING, torch.int64))
        self.seconds = set_deadline(group, device)
        self.captured, self.unchecked, self.host_waits = False, False, 0
        self._name_of_epoch: dict = {}
        self._serial = 0

    def _host_memory(self, words: int, dtype: torch.dtype) -> torch.Tensor:
        # device="cpu", since torch.set_default_device may name another.
        return torch.zeros(words, dtype=dtype, device="cpu", pin_memory=self._on_gpu)

    @property
    def failure_address(self) -> int:
        """Where kernels write an error (kernels.h, Group::failure)."""
        return self._failure.data_ptr()

    @property
    def kernel_seconds(self) -> float:
        """The deadline of waits in kernels. It comes before the host's, since kernels know whom they wait for."""
        return max(before_watchdog(before_watchdog(self.seconds)), 0.1)

    @property
    def has_failed(self) -> bool:
        """Whether a kernel has recorded an error by now."""
        return bool(self._failed[0])

    @property
    def checks_wait(self) -> bool:
        """Whether `wait_and_check` waits for the device."""
        return self._on_gpu and (self.unchecked or self.captured)

    def name(self, epoch: int, where: str) -> None:
        """Gives an exchange its name in errors. HISTORY names are kept."""
        self._name_of_epoch[epoch] = where
        self._name_of_epoch.pop(epoch - HISTORY, None)

    def next_serial(self) -> int:
        """A number that the kernel `totals` writes to the first word of `counts`, behind all others."""
        self._serial = self._serial % 0x7FFFFFFF + 1
        return self._serial

    def wait_for_counts(self, where: str) -> None:
        """Waits on the host until the kernel has written the last `next_serial`."""
        self.host_waits += 1
        wait_for_device(self._counted, self._group(), f"'counts' of {where}", self.seconds)
        self.check()

    def _counted(self) -> bool:
        """Whether the counts have come, or an exchange has failed. Waits for SPIN_SECONDS at most."""
        if self._extension.wait_for_totals(self.counts.data_ptr(), self._serial, self.failure_address, SPIN_SECONDS):
            return True
        if self._on_gpu:
            get_accelerator().current_stream().query()  # raises the error of a kernel after which no counts come
        return self.has_failed

    def wait_and_check(self) -> None:
        """Called once in each step of the optimizer. Raises the errors of exchanges so far, and warns about dropped
        choices.

        It waits for exchanges with a capacity and for replays of CUDA graphs. In all other layers the host has waited
        for the counts. Errors of what came after them show at the next call.
        """
        if self.checks_wait:
            self.unchecked = False
            self.host_waits += 1
            done = get_accelerator().Event()
            done.record()
            wait_for_device(done.query, self._group(), "the exchanges before an optimizer's step", self.seconds)
        self.check()
        self.dropped.warn()

    def check(self) -> None:
        """Raises the error that a kernel has recorded by now. The host does not wait for the device."""
        if not self.has_failed:
            return
        code, rank, peer, phase, epoch, detail = (int(word) & 0xFFFFFFFF for word in self._failed[:6])
        ranks = self._ranks
        kind = KINDS[phase]
        where = kind if self.captured else self._name_of_epoch.get(epoch, kind)  # replays count on the device alone
        me, other = f"rank {ranks[rank]}", f"rank {ranks[peer]}"
        if CODES[code] == "timeout" and self._node_of is not None:  # of one hop, in which not all ranks take part
            raise peer_failure(self._group(), where, time.monotonic() - self.kernel_seconds, self.kernel_seconds,
                               self._node_of)
        place = f"exchange {epoch}, {where}" if self._node_of is None else where
        if CODES[code] == "overflow":
            raise PeerError(f"{me}: {place}: {other} would get {detail} rows, more than its capacity. The "
                              'outputs of this layer and of later ones are not valid. Raise "capacity_factor", or '
                              'leave it out, or write "on_overflow": "drop"')
        if CODES[code] == "mismatch":
            theirs = KINDS[detail & 255]
            why = "of another layer, or of other shapes or dtypes" if theirs == kind else f"'{theirs}'"
            raise PeerError(f"{me}: {place}: {other} is in another call, {why}. {SAME_CALLS}", (ranks[peer], ))
        raise PeerError(f"{me} waited in {place} until the deadline, for {other}: "
                          f"{absence(ranks[peer])}. {DEADLINE}", (ranks[peer], ), at_deadline=True)
