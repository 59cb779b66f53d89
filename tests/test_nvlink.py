# SPDX-License-Identifier: Apache-2.0
"""The NVLink transport on ranks without GPUs, over the emulator of CUDA: the collective transport's bits, and what is
said of peers that fail."""

import math
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from unittest import mock

import deepspeed.comm as dist
import emulator
import nvlink_cases as cases
import pytest
import torch
import torch.distributed
from nvlink_cases import BF16, MX32, MX128, PLAIN, Case, expected, same
from ranks import KEPT_GROUPS
from test_expert_ffn import RECIPES, formula
from test_expert_ffn import problem as ffn_problem
from torch.distributed import distributed_c10d as c10d

from ds_mxfp8_moe.expert_ffn import ExpertFFN
from ds_mxfp8_moe.routing import Routes
from ds_mxfp8_moe.transport import ROW_ALIGNMENT, Feed, overlap, peer_memory
from ds_mxfp8_moe.transport import nvlink as nvlink_transport
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.deadline import PeerFailure
from ds_mxfp8_moe.transport.nvlink import NVLink, _chunk
from ds_mxfp8_moe.transport.peer_memory import PeerMemory

FIRST_EPOCH = 0xFFFFFFF0  # wraps within the first cases
DEADLINE = timedelta(seconds=4)  # of which the kernels take three quarters
SPARE_SECONDS = 15  # for a busy machine
NAME = "block.3.moe"

REASON = emulator.obstacle()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"the emulator needs nvcc: {REASON}")


@pytest.fixture(scope="module", autouse=True)
def built():
    """Once, before ranks look for it with a deadline in their backs."""
    emulator.build()


class Watched(PeerMemory):
    """Staging of which every byte that no exchange may use is known."""

    def __init__(self, group, first_epoch: int = 1):
        with mock.patch.object(peer_memory, "FIRST_BYTES", 1 << 20):  # so that it grows
            super().__init__(group, emulator.load(dist.get_rank()), first_epoch, emulator.Shared)

    def _allocate(self, half_bytes, where):
        self.used = 0
        super()._allocate(half_bytes, where)

    def reserve(self, needed, where):
        super().reserve(needed, where)
        self.used = max(self.used, needed)

    def begin_case(self) -> None:
        dist.barrier(group=self.group)
        self._staging[self.extension.HALVES_AT:].fill_(emulator.POISON)
        self.used = 0
        dist.barrier(group=self.group)

    def end_case(self) -> None:
        """No rank wrote behind what exchanges of this case reserved in a half."""
        dist.barrier(group=self.group)
        for half in self._staging[self.extension.HALVES_AT:].view(2, -1):
            assert (half[self.used:] == emulator.POISON).all()


@cache
def memory_of_all_cases() -> Watched:
    group = torch.distributed.new_group()
    KEPT_GROUPS.add(group)
    return Watched(group, FIRST_EPOCH)


