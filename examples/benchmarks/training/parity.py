# SPDX-License-Identifier: Apache-2.0
"""Does a model trained with the MXFP8 flag end where the same model trained in bf16 ends?

Trains the GPT of examples/gpt_moe (classic MoE layers) and a Qwen3-MoE (AutoEP) with ZeRO-2 on all GPUs, from scratch,
with plain DeepSpeed and with the flag, with the same seeds and data order. Training amplifies every difference of
rounding, so single runs of one seed lie about 1 % apart: the losses compared are means over seeds. All runs share the
GPUs at the same time, so their speed says nothing.

    python examples/benchmarks/training/parity.py             # run, store, show
    python examples/benchmarks/training/parity.py --show FILE    # table and plot of a result file
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib import options, results_file
from lib.tables import read

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "examples/gpt_moe/train.py"
MODELS = {
    "classic": (["--model", "configs/models/gpt_small.yaml"], "zero2"),
    "autoep": (["--hf_model", "configs/models/qwen3_moe_small.yaml", "--seq_len", "1024"], "autoep_zero2"),
}
CONTENDERS = {"bf16": None, "mxfp8": {"enabled": True, "min_tokens_per_expert": 0}}
LAST_STEPS = 50  # the final loss is a mean over these: one batch's loss says little
BAR = 0.005


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=options.one_or_more, default=250)
    parser.add_argument("--lr", type=float, default=3e-4, help="peak learning rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, help="the result file (default: under examples/benchmarks/results)")
    parser.add_argument("--commit", help="the commit measured, where the repository is not at hand")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show a result file and run nothing")
    return results_file.parse(parser)


def launch(model: str, contender: str, seed: int, args, folder: Path) -> subprocess.Popen:
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
               "--seed", str(seed), "--save_dir", str(folder)]
    print("==", *command, flush=True)
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def train_all(args) -> list[dict]:
    """Runs every model with every contender and seed, at the same time; the rows of the result file."""
    with tempfile.TemporaryDirectory() as base:
        keys = [(m, c, seed) for m in args.models for c in CONTENDERS for seed in args.seeds]
        folders = {key: Path(base) / f"run{i}" for i, key in enumerate(keys)}
        processes = {}
        for key, folder in folders.items():
            processes[key] = launch(*key, args, folder)
            time.sleep(2)  # a port is free only until its launcher has taken it
        for key, process in processes.items():
            if process.wait():
                sys.exit(f"{key} failed:\n{(folders[key] / 'output.txt').read_text()[-3000:]}")
        return [row(*key, args, json.loads((folder / "summary.json").read_text()),
                    [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()])
                for key, folder in folders.items()]


def row(model: str, contender: str, seed: int, args, summary: dict, log: list[dict]) -> dict:
    losses = [entry["loss"] for entry in log]
    converted = summary["layers_converted"] == (summary["moe_layers"] if CONTENDERS[contender] else 0)
    return {"case": {"model": model, "parameters": summary["parameters"], "steps": len(log), "zero_stage": 2,
                     "lr": args.lr, "seed": seed},
            "contender": contender, "final_loss": sum(losses[-LAST_STEPS:]) / len(losses[-LAST_STEPS:]),
            "heldout_loss": summary["heldout"], "layers_converted": summary["layers_converted"], "losses": losses,
            "correct": converted and losses[-1] < losses[0]}


def show(path: Path) -> bool:
    """Prints the table of a result file and draws its plot; whether MXFP8's mean loss is within the bar of bf16's."""
    result = read(path)
    if result["benchmark"] != "parity":
        sys.exit(f"{path} has results of {result['benchmark']}: show them by show.py")
    groups: dict = {}
    for r in result["rows"]:
        groups.setdefault((r["case"]["model"], r["contender"]), []).append(r)
    lines, within = [], True
    for (model, contender), rows in groups.items():
        loss, heldout = mean(rows, "final_loss"), mean(rows, "heldout_loss")
        gap = loss / mean(groups[model, "bf16"], "final_loss") - 1
        heldout_gap = heldout / mean(groups[model, "bf16"], "heldout_loss") - 1
        within &= all(r["correct"] for r in rows) and abs(gap) <= BAR
        spread = (max(r["final_loss"] for r in rows) - min(r["final_loss"] for r in rows)) / loss
        lines.append([model, contender, rows[0]["case"]["steps"], len(rows), loss, f"{spread:.2%}", f"{gap:+.2%}",
                      heldout, f"{heldout_gap:+.2%}", rows[0]["layers_converted"]])
    print(f"\n{result['machine']}, commit {result['commit']}, {result['date']}")
    print(tabulate(lines, ["model", "run", "steps", "seeds", f"loss (last {LAST_STEPS})",
                           "seeds' range", "to bf16", "held-out", "to bf16", "layers converted"],
                   floatfmt=("", "", "d", "d", ".4f", "", "", ".4f", "", "d")))
    _plot(groups, path.with_suffix(".png"))
    print(f"plot: {path.with_suffix('.png')}")
    return within


def mean(rows: list[dict], figure: str) -> float:
    return sum(r[figure] for r in rows) / len(rows)


def _plot(groups: dict, path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    models = list(dict.fromkeys(model for model, _ in groups))
    figure, axes = pyplot.subplots(1, len(models), figsize=(11, 4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for contender, color in zip(CONTENDERS, ("tab:gray", "tab:red"), strict=True):
            for i, r in enumerate(groups[model, contender]):
                axis.plot(r["losses"], label=None if i else contender, linewidth=0.7, color=color)
        axis.set(title=f"{model}, every seed", xlabel="step", ylabel="training loss, nats a token")
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
        sys.exit(f"MXFP8 ends further than {BAR:.1%} from bf16, or a run went wrong")


if __name__ == "__main__":
    main()
