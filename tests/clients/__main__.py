# SPDX-License-Identifier: Apache-2.0
"""Trains in the programs that people use, with a DeepSpeed JSON and nothing else, and compares.

    make test-clients                       # every client, in environments of their own: about an hour on two cores
    python tests/clients trl accelerate     # these clients
    python tests/clients trl:dpo            # one kind of training
    python tests/clients --show             # the table of clients.md

A client's module, of_NAME.py, says what is installed and started. Each kind of training runs on two CPU ranks: before
the package is installed; then without its section, with it, from the checkpoint of half of that run, and with LoRA on
attention and experts. Losses with the section must be within 1% of those without it, in each step, or on average
where client.py says so. A resumed run must be within 0.1% of the run that it continues. Without the section, losses
and saved weights must have the same bits as before the package was installed. Saved models must load in plain
transformers, with a loss within 1% of the plain run's.

Results are added to results.json. The table of examples/guides/clients.md is made of it. Environments are
.venv-client-NAME, what runs write is in runs/clients. DS_MXFP8_MOE_PYTHON names another base environment than .venv.
"""

import argparse
import datetime
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from client import ABSENT, EACH_STEP, LORA, LORA_PLAIN, MEAN, PLAIN, RESUMED, SECTION, STEPS, Client, Job

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS, PAGE = HERE / "results.json", ROOT / "examples/guides/clients.md"
BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
NAMES = tuple(sorted(path.stem.removeprefix("of_") for path in HERE.glob("of_*.py")))
BASE = os.environ.get("DS_MXFP8_MOE_PYTHON", str((ROOT / ".venv").resolve() / "bin" / "python"))
WORK = ROOT / "runs" / "clients"
# What clients share: links to the base environment's packages, and DeepSpeed's extension that is built of them.
SHARED = ROOT / ".venv-clients-shared"
SECTIONS = {"expert_parallel": {"enabled": True, "autoep_size": 2}, "mxfp8_moe": {"enabled": True}}
CONVERTED = re.compile(r"(\d+) of (\d+) MoE layers converted")
LIMIT_SECONDS = 900
TOLERANCE, RESUMED_TOLERANCE = 0.01, 0.001
# Base packages that a client's environment does not see: this package, and what makes checkouts importable.
HIDDEN = ("ds_mxfp8", "__editable__", "__pycache__", "pip")


def of_python(python: str, code: str) -> str:
    return subprocess.check_output([python, "-c", code], text=True, cwd=WORK, env=environment()).strip()


def environment(client: Client | None = None, folder: Path | None = None) -> dict[str, str]:
    """Nothing of this checkout, and nothing that switches the hook."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "DS_MXFP8_MOE", "VIRTUAL_ENV"))}
    if client is None:
        return kept
    extensions = (SHARED if client.shared else folder) / "torch_extensions"
    return {**kept, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "TORCH_EXTENSIONS_DIR": str(extensions), "HF_HOME": str(folder / "huggingface"), **client.variables}


def made_environment(name: str, client: Client) -> Path:
    """The client's environment, without this package. It is made anew if what it has to hold has changed."""
    folder = ROOT / f".venv-client-{name}"
    ready, asked = folder / "ready", json.dumps([client.packages, client.shared, BASE])
    if not ready.exists() or ready.read_text() != asked:
        subprocess.run([BASE, "-m", "venv", "--clear", folder], check=True)
        python = folder / "bin" / "python"
        if client.shared:
            share_packages(str(python), folder)
        for arguments in client.packages:
            print("$ pip install", *arguments, flush=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *arguments], check=True,
                           env=environment() | {"DS_BUILD_OPS": "0"})
        ready.write_text(asked)
    subprocess.run([folder / "bin" / "pip", "uninstall", "-q", "-y", "ds_mxfp8_moe"], check=True, env=environment())
    return folder


def share_packages(python: str, folder: Path) -> None:
    """The environment also sees the base environment's packages and programs. Its own come first."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shutil.rmtree(SHARED / "packages", ignore_errors=True)
    (SHARED / "packages").mkdir(parents=True)
    for path in Path(of_python(BASE, ask)).iterdir():
        if not path.name.startswith(HIDDEN) and path.suffix != ".pth":
            (SHARED / "packages" / path.name).symlink_to(path)
    (Path(of_python(python, ask)) / "shared.pth").write_text(f"{SHARED / 'packages'}\n")
    programs = Path(BASE).parent
    for program in programs.iterdir():
        mine = folder / "bin" / program.name
        if mine.exists() or program.name.startswith((*HIDDEN, "python", "activate", "Activate")):
            continue
        if program.read_bytes().startswith(f"#!{programs}/".encode()):
            mine.write_text(f"#!{python}\n" + program.read_text().split("\n", 1)[1])
            mine.chmod(0o755)
        else:
            mine.symlink_to(program)


def wheel() -> Path:
    to = WORK / "wheel"
    shutil.rmtree(to, ignore_errors=True)
    subprocess.run([BASE, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", to, ROOT], check=True)
    return next(to.glob("*.whl"))


def versions(python: Path) -> dict[str, str]:
    """Of the interpreter, and of the packages that matter here."""
    clients = [importlib.import_module(f"of_{name}").CLIENT.distribution or name for name in NAMES]
    named = ["torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "datasets", *clients]
    code = f"""
