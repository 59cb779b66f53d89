# SPDX-License-Identifier: Apache-2.0
"""AllToAll on ranks without GPUs, over the emulator of CUDA; the cases are those of the GPU tests."""

from types import SimpleNamespace
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.transport.nvlink import NVLink
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.support import all_to_all_cases as cases
from tests.support import emulator
from tests.support.all_to_all_cases import CASES, Call, Case
from tests.support.refusing_memory import Refusing
from tests.support.slow import slow_except

CPU = torch.device("cpu")
SMS = 3  # blocks, of which the emulator may run one at a time

needs_nvcc = pytest.mark.skipif(emulator.obstacle() is not None,
                                reason=f"the emulator needs nvcc: {emulator.obstacle()}")


@pytest.fixture(scope="module", autouse=True)
def built():
    """Once, before ranks wait for each other."""
    if emulator.obstacle() is None:
        emulator.build()


def make(case: Case, first_epoch: int = 1, sms: int = SMS, group=None) -> AllToAll:
    memory = PeerMemory(group or dist.get_world_group(), emulator.load(dist.get_rank()), first_epoch, emulator.Shared)
    a2a = cases.make(case, memory)
    a2a.sms = sms
    return a2a


def run(case: Case, turns: int = 2, **kwargs) -> list[str]:
    a2a, call = make(case, **kwargs), Call(case, CPU)
    return [wrong for turn in range(turns) for wrong in cases.check(call, a2a, turn)]


@needs_nvcc
@pytest.mark.parametrize("name", CASES)
def test_rows_reach_their_experts_and_come_back(ranks2, name):
    assert ranks2.run(run, CASES[name]) == [[], []]


@needs_nvcc
@pytest.mark.parametrize("ranks", slow_except([3, 8], 3))
@pytest.mark.parametrize("name", ["quantize", "one rank", "ranks without tokens"])
def test_more_ranks(request, ranks, name):
    assert request.getfixturevalue(f"ranks{ranks}").run(run, CASES[name]) == [[]] * ranks


def under_an_adversary(case: Case) -> list[str]:
    module = emulator.load(dist.get_rank())
    emulator.set_adversary(module, True)
    try:
        return run(case, turns=8)
    finally:
        emulator.set_adversary(module, False)


@needs_nvcc
@pytest.mark.parametrize("name", ["quantize", "ranks without tokens"])
def test_stores_and_signals_out_of_order_change_no_bit(ranks2, name):
    assert ranks2.run(under_an_adversary, CASES[name]) == [[], []]


@needs_nvcc
def test_a_block_for_each_row(ranks2):
    """Where there are enough of them, all warps of a block move a row together."""
    assert ranks2.run(run, Case(max_tokens=2, rows="quantize", hidden=160), sms=5) == [[], []]


@needs_nvcc
def test_epochs_pass_zero(ranks2):
    assert ranks2.run(run, Case(), turns=4, first_epoch=0xFFFFFFFC) == [[], []]


def compiled(case: Case) -> list[str]:
    a2a, call = make(case), Call(case, CPU)
    plain_dispatch, plain_combine = a2a.dispatch, a2a.combine
    a2a.dispatch = torch.compile(plain_dispatch, fullgraph=True, backend="aot_eager")
    a2a.combine = torch.compile(plain_combine, fullgraph=True, backend="aot_eager")
    return [wrong for turn in range(2) for wrong in cases.check(call, a2a, turn)]


@needs_nvcc
@pytest.mark.parametrize("name", ["plain", "quantize, float scales, bound"])
def test_torch_compile_traces_the_ops(ranks2, name):
    assert ranks2.run(compiled, CASES[name]) == [[], []]


def failing(which: str) -> str | None:
    return cases.failing(which, lambda case, group: make(case, group=group), CPU)


@needs_nvcc
def test_ranks_of_other_sizes_raise(ranks2):
    cases.check_other_sizes(ranks2.run(failing, "sizes"))


@needs_nvcc
def test_a_rank_that_does_not_come_is_named(ranks2):
    text, nothing = ranks2.run(failing, "late")
    assert nothing is None and "until the deadline, for rank 1" in text and "AllToAll.dispatch" in text


