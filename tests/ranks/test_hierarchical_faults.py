# SPDX-License-Identifier: Apache-2.0
"""Ranks that go wrong in an exchange of two hops, over gloo: all others end in time, and name rank and node."""

import os
import signal
import time
from datetime import timedelta
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.transport import RowFormat, deadline
from ds_mxfp8_moe.transport.deadline import PeerError
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from ds_mxfp8_moe.transport.wires import HostWire
from tests.support.deadline_cases import CONFUSIONS, confused
from tests.support.rank_pool import RankFailure, set_timeout
from tests.support.slow import slow_except

DEADLINE, GRACE = timedelta(seconds=1.5), 1.0
SPARE = 10  # for a busy machine
MX = RowFormat(True)


class Gone(Exception):
    pass


class Leaving(HostWire):
    """At the exchange named `at`, this rank goes away: it dies, or does something else."""

    at, dies = "", False

    def exchange(self, x, send_splits, recv_splits, where, *keys):
        if where == self.at:
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Gone
        return super().exchange(x, send_splits, recv_splits, where, *keys)


def exchange_twice(exchange: Hierarchical) -> None:
    for _ in range(2):
        plan = exchange.plan(torch.arange(24).view(6, 4) % 8, 2)
        x_PH, _ = exchange.dispatch(plan, torch.ones(6, 32), MX)
        exchange.combine(plan, x_PH.dequantize(), MX, torch.float32, phase="combine of the gradient")


def leaving_hops(group, kind: type[HostWire]) -> Hops:
    hops = Hops.of(group, 2)
    return Hops.over(group, hops.node_of, 2, *(kind(group, wire.ranks, hops.node_of)
                                               for wire in (hops.between, hops.inside)))


def leave(rank: int, at: str, dies: bool) -> tuple | None:
    """What this rank raises when `rank` goes away: the ranks it names, its text, and after how long."""
    set_timeout(DEADLINE)
    # What a test before this one raised inside a layer, which the others would quote.
    deadline.default_store().delete_key(deadline._raised_key(dist.get_rank()))
    hops = leaving_hops(dist.new_group([0, 1, 2, 3]), Leaving)
    if dist.get_rank() == rank:
        for wire in (hops.between, hops.inside):
            wire.at, wire.dies = at, dies
    start = time.monotonic()
    with mock.patch.object(deadline, "GRACE_SECONDS", GRACE):
        try:
            exchange_twice(Hierarchical(hops, "block.3.moe"))
        except PeerError as failure:
            if dies:
                raise
            return failure.missing, str(failure), time.monotonic() - start
        except Gone:
            return None
    raise AssertionError("no rank went away")


def place(phase: str, hop: str) -> str:
    return f"'{phase}' of block.3.moe, hop {hop}"


BETWEEN, INSIDE = "between nodes", "inside the node"
PLACES = [("counts", BETWEEN), ("dispatch", BETWEEN), ("dispatch", INSIDE), ("combine of the gradient", INSIDE),
          ("combine of the gradient", BETWEEN)]


@pytest.mark.parametrize("gone, phase, hop", slow_except(
    [(3 * (i % 2), *at) for i, at in enumerate(PLACES, 1)],
    (3, "dispatch", INSIDE)))
def test_a_rank_that_stalls_in_a_hop_is_named_by_all_others(ranks4, gone, phase, hop):
    answers = ranks4.run(leave, gone, place(phase, hop), False)
    assert answers[gone] is None
    for rank, answer in enumerate(answers):
        if rank != gone:
            missing, text, seconds = answer
            assert missing == (gone, ), text
            assert seconds < DEADLINE.total_seconds() + GRACE + SPARE
            assert text.startswith(f"rank {rank} of node {rank // 2} waited for rank {gone} of node {gone // 2} in '")
            assert f"rank {gone} of node {gone // 2} did not come; it hangs elsewhere" in text
            assert " of block.3.moe, hop " in text
    peer = gone ^ (2 if hop == BETWEEN else 1)
    assert f" in {place(phase, hop)} until the deadline, for" in answers[peer][1]


@pytest.mark.parametrize("phase, hop", slow_except([("dispatch", BETWEEN), ("combine of the gradient", INSIDE)],
                                                   ("dispatch", BETWEEN)))
def test_a_rank_that_dies_in_a_hop_is_named_by_all_others(ranks4, phase, hop):
    with pytest.raises(RankFailure) as caught:
        ranks4.run(leave, 3, place(phase, hop), True)
    errors = dict(caught.value.errors)
    assert "ended" in errors.pop(3) and set(errors) == {0, 1, 2}
    for text in errors.values():
        assert "PeerError: rank" in text and "rank 3 of node 1 did not come; " in text, text
    peer = 1 if hop == BETWEEN else 2
    assert f"lost its connection to rank 3 of node 1 in {place(phase, hop)}" in errors[peer]


class Garbled(HostWire):
    """Expert ids arrive as bytes of one value, as a failed exchange may leave them on a GPU."""

    byte = 0

    def exchange(self, x, send_splits, recv_splits, where, *keys):
        arrived = super().exchange(x, send_splits, recv_splits, where, *keys)
        return arrived.fill_(self.byte) if "expert ids" in where else arrived


def exchange_garbled(byte: int) -> None:
    with mock.patch.object(Garbled, "byte", byte):
        exchange_twice(Hierarchical(leaving_hops(dist.new_group([0, 1, 2, 3]), Garbled), "block.3.moe"))


@pytest.mark.parametrize("byte", slow_except([0, 1, 0x3c, 0x7f, 0xff], 1, 0x7f, 0xff))
def test_expert_ids_of_a_failed_exchange_index_nothing_that_is_not_there(ranks4, byte):
    """On a GPU that would be an assert, which hides the error that the deadline raises."""
    ranks4.run(exchange_garbled, byte)


def confused_hops(how: str) -> tuple:
    hops, sent = Hops.of(dist.new_group([0, 1, 2, 3]), 2), []

    def exchange(name: str) -> Hierarchical:
        sent.append(hops.between.sent_bytes)
        return Hierarchical(hops, name)

    told = confused(how, exchange, 2)
    assert sent == [0, 2 * (2 + 2 + 2 + 4) * 8]  # of the calls that differ, the counts: no row has crossed
    return told


@pytest.mark.parametrize("how", CONFUSIONS)
def test_ranks_in_different_calls_raise_everywhere_before_a_row_travels(ranks4, how):
    for rank, (missing, text) in enumerate(ranks4.run(confused_hops, how)):
        assert missing == ((0, 2, 3) if rank == 1 else (1, )) and "make the same calls in the same order" in text