def nvlink(memory: PeerMemory, **keys) -> NVLink:
    """Few blocks, for few cores: of one multiprocessor, or two."""
    return NVLink(memory, NAME, **{"sms": 1 + memory.epoch // 4 % 2} | keys)


def in_case(check, *args, **keys) -> None:
    memory = memory_of_all_cases()
    memory.begin_case()
    check(*args, nvlink(memory, **keys))
    memory.end_case()


@pytest.mark.parametrize("name", cases.CASES)
def test_same_bits_on_two_ranks(ranks2, name):
    ranks2.run(in_case, cases.check, cases.CASES[name])


@pytest.mark.parametrize("name", ["mxfp8", "skewed", "dropped, plain", "more choices than experts"])
def test_same_bits_on_three_ranks(ranks3, name):
    ranks3.run(in_case, cases.check, cases.CASES[name])


@pytest.mark.parametrize("name", ["random", "one rank", "one rank has tokens", "dropped", "many experts"])
def test_same_bits_on_four_ranks(ranks4, name):
    ranks4.run(in_case, cases.check, cases.CASES[name])


@pytest.mark.parametrize("change", [{}, {"wire": MX32}, {"routing": "dropped", "wire": MX128}, {"top_k": 8}], ids=str)
def test_without_deduplication(ranks2, change):
    ranks2.run(in_case, cases.check_without_deduplication, Case(**{"top_k": 3} | change))


@pytest.mark.parametrize("change", [{"wire": MX128}, {"routing": "dropped"}, {"routing": "nowhere", "wire": MX32}],
                         ids=str)
def test_with_a_capacity(ranks2, change):
    ranks2.run(in_case, cases.check_static, Case(**{"tokens": (25, 25)} | change), capacity_factor=2.0)


@pytest.mark.parametrize("reverse", [False, True])
def test_plans_in_flight(ranks2, reverse):
    ranks2.run(in_case, check_interleaved, reverse)


def check_waits(wanted: list, exchange: NVLink) -> None:
    """How often the host had waited when the plan's `meanwhile` was called, and after the plan."""
    case, memory, seen = Case(tokens=(25, 25)), exchange.memory, []
    expert_TK = case.inputs(dist.get_world_size())[dist.get_rank()][0]
    before = memory.host_waits
    exchange.plan(expert_TK, case.local_experts, lambda: seen.append(memory.host_waits - before))
    assert [*seen, memory.host_waits - before] == wanted


@pytest.mark.parametrize("capacity_factor, wanted", [(None, [0, 1]), (4.0, [0])])
def test_the_host_has_something_to_do_before_it_waits(ranks2, capacity_factor, wanted):
    ranks2.run(in_case, check_waits, wanted, capacity_factor=capacity_factor)


def check_interleaved(reverse: bool, exchange: NVLink) -> None:
    cases.check_interleaved((Case(wire=MX128, top_k=3), Case(routing="skewed", hidden=160, seed=8)), exchange, reverse)


def many_chunks(exchange: NVLink) -> int:
    """More chunks than blocks, and more rows than the staging had room for."""
    before = exchange.memory.half_bytes
    cases.check(Case(tokens=(530, 390, 0, 0), hidden=512, wire=PLAIN, dtype=torch.float32), exchange)
    grown = exchange.memory.half_bytes
    cases.check(Case(), exchange)
    assert before <= grown == exchange.memory.half_bytes >= 2 << 20
    return grown


def test_many_chunks_and_a_staging_that_grows(ranks2):
    ranks2.run(in_case, many_chunks)


def grow_apart() -> None:
    memory = new_memory()
    before = memory.half_bytes
    text = r"rank 0 \d+ bytes for 'dispatch' of a, rank 1 \d+ bytes for 'dispatch' of b"
    with pytest.raises(RuntimeError, match=text):
        memory.reserve(before + 1 + (dist.get_rank() << 22), f"'dispatch' of {'ab'[dist.get_rank()]}")
    assert memory.half_bytes == before
    memory.reserve(before + 1, "'dispatch' of a")
    cases.check(Case(), nvlink(memory))


def test_a_staging_that_is_to_grow_differently_raises_on_every_rank(ranks2):
    ranks2.run(grow_apart)


class Refusing(emulator.Shared):
    """Rank 1 has no memory left."""

    @staticmethod
    def empty(size, device):
        if dist.get_rank() == 1:
            raise MemoryError("none is left")
        return emulator.Shared.empty(size, device)


def refused() -> None:
    """Every rank raises alike, and what was set up before goes on."""
    memory, text = new_memory(), r"rank 1: MemoryError: none is left"
    with mock.patch.object(memory, "_provider", Refusing):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=text):
                memory.reserve(memory.half_bytes + 1, "a larger batch")
    cases.check(Case(), nvlink(memory))
    with pytest.raises(RuntimeError, match=text):
        PeerMemory(memory.group, memory.extension, provider=Refusing)


def test_memory_that_one_rank_lacks_raises_on_every_rank(ranks2):
    ranks2.run(refused)


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
    chunk_W = [_chunk(len(ids)) for ids in routed]
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


# ---------------------------------------------------------------- peers that fail


def new_memory() -> Watched:
    """Over a new group with DEADLINE."""
    group = torch.distributed.new_group()
    c10d._set_pg_timeout(DEADLINE, group)
    return Watched(group)


def failing(phase: str, late: int = 1) -> tuple | None:
    """All ranks but `late` come to `phase`: what they raise, after how long, and in which epoch."""
    rank, memory = dist.get_rank(), new_memory()
    exchange, case, told = nvlink(memory), Case(tokens=(20, ) * 4), None
    expert_TK, x_TH, _ = case.inputs(dist.get_world_size())[rank]
    plan = None if phase == "counts" else exchange.plan(expert_TK, case.local_experts)
    y_PH = None if phase != "combine" else exchange.dispatch(plan, x_TH, case.wire)[0]
    if rank != late:
        start, epoch = time.monotonic(), memory.epoch
        with pytest.raises(PeerFailure) as caught:
            if phase == "counts":
                exchange.plan(expert_TK, case.local_experts)
            elif phase == "dispatch":
                exchange.dispatch(plan, x_TH, case.wire)
            else:
                exchange.combine(plan, y_PH, case.wire, case.dtype)
            memory.check()
        told = (caught.value.missing, str(caught.value), time.monotonic() - start, epoch)
        with pytest.raises(PeerFailure):  # the group stays failed, at once
            exchange.plan(expert_TK, case.local_experts)
    dist.barrier()
    return told


@pytest.mark.parametrize("phase", ["counts", "dispatch", "combine"])
def test_a_peer_that_does_not_come_is_named_in_time(ranks3, phase):
    for rank, told in enumerate(ranks3.run(failing, phase)):
        if rank == 1:
            assert told is None
            continue
        missing, text, seconds, epoch = told
        assert missing == (1, ), text
        for part in (f"rank {rank} ", "rank 1", f"'{phase}' of {NAME}", f"phase {phase}, epoch {epoch}"):
            assert part in text, text
        assert 0.7 * DEADLINE.total_seconds() < seconds < DEADLINE.total_seconds() + SPARE_SECONDS


def confused(how: str) -> str | None:
    text = cases.confused(how, Case(tokens=(20, ) * 4), nvlink(new_memory()))
    dist.barrier()
    return text


@pytest.mark.parametrize("how", cases.CONFUSIONS)
def test_ranks_in_different_calls_raise(ranks3, how):
    cases.all_noticed(ranks3.run(confused, how))


def overflowing() -> str:
    memory = new_memory()
    exchange, case = nvlink(memory, capacity_factor=1.0), Case(tokens=(600, ) * 4, routing="one expert")
    expert_TK, x_TH, _ = case.inputs(dist.get_world_size())[dist.get_rank()]
    with pytest.raises(PeerFailure) as caught:
        exchange.dispatch(exchange.plan(expert_TK, case.local_experts), x_TH, MX32)
        memory.check()
    dist.barrier()
    return str(caught.value)


def test_too_many_rows_for_a_capacity(ranks2):
    for text in ranks2.run(overflowing):
        assert "more than its capacity" in text and "rank 1 would get" in text and NAME in text, text


# ---------------------------------------------------------------- whole layers


def layer(transport, recipe, **kwargs) -> dict:
    """A layer's output and every gradient of this rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    experts, xs, grads, routes = ffn_problem(world, "swiglu", num_experts=2 * world, dtype=BF16,
                                             **{"tokens": (9, 14, 0, 5)} | kwargs)
    weights = {role: [e[role].requires_grad_() for e in experts[2 * rank:2 * rank + 2]] for role in experts[0]}
    x, weight = xs[rank].requires_grad_(), routes[rank][1].requires_grad_()
    ffn = ExpertFFN(formula("swiglu"), recipe, transport, 2)
    y = ffn(x, Routes(expert_TK=routes[rank][0], weight_TK=weight, num_experts=2 * world), weights)
    y.backward(grads[rank])
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad,
            **{f"{role} {e}": value.grad for role, values in weights.items() for e, value in enumerate(values)}}


def check_layer(recipe, kwargs: dict, exchange: NVLink) -> None:
    want, got = (layer(transport, recipe, **kwargs)
                 for transport in (Collective(exchange.memory.group, "the oracle"), exchange))
    for key, value in want.items():
        same(key, value, got[key])


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_a_layer_computes_the_same_bits(ranks2, recipe_name):
    ranks2.run(in_case, check_layer, RECIPES[recipe_name], {})


@pytest.mark.parametrize("change", [{"routing": "dropped"}, {"routing": "nowhere"}, {"tokens": (0, 20)}], ids=str)
def test_a_layer_of_another_kind(ranks2, change):
    ranks2.run(in_case, check_layer, RECIPES["hp-128"], {"bias": True} | change)
