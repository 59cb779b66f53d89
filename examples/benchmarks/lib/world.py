# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of several GPUs have in common: start-up under torchrun or the deepspeed launcher, contenders
timed side by side on all ranks, agreement on what is correct, result files, an end in time.

A time is the slowest rank's, sample by sample. Every rank runs the same calls in the same order; rank 0 writes.
"""

import argparse
import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import deepspeed
import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_mxfp8_moe.transport.choose import choose

from . import options, results_file, show
from .timing import CLOCK_HZ, FLUSHED_BYTES, LONGEST_SLEEP_S, device, on_gpu, spread_ms

BF16 = torch.bfloat16
TIMEOUT = timedelta(minutes=1)
TOTAL = "total"
STARTED = psutil.Process().create_time()
ENDING_S = 6.0  # of a run's time, for its tables and its plot
SLOW_S = 1.0
ALONE_S = 25.0  # after which a rank that failed takes its peers for stuck: they may still compile
CALLS = itertools.count()  # of `everywhere`, equal on all ranks
FAILURES: list[str] = []  # that it met, equal on all ranks


def parser(doc: str, budget: float, seconds: float) -> argparse.ArgumentParser:
    """Arguments with these defaults: seconds for each contender of a case, and for the whole run."""
    out = options.parser(doc, jobs=False)
    out.set_defaults(budget=budget)
    out.add_argument("--seconds", type=float, default=seconds,
                     help="for the whole run with its start (default: %(default)s): what does not fit is left out")
    out.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher's, which sets LOCAL_RANK too
    return out


def main(benchmark: str, args: argparse.Namespace, batches: Callable[[], Iterable[list[dict]]]) -> None:
    """Shows `--show FILE`, or starts this rank, runs the benchmark by taking its rows, and writes and shows them.

    The file is written after every batch, should the run be cut short. Exits with 1 if any row was wrong. A rank that
    fails ends at once, and its launcher ends the others.
    """
    if args.show:
        show.show(args.show)
        return
    start()
    writes = rank() == 0
    path = args.out or results_file.RESULTS / f"{benchmark}_{size()}ranks.json"
    commit = args.commit or results_file.commit()
    taken: list[dict] = []
    for rows_of_batch in batches():
        taken += rows_of_batch
        if writes:
            results_file.write(benchmark, taken, path, of_commit=commit)
    say("measured")
    end(taken, path)


def start() -> None:
    """Device, process group and random numbers of this rank, by the launcher's environment."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"this runs on ranks that a launcher starts: torchrun --nproc-per-node 2 {shlex.join(sys.argv)}")
    accelerator = get_accelerator()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(accelerator.communication_backend_name(), auto_mpi_discovery=False, verbose=False,
                               timeout=TIMEOUT)
    torch.manual_seed(rank())


def end(rows: list[dict], path: Path) -> None:
    """Leaves the ranks, shows the result file on rank 0, and ends this process: with 1 if any row is wrong."""
    shows, error = rank() == 0, ""
    if not FAILURES:
        dist.destroy_process_group()
    try:
        if shows and not (rows and show.show(path)):
            error = "some results were wrong" if rows else "there was no time for any case"
    except Exception as problem:
        if not FAILURES:
            raise
        error = f"{type(problem).__name__}: {problem}"
    if FAILURES:  # NCCL's farewell would wait for what a contender that failed left unfinished
        print(error, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if error else 0)
    elif error:
        sys.exit(error)


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def group() -> dist.ProcessGroup:
    return dist.group.WORLD


def say(line: str) -> None:
    if rank() == 0:
        print(f"{time.time() - STARTED:5.1f} s  {line}", file=sys.stderr, flush=True)


def in_time(items: Collection, seconds: float) -> Iterator:
    """Of `items`, each announced, as many as end before this process is so old, by the time that the last one took."""
    left = seconds
    for i, item in enumerate(items):
        before, left = left, seconds - largest(torch.tensor([time.time() - STARTED])).item()
        if left < (before - left if i else 0):
            say(f"no time for {len(items) - i} of {len(items)}, beginning with {item}")
            return
        say(f"{i + 1}/{len(items)}: {item}")
        yield item


def transport(requested: str | None = None):
    """What a layer over all ranks takes."""
    return choose(group(), "the benchmark", requested)


def name_of(some_transport) -> str:
    return type(some_transport).__name__.lower()


def transports() -> dict:
    """All that this machine has, by name."""
    found = (transport("collective"), transport())
    return {name_of(one): one for one in found}


