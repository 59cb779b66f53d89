# SPDX-License-Identifier: Apache-2.0
"""Deadlines: a rank whose peers do not come raises a PeerError that names them.

A wait ends at the timeout of its process group: DeepSpeed's `DEEPSPEED_TIMEOUT` (minutes), or `timeout=` of
`deepspeed.init_distributed`. A rank that gives up writes a note into the store of the default process group. It then
reads the notes of the others for a moment, and names the ranks that left none. A rank that raises another error inside
a layer writes that error into the store, so that its peers can quote it. Otherwise only waits of more than a second
use the store.

On gloo the host waits in every exchange, and every wait ends here. On NCCL the host waits for the counts of a plan.
That wait ends here, shortly before NCCL's own watchdog would abort the process. The exchanges themselves wait on the
device and end by that watchdog, which knows neither the layer nor the peer. DeepSpeed's gate with one choice a token
(k=1) and without dropping reads a capacity that was reduced over the ranks. The watchdog ends this wait too.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup, Store
from torch.utils.checkpoint import CheckpointError

from ..ops.log import log

GRACE_SECONDS = 2.0  # how long a rank that gives up waits for the notes of others
STORE_SECONDS = 5.0  # how long the store has to answer
LOOK_SECONDS = 1.0  # how often a wait for the device looks whether a peer gave up
QUIET_SECONDS = 60.0  # after which a wait for the device says what it waits for
SAME_CALLS = ("All ranks of the group must make the same calls in the same order, with rows of the same width and "
              "dtype and as many choices a token")
SILENT = "it hangs elsewhere, is late, or has died. Look at its log"
DEADLINE = ("The deadline is DEEPSPEED_TIMEOUT (minutes), or timeout= of deepspeed.init_distributed; with the "
            "Trainer, its ddp_timeout (seconds)")

IN_EVALUATION = ("The layer is in evaluation mode. In generate(), a rank whose texts are finished leaves the others "
                 "waiting: pass synced_gpus=True. Otherwise give every rank the same number of batches")

# What each failed group failed in. Keyed weakly, so that an entry goes with its process group.
_FAILED: WeakKeyDictionary = WeakKeyDictionary()
# The last exchange that each group finished on the host, which is in all of gloo's.
_FINISHED: WeakKeyDictionary = WeakKeyDictionary()


class PeerError(RuntimeError):
    """An exchange failed because of a peer. Its process group cannot be used again.

    One exception: if ranks are in different calls, and the counts of a plan over the transports `collective` or
    `hierarchical` tell so, or the comparison in `ep`, the group can go on.

    Attributes:
        missing: global ranks of the group that did not come to the exchange, as far as this rank could learn.
        at_deadline: whether the wait ended by its deadline.
    """

    def __init__(self, message: str, missing: tuple = (), at_deadline: bool = False):
        super().__init__(message)
        self.missing, self.at_deadline = missing, at_deadline


@contextmanager
def naming_evaluation() -> Iterator[None]:
    """Adds a hint to a PeerError in evaluation mode: the ranks ran different numbers of forwards."""
    try:
        yield
    except PeerError as failure:
        if failure.at_deadline or failure.missing:
            failure.args = (f"{failure}\n{IN_EVALUATION}", )
        raise


def ranks_of(group: ProcessGroup) -> list:
    """Global ranks of a group. deepspeed.comm's function for it never returns for the group of all ranks."""
    return torch.distributed.get_process_group_ranks(group)


def set_deadline(group: ProcessGroup, device: torch.device) -> float:
    """Gives `group` the timeout of the default group if that is shorter. Returns it in seconds.

    torch gives new groups its own default, not the timeout of deepspeed.init_distributed.
    """
    own, default = (g._get_backend(device) for g in (group, torch.distributed.group.WORLD))
    if not {own.name(), default.name()} <= {"gloo", "nccl"}:
        return float("inf")  # other backends keep their own rules
    timeout = min(own.options._timeout, default.options._timeout)
    if timeout < own.options._timeout:
        getattr(own, "wrapped_pg", own).set_timeout(timeout)  # wrapped where TORCH_DISTRIBUTED_DEBUG=DETAIL
    return timeout / timedelta(seconds=1)


