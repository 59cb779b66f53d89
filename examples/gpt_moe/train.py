# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT with MoE layers, or a Hugging Face MoE model through AutoEP, on real text. Start it with a launcher:

    deepspeed examples/gpt_moe/train.py --deepspeed_config configs/ds/zero2_mxfp8.json --save_dir runs/first
    torchrun --nproc-per-node 2 examples/gpt_moe/train.py --deepspeed_config configs/ds/zero2.json
    mpirun -np 2 python examples/gpt_moe/train.py --deepspeed_config configs/ds/zero2.json

The section "mxfp8_moe" of the DeepSpeed config decides whether it trains in MXFP8. On a CPU without bf16 instructions,
--float32 is the default, and a line says so.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TextIO

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from tqdm import tqdm

import data
import ds_mxfp8_moe
import model as models
from arguments import none_or_more, one_or_more
from ds_mxfp8_moe.compute.grouped_gemm import emulated
from plot import plot_losses

ROOT = Path(__file__).resolve().parents[2]


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--model", type=Path, default=ROOT / "configs/models/gpt_tiny.yaml", help="sizes of the GPT")
    kind.add_argument("--hf_model", metavar="NAME_OR_PATH", help="a Hugging Face model, its folder, or a YAML config")
    parser.add_argument("--ep_size", type=one_or_more,
                        help="expert-parallel size of the GPT (default: the largest possible)")
    parser.add_argument("--seq_len", type=one_or_more,
                        help="tokens per sequence (default: the GPT's; 256 with --hf_model)")
    parser.add_argument("--data", default="stdlib", help="stdlib, pydoc, installed, or a file or folder")
    parser.add_argument("--heldout_data", help="the text whose held-out part is evaluated (default: --data)")
    parser.add_argument("--heldout_windows", type=one_or_more, default=64, help="sequences evaluated, over all ranks")
    parser.add_argument("--steps", type=one_or_more, default=200,
                        help="optimizer steps, including those before a resume")
    parser.add_argument("--warmup_steps", type=none_or_more, default=20)
    parser.add_argument("--moe_loss_coeff", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--activation_checkpointing", action="store_true")
    parser.add_argument("--freeze", metavar="PATTERN", help="parameters that are not trained: a regular expression "
                        r"for their whole names, such as '.*layers\.0\..*experts.*' (some experts: ZeRO-0 or 1) or "
                        r"'.*\.experts\..*' (all experts: ZeRO-0)")
    parser.add_argument("--float32", action="store_true", help='ignores "bf16" in the config; the default on a CPU '
                        "without bf16 instructions")
    parser.add_argument("--compile", action="store_true", help="torch.compile through DeepSpeed's engine")
    parser.add_argument("--save_dir", type=Path, help="checkpoints, log.jsonl, summary.json and loss.png go here")
    parser.add_argument("--save_every", type=none_or_more, default=0,
                        help="steps between checkpoints (0: only the last)")
    parser.add_argument("--load_dir", type=Path, help="the save_dir of a run to resume")
    parser.add_argument("--load_tag", help="a checkpoint in load_dir other than the latest, such as step_100")
    parser.add_argument("--finetune", action="store_true", help="take only the weights from load_dir; start at step 0")
    parser.add_argument("--save_pretrained", type=Path, metavar="FOLDER", help="the trained --hf_model goes here too, "
                        "as a Hugging Face checkpoint")
    parser.add_argument("--log_every", type=one_or_more, default=10)
    args = deepspeed.add_config_arguments(parser).parse_args(arguments)
    if args.save_pretrained and not args.hf_model:
        parser.error("--save_pretrained needs --hf_model: the GPT is not a Hugging Face model")
    if not args.hf_model and not args.model.is_file():
        parser.error(f"--model: there is no file {args.model}")
    if models.is_yaml(args.hf_model or "") and not Path(args.hf_model).is_file():
        parser.error(f"--hf_model: there is no file {args.hf_model}")
    for option, folder in (("--save_dir", args.save_dir), ("--save_pretrained", args.save_pretrained)):
        if folder and folder.exists() and not folder.is_dir():
            parser.error(f"{option} {folder} is no folder")
    # DeepSpeed's autotuner passes the encoded config itself, not a file.
    if Path(args.deepspeed_config or "").suffix and not Path(args.deepspeed_config).is_file():
        parser.error(f"--deepspeed_config: there is no file {args.deepspeed_config}")
    if (args.load_tag or args.finetune) and not args.load_dir:
        parser.error("--load_tag and --finetune need --load_dir")
    if args.load_dir and not checkpoint(args).is_dir():
        parser.error(f"--load_dir {args.load_dir}: no checkpoint {args.load_tag or 'latest'} there")
    try:
        data.check(args.data)
        if args.heldout_data:
            data.check(args.heldout_data, "--heldout_data")
    except FileNotFoundError as error:
        parser.error(str(error))
    return args


def checkpoint(args: argparse.Namespace) -> Path:
    """The folder in args.load_dir to load. It need not exist."""
    latest = args.load_dir / "latest"
    return args.load_dir / (args.load_tag or (latest.read_text().strip() if latest.is_file() else latest.name))


def cosine_with_warmup(warmup_steps: int, total_steps: int):
    """Makes a function from an optimizer to its schedule: linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return 0.55 + 0.45 * math.cos(math.pi * done)

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def losses(engine, tokens_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of the next token, and the MoE layers' auxiliary loss or 0: float32 scalars."""
    tokens_BS = tokens_BS.to(engine.device)
    output = engine(input_ids=tokens_BS[:, :-1])
    cross_entropy = F.cross_entropy(output.logits.float().flatten(0, 1), tokens_BS[:, 1:].flatten())
    return cross_entropy, torch.zeros_like(cross_entropy) if output.aux_loss is None else output.aux_loss.float()


def moe_layers(engine) -> list[torch.nn.Module]:
    """The MoE layers: classic ones, and MoE blocks of Hugging Face models whose experts are spread over the ranks."""
    return [m for m in engine.module.modules() if isinstance(m, MoE | AutoEPMoELayer)]


def number_of_parameters(engine) -> int:
    """The parameters of the whole model. A rank holds some of the experts, and in ZeRO-3 a part of each parameter."""
    ep_sizes = {id(p): layer.ep_size for layer in moe_layers(engine) for p in layer.parameters() if is_moe_param(p)}
    return sum(getattr(p, "ds_numel", p.numel()) * ep_sizes.get(id(p), 1) for p in engine.module.parameters())


def mean_over_ranks(values: list[float], device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


class ExpertLoad:
    """How unevenly tokens went to the experts since the last reading: max / mean, averaged over the layers."""

    def __init__(self, layers):
        self.layers = layers
        # AutoEP's own layers have running sums, which also hold the steps before a resume.
        self.counts = [layer.tokens_per_expert.clone() if hasattr(layer, "tokens_per_expert") else 0
                       for layer in layers]
        for i, layer in enumerate(layers):
            if not isinstance(layer, MoE) and not hasattr(layer, "tokens_per_expert"):
                layer.experts.register_forward_pre_hook(partial(self._count, i))

    def _count(self, i: int, experts, args: tuple) -> None:
        """Of a call of a block's experts with tokens, choices and weights."""
        self.counts[i] += torch.bincount(args[1].flatten(), minlength=experts.num_experts).float()

    def read(self) -> float:
        loads = []
        for i, layer in enumerate(self.layers):
            if isinstance(layer, MoE):
                count_E = layer.deepspeed_moe.exp_counts.float()  # of the last forward
            elif hasattr(layer, "tokens_per_expert"):
                count_E = layer.tokens_per_expert - self.counts[i]
                self.counts[i] = layer.tokens_per_expert.clone()
            else:
                count_E, self.counts[i] = self.counts[i], 0
            dist.all_reduce(count_E)
            loads.append((count_E.max() / count_E.mean()).item())
        return sum(loads) / len(loads)


@torch.no_grad()
def heldout_loss(engine, windows: data.Windows, args) -> float:
    """Mean cross-entropy on held-out text, over all ranks."""
    engine.eval()
    torch.manual_seed(args.seed)
    total = [losses(engine, batch)[0].item()
             for batch in windows.heldout_batches(engine.train_micro_batch_size_per_gpu(), args.heldout_windows,
                                                  dist.get_rank(), dist.get_world_size())]
    engine.train()
    return mean_over_ranks([sum(total) / len(total)], engine.device)[0]


def load_data(args, seq_len: int) -> tuple[data.Windows, data.Windows]:
    """(training windows of --data, held-out windows of --heldout_data)"""
    encode = data.encoder_of(args.hf_model)
    try:
        train, heldout = data.split(data.documents(args.data))
        if args.heldout_data and args.heldout_data != args.data:
            heldout = data.split(data.documents(args.heldout_data))[1]
        return data.Windows(train, seq_len, encode), data.Windows(heldout, seq_len, encode)
    except ValueError as error:  # the text is too short
        sys.exit(f"--data {args.data}, --heldout_data {args.heldout_data or args.data}: {error}")


def freeze(model: torch.nn.Module, pattern: str) -> None:
    """Freezes every parameter whose whole name matches the regular expression."""
    names = [name for name, _ in model.named_parameters()]
    chosen = [name for name in names if re.fullmatch(pattern, name)]
    if not chosen:
        raise ValueError(f"--freeze {pattern!r} matches the whole name of no parameter; the last is {names[-1]}")
    for name in chosen:
        model.get_parameter(name).requires_grad_(False)


def check_frozen(engine) -> None:
    """Refuses frozen experts in ZeRO-2 and 3.

    In ZeRO-2, DeepSpeed 0.19.8 saves the frozen experts of rank 0 and loads them into every rank. In ZeRO-3 it refuses
    to save them.
    """
    stage = engine.zero_optimization_stage()
    if stage < 2:
        return
    held = "only those of rank 0" if stage == 2 else "no frozen experts"
    for name, p in engine.module.named_parameters():
        if is_moe_param(p) and not p.requires_grad:
            raise ValueError(f"--freeze takes {name}, of which each rank has another part, but checkpoints of "
                             f"ZeRO-{stage} hold {held}: use ZeRO-1, or ZeRO-0 if all experts are frozen")


def would_emulate_bf16(args) -> bool:
    """Whether the config asks for bf16 on a CPU without bf16 instructions."""
    device = torch.device(get_accelerator().device_name())
    return (not args.float32 and load_ds_config(args.deepspeed_config).get("bf16", {}).get("enabled", False)
            and emulated(device, torch.bfloat16))


def initialize(args):
    """The engine around the model that the arguments ask for, and the sequence length.

    Without a section "mxfp8_moe" in the config, ds_mxfp8_moe.initialize is deepspeed.initialize.
    """
    if args.hf_model:
        model = models.build_hf(args.hf_model, args.seed, args.activation_checkpointing)
        seq_len = args.seq_len or 256
    else:
        model = models.build_gpt(args.model, args.ep_size, args.seed, args.activation_checkpointing, args.seq_len)
        seq_len = args.seq_len or model.config.seq_len
    if args.float32:
        model.float()  # Hugging Face models are built in bf16
        args.deepspeed_config = {k: v for k, v in load_ds_config(args.deepspeed_config).items() if k != "bf16"}
    if args.freeze:
        freeze(model, args.freeze)
    # A generator, since AutoEP replaces parameters before DeepSpeed reads them. It leaves out frozen parameters, since
    # ZeRO-1 and 2 fail on a group in which all parameters are frozen.
    trained = (p for p in model.parameters() if p.requires_grad)
    engine, *_ = ds_mxfp8_moe.initialize(args=args, model=model, model_parameters=trained,
                                         lr_scheduler=cosine_with_warmup(args.warmup_steps, args.steps))
    if not moe_layers(engine):
        raise ValueError(f'--hf_model {args.hf_model} has no MoE layers of DeepSpeed. AutoEP makes them: write '
                         '"expert_parallel": {"enabled": true, "autoep_size": N} into the DeepSpeed config')
    if args.save_dir:
        check_frozen(engine)
    if args.compile:
        engine.compile()
    return engine, seq_len


def open_log(folder: Path, step: int) -> TextIO:
    """Opens the log.jsonl of a run that continues after `step`, to append to it.

    Removes later steps, which the run repeats, and a line that was cut short.
    """
    path = folder / "log.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
    path.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))
    return path.open("a")


