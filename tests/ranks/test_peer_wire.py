# SPDX-License-Identifier: Apache-2.0
"""The transport in two hops over peer memory, on ranks without GPUs over the emulator of CUDA: the bits of the wire
through the host, whatever the order of stores, and only the memory of a hop's ranks is mapped."""

from datetime import timedelta
from functools import cache
from typing import Any
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.transport import peer_memory
from ds_mxfp8_moe.transport.deadline import PeerError
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from ds_mxfp8_moe.transport.kernel_reports import KernelReports
from ds_mxfp8_moe.transport.nvshmem import NVSHMEMWire
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from ds_mxfp8_moe.transport.wires import Alone, PeerWire, RowWire
from tests.support import emulator
from tests.support.conformance import HARD, PLAIN, PROBLEMS, Problem, check, without_an_empty_rank
from tests.support.rank_pool import KEPT_GROUPS, set_timeout
from tests.support.slow import slow_except

DEADLINE = timedelta(seconds=4)  # kernels wait for nine sixteenths of it
FIRST_EPOCH = 0xFFFFFFF0  # wraps within the first cases
pytestmark = pytest.mark.usefixtures("emulated")


def peer_hops(group: Any, node_size: int) -> Hops:
    """The group's hops, each over peer memory on one or two multiprocessors. Collective."""
    host, module = Hops.of(group, node_size), emulator.load(dist.get_rank())

    def wire(ranks: list, sms: int) -> RowWire:
        if len(ranks) == 1:
            return Alone(ranks)
        with mock.patch.object(peer_memory, "FIRST_BYTES", 1 << 20):  # so that it grows
            return PeerWire(PeerMemory(group, module, FIRST_EPOCH, emulator.Shared, ranks, host.node_of), sms)

    return Hops.over(group, host.node_of, node_size, wire(host.between.ranks, 1), wire(host.inside.ranks, 2))


@cache
def hops_of_all_cases(node_size: int) -> Hops:
    group = torch.distributed.new_group()
    KEPT_GROUPS.add(group)
    return peer_hops(group, node_size)


def check_peers(problem: Problem, node_size: int, adversary: bool = False) -> None:
    module = hops_of_all_cases(node_size).between.memory.extension
    emulator.set_adversary(module, adversary)
    try:
        check(problem, Hierarchical(hops_of_all_cases(node_size)), node_size)
    finally:
        emulator.set_adversary(module, False)


@pytest.mark.parametrize("ranks, node_size, name", slow_except(
    [*((4, 2, name) for name in HARD), *((4, 1, name) for name in ("skewed", "nowhere", "more rows than a tile")),
     *((6, node_size, name) for node_size in (2, 3) for name in ("skewed", "more rows than a tile"))],
    *((4, 2, name) for name in ("skewed", "dropped", "nobody has tokens", "one rank has tokens",
                                "more rows than a tile", "float32 answers, mxfp8")), (4, 1, "skewed")))
def test_same_bits(request, ranks, node_size, name):
    request.getfixturevalue(f"ranks{ranks}").run(check_peers, without_an_empty_rank(PROBLEMS[name]), node_size)


def grown() -> tuple:
    """Rows of more than a chunk, which need more staging than there is: bytes of a half before and after."""
    hops = peer_hops(dist.get_world_group(), 2)
    before = hops.between.memory.half_bytes, hops.inside.memory.half_bytes
    problem = Problem(tokens=(310, 40, 0, 250), hidden=2080, dtype=torch.float32, local_experts=2)
    check(problem, Hierarchical(hops), 2)
    return before, (hops.between.memory.half_bytes, hops.inside.memory.half_bytes)


def test_staging_grows_on_all_ranks_alike(ranks4):
    answers = ranks4.run(grown)
    assert answers == answers[:1] * 4
    before, after = answers[0]
    assert before == (1 << 20, 1 << 20) and min(after) > 2 * 310 * 2080 * 4 / 2


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("name", slow_except(["random", "skewed", "dropped"], "dropped"))
def test_stores_and_signals_out_of_order_change_no_bit(ranks4, name):
    ranks4.run(check_peers, without_an_empty_rank(PROBLEMS[name]), 2, True)


# ---------------------------------------------------------------- who is reached


def mapped() -> tuple:
    """The ranks of each hop, how many stagings of others are mapped for it, and what else the kernels can reach."""
    hops = hops_of_all_cases(2)
    found = []
    for wire in (hops.between, hops.inside):
        memory = wire.memory
        found.append((wire.ranks, len(memory._staging.peers), memory.world_size))
    return tuple(found)


def test_only_the_memory_of_a_hops_ranks_is_mapped(ranks4):
    assert ranks4.run(mapped) == [(([0, 2], 1, 2), ([0, 1], 1, 2)), (([1, 3], 1, 2), ([0, 1], 1, 2)),
                                  (([0, 2], 1, 2), ([2, 3], 1, 2)), (([1, 3], 1, 2), ([2, 3], 1, 2))]


