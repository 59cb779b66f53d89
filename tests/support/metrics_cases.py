# SPDX-License-Identifier: Apache-2.0
"""Monitors of DeepSpeed, and what is written to them."""

import csv
from pathlib import Path


def monitor(folder: str) -> dict:
    return {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}


def written(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All figures, without the loads, which are several numbers in a row."""
    found = {}
    for path in sorted({*(folder / "job").glob("Train_MoE_*.csv")} - {*(folder / "job").glob("*_loads.csv")}):
        with path.open() as lines:
            found[path.stem.removeprefix("Train_MoE_")] = [(int(a), float(b)) for a, b in list(csv.reader(lines))[1:]]
    return found
