# SPDX-License-Identifier: Apache-2.0
"""Peer memory that refuses its staging."""

import deepspeed.comm as dist

from tests.support import emulator


class Refusing(emulator.Shared):
    """Rank 1 has no memory left."""

    @staticmethod
    def empty(size, device):
        if dist.get_rank() == 1:
            raise MemoryError("none is left")
        return emulator.Shared.empty(size, device)
