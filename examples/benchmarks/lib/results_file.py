# SPDX-License-Identifier: Apache-2.0
"""Result files: one JSON a run under examples/benchmarks/results/, from which every table and plot is made."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_mxfp8_moe.checkpoint.disk import write_whole

from .world import on_gpu

RESULTS = Path(__file__).resolve().parents[1] / "results"
HEAD = ("benchmark", "machine", "versions", "commit", "command", "date", "rows")


def _version(package: str) -> str | None:
    try:
        # A copy before the installed one, on PYTHONPATH, has no metadata.
        return getattr(sys.modules.get(package), "__version__", None) or version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, with "+" where tracked files differ from it. None outside of git."""
    root = Path(__file__).parent
    try:
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=root, text=True, stderr=subprocess.DEVNULL)
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=root, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if changed.strip() else "")


def machine() -> str:
    if on_gpu():
        return f"{get_accelerator().device_count()} x {torch.cuda.get_device_name()}"
    return platform.machine()


def write(benchmark: str, rows: list[dict], path: Path, of_commit: str | None = None) -> None:
    """Writes one run's rows with the machine, versions, commit, command and date. What else matters of a run is added
    by hand as its "note", which pages show.

    Args:
        rows: {"case": {...}, "contender": str, figures with their unit in the name, "correct": bool}.
        of_commit: the commit measured, for machines that have the files without the repository.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if dist.is_torchelastic_launched() else None
    launcher = ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]
    # Without the folders of the machine that ran it.
    command = [Path(word).name if Path(word).is_absolute() else word for word in (*launcher, *sys.argv)]
    result = {
        "benchmark": benchmark,
        "machine": machine(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
        | {name: _version(name) for name in ("torch", "triton", "deepspeed", "transformers", "peft", "liger-kernel")},
        "commit": of_commit or commit(),
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(result, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)  # one line a row
    write_whole(path, f'{head},\n "rows": [\n{lines}\n ]\n}}\n')


def read(path: Path, benchmark: str | None = None) -> dict:
    """A result file, of this benchmark if one is named. Exits with one line if it is none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} is no result file: {error}")
    if not isinstance(result, dict) or not result.keys() >= set(HEAD):
        sys.exit(f'{path} is no result file: expected what a benchmark writes, with "benchmark" and "rows"')
    if benchmark not in (None, result["benchmark"]):
        sys.exit(f"{path} has results of {result['benchmark']}, expected {benchmark}")
    return result


def is_as_named(row: dict) -> bool:
    """Whether a row's experts ran in what its contender's name says: where each gets few tokens, a recipe in MXFP8
    runs them in bf16."""
    return "mxfp8" not in row["contender"] or row.get("experts_in", "MXFP8") == "MXFP8"


def shown_name(row: dict) -> str:
    """The name under which a plot shows a row."""
    return row["contender"] if is_as_named(row) else f"{row['contender']}, ran in bf16"


class Group:
    """The rows of one case by contender, without those that failed or are wrong."""

    def __init__(self, case: dict, rows: Iterable[dict]):
        self.case = case
        self.rows = {row["contender"]: row for row in rows if row["correct"]}

    def figure(self, contender: str, name: str = "median_ms") -> float | None:
        return self.rows.get(contender, {}).get(name)

    def ratio(self, over: str, contender: str, name: str = "median_ms") -> float | None:
        """How many times as large the figure of `over` is. Of times: the speed-up of `contender` over it."""
        above, below = self.figure(over, name), self.figure(contender, name)
        return above / below if above is not None and below else None


def groups(result: dict, *operations: str) -> list[Group]:
    """The cases of a result file, in its order. `operations`: only those with one of these."""
    found: dict = {}
    for row in result["rows"]:
        if not operations or row["case"].get("operation") in operations:
            found.setdefault(json.dumps(row["case"], sort_keys=True), []).append(row)
    return [Group(rows[0]["case"], rows) for rows in found.values()]
