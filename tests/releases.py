# SPDX-License-Identifier: Apache-2.0
"""Which releases of torch, Triton and transformers the package runs with.

    make test-releases                        # every piece, in environments of its own: about an hour on two cores
    python tests/releases.py oldest 3.7.1     # these pieces alone
    python tests/releases.py --gpu            # tests/gpu in this environment, on this machine's GPU
    python tests/releases.py 3.6.0 --unrecorded   # only says whether it passes, as in CI
    python tests/releases.py --show           # the table of works_with.md

Pieces: "oldest" and "newest" run the CPU tests with the oldest and the newest releases. A release of Triton compiles
every kernel ahead of time, for Hopper and Blackwell. Results are added to releases.json beside this script. The
table of examples/guides/works_with.md is made of it.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_suffix(".json")
# For each end, its environment and what `make setup` gets. The newest releases are those that it installs by default.
ENDS = {"oldest": (".venv-oldest", ["TORCH=2.11.0", "PINS=triton==3.6.0 transformers==5.17.0"]),
        "newest": (".venv", [])}
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
PACKAGES = ("torch", "triton", "transformers", "deepspeed", "peft", "accelerate")
PAGE, BEGIN, END = ROOT / "examples/guides/works_with.md", "<!-- releases: begin -->", "<!-- releases: end -->"


def run(command: list[str], **environment: str) -> str:
    """The command's output, which is printed as it comes."""
    print("$", *command, flush=True)
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env={**os.environ, **environment})
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    process.wait()
    return "".join(lines)


def versions(python: str) -> dict[str, str]:
    """Of the interpreter and its packages."""
    program = (f"import importlib, json, platform; print(json.dumps({{'python': platform.python_version(), **{{name: "
               f"importlib.import_module(name).__version__ for name in {PACKAGES!r}}}}}))")
    return json.loads(output_of([python, "-c", program]).splitlines()[-1])


def output_of(command: list[str]) -> str:
    return subprocess.check_output(command, text=True, cwd=ROOT).strip()


def tested(python: str, arguments: list[str], **environment: str) -> dict:
    """What pytest counted, and how long it took."""
    output = run([python, "-m", "pytest", *arguments], **environment)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", output)}
    seconds = re.search(r" in ([\d.]+)s", output)
    return {**counts, "correct": not any(word.startswith(("fail", "error")) for word in counts) and "passed" in counts,
            "seconds": float(seconds[1]) if seconds else None}


def cpu_tests(end: str) -> dict:
    name, pins = ENDS[end]
    run(["make", "setup", f"VENV={name}", *pins])
    python = str(ROOT / name / "bin" / "python")
    found = tested(python, ["-n", "2", "--dist", "loadfile", "-m", "not slow"],
                   TORCH_EXTENSIONS_DIR=str(ROOT / name / "torch_extensions"))
    return {"case": {"what": "CPU tests", "versions": versions(python)}, **found}


def compiled(triton: str) -> dict:
    """Another Triton over the newest environment."""
    run(["make", "setup"])
    newest, venv = str(ROOT / ".venv" / "bin" / "python"), ROOT / f".venv-triton-{triton}"
    python = str(venv / "bin" / "python")
    if not (venv / "ready").exists():
        run([newest, "-m", "venv", "--clear", str(venv)])
        ask = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        below, here = output_of([newest, *ask]), output_of([python, *ask])
        (Path(here) / "newest.pth").write_text(f"import site; site.addsitedir({below!r})\n")  # with its .pth files
        run([python, "-m", "pip", "install", "-q", "--no-deps", f"triton=={triton}"])
        (venv / "ready").touch()
    found = tested(python, ["-o", "addopts=", "-m", "wide", "tests/kernels/test_aot.py"], PYTHONPATH=str(ROOT))
    return {"case": {"what": "compiled for sm_90 and sm_100", "versions": versions(python)}, **found}


def on_gpu(arguments: list[str]) -> dict:
    import torch
    found = tested(sys.executable, arguments or ["tests/gpu"])
    case = {"what": "GPU tests", "versions": versions(sys.executable), "device": torch.cuda.get_device_name()}
    return {"case": case if not arguments else {**case, "part": " ".join(arguments)}, **found}


def add(row: dict) -> None:
    """Puts a row in place of that of the same case."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    row |= {"date": datetime.date.today().isoformat(), "commit": commit.strip(), "machine": platform.machine()}

    def key(row: dict) -> str:
        case = row["case"]
        told = ("torch", "triton", "transformers") if case["what"] == "CPU tests" else ("triton", )
        return json.dumps([case["what"], case.get("device"), case.get("part"), *(case["versions"][p] for p in told)])

    rows = [old for old in rows if key(old) != key(row)] + [row]
    lines = ",\n".join(json.dumps(row) for row in sorted(rows, key=key))  # one line a row
    RESULTS.write_text(f"[\n{lines}\n]\n")
    print(f"{row['case']}: {'passed' if row['correct'] else 'FAILED'}", flush=True)


def table(rows: list[dict]) -> str:
    """What was run with which releases, as a table: a line for each kind of run."""
    runs: dict[str, list[str]] = {}
    for row in rows:
        case, found = row["case"], row["case"]["versions"]
        what = case["what"] + (f" on an {case['device']}" if "device" in case else "")
        names = {"CPU tests": ("python", "torch", "triton", "transformers"), "GPU tests": ("torch", "triton")}
        with_what = ", ".join(f"{name} {found[name]}" for name in names.get(case["what"], ("triton", )))
        part = f" ({case['part']})" if "part" in case else ""
        failed = "" if row["correct"] else ", FAILED"
        runs.setdefault(what, []).append(f"{with_what}{part}: {row.get('passed', 0)} passed{failed}")
    return "\n".join(["| run | with |", "|---|---|", *(f"| {what} | {'; '.join(of)} |" for what, of in runs.items())])


def write_page() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    rows = json.loads(RESULTS.read_text())
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="piece", help=f"of {', '.join((*ENDS, *TRITONS))}; default: all. "
                        "With --gpu: what pytest shall run (default: tests/gpu)")
    parser.add_argument("--gpu", action="store_true", help="run GPU tests here")
    parser.add_argument("--unrecorded", action="store_true", help="write no result")
    parser.add_argument("--show", action="store_true", help="write the table and run nothing")
    given = parser.parse_args()
    unknown = set(() if given.gpu else given.pieces) - {*ENDS, *TRITONS}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join((*ENDS, *TRITONS))}")
    if given.gpu:
        runs = [partial(on_gpu, given.pieces)]
    else:
        pieces = () if given.show else given.pieces or (*TRITONS, *ENDS)
        runs = [partial(cpu_tests if piece in ENDS else compiled, piece) for piece in pieces]
    correct = True
    for run_piece in runs:
        row = run_piece()
        correct &= row["correct"]
        if not given.unrecorded:
            add(row)
    if not given.unrecorded:
        write_page()
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
