# SPDX-License-Identifier: Apache-2.0
"""Exchanges of the NVLink transport beside GEMMs: on how many multiprocessors, in which order, and what is waited for;
over the emulator of CUDA."""

import math
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from nvlink_cases import BF16, MX32, MX128, PLAIN, Case, expected, same
from test_nvlink import NAME, built, memory_of_all_cases, new_memory, pytestmark  # noqa: F401

from ds_mxfp8_moe.transport import ROW_ALIGNMENT, Feed, overlap
from ds_mxfp8_moe.transport import nvlink as nvlink_transport
from ds_mxfp8_moe.transport.deadline import PeerFailure
from ds_mxfp8_moe.transport.nvlink import NVLink, _chunk
from ds_mxfp8_moe.transport.peer_memory import PeerMemory


@pytest.mark.parametrize("hidden, quantises, gemm_ms, tiles, best", [
    (2048, False, 1.065, 704, range(16, 29)), (2048, False, 0.72, 704, range(28, 33)),
    (2048, True, 0.72, 704, range(36, 45)), (7168, False, 5.42, 3584, range(16, 21)),
    (7168, False, 3.67, 3584, range(24, 25)), (7168, True, 3.67, 3584, range(32, 33)),
    (8192, False, 15.5, 10240, range(8, 13)), (8192, False, 10.5, 10240, range(12, 13)),
    (8192, True, 10.5, 10240, range(16, 17))])
