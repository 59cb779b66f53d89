# SPDX-License-Identifier: Apache-2.0
"""Ranks that go wrong over gloo: who is late, elsewhere, dead or in another call is named, in time."""

import io
import os
import re
import signal
import time
from contextlib import redirect_stdout
from datetime import timedelta
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe.layer import MoE

import ds_mxfp8_moe
from ds_mxfp8_moe.config import MXFP8MoEConfig
from ds_mxfp8_moe.transport import deadline
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.deadline import (
    PeerError,
    _raised_key,
    naming_evaluation,
    peer_failure,
    set_deadline,
    wait_for_device,
)
from tests.support.deadline_cases import CONFUSIONS, MX, confused
from tests.support.rank_pool import RankFailure, set_timeout
from tests.support.slow import slow_except

# Ranks in different calls: every rank raises, and the group can go on.


@pytest.mark.parametrize("how", CONFUSIONS)
def test_ranks_in_different_calls_raise_and_may_go_on(ranks2, how):
    for rank, (missing, text) in enumerate(ranks2.run(confused, how)):
        assert missing == (1 - rank, ) and "make the same calls in the same order" in text
        name = "other" if rank == 1 and how == "order" else "moe"
        assert f"ranks are in different calls: rank {rank} is in 'counts' of {name} (" in text, text


def raised_by_this_rank(error: RuntimeError) -> bool:
    """A RuntimeError inside an exchange that is not about peers. Afterwards the group goes on."""
    exchange = Collective(dist.get_world_group(), "moe")
    with mock.patch.object(dist, "all_to_all_single", side_effect=error), pytest.raises(type(error)) as caught:
        exchange.plan(some_routes(), 3)
    exchange.plan(some_routes(), 3)
    return isinstance(caught.value, PeerError)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError, RuntimeError])
def test_an_error_of_this_rank_is_no_peer_failure(ranks2, kind):
    assert ranks2.run(raised_by_this_rank, kind("no room")) == [False, False]


# Deadlines: three ranks, of which one is missed by the other two.

DEADLINE, GRACE = timedelta(seconds=2), 1.0
EXPERT = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))


def group_with_deadline():
    """As after deepspeed.init_distributed(timeout=DEADLINE): the default group has it, new ones have torch's own."""
    set_timeout(DEADLINE)
    return dist.new_group([0, 1, 2])


def ends_in_time(fn, *args) -> PeerError:
    start = time.monotonic()
    with mock.patch.object(deadline, "GRACE_SECONDS", GRACE), pytest.raises(PeerError) as caught:
        fn(*args)
    spare = 15  # for a busy machine
    assert time.monotonic() - start < DEADLINE.total_seconds() + GRACE + spare
    return caught.value


def some_routes() -> torch.Tensor:
    return torch.arange(6).view(6, 1)


def touches_the_store(group) -> int:
    touched, original = [], deadline.default_store
    deadline.default_store = lambda: touched.append(1) or original()
    try:
        exchange = Collective(group)
        plan = exchange.plan(some_routes(), 2)
        exchange.combine(plan, exchange.dispatch(plan, torch.ones(6, 32), MX)[0].dequantize(), MX, torch.float32)
    finally:
        deadline.default_store = original
    return len(touched)


def deadline_of_a_new_group():
    group = group_with_deadline()
    device = torch.device("cpu")
    assert group._get_backend(device).options._timeout > DEADLINE
    seconds, touched = set_deadline(group, device), touches_the_store(group)
    shorter = dist.new_group([0, 1, 2])
    set_timeout(DEADLINE / 2, shorter)
    return seconds, group._get_backend(device).options._timeout, touched, set_deadline(shorter, device)


def test_a_group_gets_deepspeeds_timeout_and_the_store_is_left_alone(ranks3):
    seconds = DEADLINE.total_seconds()
    assert ranks3.run(deadline_of_a_new_group) == [(seconds, DEADLINE, 0, seconds / 2)] * 3


