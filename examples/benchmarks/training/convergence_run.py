# SPDX-License-Identifier: Apache-2.0
"""One run of the paired study (convergence.py): a whole training, by recipe and seed.

Runs of one seed have the same initial weights, the same batches in the same order and the same random draws. So the
recipe alone tells them apart.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import deepspeed
import deepspeed.comm as dist
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.utils import safe_set_full_fp32_param

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "gpt_moe"))

import data
import train
from ds_mxfp8_moe import MXFP8MoEConfig, mx
from ds_mxfp8_moe.config import SECTION, WIRE_KEYS, current_device, resolve
from lib import results_file

from .roundings import NAMES, WIRES, Measured, simulated, simulates

ROOT = Path(__file__).resolve().parents[3]
HELDOUT_SHARE = 0.05  # of the texts
EPOCHS_AT_MOST = 2
TIMEOUT = timedelta(minutes=5)
OWN = "own"  # the size, and the recipe, of a user's model and config
BF16 = "bf16"
YARDSTICK = "reordered"
NUDGED = "nudged"


class Size(NamedTuple):
    """Attributes: autoep, classic: files of the two models of a size. sequences: of a step, over all ranks."""

    autoep: str
    classic: str
    lr: float
    sequences: int
    seq_len: int


SIZES = {"50M": Size("configs/models/qwen3_moe_50m.yaml", "configs/models/gpt_50m.yaml", 6e-4, 16, 1024),
         "300M": Size("configs/models/qwen3_moe_300m.yaml", "configs/models/gpt_300m.yaml", 3e-4, 16, 1024),
         "tiny": Size("configs/models/qwen3_moe_tiny.yaml", "configs/models/gpt_tiny.yaml", 1e-3, 4, 128)}


@dataclass(frozen=True)
class Recipe:
    """What tells a run from another one of its seed.

    Attributes:
        section: of the DeepSpeed config. None: plain DeepSpeed.
        classic: trains the GPT with classic layers. Else the Qwen3-MoE with AutoEP's.
        reordered: each rank takes its sequences of a step in the reverse order. Every token gets the same result, and
            only the sums over tokens have another order: those of weight gradients and of the loss.
        nudged: before the first step, the experts' weights are rounded once as MXFP8 rounds them. Training then goes
            on in bf16: a change of MXFP8's size, which costs nothing.
        off: roundings that are left out (roundings.py). The others are simulated. None: the layer as it is.
    """

    section: dict | None = field(default_factory=dict)
    classic: bool = False
    reordered: bool = False
    nudged: bool = False
    off: tuple[str, ...] | None = None

    @property
    def base(self) -> str:
        """The recipe that this one is compared with."""
        return f"classic_{BF16}" if self.classic else BF16

    @property
    def quantizes(self) -> bool:
        return (self.section is not None and self.section.get("recipe") != BF16
                and not set(NAMES) <= set(self.off or ()))


# Roundings that are left out together: (keys of the section, names of roundings.py)
PARTS = {"pre": ({"preactivation_dtype": "bf16"}, ()),
         "x": ({"dispatch_fwd_dtype": "bf16"}, ("x", "x_wgrad")),
         "h": ({}, ("h", "h_wgrad")),
         "weights": ({}, ("weights_fwd", "weights_bwd")),
         "weights_fwd": ({}, ("weights_fwd", )), "weights_bwd": ({}, ("weights_bwd", )),
         "g": ({"combine_bwd_dtype": "bf16"}, ("g", "g_wgrad")),
         "dpre": ({}, ("dpre", "dpre_wgrad"))}
TOGETHER = {"forward": ("pre", "x", "h", "weights_fwd"), "backward": ("g", "dpre", "weights_bwd"),
            "all": ("pre", "x", "h", "weights", "g", "dpre")}


def _without(keys: dict, *parts: str) -> Recipe:
    """A recipe whose roundings of these parts are left out, simulated."""
    section, off = dict(keys), []
    for part in parts:
        section |= PARTS[part][0]
        off += PARTS[part][1]
    return Recipe(section, off=tuple(off))


def _switches() -> dict[str, Recipe]:
    """The default recipe and all MXFP8 with some roundings changed: "default_128-h" leaves out that of h."""
    found = {}
    for name, keys in (("default_128", {}), ("mxfp8_128", {"recipe": "mxfp8"})):
        keys = {"scale_block_size": 128, **keys}
        found |= {f"{name}-{part}": _without(keys, part) for part in PARTS}
        found |= {f"{name}-{part}": _without(keys, *parts) for part, parts in TOGETHER.items()}
        found |= {f"{name}-fp8_sums": _without(keys),  # all roundings, products in bf16
                  f"{name}+floor": Recipe(keys | {"scaling_mode": "floor"}),
                  f"{name}+combine_fwd": Recipe(keys | {"combine_fwd_dtype": "mxfp8"}),
                  f"{name}+dispatch_bwd": Recipe(keys | {"dispatch_bwd_dtype": "mxfp8"})}
    return found


RECIPES = {BF16: Recipe({"recipe": BF16}), "default_128": Recipe({"scale_block_size": 128}),
           YARDSTICK: Recipe({"recipe": BF16}, reordered=True), NUDGED: Recipe({"recipe": BF16}, nudged=True),
           "mxfp8_128": Recipe({"scale_block_size": 128, "recipe": "mxfp8"}),
           "default_32": Recipe({"scale_block_size": 32}),
           "wires_128": Recipe({"scale_block_size": 128} | {f"{wire}_dtype": "mxfp8" for wire in WIRES}),
           "classic_bf16": Recipe({"recipe": BF16}, classic=True),
           "classic_default_128": Recipe({"scale_block_size": 128}, classic=True),
           "plain": Recipe(None), "mxfp8_32": Recipe({"scale_block_size": 32, "recipe": "mxfp8"}), **_switches()}


class Run(NamedTuple):
    size: str
    recipe: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}-{self.recipe}-{self.seed}"


# ---- a user's own model ---------------------------------------------------------------------------------------------


def own_config(path: Path) -> dict:
    """A user's DeepSpeed config. Exits if its section "mxfp8_moe" does not quantise anything."""
    config = load_ds_config(str(path))
    section = config.get(SECTION, {})
    if not section.get("enabled") or not Recipe(section).quantizes:
        sys.exit(f'--ds_config {path}: expected a section "{SECTION}" with "enabled": true and another recipe than '
                 f'"{BF16}", which it is compared with')
    return config