def interleaved() -> list[str]:
    """Another exchange of the group between send and receive raises; the first one is received all the same."""
    a2a, call = make(CASES["plain"]), Call(CASES["plain"], CPU)
    other = cases.make(CASES["plain"], a2a.memory)
    call.bring(0)
    call.dispatch(a2a, do_recv=False)
    for act in (lambda: call.dispatch(other, do_recv=False), lambda: call.dispatch(other, do_send=False),
                lambda: NVLink(a2a.memory).plan(torch.zeros((1, 1), dtype=torch.int64), 1),
                lambda: a2a.memory.reserve(a2a.memory.half_bytes + 1, "a larger batch")):
        with pytest.raises(ValueError, match="AllToAll.dispatch"):
            act()
    call.dispatch(a2a, do_send=False)
    wrong = call.wrong_rows()
    with mock.patch.object(a2a, "sms", "none"), pytest.raises(TypeError):  # the launch fails
        call.dispatch(a2a, do_recv=False)
    assert a2a.memory.open is None
    return wrong


@needs_nvcc
def test_one_exchange_of_a_group_at_a_time(ranks2):
    assert ranks2.run(interleaved) == [[], []]


def without_staging() -> list[str]:
    """The group's staging went where it was to grow, and memory ran out: the next call has it made anew."""
    a2a, call = make(Case()), Call(Case(), CPU)
    wrong = cases.check(call, a2a, 0)
    with mock.patch.object(a2a.memory, "_provider", Refusing), pytest.raises(RuntimeError, match="none is left"):
        a2a.memory.reserve(a2a.memory.half_bytes + 1, "a larger batch")
    return wrong + cases.check(call, a2a, 0)


@needs_nvcc
def test_a_growth_of_the_staging_that_failed(ranks2):
    assert ranks2.run(without_staging) == [[], []]


@needs_nvcc
def test_calls_that_do_not_fit_say_what_was_expected(ranks2):
    for told in ranks2.run(bad_calls):
        assert all("AllToAll" in text for text in told) and len(set(told)) == len(told)


def bad_calls() -> list[str]:
    a2a = make(Case())
    told = []
    for call in cases.bad_calls(a2a, CPU):
        with pytest.raises(ValueError) as error:
            call()
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("change", [
    {"world_size": 3}, {"dp_size": 2}, {"num_experts": 3}, {"max_num_tokens": 1024}, {"experts_per_token": 33},
    {"hidden_dim": 40}, {"hidden_dim_bytes": 100}, {"hidden_dim_scale_bytes": 4096}], ids=str)
def test_sizes_are_checked_before_anything_is_made(ranks2, change):
    (name, value), = change.items()
    for told in ranks2.run(refused, change):
        assert name in told and str(value) in told


def refused(change: dict) -> str:
    sizes = {"max_num_tokens": 4, "num_experts": 4, "experts_per_token": 2, "rank": dist.get_rank(), "world_size": 2,
             "dp_size": 1, "hidden_dim": 64, "hidden_dim_bytes": 128, "hidden_dim_scale_bytes": 0}
    with pytest.raises((ValueError, RuntimeError)) as error:
        AllToAll.intranode(**sizes | change)
    return str(error.value)


def test_without_gpus_it_says_why_not(ranks2):
    for told in ranks2.run(refused, {}):
        assert told.startswith("AllToAll: the transport nvlink cannot be used here: there is no CUDA device")


def test_a_handle_is_never_used_again():
    """A compiled graph holds the handle of an AllToAll that may be gone."""
    memory = SimpleNamespace(multiprocessors=1, rank=0, world_size=2, device=CPU, reserve=lambda *args: None,
                             extension=SimpleNamespace(OUTBOXES=False))
    assert len({AllToAll(memory, 4, 4, 2, 64, 128, 0)._handle for _ in range(10)}) == 10


def test_without_deepspeeds_comm_it_names_the_call():
    with pytest.raises(RuntimeError, match=r"call deepspeed\.init_distributed\(\) first"):
        AllToAll.intranode(8, 4, 2, 0, 1, 1, 64, 128, 0)
