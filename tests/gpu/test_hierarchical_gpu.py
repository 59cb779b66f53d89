# SPDX-License-Identifier: Apache-2.0
"""The transport in two hops between four ranks, as nodes of two and of one, over each wire. The ranks share
one GPU where there are fewer than four. NCCL then takes each rank for a machine of its own, and connects them through
loopback. NVSHMEM takes each rank for a PE, and puts over peer memory.

The checks are those of tests/ranks/test_hierarchical.py.
"""

import io
import os
import random
import time
from contextlib import redirect_stdout
from datetime import timedelta
from functools import cache

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.config import MXFP8MoEConfig
from ds_mxfp8_moe.ops.op_builder.nvlink import try_load
from ds_mxfp8_moe.transport import nvshmem
from ds_mxfp8_moe.transport.choose import choose
from ds_mxfp8_moe.transport.deadline import GRACE_SECONDS, PeerError
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from ds_mxfp8_moe.transport.nvshmem import NVSHMEMWire
from ds_mxfp8_moe.transport.wires import PeerWire
from tests.support.all_to_all_gpu_cases import NVSHMEM
from tests.support.conformance import HARD, MX32, PROBLEMS, Problem, check, without_an_empty_rank
from tests.support.hierarchical_layers_cases import FLAT, TWO_HOPS, classic
from tests.support.models import PLAIN, Layout
from tests.support.rank_pool import set_timeout

DEADLINE = timedelta(seconds=12)
CYCLES_PER_MS = 2_000_000
SECONDS = 240.0  # of a case: the first one compiles kernels


# ---------------------------------------------------------------- bits


def over_host(node_size: int) -> Hops:
    return Hops.of(dist.get_world_group(), node_size)


@cache
def over_peers(node_size: int) -> Hops:
    """Only the memory of a hop's ranks is mapped for it."""
    module, reason = try_load()
    assert module is not None, reason
    hops = Hops.of(torch.distributed.new_group(), node_size, "peer_memory", "peer_memory")
    assert all(len(wire.ranks) == 1 or isinstance(wire, PeerWire) for wire in (hops.between, hops.inside))
    return hops


@cache
def group_over_nvshmem():
    os.environ.update(NVSHMEM)
    group = torch.distributed.new_group()
    set_timeout(DEADLINE, group)
    reason = nvshmem.start(group, "the test")
    assert reason is None, reason
    return group


@cache
def over_nvshmem(node_size: int) -> Hops:
    """Four PEs on one GPU, over peer memory."""
    hops = Hops.of(group_over_nvshmem(), node_size, "nvshmem", "peer_memory")
    assert type(hops.between) is NVSHMEMWire
    return hops


WIRES = {"host": ("four", over_host), "peer_memory": ("four_over_gloo", over_peers),
         "nvshmem": ("four_over_nvshmem", over_nvshmem)}


@pytest.fixture(params=WIRES)
def four_by_wire(request):
    """Four ranks, and the wire between their nodes."""
    return request.getfixturevalue(WIRES[request.param][0]), request.param


def check_hops(problem: Problem, wire: str, node_size: int) -> None:
    hops = WIRES[wire][1](node_size)
    check(problem, Hierarchical(hops), node_size)
    hops.check()
    assert wire != "nvshmem" or hops.between.host is None


@pytest.mark.parametrize("name", [*HARD, f"{torch.float32}, plain, 32", "many scales"])
@pytest.mark.parametrize("node_size", [2, 1])
def test_same_bits(four_by_wire, name, node_size):
    ranks, wire = four_by_wire
    ranks.run(check_hops, without_an_empty_rank(PROBLEMS[name]), wire, node_size, seconds=SECONDS)


