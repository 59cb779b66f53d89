# SPDX-License-Identifier: Apache-2.0
"""The NVLink transport on ranks without GPUs, over the emulator of CUDA. Errors name peers that fail, and all ranks
raise them, even if one rank alone lacks memory."""

import io
import os
import signal
import threading
import time
from contextlib import redirect_stdout
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed

from ds_mxfp8_moe.transport import deadline, kernel_reports, peer_memory
from ds_mxfp8_moe.transport.deadline import PeerError
from ds_mxfp8_moe.transport.nvlink import NVLink
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.support import emulator
from tests.support import nvlink_cases as cases
from tests.support.conformance import MX32, PLAIN, Problem, check, expected, same, until
from tests.support.emulated_nvlink import DEADLINE, Watched, new_memory, nvlink
from tests.support.nvlink_cases import NAME
from tests.support.slow import slow_except

SPARE_SECONDS = 15  # for a busy machine
pytestmark = pytest.mark.usefixtures("emulated")


SMALL = Problem(tokens=(40, 40), row_format=MX32)


def planned(**keys) -> tuple:
    """SMALL with its own staging: (the transport, its plan, the rest of dispatch's arguments, what is expected)."""
    memory = new_memory()
    exchange, want = nvlink(memory, **keys), expected(SMALL, memory.rank, memory.world_size)
    expert_TK, x_TH, weight_TK = want["inputs"]
    return exchange, exchange.plan(expert_TK, SMALL.local_experts), (x_TH, SMALL.row_format, weight_TK), want


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


@pytest.mark.parametrize("provider, text", [(emulator.Refusing, "rank 1: MemoryError: none is left"),
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


def failing(phase: str) -> tuple | None:
    return cases.failing(phase, Problem(tokens=(20, ) * 4), nvlink(new_memory()))


@pytest.mark.slow
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
        with pytest.raises(PeerError, match="until the deadline, for rank 1"):
            memory.reports.check()
        with mock.patch.object(memory.reports, "check"):
            y_PH = torch.zeros(plan.num_rows, SMALL.hidden, dtype=SMALL.dtype)
            exchange.combine(plan, y_PH, SMALL.row_format, SMALL.dtype)
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
    with pytest.raises(PeerError) as caught:
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
    with pytest.raises(PeerError) as caught:
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
        assert kind is PeerError and "in 'counts' of block.3.moe" in text and "All ranks came" in text
        assert said == (f"mxfp8_moe: rank {rank} has waited for 0 s in 'counts' of block.3.moe, for one of ranks "
                        f"[{1 - rank}]. The deadline is at 1 s\n")
