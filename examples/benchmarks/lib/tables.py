# SPDX-License-Identifier: Apache-2.0
"""What every table and plot is made of: the rows of a result file by case and contender, speedups, and bars."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tabulate import tabulate


def read(path: Path) -> dict:
    """A result file; exits where it is none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} is no result file: {error}")
    if not isinstance(result, dict) or not {"benchmark", "machine", "commit", "date", "rows"} <= result.keys():
        sys.exit(f'{path} is no result file: expected what a benchmark writes, with "benchmark" and "rows"')
    return result


class Group:
    """The rows of one case by contender; those that failed or are wrong are left out."""

    def __init__(self, case: dict, rows: Iterable[dict]):
        self.case = case
        self.rows = {row["contender"]: row for row in rows if row["correct"]}

    def figure(self, contender: str, name: str = "median_ms") -> float | None:
        return self.rows.get(contender, {}).get(name)

    def ratio(self, over: str, contender: str, name: str = "median_ms") -> float | None:
        """How much larger the figure of `over` is: a speedup, where it is a time."""
        above, below = self.figure(over, name), self.figure(contender, name)
        return above / below if above is not None and below else None

    def tflops(self, contender: str) -> float | None:
        ms = self.figure(contender)
        return self.case["flops"] / ms / 1e9 if ms else None

    def fastest(self, contenders: Iterable[str]) -> str:
        return min((c for c in contenders if self.figure(c)), key=self.figure, default="")


def groups(result: dict, *operations: str) -> list[Group]:
    """In the order of the file; with `operations` only those."""
    found: dict = {}
    for row in result["rows"]:
        if not operations or row["case"].get("operation") in operations:
            found.setdefault(json.dumps(row["case"], sort_keys=True), []).append(row)
    return [Group(rows[0]["case"], rows) for rows in found.values()]


def speedup(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def bar(what: str, found: Iterable[tuple[float | None, str]], least: float | None = None, aim: float | None = None,
        most: bool = False) -> list:
    """A line about the worst of `found`, figures and where they were measured; with `most`, the larger the worse.
    Without `least` and `aim` there is no goal."""
    known = [(value, where) for value, where in found if value is not None]
    if not known:
        return [what, "", "", least, aim, "not measured"]
    value, where = (max if most else min)(known, key=lambda pair: pair[0])
    if least is None or aim is None:
        return [what, round(value, 3), where, "", "", ""]
    reached = [value <= goal if most else value >= goal for goal in (least, aim)]
    return [what, round(value, 3), where, least, aim, "aim" if all(reached) else "bar" if reached[0] else "MISSED"]


def bars(lines: list) -> str:
    return tabulate(lines, ["what", "worst", "where", "must reach", "aim", "reached"])


def legends(axes) -> None:
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
