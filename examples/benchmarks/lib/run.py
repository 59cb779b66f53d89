# SPDX-License-Identifier: Apache-2.0
"""A benchmark from its arguments to its result file, tables and plot."""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from . import results_file, show, world


def one_or_more(text: str) -> int:
    """The type of an argument that is an integer from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parser(doc: str, seconds: float | None = None) -> argparse.ArgumentParser:
    """The arguments of every benchmark. `seconds`: the default of those that leave out what does not fit."""
    out = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--out", type=Path, help="the result file (default on GPUs: under examples/benchmarks/results)")
    out.add_argument("--commit", help="the commit measured, where the repository is not at hand")
    out.add_argument("--show", type=Path, metavar="FILE", help="show a result file and run nothing")
    out.add_argument("--check", action="store_true", help="exit with 1 if a bar is not reached")
    out.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher's, which sets LOCAL_RANK too
    if seconds is not None:
        out.add_argument("--seconds", type=float, default=seconds, help="for the whole run with its start (default: "
                         "%(default)s): what does not fit is left out")
    return out


def timed_parser(doc: str, budget: float | None, seconds: float = float("inf"),
                 more_cases: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """The arguments of benchmarks that time contenders case by case. `budget`: None where it has no effect."""
    out = parser(doc, seconds)
    out.add_argument("--cases", choices=("tiny", "short", "full", *more_cases),
                     default="full" if world.on_gpu() else "tiny",
                     help="default: full, and without a GPU tiny, which takes seconds there")
    if budget is not None:
        out.add_argument("--budget", type=float, default=budget, metavar="S",
                         help="seconds for each contender of a case (default: %(default)s)")
    return out


def parse(shown: show.Shown, parser: argparse.ArgumentParser,
          arguments: list[str] | None = None) -> argparse.Namespace:
    """A benchmark's arguments. `--show FILE` shows it and ends this process. A result file that cannot be written is
    refused before anything is measured."""
    args = parser.parse_args(arguments)
    if args.show:
        sys.exit(show.show(shown, args.show, args.check) or None)
    if not world.on_gpu() and not args.out:
        parser.error("name the result file with --out: there is no GPU here, and the files under "
                     "examples/benchmarks/results are a GPU's")
    if args.out and (args.out.suffix == ".png" or args.out.is_dir()):
        parser.error(f"--out {args.out}: expected the name of a JSON file; its plot goes beside it")
    above = next((one for one in args.out.absolute().parents if one.exists()), None) if args.out else None
    if above and not above.is_dir():
        parser.error(f"--out {args.out}: {above} is no folder")
    return args


def main(shown: show.Shown, parser: argparse.ArgumentParser,
         batches: Callable[[argparse.Namespace], Iterable[list[dict]]], ranks: bool = False,
         alone: bool = False) -> None:
    """Runs a benchmark by taking the rows of its arguments, batch by batch. Ends this process.

    The file is written after every batch, should the run be cut short. The exit status is 1 if any row is wrong, or
    if `--check` finds a bar that is not reached.

    Args:
        ranks: it runs on ranks that a launcher starts. A rank that fails ends at once, and its launcher ends the
            others.
        alone: it runs on a rank too, which is this process unless a launcher started it.
    """
    args = parse(shown, parser)
    if ranks or alone:
        world.start(alone)
    path = args.out or results_file.RESULTS / f"{shown.benchmark}{f'_{world.size()}ranks' if ranks else ''}.json"
    commit = args.commit or results_file.commit()
    taken: list[dict] = []
    for rows in batches(args):
        taken += rows
        if world.rank() == 0:
            results_file.write(shown.benchmark, taken, path, commit)
    if not taken:
        world.leave("there was no time for any case" if world.rank() == 0 else "")
        return
    world.say("measured")
    finish(shown, path, args.check)


def finish(shown: show.Shown, path: Path, check: bool) -> None:
    """Shows a result file on rank 0, and ends this rank."""
    error = ""
    if world.rank() == 0:
        try:
            error = show.show(shown, path, check)
        except Exception as problem:
            if not world.FAILURES:
                raise
            error = f"{type(problem).__name__}: {problem}"
    world.leave(error)
