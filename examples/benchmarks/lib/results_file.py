# SPDX-License-Identifier: Apache-2.0
"""Result files: one JSON a run under examples/benchmarks/results/, from which every table and plot is derived."""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from .timing import on_gpu

RESULTS = Path(__file__).resolve().parents[1] / "results"


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None = None,
          unwritten: tuple[str, ...] = ("show", )) -> argparse.Namespace:
    """A benchmark's arguments; without a GPU, --out is required. A name that no result file can have is refused before
    anything is measured.

    Args:
        unwritten: the options with which no result file is written.
    """
    args = parser.parse_args(arguments)
    if not on_gpu() and not args.out and all(getattr(args, name) is None for name in unwritten):
        parser.error("name the result file with --out: there is no GPU here, and the files under "
                     "examples/benchmarks/results are a GPU's")
    if args.out and (args.out.suffix == ".png" or args.out.is_dir()):
        parser.error(f"--out {args.out}: expected the name of a JSON file; its plot goes beside it")
    above = next((one for one in args.out.absolute().parents if one.exists()), None) if args.out else None
    if above and not above.is_dir():
        parser.error(f"--out {args.out}: {above} is no folder")
    return args


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, with "+" where tracked files differ from it; None outside of git."""
    root = Path(__file__).parent
    try:
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=root, text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=root, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")


def _launcher() -> list[str]:
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if dist.is_torchelastic_launched() else None
    return ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]


def write(benchmark: str, rows: list[dict], path: Path, *, of_commit: str | None = None) -> None:
    """Writes one run's rows with the machine, versions, commit, command and date.

    Args:
        rows: {"case": {...}, "contender": str, figures with their unit in the name, "correct": bool}.
        of_commit: the commit measured, for machines that have the files without the repository.
    """
    result = {
        "benchmark": benchmark,
        "machine": (f"{get_accelerator().device_count()} x {torch.cuda.get_device_name()}" if on_gpu()
                    else platform.machine()),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
        | {name: _version(name) for name in ("torch", "triton", "deepspeed", "transformers")},
        "commit": of_commit or commit(),
        # Without the folders of the machine that ran it.
        "command": shlex.join(Path(a).name if Path(a).is_absolute() else a for a in (*_launcher(), *sys.argv)),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(result, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)  # one line a row
    # Whatever ends this process meanwhile, the rows of before are not lost.
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
    unfinished.replace(path)

