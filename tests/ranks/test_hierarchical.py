# SPDX-License-Identifier: Apache-2.0
"""The transport in two hops, over gloo: its bits against the naive exchange and the flat transport, what crosses nodes
against the routing, wires that are slow and out of order, and ranks that go wrong in either hop."""

import dataclasses
import random
import time
from collections.abc import Callable

import deepspeed.comm as dist
import pytest
import test_expert_ffn
import test_transport
import torch
from reference_moe import reference
from slow import slow_except
from test_expert_ffn import RECIPES, compare, formula
from test_transport import MX, PLAIN, PROBLEMS, Problem, bits

from ds_mxfp8_moe.transport import Transport, Wire
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from ds_mxfp8_moe.transport.wires import HostWire

TOKENS_OF_6 = (50, 300, 61, 37, 0, 20)


def two_hops(node_size: int, name: str = "moe") -> Hierarchical:
    return Hierarchical(Hops.of(dist.get_world_group(), node_size, name), name)


# ---------------------------------------------------------------- bits


def check_exchange(problem: Problem, node_size: int, y_dtype: torch.dtype | None = None,
                   made: Callable[[Transport], Transport] = lambda transport: transport) -> None:
    """Against the naive exchange; what dispatch gives also against the flat transport. `made`: of both transports."""
    exchange, flat = made(two_hops(node_size)), made(Collective(dist.get_world_group()))
    test_transport.check_exchange(problem, y_dtype, exchange, node_size)
    expert_TK, x_TH, weight_TK = problem.inputs(exchange.world_size)[dist.get_rank()]
    got, want = (t.dispatch(t.plan(expert_TK, problem.local_experts), x_TH, problem.wire, weight_TK)
                 for t in (exchange, flat))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


def with_tokens(problem: Problem, ranks: int) -> Problem:
    """The problem for `ranks` ranks. Only ranks 0 and 4 may be empty: without the rows of another one, rows may arrive
    in the right order by chance."""
    tokens = problem.tokens[2:] + problem.tokens[:2]
    return dataclasses.replace(problem, tokens=tuple(min(tokens[i % 4], TOKENS_OF_6[i % 6]) for i in range(ranks)))


@pytest.mark.parametrize("name", PROBLEMS)
def test_two_nodes_of_two(ranks4, name):
    ranks4.run(check_exchange, with_tokens(PROBLEMS[name], 4), 2)


SOME = ("random", "skewed", "dropped", "all to one expert", "all to one rank", "nowhere", "nobody has tokens",
        "only one rank has tokens", "more choices than experts", "more rows than a tile")


@pytest.mark.parametrize("name", SOME)
def test_four_nodes_of_one(ranks4, name):
    ranks4.run(check_exchange, with_tokens(PROBLEMS[name], 4), 1)


@pytest.mark.parametrize("node_size", [2, 3])
@pytest.mark.parametrize("name", SOME)
def test_six_ranks(ranks6, name, node_size):
    ranks6.run(check_exchange, with_tokens(PROBLEMS[name], 6), node_size)


@pytest.mark.parametrize("wire", [PLAIN, MX])
def test_float32_expert_outputs_round_once(ranks4, wire):
    ranks4.run(check_exchange, Problem(wire=wire, top_k=4), 2, torch.float32)


def inner_products(problem: Problem, node_size: int) -> list:
    return test_transport.inner_products(problem, two_hops(node_size))


@pytest.mark.parametrize("wire", [PLAIN, MX])
def test_dispatch_and_combine_are_each_others_transpose(ranks4, wire):
    got = ranks4.run(inner_products, Problem(routing="dropped", wire=wire, top_k=4), 2)
    inner = torch.tensor(got, dtype=torch.float64).sum(0)
    assert inner[0] == inner[1] != 0 and inner[2] == inner[3] != 0


def two_plans(node_size: int):
    test_transport.two_plans(two_hops(node_size))


def test_two_plans_in_flight_and_the_same_bits_again(ranks4):
    ranks4.run(two_plans, 2)


