# SPDX-License-Identifier: Apache-2.0
"""Does MXFP8 cost quality? Whole trainings in pairs: each recipe beside bf16, seed by seed.

Runs of one seed have the same initial weights, the same batches in the same order and the same random draws. The
result is the mean of the paired differences of held-out loss, with a 95 % interval. Training amplifies every
difference of rounding. The yardstick is therefore bf16 against "reordered": bf16 with another order of sums.
examples/guides/quality.md explains the method.

    python examples/benchmarks/training/convergence.py --sizes 50M --out study.json
    torchrun --nproc-per-node 8 examples/benchmarks/training/convergence.py \\
        --hf_model FOLDER --ds_config FILE --data FOLDER --out ab.json

The first command trains on one GPU what the result file lacks, the most important runs first, so that a study goes on
in pieces. With --recipes bf16 flash_adamw flash_adamw_bf16, it compares optimizers. The second command compares a
user's section "mxfp8_moe" with bf16, on their model and data.
"""

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.utils import safe_set_full_fp32_param

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "gpt_moe"))

import data
import train
from ds_mxfp8_moe.compat.patches import lent
from ds_mxfp8_moe.compute import mx
from ds_mxfp8_moe.config import FORMAT_KEYS, SECTION
from ds_mxfp8_moe.layers.experts import converted_layers
from lib import models, results_file, run, world
from training import changes
from training.convergence_results import BF16, FLASH, FLASH_BF16, NUDGED, OWN, SHOWN, YARDSTICK

ROOT = Path(__file__).resolve().parents[3]
HELDOUT_SHARE = 0.05  # of the texts
EPOCHS_AT_MOST = 2
LOGGED, EVALUATED = 100, 10  # times in a run
TIMEOUT = timedelta(minutes=30)  # the first rank encodes all texts while the others wait


class Size(NamedTuple):
    """Attributes: model: its file. sequences: of a step, over all ranks."""

    model: str
    lr: float
    sequences: int
    seq_len: int


SIZES = {"50M": Size("configs/models/qwen3_moe_50m.yaml", 6e-4, 16, 1024),
         "300M": Size("configs/models/qwen3_moe_300m.yaml", 3e-4, 16, 1024),
         "tiny": Size("configs/models/qwen3_moe_tiny.yaml", 1e-3, 4, 128)}
RECIPES = {BF16: {"recipe": BF16}, "default_128": {"scale_block_size": 128},
           "mxfp8_128": {"scale_block_size": 128, "recipe": "mxfp8"}, YARDSTICK: {"recipe": BF16},
           NUDGED: {"recipe": BF16}}
OPTIMIZERS = {FLASH: changes.FLASH, FLASH_BF16: changes.FLASH_BF16}  # in bf16, beside torch's AdamW: by --recipes
OWN_RECIPES = (BF16, OWN, YARDSTICK)
# With them, the standard error of a mean difference is 0.2 % at 50M, and 0.1 % at 300M.
SEEDS = 16


class Run(NamedTuple):
    size: str
    recipe: str
    seed: int

    def __str__(self) -> str:
        return f"{self.size}-{self.recipe}-{self.seed}"


def quantizes(section: dict) -> bool:
    return section.get("recipe") != BF16


def own_config(path: Path) -> dict:
    """A user's DeepSpeed config. Exits if its section "mxfp8_moe" does not quantize anything."""
    config = load_ds_config(str(path))
    section = config.get(SECTION, {})
    if not section.get("enabled") or not quantizes(section):
        sys.exit(f'--ds_config {path}: expected a section "{SECTION}" with "enabled": true and another recipe than '
                 f'"{BF16}", which it is compared with')
    return config


def section_of(one: Run, args: argparse.Namespace) -> dict:
    """The section of a run: the study's, the user's as it is, or the user's without quantization."""
    if one.size != OWN:
        return RECIPES.get(one.recipe, RECIPES[BF16])
    section = own_config(args.ds_config)[SECTION]
    if one.recipe == OWN:
        return section
    dropped = (*FORMAT_KEYS, "preactivation_dtype")
    return {key: value for key, value in section.items() if key not in dropped} | {"recipe": BF16}


# ---- data ---------------------------------------------------------------------------------------------------------


