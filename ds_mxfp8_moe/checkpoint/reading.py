# SPDX-License-Identifier: Apache-2.0
"""Reads parts of files into a device's memory, as fast as the files can be read.

A GPU copies without waiting out of pinned memory alone. So threads read into pinned buffers, of which each is filled
again once the GPU has copied it. They read ahead of the caller, who computes meanwhile.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from queue import SimpleQueue
from typing import Any

import torch

THREADS = 4
BUFFERS, BUFFER_BYTES = 2 * THREADS, 8 * 2**20  # while a buffer is copied, its thread fills another
AHEAD = THREADS


class FileReads:
    """Files that stay open, and the buffers. Use it in a `with` statement. Any thread may read."""

    def __init__(self, device: torch.device):
        self._device, self._stack = device, ExitStack()
        self._files: dict[str, Any] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._free: SimpleQueue = SimpleQueue()  # buffers, each with the event that ends its last copy
        if device.type == "cuda":
            self._threads = self._stack.enter_context(ThreadPoolExecutor(THREADS))
            for _ in range(BUFFERS):
                self._free.put((torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))

    def __enter__(self) -> "FileReads":
        return self

    def __exit__(self, *error) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._stack.close()

    def open(self, file: str) -> Any:
        """The file, unbuffered. Raises OSError."""
        if file not in self._files:
            self._files[file] = self._stack.enter_context(open(file, "rb", buffering=0))
        return self._files[file]

    def read(self, file: str, start: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the device: a file's bytes from `start` on. Raises OSError. `open` was called before."""
        out = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if self._threads is None:
            _fill(out, self._files[file], start)
            return out
        with torch.cuda.device(self._device):
            for part in out.split(BUFFER_BYTES):
                buffer, copied = self._free.get()
                try:
                    copied.synchronize()
                    _fill(buffer[:len(part)], self._files[file], start)
                    part.copy_(buffer[:len(part)], non_blocking=True)
                    copied.record()
                finally:
                    self._free.put((buffer, copied))
                start += len(part)
        return out

    def ahead(self, read: Callable, jobs: Iterable) -> Iterator:
        """What `read` returns for each job, in order. On a GPU, threads call it up to AHEAD jobs early."""
        if self._threads is None:  # a CPU computes as it reads, and holds one job at a time
            yield from map(read, jobs)
            return
        jobs = iter(jobs)
        early = deque(self._threads.submit(read, job) for job in islice(jobs, AHEAD))
        while early:
            result = early.popleft().result()
            early.extend(self._threads.submit(read, job) for job in islice(jobs, 1))
            yield result


def _fill(buffer: torch.Tensor, file: Any, start: int) -> None:
    view = memoryview(buffer.numpy())
    while len(view):
        count = os.preadv(file.fileno(), [view], start)
        if count == 0:
            raise OSError("it was cut short after it was opened")
        view, start = view[count:], start + count