def not_finite(problem: Problem, node_size: int):
    """A NaN and two infinities come back in their own token alone, and in MXFP8 in their own block."""
    exchange, rank = two_hops(node_size), dist.get_rank()
    inputs = problem.inputs(exchange.world_size)
    for _, x_TH, _ in inputs:
        x_TH[3, 40], x_TH[5, 0], x_TH[5, 100] = float("nan"), float("inf"), float("-inf")
    expert_TK, x_TH, _ = inputs[rank]
    plan = exchange.plan(expert_TK, problem.local_experts)
    x_PH, _ = exchange.dispatch(plan, x_TH, problem.wire)
    assert torch.equal(bits(x_PH), test_transport.naive_dispatch(problem, rank, inputs)[0])
    y_TH, _ = exchange.combine(plan, x_PH.dequantize() if problem.wire.mxfp8 else x_PH, problem.wire, problem.dtype)
    block = problem.wire.block_size if problem.wire.mxfp8 else 1
    touched = torch.zeros(y_TH.shape, dtype=torch.bool)
    for token, column in ((3, 40), (5, 0), (5, 100)):
        touched[token, column // block * block:(column // block + 1) * block] = True
    assert torch.equal(~y_TH.isfinite(), touched)


@pytest.mark.parametrize("wire", [PLAIN, MX, Wire(True, 128)])
def test_nan_and_inf_stay_in_their_rows(ranks4, wire):
    ranks4.run(not_finite, Problem(tokens=(20, 13, 9, 31), wire=wire, top_k=3, hidden=160), 2)


# ---------------------------------------------------------------- what crosses


def bytes_across(problem: Problem, node_size: int) -> dict:
    """Bytes that each step sends out of this rank's node."""
    exchange, rank = two_hops(node_size), dist.get_rank()
    expert_TK, x_TH, weight_TK = problem.inputs(exchange.world_size)[rank]
    wire, sent = exchange.hops.between, {}

    def step(name, fn, *args):
        before = wire.sent_bytes
        result = fn(*args)
        sent[name] = wire.sent_bytes - before
        return result

    plan = step("plan", exchange.plan, expert_TK, problem.local_experts)
    x_PH, weight_P = step("dispatch", exchange.dispatch, plan, x_TH, problem.wire, weight_TK)
    y_PH = x_PH.dequantize() if problem.wire.mxfp8 else x_PH
    step("combine", exchange.combine, plan, y_PH, problem.wire, problem.dtype, weight_P)
    step("dispatch bare", exchange.dispatch, plan, x_TH, problem.wire)
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
    row = problem.hidden + -(-problem.hidden // problem.wire.block_size) if problem.wire.mxfp8 else problem.hidden * 2
    counts = (world - node_size) * (problem.local_experts + 2 + world // node_size + world) * 8
    for rank, sent in enumerate(pool.run(bytes_across, problem, node_size)):
        assert sent == {"plan": counts + out[rank] * K * 2, "dispatch": out[rank] * (row + 4 * K),
                        "combine": back[rank] * (row + 4 * K), "dispatch bare": out[rank] * row}
    assert sum(out) > 0


@pytest.mark.parametrize("wire", [PLAIN, MX, Wire(True, 128)])
def test_a_token_crosses_once_to_each_node_and_the_wire_counts_it(ranks4, wire):
    check_bytes(ranks4, Problem(wire=wire, top_k=6, local_experts=2, routing="dropped"), 2)


@pytest.mark.parametrize("node_size", [2, 3])
def test_bytes_between_nodes_of_six_ranks(ranks6, node_size):
    check_bytes(ranks6, Problem(tokens=TOKENS_OF_6, wire=MX, top_k=4, local_experts=2), node_size)


# ---------------------------------------------------------------- other wires


class Adversary(HostWire):
    """Sends rows in small pieces, in an order of its own and late. Each rank has its own order."""

    def exchange(self, x, send_splits, recv_splits, where, most, compared=True, row_S=None):
        self.count(x, send_splits)
        x = x if row_S is None else x.index_select(0, row_S)
        me, out = dist.get_rank(), x.new_empty((sum(recv_splits), x.shape[1]))
        x, mine = x.contiguous(), self.ranks.index(me)
        sent, received = x.split(list(send_splits)), out.split(list(recv_splits))
        received[mine].copy_(sent[mine])
        puts = [(torch.distributed.isend, piece, rank, tag) for rank, rows in zip(self.ranks, sent, strict=True)
                if rank != me for tag, piece in enumerate(rows.split(7))]
        takes = [(torch.distributed.irecv, piece, rank, tag) for rank, rows in zip(self.ranks, received, strict=True)
                 if rank != me for tag, piece in enumerate(rows.split(7))]
        order, works = [call for call in puts + takes if call[1].numel()], []
        chance = random.Random(f"{me} {where} {x.shape}")
        chance.shuffle(order)
        for call, piece, rank, tag in order:
            if chance.random() < 0.1:
                time.sleep(chance.random() * 0.01)
            works.append(call(piece, rank, group=self.group, tag=tag))
        for work in works:
            work.wait()
        return out


class Broken(HostWire):
    """Brings nothing."""

    def exchange(self, x, send_splits, recv_splits, where, *keys):
        return torch.zeros_like(super().exchange(x, send_splits, recv_splits, where, *keys))


def over(node_size: int, **wires) -> Hierarchical:
    hops = two_hops(node_size).hops
    changed = {hop: wire(hops.group, getattr(hops, hop).ranks, hops.node_of) for hop, wire in wires.items()}
    return Hierarchical(dataclasses.replace(hops, **changed))


def check_over(problem: Problem, node_size: int, **wires) -> None:
    test_transport.check_exchange(problem, None, over(node_size, **wires), node_size)


@pytest.mark.parametrize("wire", [PLAIN, MX])
@pytest.mark.parametrize("routing", ["random", "skewed", "dropped"])
def test_a_wire_that_delays_and_reorders_changes_no_bit(ranks4, routing, wire):
    problem = Problem(tokens=(0, 50, 37, 61), routing=routing, wire=wire, top_k=4)
    ranks4.run(check_over, problem, 2, between=Adversary, inside=Adversary)


def test_a_wire_that_delays_and_reorders_between_three_nodes(ranks6):
    problem = Problem(tokens=TOKENS_OF_6, wire=MX, top_k=3)
    ranks6.run(check_over, problem, 2, between=Adversary, inside=Adversary)


def rows_differ(hop: str) -> bool:
    """Whether rows of dispatch are wrong if a hop brings nothing, over a plan that was made before."""
    good, bad = two_hops(2), over(2, **{hop: Broken})
    problem = Problem(wire=MX)
    expert_TK, x_TH, _ = problem.inputs(4)[dist.get_rank()]
    plan = good.plan(expert_TK, problem.local_experts)
    right, wrong = (bits(t.dispatch(plan, x_TH, MX)[0]) for t in (good, bad))
    return not torch.equal(right, wrong)


@pytest.mark.parametrize("hop", ["between", "inside"])
def test_rows_come_over_the_wire_of_each_hop(ranks4, hop):
    assert all(ranks4.run(rows_differ, hop))


# ---------------------------------------------------------------- experts


def run_ffn(recipe, node_size: int, name: str, made: Callable[[Transport], Transport] = lambda transport: transport,
            **kwargs) -> dict:
    plain = test_expert_ffn.transport
    test_expert_ffn.transport = lambda world: made(two_hops(node_size))
    try:
        return test_expert_ffn.run_layer(recipe, name, **kwargs)
    finally:
        test_expert_ffn.transport = plain


def check_ffn(pool, recipe_name: str, node_size: int, name: str = "swiglu", least: float = 45, device: str = "cpu",
              rescales_rows: bool = False, run: Callable = run_ffn, **kwargs) -> list:
    """Output and all gradients against the naive layer with the roundings of two hops."""
    recipe, world = RECIPES[recipe_name], pool.world_size
    results = pool.run(run, recipe, node_size, name, device=device, **kwargs)
    experts, xs, grads, routes = test_expert_ffn.problem(world, name, **kwargs)
    worst = compare(results, reference(formula(name), recipe, experts, xs, routes, grads, world, rescales_rows,
                                       node_size=node_size))
    assert min(worst.values()) >= least, worst
    return results


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_every_recipe(ranks4, recipe_name):
    check_ffn(ranks4, recipe_name, 2, dtype=torch.bfloat16, top_k=4)


@pytest.mark.parametrize("node_size, recipe_name", slow_except(
    [(node_size, name) for node_size in (2, 3) for name in RECIPES], (2, "mxfp8-32"), (3, "all-wires-mxfp8")))
def test_every_recipe_on_six_ranks(ranks6, node_size, recipe_name):
    check_ffn(ranks6, recipe_name, node_size, dtype=torch.bfloat16, top_k=4, tokens=TOKENS_OF_6, num_experts=12)


@pytest.mark.parametrize("name", ["linear", "gelu"])
def test_other_formulas_with_biases(ranks4, name):
    check_ffn(ranks4, "hp-32", 2, name, bias=True)


@pytest.mark.parametrize("routing", ["dropped", "one-expert", "nowhere"])
def test_hard_routings(ranks4, routing):
    check_ffn(ranks4, "mxfp8-32", 2, routing=routing)


@pytest.mark.parametrize("tokens", [(0, 20, 3, 0), (0, 0, 0, 0), (0, 0, 129, 1)])
def test_ranks_without_tokens(ranks4, tokens):
    check_ffn(ranks4, "hp-32", 2, tokens=tokens)


def test_two_runs_give_the_same_bits(ranks4):
    once, again = (check_ffn(ranks4, "mxfp8-32", 2, dtype=torch.bfloat16, top_k=4) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in ("y", "x", "weight"))