def randn(*shape: int) -> torch.Tensor:
    """bf16 of this rank's own, on the device."""
    return torch.randn(*shape, dtype=BF16, device=device())


def gathered(x: torch.Tensor) -> torch.Tensor:
    """[W, ...], every rank's x; of one shape on all of them."""
    message = x.contiguous().view(-1).view(torch.uint8)  # gloo does not know every dtype
    parts = [torch.empty_like(message) for _ in range(size())]
    dist.all_gather(parts, message)
    return torch.cat(parts).view(x.dtype).view(size(), *x.shape)


def largest(x: torch.Tensor) -> torch.Tensor:
    """Over ranks, element by element; on the host."""
    x = x.to(device())
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.cpu()


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place."""
    dist.all_reduce(x)
    return x


# ---- times --------------------------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """One way to do what a case asks for.

    Attributes:
        stages: calls in their order; each takes what the one before returned, the first takes nothing.
        check: runs them once; {"correct": bool, ...}.
        about: what else its rows say.
    """

    stages: dict[str, Callable]
    check: Callable[[], dict]
    about: dict = {}


def run(stages: dict[str, Callable], mark: Callable[[], None] = lambda: None):
    """What the last stage returns; `mark` is called after each of them."""
    result = ()
    for call in stages.values():
        result = (call(*result), )
        mark()
    return result[0]


def _first(stages: dict[str, Callable]) -> tuple[float, float]:
    """Seconds of one run: until the host is through, and until the device is."""
    get_accelerator().synchronize()
    dist.barrier()
    begin = time.perf_counter()
    run(stages)
    issued = time.perf_counter() - begin
    get_accelerator().synchronize()
    return issued, time.perf_counter() - begin


def _mean_s(firsts: Collection[tuple[float, float]]) -> float:
    """Of what `_first` returned, the whole runs' mean, on the slowest rank."""
    return largest(torch.tensor([sum(total_s for _, total_s in firsts) / len(firsts)])).item()


def _sample_on_host(stages: dict[str, Callable]) -> Callable[[], list]:
    dist.barrier()
    at = [time.perf_counter()]
    run(stages, lambda: at.append(time.perf_counter()))
    times = [(b - a) * 1e3 for a, b in zip(at, at[1:], strict=False)]
    return lambda: [*times, sum(times), sum(times)]


def _sample_on_device(stages: dict[str, Callable], busy_s: float, flushed: torch.Tensor,
                      token: torch.Tensor) -> Callable[[], list]:
    """Issues one run behind `busy_s` seconds of waiting, in which the host gets ahead; the ranks' devices then meet
    and begin together. Returns what reads milliseconds of each stage, of all, and of the host."""
    events = [torch.cuda.Event(enable_timing=True)]
    flushed.sum()
    torch.cuda._sleep(int(CLOCK_HZ * min(busy_s, LONGEST_SLEEP_S)))
    dist.all_reduce(token)
    events[0].record()

    def mark():
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    begin = time.perf_counter()
    run(stages, mark)
    host_ms = (time.perf_counter() - begin) * 1e3
    return lambda: [*(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)),
                    events[0].elapsed_time(events[-1]), host_ms]