def test_multiprocessors_beside_a_gemm_are_the_best_of_those_measured(hidden, quantises, gemm_ms, tiles, best):
    """131072 rows between 2 ranks beside the weight gradients of the pipeline's 8 experts, on H200s."""
    row = 131072 * hidden
    wire = row if quantises else 2 * row
    assert overlap.share(132, wire // 2, 4 * row + 2 * wire, quantises, 1, gemm_ms / 1e3, tiles) in best


@pytest.mark.parametrize("quantises, gemm_ms, best", [(False, 3.1, range(16, 21)), (False, 2.1, range(22, 29)),
                                                      (True, 2.1, (0, 28, 30, 32))])
def test_multiprocessors_beside_a_gemm_where_rows_are_sums(quantises, gemm_ms, best):
    """A layer of 64 experts of 4096 x 1024, 16384 tokens, top 8, between 2 H200s: four rows of y for one that
    travels. 0, one by one, where that is within 2 %."""
    y, row = 131072 * 4096 * 2, 4096 * (1 if quantises else 2)
    moved = y + 16384 * 4096 * 2 + 2 * 32640 * row
    assert overlap.share(132, 32640 * row // 2, moved, quantises, 32640 / 131072, gemm_ms / 1e3, 8192) in best


@pytest.mark.parametrize("total, most, gemm_ms, sms", [(132, 18, 5.42, 18), (132, 8, 5.42, 0), (132, None, 0, 0),
                                                       (132, None, 0.1, 0), (8, None, 5.42, 0)])
def test_multiprocessors_beside_a_gemm_have_limits(total, most, gemm_ms, sms):
    row = 131072 * 7168 * 2
    assert overlap.share(total, row // 2, 4 * row, False, 1, gemm_ms / 1e3, 3584, most) == sms


@pytest.mark.parametrize("hidden, columns, sms", [(7168, 2048, range(32, 49)), (8192, 5120, (0, )),
                                                  (2048, 1408, range(36, 45)), (2048, 7168, (0, )),
                                                  (1408, 2048, (0, ))])
def test_multiprocessors_ahead_of_a_gemm(hidden, columns, sms):
    """Where the pipeline's first GEMM gained by it on 2 H200s, and where that was nothing, or in the noise."""
    exchange = NVLink(SimpleNamespace(side="a stream", multiprocessors=132, world_size=2), NAME)
    plan = SimpleNamespace(num_tokens=131072, num_rows=131072, received=131072, group_ends_E=torch.zeros(8),
                           group_ends=(131072, ))
    seconds = 2 * 131072 * hidden * columns / 1.1e15
    got, first = exchange.sms_ahead(plan, hidden, BF16, MX128, seconds)
    assert got in sms and (0.6 < first <= 1 if got else first == 0)
    few = SimpleNamespace(**vars(plan) | {"num_rows": 16384 - 128})  # 7 tiles of an expert from each rank
    bound = SimpleNamespace(**vars(plan) | {"group_ends": None})
    for other in ((replace(exchange, overlap=False), plan, MX128, seconds), (exchange, plan, MX128, 0.0),
                  (exchange, plan, MX32, seconds), (exchange, plan, PLAIN, seconds), (exchange, few, MX128, seconds),
                  (exchange, bound, MX128, seconds), (replace(exchange, sms=6), plan, MX128, seconds)):
        assert other[0].sms_ahead(other[1], hidden, BF16, *other[2:]) == (0, 0)


# ---------------------------------------------------------------- fed by the GEMM of its rows


class Fed(NVLink):
    """Runs a combine beside the GEMM of its rows however little it gains."""

    def sms_beside(self, *args, **keys):
        return 2


@contextmanager
def fake_gpu(memory: PeerMemory) -> Iterator[None]:
    """Streams and events of the emulator, whose kernels run one after the other."""
    stream = SimpleNamespace(wait_event=lambda event: None, wait_stream=lambda other: None, cuda_stream=0)
    event = SimpleNamespace(record=lambda stream=None: None)
    accelerator = SimpleNamespace(Event=lambda: event, current_stream=lambda: stream)
    with mock.patch.object(memory, "side", stream), mock.patch.object(nvlink_transport, "get_accelerator",
                                                                      lambda: accelerator):
        yield


def wanted_order(case: Case, parts: int, arriving: bool = False) -> list:
    """Tiles of this rank's 128 rows at a time, by the part, and in it the owner's turn, of the first token of theirs
    that is sent; or by the part of the last one that is brought (`arriving`); and by number."""
    world, rank, E = dist.get_world_size(), dist.get_rank(), case.local_experts
    routed = [expert_TK for expert_TK, _, _ in case.inputs(world)]
    chunk_W = [_chunk(len(ids), len(routed)) for ids in routed]
    chunks_W = [-(-len(ids) // chunk) for ids, chunk in zip(routed, chunk_W, strict=True)]
    run = -(-max(chunks_W) // parts)
    keys = []

    def key(w: int, token: int) -> tuple:
        """A rank's chunks are sent from as many stretches of them as there are ranks in turn, then the rest."""
        stretch, chunk = chunks_W[w] // world, token // chunk_W[w]
        turned = chunk % stretch * world + chunk // stretch if chunk < stretch * world else chunk
        return turned // run, 0 if arriving else (w - rank - 1) % world

    for expert in range(rank * E, rank * E + E):
        rows = [key(w, token) for w, ids in enumerate(routed) for token, _ in (ids == expert).nonzero().tolist()]
        tiles = [rows[first:first + ROW_ALIGNMENT] for first in range(0, len(rows), ROW_ALIGNMENT)]
        keys += map(max if arriving else min, tiles)
    return sorted(range(len(keys)), key=keys.__getitem__)


def fed(case: Case, parts: int) -> None:
    """Another process plays the GEMM: rows come one tile after the other, in the order that the plan asks for."""
    exchange = Fed(memory_of_all_cases(), NAME, feeds=True)
    memory, want = exchange.memory, expected(case, exchange.memory.group)
    memory.begin_case()
    plan = exchange.plan(want["inputs"][0], case.local_experts)
    y_PH, _ = want["answers"]
    given_PH = shared_like(y_PH).fill_(float("nan"))
    with fake_gpu(memory), mock.patch.multiple(nvlink_transport, MOST_PARTS=parts, LEAST_TILES=0.001):
        assert exchange.feed(plan, case.hidden, case.dtype, case.wire, 0.0, 1) is None
        feed = exchange.feed(plan, case.hidden, case.dtype, case.wire, 1.0, 1)
        assert feed.order.tolist() == wanted_order(case, parts)
        assert feed.parts == (parts if plan.num_rows else 1)
        feed = replace(feed, done=shared_like(feed.done).zero_())
        gemm = os.fork()
        if gemm == 0:
            compute(y_PH, given_PH, feed)
        y_TH, _ = exchange.start_combine(plan, given_PH, case.wire, case.dtype, feed=feed).results
        assert os.waitpid(gemm, 0)[1] == 0
    memory.check()
    same("y", want["y"], y_TH)
    memory.end_case()


def compute(y_PH: torch.Tensor, given_PH: torch.Tensor, feed: Feed) -> None:
    """What the process does that plays the GEMM: half a tile's rows, counted, then the other half."""
    try:
        y, given = (t.view(torch.uint8).numpy() for t in (y_PH, given_PH))
        done = feed.done.numpy()
        for first in (64 * half for tile in feed.order.tolist() for half in (2 * tile, 2 * tile + 1)):
            time.sleep(0.005)
            given[first:first + 64] = y[first:first + 64]
            done[first // ROW_ALIGNMENT] += -(-y_PH.shape[1] // 128)
        os._exit(0)
    finally:
        os._exit(1)


def shared_like(x: torch.Tensor) -> torch.Tensor:
    """Memory that a forked process shares."""
    if x.numel() == 0:
        return torch.empty_like(x)
    return torch.frombuffer(mmap.mmap(-1, x.nbytes), dtype=torch.uint8).view(x.dtype).view(x.shape)


def starved() -> str:
    """The first rank's GEMM never runs. The other begins later: what the first one then sends would be in time."""
    memory, case = new_memory(), Case(tokens=(30, 20))
    exchange = Fed(memory, NAME, feeds=True)
    plan = exchange.plan(case.inputs(2)[memory.rank][0], case.local_experts)
    with fake_gpu(memory):
        feed = exchange.feed(plan, case.hidden, case.dtype, PLAIN, 1.0, 1)
        feed.done.fill_(2 * memory.rank)
        time.sleep(memory.rank)
        exchange.start_combine(plan, torch.zeros(plan.num_rows, case.hidden, dtype=BF16), PLAIN, BF16, feed=feed)
    with pytest.raises(PeerFailure) as caught:
        memory.check()
    dist.barrier()
    return str(caught.value)


def test_a_gemm_that_does_not_run_is_an_error_on_every_rank(ranks2):
    own, other = ranks2.run(starved)
    assert "rank 0 waited in vain for its own GEMM" in own and "phase combine" in own
    assert "rank 1 waited in vain for rank 0 in" in other and "phase combine" in other


def unplanned(case: Case) -> str:
    """More rows than the capacity: there are no places that an order could be made of."""
    memory = new_memory()
    exchange = Fed(memory, NAME, feeds=True, capacity_factor=1.0)
    plan = exchange.plan(case.inputs(2)[memory.rank][0], case.local_experts)
    with fake_gpu(memory):
        feed = exchange.feed(plan, case.hidden, case.dtype, PLAIN, 1.0, 1)
    with pytest.raises(PeerFailure) as caught:
        memory.check()
    assert feed.order.tolist() == list(range(len(feed.order)))
    dist.barrier()
    return str(caught.value)


def test_without_places_there_is_an_order_and_the_error_of_the_plan(ranks2):
    for text in ranks2.run(unplanned, Case(tokens=(700, 700), routing="one rank", local_experts=1)):
        assert "more than its capacity" in text


@pytest.mark.parametrize("change, parts", [
    ({}, 1), ({"tokens": (700, 300), "top_k": 1, "wire": MX128}, 4), ({"tokens": (90, 600), "routing": "skewed"}, 3),
    ({"tokens": (500, 500), "routing": "dropped", "wire": MX32, "top_k": 3}, 2),
    ({"tokens": (0, 400), "routing": "one expert", "hidden": 160}, 2), ({"hidden": 544, "wire": MX128}, 2),
    ({"tokens": (900, 800), "routing": "one after the other", "top_k": 1}, 4)], ids=str)
def test_a_combine_that_a_gemm_feeds(ranks2, change, parts):
    ranks2.run(fed, Case(**change), parts)


# ---------------------------------------------------------------- beside the GEMM that begins with its rows


class Ahead(NVLink):
    """Dispatches beside the GEMM of their rows however little it gains."""

    def sms_ahead(self, *args):
        return 2, 0.4


def brought(case: Case, parts: int) -> None:
    """All rows are there, and counted, when the dispatch has ended."""
    exchange = Ahead(memory_of_all_cases(), NAME)
    memory, want = exchange.memory, expected(case, exchange.memory.group)
    memory.begin_case()
    expert_TK, x_TH, weight_TK = want["inputs"]
    plan = exchange.plan(expert_TK, case.local_experts)
    with fake_gpu(memory), mock.patch.object(Ahead, "_runs", lambda *args: parts):
        x_PH, weight_P, arrival = exchange.start_dispatch(plan, x_TH, case.wire, weight_TK, gemm_seconds=1.0)
        if tiles := plan.num_rows // ROW_ALIGNMENT:
            arrival.begin(), arrival.end()
    memory.check()
    same("x", want["x"], x_PH)
    same("weight", want["weight"], weight_P)
    if tiles == 0:
        assert arrival is None
    else:
        assert arrival.arrived.tolist() == [ROW_ALIGNMENT] * tiles
        assert arrival.order.tolist() == wanted_order(case, parts, arriving=True)
        assert (arrival.sms, arrival.first) == (2, min(tiles, math.ceil(0.4 * tiles / 16) * 16))
        assert arrival.failed.item() == 0
    memory.end_case()


@pytest.mark.parametrize("change, parts", [
    ({}, 1), ({"tokens": (700, 300), "top_k": 1}, 4), ({"tokens": (90, 600), "routing": "skewed"}, 3),
    ({"tokens": (500, 500), "routing": "dropped", "top_k": 3}, 2),
    ({"tokens": (0, 400), "routing": "one expert", "hidden": 160, "dtype": torch.float16}, 2),
    ({"tokens": (900, 2800), "routing": "one after the other", "top_k": 1, "dtype": torch.float32}, 4)], ids=str)
def test_a_dispatch_whose_rows_a_gemm_awaits(ranks2, change, parts):
    ranks2.run(brought, Case(**{"wire": MX128} | change), parts)


def test_a_dispatch_of_three_ranks_whose_rows_a_gemm_awaits(ranks3):
    ranks3.run(brought, Case(wire=MX128, tokens=(400, 0, 300), top_k=3), 3)


def test_eight_ranks(ranks8):
    case = Case(wire=MX128, tokens=(400, 0, 300, 100, 7, 0, 50, 200), top_k=3)
    ranks8.run(brought, case, 3), ranks8.run(fed, case, 3)
