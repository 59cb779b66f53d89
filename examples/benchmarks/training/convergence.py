# SPDX-License-Identifier: Apache-2.0
"""Is a model trained in MXFP8 as good as one trained in bf16? Whole trainings, by recipe and seed.

Trains the GPT of examples/gpt_moe (classic MoE layers, ZeRO-2, expert parallelism over --ranks GPUs) from scratch at
two sizes, in plain DeepSpeed's bf16 and with the flag in several recipes: the same model, data, order and schedule for
one seed. Training amplifies every difference of rounding, so what a recipe is held against is the range of held-out
losses that bf16's own seeds span.

    python examples/benchmarks/training/convergence.py --state /tmp/convergence --seconds 540

trains for so many seconds, the most important runs first, as many side by side as the GPUs hold, and shows what is
finished. The same command again goes on where it stopped, on the same machine: checkpoints lie under --state. On
another machine --known FILE takes the finished runs of a result file as they are. Runs share the machine, so their
speed says nothing.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import deepspeed
import deepspeed.comm as dist
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "gpt_moe"))

import data
import train
from arguments import none_or_more, one_or_more
from ds_mxfp8_moe import MXFP8MoEConfig
from ds_mxfp8_moe.config import current_device, resolve
from ds_mxfp8_moe.layer import MXFP8MOELayer
from finetune import free_port
from lib import results_file, run, show
from lib.show import Measure

ROOT = Path(__file__).resolve().parents[3]


class Size(NamedTuple):
    model: str
    lr: float
    sequences: int = 8  # of a rank, a step


SIZES = {"50M": Size("configs/models/gpt_50m.yaml", 6e-4), "300M": Size("configs/models/gpt_300m.yaml", 3e-4),
         "tiny": Size("configs/models/gpt_tiny.yaml", 1e-3, 2)}
BF16 = "bf16"
# The section "mxfp8_moe" of each, by priority. None: plain DeepSpeed. "own_bf16" is the converted layer without
# quantisation: it tells the layer's doing from that of MXFP8.
RECIPES = {BF16: None, "default_128": {"scale_block_size": 128},
           "mxfp8_128": {"scale_block_size": 128, "recipe": "mxfp8"}, "default_32": {"scale_block_size": 32},
           "own_bf16": {"recipe": "bf16"}, "floor": {"scale_block_size": 128, "scaling_mode": "floor"}}
LAST = ("own_bf16", "floor")  # after bf16's further seeds
CURVES = ("loss", "grad_norm", "busiest_expert", "heldout_loss", "heldout_loss_bf16")
HELDOUT_SHARE = 0.05  # of the texts
EPOCHS_AT_MOST = 2
ENDING_S = 40  # of the budget, for checkpoints and tables
SHORTEST_S = 60  # a run is not started for less
STARTED = time.time()


class Run(NamedTuple):
    size: str
    recipe: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}-{self.recipe}-{self.seed}"


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = run.parser(__doc__)
    parser.add_argument("--state", type=Path, help="folder of tokens, checkpoints and logs, outside of the repository")
    parser.add_argument("--seconds", type=float, default=540, help="for this piece with its start")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["50M", "300M"])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=none_or_more, default=1, help="seeds of each recipe")
    parser.add_argument("--bf16_seeds", type=none_or_more, default=5)
    parser.add_argument("--steps", type=one_or_more, default=1000)
    parser.add_argument("--log_every", type=one_or_more, default=10, help="steps; a run can stop at these only")
    parser.add_argument("--heldout_every", type=one_or_more, default=100)
    parser.add_argument("--heldout_windows", type=one_or_more, default=128)
    parser.add_argument("--data", default="installed", help="stdlib, pydoc, installed, or a file or folder")
    parser.add_argument("--ranks", type=one_or_more, default=2,
                        help="GPUs of a run, which its experts are spread over")
    parser.add_argument("--sharing", type=one_or_more, default=1, help="runs that share a GPU")
    parser.add_argument("--known", type=Path, metavar="FILE", help="a result file whose runs are not run again; they "
                        "stand in the new file too, which is then called as old as that one")
    parser.add_argument("--rank_of", nargs=3, help=argparse.SUPPRESS)  # this process is a rank of that run
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = run.parse(parser, arguments, ("rank_of", ))
    if not args.show and (args.state is None or ROOT in (args.state.resolve(), *args.state.resolve().parents)):
        parser.error("--state: name a folder outside of the repository")
    if args.heldout_every % args.log_every:
        parser.error("--heldout_every must be a multiple of --log_every")
    return args


def plan(args: argparse.Namespace) -> list[Run]:
    """All runs, the most important ones first."""
    runs = []
    for size in args.sizes:
        runs += [Run(size, recipe, 0) for recipe in RECIPES if recipe not in LAST]
        runs += [Run(size, BF16, seed) for seed in range(args.bf16_seeds)]
        runs += [Run(size, recipe, seed) for seed in range(args.seeds) for recipe in RECIPES]
    return [run for run in dict.fromkeys(runs) if run.recipe in args.recipes
            and run.seed < (args.bf16_seeds if run.recipe == BF16 else args.seeds)]


# ---- data ---------------------------------------------------------------------------------------------------------


def store_tokens(source: str, folder: Path) -> None:
    """Writes the tokens of a source's texts for memory-maps, once.

    The hash of a text says whether it is held out, so a copy of it is on the same side, and copies are left out.
    """
    if (folder / "tokens.json").exists():
        there = json.loads((folder / "tokens.json").read_text())["source"]
        if there != source:
            sys.exit(f"--state {folder} has the tokens of --data {there}, not of {source}: name another --state")
        return
    parts: dict[str, list] = {"training": [], "heldout": []}
    seen, whole = set(), hashlib.sha256()
    for text in data.documents(source):
        digest = hashlib.sha256(text).digest()
        if text and digest not in seen:
            seen.add(digest)
            whole.update(digest)
            heldout = int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32
            parts["heldout" if heldout else "training"].append(data.encode_bytes(text))
    about = {"source": source, "sha256": whole.hexdigest()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, tokens in parts.items():
        if not tokens:
            raise ValueError(f"--data {source}: {len(seen)} different texts leave none for {name}")
        stream = np.concatenate(tokens)
        np.save(folder / f"{name}.npy", stream)
        about[f"{name}_tokens"] = len(stream)
    (folder / "tokens.json").write_text(json.dumps(about))


def stored(folder: Path, name: str, seq_len: int) -> data.Windows:
    return data.Windows(np.load(folder / f"{name}.npy", mmap_mode="r"), seq_len)


# ---- one run: what its ranks do -------------------------------------------------------------------------------------


def build(run: Run, args: argparse.Namespace) -> tuple:
    """(engine, the tokens of a sequence, the arguments that examples/gpt_moe takes)"""
    size = SIZES[run.size]
    config = json.loads((ROOT / "configs/ds/zero2.json").read_text())
    config["train_micro_batch_size_per_gpu"] = size.sequences
    config["optimizer"]["params"]["lr"] = size.lr
    section = RECIPES[run.recipe]
    if section is not None:
        config["mxfp8_moe"] = {"enabled": True, "min_tokens_per_expert": 0, **section}
    settings = train.parse_args(["--model", str(ROOT / size.model), "--seed", str(run.seed),
                                 "--steps", str(args.steps), "--warmup_steps", str(max(1, args.steps // 10)),
                                 "--heldout_windows", str(args.heldout_windows)])
    settings.deepspeed_config = config
    return *train.initialize(settings), settings


def case_of(run: Run, engine, seq_len: int, args: argparse.Namespace) -> dict:
    tokens = json.loads((args.state / "tokens.json").read_text())
    case = {"size": run.size, "parameters": train.number_of_parameters(engine),
            "expert_parallel": engine.module.blocks[0].moe.ep_size, "ranks": dist.get_world_size(), "zero_stage": 2,
            "steps": args.steps,
            "tokens_per_step": SIZES[run.size].sequences * dist.get_world_size() * seq_len, "lr": SIZES[run.size].lr,
            "data": tokens["source"], "data_sha256": tokens["sha256"][:16],
            "training_tokens": tokens["training_tokens"], "heldout_windows": args.heldout_windows, "seed": run.seed}
    epochs = case["tokens_per_step"] * args.steps / case["training_tokens"]
    if epochs > EPOCHS_AT_MOST:
        raise ValueError(f"{run.name}: {args.steps} steps of {case['tokens_per_step']} tokens are {epochs:.1f} epochs "
                         f"of --data {tokens['source']}; at most {EPOCHS_AT_MOST}")
    return case


def busiest_expert(layers: list) -> float:
    """The fraction of all choices that the busiest expert gets, in the mean over the layers. Of the last forward, over
    all ranks."""
    busiest = []
    for layer in layers:
        count_E = layer.deepspeed_moe.exp_counts.float()
        dist.all_reduce(count_E)
        busiest.append((count_E / count_E.sum()).max())
    return torch.stack(busiest).mean().item()


@contextlib.contextmanager
def in_bf16(layers: list[MXFP8MOELayer]) -> Iterator[None]:
    """Computes them in the bf16 recipe within, with the weights that they have."""
    recipe = resolve(MXFP8MoEConfig(recipe=BF16), *current_device())
    settings = [layer.mxfp8_settings for layer in layers]
    try:
        for layer, own in zip(layers, settings, strict=True):
            layer.mxfp8_settings = replace(own, recipe=recipe, min_tokens_per_expert=0)
        yield
    finally:
        for layer, own in zip(layers, settings, strict=True):
            layer.mxfp8_settings = own


def train_piece(run: Run, args: argparse.Namespace) -> bool:
    """Trains from the run's checkpoint, or from scratch, to its end or until args.until. Every rank calls it.

    Rank 0 writes log.jsonl, one line for every args.log_every steps, and summary.json at the end.

    Returns:
        Whether the run is at its end.
    """
    folder, writes = args.state / run.name, dist.get_rank() == 0
    checkpoints = folder / "checkpoints"
    engine, seq_len, settings = build(run, args)
    case = case_of(run, engine, seq_len, args)
    windows, heldout = (stored(args.state, name, seq_len) for name in ("training", "heldout"))
    layers = train.moe_layers(engine)
    converted = [layer.deepspeed_moe for layer in layers if isinstance(layer.deepspeed_moe, MXFP8MOELayer)]
    quantised = [layer for layer in converted if layer.mxfp8_settings.recipe.quantize_gemm]
    first, seconds = 0, 0.0
    if checkpoints.exists():
        _, state = engine.load_checkpoint(checkpoints)
        first, seconds = state["step"], state["seconds"]
        if state["case"] != case:
            raise ValueError(f"{folder} is of another run: {state['case']}, not {case}; name another --state")
    begin = time.time() - seconds
    log = train.open_log(folder, first) if writes else None

    def write(row: dict) -> None:
        if log:
            print(json.dumps(row), file=log, flush=True)

    def losses_heldout() -> dict[str, float]:
        """In the recipe, and of the same weights in bf16: what a model costs that is used, not trained, in MXFP8."""
        losses = {"heldout_loss": train.heldout_loss(engine, heldout, settings)}
        if quantised:
            with in_bf16(quantised):
                losses["heldout_loss_bf16"] = train.heldout_loss(engine, heldout, settings)
        return losses

    if not first:
        write({"step": 0, **losses_heldout()})
    totals, norms = torch.zeros(2, device=engine.device), []
    for done in range(first + 1, args.steps + 1):
        # What a step draws at random depends on seed, step and rank alone, so that a resumed run repeats it.
        torch.manual_seed((run.seed * 1_000_003 + done) * case["ranks"] + dist.get_rank())
        tokens_BS = windows.training_batch(run.seed, done - 1, SIZES[run.size].sequences, dist.get_rank(),
                                           case["ranks"])
        cross_entropy, aux_loss = train.losses(engine, tokens_BS)
        engine.backward(cross_entropy + settings.moe_loss_coeff * aux_loss)
        engine.step()
        totals += torch.stack((cross_entropy, aux_loss)).detach()
        norms.append(engine.get_global_grad_norm())
        if done % args.log_every and done != args.steps:
            continue
        loss, aux, late = train.mean_over_ranks([*(totals / len(norms)).tolist(), time.time() > args.until],
                                                engine.device)
        row = {"step": done, "loss": loss, "aux_loss": aux, "grad_norm": float(sum(norms) / len(norms)),
               "busiest_expert": busiest_expert(layers)}
        totals.zero_()
        norms.clear()
        if done % args.heldout_every == 0 or done == args.steps:
            row |= losses_heldout()
        write(row)
        if late and done < args.steps:
            tag = f"step_{done}"
            engine.save_checkpoint(checkpoints, tag=tag, client_state={"step": done, "case": case,
                                                                       "seconds": time.time() - begin})
            for path in checkpoints.glob("step_*") if writes else ():
                if path.name != tag:
                    shutil.rmtree(path)
            return False
    if writes:
        summary = {"case": case, "contender": run.recipe, "moe_layers": len(layers),
                   "layers_converted": len(converted), "seconds": round(time.time() - begin, 1)}
        (folder / "summary.json").write_text(json.dumps(summary))
        shutil.rmtree(checkpoints, ignore_errors=True)
    return True


def rank_main(args: argparse.Namespace) -> None:
    deepspeed.init_distributed(get_accelerator().communication_backend_name(), auto_mpi_discovery=False,
                               verbose=False)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    size, recipe, seed = args.rank_of
    train_piece(Run(size, recipe, int(seed)), args)
    dist.barrier()
    dist.destroy_process_group()


# ---- all runs -----------------------------------------------------------------------------------------------------


def places(args: argparse.Namespace) -> list[str | None]:
    """The GPUs of each run that there is room for, as CUDA_VISIBLE_DEVICES has them; on CPUs one place."""
    if get_accelerator().device_name() == "cpu":
        return [None]
    count = get_accelerator().device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    found = [",".join(visible[i:i + args.ranks]) for i in range(0, count - args.ranks + 1, args.ranks)]
    if not found:
        sys.exit(f"{count} GPUs are too few for --ranks {args.ranks}")
    return found * args.sharing


def launch(run: Run, place: str | None, until: float, args: argparse.Namespace) -> subprocess.Popen:
    """Starts the ranks of one run, which write into its folder."""
    folder = args.state / run.name
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": place} if place else {"DS_ACCELERATOR": "cpu"})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), "--master-addr",
               "127.0.0.1", "--master-port", str(free_port()), __file__, "--rank_of", *map(str, run), "--until",
               str(until)]
    for name in ("state", "steps", "log_every", "heldout_every", "heldout_windows"):
        command += [f"--{name}", str(getattr(args, name))]
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def finished(run: Run, args: argparse.Namespace) -> bool:
    return (args.state / run.name / "summary.json").exists()


def say(line: str) -> None:
    print(f"{time.time() - STARTED:5.0f} s  {line}", file=sys.stderr, flush=True)


def known_rows(args: argparse.Namespace) -> tuple[dict[Run, dict], str | None]:
    """The rows of --known by their runs, and its commit. Exits if they are of other runs than asked for."""
    if args.known is None:
        return {}, None
    result = results_file.read(args.known, "convergence")
    asked = {"steps": args.steps, "ranks": args.ranks, "heldout_windows": args.heldout_windows,
             "data_sha256": json.loads((args.state / "tokens.json").read_text())["sha256"][:16]}
    for one in result["rows"]:
        given = {key: one["case"].get(key) for key in asked}
        if given != asked:
            sys.exit(f"--known {args.known} has runs of {given}, and these are of {asked}: leave it out")
    return {Run(one["case"]["size"], one["contender"], one["case"]["seed"]): one
            for one in result["rows"]}, result["commit"]


def work(runs: Iterable[Run], args: argparse.Namespace) -> bool:
    """Runs what is not finished until this process is args.seconds old; whether no run failed."""
    end = STARTED + args.seconds
    until = end - ENDING_S
    waiting = [run for run in runs if not finished(run, args)]
    if waiting and time.time() >= until - SHORTEST_S:
        say(f"--seconds {args.seconds:.0f} is too short: a run is begun if {SHORTEST_S + ENDING_S} s are left")
    free, running, good = places(args), {}, True
    while running or waiting and time.time() < until - SHORTEST_S:
        while free and waiting and time.time() < until - SHORTEST_S:
            place, run = free.pop(0), waiting.pop(0)
            say(f"{run.name} on {place or 'the CPU'}")
            running[run] = place, launch(run, place, until, args)
        time.sleep(0.2)
        for run, (place, process) in list(running.items()):
            if time.time() > end:
                process.send_signal(signal.SIGTERM)  # torchrun ends its ranks; the run stays at its last checkpoint
                process.wait()
            if process.poll() is None:
                continue
            del running[run]
            free.append(place)
            say(f"{run.name}: {'finished' if finished(run, args) else 'stopped'}")
            if process.returncode:
                good = False
                output = (args.state / run.name / "output.txt").read_text()
                say(f"{run.name} failed with {process.returncode}:\n{output[-3000:]}")
    return good


def row(folder: Path) -> dict:
    """The result row of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    curves: dict = {name: {str(entry["step"]): float(f"{entry[name]:.5g}") for entry in log if name in entry}
                    for name in CURVES}
    heldout = list(curves["heldout_loss"].values())
    expected = summary["moe_layers"] if summary["contender"] != BF16 else 0
    return {**summary, "heldout_loss": heldout[-1], "curves": curves,
            "correct": summary["layers_converted"] == expected and math.isfinite(log[-1]["loss"])
            and heldout[-1] < heldout[0]}


