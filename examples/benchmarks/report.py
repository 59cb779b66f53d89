# SPDX-License-Identifier: Apache-2.0
"""Writes what the result files say: the goals of what a training is made of, and where they stand, into the README,
between its two marks; every table of every file with its machine, versions, command and spread into RESULTS.md beside
this file; and the plots beside the files.

    make report                                      # or python examples/benchmarks/report.py: rewrites both
    python examples/benchmarks/report.py --check     # exits with 1 if that would change a figure
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from lib import results_file, show
from lib.tables import read

ROOT = Path(__file__).resolve().parents[2]
README, PAGE = ROOT / "README.md", Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
OLDER = " **Older than the code that it measures.**"
IN_README = ("convergence", "train", "moe_layer", "ep_pipeline", "expert_ffn", "latency")
LEGEND = """\
Goals were set for 8 H200. Reached: *bar*, what it must reach; *aim*, that and the aim; *MISSED*, neither. *A over B*:
how many times as fast A is as B. Recipes: *default*, *hp*: `mxfp8_wgrad_with_hp`; *all MXFP8*: `mxfp8`; _32 and _128
are block sizes. *Today's NCCL*: a bf16 row for each choice of a token, by all_to_all_single. *Link-real*: bytes that
leave or reach the busiest rank, over the call's time. *Host waits*: how often the CPU waits for the GPU in a layer's
step, *static* with `capacity_factor`, *exact* without. *With the selection on*: without `min_tokens_per_expert`, so
that small layers run bf16. *Seed shapes*: 8192x5120, 7168x2048, 2048x1408."""


def results(folder: Path = results_file.RESULTS) -> list[tuple[Path, dict]]:
    """The files that tables are made of."""
    found = [(path, read(path)) for path in sorted(folder.glob("*.json"))]
    return [(path, result) for path, result in found if result["benchmark"] in show.SHOWN]


def is_older(result: dict) -> bool:
    """Whether the package, its kernels or the benchmark changed since the commit that was measured; False where git
    does not know."""
    commit = (result["commit"] or "").rstrip("+")
    if not commit:
        return False
    try:
        asked = subprocess.run(["git", "log", "-1", "--format=%H", f"{commit}..HEAD", "--", "ds_mxfp8_moe", "ops",
                                f"examples/benchmarks/{result['benchmark']}.py"], cwd=ROOT, capture_output=True,
                               text=True, check=False)
    except OSError:  # there is no git
        return False
    return asked.returncode == 0 and bool(asked.stdout.strip())


def latest(found: list[tuple[Path, dict]]) -> list[tuple[Path, dict]]:
    """The files of IN_README's benchmarks, in that order; of those named alike but for their ranks, that of the last
    day, and of one day that of most ranks."""

    def ranks(path: Path) -> int:
        named = re.search(r"_(\d+)ranks", path.stem)
        return int(named[1]) if named else 1

    by_name: dict = {}
    for path, result in sorted(found, key=lambda file: (file[1]["date"][:10], ranks(file[0]))):
        by_name[re.sub(r"_\d+ranks", "", path.stem)] = path, result
    return sorted((file for file in by_name.values() if file[1]["benchmark"] in IN_README),
                  key=lambda file: (IN_README.index(file[1]["benchmark"]), file[0].stem))


def spread(result: dict) -> str:
    """How far the 10th and 90th percentiles of a row's times lie apart, of its median: in most rows, and at most."""
    shares = sorted((row["p90_ms"] - row["p10_ms"]) / row["median_ms"] for row in result["rows"]
                    if row.get("median_ms") and "p90_ms" in row)
    if not shares:
        return ""
    return (f"p10 to p90 of a time: {shares[len(shares) // 2]:.1%} of the median in the middle row, "
            f"{shares[int(0.9 * (len(shares) - 1))]:.1%} in nine of ten, at most {shares[-1]:.1%}")


def origin(result: dict) -> str:
    commit = result["commit"] or "unknown"
    return f"{result['machine']}, {result['date'][:10]}, commit {commit[:10]}{'+' * commit.endswith('+')}"


def _text(*tables: str) -> str:
    return "```text\n" + "\n\n".join(tables) + "\n```"


def readme(text: str) -> str:
    """The README with the goals of IN_README: the worst case of each, and where it was."""
    link = "(examples/benchmarks/RESULTS.md#"
    # GitHub's anchors are in small letters.
    parts = [f"[{path.stem}]{link}{path.stem.lower()}): {origin(result)}.{OLDER * is_older(result)}\n"
             f"{_text(show.SHOWN[result['benchmark']][0](result)[-1])}" for path, result in latest(results())]
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n" + "\n\n".join([LEGEND, *parts]) + f"\n{END}{after}"


def page() -> str:
    """Every table of every file."""
    parts = ["# Results\nWritten by `make report` out of the files in `results/`. A `+` behind a commit: tracked "
             "files differed from it.", LEGEND]
    for path, result in results():
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
        parts.append("\n\n".join(filter(None, (
            f"## {path.stem}",
            f"[{path.stem}](results/{path.name}): {origin(result)}, `{result['command']}`.{OLDER * is_older(result)}",
            f"Versions: {versions}.", spread(result),
            _text(*show.SHOWN[result["benchmark"]][0](result)),
            f"![{path.stem}](results/{path.stem}.png)"))))
    return "\n\n".join(parts) + "\n"


def outdated() -> list[str]:
    """Which of the two pages say other figures than the files."""
    pages = ((README, readme(README.read_text())), (PAGE, page()))
    return [path.name for path, new in pages if path.read_text().replace(OLDER, "") != new.replace(OLDER, "")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a figure would change")
    if parser.parse_args(arguments).check:
        wrong = outdated()
        sys.exit(f"not what the results say: {', '.join(wrong)}; run make report" if wrong else 0)
    README.write_text(readme(README.read_text()))
    PAGE.write_text(page())
    for path, result in results():
        show.draw(path, result)


if __name__ == "__main__":
    main()