def store_tokens(source: str, folder: Path, model: str | None = None) -> None:
    """Writes the tokens of a source's texts for memory-maps, once.

    The hash of a text says whether it is held out, so a copy of it is on the same side, and copies are left out.

    Args:
        model: the Hugging Face model of the user, whose tokenizer encodes the texts.
    """
    of = source if model is None else f"{source} for {model}"
    if (folder / "tokens.json").exists():
        there = json.loads((folder / "tokens.json").read_text())["source"]
        if there != of:
            sys.exit(f"--tokens {folder} has those of --data {there}, not of {of}: name another folder")
        return
    encode = data.encoder_of(model)
    parts: dict[str, list] = {"training": [], "heldout": []}
    seen, whole = set(), hashlib.sha256()
    for text in data.documents(source):
        digest = hashlib.sha256(text).digest()
        if text and digest not in seen:
            seen.add(digest)
            whole.update(digest)
            heldout = int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32
            parts["heldout" if heldout else "training"].append(encode(text))
    about = {"source": of, "sha256": whole.hexdigest()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, tokens in parts.items():
        if not tokens:
            sys.exit(f"--data {source}: {len(seen)} different texts leave none for {name}; expected a folder of many "
                     f"files, of which {HELDOUT_SHARE:.0%} are held out")
        stream = np.concatenate(tokens)
        np.save(folder / f"{name}.npy", stream)
        about[f"{name}_tokens"] = len(stream)
    (folder / "tokens.json").write_text(json.dumps(about))


# ---- one run ------------------------------------------------------------------------------------------------------


def build(one: Run, args: argparse.Namespace) -> tuple:
    """(engine, the tokens of a sequence, the arguments that examples/gpt_moe takes)"""
    section = section_of(one, args)
    if one.size == OWN:
        config = own_config(args.ds_config)
        model = ["--hf_model", args.hf_model, "--seq_len", str(args.seq_len)]
    else:
        size = SIZES[one.size]
        config = json.loads((ROOT / "configs/ds/zero2.json").read_text())
        config["train_micro_batch_size_per_gpu"] = size.sequences // world.size()
        config["optimizer"]["params"]["lr"] = size.lr
        if one.recipe in OPTIMIZERS:
            config |= changes.optimizer_config(OPTIMIZERS[one.recipe], config["optimizer"]["params"])
        config["expert_parallel"] = {"enabled": True, "autoep_size": world.size()}
        section = {"enabled": True, "min_tokens_per_expert": 0, "transport": "collective", **section}
        model = ["--hf_model", str(ROOT / size.model), "--seq_len", str(size.seq_len)]
    settings = train.parse_args([*model, "--seed", str(one.seed), "--steps", str(args.steps), "--warmup_steps",
                                 str(max(1, args.steps // 10)), "--heldout_windows", str(args.heldout_windows)])
    settings.deepspeed_config = config | {SECTION: section}
    settings.float32 = train.would_emulate_bf16(settings)
    return *train.initialize(settings), settings


def asked(args: argparse.Namespace) -> dict:
    """What all runs of a result file agree in."""
    sha256 = json.loads((args.tokens / "tokens.json").read_text())["sha256"]
    return {"steps": args.steps, "ranks": world.size(), "heldout_windows": args.heldout_windows,
            "data_sha256": sha256[:16]}


def case_of(one: Run, engine, seq_len: int, args: argparse.Namespace) -> dict:
    tokens = json.loads((args.tokens / "tokens.json").read_text())
    per_step = engine.train_batch_size() * seq_len
    epochs = per_step * args.steps / tokens["training_tokens"]
    if epochs > EPOCHS_AT_MOST:
        raise ValueError(f"{one}: {args.steps} steps of {per_step} tokens are {epochs:.1f} epochs "
                         f"of --data {tokens['source']}; at most {EPOCHS_AT_MOST}")
    return {"size": one.size, "model": "autoep" if one.size != OWN else Path(args.hf_model).name,
            "parameters": train.number_of_parameters(engine), "expert_parallel": train.moe_layers(engine)[0].ep_size,
            "zero_stage": engine.zero_optimization_stage(), "tokens_per_step": per_step,
            "lr": engine.optimizer.param_groups[0].get("initial_lr"), "data": Path(args.data).name,
            "training_tokens": tokens["training_tokens"], "seed": one.seed, **asked(args)}


def nudge(engine) -> None:
    """Rounds the experts' weights to MXFP8, those that the optimizer keeps too. Not in ZeRO-3.

    A change of MXFP8's size, which costs nothing: training then goes on in bf16.
    """
    for p in engine.module.parameters():
        if is_moe_param(p) and p.dim() > 1:
            rounded = mx.quantize_tiles(p).dequantize(torch.float32)
            p.data.copy_(rounded)
            safe_set_full_fp32_param(p, rounded)


@contextmanager
def in_bf16(layers: list) -> Iterator[None]:
    """Computes converted layers in the bf16 recipe within, with the weights that they have."""
    with ExitStack() as stack:
        for layer in layers:
            settings = layer.mxfp8_settings
            settings = replace(settings, config=settings.config.model_copy(update={"recipe": BF16}))
            stack.enter_context(lent(layer, "mxfp8_settings", settings))
        yield


def batches_of_step(windows: data.Windows, engine, one: Run, step: int) -> list[torch.Tensor]:
    """This rank's micro-batches of a step, each [B, seq_len + 1].

    Those of the yardstick are reversed, each within too. Every token gets the same result, and only the sums over
    tokens have another order: those of weight gradients and of the loss.
    """
    batch_size, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    batches = [windows.training_batch(one.seed, step * accumulation + micro, batch_size, world.rank(), world.size())
               for micro in range(accumulation)]
    if one.recipe != YARDSTICK:
        return batches
    if batch_size * accumulation == 1:
        raise ValueError(f"{one}: a rank has one sequence in a step, so no sum has another order; expected a larger "
                         f'"train_micro_batch_size_per_gpu" or "gradient_accumulation_steps"')
    return [batch.flip(0) for batch in reversed(batches)]


def train_run(one: Run, args: argparse.Namespace) -> dict:
    """Trains from scratch to the end. Every rank calls it. Returns the run's row of the result file."""
    begin = time.time()
    section = section_of(one, args)
    engine, seq_len, settings = build(one, args)
    case = case_of(one, engine, seq_len, args)
    windows, heldout = (data.Windows(np.load(args.tokens / f"{name}.npy", mmap_mode="r"), seq_len)
                        for name in ("training", "heldout"))
    if one.recipe == NUDGED:
        nudge(engine)
    layers = train.moe_layers(engine)
    converted = converted_layers(engine.module)
    quantized = [layer for layer in converted if layer.mxfp8_settings.recipe.quantize_gemm]
    curves: dict[str, dict[str, float]] = {name: {} for name in ("loss", "heldout_loss", "heldout_loss_bf16")}

    def note(step: int, **figures: float) -> None:
        for name, value in figures.items():
            curves[name][str(step)] = float(f"{value:.6g}")  # differences are hundredths of a per cent

    def evaluate(step: int) -> None:
        """Held-out losses in the recipe, and of the same weights in bf16: what a model costs that is used, not
        trained, in MXFP8."""
        note(step, heldout_loss=train.heldout_loss(engine, heldout, settings))
        if quantized:
            with in_bf16(quantized):
                note(step, heldout_loss_bf16=train.heldout_loss(engine, heldout, settings))

    evaluate(0)
    total, summed = torch.zeros((), device=engine.device), 0
    for done in range(1, args.steps + 1):
        # What a step draws at random depends on seed, step and rank alone, so that runs of a seed draw the same.
        torch.manual_seed((one.seed * 1_000_003 + done) * world.size() + world.rank())
        batches = batches_of_step(windows, engine, one, done - 1)
        for tokens_BS in batches:
            cross_entropy, aux_loss = train.losses(engine, tokens_BS)
            engine.backward(cross_entropy + settings.moe_loss_coeff * aux_loss)
            engine.step()
            total += cross_entropy.detach() / len(batches)
        summed += 1
        last = done == args.steps
        if last or done % max(1, args.steps // LOGGED) == 0:
            loss, = train.mean_over_ranks([total.item() / summed], engine.device)
            note(done, loss=loss)
            total.zero_()
            summed = 0
        if last or done % max(1, args.steps // EVALUATED) == 0:
            evaluate(done)
    row = {"case": case, "contender": one.recipe, "section": section, "machine": results_file.machine(),
           "moe_layers": len(layers), "layers_converted": len(converted), "layers_quantized": len(quantized),
           "seconds": round(time.time() - begin, 1), "heldout_loss": curves["heldout_loss"][str(args.steps)],
           "curves": curves}
    models.free(engine)
    failure = failure_of(row)
    return {**row, "correct": failure is None, **({"failure": failure} if failure else {})}


def failure_of(row: dict) -> str | None:
    """Why a finished run is not what it should be. None if it is."""
    heldout, layers = list(row["curves"]["heldout_loss"].values()), row["moe_layers"]
    if not all(map(math.isfinite, row["curves"]["loss"].values())):
        return "the loss is not finite"
    if heldout[-1] >= heldout[0]:
        return "the held-out loss did not fall"
    for what, expected in (("converted", layers), ("quantized", layers if quantizes(row["section"]) else 0)):
        if row[f"layers_{what}"] != expected:
            return f"{row[f'layers_{what}']} layers were {what}, expected {expected} of {layers}"
    return None


# ---- all runs -----------------------------------------------------------------------------------------------------


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = run.parser(__doc__, seconds=540)
    parser.add_argument("--tokens", type=Path, default=Path(tempfile.gettempdir()) / "convergence",
                        help="folder of the encoded texts (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["50M", "300M"])
    parser.add_argument("--recipes", nargs="+", metavar="RECIPE", help="default: the study's")
    parser.add_argument("--seeds", type=run.one_or_more, default=SEEDS, help="of each recipe (default: %(default)s)")
    parser.add_argument("--steps", type=run.one_or_more, default=1000)
    parser.add_argument("--heldout_windows", type=run.one_or_more, default=128)
    parser.add_argument("--data", default="installed", help="stdlib, pydoc, installed, or a folder of texts")
    own = parser.add_argument_group("a model of your own")
    own.add_argument("--ds_config", type=Path, metavar="FILE", help='your DeepSpeed config with its section '
                     '"mxfp8_moe": it is compared with the same in bf16')
    own.add_argument("--hf_model", metavar="NAME_OR_PATH", help="a Hugging Face model, its folder, or a YAML config")
    own.add_argument("--seq_len", type=run.one_or_more, default=1024, help="tokens of a sequence")
    args = run.parse(SHOWN, parser, arguments)
    if args.ds_config:
        if not args.ds_config.is_file():
            parser.error(f"--ds_config: there is no file {args.ds_config}")
        if args.hf_model is None:
            parser.error("--ds_config: name your model by --hf_model")
        own_config(args.ds_config)
        args.sizes = [OWN]
    elif args.hf_model:
        parser.error("--hf_model needs --ds_config: a DeepSpeed config with your section \"mxfp8_moe\"")
    valid = OWN_RECIPES if args.ds_config else (*RECIPES, *OPTIMIZERS)
    if unknown := [name for name in args.recipes or () if name not in valid]:
        parser.error(f"--recipes: unknown {', '.join(unknown)}; expected some of {', '.join(valid)}")
    return args


def plan(args: argparse.Namespace) -> list[Run]:
    """All runs, seed by seed."""
    recipes = args.recipes or (OWN_RECIPES if args.ds_config else RECIPES)
    return [Run(size, recipe, seed) for size in args.sizes for seed in range(args.seeds) for recipe in recipes]


def known(path: Path, args: argparse.Namespace) -> dict[tuple, dict]:
    """The rows of the result file: those of whole runs by the run. Exits if they are of others than asked for."""
    found: dict[tuple, dict] = {}
    planned = set(plan(args))
    for row in results_file.read(path, "convergence")["rows"] if path.exists() else []:
        one, stopped = Run(row["case"]["size"], row["contender"], row["case"]["seed"]), "stopped_after" in row["case"]
        found[(*one, "stopped") if stopped else one] = row
        wanted = asked(args) | ({"section": section_of(one, args)} if one in planned and not stopped else {})
        there = {key: row.get(key, row["case"].get(key)) for key in wanted}
        if there != wanted:
            sys.exit(f"{path} has {one} of {there}, and asked for is {wanted}: name another file by --out")
    return found


def main() -> None:
    args = parse_args()
    world.start(alone=True, timeout=TIMEOUT)
    if world.rank() == 0:
        store_tokens(args.data, args.tokens, args.hf_model)
    world.barrier()
    path = args.out or results_file.RESULTS / "convergence.json"
    rows, commit = known(path, args), args.commit or results_file.commit()
    runs = plan(args)
    for one in world.in_time([one for one in runs if one not in rows], args.seconds):
        row = world.everywhere(partial(train_run, one, args))
        if "curves" not in row:
            world.leave(f"{one}: {row['failure']}")
            return
        rows[one] = {"commit": commit, **row}
        commits = ", ".join(dict.fromkeys(row["commit"] for row in rows.values() if row.get("commit")))
        if world.rank() == 0:
            results_file.write("convergence", list(rows.values()), path, commits or None)
    world.say(f"{sum(one in rows for one in runs)} of {len(runs)} runs are finished")
    run.finish(SHOWN, path, args.check)


if __name__ == "__main__":
    main()
