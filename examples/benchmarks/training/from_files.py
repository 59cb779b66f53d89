# SPDX-License-Identifier: Apache-2.0
"""Large models on one GPU, from a checkpoint's files: `from_pretrained`, LoRA on attention and experts, and training.

The files have random weights in a model's real shapes, one file for each layer, with the names of published
checkpoints. Layers of the same form have the same values, so that files of 100 GB are written in a minute or two. In
FP8 and MXFP4, only routed experts are quantized; FP8's scales are powers of two. The files go to the first of
`--folders` that has room, with links in one folder, and are deleted as soon as the model is loaded.

The load's seconds are those of `from_pretrained`, whose files the system may still hold in its cache. A plain read of
the same files follows, by as many threads, into memory that is used again. The load's host memory is what this
process's anonymous memory (RssAnon) grew by at most, sampled every 50 ms. "Resident" (VmRSS) also has what is mapped.
Without a GPU, the model is in both. A tiny model is loaded before the first case, so that modules and kernels are
there.

The peak of the GPU's memory is over the load, the engine's start and the steps. Training is that of whole_model.py,
with Liger where it has kernels for the model, and else with the loss in chunks.

    python examples/benchmarks/training/from_files.py --models GLM-4.5-Air --folders /dev/shm /tmp
"""

import argparse
import ctypes
import gc
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ds_mxfp8_moe
from ds_mxfp8_moe.checkpoint.reading import BUFFER_BYTES, THREADS
from lib import run, show, trainings, world
from lib.show import Measure, bar
from lib.world import BF16, on_gpu
from training import changes
from training.random_files import IN_BF16, IN_FP8, IN_MXFP4, checkpoint
from training.whole_model import (
    DEFAULT,
    IN_4_BITS,
    IN_8_BITS,
    LORA,
    MODELS,
    Case,
    Training,
    engine_config,
    measure,
    prepared,
    without_liger,
)

# By model: what the files are in, and contenders. gpt-oss' files are in 4 bits.
CASES = {"tiny": {"tiny": ((IN_FP8, (DEFAULT, )), (IN_BF16, (DEFAULT, IN_4_BITS))),
                  "tiny-gpt-oss": ((IN_MXFP4, (DEFAULT, )), )},
         "short": {"Qwen3-30B-A3B": ((IN_BF16, (DEFAULT, IN_4_BITS)), )}}
CASES["full"] = {**CASES["short"], "gpt-oss-120b": ((IN_MXFP4, (DEFAULT, IN_8_BITS)), ),
                 "GLM-4.5-Air": ((IN_FP8, (DEFAULT, IN_4_BITS)), )}
NAMES = list(dict.fromkeys(name for models in CASES.values() for name in models))
SAMPLES_S = 0.05
STATUS, GIB = Path("/proc/self/status"), 2**30


def in_memory() -> dict[str, int]:
    """Bytes of this process."""
    return {key: 1024 * int(kb) for key, kb in re.findall(r"(RssAnon|VmRSS):\s+(\d+) kB", STATUS.read_text())}


@contextmanager
def growth() -> Iterator[dict[str, float]]:
    """GiB by which `in_memory` grew inside the context at most, once it has ended."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or growth would hide in what was freed before
    before, most, over = in_memory(), {}, threading.Event()

    def sample() -> None:
        last = False
        while not last:
            last = over.wait(SAMPLES_S)
            most.update({key: max(most.get(key, 0.0), (now - before[key]) / GIB) for key, now in in_memory().items()})

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def peak_gib() -> float:
    """Of the GPU's memory, since this was last called."""
    get_accelerator().synchronize()
    peak = get_accelerator().max_memory_allocated() / GIB if on_gpu() else 0.0
    get_accelerator().reset_peak_memory_stats()
    return peak


def load(case: Case, contender: str, folder: Path) -> torch.nn.Module:
    attention = {key: value for key, value in MODELS[case.model].items() if key == "attn_implementation"}
    return ds_mxfp8_moe.from_pretrained(folder, engine_config(case, contender, 1), dtype=BF16, **attention)


def read_plainly(folder: Path) -> float:
    """The seconds that it takes to read a folder's files."""

    def read(path: Path) -> None:
        block = bytearray(BUFFER_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass

    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(read, folder.glob("*.safetensors")))
    return time.perf_counter() - begin


class FromFiles(Training):
    """`loaded`: what the row says of the files and of the load."""

    def __init__(self, case: Case, contender: str, files: str, folders: list[Path]):
        with checkpoint(case.config(), files, folders) as (folder, self.loaded):
            world.say(f"{self.loaded['file_gb']:.1f} GB of files written in {self.loaded['write_s']:.0f} s")
            get_accelerator().empty_cache()
            peak_gib()
            with growth() as host:
                begin = time.perf_counter()
                model = load(case, contender, folder)
                get_accelerator().synchronize()
                self.loaded["load_s"] = time.perf_counter() - begin
            read_s, gb = read_plainly(folder), self.loaded["file_gb"]
        self.loaded |= {"load_gb_per_s": gb / self.loaded["load_s"], "read_gb_per_s": gb / read_s,
                        "host_gib": host.get("RssAnon"), "resident_gib": host.get("VmRSS"), "load_gib": peak_gib()}
        world.say("loaded in {load_s:.1f} s: {load_gb_per_s:.1f} GB/s, and {read_gb_per_s:.1f} of a plain read".format(
            **self.loaded))
        super().__init__(case, contender, 1, prepared(model, case))
        self.loaded["start_gib"] = peak_gib()


