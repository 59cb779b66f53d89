# SPDX-License-Identifier: Apache-2.0
"""What transports with a `capacity_factor` share: how many rows fit, which ones are cut, and what they tell the host.

The host does not wait for exchanges with a capacity. Kernels and copies write what it has to know into host memory. It
looks there at the next call, and before the optimizer's step.
"""

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed.accelerator import get_accelerator

from . import ROW_ALIGNMENT
from .deadline import SAME_CALLS, PeerFailure, ranks_of, set_deadline, wait_for_device

MOST_DROPPING = 4096  # layers of a group with a capacity
STEPS_BETWEEN_WARNINGS = 100  # about the choices that a layer dropped
RAISE = 'Raise "capacity_factor", or leave it out, or write "on_overflow": "drop"'


def padded(rows: int) -> int:
    return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


def room_of(capacity_factor: float, tokens: int, top_k: int, ranks: int, experts: int) -> int:
    """P: the rows that a rank has room for: `capacity_factor` times its even share, and the padding of its groups.

    Args:
        tokens, top_k: T and K of every rank.
        experts: E.
    """
    share = padded(math.ceil(capacity_factor * tokens * top_k))
    return padded(min(share, ranks * tokens * top_k) + experts * (ROW_ALIGNMENT - 1))


def with_room(where: str, room: int) -> str:
    """An exchange's name in the error that not all rows fit."""
    return f"{where}, with room for {room} rows"