import importlib.metadata, json, platform
found = {{"python": platform.python_version()}}
for name in {named!r}:
    try:
        found[name] = importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))"""
    return json.loads(of_python(str(python), code))


def run(command: list[str], log: Path, **given) -> tuple[int, str]:
    """The exit status, or 124 past the limit, and what was printed."""
    print("$", *command, flush=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   start_new_session=True, **given)
        try:
            status = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = 124
        finally:  # launchers leave ranks behind
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    return status, log.read_text(errors="replace")


def digest(folder: Path) -> str:
    """Of the saved weights."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def trained(client: Client, folder: Path, job: Job) -> dict:
    """A run, and the loss of what it saved."""
    shutil.rmtree(job.out, ignore_errors=True)
    job.out.parent.mkdir(parents=True, exist_ok=True)
    command, started = client.command(job), time.monotonic()
    given = {"cwd": job.data.parent, "env": environment(client, folder)}
    status, printed = run(command, job.out.with_suffix(".log"), **given)
    found = {"command": shown(command), "seconds": round(time.monotonic() - started), "status": status,
             "converted": sorted({match[0] for match in CONVERTED.finditer(printed)})}
    if status:
        print(printed[-4000:], flush=True)
        return found | {"losses": {}}
    saved = client.saved(job)
    found |= {"losses": client.losses(job, printed), "digest": digest(saved)}
    base = [job.model] if (saved / "adapter_config.json").exists() else []
    status, printed = run([folder / "bin" / "python", "-P", HERE / "saved_loss.py", job.model.parent, saved, *base],
                          job.out.with_suffix(".saved.log"), **given)
    answer = printed.strip().splitlines()[-1]
    return found | ({"saved_loss": json.loads(answer)["loss"]} if not status else {"not_loaded": answer})


def shown(command: list[str]) -> str:
    """As a user would type it: names of files alone."""
    return " ".join(re.sub(r"(?<![\w.])/[^\s,'\"]*/", "", str(word)) if "/" in str(word) else str(word)
                    for word in command)


def difference(these: dict[int, float], those: dict[int, float], compared: str) -> float:
    """The largest relative difference over the steps of `these`, or the difference of the means. Infinite if a step is
    missing."""
    if not these or not {*these} <= {*those}:
        return float("inf")
    if compared == MEAN:
        return abs(sum(these.values()) / sum(those[step] for step in these) - 1)
    return max(abs(loss - those[step]) / max(abs(those[step]), 1e-3) for step, loss in these.items())