def measured(case: Case, budget_s: float, training: FromFiles, before: int) -> dict:
    told = measure(case, budget_s, training, 0)
    peaks = [training.loaded["load_gib"], training.loaded["start_gib"], told.pop("peak_bytes", 0) / GIB]
    return {**told, **training.loaded, "steps_gib": peaks[-1], **({"peak_gib": max(peaks)} if on_gpu() else {})}


def warm_up(folders: list[Path]) -> None:
    tiny = case_of("tiny")
    with checkpoint(tiny.config(), IN_FP8, folders) as (folder, _):
        load(tiny, DEFAULT, folder)


def case_of(model: str) -> Case:
    tiny, liger = model.startswith("tiny"), not without_liger(MODELS[model]["model_type"])
    return Case(model, LORA, 1, 1, 1, MODELS[model]["num_hidden_layers"], 1, sequence=128 if tiny else 4096,
                checkpointing=True, liger=liger, loss=None if liger else changes.IN_CHUNKS)


def fill(args: argparse.Namespace, rows: dict[tuple, dict], commit: str | None) -> Iterator[None]:
    """Adds what the rows lack, or what failed before."""
    lacking = {}
    for model, files, contender in ((model, files, contender) for model, kinds in CASES[args.cases].items()
                                    for files, contenders in kinds for contender in contenders):
        case = case_of(model)
        row = {"case": {**case.described(), "files": files}, "contender": contender}
        if model in args.models and not rows.get(trainings.key(row), {}).get("correct"):
            lacking[f"{model} from {files}, {contender}"] = case, files, row
    if lacking and on_gpu():
        world.everywhere(lambda: warm_up(args.folders) or {})
    for name in world.in_time(lacking, args.seconds):
        case, files, row = lacking[name]
        build = partial(FromFiles, case, row["contender"], files, args.folders)
        told, = trainings.found(build, [partial(measured, case, args.budget)])
        rows[trainings.key(row)] = row = {**row, "commit": commit, **told}
        world.say(f"{name}: {json.dumps({key: value for key, value in row.items() if key != 'case'})}")
        yield


def plot(result: dict, pyplot) -> None:
    rates: dict = {}
    for row in result["rows"]:
        if "tokens_per_s" in row:
            of = rates.setdefault(f"{row['case']['model']}, {row['case']['files']}", {})
            of[row["contender"]] = row["tokens_per_s"]
    show.stacked(pyplot, {"LoRA on one GPU": rates}, "tokens per second")


ALL = DEFAULT, IN_8_BITS, IN_4_BITS
SMALL = {"better": show.SMALLER, "form": "{:.2f}"}
SHOWN = show.Shown(
    "from_files",
    [Measure("tokens per second", ALL, figure="tokens_per_s", form="{:.0f}"),
     Measure("peak memory of the GPU, GiB", ALL, figure="peak_gib", **SMALL,
             bars=(bar(125, model="GLM-4.5-Air"), bar(132, model="gpt-oss-120b"))),
     Measure("host memory of the load, GiB", ALL, figure="host_gib", **SMALL,
             bars=(bar(2, model="Qwen3-30B-A3B"), )),
     Measure("load, s", ALL, figure="load_s", **SMALL)],
    [("files, GB", "file_gb", "{:.3g}"), ("largest, GB", "largest_file_gb", "{:.3g}"), ("load, s", "load_s", "{:.1f}"),
     ("GB/s", "load_gb_per_s", "{:.1f}"), ("GB/s of a plain read", "read_gb_per_s", "{:.1f}"),
     ("host, GiB", "host_gib", "{:.2f}"), ("resident, GiB", "resident_gib", "{:.2f}"),
     ("peak, GiB", "peak_gib", "{:.2f}"), ("peak of the load", "load_gib", "{:.2f}"),
     ("peak of the start", "start_gib", "{:.2f}"), ("peak of steps", "steps_gib", "{:.2f}"),
     ("tokens/s", "tokens_per_s", "{}"), ("step, ms", "median_ms", "{:.1f}")],
    plot, wide=False)


def main() -> None:
    parser = run.timed_parser(__doc__, budget=15)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, metavar="NAME",
                        help=f"some of {', '.join(NAMES)}, as far as --cases has them (default: all)")
    parser.add_argument("--folders", nargs="+", type=Path, default=[Path(tempfile.gettempdir())], metavar="FOLDER",
                        help="for the files: each goes to the first with room (default: the temporary one)")
    trainings.complete(SHOWN, parser, fill)


if __name__ == "__main__":
    main()
