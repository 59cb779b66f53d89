# SPDX-License-Identifier: Apache-2.0
"""How long contenders take on the device, timed side by side, and the rows of a result file that say it.

With several ranks, a time is that of the slowest rank, sample by sample.
"""

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_mxfp8_moe.compute.mx import sqnr_db

from . import world
from .world import device

TOTAL = "total"
FLUSHED_BYTES = 256 << 20  # several times any L2
CLOCK_HZ = 2e9  # at most, of the cycles that _sleep counts
LONGEST_SLEEP_S = 0.02
LEAST = 5  # runs of a contender that are timed
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")  # not profiled()'s own, which is of the device
SLOW_S = 1.0  # a check that takes longer is announced: it compiles, and is no hang


class Contender(NamedTuple):
    """One way to do what a case asks for.

    Attributes:
        stages: calls in their order. The first takes nothing, each other one takes what the one before returned.
        check: runs them once and returns {"correct": bool, ...}.
        about: what else its rows say.
        timed: False: it is checked alone.
    """

    stages: dict[str, Callable]
    check: Callable[[], dict]
    about: dict = {}
    timed: bool = True


def run(stages: dict[str, Callable], mark: Callable[[], None] = lambda: None):
    """Returns what the last stage returns; calls `mark` after each stage."""
    result = ()
    for call in stages.values():
        result = (call(*result), )
        mark()
    return result[0]


def rows(case: dict, contenders: dict[str, Contender], budget_s: float, **how) -> list[dict]:
    """The rows of one case in a result file: one for each contender and stage, and for the total of several stages.

    Every contender is checked first, then all are timed beside each other. One that raises has rows that say so, and
    no times. The stage is the case's "operation". `how`: arguments of `times_ms`.
    """
    checked = {}
    for name, contender in contenders.items():
        begin = time.monotonic()
        checked[name] = world.everywhere(contender.check)
        if not checked[name]["correct"] or time.monotonic() - begin > SLOW_S:
            world.say(f"{name}: {checked[name]}")
    timed = {name: contender.stages for name, contender in contenders.items()
             if contender.timed and "failure" not in checked[name]}
    times = times_ms(timed, budget_s, **how) if timed else {}
    ranks = {"ranks": world.size()} if dist.is_initialized() else {}
    found = []
    for name, contender in contenders.items():
        for operation in _operations(contender.stages):
            found.append({"case": {"operation": operation, **ranks, **case}, "contender": name,
                          **times.get(name, {}).get(operation, {}), **contender.about, **checked[name]})
    return found


def _operations(stages: Collection[str]) -> list[str]:
    return [*stages, TOTAL] if len(stages) > 1 else list(stages)