def own_recipe(recipe: str, section: dict) -> Recipe:
    """The user's section as it is; or, for "bf16" and "reordered", the same without quantisation."""
    if recipe == OWN:
        return Recipe(section)
    dropped = (*WIRE_KEYS, "preactivation_dtype")
    return Recipe({key: value for key, value in section.items() if key not in dropped} | {"recipe": BF16},
                  reordered=recipe == YARDSTICK)


def recipe_of(run: Run, args: argparse.Namespace) -> Recipe:
    if run.size == OWN:
        return own_recipe(run.recipe, own_config(args.ds_config)[SECTION])
    return RECIPES[run.recipe]


# ---- data ---------------------------------------------------------------------------------------------------------


def encoder(model: str | None) -> data.Encode:
    """Of a Hugging Face model that has a tokenizer. Else bytes."""
    if model and not train.models.is_yaml(model) and (
            not Path(model).exists() or (Path(model) / "tokenizer_config.json").is_file()):
        from transformers import AutoTokenizer
        return data.hf_encoder(AutoTokenizer.from_pretrained(model))
    return data.encode_bytes


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
            sys.exit(f"--state {folder} has the tokens of --data {there}, not of {of}: name another --state")
        return
    encode = encoder(model)
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


def stored(folder: Path, name: str, seq_len: int) -> data.Windows:
    return data.Windows(np.load(folder / f"{name}.npy", mmap_mode="r"), seq_len)


