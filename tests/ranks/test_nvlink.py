# SPDX-License-Identifier: Apache-2.0
"""The NVLink transport on ranks without GPUs, over the emulator of CUDA: the table of exchanges, rows that do not fit,
and errors that name peers that fail."""

import io
import os
import re
import signal
import threading
import time
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from unittest import mock

import conformance
import deepspeed.comm as dist
import emulator
import nvlink_cases as cases
import pytest
import torch
import torch.distributed
from conformance import HARD, MX32, MX128, OF_KERNELS, PLAIN, PROBLEMS, Problem, check, expected, same, until
from nvlink_cases import NAME, layer
from rank_pool import KEPT_GROUPS, set_timeout
from slow import slow_except
from test_expert_ffn import RECIPES

from ds_mxfp8_moe.transport import deadline, kernel_reports, peer_memory
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.deadline import PeerFailure
from ds_mxfp8_moe.transport.nvlink import LEAST_CHUNK, NVLink, _chunk
from ds_mxfp8_moe.transport.peer_memory import PeerMemory

FIRST_EPOCH = 0xFFFFFFF0  # wraps within the first cases
DEADLINE = timedelta(seconds=4)  # kernels wait for nine sixteenths of it
SPARE_SECONDS = 15  # for a busy machine

REASON = emulator.obstacle()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"the emulator needs nvcc: {REASON}")


@pytest.fixture(scope="module", autouse=True)
def built():
    """Builds the emulator once, before ranks load it while a deadline runs."""
    emulator.build()