def train(engine, train_windows: data.Windows, heldout: data.Windows, first_step: int, args) -> dict:
    """Trains from `first_step` to args.steps. Writes a line to log.jsonl for each logged step. Returns a summary."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    tokens_per_step = batch_size * accumulation * world_size * train_windows.seq_len
    log = open_log(args.save_dir, first_step) if rank == 0 and args.save_dir else None
    bar = tqdm(total=args.steps, initial=first_step, disable=rank != 0, unit="step",
               mininterval=1 if sys.stderr.isatty() else 30)
    summary = {"first_step": first_step, "heldout_before": heldout_loss(engine, heldout, args)}
    load = ExpertLoad(moe_layers(engine))
    start = logged_at = time.perf_counter()
    logged_step = first_step
    for step in range(first_step, args.steps):
        # Random numbers of a step depend only on seed, step and rank, so a resumed run repeats them.
        torch.manual_seed((args.seed * 1_000_003 + step) * world_size + rank)
        totals = [0.0, 0.0]
        for micro in range(accumulation):
            tokens_BS = train_windows.training_batch(args.seed, step * accumulation + micro, batch_size, rank,
                                                     world_size)
            cross_entropy, aux_loss = losses(engine, tokens_BS)
            engine.backward(cross_entropy + args.moe_loss_coeff * aux_loss)
            engine.step()
            totals[0] += cross_entropy.item() / accumulation
            totals[1] += aux_loss.item() / accumulation
        done = step + 1
        bar.update()
        if done % args.log_every == 0 or done == args.steps:
            loss, aux = mean_over_ranks(totals, engine.device)
            now = time.perf_counter()
            row = {"step": done, "loss": loss, "aux_loss": aux, "expert_load": load.read(), "lr": engine.get_lr()[0],
                   "tokens_per_s": (done - logged_step) * tokens_per_step / (now - logged_at),
                   "memory_gib": get_accelerator().max_memory_allocated() / 2**30, "seconds": now - start}
            logged_at, logged_step = now, done
            bar.set_postfix({k: f"{row[k]:.4g}" for k in ("loss", "aux_loss", "expert_load", "tokens_per_s")})
            if log:
                print(json.dumps(row), file=log, flush=True)
        if args.save_dir and (done == args.steps or args.save_every and done % args.save_every == 0):
            engine.save_checkpoint(args.save_dir, tag=f"step_{done}", client_state={"step": done})
    summary |= {"loss": loss, "train_seconds": time.perf_counter() - start,
                "heldout": heldout_loss(engine, heldout, args)}
    bar.close()
    return summary


def run(args: argparse.Namespace) -> dict:
    """Builds, loads, trains and evaluates as the arguments say. Returns the summary. Every rank calls it."""
    if args.save_dir:
        args.save_dir.mkdir(parents=True, exist_ok=True)
    engine, seq_len = initialize(args)
    train_windows, heldout = load_data(args, seq_len)
    first_step = 0
    if args.load_dir:
        path, state = engine.load_checkpoint(args.load_dir, tag=args.load_tag, load_module_only=args.finetune)
        if path is None:
            sys.exit(f"--load_dir {args.load_dir}: DeepSpeed finds no files of {checkpoint(args)} that it can load")
        first_step = 0 if args.finetune else state["step"]
        if first_step >= args.steps:
            sys.exit(f"--steps {args.steps}: the checkpoint has already made {first_step}")

    summary = train(engine, train_windows, heldout, first_step, args)
    if args.save_pretrained:
        ds_mxfp8_moe.save_pretrained(engine, args.save_pretrained)
    layers = moe_layers(engine)
    summary |= {"moe_layers": len(layers),
                "layers_converted": sum(hasattr(getattr(m, "deepspeed_moe", m), "mxfp8_settings") for m in layers),
                "parameters": number_of_parameters(engine),
                "micro_batch_size": engine.train_micro_batch_size_per_gpu()}
    if dist.get_rank() == 0 and args.save_dir:
        (args.save_dir / "summary.json").write_text(json.dumps(summary))
        plot_losses({args.save_dir.name: args.save_dir}, args.save_dir / "loss.png")
    return summary


def main() -> None:
    args = parse_args()
    if not args.deepspeed_config:
        sys.exit("--deepspeed_config: name a file such as configs/ds/zero2.json")
    if "LOCAL_RANK" not in os.environ and importlib.util.find_spec("mpi4py") is None:
        sys.exit(f"this runs on ranks that a launcher starts: deepspeed {shlex.join(sys.argv)}")
    deepspeed.init_distributed()  # finds the rank through mpi4py if the launcher did not set it
    args.local_rank = int(os.environ["LOCAL_RANK"])
    get_accelerator().set_device(args.local_rank)
    if would_emulate_bf16(args):
        args.float32 = True
        if dist.get_rank() == 0:
            print("train.py: trains in float32 instead of bf16: this CPU has no bf16 instructions and would take ten "
                  "times as long", flush=True)
    summary = run(args)
    if dist.get_rank() == 0:
        print(json.dumps(summary))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