def faults(what: str, found: dict[str, dict], compared: str | None) -> list[str]:
    """What is wrong with a run, beside those before it. Adds to it the figures that it was judged by."""
    row, wrong = found[what], []
    if row["status"]:
        return [f"exit status {row['status']}"]
    if "not_loaded" in row:
        wrong.append(f"what was saved does not load: {row['not_loaded']}")
    steps = range(STEPS // 2 + 1 if what == RESUMED else 1, STEPS + 1)
    if what == RESUMED:  # the Trainer's history may begin with the steps before
        row["losses"] = {step: loss for step, loss in row["losses"].items() if step in steps}
    if [*row["losses"]] != [*steps]:
        wrong.append(f"losses of steps {[*row['losses']]}")
    counts = [CONVERTED.search(line) for line in row["converted"]]
    if what in (SECTION, RESUMED, LORA):
        if not counts or any(count[1] != count[2] for count in counts):
            wrong.append(f"converted: {row['converted']}")
    elif counts:
        wrong.append("converted without a section")
    if what == PLAIN and ABSENT in found:
        row["same_bits"] = all(row.get(of) == found[ABSENT].get(of) for of in ("losses", "digest"))
        if not row["same_bits"]:
            wrong.append("other bits than without the package")
    reference = {SECTION: PLAIN, LORA: LORA_PLAIN, RESUMED: SECTION}.get(what)
    if reference in found:
        allowed, compared = (RESUMED_TOLERANCE, EACH_STEP) if what == RESUMED else (TOLERANCE, compared)
        if compared:
            row["difference"] = difference(row["losses"], found[reference]["losses"], compared)
        if row.get("difference", 0) > allowed:
            wrong.append(f"losses differ by {row['difference']:.2%} from those of {reference}")
        if "saved_loss" in row and "saved_loss" in found[reference]:
            ratio = row["saved_loss"] / found[reference]["saved_loss"] - 1
            row["saved_difference"] = abs(ratio)
            if abs(ratio) > allowed:
                wrong.append(f"the saved model's loss differs by {ratio:+.2%} from that of {reference}")
    return wrong


def test(name: str, kinds: list[str], package: Path) -> Iterator[dict]:
    """All runs of a client's kinds of training, as rows."""
    client = importlib.import_module(f"of_{name}").CLIENT
    folder, work = made_environment(name, client), WORK / name
    python = folder / "bin" / "python"
    tiny = work / "tiny"
    tiny.mkdir(parents=True, exist_ok=True)
    subprocess.run([python, "-P", HERE / "tiny.py", tiny], check=True, env=environment(client, folder))
    for what, sections in {"plain": {}, "section": SECTIONS}.items():
        (tiny / f"{what}.json").write_text(json.dumps(client.deepspeed(sections), indent=2))

    def job(kind: str, what: str) -> Job:
        out = work / kind / what.replace(" ", "_")
        resume = client.checkpoint(job(kind, SECTION)) if what == RESUMED else None
        deepspeed = tiny / ("section.json" if what in (SECTION, RESUMED, LORA) else "plain.json")
        return Job(kind, tiny / "qwen3_moe", tiny / "data", deepspeed, out, what in (LORA_PLAIN, LORA), resume)

    found: dict[str, dict[str, dict]] = {
        kind: {ABSENT: trained(client, folder, job(kind, ABSENT))} if ABSENT in client.kinds[kind] else {}
        for kind in kinds}
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", package], check=True, env=environment())
    same = {"client": name, "versions": versions(python), "date": datetime.date.today().isoformat(),
            "commit": of_commit()}
    for kind, of_kind in found.items():
        for what in client.kinds[kind]:
            if what not in of_kind:
                of_kind[what] = trained(client, folder, job(kind, what))
            wrong = faults(what, of_kind, client.compared.get(kind, EACH_STEP))
            print(f"{name}, {kind}, {what}: {'; '.join(wrong) or 'right'}", flush=True)
            yield {"kind": kind, "run": what, "wrong": wrong, **of_kind[what], **same}


def of_commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                          text=True).stdout.strip()


def add(new: dict) -> None:
    """Adds a row. It replaces an earlier one with the same client, kind and run."""
    rows = {(row["client"], row["kind"], row["run"]): row for row in [*recorded(), new]}
    lines = ",\n".join(json.dumps(row) for row in rows.values())  # one line a row
    RESULTS.write_text(f"[\n{lines}\n]\n")


def recorded() -> list[dict]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def table(rows: list[dict]) -> str:
    """A line for each client and kind of training."""
    kinds: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        kinds.setdefault((row["client"], row["kind"]), {})[row["run"]] = row

    def cell(found: dict[str, dict], what: str, figure: str) -> str:
        if what not in found:
            return "not run"
        if found[what]["wrong"]:
            return f"FAILED: {'; '.join(found[what]['wrong'])}"
        if figure == "same_bits":
            return "same bits" if found[what].get(figure) else "runs"
        value = found[what].get(figure)
        return "runs" if value is None else f"{value:.2%}"

    lines = []
    for (name, kind), found in sorted(kinds.items()):
        client = importlib.import_module(f"of_{name}").CLIENT
        first = next(iter(found.values()))
        release = first["versions"].get(client.distribution or name, "")
        using = ", ".join(f"{other} {first['versions'][other]}" for other in ("transformers", "peft")
                          if other in first["versions"])
        lines.append(f"| {client.title} {release}, {kind} | {using} | "
                     + " | ".join(cell(found, *of) for of in (
                         (SECTION, "difference"), (SECTION, "saved_difference"), (RESUMED, "difference"),
                         (LORA, "difference"), (LORA, "saved_difference"), (PLAIN, "same_bits"))) + " |")
    head = ("client", "with", "losses", "saved model", "resumed", "LoRA", "saved adapters", "without the section")
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])


def write_page() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(recorded())}\n{END}{rest.split(END)[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="client[:kind]", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--unrecorded", action="store_true", help="write no result")
    parser.add_argument("--show", action="store_true", help="write the table and run nothing")
    given = parser.parse_args()
    asked: dict[str, list[str]] = {}
    for name, _, kind in (one.partition(":") for one in (() if given.show else given.clients or NAMES)):
        if name not in NAMES:
            parser.error(f"{name}: expected some of {', '.join(NAMES)}")
        kinds = [*importlib.import_module(f"of_{name}").CLIENT.kinds]
        if kind and kind not in kinds:
            parser.error(f"{name}:{kind}: expected some of {', '.join(kinds)}")
        asked.setdefault(name, []).extend([kind] if kind else kinds)
    WORK.mkdir(parents=True, exist_ok=True)
    package, wrong = wheel() if asked else None, False
    for name, kinds in asked.items():
        for row in test(name, kinds, package):
            wrong |= bool(row["wrong"])
            if not given.unrecorded:
                add(row)
    if not given.unrecorded:
        write_page()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