# ---------------------------------------------------------------- calls that differ


def mixed_up(how: str) -> str:
    """Rank 1 sends another layer's gradients by a plan of equal shapes, or makes the plan of another layer."""
    group = dist.new_group([0, 1, 2, 3])
    set_timeout(DEADLINE, group)
    hops, me = peer_hops(group, 2), dist.get_rank()
    expert_TK = torch.arange(8).view(8, 1)
    layer, other = Hierarchical(hops, "a"), Hierarchical(hops, "ab"[me == 1])
    with pytest.raises(PeerError) as caught:
        if how == "plan":
            other.plan(expert_TK, 2)
        else:
            other.dispatch(layer.plan(expert_TK, 2), torch.ones(8, 32), PLAIN)
    if how == "plan":  # the ranks may go on
        layer.dispatch(layer.plan(expert_TK, 2), torch.ones(8, 32), PLAIN)
    return str(caught.value)


def test_plans_of_different_layers_raise_everywhere(ranks4):
    for rank, text in enumerate(ranks4.run(mixed_up, "plan")):
        assert f"ranks are in different calls: rank {rank} is in 'counts' of {'ab'[rank == 1]}" in text


@pytest.mark.slow
def test_gradients_of_different_layers_raise(ranks4):
    zero, one, two, three = ranks4.run(mixed_up, "gradient")
    for text, name, peer in ((one, "b", 3), (three, "a", 1)):
        assert f"'dispatch' of {name}, hop between nodes: rank {peer} is in another call, of another layer" in text
    for text, peer in ((zero, "1 of node 0"), (two, "3 of node 1")):
        assert "'dispatch' of a, hop inside the node until the deadline" in text and f"rank {peer}" in text


# ---------------------------------------------------------------- a failure in the other hop


def after_a_failure() -> tuple:
    """Rank 3 does not come to the hop between nodes. Rank 1, whose wait has failed, goes on to the hop inside its node
    before its host looks, as it would on a GPU. What each rank then has."""
    group = dist.new_group([0, 1, 2, 3])
    set_timeout(DEADLINE, group)
    hops, me = peer_hops(group, 2), dist.get_rank()
    rows = torch.full((2, 32), float(me))
    with mock.patch.object(KernelReports, "check"):
        if me != 3:
            hops.between.exchange(rows, (1, 1), (1, 1), "rows, hop between nodes", 1)
            hops.inside.exchange(rows, (1, 1), (1, 1), "rows, hop inside the node", 1)
    dist.barrier()
    return tuple(wire.memory.reports.has_failed for wire in (hops.between, hops.inside))


@pytest.mark.slow
def test_rows_that_did_not_come_are_not_passed_on(ranks4):
    """Rank 0 waits for rank 1, and rank 2 for rank 3."""
    assert ranks4.run(after_a_failure) == [(False, True), (True, False), (False, True), (False, False)]


# ---------------------------------------------------------------- NVSHMEM's kernel


@cache
def over_nvshmem(node_size: int) -> Hops:
    """Hops whose wire between nodes is NVSHMEM's, over the emulator."""
    me = dist.get_rank()
    module, group = emulator.load(me, emulator.build_nvshmem), torch.distributed.new_group()
    KEPT_GROUPS.add(group)
    host, peers = Hops.of(group, node_size), hops_of_all_cases(node_size)
    with mock.patch.object(peer_memory, "FIRST_BYTES", 1 << 20):
        memory = PeerMemory(group, module, FIRST_EPOCH, emulator.Heap(module), host.between.ranks, host.node_of)
    return Hops.over(group, host.node_of, node_size, NVSHMEMWire(memory, 1 + me % 3), peers.inside)


def check_nvshmem(problem: Problem, node_size: int, adversary: bool) -> int:
    """Puts of this rank."""
    hops = over_nvshmem(node_size)
    wire, module = hops.between, hops.between.memory.extension
    before = emulator.puts(module)
    emulator.set_adversary(module, adversary)
    check(problem, Hierarchical(hops), node_size)
    assert wire.host is None
    return emulator.puts(module) - before


@pytest.mark.slow
@pytest.mark.parametrize("node_size, adversary, name", [
    *((2, True, name) for name in HARD), (2, False, "random"),
    *((1, True, name) for name in ("random", "skewed", "dropped", "one rank", "nobody has tokens"))])
def test_the_kernel_over_nvshmem(ranks4, node_size, adversary, name):
    emulator.build_nvshmem()
    puts = ranks4.run(check_nvshmem, without_an_empty_rank(PROBLEMS[name]), node_size, adversary)
    assert all(count >= 4 // node_size - 1 for count in puts)  # the counts
    # To each peer a rank sends counts once, and if it has tokens, ids once and tokens twice. Rows of two combines go
    # back. Rank 0 has no tokens.
    assert name != "random" or puts == {2: [3, 6, 4, 6], 1: [9, 16, 16, 16]}[node_size]
