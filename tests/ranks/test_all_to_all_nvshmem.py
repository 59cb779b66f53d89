# SPDX-License-Identifier: Apache-2.0
"""AllToAll over NVSHMEM on ranks without GPUs, over the emulators of CUDA and of NVSHMEM. Messages there take
different times, and signals come late, also those of an exchange after those of the next one."""

from functools import cache
from types import ModuleType, SimpleNamespace
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.transport import nvshmem, peer_memory
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.support import all_to_all_cases as cases
from tests.support import emulator
from tests.support.all_to_all_cases import CASES, Call, Case
from tests.support.emulated_nvshmem import FAILURES, Library, machine
from tests.support.rank_pool import KEPT_GROUPS
from tests.support.slow import slow_except

CPU = torch.device("cpu")
FIRST_EPOCH = 0xFFFFFFF0  # wraps within the first cases
REASON = emulator.obstacle()
pytestmark = pytest.mark.slow  # it builds an emulator of its own
needs_nvcc = pytest.mark.skipif(REASON is not None, reason=f"the emulator needs nvcc: {REASON}")

AT_BOUNDS = {
    "most tokens": Case(max_tokens=1023, top_k=1, local_experts=1, hidden=32),
    "most choices": Case(max_tokens=3, top_k=32, local_experts=16, hidden=32),
    "most scales": Case(max_tokens=2, rows="e4m3", hidden=2048, block=32, float_scales=True),
    "one token": Case(max_tokens=1, local_experts=1, top_k=1, hidden=32),
}


@pytest.fixture(scope="module", autouse=True)
def built():
    """Once, before ranks wait for each other."""
    if REASON is None:
        emulator.build_nvshmem()


def new_memory(module: ModuleType, group=None) -> PeerMemory:
    group = group or torch.distributed.new_group()
    KEPT_GROUPS.add(group)
    with mock.patch.object(peer_memory, "FIRST_BYTES", 1 << 20):  # so that it grows
        return PeerMemory(group, module, FIRST_EPOCH, emulator.Heap(module))


@cache
def memory_of_all_cases() -> PeerMemory:
    return new_memory(emulator.load(dist.get_rank(), emulator.build_nvshmem))


def run(case: Case, turns: int = 2, sms: int = 3, memory: PeerMemory | None = None) -> list[str]:
    memory = memory or memory_of_all_cases()
    emulator.set_adversary(memory.extension, True)
    a2a, call, wrong = cases.make(case, memory), Call(case, CPU), []
    a2a.sms = sms
    for turn in range(turns):
        before = emulator.puts(memory.extension)
        wrong += cases.check(call, a2a, turn)
        if (puts := emulator.puts(memory.extension) - before) != call.puts():
            wrong.append(f"{puts} puts, expected {call.puts()}")
    return wrong


@needs_nvcc
@pytest.mark.parametrize("name", [*CASES, *AT_BOUNDS])
def test_rows_reach_their_experts_and_come_back(ranks2, name):
    assert ranks2.run(run, (CASES | AT_BOUNDS)[name]) == [[], []]


@needs_nvcc
@pytest.mark.parametrize("name", ["quantize", "one rank", "nowhere", "ranks without tokens", "NaN, quantize",
                                  "send apart from receive"])
def test_four_ranks(ranks4, name):
    assert ranks4.run(run, CASES[name]) == [[]] * 4


@needs_nvcc
@pytest.mark.parametrize("name", slow_except(["quantize", "one rank", "ranks without tokens"], "one rank"))
def test_twelve_ranks(ranks12, name):
    """More than a peer memory's exchange takes, and more than a block has warps."""
    assert ranks12.run(run, CASES[name], sms=2) == [[]] * 12


REPEATED = Case(max_tokens=12, top_k=3, local_experts=2, rows="quantize", routing="dropped")


@needs_nvcc
def test_call_after_call(ranks4):
    assert ranks4.run(run, REPEATED, turns=20) == [[]] * 4


# ---------------------------------------------------------------- ranks that fail


def failing(which: str) -> str | None:
    module = emulator.load(dist.get_rank(), emulator.build_nvshmem)
    return cases.failing(which, lambda case, group: cases.make(case, new_memory(module, group)), CPU)


@needs_nvcc
def test_ranks_of_other_sizes_raise(ranks2):
    cases.check_other_sizes(ranks2.run(failing, "sizes"))


@needs_nvcc
def test_a_rank_that_does_not_come_is_named(ranks2):
    text, nothing = ranks2.run(failing, "late")
    assert nothing is None and "until the deadline, for rank 1" in text and "AllToAll.dispatch" in text


# ---------------------------------------------------------------- the constructor

SIZES = {"max_num_tokens": 7, "num_experts": 4, "experts_per_token": 2, "world_size": 2, "dp_size": 1,
         "hidden_dim": 64, "hidden_dim_bytes": 128, "hidden_dim_scale_bytes": 0}


def made(change: dict | None = None) -> AllToAll:
    return AllToAll.internode(**{**SIZES, "rank": dist.get_rank(), **(change or {})})


def refused(change: dict | None = None) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        made(change)
    return str(error.value)


def test_sizes_are_checked_before_anything_is_made(ranks2):
    assert ranks2.run(refused, {"max_num_tokens": 1024}) == [
        "AllToAll: max_num_tokens is 1024, expected 1 to 1023"] * 2


def test_without_gpus_it_says_why_not(ranks2):
    assert ranks2.run(refused) == ["AllToAll.internode: NVSHMEM cannot be used here: there is no CUDA device"] * 2


def with_a_gpu():
    return mock.patch.object(nvshmem, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))


def not_started(failure: str = "", before: list | None = None, **keys) -> str:
    with machine(Library(**keys), failure) as ranks, with_a_gpu():
        ranks.extend(before or [])
        return refused()


@pytest.mark.parametrize("keys, reason", FAILURES, ids=lambda value: None)
def test_where_nvshmem_does_not_start_all_ranks_raise_the_reason(ranks2, keys, reason):
    for told in ranks2.run(not_started, **keys):
        assert told == f"AllToAll.internode: NVSHMEM cannot be used here: {reason}"


def on_the_emulator(heap: bool) -> str | list:
    """As users make it: why not, or what was wrong. `heap`: whether NVSHMEM's heap has room."""
    with machine(emulator.load(dist.get_rank(), emulator.build_nvshmem)), with_a_gpu():
        group = {"group": torch.distributed.new_group()}  # NVSHMEM's memory is kept with a group
        if not heap:
            return refused(group)
        with mock.patch.object(nvshmem, "Heap", emulator.Heap):
            a2a = made(group)
    return cases.check(Call(Case(), CPU), a2a, 0)


@needs_nvcc
def test_made_as_by_users(ranks2):
    assert ranks2.run(on_the_emulator, True) == [[], []]


@needs_nvcc
def test_a_heap_that_is_too_small_is_an_error_on_all_ranks(ranks2):
    for told in ranks2.run(on_the_emulator, False):
        assert "MemoryError: NVSHMEM's symmetric heap is too small: set NVSHMEM_SYMMETRIC_SIZE" in told
