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
from ds_mxfp8_moe import MXFP8MoEConfig, casts
from ds_mxfp8_moe.config import current_device, resolve
from ds_mxfp8_moe.layer import MXFP8MOELayer
from ds_mxfp8_moe.mx import sqnr_db
from finetune import free_port
from lib import results_file, show

ROOT = Path(__file__).resolve().parents[3]


class Size(NamedTuple):
    model: str
    lr: float
    sequences: int = 8  # of a rank, a step


SIZES = {"50M": Size("configs/models/gpt_50m.yaml", 6e-4), "300M": Size("configs/models/gpt_300m.yaml", 3e-4),
         "tiny": Size("configs/models/gpt_tiny.yaml", 1e-3, 2)}
BF16 = "bf16"
# The section "mxfp8_moe" of each; None: plain DeepSpeed. By priority, bf16's further seeds before the ablations.
RECIPES = {BF16: None, "default_128": {"scale_block_size": 128},
           "mxfp8_128": {"scale_block_size": 128, "recipe": "mxfp8"}, "default_32": {"scale_block_size": 32}}
# "own_bf16": the converted layer without quantisation, which tells the layer's doing from that of MXFP8.
ABLATIONS = {"own_bf16": {"recipe": "bf16"},
             "combine_mxfp8": {"scale_block_size": 128, "combine_fwd_dtype": "mxfp8"},
             "dispatch_gradient_mxfp8": {"scale_block_size": 128, "dispatch_bwd_dtype": "mxfp8"},
             "floor": {"scale_block_size": 128, "scaling_mode": "floor"}}
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help="folder of tokens, checkpoints and logs, outside of the repository")
    parser.add_argument("--seconds", type=float, default=540, help="for this piece with its start")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["50M", "300M"])
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES, *ABLATIONS], default=[*RECIPES, *ABLATIONS])
    parser.add_argument("--seeds", type=none_or_more, default=1, help="seeds of each recipe")
    parser.add_argument("--bf16_seeds", type=none_or_more, default=5)
    parser.add_argument("--steps", type=one_or_more, default=1000)
    parser.add_argument("--log_every", type=one_or_more, default=10, help="steps; a run can stop at these only")
    parser.add_argument("--heldout_every", type=one_or_more, default=100)
    parser.add_argument("--sqnr_every", type=one_or_more, default=250)
    parser.add_argument("--heldout_windows", type=one_or_more, default=128)
    parser.add_argument("--data", default="installed", help="stdlib, pydoc, installed, or a file or folder")
    parser.add_argument("--ranks", type=one_or_more, default=2,
                        help="GPUs of a run, which its experts are spread over")
    parser.add_argument("--sharing", type=one_or_more, default=1, help="runs that share a GPU")
    parser.add_argument("--known", type=Path, metavar="FILE", help="a result file whose runs are not run again; they "
                        "stand in the new file too, which is then called as old as that one")
    parser.add_argument("--out", type=Path, help="the result file (default: under examples/benchmarks/results)")
    parser.add_argument("--commit", help="the commit measured, where the repository is not at hand")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show a result file and run nothing")
    parser.add_argument("--rank_of", nargs=3, help=argparse.SUPPRESS)  # this process is a rank of that run
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = results_file.parse(parser, arguments, ("show", "rank_of"))
    if not args.show and (args.state is None or ROOT in (args.state.resolve(), *args.state.resolve().parents)):
        parser.error("--state: name a folder outside of the repository")
    if args.heldout_every % args.log_every or args.sqnr_every % args.log_every:
        parser.error("--heldout_every and --sqnr_every must be multiples of --log_every")
    return args


def plan(args: argparse.Namespace) -> list[Run]:
    """All runs, the most important ones first."""
    runs = []
    for size in args.sizes:
        runs += [Run(size, recipe, 0) for recipe in RECIPES]
        runs += [Run(size, BF16, seed) for seed in range(args.bf16_seeds)]
        runs += [Run(size, recipe, 0) for recipe in ABLATIONS]
        runs += [Run(size, recipe, seed) for seed in range(args.seeds) for recipe in (*RECIPES, *ABLATIONS)]
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
    section = (RECIPES | ABLATIONS)[run.recipe]
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


def expert_load(layers: list) -> dict[str, float]:
    """Means over the layers of the fraction that the busiest expert gets, and of the entropy of the fractions, 1 if
    all experts get equally much. Of the last forward, over all ranks."""
    busiest, entropy = [], []
    for layer in layers:
        count_E = layer.deepspeed_moe.exp_counts.float()
        dist.all_reduce(count_E)
        share_E = count_E / count_E.sum()
        busiest.append(share_E.max())
        entropy.append(-torch.xlogy(share_E, share_E).sum() / math.log(len(share_E)))
    return {"busiest_expert": torch.stack(busiest).mean().item(), "entropy": torch.stack(entropy).mean().item()}


class Caught(contextlib.AbstractContextManager):
    """What goes into a layer, and the gradient of what comes out, in the forward and backward within."""

    def __init__(self, layer: torch.nn.Module):
        self.layer, self.x, self.gradient = layer, None, None

    def __enter__(self):
        self._handle = self.layer.register_forward_hook(self._forward)
        return self

    def __exit__(self, *_):
        self._handle.remove()

    def _forward(self, _layer, inputs, output):
        self.x = inputs[0].detach()
        output.register_hook(self._backward)

    def _backward(self, gradient):
        self.gradient = gradient


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