def padded_sizes(sizes: torch.Tensor) -> torch.Tensor:
    return (sizes + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT


def cut(sizes_E: torch.Tensor, room: int) -> torch.Tensor:
    """int64 [E]: the sizes of groups that fit into `room` rows, as `cut` in ops/csrc/nvlink/route.cu cuts them.

    The largest groups are cut to the same size: the largest multiple of ROW_ALIGNMENT with which all groups fit. The
    first of them get what is left, ROW_ALIGNMENT rows each. The device computes it, and the host reads nothing.
    """
    E, padded_E = sizes_E.shape[0], padded_sizes(sizes_E)
    ascending_E = padded_E.sort().values
    # With a limit, groups take as many rows as the smallest of these sums: the i smallest groups as they are, and the
    # limit for each of the others. So the limit is good if one of the sums fits.
    others_E = torch.arange(E, 0, -1, device=sizes_E.device)
    limit = ((room - (ascending_E.cumsum(0) - ascending_E)).div(others_E, rounding_mode="floor")).amax()
    limit = limit // ROW_ALIGNMENT * ROW_ALIGNMENT
    left = (room - torch.minimum(padded_E, limit).sum()) // ROW_ALIGNMENT
    larger_E = sizes_E > limit
    most_E = limit + ROW_ALIGNMENT * (larger_E.cumsum(0) <= left)
    return torch.where(larger_E, torch.minimum(sizes_E, most_E), sizes_E)


def shares(size_WX: torch.Tensor, fits_X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many rows of each rank fit into groups, and how many come before them. Each rank keeps the same share of its
    rows of a group, rounded to rows, as in ops/csrc/nvlink/route.cu.

    Args:
        size_WX: the rows of each rank in each group, in the order of ranks.
        fits_X: how many rows of each group fit.
    """
    upto_WX, all_X = size_WX.cumsum(0), size_WX.sum(0).clamp(min=1)
    before_WX = (upto_WX - size_WX) * fits_X // all_X
    return upto_WX * fits_X // all_X - before_WX, before_WX


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

    def index(self, name: str) -> int:
        """The layer's place in `words`."""
        if name not in self._index:
            if len(self._index) == MOST_DROPPING:
                raise ValueError(f"{name}: a group counts the dropped choices of {MOST_DROPPING} layers at most: "
                                 'leave "capacity_factor" out')
            self._index[name] = len(self._index)
        return self._index[name]

    def address(self, name: str) -> int:
        """The address of the layer's int64."""
        return self._words[self.index(name)].data_ptr()

    def total(self, name: str) -> int:
        """What this layer has dropped by now. The host does not wait."""
        return int(self._words[self._index[name]]) if name in self._index else 0

    def names(self) -> list:
        """The layers, by their place in `words`."""
        return list(self._index)

    def warn(self) -> None:
        """Called once a step. Prints a line for each layer that dropped choices, at most once in
        STEPS_BETWEEN_WARNINGS steps."""
        for name in self._index:
            step, before = self._warned.get(name, (self._steps - STEPS_BETWEEN_WARNINGS, 0))
            total = self.total(name)
            if total > before and self._steps - step >= STEPS_BETWEEN_WARNINGS:
                self._warned[name] = self._steps, total
                print(f"mxfp8_moe: WARNING: {name}: {total - before} choices for the experts of rank "
                      f"{torch.distributed.get_rank()} were dropped since the last such line: more rows came than "
                      'fit. To drop fewer, raise "capacity_factor"', flush=True)
        self._steps += 1


class Findings:
    """What the device finds out in plans whose counts the host does not read, for the layers of one group.

    The words of a layer: 1 + the rank that is in another call, or 0; 1 + the rank that gets more rows than fit, or 0;
    how many rows that are; for how many there is room; whether they are those through one rank of its node; the
    choices that were dropped for this rank's experts. The first failure stays.
    """

    DROPPED = 5  # the last word

    def __init__(self, group: Any):
        device = torch.device(get_accelerator().current_device_name())
        # device="cpu", since torch.set_default_device may name another.
        size = MOST_DROPPING, self.DROPPED + 1
        self._host = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._words = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._ranks, self._unchecked, self._captured = ranks_of(group), False, False
        self.dropped = Dropped(self._host[:, self.DROPPED])

    @staticmethod
    def of(group: Any) -> "Findings":
        """The group's own. The first call makes it."""
        if group not in _OF_GROUP:
            _OF_GROUP[group] = Findings(group)
        return _OF_GROUP[group]

    def fail(self, name: str, failure: torch.Tensor) -> None:
        """`failure`: int64 [5], the first words of a layer. The host learns it when the device has come so far."""
        words = self._device[self.dropped.index(name), :self.DROPPED]
        words.copy_(torch.where(words[:2].any(), words, failure))
        self._tell(name)

    def drop(self, name: str, choices: torch.Tensor) -> None:
        """`choices`: int64, how many more were dropped."""
        self._device[self.dropped.index(name), self.DROPPED].add_(choices)
        self._tell(name)

    def _tell(self, name: str) -> None:
        words = self._device[self.dropped.index(name)]
        self._host[self.dropped.index(name)].copy_(words, non_blocking=True)
        self._unchecked = True
        self._captured |= words.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def check(self) -> None:
        """Raises the error that the device has found by now. The host does not wait."""
        names = self.dropped.names()
        if not self._words[:len(names), :2].any():
            return
        me = torch.distributed.get_rank()
        for name, (other, full, rows, room, through_one, _) in zip(names, self._words.tolist(), strict=False):
            where = f"rank {me}: 'counts' of {name}"
            if other:
                rank = self._ranks[other - 1]
                raise PeerFailure(f"{where}: rank {rank} is in another call, or brings another number of tokens. "
                                  f"{SAME_CALLS}, and with a capacity equally many tokens", (rank, ))
            if full:
                through = "through one rank of its node, " if through_one else ""
                raise PeerFailure(f"{with_room(where, room)}: rank {self._ranks[full - 1]} would get {rows} rows, "
                                  f"{through}more than its capacity. {RAISE}")

    @staticmethod
    def wait_and_check_all() -> None:
        """Raises the errors of all groups' plans so far, and warns about dropped choices. Once in each step."""
        for group, findings in list(_OF_GROUP.items()):
            findings.wait_and_check(group)

    def wait_and_check(self, group: Any) -> None:
        """As PeerMemory.wait_and_check."""
        device = self._device.device
        try:
            if (self._unchecked or self._captured) and device.type == "cuda":  # replays pass no host
                self._unchecked = False
                done = get_accelerator().Event()
                done.record()
                wait_for_device(done, group, "the exchanges before an optimizer's step", set_deadline(group, device))
        finally:  # ranks in different calls may wait for each other until the deadline, and this says why
            self.check()
        self.dropped.warn()


# Keyed weakly, so that an entry goes with its process group.
_OF_GROUP: WeakKeyDictionary = WeakKeyDictionary()
