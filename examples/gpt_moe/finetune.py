# SPDX-License-Identifier: Apache-2.0
"""Trains a base model with plain DeepSpeed, finetunes it twice, without and with MXFP8, and compares the two.

Every run is examples/gpt_moe/train.py, started by the `deepspeed` launcher on all GPUs, or on two CPU ranks over gloo.
The two finetunings differ only in the section "mxfp8_moe" of their DeepSpeed config.
"""

import argparse
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from tabulate import tabulate

from arguments import one_or_more
from plot import plot_losses

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs"
CPU_RANKS = 2
SHARED_MEMORY = Path("/dev/shm")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="folder of the three runs")
    parser.add_argument("--model", type=Path, help="sizes of the GPT (default: gpt_tiny on CPU, gpt_small on GPUs)")
    parser.add_argument("--base_steps", type=one_or_more, default=450)
    parser.add_argument("--finetune_steps", type=one_or_more, default=120)
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ranks() -> int:
    """The number of processes of a run."""
    return CPU_RANKS if get_accelerator().device_name() == "cpu" else get_accelerator().device_count()


@contextlib.contextmanager
def train_command(config: Path, save_dir: Path, *arguments: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command that runs train.py on all ranks, and its environment. Run it inside the `with` block."""
    programs = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}  # ninja is beside python
    count: list[str] = []  # all GPUs: with a number, the launcher would pass over CUDA_VISIBLE_DEVICES
    if get_accelerator().device_name() == "cpu":
        threads = max(1, (os.cpu_count() or 1) // ranks())
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
        count = ["--num_gpus", str(ranks())]
    port = free_port()
    # The launcher as a module: a DeepSpeed that a virtual environment takes from outside has no script inside of it.
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *count, "--master_port", str(port), "--log_level",
               "warning", str(HERE / "train.py"), "--deepspeed_config", str(config), "--save_dir", str(save_dir),
               *arguments]
    try:
        yield command, environment
    finally:
        # DeepSpeed's CPU all-reduce leaves 66 MiB of shared memory behind for every rank. Each run uses another port,
        # so this would add up.
        for leftover in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            leftover.unlink()


def launch(name: str, config: str, args, *arguments: str) -> dict:
    """Runs train.py on all ranks into args.out / name. Returns its summary and the run's wall time in seconds."""
    on_cpu = get_accelerator().device_name() == "cpu"
    model = args.model or CONFIGS / "models" / ("gpt_tiny.yaml" if on_cpu else "gpt_small.yaml")
    start = time.perf_counter()
    with train_command(CONFIGS / "ds" / config, args.out / name, "--model", str(model), "--seed", str(args.seed),
                       *arguments) as (command, environment):
        print(f"\n== {name}: {shlex.join(command)}", flush=True)
        done = subprocess.run(command, env=environment, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"the run {name} failed: see above")
    summary = json.loads((args.out / name / "summary.json").read_text())
    return summary | {"seconds": time.perf_counter() - start}


def table(runs: dict[str, dict]) -> str:
    """One row for each run: losses (nats per token), held-out loss against the base's, times, layers converted."""
    base = runs["base"]["heldout"]
    rows = [[name, run["loss"], run["heldout"], f"{run['heldout'] / base - 1:+.1%}", f"{run['train_seconds']:.0f}",
             f"{run['seconds']:.0f}", f"{run['layers_converted']} of {run['moe_layers']}"]
            for name, run in runs.items()]
    headers = ["run", "loss", "held-out loss", "against base", "training s", "whole run s", "MoE layers in MXFP8"]
    return tabulate(rows, headers, floatfmt=".4f", disable_numparse=[3, 4, 5])


def main() -> None:
    args = parse_args()
    text = ("--heldout_data", "pydoc")
    finetune = ("--data", "pydoc", *text, "--steps", str(args.finetune_steps), "--load_dir", str(args.out / "base"),
                "--finetune")
    runs = {"base": launch("base", "zero2.json", args, "--data", "stdlib", *text, "--steps", str(args.base_steps))}
    runs["plain"] = launch("plain", "zero2.json", args, *finetune)
    runs["mxfp8"] = launch("mxfp8", "zero2_mxfp8.json", args, *finetune)
    plot = plot_losses({name: args.out / name for name in runs}, args.out / "loss.png")
    print(f"\nHeld-out loss: nats per token, on finetuning text that no run was trained on\n{table(runs)}")
    print(f"plot: {plot}")


if __name__ == "__main__":
    main()
