# SPDX-License-Identifier: Apache-2.0
"""How long calls take on the device, cold and side by side, and the two rates that floors are made of."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from deepspeed.accelerator import get_accelerator

FLUSHED_BYTES = 256 << 20  # several times any L2
CLOCK_HZ = 2e9  # at most, of the cycles that _sleep counts
LONGEST_SLEEP_S = 0.02


def device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def on_gpu() -> bool:
    return get_accelerator().device_name() == "cuda"


def seconds_of(call: Callable) -> tuple[float, float]:
    """Wall time of one call on an idle device: until the host is through, and until the device is."""
    get_accelerator().synchronize()
    begin = time.perf_counter()
    call()
    issued = time.perf_counter()
    get_accelerator().synchronize()
    return issued - begin, time.perf_counter() - begin


def quantiles_ms(contenders: dict[str, Callable], repeats: int = 20, budget_s: float = 0.3,
                 least: int = 3) -> dict[str, dict]:
    """Times calls that have each run once already: in turn, so that heat and clocks meet all of them alike, and to and
    fro, so that none always follows the same other one.

    Before each timed call L2 is flushed, and the device kept busy until the host has issued it: what is timed is the
    device's work, and gaps only where the host lags behind even then. `host_ms` is the issuing.

    Args:
        repeats: of each call; fewer, but `least`, where a call's would take longer than `budget_s`.

    Returns:
        For each: median_ms, p10_ms, p90_ms of the device, host_ms (median), repeats.
    """
    first = {name: seconds_of(call) for name, call in contenders.items()}
    mean_s = sum(total for _, total in first.values()) / len(first)
    count = max(least, min(repeats, int(budget_s / mean_s)))
    flushed = torch.ones(FLUSHED_BYTES // 4, device=device()) if on_gpu() else None
    times: dict = {name: [] for name in contenders}
    turn = list(contenders.items())
    for _ in range(count):
        running = []
        turn.reverse()
        for name, call in turn:
            if flushed is None:
                issued, total = seconds_of(call)
                times[name].append((total * 1e3, issued * 1e3))
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.sum()  # reads: what stays in L2 need not be written back
            torch.cuda._sleep(int(CLOCK_HZ * min(1.5 * first[name][0] + 5e-5, LONGEST_SLEEP_S)))
            begin.record()
            at = time.perf_counter()
            call()
            host_ms = (time.perf_counter() - at) * 1e3
            end.record()
            running.append((name, begin, end, host_ms))
        get_accelerator().synchronize()
        for name, begin, end, host_ms in running:
            times[name].append((begin.elapsed_time(end), host_ms))
    return {name: _quantiles(*zip(*measured, strict=True)) for name, measured in times.items()}


def spread_ms(samples: Sequence[float] | torch.Tensor) -> dict[str, float]:
    """median_ms, p10_ms and p90_ms of samples in ms."""
    middle, low, high = torch.as_tensor(samples, dtype=torch.float64).quantile(
        torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)).tolist()
    return {"median_ms": round(middle, 5), "p10_ms": round(low, 5), "p90_ms": round(high, 5)}


def _quantiles(times_ms: tuple, host_ms: tuple) -> dict:
    return spread_ms(times_ms) | {"host_ms": spread_ms(host_ms)["median_ms"], "repeats": len(times_ms)}


def rows(case: dict, contenders: dict[str, tuple[Callable, Callable]], budget_s: float,
         untimed: tuple = ()) -> list[dict]:
    """The rows of one case in a result file: each contender is checked, and then timed beside the others.

    Args:
        contenders: for each name a call, and what runs it once and returns {"correct": bool, ...}. One that raises
            has a row that says so, and no times.
    """
    checked: dict = {}
    for name, (_, check) in contenders.items():
        try:
            checked[name] = check()
        except Exception as error:  # one kernel's failure must not cost the run, whose machine is lent for minutes
            checked[name] = {"correct": False, "failure": f"{type(error).__name__}: {error}"[:300]}
    calls = {name: call for name, (call, _) in contenders.items()
             if "failure" not in checked[name] and name not in untimed}
    times = quantiles_ms(calls, budget_s=budget_s) if calls else {}
    return [{"case": case, "contender": name, **times.get(name, {}), **checked[name]} for name in contenders]


def rate_rows(copied_bytes: int = 1 << 30, size: int = 8192) -> list[dict]:
    """Rows of a result file: a device copy of `copied_bytes`, and cuBLAS' per-tensor FP8 product of `size` cubed."""
    source = torch.randint(0, 256, (copied_bytes, ), dtype=torch.uint8, device=device())
    target = torch.zeros_like(source)
    a, b = (torch.randn(size, size, device=device()).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device())

    def product():
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    target.copy_(source)
    some = product()[:64, :64].float()
    expected = a[:64].float() @ b[:64].float().t()
    calls = {"copy": lambda: target.copy_(source), "product": product}
    times = quantiles_ms(calls, repeats=30, budget_s=1)
    return [{"case": {"operation": "device copy", "bytes": 2 * copied_bytes}, "contender": "copy_", **times["copy"],
             "correct": torch.equal(source, target)},
            {"case": {"operation": "fp8 product", "flops": 2 * size**3}, "contender": "torch._scaled_mm",
             **times["product"], "correct": bool((some - expected).norm() < 2e-2 * expected.norm())}]


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