def layer_with_deadline(**keys):
    group_with_deadline()
    layer = MoE(32, EXPERT, 3, ep_size=3, **keys)
    ds_mxfp8_moe.convert(layer, MXFP8MoEConfig(enabled=True, transport="collective"))  # else the choice comes first
    layer.set_deepspeed_parallelism()
    return layer


def raise_in_the_front_door(drop_tokens):
    layer = layer_with_deadline(drop_tokens=drop_tokens)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="the input has shape"):
            layer(torch.ones(4, 64))
        return None
    return str(ends_in_time(layer, torch.ones(4, 32)))


@pytest.mark.parametrize("drop_tokens, phase", slow_except([(True, "counts"), (False, "gate")], (True, "counts")))
def test_the_peers_of_a_rank_that_raises_learn_what_it_raised(ranks3, drop_tokens, phase):
    zero, _, two = ranks3.run(raise_in_the_front_door, drop_tokens)
    for rank, text, other in ((0, zero, 2), (2, two, 0)):
        assert f"rank {rank} waited for rank 1 in '{phase}' of (the model itself) until the deadline, for" in text
        assert f"rank {other} waited as well, in '{phase}' of (the model itself)" in text
        assert re.search(r"rank 1 did not come; .* s ago it raised ValueError: \(the model itself\): the input has "
                         r"shape \(4, 64\); expected a last axis of 32", text)


@pytest.mark.parametrize("missing, at_deadline, hint", [((1, ), False, True), ((), True, True), ((), False, False)])
def test_an_evaluation_adds_its_hint_to_failures_of_peers_alone(missing, at_deadline, hint):
    with pytest.raises(PeerError) as caught, naming_evaluation():
        raise PeerError("rank 1 is in another call", missing, at_deadline)
    assert ("pass synced_gpus=True" in str(caught.value)) == hint


def run_out_of_memory():
    """Rank 1 raises between dispatch and combine; then every rank tries once more."""
    layer = layer_with_deadline()
    if dist.get_rank() == 1:
        with mock.patch("ds_mxfp8_moe.ffn.expert_math.activate", side_effect=MemoryError("no room")):
            with pytest.raises(MemoryError):
                layer(torch.ones(4, 32))
        return None
    first = ends_in_time(layer, torch.ones(4, 32))
    start = time.monotonic()
    second = ends_in_time(layer, torch.ones(4, 32))
    assert time.monotonic() - start < DEADLINE.total_seconds()
    return str(first), str(second), first.missing


def test_the_peers_of_a_rank_that_raises_inside_a_layer_learn_it_and_cannot_go_on(ranks3):
    zero, _, two = ranks3.run(run_out_of_memory)
    for first, second, missing in (zero, two):
        assert missing == (1, ) and "in 'combine' of (the model itself) until the deadline, for " in first
        assert re.search(r"rank 1 did not come; .* s ago it raised MemoryError: no room", first)
        assert "has failed before, in 'combine' of (the model itself), and cannot be used again" in second


def come_late():
    exchange, rank = Collective(group_with_deadline(), "moe"), dist.get_rank()
    exchange.plan(some_routes(), 2)
    if rank == 1:
        time.sleep(DEADLINE.total_seconds() + 0.5)
    return str(ends_in_time(exchange.plan, some_routes(), 2))


@pytest.mark.slow
def test_a_rank_that_comes_late_is_told_apart_by_how_long_it_waited(ranks3):
    zero, *others = ranks3.run(come_late)
    assert re.search(r"rank 1 waited as well, in 'counts' of moe, for 0\.\d s", zero), zero
    first = r"rank 0 waited as well, in 'counts' of moe until the deadline, for [2-9]"
    assert all(re.search(first, text) for text in others), others
    assert all("those that waited for less time came late" in text for text in (zero, *others))


class StoreOfRank0:
    """Holds the note of rank 0, and goes away with it once this note has been read."""

    gone = False

    def set(self, key, text):
        self.lives()

    def check(self, keys):
        self.lives()
        return keys[0].endswith("/0") and "waited" in keys[0]

    def get(self, key):
        self.gone = True
        return b"'counts' of moe until the deadline, for 6.0 s"

    def lives(self):
        if self.gone:
            raise torch.distributed.DistNetworkError("Connection reset by peer")


