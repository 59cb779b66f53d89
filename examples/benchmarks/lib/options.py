# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks have in common: their arguments, kernels compiled beforehand, and result files."""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

# At the end: it has a module called train as well.
sys.path.append(str(Path(__file__).resolve().parents[2] / "gpt_moe"))

from arguments import one_or_more  # noqa: E402

from . import (
    results_file,  # noqa: E402
    shapes,  # noqa: E402
    show,  # noqa: E402
    timing,  # noqa: E402
)

BYTES_AT_MOST = 100e9  # cases that need more are left out
SECONDS_BETWEEN_WRITES = 15


def dims(text: str) -> tuple[int, int]:
    """The type of an argument like 7168x2048."""
    dim, _, hidden = text.partition("x")
    return one_or_more(dim), one_or_more(hidden)


def parser(doc: str, jobs: bool = True) -> argparse.ArgumentParser:
    """`jobs`: with the arguments of `compile_beforehand`."""
    out = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = timing.on_gpu()
    out.add_argument("--cases", choices=("tiny", "short", "full"), default="full" if on_gpu else "tiny",
                     help="default: full, and without a GPU tiny, which takes seconds there")
    out.add_argument("--budget", type=float, default=0.1, metavar="S", help="seconds for each contender of a case")
    out.add_argument("--out", type=Path, help="the result file (default on GPUs: under examples/benchmarks/results)")
    out.add_argument("--commit", help="the commit measured, where the repository is not at hand")
    out.add_argument("--show", type=Path, metavar="FILE", help="show a result file and run nothing")
    if jobs:
        out.add_argument("--jobs", type=int, default=8 if on_gpu else 0,
                         help="processes that compile kernels beforehand; 0: none do")
        out.add_argument("--warm-up", type=int, help=argparse.SUPPRESS)
    return out


def add_shapes(out: argparse.ArgumentParser) -> None:
    out.add_argument("--shapes", nargs="+", metavar="DIMxHIDDEN", help="of the cases, only those of these shapes")
    out.add_argument("--experts", nargs="+", type=int, help="only those with so many experts")
    out.add_argument("--tokens", nargs="+", type=int, help="only those with so many tokens per expert")
    out.add_argument("--splits", nargs="+", choices=shapes.SPLITS, help="only those split like this")


def part(items: Iterable, args: argparse.Namespace) -> list:
    """What this process of `compile_beforehand` takes."""
    return list(items)[args.warm_up::args.jobs]


def chosen(args: argparse.Namespace, bytes_of: Callable[[shapes.Case], float]) -> list[shapes.Case]:
    """The cases that are asked for and fit; exits with those that there are, if none is left."""
    every = shapes.cases(args.cases)
    found = [case for case in every
             if (not args.shapes or f"{case.dim}x{case.hidden}" in args.shapes)
             and (not args.experts or case.experts in args.experts)
             and (not args.tokens or case.tokens_per_expert in args.tokens)
             and (not args.splits or case.split in args.splits) and bytes_of(case) <= BYTES_AT_MOST]
    if not found:
        there = {"--shapes": [f"{case.dim}x{case.hidden}" for case in every],
                 "--experts": [case.experts for case in every], "--tokens": [case.tokens_per_expert for case in every],
                 "--splits": [case.split for case in every]}
        sys.exit(f"--cases {args.cases} has no such case of at most {BYTES_AT_MOST / 1e9:.0f} GB; it has "
                 + "; ".join(f"{name} {' '.join(map(str, dict.fromkeys(of)))}" for name, of in there.items()))
    return found


def rate_rows(args: argparse.Namespace) -> list[dict]:
    """timing.rate_rows of a size that goes with the cases."""
    return timing.rate_rows(1 << 20, 256) if args.cases == "tiny" else timing.rate_rows()


def compile_beforehand(args: argparse.Namespace) -> None:
    """Starts this very command --jobs times, each to call a part of its kernels once (`--warm-up` says which): they
    then wait in Triton's cache."""
    started = [subprocess.Popen([sys.executable, *sys.argv, "--warm-up", str(part)], stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL) for part in range(args.jobs)]
    if any([process.wait() for process in started]):
        print("a process that compiles kernels beforehand failed: they are compiled on their first call",
              file=sys.stderr)


def finish(benchmark: str, rows: Iterable[dict], args: argparse.Namespace) -> None:
    """Runs the benchmark by taking its rows, writes them, draws the plot, prints the table; exits with 1 if any of
    them was wrong. What is there is written now and then, should the run be cut short."""
    path = args.out or results_file.RESULTS / f"{benchmark}.json"
    taken: list[dict] = []
    written = time.monotonic()
    for row in rows:
        taken.append(row)
        if time.monotonic() - written > SECONDS_BETWEEN_WRITES:
            results_file.write(benchmark, taken, path, of_commit=args.commit)
            written = time.monotonic()
    results_file.write(benchmark, taken, path, of_commit=args.commit)
    if not show.show(path):
        sys.exit("some results were wrong")
