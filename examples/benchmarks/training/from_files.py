# SPDX-License-Identifier: Apache-2.0
"""Large models from a checkpoint's files: `from_pretrained`, LoRA on attention and experts, and training, on one GPU
or with the experts spread over several.

The files have random weights in a model's real shapes, one file for each layer, with the names of published
checkpoints. Layers of the same form have the same values, so that files of 100 GB are written in a minute or two. In
FP8, MXFP4 and NVFP4, only routed experts are quantized; FP8's scales are powers of two. Rank 0 writes the files to the
first of `--folders` that has room, with links in one folder. They are deleted as soon as the last contender is loaded.

The load's seconds are those of `from_pretrained`, whose files the system may still hold in its cache. A plain read of
some of the same files follows, by as many threads of rank 0, into memory that is used again. The load's host memory is
what a process's anonymous memory (RssAnon) grew by at most, sampled every 50 ms. "Resident" (VmRSS) also has what is
mapped. Without a GPU, the model is in both. A tiny model is loaded before the first case, so that modules and kernels
are there.

The peak of the GPU's memory is over the load, the engine's start and the steps: of torch's allocator, and the peer
memory of exchanges. "Taken" is all that the GPU has lent at the end, with the CUDA context, NCCL's buffers and what
the allocator keeps for later. Training is that of whole_model.py, with Liger where it has kernels for the model, and
else with the loss in chunks. Of several ranks, times and memory are the largest, tokens per second are one rank's.

    python examples/benchmarks/training/from_files.py --models GLM-4.5-Air --folders /dev/shm /tmp
    torchrun --nproc-per-node 2 examples/benchmarks/training/from_files.py --cases two_gpus --folders /dev/shm /tmp
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
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ds_mxfp8_moe
from ds_mxfp8_moe.checkpoint.reading import BUFFER_BYTES, THREADS
from ds_mxfp8_moe.layers.frozen_experts import frozen_layers, frozen_of
from lib import run, show, trainings, world
from lib.show import Measure, bar
from lib.world import BF16, on_gpu
from training import changes
from training.random_files import IN_BF16, IN_FP8, IN_MXFP4, IN_NVFP4, checkpoint
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
CASES = {"tiny": {"tiny": ((IN_FP8, (DEFAULT, )), (IN_BF16, (DEFAULT, IN_4_BITS)), (IN_NVFP4, (IN_4_BITS, ))),
                  "tiny-gpt-oss": ((IN_MXFP4, (DEFAULT, )), )},
         "short": {"Qwen3-30B-A3B": ((IN_BF16, (DEFAULT, IN_4_BITS)), )},
         "two_gpus": {"Qwen3-235B-A22B": ((IN_NVFP4, (IN_4_BITS, )), )}}
CASES["full"] = {**CASES["short"], "gpt-oss-120b": ((IN_MXFP4, (DEFAULT, IN_8_BITS)), ),
                 "GLM-4.5-Air": ((IN_FP8, (DEFAULT, IN_4_BITS)), )}
NAMES = list(dict.fromkeys(name for models in CASES.values() for name in models))
SAMPLES_S = 0.05
READ_GB = 16  # of a checkpoint that are read plainly, about
STATUS, GIB = Path("/proc/self/status"), 2**30
HOST = {"RssAnon": "host_gib", "VmRSS": "resident_gib"}


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
    """The GB per second at which files of a folder are read."""

    def read(path: Path) -> None:
        block = bytearray(BUFFER_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass

    sizes = {path: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    some = [*sizes][::max(1, round(sum(sizes.values()) / 1e9 / READ_GB))]
    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(read, some))
    return sum(sizes[path] for path in some) / 1e9 / (time.perf_counter() - begin)


class Files:
    """The files of one case, in one form, which rank 0 writes and every rank reads. All calls are collective.

    Attributes:
        folder: of all files.
        about: what rows say of them.
    """

    def __init__(self, folders: list[Path]):
        self._folders, self._stack, self._kind = folders, ExitStack(), None

    def write(self, case: Case, files: str) -> None:
        """Writes them, unless they are there. Raises RuntimeError on every rank: rank 0 could not."""
        if self._kind == (case, files):
            return
        self.delete()
        self.about = world.everywhere(lambda: self._write(case, files) if world.rank() == 0 else {})
        if "failure" in self.about:
            raise RuntimeError(self.about["failure"])
        self.folder, self._kind = Path(self.about.pop("folder")), (case, files)
        world.say(f"{self.about['file_gb']:.1f} GB of files written in {self.about['write_s']:.0f} s")

    def _write(self, case: Case, files: str) -> dict:
        folder, about = self._stack.enter_context(checkpoint(case.config(), files, self._folders))
        return {"folder": str(folder), **about}

    def time_read(self) -> None:
        """Adds the rate of a plain read, if `about` lacks it."""
        if "read_gb_per_s" not in self.about:
            self.about |= world.everywhere(
                lambda: {"read_gb_per_s": read_plainly(self.folder)} if world.rank() == 0 else {})

    def delete(self) -> None:
        """Also if there are none."""
        self._kind = None
        self._stack.close()
        world.barrier()


class FromFiles(Training):
    """`loaded`: what the row says of the load and of the start."""

    def __init__(self, case: Case, contender: str, kind: str, files: Files, last: bool):
        """`kind`: what the files are in. `last`: nobody needs them afterwards."""
        files.write(case, kind)
        get_accelerator().empty_cache()
        peak_gib()
        with growth() as host:
            begin = time.perf_counter()
            model = load(case, contender, files.folder)
            get_accelerator().synchronize()
            load_s = time.perf_counter() - begin
        load_gib = peak_gib()
        world.barrier()  # all have loaded
        files.time_read()
        if last:
            files.delete()
        torch.manual_seed(0)  # of adapters
        super().__init__(case, contender, 1, prepared(model, case))
        names, own = zip(*{"load_s": load_s, "load_gib": load_gib, "start_gib": peak_gib(),
                           **{HOST[name]: gib for name, gib in host.items()}}.items(), strict=True)
        most = dict(zip(names, world.largest(torch.tensor(own, dtype=torch.float64)).tolist(), strict=True))
        held_in = {frozen_of(layer.experts).format for layer in frozen_layers(self.engine.module).values()}
        self.loaded = {**files.about, **most, "load_gb_per_s": files.about["file_gb"] / most["load_s"],
                       "held_in": ", ".join(sorted(held_in))}
        world.say("loaded in {load_s:.1f} s: {load_gb_per_s:.1f} GB/s, and {read_gb_per_s:.1f} of a plain read".format(
            **self.loaded))


def taken_gib() -> float:
    """All that this rank's GPU has lent, to whomever."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def measured(case: Case, budget_s: float, training: FromFiles, before: int) -> dict:
    told = measure(case, budget_s, training, 0)
    loaded, steps_gib = training.loaded, told.pop("peak_bytes", 0) / GIB
    of_gpu = {"peak_gib": max(loaded["load_gib"], loaded["start_gib"], steps_gib),
              "taken_gib": world.largest(torch.tensor([taken_gib()])).item()} if on_gpu() else {}
    return {**loaded, **told, "steps_gib": steps_gib, **of_gpu}


