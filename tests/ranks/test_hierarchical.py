# SPDX-License-Identifier: Apache-2.0
"""The transport in two hops, over gloo: its bits against the naive exchange and the flat transport, what crosses nodes
against the routing, wires that are slow and out of order, and ranks that go wrong in either hop."""

import dataclasses
import random
import time

import deepspeed.comm as dist
import pytest
import test_expert_ffn
import test_transport
import torch
from rank_pool import KEPT_GROUPS, RankPool
from reference_moe import reference
from slow import slow_except
from test_expert_ffn import RECIPES, compare, formula
from test_transport import MX, PLAIN, PROBLEMS, Problem, bits

from ds_mxfp8_moe.transport import Wire
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.wires import Hops, HostWire

TOKENS_OF_6 = (50, 37, 0, 61, 5, 20)


@pytest.fixture(scope="module")
def ranks6():
    pool = RankPool(6)
    yield pool
    pool.close()


def two_hops(node_size: int, name: str = "moe") -> Hierarchical:
    hops = Hops.of(dist.get_world_group(), node_size, name)
    KEPT_GROUPS.update((hops.between.group, hops.inside.group))
    return Hierarchical(hops, name)


# ---------------------------------------------------------------- bits


def check_exchange(problem: Problem, node_size: int, y_dtype: torch.dtype | None = None) -> None:
    """Against the naive exchange; what dispatch gives also against the flat transport."""
    exchange, flat = two_hops(node_size), Collective(dist.get_world_group())
    test_transport.check_exchange(problem, y_dtype, exchange, node_size)
    expert_TK, x_TH, weight_TK = problem.inputs(exchange.world_size)[dist.get_rank()]
    got, want = (t.dispatch(t.plan(expert_TK, problem.local_experts), x_TH, problem.wire, weight_TK)
                 for t in (exchange, flat))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", PROBLEMS)
def test_two_nodes_of_two(ranks4, name):
    ranks4.run(check_exchange, PROBLEMS[name], 2)


SOME = ("random", "skewed", "dropped", "all to one expert", "all to one rank", "nowhere", "nobody has tokens",
        "only one rank has tokens", "more choices than experts", "more rows than a tile")


@pytest.mark.parametrize("name", SOME)
def test_four_nodes_of_one(ranks4, name):
    ranks4.run(check_exchange, PROBLEMS[name], 1)


@pytest.mark.parametrize("node_size", [2, 3])
@pytest.mark.parametrize("name", SOME)
def test_six_ranks(ranks6, name, node_size):
    tokens = tuple(min(PROBLEMS[name].tokens[i % 4], most) for i, most in enumerate(TOKENS_OF_6))
    ranks6.run(check_exchange, dataclasses.replace(PROBLEMS[name], tokens=tokens), node_size)
