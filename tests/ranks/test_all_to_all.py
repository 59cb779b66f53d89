# SPDX-License-Identifier: Apache-2.0
"""AllToAll on ranks without GPUs, over the emulators of CUDA and of NVSHMEM; the cases are those of the GPU tests. In
NVSHMEM, messages take different times, and signals come late, also those of an exchange after those of the next."""

from functools import cache
from types import SimpleNamespace
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.transport import nvshmem, peer_memory
from ds_mxfp8_moe.transport.nvlink import NVLink
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.support import all_to_all_cases as cases
from tests.support import emulator
from tests.support.all_to_all_cases import CASES, Call, Case
from tests.support.emulated_nvshmem import FAILURES, Library, machine
from tests.support.rank_pool import KEPT_GROUPS
from tests.support.slow import WIDE

CPU = torch.device("cpu")
SMS = 3  # blocks, of which the emulator may run one at a time
FIRST_EPOCH = 0xFFFFFFF0  # wraps within the first cases
BUILDS = {"peers": emulator.build, "nvshmem": emulator.build_nvshmem}
EACH = ["peers", pytest.param("nvshmem", marks=pytest.mark.slow)]  # which builds an emulator of its own


@pytest.fixture
def built(emulated, request):
    """Before ranks wait for each other."""
    if "nvshmem" in request.node.name:
        emulator.build_nvshmem()


def new_memory(memory: str, group=None) -> PeerMemory:
    module = emulator.load(dist.get_rank(), BUILDS[memory])
    provider = emulator.Shared if memory == "peers" else emulator.Heap(module)
    with mock.patch.object(peer_memory, "FIRST_BYTES", 1 << 20):  # so that it grows
        return PeerMemory(group or torch.distributed.new_group(), module, FIRST_EPOCH, provider)


@cache
def memory_of_all_cases(memory: str) -> PeerMemory:
    group = torch.distributed.new_group()
    KEPT_GROUPS.add(group)
    return new_memory(memory, group)


def run(case: Case, memory: str = "peers", turns: int = 2, sms: int = SMS, adversary: bool = False) -> list[str]:
    """What was wrong. Over NVSHMEM, how often something was put into other ranks' memory counts, too."""
    over = memory_of_all_cases(memory)
    emulator.set_adversary(over.extension, adversary or memory == "nvshmem")
    a2a, call, wrong = cases.make(case, over), Call(case, CPU), []
    a2a.sms = sms
    for turn in range(turns):
        before = emulator.puts(over.extension) if memory == "nvshmem" else 0
        wrong += cases.check(call, a2a, turn)
        if memory == "nvshmem" and (puts := emulator.puts(over.extension) - before) != call.puts():
            wrong.append(f"{puts} puts, expected {call.puts()}")
    return wrong


