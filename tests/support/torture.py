# SPDX-License-Identifier: Apache-2.0
"""Disturbs ranks while they write files: kills, full disks and Ctrl-C at a chosen file operation.

    def body(directory, fault):            # runs on every rank, in a new process; torch.distributed is initialized
        engine = ...
        with disturbed(directory, fault) as count:
            engine.save_checkpoint(directory)
        return count.operations            # of this rank, from which a later fault can choose

    def test_body(tmp_path):
        first, second = run_ranks(body, str(tmp_path), None)
        for fault in random_faults(5, [first.value, second.value], seed=0):
            print(fault, run_ranks(body, str(tmp_path), fault))

An operation is whatever changes the directory: a file that is opened for writing, renamed, removed or synced, a folder
that is made or removed, the begin and the end of a file of torch or safetensors.
"""

import multiprocessing as mp
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.support.rank_pool import PRELOADED, free_port

KINDS = ("kill", "kill all", "cut", "disk full", "ctrl-c", "ctrl-c all")
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree"}
DEATH_SECONDS = 20.0  # for the ranks that are left


@dataclass(frozen=True)
class Fault:
    """What happens to a rank before its n-th operation.

    Attributes:
        kind: "kill" and "kill all" (ranks): SIGKILL. "cut": the same, with the next file of torch or safetensors cut
            to half its size. "disk full": no file can grow beyond `most_bytes`. "ctrl-c" and "ctrl-c all": SIGINT.
        operation: counted from 1.
    """

    kind: str
    rank: int
    operation: int
    most_bytes: int = 0


@dataclass
class Outcome:
    """How a rank ended: `value` that its body returned, or `error`. A killed rank has an exit code below 0."""

    exitcode: int
    value: Any = None
    error: str = ""


def random_faults(number: int, operations: list[int], seed: int) -> list[Fault]:
    """Faults of all kinds in turn. `operations`: how many each rank makes when nothing happens."""
    draw = random.Random(seed)
    faults = []
    for i in range(number):
        rank = draw.randrange(len(operations))
        faults.append(Fault(KINDS[i % len(KINDS)], rank, draw.randint(1, operations[rank]), draw.randint(0, 20_000)))
    return faults


class Count:
    """Counts the operations of this rank below a directory, and lets the fault happen."""

    def __init__(self, directory: str, fault: Fault | None, pids: list[int]):
        self.directory, self.fault, self.pids = os.path.realpath(directory), fault, pids
        self.operations, self.cuts = 0, False

    def audit(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, mode, flags = arguments
            changes = any(letter in (mode or "") for letter in "wax+") or (mode is None and flags & os.O_ACCMODE)
        else:
            changes, path = event in CHANGES, arguments and arguments[0]
        if changes and isinstance(path, (str, os.PathLike)) and self.has(path):
            self.one()

    def has(self, path: str | os.PathLike) -> bool:
        return os.path.realpath(path).startswith(self.directory)

    def one(self) -> None:
        self.operations += 1
        if self.fault is None or self.operations != self.fault.operation:
            return
        kind = self.fault.kind
        if kind == "cut":
            self.cuts = True
        elif kind == "disk full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.fault.most_bytes, resource.RLIM_INFINITY))
        else:
            number = signal.SIGKILL if kind.startswith("kill") else signal.SIGINT
            mine = os.getpid()
            for pid in sorted(self.pids, key=mine.__eq__):  # this rank at last
                if kind.endswith("all") or pid == mine:
                    os.kill(pid, number)

    def around_file(self, plain: Callable, what: Any, path: Any, *args, **kwargs) -> Any:
        if not isinstance(path, (str, os.PathLike)) or not self.has(path):
            return plain(what, path, *args, **kwargs)
        self.one()
        result = plain(what, path, *args, **kwargs)
        if self.cuts:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self.one()
        return result

    def around_sync(self, plain: Callable, file: Any) -> None:
        self.one()
        plain(file)


_armed: list[Count] = []  # of this process, whose audit hook cannot be taken back


def _audit(event: str, arguments: tuple) -> None:
    if _armed:
        _armed[-1].audit(event, arguments)


@contextmanager
def disturbed(directory: str | os.PathLike, fault: Fault | None) -> Iterator[Count]:
    """Inside the context, operations below `directory` are counted, and the fault happens on its rank. Collective."""
    import safetensors.torch
    pids: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(pids, os.getpid())
    mine = fault if fault is not None and fault.rank == torch.distributed.get_rank() else None
    count = Count(os.fspath(directory), mine, pids)

    def calling(ours: Callable, plain: Callable) -> Callable:
        return lambda *args, **kwargs: ours(plain, *args, **kwargs)

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (patch.object(torch, "save", calling(count.around_file, torch.save)),
          patch.object(safetensors.torch, "save_file", calling(count.around_file, safetensors.torch.save_file)),
          patch.object(os, "fsync", calling(count.around_sync, os.fsync))):
        _armed.append(count)
        try:
            yield count
        finally:
            _armed.clear()
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def _rank(rank: int, world_size: int, port: int, path: list, conn: Any, body: Callable, args: tuple) -> None:
    """The process of one rank. It ends with its body, so that its peers notice."""
    sys.path[:] = path
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world_size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # a regular file, as pytest has it, would be full too
    os.dup2(nothing, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start jobs in the background without it
    torch.set_num_threads(1)
    import deepspeed

    from ds_mxfp8_moe.transport import deadline
    deadline.GRACE_SECONDS = 0.3
    sys.addaudithook(_audit)
    try:
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        torch.manual_seed(1234)
        conn.send((body(*args), ""))
    except BaseException:  # KeyboardInterrupt is what some faults are for
        conn.send((None, traceback.format_exc()))
    finally:
        conn.close()
        os._exit(0)


def run_ranks(body: Callable, *args, world_size: int = 2, seconds: float = 90.0) -> list[Outcome]:
    """Runs `body(*args)` on new ranks over gloo until all of them have ended. They are forked after all imports."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port, started = free_port(), []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world_size, port, list(sys.path), theirs, body, args))
        process.start()
        theirs.close()
        started.append((process, ours))
    late = None, f"no answer within {seconds} s, or {DEATH_SECONDS} s after another rank's end"
    answers: list = [late] * world_size
    waiting, end = set(range(world_size)), time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        for rank in sorted(waiting):
            if started[rank][1].poll(0.01):
                try:
                    answers[rank] = started[rank][1].recv()
                except EOFError:
                    answers[rank] = None, "the process ended"
                waiting.discard(rank)
                end = min(end, time.monotonic() + DEATH_SECONDS)
    for rank, (process, _) in enumerate(started):
        process.join(0 if rank in waiting else 5)
        process.kill()
        process.join()
    for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        leftover.unlink()
    return [Outcome(process.exitcode, *answer) for (process, _), answer in zip(started, answers, strict=True)]