def times_ms(contenders: dict[str, dict[str, Callable]], budget_s: float, repeats: int = 30, least: int = 5,
             cold: bool = True, warm: bool = False) -> dict[str, dict[str, dict]]:
    """Times contenders that have each run once already: in turn, so that heat and clocks meet all of them alike.

    Args:
        contenders: for each name its stages.
        budget_s: a contender's share; fewer than `repeats`, but `least`, where it would take longer.
        cold: L2 is flushed before each run.
        warm: each timed run follows an untimed one of the same contender, so that the host finds its code in its
            caches, as it does in a training, where every layer but the first follows another one.

    Returns:
        For each contender and stage, and for `TOTAL` where there are several: median_ms, p10_ms, p90_ms, repeats, of
        the slowest rank in each sample; and host_ms of the whole run, the median of issuing it.
    """
    first = {name: _first(stages) for name, stages in contenders.items()}
    issued_s = dict(zip(first, largest(torch.tensor([s for s, _ in first.values()])).tolist(), strict=True))
    count = max(least, min(repeats, int(budget_s / _mean_s(first.values()) / (1 + warm))))
    if on_gpu():
        flushed = torch.ones(FLUSHED_BYTES // 4 if cold else 1, device=device())
        token = torch.zeros(1, device=device())
    samples: dict = {name: [] for name in contenders}
    for _ in range(count):
        running = []
        for name, stages in contenders.items():
            if warm:
                run(stages)
            running.append(_sample_on_device(stages, 1.5 * issued_s[name] + 1e-4, flushed, token) if on_gpu()
                           else _sample_on_host(stages))
        get_accelerator().synchronize()
        for name, read in zip(contenders, running, strict=True):
            samples[name].append(read())
    return {name: _quantiles(list(stages), largest(torch.tensor(samples[name], dtype=torch.float64)))
            for name, stages in contenders.items()}


def in_a_row_ms(contenders: dict[str, dict[str, Callable]], budget_s: float, steps: int = 10,
                repeats: int = 7) -> dict[str, dict]:
    """A step's time where one follows the other and nobody waits between: the host may run ahead of the device, and
    ranks of each other, as in a training.

    Args:
        contenders, budget_s: as `times_ms` takes them.
        steps: in a row; of `repeats` such rows, at least three, each contender has one in turn.

    Returns:
        For each contender: median_ms, p10_ms, p90_ms, repeats, of the slowest rank in each row.
    """
    if not contenders:
        return {}
    samples: dict = {name: [] for name in contenders}
    mean_s = _mean_s([_first(stages) for stages in contenders.values()])
    for _ in range(max(3, min(repeats, int(budget_s / mean_s / steps)))):
        for name, stages in contenders.items():
            get_accelerator().synchronize()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                run(stages)
            get_accelerator().synchronize()
            samples[name].append((time.perf_counter() - begin) * 1e3 / steps)
    return {name: spread_ms(largest(torch.tensor(times, dtype=torch.float64))) | {"repeats": len(times)}
            for name, times in samples.items()}


def _quantiles(stages: list[str], samples: torch.Tensor) -> dict[str, dict]:
    """Of [samples, stages + their sum + host]."""
    names = [*stages, TOTAL] if len(stages) > 1 else stages
    of_all = {"host_ms": spread_ms(samples[:, -1])["median_ms"], "repeats": len(samples)}
    return {name: spread_ms(samples[:, i]) | of_all for i, name in enumerate(names)}


def rows(case: dict, contenders: dict[str, Contender], budget_s: float, **how: int) -> list[dict]:
    """The rows of one case in a result file, one for each contender and stage; "operation" in the case is the stage.

    A contender that is wrong or raises on any rank is so for all. `how`: as `times_ms` takes it.
    """
    checked = {}
    for name, contender in contenders.items():
        begin = time.monotonic()
        checked[name] = everywhere(contender.check)
        if not checked[name]["correct"] or time.monotonic() - begin > SLOW_S:  # it compiles: no sign of a hang
            say(f"{name}: {checked[name]}")
    timed = {name: contender.stages for name, contender in contenders.items() if "failure" not in checked[name]}
    times = times_ms(timed, budget_s, **how) if timed else {}
    out = []
    for name, contender in contenders.items():
        for operation in times.get(name) or [*contender.stages, *([TOTAL] if len(contender.stages) > 1 else [])]:
            out.append({"case": {"operation": operation, "ranks": size(), **case}, "contender": name,
                        **times.get(name, {}).get(operation, {}), **contender.about, **checked[name]})
    return out


def everywhere(call: Callable[[], dict]) -> dict:
    """What it returns on rank 0; "correct" where no rank raises or says otherwise, else with the first "failure".

    Ends this process, and by its launcher the run, if it raises here and some rank does not come to its end.
    """
    store, key = dist.distributed_c10d._get_default_store(), f"everywhere/{next(CALLS)}"
    try:
        found = call()
    except Exception as error:  # one contender's failure must not cost the run, whose machine is lent for minutes
        found = {"correct": False, "failure": f"{type(error).__name__}: {error}"[:300]}
    arrived, end = store.add(key, 1), time.monotonic() + ALONE_S
    while "failure" in found and arrived < size():
        if time.monotonic() > end:  # peers wait for this rank in the call's own exchanges
            sys.exit(f"rank {rank()}: {found['failure']}; {size() - arrived} of {size()} ranks have not come to the "
                     f"end of the same in {ALONE_S:.0f} s more")
        time.sleep(0.05)
        arrived = store.add(key, 0)
    found_by: list = [None] * size()
    dist.all_gather_object(found_by, found)
    failures = [f"rank {r}: {one['failure']}" for r, one in enumerate(found_by) if "failure" in one]
    FAILURES.extend(failures)
    return {**found_by[0], "correct": all(one.get("correct", True) for one in found_by),
            **({"failure": failures[0]} if failures else {})}