AT_BOUNDS = {
    "most tokens": Case(max_tokens=1023, top_k=1, local_experts=1, hidden=32),
    "most choices": Case(max_tokens=3, top_k=32, local_experts=16, hidden=32),
    "most scales": Case(max_tokens=2, rows="e4m3", hidden=2048, block=32, float_scales=True),
    "one token": Case(max_tokens=1, local_experts=1, top_k=1, hidden=32),
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("memory, name", [
    *(("peers", name) for name in CASES),
    *(pytest.param("nvshmem", name, marks=pytest.mark.slow) for name in [*CASES, *AT_BOUNDS])])
def test_rows_reach_their_experts_and_come_back(ranks2, memory, name):
    assert ranks2.run(run, (CASES | AT_BOUNDS)[name], memory) == [[], []]


# Twelve ranks are more than a peer memory's exchange takes, and more than a block has warps.
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("ranks, memory, name", [
    *((3, "peers", name) for name in ("quantize", "one rank", "ranks without tokens")),
    *(pytest.param(8, "peers", name, marks=WIDE) for name in ("quantize", "one rank", "ranks without tokens")),
    *(pytest.param(4, "nvshmem", name, marks=pytest.mark.slow) for name in (
        "quantize", "one rank", "nowhere", "ranks without tokens", "NaN, quantize", "send apart from receive")),
    pytest.param(12, "nvshmem", "one rank", marks=pytest.mark.slow),
    *(pytest.param(12, "nvshmem", name, marks=WIDE) for name in ("quantize", "ranks without tokens"))])
def test_more_ranks(request, ranks, memory, name):
    found = request.getfixturevalue(f"ranks{ranks}").run(run, CASES[name], memory, sms=2 if ranks == 12 else SMS)
    assert found == [[]] * ranks


REPEATED = Case(max_tokens=12, top_k=3, local_experts=2, rows="quantize", routing="dropped")


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_call_after_call_over_nvshmem(ranks4):
    assert ranks4.run(run, REPEATED, "nvshmem", turns=20) == [[]] * 4


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", ["quantize", "ranks without tokens"])
def test_stores_and_signals_out_of_order_change_no_bit(ranks2, name):
    assert ranks2.run(run, CASES[name], turns=8, adversary=True) == [[], []]


@pytest.mark.usefixtures("built")
def test_a_block_for_each_row(ranks2):
    """Where there are enough of them, all warps of a block move a row together."""
    assert ranks2.run(run, Case(max_tokens=2, rows="quantize", hidden=160), sms=5) == [[], []]


def compiled(case: Case) -> list[str]:
    a2a, call = cases.make(case, memory_of_all_cases("peers")), Call(case, CPU)
    a2a.sms = SMS
    plain_dispatch, plain_combine = a2a.dispatch, a2a.combine
    a2a.dispatch = torch.compile(plain_dispatch, fullgraph=True, backend="aot_eager")
    a2a.combine = torch.compile(plain_combine, fullgraph=True, backend="aot_eager")
    return [wrong for turn in range(2) for wrong in cases.check(call, a2a, turn)]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", ["plain", "quantize, float scales, bound"])
def test_torch_compile_traces_the_ops(ranks2, name):
    assert ranks2.run(compiled, CASES[name]) == [[], []]


# ---------------------------------------------------------------- ranks that fail


def failing(which: str, memory: str) -> str | None:
    return cases.failing(which, lambda case, group: cases.make(case, new_memory(memory, group)), CPU)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("memory", EACH)
def test_ranks_of_other_sizes_raise(ranks2, memory):
    cases.check_other_sizes(ranks2.run(failing, "sizes", memory))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("memory", EACH)
def test_a_rank_that_does_not_come_is_named(ranks2, memory):
    text, nothing = ranks2.run(failing, "late", memory)
    assert nothing is None and "until the deadline, for rank 1" in text and "AllToAll.dispatch" in text


def interleaved() -> list[str]:
    """Another exchange of the group between send and receive raises; the first one is received all the same."""
    memory, call = new_memory("peers"), Call(CASES["plain"], CPU)
    a2a, other = (cases.make(CASES["plain"], memory) for _ in range(2))
    call.bring(0)
    call.dispatch(a2a, do_recv=False)
    for act in (lambda: call.dispatch(other, do_recv=False), lambda: call.dispatch(other, do_send=False),
                lambda: NVLink(memory).plan(torch.zeros((1, 1), dtype=torch.int64), 1),
                lambda: memory.reserve(memory.half_bytes + 1, "a larger batch")):
        with pytest.raises(ValueError, match="AllToAll.dispatch"):
            act()
    call.dispatch(a2a, do_send=False)
    wrong = call.wrong_rows()
    with mock.patch.object(a2a, "sms", "none"), pytest.raises(TypeError):  # the launch fails
        call.dispatch(a2a, do_recv=False)
    assert memory.open is None
    return wrong


@pytest.mark.usefixtures("built")
def test_one_exchange_of_a_group_at_a_time(ranks2):
    assert ranks2.run(interleaved) == [[], []]


def without_staging() -> list[str]:
    """The group's staging went where it was to grow, and memory ran out: the next call has it made anew."""
    memory, call = new_memory("peers"), Call(Case(), CPU)
    a2a = cases.make(Case(), memory)
    wrong = cases.check(call, a2a, 0)
    with mock.patch.object(memory, "_provider", emulator.Refusing), pytest.raises(RuntimeError, match="none is left"):
        memory.reserve(memory.half_bytes + 1, "a larger batch")
    return wrong + cases.check(call, a2a, 0)


@pytest.mark.usefixtures("built")
def test_a_growth_of_the_staging_that_failed(ranks2):
    assert ranks2.run(without_staging) == [[], []]


# ---------------------------------------------------------------- arguments


def bad_calls() -> list[str]:
    told = []
    for call in cases.bad_calls(cases.make(Case(), memory_of_all_cases("peers")), CPU):
        with pytest.raises(ValueError) as error:
            call()
        told.append(str(error.value))
    return told


@pytest.mark.usefixtures("built")
def test_calls_that_do_not_fit_say_what_was_expected(ranks2):
    for told in ranks2.run(bad_calls):
        assert all("AllToAll" in text for text in told) and len(set(told)) == len(told)


def made(change: dict, memory: str) -> AllToAll:
    sizes = {"max_num_tokens": 7, "num_experts": 4, "experts_per_token": 2, "rank": dist.get_rank(), "world_size": 2,
             "dp_size": 1, "hidden_dim": 64, "hidden_dim_bytes": 128, "hidden_dim_scale_bytes": 0}
    return (AllToAll.intranode if memory == "peers" else AllToAll.internode)(**sizes | change)


def refused(change: dict, memory: str = "peers") -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        made(change, memory)
    return str(error.value)


@pytest.mark.parametrize("memory, change", [
    *(("peers", change) for change in (
        {"world_size": 3}, {"dp_size": 2}, {"num_experts": 3}, {"max_num_tokens": 1024}, {"experts_per_token": 33},
        {"hidden_dim": 40}, {"hidden_dim_bytes": 100}, {"hidden_dim_scale_bytes": 4096})),
    ("nvshmem", {"max_num_tokens": 1024})], ids=str)
def test_sizes_are_checked_before_anything_is_made(ranks2, memory, change):
    (name, value), = change.items()
    for told in ranks2.run(refused, change, memory):
        assert name in told and str(value) in told


def test_without_gpus_it_says_why_not(ranks2):
    for memory, start in (("peers", "AllToAll: the transport nvlink cannot be used here: there is no CUDA device"),
                          ("nvshmem", "AllToAll.internode: NVSHMEM cannot be used here: there is no CUDA device")):
        for told in ranks2.run(refused, {}, memory):
            assert told.startswith(start)


def test_a_handle_is_never_used_again():
    """A compiled graph holds the handle of an AllToAll that may be gone."""
    memory = SimpleNamespace(multiprocessors=1, rank=0, world_size=2, device=CPU, reserve=lambda *args: None,
                             extension=SimpleNamespace(OUTBOXES=False))
    assert len({AllToAll(memory, 4, 4, 2, 64, 128, 0)._handle for _ in range(10)}) == 10


def test_without_deepspeeds_comm_it_names_the_call():
    with pytest.raises(RuntimeError, match=r"call deepspeed\.init_distributed\(\) first"):
        AllToAll.intranode(8, 4, 2, 0, 1, 1, 64, 128, 0)


# ---------------------------------------------------------------- where NVSHMEM starts


def with_a_gpu():
    return mock.patch.object(nvshmem, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))


