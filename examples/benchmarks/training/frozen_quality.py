# SPDX-License-Identifier: Apache-2.0
"""Do frozen experts in 8 or 4 bits cost quality? LoRA of a small model in pairs: experts held so, and in bf16.

A model of bytes learns the sources of Python's standard library. Then adapters of attention and experts learn the text
of pydoc from it, once in each way: the default recipe with frozen weights in MXFP8 or in MXFP4, the recipe bf16, and
the recipe bf16 with experts that were rounded to NF4, as in bitsandbytes: blocks of 64 values, without double
quantization. The runs of a seed have the same adapters at their start and the same batches. A pair's difference is
that of its held-out losses.

    python examples/benchmarks/training/frozen_quality.py     # on a GPU, or with --out on a CPU: half an hour
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist

import torch
import yaml
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "gpt_moe"))

import data
import ds_mxfp8_moe
from lib import models, run, show, world
from lib.paired import interval
from lib.show import Measure
from train import heldout_loss
from training.whole_model import ADAPTERS

MODEL = Path(__file__).resolve().parents[3] / "configs/models/qwen3_moe_tiny.yaml"
BF16, FROZEN, FOUR_BITS, NF4 = "frozen in bf16", "frozen in MXFP8", "frozen in MXFP4", "frozen in NF4"
OURS = {"scale_block_size": 128, "min_tokens_per_expert": 0}
SECTIONS = {BF16: {"recipe": "bf16"}, FROZEN: OURS, FOUR_BITS: {**OURS, "frozen_experts": "mxfp4"},
            NF4: {"recipe": "bf16"}}
SEQUENCES, SEQUENCE = 8, 128  # of a step
BASE_STEPS, BASE_LR, LORA_LR = 600, 1e-3, 1e-3
HELDOUT_WINDOWS = 64


def base_model(windows: data.Windows, steps: int) -> nn.Module:
    """A model that has learnt from `windows`, by plain PyTorch."""
    from transformers import AutoConfig, AutoModelForCausalLM
    torch.manual_seed(0)
    config = AutoConfig.for_model(**yaml.safe_load(MODEL.read_text()), use_cache=False)
    model = AutoModelForCausalLM.from_config(config).to(world.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LR)
    for step in range(steps):
        tokens_BS = windows.training_batch(0, step, SEQUENCES, 0, 1).to(world.device())
        model(input_ids=tokens_BS, labels=tokens_BS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.to(world.BF16)


def nf4_values() -> torch.Tensor:
    """The 16 values of NF4: quantiles of the normal distribution (QLoRA, arXiv 2305.14314), over the largest."""
    below, above = (torch.linspace(0.9677083, 0.5, count)[:-1].tolist() for count in (8, 9))
    quantile = NormalDist().inv_cdf
    values = torch.tensor([*(-quantile(p) for p in below), 0.0, *(quantile(p) for p in above)]).sort().values
    return values / values.max()


def rounded_to_nf4(w: torch.Tensor) -> torch.Tensor:
    """Weights as they come back from NF4, with the largest magnitude of 64 neighbors as scale."""
    blocks, values = w.float().flatten().unflatten(0, (-1, 64)), nf4_values().to(w.device)
    scale = blocks.abs().amax(1, keepdim=True)
    places = torch.bucketize(blocks / scale.clamp(min=torch.finfo(torch.float32).tiny), (values[1:] + values[:-1]) / 2)
    return (values[places] * scale).view(w.shape).to(w.dtype)


def adapted_engine(path: Path, contender: str, seed: int, rate: float, lora: dict | None = None,
                   **section: bool) -> nn.Module:
    """An engine over the model in a folder, with new adapters. `lora`: of peft.LoraConfig. `section`: more keys."""
    import peft
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(path, dtype=world.BF16).to(world.device())
    for name, weight in model.named_parameters() if contender == NF4 else ():
        if ".experts." in name:
            weight.data = rounded_to_nf4(weight.data)
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, peft.LoraConfig(**(lora or ADAPTERS)))
    config = {"train_micro_batch_size_per_gpu": SEQUENCES, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {
                  "lr": rate, "torch_adam": True}},
              "expert_parallel": {"enabled": True, "autoep_size": 1},
              "mxfp8_moe": {**models.OURS, **SECTIONS[contender], **section}}
    return ds_mxfp8_moe.initialize(model=model, config=config)[0]


def heldout(engine: nn.Module, seed: int, texts: dict[str, data.Windows]) -> float:
    return heldout_loss(engine, texts["heldout"], argparse.Namespace(seed=seed, heldout_windows=HELDOUT_WINDOWS))


def finetune(engine: nn.Module, seed: int, steps: int, texts: dict[str, data.Windows]) -> dict:
    """Trains an engine's adapters. Held-out losses before and after."""
    before = heldout(engine, seed, texts)
    for step in range(steps):
        tokens_BS = texts["training"].training_batch(seed, step, SEQUENCES, 0, 1).to(world.device())
        engine.backward(engine(input_ids=tokens_BS, labels=tokens_BS).loss)
        engine.step()
    after = heldout(engine, seed, texts)
    return {"heldout_loss_before": before, "heldout_loss": after, "correct": after < before}