def rows_between(source: int, target: int, width: int, seed: int) -> torch.Tensor:
    """Some rows that a rank sends to another one, none in every fourth case: uint8 [rows, width]."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * source + target)
    rows = int(torch.randint(0, 400, (), generator=generator)) if (source + target + seed) % 4 else 0
    return torch.randint(256, (rows, width), generator=generator, dtype=torch.uint8)


def stressed(repetitions: int, hops: Hops | None = None) -> None:
    """Both hops in any order, with delays on the device; widths that are no multiple of anything, and large ones. The
    host compares at the end alone, so that exchanges of repetitions meet."""
    hops, me, order, delays = hops or over_peers(2), dist.get_rank(), random.Random(7), random.Random(dist.get_rank())
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    cases = []
    for seed, width in enumerate((1, 16, 7168, 40, 7424, 333)):
        for wire in (hops.between, hops.inside):
            sent, wanted = ([rows_between(*pair, width, seed) for pair in pairs] for pairs in (
                [(me, rank) for rank in wire.ranks], [(rank, me) for rank in wire.ranks]))
            x, row_S = torch.cat(sent).cuda(), None
            if seed % 2:  # taken from another order
                row_S = torch.randperm(len(x), device="cuda")
                x = torch.empty_like(x).index_copy_(0, row_S, x)
            cases.append((wire, x, tuple(map(len, sent)), tuple(map(len, wanted)), f"rows of {width}", row_S,
                          torch.cat(wanted).cuda()))
    for _ in range(repetitions):
        wire, x, send_splits, recv_splits, where, row_S, wanted = order.choice(cases)
        torch.cuda._sleep(int(delays.choice((0, 0.1, 1, 3)) * delays.random() * CYCLES_PER_MS))
        wrong += (wire.exchange(x, send_splits, recv_splits, where, 400, row_S=row_S) != wanted).sum()
    assert wrong.item() == 0
    hops.check()


def test_rows_over_peer_memory_with_delays(four_over_gloo):
    four_over_gloo.run(stressed, 200, seconds=SECONDS)


def stalled(gone: int, hops: Hops) -> tuple | None:
    """What this rank raises when `gone` does not come to the second dispatch."""
    exchange, expert_TK = Hierarchical(hops, "moe"), (torch.arange(24).view(6, 4) % 8).cuda()
    x_TH = torch.ones(6, 64, device="cuda", dtype=torch.bfloat16)
    plan = exchange.plan(expert_TK, 2)
    exchange.dispatch(plan, x_TH, MX32)
    torch.cuda.synchronize()
    dist.barrier()
    start, answer = time.monotonic(), None
    if dist.get_rank() != gone:
        with pytest.raises(PeerError) as caught:
            exchange.dispatch(plan, x_TH, MX32)
            torch.cuda.synchronize()
            hops.check()
        answer = caught.value.missing, str(caught.value), time.monotonic() - start
    dist.barrier()
    assert (torch.ones(1000, device="cuda") * 2).sum().item() == 2000
    return answer


def check_stalled(answers: list, gone: int) -> None:
    assert answers[gone] is None
    for rank, answer in enumerate(answers):
        if rank != gone:
            missing, text, seconds = answer
            assert missing == (gone, ) and f"rank {gone} of node {gone // 2} did not come" in text, text
            assert "in 'dispatch' of moe, hop " in text and "until the deadline" in text, text
            assert seconds < DEADLINE.total_seconds() + GRACE_SECONDS


# ---------------------------------------------------------------- NVSHMEM


def stressed_over_nvshmem(repetitions: int) -> None:
    stressed(repetitions, over_nvshmem(2))


def test_rows_over_nvshmem_with_delays(four_over_nvshmem):
    four_over_nvshmem.run(stressed_over_nvshmem, 100, seconds=SECONDS)


def stalled_over_nvshmem(gone: int) -> tuple | None:
    return stalled(gone, over_nvshmem(2))


def test_a_rank_that_stalls_over_nvshmem_is_named(four_over_nvshmem_of_a_case):
    check_stalled(four_over_nvshmem_of_a_case.run(stalled_over_nvshmem, 3, seconds=SECONDS), 3)


def chosen(wire: str) -> tuple:
    """The wires that the config's keys give, and what all ranks print."""
    os.environ.update(NVSHMEM)
    out = io.StringIO()
    with redirect_stdout(out):
        exchange = choose(torch.distributed.new_group(), "moe",
                          MXFP8MoEConfig(transport="hierarchical", node_size=2, wire=wire))
    return type(exchange.hops.between).__name__, type(exchange.hops.inside).__name__, out.getvalue()


@pytest.mark.parametrize("wire, between", [("nvshmem", "NVSHMEMWire"), ("peer_memory", "PeerWire")])
def test_a_wire_is_chosen(four_over_nvshmem_of_a_case, wire, between):
    answers = four_over_nvshmem_of_a_case.run(chosen, wire, seconds=SECONDS)
    assert [answer[:2] for answer in answers] == [(between, "PeerWire")] * 4
    assert answers[0][2] == ("mxfp8_moe: transport hierarchical between ranks [0, 1, 2, 3]: 2 nodes of 2 ranks, wire "
                             f"{wire}, peer memory inside a node\n")


# ---------------------------------------------------------------- layers


def trained(recipe: str) -> tuple:
    """Losses of plain DeepSpeed, of the flat transport and of two hops, what crossed, whether a training with both
    hops over peer memory ends at the same weights, and the lines about the two transports."""
    keys = {"recipe": recipe, "min_tokens_per_expert": 0}
    layout = Layout(ep_size=4, dtype="bf16", zero=2)
    plain, flat, hops, again = (classic(section and section | keys, layout)
                                for section in (PLAIN, FLAT, TWO_HOPS, TWO_HOPS | {"wire": "peer_memory"}))
    same = all(torch.equal(hops[1][name], again[1][name]) for name in hops[1])
    return plain[0], flat[0], hops[0], hops[2] + again[2], same, hops[3] + again[3]


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "bf16"])
def test_classic_layers_train(four, recipe):
    start = "mxfp8_moe: transport hierarchical between ranks [0, 1, 2, 3]: 2 nodes of 2 ranks, wire"
    for rank, (plain, flat, hops, crossed, same, said) in enumerate(four.run(trained, recipe, seconds=SECONDS)):
        assert all(crossed) and same
        assert said == ([] if rank else [f"{start} host, peer memory inside a node",
                                         f"{start} peer_memory, peer memory inside a node"])
        assert hops == pytest.approx(plain, rel=0.02) and hops == pytest.approx(flat, rel=0.01)