# ---- the engine -----------------------------------------------------------------------------------------------------


def build(run: Run, args: argparse.Namespace) -> tuple:
    """(engine, the tokens of a sequence, the arguments that examples/gpt_moe takes)"""
    recipe = recipe_of(run, args)
    if run.size == OWN:
        config = own_config(args.ds_config)
        section = recipe.section
        model = ["--hf_model", args.hf_model] if args.hf_model else ["--model", str(args.model)]
        model += ["--seq_len", str(args.seq_len)] if args.seq_len else []
    else:
        size, world = SIZES[run.size], dist.get_world_size()
        config = json.loads((ROOT / "configs/ds/zero2.json").read_text())
        config["train_micro_batch_size_per_gpu"] = size.sequences // world
        config["optimizer"]["params"]["lr"] = size.lr
        if not recipe.classic:
            config["expert_parallel"] = {"enabled": True, "autoep_size": world}
        section = None if recipe.section is None else {
            "enabled": True, "min_tokens_per_expert": 0, "transport": "collective", **recipe.section}
        model = ["--model", str(ROOT / size.classic)] if recipe.classic else ["--hf_model", str(ROOT / size.autoep)]
        model += ["--seq_len", str(size.seq_len)]
    config.pop(SECTION, None)
    if section is not None:
        config[SECTION] = section
    settings = train.parse_args([*model, "--seed", str(run.seed), "--steps", str(args.steps), "--warmup_steps",
                                 str(max(1, args.steps // 10)), "--heldout_windows", str(args.heldout_windows)])
    settings.deepspeed_config = config
    settings.float32 = train.would_emulate_bf16(settings)
    return *train.initialize(settings), settings


def case_of(run: Run, engine, seq_len: int, args: argparse.Namespace) -> dict:
    tokens = json.loads((args.state / "tokens.json").read_text())
    per_step = (engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
                * dist.get_world_size() * seq_len)
    kind = "classic" if isinstance(engine.module, train.models.GPT) else "autoep"
    case = {"size": run.size, "model": kind if run.size != OWN else Path(args.hf_model or args.model).name,
            "parameters": train.number_of_parameters(engine), "expert_parallel": train.moe_layers(engine)[0].ep_size,
            "ranks": dist.get_world_size(), "zero_stage": engine.zero_optimization_stage(), "steps": args.steps,
            "tokens_per_step": per_step, "lr": engine.optimizer.param_groups[0].get("initial_lr"),
            "dtype": str(next(engine.module.parameters()).dtype).removeprefix("torch."), "data": Path(args.data).name,
            "data_sha256": tokens["sha256"][:16], "training_tokens": tokens["training_tokens"],
            "heldout_windows": args.heldout_windows, "seed": run.seed}
    if args.stop_after:
        case["stopped_after"] = args.stop_after
    epochs = per_step * args.steps / case["training_tokens"]
    if epochs > EPOCHS_AT_MOST:
        raise ValueError(f"{run.name}: {args.steps} steps of {per_step} tokens are {epochs:.1f} epochs "
                         f"of --data {tokens['source']}; at most {EPOCHS_AT_MOST}")
    return case


def nudge(engine) -> None:
    """Rounds the experts' weights to MXFP8, those that the optimizer keeps too. Not in ZeRO-3."""
    for p in engine.module.parameters():
        if is_moe_param(p) and p.dim() > 1:
            rounded = mx.quantize_tiles(p).dequantize(torch.float32)
            p.data.copy_(rounded)
            safe_set_full_fp32_param(p, rounded)


@contextmanager
def in_bf16(layers: list) -> Iterator[None]:
    """Computes converted layers in the bf16 recipe within, with the weights that they have."""
    recipe = resolve(MXFP8MoEConfig(recipe=BF16), *current_device())
    settings = [layer.mxfp8_settings for layer in layers]
    try:
        for layer, own in zip(layers, settings, strict=True):
            layer.mxfp8_settings = replace(own, recipe=recipe, min_tokens_per_expert=0)
        yield
    finally:
        for layer, own in zip(layers, settings, strict=True):
            layer.mxfp8_settings = own


def input_gradient(engine, tokens_BS: torch.Tensor, settings: argparse.Namespace) -> torch.Tensor:
    """The gradient of the embedded tokens, [B, S, H], by a forward and backward of which the engine keeps nothing."""
    module, embedded = engine.module, []
    embedding = module.embedding if isinstance(module, train.models.GPT) else module.get_input_embeddings()

    def keep(_, inputs, output):
        embedded.append(output if output.requires_grad else output.requires_grad_())

    hook = embedding.register_forward_hook(keep)
    torch.manual_seed(0)  # the same draws in each recipe
    try:
        cross_entropy, aux_loss = train.losses(_Module(engine), tokens_BS)
        # Asked for by autograd.grad, gradients reach no parameter, whose hooks belong to ZeRO.
        return torch.autograd.grad(cross_entropy + settings.moe_loss_coeff * aux_loss, embedded)[0]
    finally:
        hook.remove()


def measured_roundings(engine, layers: list, tokens_BS: torch.Tensor, settings: argparse.Namespace,
                       off: tuple) -> dict:
    """How each rounding changes its tensors, and how all of them change the gradient that arrives at the embedding.

    Every rank calls it. The result is of this rank's tensors and tokens.
    """
    roundings, gradient = Measured(), Measured()
    with simulated(off, roundings):
        input_gradient(engine, tokens_BS, settings)
    with in_bf16(layers):
        exact_BSH = input_gradient(engine, tokens_BS, settings)
    gradient.add("gradient", exact_BSH, input_gradient(engine, tokens_BS, settings))
    return roundings.read() | {f"gradient_{name}": found["gradient"] for name, found in gradient.read().items()}


class _Module:
    """The engine's module, called as an engine is."""

    def __init__(self, engine):
        self.module, self.device = engine.module, engine.device

    def __call__(self, **inputs):
        return self.module(**inputs)


# ---- training -------------------------------------------------------------------------------------------------------


def batches_of_step(windows: data.Windows, engine, run: Run, step: int, reordered: bool) -> list[torch.Tensor]:
    """This rank's micro-batches of a step, each [B, seq_len + 1]. `reordered` reverses them, each within too."""
    batch_size, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    batches = [windows.training_batch(run.seed, step * accumulation + micro, batch_size, dist.get_rank(),
                                      dist.get_world_size()) for micro in range(accumulation)]
    if not reordered:
        return batches
    if batch_size * accumulation == 1:
        raise ValueError(f"{run.name}: a rank has one sequence in a step, so no sum has another order; expected a "
                         f'larger "train_micro_batch_size_per_gpu" or "gradient_accumulation_steps"')
    return [batch.flip(0) for batch in reversed(batches)]


def train_run(run: Run, args: argparse.Namespace) -> None:
    """Trains from scratch to the end. Every rank calls it.

    Rank 0 writes log.jsonl, one line for every args.log_every steps, and summary.json at the end.
    """
    folder, writes, begin = args.state / run.name, dist.get_rank() == 0, time.time()
    recipe = recipe_of(run, args)
    engine, seq_len, settings = build(run, args)
    case = case_of(run, engine, seq_len, args)
    windows, heldout = (stored(args.state, name, seq_len) for name in ("training", "heldout"))
    if recipe.nudged:
        nudge(engine)
    layers = train.moe_layers(engine)
    converted = [inner for layer in layers if hasattr(inner := getattr(layer, "deepspeed_moe", layer),
                                                      "mxfp8_settings")]
    quantized = [layer for layer in converted if layer.mxfp8_settings.recipe.quantize_gemm]
    micro_batch = engine.train_micro_batch_size_per_gpu()
    sample_BS = next(heldout.heldout_batches(micro_batch, micro_batch * dist.get_world_size(), dist.get_rank(),
                                             dist.get_world_size()))
    log = train.open_log(folder, 0) if writes else None
    # ZeRO-3 fetches parameters in hooks that expect the engine's own backward.
    measurable = engine.zero_optimization_stage() < 3 and all(
        simulates(layer.mxfp8_settings.formula) for layer in quantized)
    roundings: set[str] = set()

    def evaluated() -> dict:
        """Held-out losses in the recipe, and of the same weights in bf16: what a model costs that is used, not
        trained, in MXFP8. And what each rounding does to a batch."""
        row: dict = {"heldout_loss": train.heldout_loss(engine, heldout, settings)}
        if quantized:
            with in_bf16(quantized):
                row["heldout_loss_bf16"] = train.heldout_loss(engine, heldout, settings)
            if measurable:
                row |= measured_roundings(engine, quantized, sample_BS, settings, recipe.off or ())
                roundings.update(row["sqnr_db"])
        return row

    def write(row: dict) -> None:
        if log:
            print(json.dumps(row), file=log, flush=True)

    with nullcontext() if recipe.off is None else simulated(recipe.off):
        write({"step": 0, **evaluated()})
        load = train.ExpertLoad(layers)
        totals, norms = torch.zeros(2, device=engine.device), []
        last = args.stop_after or args.steps
        for done in range(1, last + 1):
            # What a step draws at random depends on seed, step and rank alone, so that runs of a seed draw the same.
            torch.manual_seed((run.seed * 1_000_003 + done) * case["ranks"] + dist.get_rank())
            batches = batches_of_step(windows, engine, run, done - 1, recipe.reordered)
            for tokens_BS in batches:
                cross_entropy, aux_loss = train.losses(engine, tokens_BS)
                engine.backward(cross_entropy + settings.moe_loss_coeff * aux_loss)
                engine.step()
                totals += torch.stack((cross_entropy, aux_loss)).detach() / len(batches)
            norms.append(engine.get_global_grad_norm())
            if done % args.log_every and done != last:
                continue
            loss, aux = train.mean_over_ranks((totals / len(norms)).tolist(), engine.device)
            row = {"step": done, "seconds": time.time() - begin, "loss": loss, "aux_loss": aux,
                   "grad_norm": float(sum(norms) / len(norms)),
                   "busiest_expert": load.read() / layers[0].num_experts}
            totals.zero_()
            norms.clear()
            if done % args.heldout_every == 0 or done == last:
                row |= evaluated()
                load = train.ExpertLoad(layers)  # whose counts leave out what was evaluated
            write(row)
    if writes:
        summary = {"case": case, "contender": run.recipe, "section": recipe.section, "machine": results_file.machine(),
                   "roundings": sorted(roundings) if measurable else None, "moe_layers": len(layers),
                   "layers_converted": len(converted), "seconds": round(time.time() - begin, 1)}
        (folder / "summary.json").write_text(json.dumps(summary))


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent, which may be killed without a chance to end its runs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def rank_main(run: Run, args: argparse.Namespace) -> None:
    """One rank of a run that convergence.py started."""
    Thread(target=_end_with, args=(os.getppid(), ), daemon=True).start()
    accelerator, rank = get_accelerator(), int(os.environ["LOCAL_RANK"])
    if accelerator.device_name() == "cuda" and accelerator.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        # All ranks share the GPU. NCCL refuses that, so each says that it is on a machine of its own.
        os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"of-rank-{rank}", NCCL_SOCKET_IFNAME="lo")
        rank = 0
    accelerator.set_device(rank)
    deepspeed.init_distributed(accelerator.communication_backend_name(), auto_mpi_discovery=False, verbose=False,
                               timeout=TIMEOUT)
    train_run(run, args)
    dist.barrier()
    dist.destroy_process_group()


assert not {name for recipe in RECIPES.values() for name in recipe.off or ()}.difference(NAMES)
