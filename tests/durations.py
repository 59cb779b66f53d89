# SPDX-License-Identifier: Apache-2.0
"""Keeps how long each test file takes, for every release: tests/durations/VERSION.json.

    make test WHICH='not wide' REPORT=report.xml && python tests/durations.py report.xml
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]


def main(report: str) -> None:
    seconds, cases = Counter(), Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        file = "/".join(case.get("classname").split(".")[1:3])
        seconds[file] += float(case.get("time"))
        cases[file] += 1
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    version = re.search(r'__version__ = "(.+)"', (ROOT / "ds_mxfp8_moe/__init__.py").read_text())[1]
    kept = {"commit": commit, "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "cases": sum(cases.values()), "seconds_of_two_processes": round(sum(seconds.values())),
            "files": {file: [cases[file], round(time, 1)] for file, time in seconds.most_common()}}
    path = ROOT / "tests" / "durations" / f"{version}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(re.sub(r"\[\n\s+(\d+),\n\s+([\d.]+)\n\s+\]", r"[\1, \2]", json.dumps(kept, indent=1)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