def sqnr(layer: MXFP8MOELayer, x: torch.Tensor, gradient: torch.Tensor) -> dict[str, float]:
    """dB of the layer in its recipe against the bf16 recipe: same weights, input and gradient; the mean over ranks.

    "tokens": as they are dispatched; "output"; "input_gradient"; "weight_gradient", of this rank's experts.
    """

    def outcome() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)  # routing may draw at random, twice alike; every step seeds anew
        leaf = x.clone().requires_grad_()
        y = layer(leaf, None)
        weights = list(layer.experts.parameters())
        dx, *dw = torch.autograd.grad(y, [leaf, *weights], gradient)  # leaves the optimizer's gradients alone
        return {"output": y, "input_gradient": dx, "weight_gradient": torch.cat([w.flatten() for w in dw])}

    recipe = layer.mxfp8_settings.recipe
    x_TH = x.reshape(-1, x.shape[-1])
    rounded_TH = casts.dequantize(casts.quantize(x_TH, recipe.block_size, recipe.scaling_mode), x.dtype)
    actual = {"tokens": rounded_TH} | outcome()
    with in_bf16([layer]):
        expected = {"tokens": x_TH} | outcome()
    values = train.mean_over_ranks([sqnr_db(expected[name], actual[name]) for name in actual], x.device)
    return dict(zip(actual, values, strict=True))


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
    probed = layers[len(layers) // 2].deepspeed_moe
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
        probing = quantised and (done % args.sqnr_every == 0 or done == args.log_every)
        tokens_BS = windows.training_batch(run.seed, done - 1, SIZES[run.size].sequences, dist.get_rank(),
                                           case["ranks"])
        with Caught(probed) if probing else contextlib.nullcontext() as caught:
            cross_entropy, aux_loss = train.losses(engine, tokens_BS)
            engine.backward(cross_entropy + settings.moe_loss_coeff * aux_loss)
        noise = {"sqnr_db": sqnr(probed, caught.x, caught.gradient)} if probing else {}
        engine.step()
        totals += torch.stack((cross_entropy, aux_loss)).detach()
        norms.append(engine.get_global_grad_norm())
        if done % args.log_every and done != args.steps:
            continue
        loss, aux, late = train.mean_over_ranks([*(totals / len(norms)).tolist(), time.time() > args.until],
                                                engine.device)
        row = {"step": done, "loss": loss, "aux_loss": aux, "grad_norm": float(sum(norms) / len(norms)),
               **expert_load(layers), **noise}
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
    for name in ("state", "steps", "log_every", "heldout_every", "sqnr_every", "heldout_windows"):
        command += [f"--{name}", str(getattr(args, name))]
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def finished(run: Run, args: argparse.Namespace) -> bool:
    return (args.state / run.name / "summary.json").exists()


def say(line: str) -> None:
    print(f"{time.time() - STARTED:5.0f} s  {line}", file=sys.stderr, flush=True)


def check_alike(case: dict, args: argparse.Namespace, where: str, instead: str) -> None:
    """Exits where a run that has ended, by its case, is of other runs than these arguments ask for."""
    asked = {"steps": args.steps, "ranks": args.ranks, "heldout_windows": args.heldout_windows,
             "data_sha256": json.loads((args.state / "tokens.json").read_text())["sha256"][:16]}
    given = {key: case.get(key) for key in asked}
    if given != asked:
        sys.exit(f"{where} has runs of {given}, and these are of {asked}: {instead}")


def known_rows(args: argparse.Namespace) -> tuple[dict[Run, dict], str | None]:
    """The rows of --known by their runs, and its commit; nothing without it. Exits where they are of other runs than
    these arguments ask for."""
    if args.known is None:
        return {}, None
    result = show.read(args.known)
    for row in result["rows"]:
        check_alike(row["case"], args, f"--known {args.known}", "leave it out")
    return {Run(row["case"]["size"], row["contender"], row["case"]["seed"]): row
            for row in result["rows"]}, result["commit"]


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
    curves: dict = {name: {str(entry["step"]): _rounded(entry[name]) for entry in log if name in entry}
                    for name in ("loss", "grad_norm", "busiest_expert", "entropy", "heldout_loss", "heldout_loss_bf16",
                                 "sqnr_db")}
    heldout = list(curves["heldout_loss"].values())
    expected = summary["moe_layers"] if summary["contender"] != BF16 else 0
    return {**summary, "heldout_loss": heldout[-1], "curves": curves,
            "correct": summary["layers_converted"] == expected and math.isfinite(log[-1]["loss"])
            and heldout[-1] < heldout[0]}


def _rounded(value: float | dict):
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return float(f"{value:.5g}")


def main() -> None:
    args = parse_args()
    if args.rank_of:
        rank_main(args)
        return
    path = args.show
    good = True
    if path is None:
        store_tokens(args.data, args.state)
        known, known_commit = known_rows(args)
        runs = plan(args)
        for run in runs:
            if finished(run, args):
                case = json.loads((args.state / run.name / "summary.json").read_text())["case"]
                check_alike(case, args, f"--state {args.state}", "name another --state")
        good = work([run for run in runs if run not in known], args)
        rows = known | {run: row(args.state / run.name) for run in runs if run not in known and finished(run, args)}
        left = len(set(runs) - set(rows))
        say(f"{len(runs) - left} of {len(runs)} runs are finished" + (": run this again" if left else ""))
        if not rows:
            sys.exit("no run is finished: nothing to show yet")
        path = args.out or results_file.RESULTS / "convergence.json"
        results_file.write("convergence", list(rows.values()), path, of_commit=known_commit or args.commit)
    if not (show.show(path) and good):
        sys.exit("a run failed or went wrong")


if __name__ == "__main__":
    main()