def before_watchdog(seconds: float) -> float:
    """A deadline of this package where the group's timeout is `seconds`. At that timeout NCCL's watchdog aborts the
    process."""
    return seconds - min(10.0, seconds / 4)


@contextmanager
def deadline_for(group: ProcessGroup, device: torch.device, where: str, node_of: dict | None = None) -> Iterator[None]:
    """Gives waits for the peers of `group` its deadline. Raises a PeerError for a backend's error about peers.

    Any other error, for example of a rank that runs out of memory, is raised as it is.

    Args:
        where: the exchange and the layer, for errors.
        node_of: the node of each global rank of the group, for errors. None: they do not name nodes.
    """
    seconds = set_deadline(group, device)
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not _is_about_peers(error):
            raise
        raise peer_failure(group, where, start, seconds, node_of) from error


def _is_about_peers(error: RuntimeError) -> bool:
    # gloo raises plain RuntimeErrors, so their text has to tell. The second is what it says after an earlier timeout.
    text = str(error)
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in text or "caused pair closure" in text


def all_to_all(out: torch.Tensor, x: torch.Tensor, recv_splits: tuple, send_splits: tuple, group: ProcessGroup,
               where: str, node_of: dict | None = None) -> None:
    """all_to_all_single of rows with a deadline. `where` and `node_of`: as for `deadline_for`.

    Raises:
        PeerError: on gloo, at the deadline or when the connection to a peer is lost. On NCCL, while it connects.
    """
    comm = dist if dist.is_initialized() else torch.distributed
    with deadline_for(group, x.device, where, node_of):
        comm.all_to_all_single(out, x, list(recv_splits), list(send_splits), group=group)
    if x.device.type == "cpu":
        _FINISHED[group] = where


def all_gather(x: torch.Tensor, group: ProcessGroup, where: str) -> torch.Tensor:
    """The vectors [N] of all ranks, in rank order: [W, N]. Raises PeerError as `all_to_all` does."""
    comm, ranks = dist if dist.is_initialized() else torch.distributed, torch.distributed.get_world_size(group)
    out = x.new_empty(ranks * x.shape[0])
    with deadline_for(group, x.device, where):
        comm.all_gather_into_tensor(out, x, group=group)
    return out.view(ranks, -1)


def answers_of_all(group: ProcessGroup, answer: Any, where: str) -> list:
    """Every rank's answer, in rank order. Raises PeerError if one does not come."""
    answers = [None] * dist.get_world_size(group=group)
    with deadline_for(group, torch.device(get_accelerator().current_device_name()), where):
        # torch's own: DeepSpeed's comms_logger ends the process at an operation that it does not know.
        torch.distributed.all_gather_object(answers, answer, group=group)
    return answers


def failure_of_any(group: ProcessGroup, failure: str | None, where: str) -> str | None:
    """The failure of the first rank that has one, with its rank. None: no rank has one. Every rank calls it."""
    failures = zip(ranks_of(group), answers_of_all(group, failure, where), strict=True)
    return next((f"rank {rank}: {failure}" for rank, failure in failures if failure), None)


