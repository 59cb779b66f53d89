# SPDX-License-Identifier: Apache-2.0
"""Waits for rank 0 while it writes files, for as long as they grow.

The wait goes through the store of the default process group. A collective would be ended by NCCL's watchdog
if it waited for as long.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import deepspeed.comm as dist
import torch

from .deadline import DEADLINE, GRACE_SECONDS, LOOK_SECONDS, PeerError, _ask, absence, lost_store, set_deadline

# Deadlines without a new byte after which rank 0 counts as hung: some file systems show bytes when a file is closed.
STALLED_DEADLINES = 2
POLL_SECONDS = 0.1  # between two looks at the store


class RankZeroWrites:
    """A context that every rank enters, in which rank 0 writes files. All ranks leave it when rank 0 does.

    If rank 0 raises an error inside, every rank raises one that quotes it. A process that is alone uses no store.

    Raises:
        RuntimeError: rank 0 raised an error.
        PeerError: rank 0 has died, or its files have not grown for two deadlines.
    """

    def __init__(self, where: str, failed: str, folder: Path, device: torch.device):
        """
        Args:
            where: the call, for errors.
            failed: begins the error of a rank, if rank 0 could not write.
            folder: where rank 0 writes, with all that is below.
            device: of the default process group, whose timeout is the deadline.
        """
        self.where, self.failed, self.folder = where, failed, folder
        self.rank, self.alone = dist.get_rank(), dist.get_world_size() == 1
        self._steps = self._syncs = 0
        self._ended = Event()
        if not self.alone:
            self._seconds = set_deadline(dist.get_world_group(), device)
            number = self._store(lambda store: store.add(f"ds_mxfp8_moe/writes/{self.rank}", 1))  # alike on all ranks
            self._key = f"ds_mxfp8_moe/writes/{number}".__add__

    def __enter__(self) -> "RankZeroWrites":
        if not self.alone and self.rank == 0:
            Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self.rank > 0:
            if error is None and (text := self._wait_for(None)):
                raise RuntimeError(f"{self.failed}: {text}")
            return
        text = ""
        if error is not None:
            text = "\n".join([f"rank 0 raised {type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        if not self.alone:
            self._ended.set()
            self._store(lambda store: store.set(self._key("/end"), text))
            self._wait_for_readers()
        if isinstance(error, Exception) and not isinstance(error, PeerError):
            raise RuntimeError(f"{self.failed}: {text}") from error

    def step(self) -> None:
        """The other ranks wait here until rank 0 has called this as often as they."""
        if self.alone:
            return
        self._steps += 1
        if self.rank == 0:
            self._store(lambda store: store.set(self._key("/steps"), str(self._steps)))
        else:
            self._wait_for(self._steps)

    def synced(self) -> None:
        """Rank 0 has brought a file to the disk, which counts as progress."""
        self._syncs += 1

    def _watch(self) -> None:
        stored = ""
        while not self._ended.wait(LOOK_SECONDS):
            with suppress(OSError, PeerError):  # a file was moved meanwhile, or the store has gone
                written = sum(path.stat().st_size for path in self.folder.rglob("*"))
                progress = f"{written} bytes, {self._syncs} files synced"
                if progress != stored:
                    self._store(lambda store, progress=progress: store.set(self._key("/progress"), progress))
                    stored = progress

    def _wait_for_readers(self) -> None:
        """Rank 0 may keep the store, and end its process after this."""
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end and self._store(
                lambda store: store.add(self._key("/read"), 0)) < dist.get_world_size() - 1:
            time.sleep(1e-3)

    def _wait_for(self, step: int | None) -> str:
        """Waits until rank 0 has called `step` this often, or if None until it has ended. Returns its error."""
        seen, since, pause = None, time.monotonic(), 1e-3
        while True:
            end, steps, progress = self._store(lambda store: [
                store.get(self._key(name)).decode() if store.check([self._key(name)]) else None
                for name in ("/end", "/steps", "/progress")])
            if step is not None and int(steps or 0) >= step:
                return ""
            if end is not None:
                self._store(lambda store: store.add(self._key("/read"), 1))
                return end
            if (steps, progress) != seen:
                seen, since = (steps, progress), time.monotonic()
            waited = time.monotonic() - since
            if waited > STALLED_DEADLINES * self._seconds:
                raise PeerError(
                    f"rank {self.rank} waited for rank 0 in {self.where}: for {waited:.0f} s, {STALLED_DEADLINES} "
                    f"deadlines, its files in {os.fspath(self.folder)} have not grown (so far: {progress or 'none'}). "
                    f"Rank 0 {absence(0)}\n{DEADLINE}", (0, ), at_deadline=True)
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)

    def _store(self, question: Callable) -> Any:
        answer = _ask(lambda store: (question(store), ))
        if answer is None:
            raise PeerError(lost_store(self.where), (0, ))
        return answer[0]
