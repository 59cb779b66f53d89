# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM's library over the emulator of CUDA, and a machine that has it."""

from contextlib import contextmanager
from unittest import mock

import deepspeed.comm as dist

from ds_mxfp8_moe.transport import nvshmem as wire


class Library:
    """The extension's module, as far as `start` uses it. `broken`: the step that raises on rank 1."""

    def __init__(self, broken: str = "", others: bool = False):
        self.broken, self.others, self.starts = broken, others, []

    def _do(self, step: str) -> None:
        if self.broken == step and (step == "unique_id" or dist.get_rank() == 1):
            raise RuntimeError(f"{step} returned 7")

    def unique_id(self) -> bytes:
        self._do("unique_id")
        return b"id"

    def started(self) -> bool:
        return self.others and dist.get_rank() == 1

    def start(self, *args) -> None:
        self._do("start")
        self.starts.append(args)


@contextmanager
def machine(library: Library | None, failure: str = ""):
    """This rank as one with that library. `failure`: to build the extension, on rank 1."""
    mine = failure if dist.get_rank() == 1 else ""
    with mock.patch.object(wire.extension, "try_load", lambda: (library, mine)), \
         mock.patch.object(wire, "_STARTED", []) as started:
        yield started


def started(failure: str = "", before: list | None = None, **keys) -> tuple:
    library = Library(**keys)
    with machine(library, failure) as ranks:
        ranks.extend(before or [])
        reasons = [wire.start(dist.get_world_group(), "the test") for _ in range(2)]
        return reasons, library.starts, ranks


ONCE = "this process has started NVSHMEM between ranks [0, 1, 2], and can start it once"
FAILURES = [
    ({"failure": "the extension cannot be built: NVSHMEM was not found"},
     "rank 1: the extension cannot be built: NVSHMEM was not found"),
    ({"others": True}, "rank 1: someone else in this process has started NVSHMEM already, such as torch or DeepEP"),
    ({"before": [0, 1, 2]}, f"rank 0: {ONCE}"),
    ({"broken": "unique_id"}, "rank 0: NVSHMEM cannot be started: RuntimeError: unique_id returned 7"),
    ({"broken": "start"}, "rank 1: NVSHMEM cannot be started: RuntimeError: start returned 7"),
]
