# SPDX-License-Identifier: Apache-2.0
"""Rows of trainings: kept from one run to the next, and right if their losses agree."""

import json
import math
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from . import results_file

# Off the reference at most, relative: the loss of any step, the gradient norm of the first.
TOLERANCES, MXFP8_TOLERANCES = (0.002, 0.015), (0.003, 0.02)


def key(row: dict) -> tuple:
    return json.dumps(row["case"], sort_keys=True), row["contender"]


def stored(path: Path, benchmark: str) -> list[dict]:
    """The rows of a result file of this kind of machine; none where there is no such file."""
    if not path.exists():
        return []
    result = results_file.read(path, benchmark)
    if result["machine"] != results_file.machine():
        sys.exit(f"{path} has results of {result['machine']}: name another file by --out")
    return result["rows"]


def settle(rows: Iterable[dict], references: Collection[str], changes: Collection[str] = ()) -> None:
    """Compares each row's losses and first gradient norm with those of the case's reference, and says what is
    correct.

    Args:
        references: contenders in bf16. The first of them that has losses is the reference.
        changes: keys of cases that change no result. A case has the reference of that without them.
    """
    rows = list(rows)
    unchanged = dict.fromkeys(changes)
    for row in rows:
        if "losses" not in row:
            continue
        others = {other["contender"]: other for other in rows
                  if other["case"] == row["case"] | unchanged and "losses" in other}
        reference = next((others[name] for name in references if name in others), row)
        offs = [abs(a / b - 1) for a, b in zip(row["losses"], reference["losses"], strict=True)]
        off = max(offs, key=lambda each: math.inf if math.isnan(each) else each)
        norm_off = abs(row["gradient_norm"] / reference["gradient_norm"] - 1)
        most, most_norm = TOLERANCES if row["contender"] in references else MXFP8_TOLERANCES
        row.update(loss_off=round(off, 6), norm_off=round(norm_off, 6), correct=off <= most and norm_off <= most_norm)
        row.pop("error", None)
        if not row["correct"]:
            row["error"] = (f"losses {off:.2%} off {reference['contender']} (at most {most:.2%}), the first gradient "
                            f"norm {norm_off:.2%} (at most {most_norm:.2%})")