def times_ms(contenders: dict[str, dict[str, Callable]], budget_s: float, repeats: int = 30, cold: bool = True,
             warm: bool = False) -> dict[str, dict[str, dict]]:
    """Times contenders that have each run once already. They run in turn, to and fro: heat and clocks meet all alike.

    Before each timed run L2 is flushed, and the device is kept busy until the host is ahead. What is timed is the
    device's work, with gaps only where the host lags behind even then.

    Args:
        contenders: the stages of each.
        budget_s: seconds for each contender. If `repeats` runs take longer, there are fewer, but LEAST.
        cold: flushes L2.
        warm: each timed run follows an untimed one of the same contender. The host then finds its code in its caches,
            as in a training, where every layer but the first follows another one.

    Returns:
        For each contender and operation (a stage, or the total of several): median_ms, p10_ms, p90_ms and repeats, of
        the slowest rank in each sample; and host_ms, the median of issuing the whole run.
    """
    first = {name: _first(stages) for name, stages in contenders.items()}
    issued = world.largest(torch.tensor([s for s, _ in first.values()])).tolist()
    issued_s = dict(zip(first, issued, strict=True))
    mean_s = world.largest(torch.tensor([sum(s for _, s in first.values()) / len(first)])).item()
    count = max(LEAST, min(repeats, int(budget_s / mean_s / (1 + warm))))
    flushed = torch.ones(FLUSHED_BYTES // 4 if cold and world.on_gpu() else 1, device=device())
    token = torch.zeros(1, device=device())
    samples: dict = {name: [] for name in contenders}
    turn = list(contenders.items())
    for _ in range(count):
        running = []
        turn.reverse()
        for name, stages in turn:
            if warm:
                run(stages)
            running.append((name, _sample(stages, 1.5 * issued_s[name] + 1e-4, flushed, token)))
        get_accelerator().synchronize()
        for name, read in running:
            samples[name].append(read())
    found = {}
    for name, stages in contenders.items():
        *parts, host = world.largest(torch.tensor(samples[name], dtype=torch.float64)).T
        of_all = {"host_ms": spread_ms(host)["median_ms"], "repeats": count}
        found[name] = {operation: spread_ms(ms) | of_all
                       for operation, ms in zip(_operations(stages), parts, strict=False)}
    return found


def _first(stages: dict[str, Callable]) -> tuple[float, float]:
    """Seconds of one run on an idle device: until the host is through, and until the device is."""
    get_accelerator().synchronize()
    world.barrier()
    begin = time.perf_counter()
    run(stages)
    issued = time.perf_counter() - begin
    get_accelerator().synchronize()
    return issued, time.perf_counter() - begin


def _sample(stages: dict[str, Callable], busy_s: float, flushed: torch.Tensor,
            token: torch.Tensor) -> Callable[[], list]:
    """Issues one run behind `busy_s` seconds of waiting. The ranks' devices then meet and begin together.

    Returns:
        A function that reads milliseconds: of each stage, of all, and of the host.
    """
    flushed.sum()  # reads: what stays in L2 need not be written back
    if world.on_gpu():
        torch.cuda._sleep(int(CLOCK_HZ * min(busy_s, LONGEST_SLEEP_S)))
    if dist.is_initialized():
        dist.all_reduce(token)
    marks = [moment()]
    begin = time.perf_counter()
    run(stages, lambda: marks.append(moment()))
    host_ms = (time.perf_counter() - begin) * 1e3
    return lambda: [*apart_ms(marks), *apart_ms([marks[0], marks[-1]]), host_ms]


def moment() -> Any:
    """On the device, behind what was issued before; without a GPU on the host."""
    if not world.on_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def apart_ms(moments: Sequence[Any]) -> list[float]:
    """How far each of them is from the next one. The device must have come to the last."""
    return [a.elapsed_time(b) if world.on_gpu() else (b - a) * 1e3
            for a, b in zip(moments, moments[1:], strict=False)]


def wall_ms(call: Callable[[], object]) -> float:
    """Milliseconds of a call, from a synchronised device to a synchronised device, on the slowest rank."""
    world.barrier()
    get_accelerator().synchronize()
    begin = time.perf_counter()
    call()
    get_accelerator().synchronize()
    return world.largest(torch.tensor([1e3 * (time.perf_counter() - begin)], dtype=torch.float64)).item()


def spread_ms(samples: Sequence[float] | torch.Tensor) -> dict[str, float]:
    """median_ms, p10_ms and p90_ms of samples in ms."""
    middle, low, high = torch.as_tensor(samples, dtype=torch.float64).quantile(
        torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)).tolist()
    return {"median_ms": round(middle, 5), "p10_ms": round(low, 5), "p90_ms": round(high, 5)}


def rate_rows(tiny: bool) -> list[dict]:
    """Rows with this device's rates: a copy in its memory, and cuBLAS' FP8 product with one scale for each matrix."""
    copied_bytes, n = (1 << 20, 64) if tiny else (1 << 30, 8192)
    source = torch.randint(0, 256, (copied_bytes, ), dtype=torch.uint8, device=device())
    target = torch.zeros_like(source)
    a, b = (torch.randn(n, n, device=device()).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device())

    def product():
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    def copied():
        target.copy_(source)
        return {"correct": torch.equal(source, target)}

    def multiplied():
        return close({"y": a[:64].float() @ b[:64].float().t()}, {"y": product()[:64, :64]}, 34)

    copy = {"copy_": Contender({"device copy": lambda: target.copy_(source)}, copied)}
    multiply = {"torch._scaled_mm": Contender({"fp8 product": product}, multiplied)}
    return [*rows({"bytes": 2 * copied_bytes}, copy, 0.5), *rows({"flops": 2 * n**3}, multiply, 0.5)]


def profiled(call: Callable[[], object], passes: int = 1) -> dict[str, float]:
    """What the device does in a call, which a profiler sees; it slows the host down, so this run's times are no good.

    Returns:
        kernels_ms: the sum of the durations of kernels, copies and fills, which are device_events. host_waits: how
        often the host waits for a stream or an event. Each of one pass. Nothing without a GPU.
    """
    if not world.on_gpu():
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(passes):
            call()
        torch.cuda.synchronize()
    events = profiler.events()
    on_device = [event for event in events
                 if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation]
    return {"kernels_ms": round(sum(event.time_range.elapsed_us() for event in on_device) / passes / 1e3, 5),
            "device_events": round(len(on_device) / passes, 1),
            "host_waits": round(sum(event.name in WAITS for event in events) / passes, 1)}


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that a call takes beyond what is allocated before it. What it returns counts."""
    accelerator = get_accelerator()
    accelerator.synchronize()
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    call()
    accelerator.synchronize()
    return accelerator.max_memory_allocated() - before


def close(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], least_db: float) -> dict:
    """What a check says of tensors that must come close: "correct" if the SQNR of each is at least `least_db`.

    NaN is not.
    """
    sqnr = {part: sqnr_db(value, got[part]) for part, value in expected.items()}
    return {"correct": all(value >= least_db for value in sqnr.values()),
            "sqnr_db": {part: round(min(value, 99.0), 1) for part, value in sqnr.items() if value == value}}


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is filled with NaN: what a kernel leaves unwritten does not pass for an earlier one's result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is nondeterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