def texts_and_base(args: argparse.Namespace) -> dict[str, data.Windows]:
    """The texts of finetuning. The base model is made if it is not there."""
    if not (args.base / "config.json").exists():
        pieces, _ = data.split(data.documents("stdlib"))
        base_model(data.Windows(pieces, SEQUENCE), args.base_steps).save_pretrained(args.base)
    pieces = zip(("training", "heldout"), data.split(data.documents("pydoc")), strict=True)
    return {name: data.Windows(of_name, SEQUENCE) for name, of_name in pieces}


def rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    """Those of a seed."""
    texts = texts_and_base(args)
    for seed in range(args.seeds):
        case, found = {"seed": seed, "steps": args.steps, "base_steps": args.base_steps}, {}
        for name in SECTIONS:
            engine = adapted_engine(args.base, name, seed, LORA_LR)
            found[name] = finetune(engine, seed, args.steps, texts)
            models.free(engine)
        for one in found.values():
            one |= {f"cost{when}": one[f"heldout_loss{when}"] / found[BF16][f"heldout_loss{when}"] - 1
                    for when in ("", "_before")}
        del found[BF16]["cost"], found[BF16]["cost_before"]
        world.say(f"seed {seed + 1} of {args.seeds}: " + ", ".join(
            f"{name} {one['cost']:+.3%}" for name, one in found.items() if name != BF16))
        yield [{"case": case, "contender": name, **one} for name, one in found.items()]


def costs(result: dict, key: str = "cost") -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in result["rows"]:
        if key in row:
            found.setdefault(row["contender"], []).append(row[key])
    return found


def sentences(result: dict) -> list[str]:
    told = []
    for when, key in (("", "cost"), (" before training", "cost_before")):
        for name, of_pairs in costs(result, key).items():
            found = interval(of_pairs)
            told.append(f"Held-out loss{when}, {name} beside {BF16}: {found.mean:+.3%} {found.of_pairs('+.3%')}.")
    return told


def plot(result: dict, pyplot) -> None:
    found = {name: [100 * cost for cost in of_pairs] for name, of_pairs in costs(result).items()}
    show.spans(pyplot, {"pairs of trainings": found}, f"change of held-out loss to {BF16}, %")


SHOWN = show.Shown(
    "frozen_quality", [Measure("held-out loss, of the pair's in bf16", (FROZEN, FOUR_BITS, NF4), figure="cost",
                               better=show.SMALLER, form="{:+.3%}")],
    [("held-out loss before", "heldout_loss_before", "{:.4f}"), ("after", "heldout_loss", "{:.4f}"),
     ("difference", "cost", "{:+.3%}")], plot, wide=False, sentences=sentences)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = run.parser(description)
    parser.add_argument("--base", type=Path, default=Path("runs/frozen_quality"),
                        help="folder of the model that is finetuned, made if it is not there (default: %(default)s)")
    parser.add_argument("--base_steps", type=run.one_or_more, default=BASE_STEPS)
    parser.add_argument("--steps", type=run.one_or_more, default=200)
    parser.add_argument("--seeds", type=run.one_or_more, default=8)
    return parser


def main() -> None:
    run.main(SHOWN, arguments(__doc__), rows, alone=True)


if __name__ == "__main__":
    main()
