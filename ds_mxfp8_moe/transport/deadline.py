# SPDX-License-Identifier: Apache-2.0
"""Deadlines: what a rank says when its peers do not come.

A wait ends when the timeout of its process group passes: DeepSpeed's `DEEPSPEED_TIMEOUT` (minutes), or `timeout=` of
`deepspeed.init_distributed`. The rank that gives up says so in the store of the default process group, looks a moment
later who else does, and raises a PeerFailure that names those who do not, with the error that a peer published before
it raised. The store is never touched while all goes well.

On gloo every wait is on the host and ends here. On NCCL the host waits in one place, for the counts of a plan, and
that wait ends here, shortly before NCCL's own watchdog would abort the process; the waits of the exchanges themselves
are on the device and end by that watchdog, which knows neither phase nor peer. So do waits outside this package.
"""

import functools
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d as c10d

GRACE_SECONDS = 2.0  # for peers to notice and say so as well
STORE_SECONDS = 5.0  # for the store to answer at all
LOOK_SECONDS = 1.0  # between two looks, in a long wait for the device, whether a peer gave up
PREFIX = "ds_mxfp8_moe"


class PeerFailure(RuntimeError):
    """An exchange that did not happen. Its process group cannot be used again.

    Attributes:
        missing: global ranks of the group that did not come to the exchange, as far as this rank could learn.
    """

    def __init__(self, message: str, missing: tuple = ()):
        super().__init__(message)
        self.missing = missing


def ranks_of(group: Any) -> list:
    """Global ranks of a group. deepspeed.comm's function for it never returns for the group of all ranks."""
    return torch.distributed.get_process_group_ranks(group)


def set_deadline(group: Any, device: torch.device) -> float:
    """Gives `group` the timeout of the default group, where that is shorter; returns it in seconds.

    torch gives new groups its own default, not what deepspeed.init_distributed was told.
    """
    own, default = (g._get_backend(device) for g in (group, c10d._get_default_group()))
    if not {own.name(), default.name()} <= {"gloo", "nccl"}:
        return float("inf")  # other backends keep their own rules
    timeout = min(own.options._timeout, default.options._timeout)
    if timeout < own.options._timeout:
        getattr(own, "wrapped_pg", own)._set_default_timeout(timeout)  # wrapped where TORCH_DISTRIBUTED_DEBUG=DETAIL
    return timeout / timedelta(seconds=1)


def all_to_all(out: torch.Tensor, x: torch.Tensor, recv_splits: tuple, send_splits: tuple, group: Any,
               where: str) -> None:
    """all_to_all_single of rows that ends in time; `where`, the phase and the layer, says what it was for.

    Raises:
        PeerFailure: on gloo, after the deadline or when a peer's connection is lost; on NCCL, while it connects.
    """
    set_deadline(group, x.device)
    try:
        dist.all_to_all_single(out, x, list(recv_splits), list(send_splits), group=group)
    except RuntimeError as error:
        raise peer_failure(group, where) from error


def answers_of_all(group: Any, answer: Any, where: str) -> list:
    """Every rank's answer, in rank order. Raises PeerFailure where one does not come."""
    set_deadline(group, torch.device(get_accelerator().current_device_name()))
    answers = [None] * dist.get_world_size(group=group)
    try:
        # torch's own: DeepSpeed's comms_logger ends the process at an operation that it does not know.
        torch.distributed.all_gather_object(answers, answer, group=group)
    except RuntimeError as error:
        raise peer_failure(group, where) from error
    return answers


def published(check: Callable) -> Callable:
    """Decorates a check at a front door: what it raises is told to the peers, who will wait for this rank in vain."""

    @functools.wraps(check)
    def publishing(*args, **kwargs):
        try:
            return check(*args, **kwargs)
        except Exception as error:
            if dist.is_initialized() and dist.get_world_size() > 1:
                note = f"{time.time()} {type(error).__name__}: {error}"
                _ask(lambda store: store.set(_raised_key(dist.get_rank()), note))
            raise

    return publishing


def wait_for_device(event: Any, group: Any, where: str, seconds: float) -> None:
    """Waits on the host until `event` has passed, as a stream's synchronize would.

    Raises:
        PeerFailure: after `seconds`, or soon after a peer gave up waiting in this group.
    """
    # NCCL's watchdog aborts the process at the same timeout: be done before it.
    seconds -= min(10.0, seconds / 4)
    start = time.monotonic()
    look = start + LOOK_SECONDS
    while not event.query():
        now = time.monotonic()
        time.sleep(0 if now < start + LOOK_SECONDS else 1e-3)
        if now > look:
            if now > start + seconds or _ask(lambda store: _a_peer_gave_up(store, group)):
                raise peer_failure(group, where)
            look = min(now + LOOK_SECONDS, start + seconds)


def peer_failure(group: Any, where: str) -> PeerFailure:
    """The error of this rank, which waited in vain in `where` for the peers of `group`. Takes up to GRACE_SECONDS."""
    me, ranks = dist.get_rank(), ranks_of(group)
    notes = _ask(lambda store: _notes(store, group, me, ranks, where))
    first = f"rank {me} waited in vain for its peers in {where}; the group's ranks are {ranks}."
    last = "The deadline is DEEPSPEED_TIMEOUT (minutes), or timeout= of deepspeed.init_distributed."
    if notes is None:
        return PeerFailure(f"{first}\n  The store, which rank 0 or its launcher keeps, does not answer: rank 0 has "
                           f"probably died, and what the others do cannot be known.\n{last}")
    waits, raised = notes
    lines, missing = [], []
    for rank in ranks:
        if rank in waits and rank != me:
            lines.append(f"  rank {rank} waited as well, in {waits[rank]}")
        elif rank != me:
            missing.append(rank)
            lines.append(f"  rank {rank} did not come; {raised[rank]}" if rank in raised else
                         f"  rank {rank} did not come and left no word: it hangs elsewhere, is late, or has died")
    return PeerFailure("\n".join([first, *lines, last]), tuple(missing))


def _wait_key(group: Any, rank: int) -> str:
    return f"{PREFIX}/waited/{group.group_name}/{rank}"


def _raised_key(rank: int) -> str:
    return f"{PREFIX}/raised/{rank}"


def _a_peer_gave_up(store: Any, group: Any) -> bool:
    return any(store.check([_wait_key(group, rank)]) for rank in ranks_of(group))


def _notes(store: Any, group: Any, me: int, ranks: list, where: str) -> tuple:
    """Leaves this rank's note; returns what the others left within GRACE_SECONDS: rank -> text, waits and errors."""
    store.set(_wait_key(group, me), where)
    waits, raised = {me: where}, {}
    end = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < end and set(ranks) - set(waits) - set(raised):
        time.sleep(0.05)
        for rank in ranks:
            if rank not in waits and store.check([_wait_key(group, rank)]):
                waits[rank] = store.get(_wait_key(group, rank)).decode()
            elif rank not in raised and store.check([_raised_key(rank)]):
                when, text = store.get(_raised_key(rank)).decode().split(" ", 1)
                raised[rank] = f"{time.time() - float(when):.1f} s ago it raised {text}"
    return waits, raised


def _ask(question: Callable) -> Any:
    """What `question(store)` returns, or None: the store may be gone, or may never answer."""
    answers = []

    def ask():
        try:
            answers.append(question(c10d._get_default_store()))
        except RuntimeError:  # torch's DistStoreError and DistNetworkError
            pass

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    return answers[0] if answers else None
