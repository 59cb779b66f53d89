# SPDX-License-Identifier: Apache-2.0
"""Does a model trained with the MXFP8 flag end where the same model trained in bf16 ends?

Trains the GPT of examples/gpt_moe (classic MoE layers) and a Qwen3-MoE (AutoEP) with ZeRO-2 on all GPUs, each without
and with the flag, same seed and data order, and compares the losses:

    python examples/benchmarks/parity.py                # run, write a result file, print its table
    python examples/benchmarks/parity.py --show FILE    # table and plot of a result file
"""

import argparse
import json
import subprocess
import sys
import tempfile
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
CONTENDERS = {"bf16": "", "mxfp8": "_mxfp8"}
LAST_STEPS = 50  # the final loss is a mean over these: one batch's loss says little
BAR = 0.005


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, help="the result file (default: under examples/benchmarks/results)")
    parser.add_argument("--commit", help="the commit measured, where the repository is not at hand")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show a result file and run nothing")
    return parser.parse_args()


def train(arguments: list[str], config: str, steps: int) -> tuple[dict, list[dict]]:
    """One training run through the deepspeed launcher: its summary and its log."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus",
                   str(get_accelerator().device_count()), str(TRAIN), *arguments, "--deepspeed_config",
                   f"configs/ds/{config}.json", "--steps", str(steps), "--log_every", "1", "--save_dir", folder]
        print("==", *command, flush=True)
        subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
        log = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
        return json.loads((Path(folder) / "summary.json").read_text()), log


def row(model: str, contender: str, summary: dict, log: list[dict]) -> dict:
    seconds = [after["seconds"] - before["seconds"] for before, after in zip(log[9:], log[10:], strict=False)]
    losses = [entry["loss"] for entry in log]
    converted = summary["layers_converted"] == (summary["moe_layers"] if contender == "mxfp8" else 0)
    return {"case": {"model": model, "parameters_per_rank": summary["parameters"], "steps": len(log), "zero_stage": 2},
            "contender": contender, **results_file.quantiles_ms(seconds), "final_loss": sum(losses[-LAST_STEPS:]) /
            len(losses[-LAST_STEPS:]), "heldout_loss": summary["heldout"], "peak_gib": log[-1]["memory_gib"],
            "layers_converted": summary["layers_converted"], "losses": losses,
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
        within &= abs(gap) <= BAR and r["correct"]
        lines.append([model, contender, r["case"]["parameters_per_rank"] / 1e6, r["case"]["steps"], r["final_loss"],
                      f"{gap:+.2%}", r["heldout_loss"], f"{heldout_gap:+.2%}", r["median_ms"], r["peak_gib"],
                      r["layers_converted"]])
    print(f"\n{result['machine']}, commit {result['commit']}, {result['date']}")
    print(tabulate(lines, ["model", "run", "M parameters a rank", "steps", f"loss (last {LAST_STEPS})", "to bf16",
                           "held-out", "to bf16", "ms a step", "peak GiB", "layers in MXFP8"],
                   floatfmt=("", "", ".0f", "d", ".4f", "", ".4f", "", ".1f", ".2f", "d")))
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
        rows = [row(model, contender, *train(MODELS[model][0], MODELS[model][1] + suffix, args.steps))
                for model in args.models for contender, suffix in CONTENDERS.items()]
        results_file.write("parity", rows, path, of_commit=args.commit)
    if not show(path):
        sys.exit(f"a run with MXFP8 ends further than {BAR:.1%} from its bf16 twin, or a run went wrong")


if __name__ == "__main__":
    main()
