# SPDX-License-Identifier: Apache-2.0
"""Does a model trained with the MXFP8 flag end where the same model trained in bf16 ends?

Trains the GPT of examples/gpt_moe (classic MoE layers) and a Qwen3-MoE (AutoEP) with ZeRO-2 on all GPUs, from scratch,
with plain DeepSpeed and with the flag, with the same seeds and data order. Training amplifies every difference of
rounding, so single runs of one seed lie about 1 % apart: the losses compared are means over seeds. All runs share the
GPUs at the same time, so their speed says nothing.

    python examples/benchmarks/training/parity.py             # run, store, show
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib import run, show, world
from lib.show import Measure

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "examples/gpt_moe/train.py"
MODELS = {
    "classic": (["--model", "configs/models/gpt_small.yaml"], "zero2"),
    "autoep": (["--hf_model", "configs/models/qwen3_moe_small.yaml", "--seq_len", "1024"], "autoep_zero2"),
}
CONTENDERS = {"bf16": None, "mxfp8": {"enabled": True, "min_tokens_per_expert": 0}}
LAST_STEPS = 50  # the final loss is a mean over these: one batch's loss says little


def launch(model: str, contender: str, seed: int, args, folder: Path) -> subprocess.Popen:
    """Starts one training run through the deepspeed launcher; it writes into `folder`."""
    arguments, config = MODELS[model]
    config = json.loads((ROOT / f"configs/ds/{config}.json").read_text())
    config["optimizer"]["params"]["lr"] = args.lr
    if CONTENDERS[contender]:
        config["mxfp8_moe"] = CONTENDERS[contender]
    folder.mkdir()
    (folder / "ds_config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(world.free_port()), str(TRAIN),
               *arguments, "--deepspeed_config", str(folder / "ds_config.json"), "--steps", str(args.steps),
               "--warmup_steps", "50", "--log_every", "1", "--seed", str(seed), "--save_dir", str(folder)]
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


# ---- how results are shown ------------------------------------------------------------------------------------------


def prepare(result: dict) -> list[dict]:
    """Means over the seeds."""
    seeds: dict = {}
    for one in result["rows"]:
        seeds.setdefault((one["case"]["model"], one["contender"]), []).append(one)
    rows = []
    for (model, name), found in seeds.items():
        loss, heldout = (mean(one[key] for one in found) for key in ("final_loss", "heldout_loss"))
        bf16 = {key: mean(one[key] for one in seeds[model, "bf16"]) for key in ("final_loss", "heldout_loss")}
        losses = [one["final_loss"] for one in found]
        curve = [mean(step) for step in zip(*(one["losses"] for one in found), strict=True)]
        rows.append({"case": {"model": model, "steps": len(curve)}, "contender": name, "seeds": len(found),
                     "loss": loss, "seeds_range": (max(losses) - min(losses)) / loss,
                     "to_bf16": loss / bf16["final_loss"] - 1, "distance": abs(loss / bf16["final_loss"] - 1),
                     "heldout_loss": heldout, "heldout_to_bf16": heldout / bf16["heldout_loss"] - 1,
                     "losses": curve, "layers_converted": found[0]["layers_converted"],
                     "correct": all(one["correct"] for one in found)})
    return rows


MEASURES = [Measure("distance of the final loss from bf16's", ("mxfp8", ), figure="distance", better=show.SMALLER,
                    form="{:.2%}")]


def plot(result: dict, pyplot) -> None:
    panels: dict = {}
    for one in result["rows"]:
        panels.setdefault(one["case"]["model"], {})[one["contender"]] = list(enumerate(one["losses"], 1))
    show.lines(pyplot, panels, "step", "training loss, mean over seeds, nats a token")


SHOWN = show.Shown("parity", MEASURES, [
    ("seeds", "seeds", "{}"), (f"loss of the last {LAST_STEPS} steps", "loss", "{:.4f}"),
    ("range of its seeds", "seeds_range", "{:.2%}"), ("to bf16", "to_bf16", "{:+.2%}"),
    ("held-out loss", "heldout_loss", "{:.4f}"), ("held-out, to bf16", "heldout_to_bf16", "{:+.2%}"),
    ("layers converted", "layers_converted", "{}")], plot, wide=False, prepare=prepare)


def main() -> None:
    parser = run.parser(__doc__)
    parser.add_argument("--steps", type=run.one_or_more, default=250)
    parser.add_argument("--lr", type=float, default=3e-4, help="peak learning rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = run.parse(parser)
    run.main(SHOWN, args, lambda: [train_all(args)])


if __name__ == "__main__":
    main()