class Group:
    group_name = "a group"


@pytest.mark.parametrize("ended_before", [False, True])
def test_what_was_read_survives_the_store(monkeypatch, ended_before):
    store = StoreOfRank0()
    store.gone = ended_before
    monkeypatch.setattr(deadline, "default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(deadline, "ranks_of", lambda group: [0, 1, 2])
    failure = peer_failure(Group(), "'counts' of moe", time.monotonic() - 6, 6)
    if ended_before:
        assert "rank 0 has died, or waited for another rank and gave up earlier" in str(failure)
    else:
        assert failure.missing == (2, ) and "rank 1 waited for rank 2 in 'counts'" in str(failure)
        assert "rank 0 waited as well, in 'counts' of moe until the deadline" in str(failure)


def never() -> bool:
    return False


def wait_for_a_device():
    """What the host does on NCCL; rank 2 begins its wait later, and has a longer deadline."""
    group, rank = group_with_deadline(), dist.get_rank()
    if rank == 1:
        return None
    time.sleep(rank / 2)
    with redirect_stdout(io.StringIO()) as said, mock.patch.object(deadline, "QUIET_SECONDS", 0.5):
        failure = ends_in_time(wait_for_device, never, group, "'counts' of moe", 2 if rank == 0 else 600)
    return failure.missing, re.sub(r"waited for [01] s", "waited for 0 s", said.getvalue())


@pytest.mark.slow
def test_the_wait_for_the_device_ends_for_all_when_it_ends_for_one(ranks3):
    said = ("mxfp8_moe: rank {} has waited for 0 s in 'counts' of moe, for one of ranks [{}]. The deadline is at "
            "{} s\n")
    zero, _, two = ranks3.run(wait_for_a_device)
    assert zero == ((1, ), said.format(0, "1, 2", 2)) and two == ((1, ), said.format(2, "0, 1", 590))


def wait_elsewhere():
    group, where = group_with_deadline(), "saving the model" if dist.get_rank() == 1 else "'counts' of moe"
    return str(ends_in_time(wait_for_device, never, group, where, 1, {0: 0, 1: 0, 2: 1}))


def test_ranks_in_different_calls_are_told_so_with_their_nodes(ranks3):
    for rank, text in enumerate(ranks3.run(wait_elsewhere)):
        assert all(f"rank {other} of node {other // 2} waited " in text for other in range(3)), (rank, text)
        assert "The ranks wait in different calls: some made fewer steps" in text and "DEEPSPEED_TIMEOUT" not in text


def die(rank):
    deadline.default_store().delete_key(_raised_key(dist.get_rank()))  # of cases before
    exchange = Collective(group_with_deadline(), "moe")
    exchange.plan(some_routes(), 2)
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.plan(some_routes(), 2)


@pytest.mark.parametrize("rank", slow_except([1, 0], 1))
def test_a_killed_rank_is_named(ranks3, rank):
    with pytest.raises(RankFailure) as caught:
        ranks3.run(die, rank)
    errors = dict(caught.value.errors)
    assert "ended" in errors.pop(rank) and len(errors) == 2
    for text in errors.values():
        assert "PeerError: rank" in text and "'counts' of moe" in text
        if rank == 0:  # it kept the store
            assert "so rank 0 has died, or waited for another rank" in text
        else:
            assert "lost its connection to rank 1 in" in text and "in evaluation mode" not in text
            assert "rank 1 did not come; it probably died after 'expert ids' of moe, the last exchange with it" in text


def test_an_error_without_process_groups_is_raised_as_it_is():
    layer = MoE(32, EXPERT, 2)
    ds_mxfp8_moe.convert(layer, MXFP8MoEConfig(enabled=True))
    with pytest.raises(ValueError, match="expected a last axis of 32"):
        layer.deepspeed_moe._check_input(torch.ones(4, 64))
