# SPDX-License-Identifier: Apache-2.0
"""Does a model trained with the MXFP8 flag end where the same model trained in bf16 ends?

Trains the GPT of examples/gpt_moe (classic MoE layers) and a Qwen3-MoE (AutoEP) with ZeRO-2 on all GPUs: with plain
DeepSpeed, with the flag and recipe bf16 (no quantisation: what other roundings alone do to a loss), and with the flag's
default recipe; same seed and data order. All runs share the GPUs at the same time, so their speed says nothing.

    python examples/benchmarks/parity.py                # run, write a result file, print its table
    python examples/benchmarks/parity.py --show FILE    # table and plot of a result file
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from tabulate import tabulate

import results_file

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples/gpt_moe/train.py"
MODELS = {
    "classic": (["--model", "configs/models/gpt_small.yaml"], "zero2"),
    "autoep": (["--hf_model", "configs/models/qwen3_moe_small.yaml", "--seq_len", "1024"], "autoep_zero2"),
}
CONTENDERS = {"bf16": None, "ours, recipe bf16": {"enabled": True, "recipe": "bf16"}, "mxfp8": {"enabled": True}}
LAST_STEPS = 50  # the final loss is a mean over these: one batch's loss says little
BAR = 0.005


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=3e-4, help="peak learning rate")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, help="the result file (default: under examples/benchmarks/results)")
    parser.add_argument("--commit", help="the commit measured, where the repository is not at hand")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show a result file and run nothing")
    return parser.parse_args()


def launch(model: str, contender: str, args, folder: Path) -> subprocess.Popen:
    """Starts one training run through the deepspeed launcher; it writes into `folder`."""
    arguments, config = MODELS[model]
    config = json.loads((ROOT / f"configs/ds/{config}.json").read_text())
    config["optimizer"]["params"]["lr"] = args.lr
    if CONTENDERS[contender]:
        config["mxfp8_moe"] = CONTENDERS[contender]
    folder.mkdir()
    (folder / "ds_config.json").write_text(json.dumps(config))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(get_accelerator().device_count()),
               "--master_port", str(port), str(TRAIN), *arguments, "--deepspeed_config",
               str(folder / "ds_config.json"), "--steps", str(args.steps), "--warmup_steps", "50", "--log_every", "1",
               "--save_dir", str(folder)]
    print("==", *command, flush=True)
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def train_all(args) -> list[dict]:
    """Runs every model with every contender, at the same time; the rows of the result file."""
    with tempfile.TemporaryDirectory() as base:
        runs = {(m, c): Path(base) / f"{m}-{i}" for m in args.models for i, c in enumerate(CONTENDERS)}
        processes = {}
        for (m, c), folder in runs.items():
            processes[m, c] = launch(m, c, args, folder)
            time.sleep(2)  # a port is free only until its launcher has taken it
        for key, process in processes.items():
            if process.wait():
                sys.exit(f"{key} failed:\n{(runs[key] / 'output.txt').read_text()[-3000:]}")
        return [row(m, c, args, json.loads((folder / "summary.json").read_text()),
                    [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()])
                for (m, c), folder in runs.items()]


def row(model: str, contender: str, args, summary: dict, log: list[dict]) -> dict:
    losses = [entry["loss"] for entry in log]
    converted = summary["layers_converted"] == (summary["moe_layers"] if CONTENDERS[contender] else 0)
    return {"case": {"model": model, "parameters_per_rank": summary["parameters"], "steps": len(log), "zero_stage": 2,
                     "lr": args.lr},
            "contender": contender, "final_loss": sum(losses[-LAST_STEPS:]) / len(losses[-LAST_STEPS:]),
            "heldout_loss": summary["heldout"], "layers_converted": summary["layers_converted"], "losses": losses,
            "correct": converted and losses[-1] < losses[0]}


def show(path: Path) -> bool:
    """Prints the table of a result file and draws its plot; whether every MXFP8 run is within the bar of its bf16."""
    result = json.loads(path.read_text())
    rows = {(r["case"]["model"], r["contender"]): r for r in result["rows"]}
    lines, within = [], True
    for (model, contender), r in rows.items():
        reference = rows[model, "bf16"]
        gap = r["final_loss"] / reference["final_loss"] - 1
        heldout_gap = r["heldout_loss"] / reference["heldout_loss"] - 1
        within &= r["correct"] and (contender != "mxfp8" or abs(gap) <= BAR)
        lines.append([model, contender, r["case"]["parameters_per_rank"] / 1e6, r["case"]["steps"], r["final_loss"],
                      f"{gap:+.2%}", r["heldout_loss"], f"{heldout_gap:+.2%}", r["layers_converted"]])
    print(f"\n{result['machine']}, commit {result['commit']}, {result['date']}")
    print(tabulate(lines, ["model", "run", "M parameters a rank", "steps", f"loss (last {LAST_STEPS})", "to bf16",
                           "held-out", "to bf16", "layers converted"],
                   floatfmt=("", "", ".0f", "d", ".4f", "", ".4f", "", "d")))
    _plot(rows, path.with_suffix(".png"))
    print(f"plot: {path.with_suffix('.png')}")
    return within


def _plot(rows: dict, path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len({model for model, _ in rows}), figsize=(11, 4), squeeze=False)
    for axis, model in zip(axes[0], dict.fromkeys(model for model, _ in rows), strict=True):
        for contender in CONTENDERS:
            axis.plot(rows[model, contender]["losses"], label=contender, linewidth=1)
        axis.set(title=model, xlabel="step", ylabel="training loss, nats a token")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_args()
    path = args.show
    if path is None:
        path = args.out or results_file.RESULTS / "parity.json"
        results_file.write("parity", train_all(args), path, of_commit=args.commit)
    if not show(path):
        sys.exit(f"a run with MXFP8 ends further than {BAR:.1%} from its bf16 twin, or a run went wrong")


if __name__ == "__main__":
    main()