def warm_up(files: Files) -> dict:
    case = case_of("tiny")
    files.write(case, IN_FP8)
    load(case, DEFAULT, files.folder)
    return {}


def case_of(model: str) -> Case:
    tiny, liger = model.startswith("tiny"), not without_liger(MODELS[model]["model_type"])
    return Case(model, LORA, world.size(), 1, 1, MODELS[model]["num_hidden_layers"], world.size(),
                sequence=128 if tiny else 4096, checkpointing=True, liger=liger,
                loss=None if liger else changes.IN_CHUNKS)


def fill(args: argparse.Namespace, rows: dict[tuple, dict], commit: str | None) -> Iterator[None]:
    """Adds what the rows lack, or what failed before."""
    lacking = {}
    for model, kind, contender in ((model, kind, contender) for model, kinds in CASES[args.cases].items()
                                   for kind, contenders in kinds for contender in contenders):
        case = case_of(model)
        row = {"case": {**case.described(), "files": kind}, "contender": contender}
        if model in args.models and not rows.get(trainings.key(row), {}).get("correct"):
            lacking[f"{model} from {kind}, {contender}"] = case, kind, row
    files, last_of = Files(args.folders), {(case, kind): name for name, (case, kind, _) in lacking.items()}
    if lacking and on_gpu():
        world.everywhere(partial(warm_up, files))
    for name in world.in_time(lacking, args.seconds):
        case, kind, row = lacking[name]
        build = partial(FromFiles, case, row["contender"], kind, files, last_of[case, kind] == name)
        told, = trainings.found(build, [partial(measured, case, args.budget)])
        rows[trainings.key(row)] = row = {**row, "commit": commit, **told}
        world.say(f"{name}: {json.dumps({key: value for key, value in row.items() if key != 'case'})}")
        yield
    files.delete()


