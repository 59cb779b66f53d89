# SPDX-License-Identifier: Apache-2.0
"""The NVLink transport over the emulator of CUDA, watched."""

from datetime import timedelta
from unittest import mock

import deepspeed.comm as dist
import torch
import torch.distributed

from ds_mxfp8_moe.transport import peer_memory
from ds_mxfp8_moe.transport.nvlink import NVLink
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.support import emulator
from tests.support.nvlink_cases import NAME
from tests.support.rank_pool import set_timeout

DEADLINE = timedelta(seconds=4)  # kernels wait for nine sixteenths of it


class Watched(PeerMemory):
    """Staging that knows which bytes no exchange may write, to check them."""

    def __init__(self, group, first_epoch: int = 1):
        with mock.patch.object(peer_memory, "FIRST_BYTES", 1 << 20):  # so that it grows
            super().__init__(group, emulator.load(dist.get_rank()), first_epoch, emulator.Shared)

    def _allocate(self, half_bytes, where):
        self.used = 0
        super()._allocate(half_bytes, where)

    def reserve(self, needed, where):
        super().reserve(needed, where)
        self.used = max(self.used, needed)

    def begin_case(self) -> None:
        dist.barrier(group=self.group)
        self._staging[self.extension.HALVES_AT:].fill_(emulator.POISON)
        self.used = 0
        dist.barrier(group=self.group)

    def end_case(self) -> None:
        """No rank wrote behind what exchanges of this case reserved in a half."""
        dist.barrier(group=self.group)
        for half in self._staging[self.extension.HALVES_AT:].view(2, -1):
            assert (half[self.used:] == emulator.POISON).all()


def new_memory() -> Watched:
    """Staging of a new group with DEADLINE."""
    group = torch.distributed.new_group()
    set_timeout(DEADLINE, group)
    return Watched(group)


def nvlink(memory: PeerMemory, **keys) -> NVLink:
    """Exchanges on one or two multiprocessors, since the machine has few cores."""
    return NVLink(memory, NAME, **{"sms": 1 + memory.epoch // 4 % 2} | keys)