def not_started(failure: str = "", before: list | None = None, **keys) -> str:
    with machine(Library(**keys), failure) as ranks, with_a_gpu():
        ranks.extend(before or [])
        return refused({}, "nvshmem")


@pytest.mark.slow
@pytest.mark.parametrize("keys, reason", FAILURES, ids=lambda value: None)
def test_where_nvshmem_does_not_start_all_ranks_raise_the_reason(ranks2, keys, reason):
    for told in ranks2.run(not_started, **keys):
        assert told == f"AllToAll.internode: NVSHMEM cannot be used here: {reason}"


def on_the_emulator(heap: bool) -> str | list:
    """As users make it: why not, or what was wrong. `heap`: whether NVSHMEM's heap has room."""
    with machine(emulator.load(dist.get_rank(), emulator.build_nvshmem)), with_a_gpu():
        group = {"group": torch.distributed.new_group()}  # NVSHMEM's memory is kept with a group
        if not heap:
            return refused(group, "nvshmem")
        with mock.patch.object(nvshmem, "Heap", emulator.Heap):
            a2a = made(group, "nvshmem")
    return cases.check(Call(Case(), CPU), a2a, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_made_over_nvshmem_as_by_users(ranks2):
    assert ranks2.run(on_the_emulator, True) == [[], []]


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_a_heap_of_nvshmem_that_is_too_small_is_an_error_on_all_ranks(ranks2):
    for told in ranks2.run(on_the_emulator, False):
        assert "MemoryError: NVSHMEM's symmetric heap is too small: set NVSHMEM_SYMMETRIC_SIZE" in told
