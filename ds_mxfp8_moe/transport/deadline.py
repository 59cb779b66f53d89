# SPDX-License-Identifier: Apache-2.0
"""Deadlines: what a rank says when its peers do not come.

A wait ends when the timeout of its process group passes: DeepSpeed's `DEEPSPEED_TIMEOUT` (minutes), or `timeout=` of
`deepspeed.init_distributed`. The rank that gives up says so in the store of the default process group, looks a moment
later who else does, and raises a PeerFailure that names those who do not, with the error that a peer published before
it raised. The store is never touched while all goes well.

gloo ends the process of a rank that is sent more than it expects, and takes less for all: before rows travel, its
ranks tell each other what they are about to do, and all of them raise where that differs.

On gloo every wait is on the host and ends here. On NCCL the host waits in one place, for the counts of a plan, and
that wait ends here, shortly before NCCL's own watchdog would abort the process; the waits of the exchanges themselves
are on the device and end by that watchdog, which knows neither phase nor peer. So do waits outside this package.
"""

import functools
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import deepspeed.comm as dist
import torch
import torch.utils.checkpoint
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d as c10d

GRACE_SECONDS = 2.0  # for peers to notice and say so as well
STORE_SECONDS = 5.0  # for the store to answer at all
LOOK_SECONDS = 1.0  # between two looks, in a long wait for the device, whether a peer gave up
PREFIX = "ds_mxfp8_moe"
CALL_BYTES = 512  # of what a rank says that it is about to do; longer names lose their beginning
SAME_CALLS = ("all ranks of the group must make the same calls in the same order, with rows of the same width and "
              "dtype and as many choices a token")

# Where a group's first wait in vain was. Keyed weakly: it goes when its process group goes.
_FAILED: WeakKeyDictionary = WeakKeyDictionary()


class PeerFailure(RuntimeError):
    """An exchange that did not happen. Its process group cannot be used again, unless all ranks were told that they
    are in different calls.

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


@contextmanager
def deadline_for(group: Any, device: torch.device, where: str) -> Iterator[None]:
    """Around waits for the peers of `group`: they have its deadline, and what a backend raises there becomes a
    PeerFailure."""
    set_deadline(group, device)
    start = time.monotonic()
    try:
        yield
    except PeerFailure:
        raise
    except RuntimeError as error:
        raise peer_failure(group, where, start) from error


def all_to_all(out: torch.Tensor, x: torch.Tensor, recv_splits: tuple, send_splits: tuple, group: Any,
               where: str, call: str = "") -> None:
    """all_to_all_single of rows that ends in time; `where`, the phase and the layer, says what it was for, and `call`
    what else has to be the same on all ranks.

    Raises:
        PeerFailure: on gloo, after the deadline or when a peer's connection is lost, and where ranks are in different
            calls; on NCCL, while it connects.
    """
    comm = dist if dist.is_initialized() else torch.distributed
    with deadline_for(group, x.device, where):
        if x.device.type == "cpu":
            _compare_calls(f"{where}{call}, rows of {x.shape[1]} {x.dtype}", recv_splits, send_splits, group)
        comm.all_to_all_single(out, x, list(recv_splits), list(send_splits), group=group)


@torch.compiler.disable
def check_same_call(group: Any, device: torch.device, where: str) -> None:
    """Before a collective that is not this package's and names nobody: on gloo, raises as `all_to_all` does where a
    rank does not come, or is in another call."""
    if device.type == "cpu":
        with deadline_for(group, device, where):
            nothing = (0, ) * dist.get_world_size(group=group)
            _compare_calls(where, nothing, nothing, group)


def _compare_calls(call: str, recv_splits: tuple, send_splits: tuple, group: Any) -> None:
    """Asks every rank what it is about to do; all of them raise where that does not fit together."""
    ranks = ranks_of(group)
    layout = struct.Struct(f"{CALL_BYTES}s{2 * len(ranks)}q")
    packed = layout.pack(call.encode()[-CALL_BYTES:], *send_splits, *recv_splits)
    mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    told = [torch.empty_like(mine) for _ in ranks]
    torch.distributed.all_gather(told, mine, group=group)
    calls, *splits = zip(*(layout.unpack(one.numpy()) for one in told), strict=True)
    if len(set(calls)) > 1:
        each = "; ".join(f"rank {rank} in {one.rstrip(bytes(1)).decode(errors='replace')}"
                         for rank, one in zip(ranks, calls, strict=True))
        own = calls[ranks.index(torch.distributed.get_rank())]
        raise PeerFailure(f"ranks are in different calls: {each}. {SAME_CALLS[0].upper()}{SAME_CALLS[1:]}",
                          tuple(rank for rank, one in zip(ranks, calls, strict=True) if one != own))
    sent_WW, received_WW = splits[:len(ranks)], splits[len(ranks):]  # [to][from], [from][to]
    for i, sender in enumerate(ranks):
        for j, receiver in enumerate(ranks):
            if sent_WW[j][i] != received_WW[i][j]:
                raise PeerFailure(f"{call}: rank {sender} sends {sent_WW[j][i]} rows to rank {receiver}, which "
                                  f"expects {received_WW[i][j]}: both must name the same number")


def answers_of_all(group: Any, answer: Any, where: str) -> list:
    """Every rank's answer, in rank order. Raises PeerFailure where one does not come."""
    answers = [None] * dist.get_world_size(group=group)
    with deadline_for(group, torch.device(get_accelerator().current_device_name()), where):
        # torch's own: DeepSpeed's comms_logger ends the process at an operation that it does not know.
        torch.distributed.all_gather_object(answers, answer, group=group)
    return answers