def failure_in_world(failure: str | None, where: str) -> str | None:
    """`failure_of_any` of all ranks. A process that is alone gets its own failure back."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return failure
    return failure_of_any(dist.get_world_group(), failure, where)


def tell_peers_on_error(function: Callable) -> Callable:
    """Decorates a function after which peers wait for this rank. If it raises, they can quote the error."""

    @functools.wraps(function)
    def telling(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            tell_peers(error)
            raise

    return telling


def tell_peers(error: Exception) -> None:
    """Writes an error of this rank where peers that wait for it can quote it.

    Two errors are left out: a PeerError, which the peers have themselves, and the exception by which activation
    checkpointing ends a recomputation early.
    """
    ends_early = type(error).__module__ == "torch.utils.checkpoint" and not isinstance(error, CheckpointError)
    left_out = ends_early or isinstance(error, PeerError)
    if not left_out and dist.is_initialized() and dist.get_world_size() > 1:
        note = f"{time.time()} {type(error).__name__}: {error}"
        _ask(lambda store: store.set(_raised_key(dist.get_rank()), note))


def wait_for_device(done: Callable[[], bool], group: ProcessGroup, where: str, seconds: float,
                    node_of: dict | None = None) -> None:
    """Waits on the host until `done()` is true, such as an event's `query`. `node_of`: as for `deadline_for`.

    A long wait prints a line once.

    Raises:
        PeerError: shortly before `seconds` have passed, or soon after a peer gave up waiting in this group.
    """
    seconds = before_watchdog(seconds)
    start = time.monotonic()
    look, tell = start + LOOK_SECONDS, start + QUIET_SECONDS
    while not done():
        now = time.monotonic()
        time.sleep(0 if now < start + LOOK_SECONDS else 1e-3)
        if now > tell:
            tell = float("inf")
            me = torch.distributed.get_rank()
            peers = [rank for rank in ranks_of(group) if rank != me]
            log(f"mxfp8_moe: rank {me} has waited for {now - start:.0f} s in {where}, for one of ranks {peers}. The "
                f"deadline is at {seconds:.0f} s")
        if now > look:
            if now > start + seconds or _ask(lambda store: any(
                    store.check([_wait_key(group, rank)]) for rank in ranks_of(group))):
                raise peer_failure(group, where, start, seconds, node_of)
            look = min(now + LOOK_SECONDS, start + seconds)


def read_counts(counts: torch.Tensor, group: ProcessGroup, where: str, meanwhile: Callable[[], None],
                node_of: dict | None = None) -> list:
    """Reads counts on the host, which waits for the GPU here.

    Args:
        meanwhile: called before the wait.
        node_of: as for `deadline_for`.
    """
    if counts.device.type == "cpu":  # as on GPUs, although the host has waited already
        meanwhile()
        return counts.tolist()
    on_host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
    on_host.copy_(counts, non_blocking=True)
    copied = get_accelerator().Event()
    copied.record()
    meanwhile()
    wait_for_device(copied.query, group, where, set_deadline(group, counts.device), node_of)
    return on_host.tolist()


def check_same_calls(group: ProcessGroup, signatures: list, where: str) -> None:
    """Raises PeerError if a rank, in rank order, has another signature. All ranks must know all signatures."""
    if len(set(signatures)) > 1:
        ranks, me = ranks_of(group), torch.distributed.get_rank(group)
        others = tuple(rank for rank, one in zip(ranks, signatures, strict=True) if one != signatures[me])
        raise PeerError(f"ranks are in different calls: rank {ranks[me]} is in {where}, and ranks {list(others)} "
                          f"are in another. {SAME_CALLS}", others)


def peer_failure(group: ProcessGroup, where: str, start: float, seconds: float,
                 node_of: dict | None = None) -> PeerError:
    """The error of this rank, whose wait for the peers of `group` failed. Takes up to GRACE_SECONDS.

    Args:
        where: the exchange and the layer.
        start: time.monotonic() when the wait began.
        seconds: the deadline of the wait.
        node_of: as for `deadline_for`.
    """
    me, ranks = torch.distributed.get_rank(), ranks_of(group)

    def named(rank: int) -> str:
        return f"rank {rank}" if node_of is None else f"rank {rank} of node {node_of[rank]}"

    if group in _FAILED:
        return PeerError(f"rank {me} cannot go on with {where}: its group, of ranks {ranks}, has failed before, in "
                           f"{_FAILED[group]}, and cannot be used again. Restart all ranks")
    _FAILED[group] = where
    waited = f"{time.monotonic() - start:.1f} s"
    until = " until the deadline" if time.monotonic() >= start + seconds else ""
    mine = f"{where}{until}, for {waited}"
    notes = Notes({me: mine}, {})
    finished = _ask(lambda store: _notes(store, group, me, ranks, notes))
    waits, raised = dict(notes.waits), dict(notes.raised)  # of a thread that may still run
    if not finished and len(waits) + len(raised) < 2:
        return PeerError(lost_store(f"{where}, after {waited}"))
    missing = tuple(rank for rank in ranks if rank not in waits)
    peers = f"ranks {list(missing)}"
    if len(missing) < 2:
        peers = named(missing[0]) if missing else "its peers"
    at_deadline = any(" until the deadline, for" in note for note in waits.values())
    if at_deadline:
        lines = [f"{named(me)} waited for {peers} in {where} until the deadline, for {waited}:"]
        silent, last = SILENT, [DEADLINE]
    else:
        lines = [f"{named(me)} lost its connection to {peers} in {where}, after {waited}:"]
        since = f" after {_FINISHED[group]}, the last exchange with it" if group in _FINISHED else ""
        silent, last = f"it probably died{since}, or ended after fewer steps. Look at its log", []
    lines += [f"  {named(rank)} waited as well, in {waits[rank]}" for rank in ranks if rank in waits and rank != me]
    lines += [f"  {named(rank)} did not come; {raised.get(rank, silent)}" for rank in missing]
    if not missing and all(_call_of(note) == _call_of(mine) for note in waits.values()):
        lines.append("  All ranks came: those that waited for less time came late")
    elif not missing:
        lines.append("  The ranks wait in different calls: some made fewer steps, or a call that the others did not. "
                     "A longer deadline does not help")
        last = []
    return PeerError("\n".join(lines + last), missing, at_deadline)


def lost_store(where: str) -> str:
    """The error of this rank if the store is gone. `where`: the call, or the exchange and the layer."""
    return (f"rank {torch.distributed.get_rank()} lost its connection to the store in {where}. Rank 0 or its launcher "
            "keeps the store, so rank 0 has died, or waited for another rank and gave up earlier. Its log says which")


def _call_of(note: str) -> str:
    """Where a rank waited, without its hop and for how long."""
    return note.rsplit(", for ", 1)[0].removesuffix(" until the deadline").split(", hop ")[0]


def absence(rank: int) -> str:
    """Why a rank may not have come, with the error that it wrote into the store."""
    return _ask(lambda store: _raised_by(store, rank)) or SILENT


def _wait_key(group: ProcessGroup, rank: int) -> str:
    return f"ds_mxfp8_moe/waited/{group.group_name}/{rank}"


def _raised_key(rank: int) -> str:
    return f"ds_mxfp8_moe/raised/{rank}"


class Notes(NamedTuple):
    """What ranks of a group have written into the store: where they waited, and the errors that they raised."""

    waits: dict[int, str]
    raised: dict[int, str]


def _notes(store: Any, group: ProcessGroup, me: int, ranks: list, notes: Notes) -> bool:
    """Writes this rank's note, and adds to `notes` what the others write within GRACE_SECONDS.

    The store may go away meanwhile, with rank 0. What was read until then stays in `notes`. So that the others can
    read all notes, rank 0 stays for GRACE_SECONDS in any case.
    """
    store.set(_wait_key(group, me), notes.waits[me])
    end = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < end and (me == 0 or set(ranks) - set(notes.waits)):
        time.sleep(0.05)
        for rank in ranks:
            if rank not in notes.waits and store.check([_wait_key(group, rank)]):
                notes.waits[rank] = store.get(_wait_key(group, rank)).decode()
            elif rank not in notes.raised and (text := _raised_by(store, rank)):
                notes.raised[rank] = text  # this rank may have gone on, and come late
    return True


def _raised_by(store: Any, rank: int) -> str | None:
    """The last error that a rank wrote into the store."""
    if not store.check([_raised_key(rank)]):
        return None
    when, text = store.get(_raised_key(rank)).decode().split(" ", 1)
    return f"{time.time() - float(when):.1f} s ago it raised {text}"


def default_store() -> Store:
    """The store of the default process group."""
    return torch.distributed.group.WORLD.get_group_store()


def _ask(question: Callable) -> Any:
    """What `question(store)` returns. None if the store is gone or does not answer."""
    answers = []

    def ask():
        try:
            answers.append(question(default_store()))
        except RuntimeError:  # torch's DistStoreError and DistNetworkError
            pass

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    return answers[0] if answers else None