# ---- how results are shown ------------------------------------------------------------------------------------------


def prepare(result: dict) -> list[dict]:
    """Means over the seeds of a case. Training figures are medians of the last tenth."""
    cases: dict = {}
    for one in result["rows"]:
        case = {key: one["case"].get(key) for key in ("size", "steps", "tokens_per_step", "expert_parallel")}
        cases.setdefault(json.dumps(case), {}).setdefault(one["contender"], []).append(one)
    rows = []
    for case, recipes in cases.items():
        seeds = [one["heldout_loss"] for one in recipes.get(BF16, []) if one["correct"]]
        for recipe, found in recipes.items():
            loss = mean(one["heldout_loss"] for one in found)
            curves = {name: {int(step): mean(one["curves"][name][step] for one in found)
                             for step in found[0]["curves"].get(name, ())} for name in CURVES}
            rows.append({"case": json.loads(case), "contender": recipe, "seeds": len(found), "heldout_loss": loss,
                         "curves": curves, "correct": all(one["correct"] for one in found)}
                        | {name: median(list(curves[name].values())[-max(1, len(curves[name]) // 10):])
                           for name in TRAINING}
                        | ({"heldout_bf16": list(in_bf16.values())[-1]}
                           if (in_bf16 := curves.get("heldout_loss_bf16")) else {})
                        | ({"to_bf16": loss / mean(seeds) - 1, "beyond": max(0.0, loss / max(seeds) - 1),
                            "lowest": min(seeds) / mean(seeds) - 1, "highest": max(seeds) / mean(seeds) - 1}
                           if seeds else {}))
    return rows


TRAINING = {"loss": "training loss", "grad_norm": "gradient norm", "busiest_expert": "share of the busiest expert"}
MXFP8_RECIPES = tuple(name for name in RECIPES if name not in (BF16, "own_bf16"))
MEASURES = [
    Measure("held-out loss, to the mean of bf16's seeds", MXFP8_RECIPES, figure="to_bf16", better=show.SMALLER,
            form="{:+.2%}", main=True),
    Measure("held-out loss, beyond the highest of bf16's seeds", MXFP8_RECIPES, figure="beyond", better=show.SMALLER,
            form="{:.2%}")]


def plot(result: dict, pyplot) -> None:
    panels: dict = {}
    for one in result["rows"]:
        size = one["case"]["size"]
        for name, title in (TRAINING | {"heldout_loss": "held-out loss"}).items():
            panels.setdefault(f"{size}: {title}", {})[one["contender"]] = list(one["curves"][name].items())
    show.lines(pyplot, panels, "step", "", columns=4, yscale="log")


SHOWN = show.Shown("convergence", MEASURES, [
    ("seeds", "seeds", "{}"), ("held-out loss", "heldout_loss", "{:.4f}"), ("to bf16's mean", "to_bf16", "{:+.2%}"),
    ("bf16's seeds from", "lowest", "{:+.2%}"), ("to", "highest", "{:+.2%}"),
    ("the same weights in bf16", "heldout_bf16", "{:.4f}"), ("training loss", "loss", "{:.4f}"),
    ("gradient norm", "grad_norm", "{:.3f}"), ("busiest expert", "busiest_expert", "{:.1%}")], plot, wide=False,
    prepare=prepare)


# ---- command line ---------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse_args()
    if args.rank_of:
        rank_main(args)
        return
    if args.show:
        sys.exit(show.show(SHOWN, args.show, args.check) or None)
    store_tokens(args.data, args.state)
    known, known_commit = known_rows(args)
    runs = plan(args)
    good = work([one for one in runs if one not in known], args)
    rows = known | {one: row(args.state / one.name) for one in runs if one not in known and finished(one, args)}
    left = len(set(runs) - set(rows))
    say(f"{len(runs) - left} of {len(runs)} runs are finished" + (": run this again" if left else ""))
    if not rows:
        sys.exit("no run is finished: nothing to show yet")
    path = args.out or results_file.RESULTS / "convergence.json"
    results_file.write("convergence", list(rows.values()), path, known_commit or args.commit)
    error = show.show(SHOWN, path, args.check)
    sys.exit(error or (None if good else "a run failed"))


if __name__ == "__main__":
    main()