def tell_peers_on_error(check: Callable) -> Callable:
    """Decorates what peers may wait for in vain if it raises: they will be told the error. Not a PeerFailure, which
    they have themselves, nor what ends a recomputation of activation checkpointing early."""
    untold = (PeerFailure, getattr(torch.utils.checkpoint, "_StopRecomputationError", PeerFailure))

    @functools.wraps(check)
    def publishing(*args, **kwargs):
        try:
            return check(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, untold) and dist.is_initialized() and dist.get_world_size() > 1:
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
                raise peer_failure(group, where, start)
            look = min(now + LOOK_SECONDS, start + seconds)


def peer_failure(group: Any, where: str, start: float) -> PeerFailure:
    """The error of this rank, which waited in vain in `where` for the peers of `group` since time.monotonic() was
    `start`. Takes up to GRACE_SECONDS."""
    me, ranks = torch.distributed.get_rank(), ranks_of(group)
    seconds = f"{time.monotonic() - start:.1f} s"
    if group in _FAILED:
        return PeerFailure(f"rank {me} cannot go on with {where}: its group, of ranks {ranks}, has failed before, in "
                           f"{_FAILED[group]}, and cannot be used again. Restart all ranks")
    _FAILED[group] = where
    notes = _ask(lambda store: _notes(store, group, me, ranks, f"{where}, for {seconds}"))
    first = f"rank {me} waited in vain for its peers in {where}, for {seconds}; the group's ranks are {ranks}."
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
    if not missing:
        last = f"All came: those that waited for less came late. {last}"
    return PeerFailure("\n".join([first, *lines, last]), tuple(missing))


def absence(rank: int) -> str:
    """Why a rank may not have come, with the error that it published."""
    raised = _ask(lambda store: _raised_by(store, rank))
    return f"it hangs elsewhere, is late, or has died{f'; {raised}' if raised else ''}"


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
    while time.monotonic() < end and set(ranks) - set(waits):  # who raised once may have gone on, and come late
        time.sleep(0.05)
        for rank in ranks:
            if rank not in waits and store.check([_wait_key(group, rank)]):
                waits[rank] = store.get(_wait_key(group, rank)).decode()
            elif rank not in raised and (text := _raised_by(store, rank)):
                raised[rank] = text
    return waits, raised


def _raised_by(store: Any, rank: int) -> str | None:
    """The last error that a rank published."""
    if not store.check([_raised_key(rank)]):
        return None
    when, text = store.get(_raised_key(rank)).decode().split(" ", 1)
    return f"{time.time() - float(when):.1f} s ago it raised {text}"


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
