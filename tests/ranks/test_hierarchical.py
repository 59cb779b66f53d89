# SPDX-License-Identifier: Apache-2.0
"""The transport in two hops, over gloo: the table of exchanges, and what crosses nodes against the routing.
test_hierarchical_layers.py has whole layers."""

import gc
from weakref import ref

import deepspeed.comm as dist
import pytest

from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from tests.support.conformance import (
    HARD,
    MX32,
    MX128,
    PLAIN,
    PROBLEMS,
    Problem,
    check,
    check_in_flight,
    without_an_empty_rank,
)
from tests.support.recorded_collectives import steps

TOKENS_OF_6 = (50, 300, 61, 37, 0, 20)


def two_hops(node_size: int, name: str = "moe") -> Hierarchical:
    return Hierarchical(Hops.of(dist.get_world_group(), node_size), name)


# ---------------------------------------------------------------- bits


def check_hops(name: str, node_size: int) -> None:
    check(without_an_empty_rank(PROBLEMS[name]), two_hops(node_size), node_size, times=2 if name == "random" else 1)


@pytest.mark.parametrize("ranks, node_size, name", [
    *((4, 2, name) for name in HARD),
    *((4, 1, name) for name in ("dropped", "one rank has tokens", "more rows than a tile")),
    *(pytest.param(6, node_size, name, marks=pytest.mark.slow) for node_size in (2, 3)
      for name in ("skewed", "dropped", "more rows than a tile"))])
def test_same_bits(request, ranks, node_size, name):
    request.getfixturevalue(f"ranks{ranks}").run(check_hops, name, node_size)


def in_flight(node_size: int) -> None:
    check_in_flight(two_hops(node_size), node_size)


def test_two_plans_in_flight(ranks4):
    ranks4.run(in_flight, 2)


def freed() -> bool:
    """Whether the group's hops and their memory go with the group."""
    group = dist.new_group([0, 1, 2, 3])
    hops = ref(Hops.of(group, 2))
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return hops() is None


def test_hops_go_with_their_group(ranks4):
    assert ranks4.run(freed) == [True] * 4


# ---------------------------------------------------------------- what crosses


def bytes_across(problem: Problem, node_size: int) -> dict:
    """Bytes that each step sends out of this rank's node."""
    exchange, sent = two_hops(node_size), {}
    wire = exchange.hops.between
    before = [wire.sent_bytes]

    def told(name: str) -> None:
        sent[name], before[0] = wire.sent_bytes - before[0], wire.sent_bytes

    steps(problem, exchange, told)
    return sent


def crossings(problem: Problem, world: int, node_size: int) -> tuple:
    """By the routing alone: how many rows each rank sends to other nodes, and how many it sends back."""
    out, back = [0] * world, [0] * world
    for rank, (expert_TK, _, _) in enumerate(problem.inputs(world)):
        for choices in expert_TK.tolist():
            for node in {e // (problem.local_experts * node_size) for e in choices if e >= 0}:
                if node != rank // node_size:
                    out[rank] += 1
                    back[node * node_size + rank % node_size] += 1
    return out, back


def check_bytes(pool, problem: Problem, node_size: int) -> None:
    world, K = pool.world_size, problem.top_k
    out, back = crossings(problem, world, node_size)
    hidden, row_format = problem.hidden, problem.row_format
    row = hidden + -(-hidden // row_format.block_size) if row_format.mxfp8 else hidden * 2
    counts = (world - node_size) * (problem.local_experts + 2 + world // node_size + world) * 8
    for rank, sent in enumerate(pool.run(bytes_across, problem, node_size)):
        assert sent == {"plan": counts + out[rank] * K * 2, "dispatch": out[rank] * (row + 4 * K),
                        "combine": back[rank] * (row + 4 * K), "dispatch bare": out[rank] * row}
    assert sum(out) > 0


@pytest.mark.parametrize("row_format", [PLAIN, MX32, MX128])
def test_a_token_crosses_once_to_each_node_and_the_wire_counts_it(ranks4, row_format):
    check_bytes(ranks4, Problem(row_format=row_format, top_k=6, local_experts=2, routing="dropped"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("node_size", [2, 3])
def test_bytes_between_nodes_of_six_ranks(ranks6, node_size):
    check_bytes(ranks6, Problem(tokens=TOKENS_OF_6, row_format=MX32, top_k=4, local_experts=2), node_size)
