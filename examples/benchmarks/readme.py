# SPDX-License-Identifier: Apache-2.0
"""Writes what the result files have reached into the README, between its two marks.

    python examples/benchmarks/readme.py             # rewrites the README
    python examples/benchmarks/readme.py --check     # exits with 1 if that would change it
"""

import json
import sys
from pathlib import Path

import results_file
import show

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def section(results: Path = results_file.RESULTS) -> str:
    """For each result file the table of its goals: the worst case of each, and where it was."""
    parts = []
    for path in sorted(results.glob("*.json")):
        result = json.loads(path.read_text())
        if result["benchmark"] not in show.SHOWN:
            continue
        tables, _ = show.SHOWN[result["benchmark"]]
        commit = result["commit"] or "unknown"
        commit = commit[:10] + "+" * commit.endswith("+")
        parts.append(f"[{path.stem}](examples/benchmarks/results/{path.name}): {result['machine']}, "
                     f"{result['date'][:10]}, commit {commit}, `{result['command']}`\n"
                     f"```text\n{tables(result)[-1]}\n```")
    return "\n\n".join(parts)


def rewritten(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


if __name__ == "__main__":
    old = README.read_text()
    new = rewritten(old)
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if old == new else "README.md is not what the results say: run examples/benchmarks/readme.py")
    README.write_text(new)
