# SPDX-License-Identifier: Apache-2.0
"""Two hops with a capacity between four ranks, over peer memory and over NVSHMEM: the checks of
tests/ranks/test_static_hops.py on GPUs, no wait of the host, and CUDA graphs that are replayed with other routes."""

import re

import deepspeed.comm as dist
import pytest
import torch
from capture import capture
from nvlink_cases import same
from test_expert_ffn import RECIPES
from test_hierarchical_gpu import OnGPU, over_nvshmem, peers
from test_nvlink_gpu import check_replays
from test_static_hops import CUT, DROPPING, FITTING, SOME, check, static
from test_transport import MX, PLAIN

from ds_mxfp8_moe.transport import Wire
from ds_mxfp8_moe.transport.capacity import Findings
from ds_mxfp8_moe.transport.deadline import PeerFailure
from ds_mxfp8_moe.transport.peer_memory import PeerMemory

SECONDS = 240.0  # of a case: the first one compiles kernels
WIRES = {"peer_memory": peers, "nvshmem": over_nvshmem}
CASES = {"fitting": (SOME, FITTING, ("random", "dropped", "skewed", "nowhere", "no tokens", "float32")),
         "cut": (CUT, DROPPING, ("mxfp8", "one rank", "skewed"))}


@pytest.fixture(params=WIRES)
def four_by_wire(request):
    """Four ranks, and the wire between their nodes."""
    return request.getfixturevalue({"peer_memory": "four_over_gloo", "nvshmem": "four_over_nvshmem"}[
        request.param]), request.param


def check_bits(wire: str, problem, keys: dict, node_size: int, drops: bool) -> None:
    check(problem, keys, WIRES[wire](node_size), drops, OnGPU)


@pytest.mark.parametrize("node_size", [2, 1])
@pytest.mark.parametrize("kind, name", [(kind, name) for kind, (_, _, names) in CASES.items() for name in names])
def test_same_bits(four_by_wire, kind, name, node_size):
    ranks, wire = four_by_wire
    problems, keys, _ = CASES[kind]
    ranks.run(check_bits, wire, problems[name], keys, node_size, kind == "cut", seconds=SECONDS)


TOKENS, HIDDEN, K = 600, 256, 2


def routes() -> list:
    """Ids of one expert a rank: even, all for one rank, some for none, and at random."""
    even = (torch.arange(TOKENS * K, device="cuda") % 4).view(TOKENS, K)
    torch.manual_seed(dist.get_rank())
    return [even, torch.zeros_like(even), torch.where(even == 3, -1, even), torch.full_like(even, 3),
            torch.randint(-1, 4, (TOKENS, K), device="cuda"), even, torch.zeros_like(even)]


def step_of(exchange, expert_TK: torch.Tensor, wire: Wire):
    """A function that plans, dispatches and combines."""
    x_TH, weight_TK = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16), torch.rand(
        TOKENS, K, device="cuda")
    rows = exchange.plan(expert_TK, 1).num_rows
    y_PH, number_P = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16), torch.rand(rows, device="cuda")

    def step() -> tuple:
        plan = exchange.plan(expert_TK, 1)
        x_PH, weight_P = exchange.dispatch(plan, x_TH, wire, weight_TK)
        return plan.group_ends_E, x_PH, weight_P, *exchange.combine(plan, y_PH, wire, torch.bfloat16, number_P)

    return step


def replayed(kind: str, node_size: int, wire: Wire) -> tuple:
    """Replays give the bits of eager runs, and drop as many choices. Nothing waits for the device."""
    exchange = static(WIRES[kind](node_size), f"replayed {node_size} {wire}", **DROPPING)
    expert_TK = routes()[0].clone()
    step = step_of(exchange, expert_TK, wire)
    step()
    torch.cuda.synchronize(), dist.barrier()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        captured = step()
    counted = []
    for ids in routes():
        expert_TK.copy_(ids)
        before = exchange.dropped
        graph.replay()
        torch.cuda.synchronize()
        between = exchange.dropped
        got = [t.clone() for t in captured]
        want = step()
        torch.cuda.synchronize()
        counted.append((between - before, exchange.dropped - between))
        end = int(want[0][-1])
        for name, a, b in zip(("ends", "x", "weight", "y", "number"), want, got, strict=True):
            if name == "x":  # nothing is written behind the last group
                a, b = ((x.with_parts(x.qdata[:end], x.scale[:end]) if wire.mxfp8 else x[:end]) for x in (a, b))
                a = a.with_parts(a.qdata.cpu(), a.scale.cpu()) if wire.mxfp8 else a.cpu()
            else:
                a = a.cpu()
            same(name, a, b)
    exchange.hops.check()
    dist.barrier()  # before the graph's memory goes
    return counted


@pytest.mark.parametrize("wire", [PLAIN, MX, Wire(True, 128)])
@pytest.mark.parametrize("node_size", [2, 1])
def test_graphs_replay_with_other_routes_and_drop_what_does_not_fit(four_by_wire, node_size, wire):
    ranks, kind = four_by_wire
    answers = ranks.run(replayed, kind, node_size, wire, seconds=SECONDS)
    room = 1280 + 128  # the share of 1200 choices, padded, and 127 that pad the group, padded
    for rank, counted in enumerate(answers):
        assert all(a == b for a, b in counted)
        assert [a for a, _ in counted[:4]] == [0, (4 * TOKENS * K - room) * (rank == 0), 0,
                                               (4 * TOKENS * K - room) * (rank == 3)]


def overflow_in_a_replay(kind: str) -> str:
    """Replays run no code on the host, but the check before the step finds rows that do not fit."""
    exchange, expert_TK = static(WIRES[kind](2), "overflows", capacity_factor=1.0), routes()[0].clone()
    step = step_of(exchange, expert_TK, PLAIN)
    step()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        kept = step()
    graph.replay()
    Findings.wait_and_check_all(), PeerMemory.wait_and_check_all()
    expert_TK.zero_()
    graph.replay()
    with pytest.raises(PeerFailure) as caught:
        Findings.wait_and_check_all()
    dist.barrier()
    del kept
    Findings.of(exchange.hops.group)._host.zero_()  # other cases go on with the group
    return str(caught.value)


def test_what_does_not_fit_in_a_replay_raises_before_the_step(four_by_wire):
    ranks, kind = four_by_wire
    for rank, text in enumerate(ranks.run(overflow_in_a_replay, kind, seconds=SECONDS)):
        assert re.search(f"rank {rank}: 'counts' of overflows, with room for [0-9]+ rows: rank 0 would get 4864 rows, "
                         "more than its capacity", text), text


def layer_replayed(kind: str, recipe) -> None:
    exchange = static(WIRES[kind](2), "layer", capacity_factor=3.0)
    check_replays(recipe, exchange)
    exchange.hops.check()


@pytest.mark.parametrize("recipe_name", ["hp-128", "mxfp8-128", "bf16"])
def test_a_layer_in_a_graph(four_by_wire, recipe_name):
    ranks, kind = four_by_wire
    ranks.run(layer_replayed, kind, RECIPES[recipe_name], seconds=SECONDS)