class Watched(PeerMemory):
    """Staging that knows which bytes no exchange may write, to check them."""

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
    """Exchanges on one or two multiprocessors, since the machine has few cores."""
    return NVLink(memory, NAME, **{"sms": 1 + memory.epoch // 4 % 2} | keys)


def in_case(check, *args, **keys) -> None:
    memory = memory_of_all_cases()
    memory.begin_case()
    check(*args, nvlink(memory, **keys))
    memory.end_case()
    memory.reports.check()


QUICK = [*((2, name) for name in (*HARD, "mxfp8", "floor", "floor, blocks of 128", "many scales", "float32 answers",
                                  "not contiguous, plain", *OF_KERNELS)),
         (3, "dropped, plain"), (4, "random"), (4, "many experts")]
SLOW = [(8, "skewed"), (3, "more choices than experts"), (4, "one rank has tokens"), (8, "dropped"), (8, "one rank"),
        (8, "more rows than a tile")]


@pytest.mark.parametrize("ranks, name", slow_except(QUICK + SLOW, *QUICK))
def test_same_bits(request, ranks, name):
    request.getfixturevalue(f"ranks{ranks}").run(in_case, check, (PROBLEMS | OF_KERNELS)[name])


def refused_calls(exchange: NVLink) -> None:
    memory = exchange.memory
    with pytest.raises(ValueError, match="block.3.moe: 33 choices a token, and the nvlink transport takes 32"):
        exchange.plan(torch.zeros((2, 33), dtype=torch.int64), 4)
    with mock.patch.object(PeerMemory, "capturing", True), \
         pytest.raises(RuntimeError, match="block.3.moe: a CUDA graph cannot capture .* With \"capacity_factor\""):
        exchange.plan(torch.zeros((2, 1), dtype=torch.int64), 4)
    plan = exchange.plan(torch.zeros((2, 1), dtype=torch.int64), 4)
    with pytest.raises(TypeError, match="rows of torch.bfloat16 for a result of torch.float16, expected rows of"):
        exchange.combine(plan, torch.zeros((plan.num_rows, 32), dtype=torch.bfloat16), PLAIN, torch.float16)
    check(Problem(tokens=(3, 2), top_k=32), exchange)
    assert not memory.reports.captured


def test_calls_that_it_cannot_make(ranks2):
    """Every rank refuses the call before the exchange, and can go on. 32 choices, one a lane, are possible."""
    ranks2.run(in_case, refused_calls)


def check_tokens(exchange: NVLink) -> None:
    with pytest.raises(ValueError, match="block.3.moe: 524289 tokens of 32 choices among 8 experts are more .* "
                                         "smaller micro-batches"):
        exchange.plan(torch.zeros((512 * 1024 + 1, 32), dtype=torch.int64), 4)
    assert exchange.memory.extension.fits(2, 8, 32, 512)
    assert exchange.memory.extension.fits(8, 5768, 8, 16) and not exchange.memory.extension.fits(8, 5824, 8, 16)
    check(Problem(tokens=(3, 2), top_k=2), exchange)


def test_more_tokens_than_places_holds(ranks2):
    """Every rank refuses the call before the exchange, and can go on."""
    ranks2.run(in_case, check_tokens)


@pytest.mark.parametrize("reverse", [False, True])
def test_plans_in_flight(ranks2, reverse):
    ranks2.run(in_case, in_flight, reverse)


def in_flight(reverse: bool, exchange: NVLink) -> None:
    conformance.check_in_flight(exchange, reverse=reverse)


def check_waits(wanted: list, exchange: NVLink) -> None:
    """`wanted`: how often the host has waited when the plan's `meanwhile` is called, and after the plan."""
    case, memory, seen = Problem(tokens=(25, 25)), exchange.memory, []
    expert_TK = case.inputs(dist.get_world_size())[dist.get_rank()][0]
    before = memory.reports.host_waits
    exchange.plan(expert_TK, case.local_experts, lambda: seen.append(memory.reports.host_waits - before))
    assert [*seen, memory.reports.host_waits - before] == wanted


@pytest.mark.parametrize("capacity_factor, wanted", [(None, [0, 1]), (4.0, [0])])
def test_the_host_has_something_to_do_before_it_waits(ranks2, capacity_factor, wanted):
    ranks2.run(in_case, check_waits, wanted, capacity_factor=capacity_factor)


def many_chunks(exchange: NVLink) -> int:
    """There are more chunks than blocks, and more rows than the staging has room for."""
    before = exchange.memory.half_bytes
    check(Problem(tokens=(530, 390, 0, 0), hidden=512, wire=PLAIN, dtype=torch.float32), exchange)
    grown = exchange.memory.half_bytes
    check(Problem(), exchange)
    assert before <= grown == exchange.memory.half_bytes >= 2 << 20
    return grown


def test_many_chunks_and_a_staging_that_grows(ranks2):
    ranks2.run(in_case, many_chunks)


def most_chunks(exchange: NVLink) -> None:
    """There are as many chunks as flags."""
    tokens = LEAST_CHUNK * exchange.memory.extension.MAX_CHUNKS
    check(Problem(tokens=(tokens, 2100, 0, 0), top_k=1, hidden=32, wire=MX32), exchange)


def test_chunks_grow_with_the_tokens():
    assert [_chunk(tokens, 2, 1024) for tokens in (0, 1, 16384, 16385, 131072)] == [16, 16, 16, 32, 128]
    assert [_chunk(tokens, 8, 1024) for tokens in (8192, 8193, 32768, 131072)] == [16, 32, 32, 128]


@pytest.mark.slow
def test_a_rank_with_the_most_chunks(ranks2):
    ranks2.run(in_case, most_chunks)


SMALL = Problem(tokens=(40, 40), wire=MX32)


def planned(**keys) -> tuple:
    """SMALL with its own staging: (the transport, its plan, the rest of dispatch's arguments, what is expected)."""
    memory = new_memory()
    exchange, want = nvlink(memory, **keys), expected(SMALL, memory.rank, memory.world_size)
    expert_TK, x_TH, weight_TK = want["inputs"]
    return exchange, exchange.plan(expert_TK, SMALL.local_experts), (x_TH, SMALL.wire, weight_TK), want


def grow_apart() -> None:
    memory = new_memory()
    before = memory.half_bytes
    text = r"rank 0 \d+ bytes for 'dispatch' of a, rank 1 \d+ bytes for 'dispatch' of b"
    with pytest.raises(RuntimeError, match=text):
        memory.reserve(before + 1 + (dist.get_rank() << 22), f"'dispatch' of {'ab'[dist.get_rank()]}")
    assert memory.half_bytes == before
    memory.reserve(before + 1, "'dispatch' of a")
    check(Problem(), nvlink(memory))


def test_a_staging_that_is_to_grow_differently_raises_on_every_rank(ranks2):
    ranks2.run(grow_apart)


class Refusing(emulator.Shared):
    """Rank 1 has no memory left."""

    @staticmethod
    def empty(size, device):
        if dist.get_rank() == 1:
            raise MemoryError("none is left")
        return emulator.Shared.empty(size, device)


class Unloadable:
    """The extension, whose kernels rank 1 cannot load."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)

    def load(self):
        if dist.get_rank() == 1:
            raise RuntimeError("no kernel image")


def unloadable() -> int:
    """How often this rank asks for memory, which over NVSHMEM would wait for rank 1."""
    group, provider = torch.distributed.new_group(), mock.Mock()
    with pytest.raises(peer_memory.NoStaging, match="rank 1: RuntimeError: no kernel image"):
        PeerMemory(group, Unloadable(emulator.load(dist.get_rank())), provider=provider)
    return provider.empty.call_count


def test_kernels_that_one_rank_cannot_load_raise_on_every_rank_before_memory_is_allocated(ranks2):
    assert ranks2.run(unloadable) == [0, 0]


class Unreachable(emulator.Shared):
    """Rank 1 has memory, but cannot reach that of the others."""

    @staticmethod
    def addresses(*args):
        found = emulator.Shared.addresses(*args)
        if dist.get_rank() == 1:
            raise RuntimeError("peer access is refused")
        return found


def refused(provider: type, text: str) -> None:
    """Every rank raises the same error, and exchanges over the old staging go on."""
    memory = new_memory()
    with mock.patch.object(memory, "_provider", provider):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=text):
                memory.reserve(memory.half_bytes + 1, "a larger batch")
    check(Problem(), nvlink(memory))
    with pytest.raises(RuntimeError, match=text):
        PeerMemory(memory.group, memory.extension, provider=provider)


@pytest.mark.parametrize("provider, text", [(Refusing, "rank 1: MemoryError: none is left"),
                                            (Unreachable, "rank 1: RuntimeError: peer access is refused")])
def test_memory_that_one_rank_lacks_or_does_not_reach_raises_on_every_rank(ranks2, provider, text):
    ranks2.run(refused, provider, text)


def never_launched() -> None:
    """Memory runs out twice on every rank after a dispatch was counted and before it is launched. Then the staging
    grows."""
    exchange, plan, rest, want = planned()
    memory = exchange.memory
    for _ in range(2):
        with mock.patch.object(torch, "empty", side_effect=MemoryError), pytest.raises(MemoryError):
            exchange.dispatch(plan, *rest)
    memory.reserve(memory.half_bytes + 1, "a larger batch")
    time.sleep(memory.rank / 2)  # rank 0 waits for rank 1's rows
    x_PH, weight_P = exchange.dispatch(plan, *rest)
    same("x", want["x"][:want["end"]], until(x_PH, want["end"])), same("weight", want["weight"], weight_P)
    memory.reports.check()


def test_exchanges_that_were_never_launched(ranks2):
    ranks2.run(never_launched)


# ---------------------------------------------------------------- peers that fail


def new_memory() -> Watched:
    """Staging of a new group with DEADLINE."""
    group = torch.distributed.new_group()
    set_timeout(DEADLINE, group)
    return Watched(group)


def failing(phase: str) -> tuple | None:
    return cases.failing(phase, Problem(tokens=(20, ) * 4), nvlink(new_memory()))


@pytest.mark.parametrize("phase", slow_except(["counts", "dispatch", "combine"], "dispatch"))
def test_a_peer_that_does_not_come_is_named_in_time(ranks3, phase):
    seconds = DEADLINE.total_seconds()
    cases.named_in_time(ranks3.run(failing, phase), phase, 0.55 * seconds, seconds + SPARE_SECONDS)


def gone_on() -> None:
    """In a dispatch, rank 0's wait for rank 1 ends at the deadline. It makes its next plan before its host looks, and
    does not overwrite what rank 1 has yet to read."""
    exchange, plan, rest, want = planned(capacity_factor=2.0)
    memory = exchange.memory
    if memory.rank == 0:
        exchange.dispatch(plan, *rest)
        with pytest.raises(PeerFailure, match="until the deadline, for rank 1"):
            memory.reports.check()
        with mock.patch.object(memory.reports, "check"):
            y_PH = torch.zeros(plan.num_rows, SMALL.hidden, dtype=SMALL.dtype)
            exchange.combine(plan, y_PH, SMALL.wire, SMALL.dtype)
            exchange.plan(want["inputs"][0], SMALL.local_experts)
    dist.barrier()
    if memory.rank == 1:
        x_PH, weight_P = exchange.dispatch(plan, *rest)
        same("x", want["x"][:want["end"]], until(x_PH, want["end"]))
        same("weight", want["weight"][:want["end"]], weight_P[:want["end"]])
    dist.barrier()


def test_a_rank_that_has_failed_writes_nowhere(ranks2):
    ranks2.run(gone_on)


def patient(seconds: float) -> None:
    with mock.patch.object(kernel_reports, "set_deadline", lambda *group: seconds):
        check(Problem(), nvlink(Watched(torch.distributed.new_group())))


@pytest.mark.parametrize("seconds", [float("inf"), timedelta.max.total_seconds()])
def test_a_deadline_beyond_what_kernels_count(ranks2, seconds):
    """There is no deadline where a backend has its own rules."""
    ranks2.run(patient, seconds)


def confused(how: str) -> str | None:
    text = cases.confused(how, Problem(tokens=(20, ) * 4), nvlink(new_memory()))
    dist.barrier()
    return text


@pytest.mark.parametrize("how", cases.CONFUSIONS)
def test_ranks_in_different_calls_raise(ranks3, how):
    cases.all_noticed(ranks3.run(confused, how))


def mixed_up(keys: tuple) -> str:
    """Plans of equal shapes, but rank 0's is of another layer, or for tokens of another dtype."""
    memory = new_memory()
    name, rows = keys if memory.rank == 0 else (NAME, "tokens of 64 torch.bfloat16")
    exchange = NVLink(memory, name, 1)
    with pytest.raises(PeerFailure) as caught:
        exchange.plan(torch.zeros((4, 1), dtype=torch.int64), 2, rows=rows)
        memory.reports.check()
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("keys", [("block.4.moe", "tokens of 64 torch.bfloat16"),
                                  (NAME, "tokens of 64 torch.float16")])
def test_plans_of_different_layers_or_dtypes_raise(ranks2, keys):
    for rank, text in enumerate(ranks2.run(mixed_up, keys)):
        assert f"rank {rank}: exchange" in text and f"rank {1 - rank} is in another call, of another layer" in text


def mixed_up_in_backward() -> str:
    """Rank 0 sends the gradients of one layer, rank 1 those of another, by plans of equal shapes."""
    memory = new_memory()
    layers = [NVLink(memory, f"block.{i}.moe", 1) for i in range(2)]
    plans = [layer.plan(torch.arange(4).view(4, 1), 2) for layer in layers]
    with pytest.raises(PeerFailure) as caught:
        layers[memory.rank].dispatch(plans[memory.rank], torch.ones(4, 32), PLAIN, phase="dispatch of the gradient")
        memory.reports.check()
    dist.barrier()
    return str(caught.value)


def test_gradients_of_different_layers_raise(ranks2):
    for rank, text in enumerate(ranks2.run(mixed_up_in_backward)):
        assert f"'dispatch of the gradient' of block.{rank}.moe: rank {1 - rank} is in another call" in text, text


def interrupted() -> float:
    """Ctrl-C while the host waits for counts that do not come."""
    memory = new_memory()
    memory.reports.seconds = 30.0
    memory.reports.next_serial()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        memory.reports.wait_for_counts(NAME)
    signal.signal(signal.SIGINT, handler)
    return time.monotonic() - start


def test_the_host_s_wait_can_be_interrupted(ranks2):
    assert max(ranks2.run(interrupted)) < 30


def uncounted(error: Exception | None) -> tuple:
    """The host waits for counts that do not come, since no kernel is launched. With `error`, an earlier one failed."""
    memory, out = new_memory(), io.StringIO()
    memory.reports.seconds = 1.5
    memory.reports.next_serial()
    stream = SimpleNamespace(query=mock.Mock(side_effect=error))
    with redirect_stdout(out), mock.patch.object(deadline, "QUIET_SECONDS", 0.2), \
         mock.patch.object(memory.reports, "_on_gpu", error is not None), \
         mock.patch.object(kernel_reports, "get_accelerator", lambda: SimpleNamespace(current_stream=lambda: stream)):
        with pytest.raises(RuntimeError) as caught:
            memory.reports.wait_for_counts(NAME)
    return type(caught.value), str(caught.value), out.getvalue()


def test_an_error_of_an_earlier_kernel_ends_the_host_s_wait(ranks2):
    error = torch.AcceleratorError("device-side assert triggered")
    assert ranks2.run(uncounted, error) == [(torch.AcceleratorError, str(error), "")] * 2


def test_the_host_says_what_it_waits_for(ranks2):
    for rank, (kind, text, said) in enumerate(ranks2.run(uncounted, None)):
        assert kind is PeerFailure and "in 'counts' of block.3.moe" in text and "All ranks came" in text
        assert said == (f"mxfp8_moe: rank {rank} has waited for 0 s in 'counts' of block.3.moe, for one of ranks "
                        f"[{1 - rank}]. The deadline is at 1 s\n")


def overflowing() -> str:
    memory = new_memory()
    exchange, case = nvlink(memory, capacity_factor=1.0), Problem(tokens=(600, ) * 4, routing="one expert")
    expert_TK, x_TH, _ = case.inputs(dist.get_world_size())[dist.get_rank()]
    with pytest.raises(PeerFailure) as caught:
        exchange.dispatch(exchange.plan(expert_TK, case.local_experts), x_TH, MX32)
        memory.reports.check()
    dist.barrier()
    return str(caught.value)


def test_too_many_rows_for_a_capacity(ranks2):
    for text in ranks2.run(overflowing):
        assert '"on_overflow": "drop"' in text
        assert re.search(rf"'counts' of {NAME}, with room for \d+ rows: rank 1 would get \d+ rows, more than", text)


# ---------------------------------------------------------------- choices that do not fit are dropped

DROPPING = {"capacity_factor": 1.0, "on_overflow": "drop"}
HOT = Problem(tokens=(160, ) * 4, top_k=2, local_experts=1, routing="one expert", hidden=32)


@pytest.mark.parametrize("change", [
    {}, {"wire": MX128, "dtype": torch.float32}, {"local_experts": 2, "tokens": (300, ) * 2, "top_k": 3,
                                                  "routing": "skewed", "wire": MX32},
    {"local_experts": 3, "tokens": (300, ) * 2, "routing": "one rank", "wire": MX128}], ids=str)
def test_rows_that_do_not_fit_are_dropped(ranks2, change):
    ranks2.run(in_case, cases.check_dropped, replace(HOT, **change), **DROPPING)


@pytest.mark.parametrize("change", [{}, {"local_experts": 4, "tokens": (420, ) * 3, "routing": "skewed"}], ids=str)
def test_three_ranks_lose_the_same_share(ranks3, change):
    ranks3.run(in_case, cases.check_dropped, replace(HOT, **change), **DROPPING)


@pytest.mark.parametrize("change", [{"wire": MX128}, {"routing": "dropped"}, {"routing": "nowhere", "wire": MX32}],
                         ids=str)
@pytest.mark.parametrize("keys", [{"capacity_factor": 2.0}, DROPPING], ids=str)
def test_nothing_is_dropped_where_all_rows_fit(ranks2, change, keys):
    ranks2.run(in_case, check_nothing_dropped, Problem(**{"tokens": (25, 25)} | change), **keys)


def check_nothing_dropped(case: Problem, exchange: NVLink) -> None:
    before = exchange.dropped
    cases.check_static(case, exchange)
    assert exchange.dropped == before


def warned() -> list:
    """What each step's check prints, if layers drop choices in some steps."""
    memory, lines = new_memory(), []
    expert_TK = HOT.inputs(dist.get_world_size())[memory.rank][0]
    with mock.patch.object(kernel_reports, "STEPS_BETWEEN_WARNINGS", 3):
        for step in range(7):
            for name in ("one", "two") if step in (1, 3) else ("one", ) if step == 5 else ():
                NVLink(memory, name, 1, **DROPPING).plan(expert_TK, HOT.local_experts)
            with redirect_stdout(io.StringIO()) as out:
                memory.wait_and_check()
            lines.append(out.getvalue().splitlines())
    assert (NVLink(memory, "one").dropped, NVLink(memory, "three").dropped) == (3 * lost(memory.rank), 0)
    return lines


def too_many_layers() -> None:
    memory = new_memory()
    with mock.patch.object(kernel_reports, "MOST_DROPPING", 1):
        assert memory.reports.dropped.address("one") == memory.reports.dropped.address("one")
        with pytest.raises(ValueError, match="two: a group counts the dropped choices of 1 layers at most"):
            memory.reports.dropped.address("two")
        memory.wait_and_check()


def test_more_layers_than_counters(ranks2):
    ranks2.run(too_many_layers)


def lost(rank: int) -> int:
    return (2 * 320 - 512) * rank  # rank 1 has the expert, and room for 320 + 127 rows, padded


def test_a_line_says_how_many_choices_were_dropped(ranks2):
    zero, one = ranks2.run(warned)
    assert zero == [[]] * 7

    def line(name, times):
        return (f"mxfp8_moe: WARNING: {name}: {times * lost(1)} choices for the experts of rank 1 were dropped since "
                'the last such line: more rows came than fit. To drop fewer, raise "capacity_factor"')

    assert one == [[], [line("one", 1), line("two", 1)], [], [], [line("one", 1), line("two", 1)], [], []]


def check_layer_dropped(recipe, exchange: NVLink) -> None:
    cases.check_layer_dropped(recipe, Collective(exchange.memory.group, "the oracle"), exchange)


@pytest.mark.parametrize("recipe_name", ["hp-128", "bf16"])
def test_a_layer_that_drops_computes_the_same_bits(ranks2, recipe_name):
    ranks2.run(in_case, check_layer_dropped, RECIPES[recipe_name], **DROPPING)


# ---------------------------------------------------------------- whole layers


def check_layer(recipe, kwargs: dict, exchange: NVLink) -> None:
    want, got = (layer(transport, recipe, **kwargs)
                 for transport in (Collective(exchange.memory.group, "the oracle"), exchange))
    for key, value in want.items():
        same(key, value, got[key])


def elsewhere_by_default() -> None:
    want = layer(Collective(torch.distributed.new_group(), "the oracle"), RECIPES["hp-128"])
    with torch.device("meta"):
        memory = new_memory()
    for key, value in layer(nvlink(memory), RECIPES["hp-128"]).items():
        same(key, want[key], value)


def test_what_is_the_host_s_is_there_whatever_the_default_device(ranks2):
    ranks2.run(elsewhere_by_default)


# A transport sees no more of a recipe than the format of rows. In the last one, rows of all four exchanges are MXFP8.
@pytest.mark.parametrize("recipe_name", ["hp-128", "bf16", "all-wires-mxfp8"])
def test_a_layer_computes_the_same_bits(ranks2, recipe_name):
    ranks2.run(in_case, check_layer, RECIPES[recipe_name], {})


@pytest.mark.parametrize("change", [{"routing": "dropped"}, {"routing": "nowhere"}, {"tokens": (0, 20)}], ids=str)
def test_a_layer_of_another_kind(ranks2, change):
    ranks2.run(in_case, check_layer, RECIPES["hp-128"], {"bias": True} | change)