def prepare(result: dict) -> list[dict]:
    """Each row's peak under the name of what its frozen experts are held in, too. Older rows held them in MXFP8."""
    return [{**row, f"peak_gib_{row.get('held_in', 'MXFP8')}": row["peak_gib"]} if "peak_gib" in row else row
            for row in result["rows"]]


def plot(result: dict, pyplot) -> None:
    rates: dict = {}
    for row in result["rows"]:
        if "tokens_per_s" in row:
            case = row["case"]
            of = rates.setdefault(f"LoRA on {case['ranks']} GPU{'s' * (case['ranks'] > 1)}", {})
            of.setdefault(f"{case['model']}, {case['files']}", {})[row["contender"]] = row["tokens_per_s"]
    show.dots(pyplot, rates, "tokens per second of a GPU")


ALL = DEFAULT, IN_8_BITS, IN_4_BITS
SMALL = {"better": show.SMALLER, "form": "{:.2f}"}
SHOWN = show.Shown(
    "from_files",
    [Measure("tokens per second of a GPU", ALL, figure="tokens_per_s", form="{:.0f}"),
     Measure("peak memory of the GPU with frozen experts in MXFP8, GiB", ALL, figure="peak_gib_MXFP8", **SMALL,
             bars=(bar(125, model="GLM-4.5-Air"), bar(132, model="gpt-oss-120b"))),
     Measure("peak memory of the GPU with frozen experts in MXFP4, GiB", ALL, figure="peak_gib_MXFP4", **SMALL,
             bars=(bar(78, model="GLM-4.5-Air"), bar(77, model="gpt-oss-120b"))),
     Measure("host memory of the load, GiB", ALL, figure="host_gib", **SMALL,
             bars=(bar(2, model="Qwen3-30B-A3B"), )),
     Measure("load, s", ALL, figure="load_s", **SMALL)],
    [("experts held in", "held_in", "{}"), ("files, GB", "file_gb", "{:.3g}"),
     ("largest, GB", "largest_file_gb", "{:.3g}"), ("load, s", "load_s", "{:.1f}"),
     ("GB/s", "load_gb_per_s", "{:.1f}"), ("GB/s of a plain read", "read_gb_per_s", "{:.1f}"),
     ("host, GiB", "host_gib", "{:.2f}"), ("resident, GiB", "resident_gib", "{:.2f}"),
     ("peak, GiB", "peak_gib", "{:.2f}"), ("peak of the load", "load_gib", "{:.2f}"),
     ("peak of the start", "start_gib", "{:.2f}"), ("peak of steps", "steps_gib", "{:.2f}"),
     ("taken, GiB", "taken_gib", "{:.2f}"), ("tokens/s of a GPU", "tokens_per_s", "{}"),
     ("step, ms", "median_ms", "{:.1f}")],
    plot, wide=False, prepare=prepare)


def main() -> None:
    parser = run.timed_parser(__doc__, budget=15, more_cases=("two_gpus", ))
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, metavar="NAME",
                        help=f"some of {', '.join(NAMES)}, as far as --cases has them (default: all)")
    parser.add_argument("--folders", nargs="+", type=Path, default=[Path(tempfile.gettempdir())], metavar="FOLDER",
                        help="for the files: each goes to the first with room (default: the temporary one)")
    trainings.complete(SHOWN, parser, fill)


if __name__ == "__main__":
    main()
