# SPDX-License-Identifier: Apache-2.0
"""What is left of an adapter's gain after a merge into frozen experts in 8 or 4 bits?

LoRA of experts in the small model of frozen_quality.py, with a learning rate at which the update stays near one
percent of the weights. A training with adapters apart is merged in two ways, and evaluated: each sum rounded to the
nearest number of the format, and rounded without bias. A third way trains with "merge_aware", from the same adapters
on the same batches. A share is the gain in held-out loss with merged experts over the gain with adapters apart.

    python examples/benchmarks/training/merge_quality.py     # on a GPU, or with --out on a CPU
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ds_mxfp8_moe
from ds_mxfp8_moe.compute import casts, merging, mxfp4
from ds_mxfp8_moe.compute.mx import TILE
from ds_mxfp8_moe.compute.mxfp4 import MXFP4Weights
from ds_mxfp8_moe.layers.adapters import whole_low_rank
from ds_mxfp8_moe.layers.experts import converted_layers
from lib import models, run, show, world
from lib.paired import interval
from lib.show import Measure
from training import frozen_quality
from training.frozen_quality import FOUR_BITS, FROZEN, SECTIONS
from training.whole_model import ADAPTERS

EXPERTS = {**ADAPTERS, "target_modules": []}
APART = {FROZEN: "MXFP8, adapters apart", FOUR_BITS: "MXFP4, adapters apart"}
NEAREST = {FROZEN: "MXFP8, merged to nearest", FOUR_BITS: "MXFP4, merged to nearest"}
UNBIASED = {FROZEN: "MXFP8, merged without bias", FOUR_BITS: "MXFP4, merged without bias"}
AWARE = {FROZEN: "MXFP8, merge_aware", FOUR_BITS: "MXFP4, merge_aware"}


@torch.no_grad()
def merge_to_nearest(engine: nn.Module) -> float:
    """Merges the adapters of an engine's experts into them, which leaves none. Returns the size of the update, as a
    share of the weights."""
    updates = weights = 0.0
    for experts in converted_layers(engine.module):
        for gemm, low in whole_low_rank(experts).items():
            held = experts.frozen.operands()[gemm]
            in_mxfp4 = isinstance(held, MXFP4Weights)
            w_ENK = held.values() if in_mxfp4 else casts.dequantize(held, torch.float32)
            update_ENK = merging.product(low)
            updates += update_ENK.square().sum().item()
            weights += w_ENK.square().sum().item()
            merged = mxfp4.quantize(w_ENK + update_ENK) if in_mxfp4 else casts.quantize_weights(
                [w_ENK + update_ENK], TILE, "rceil")
            experts.frozen.write(gemm, slice(0, len(w_ENK)), merged)
        for name, factor in experts.named_parameters():
            if "lora_B" in name:
                factor.zero_()
    return (updates / weights)**0.5


def of_format(base: str, seed: int, args: argparse.Namespace, texts: dict) -> list[dict]:
    """Rows of experts in the format of `base`, a contender of frozen_quality.py."""
    engine = frozen_quality.adapted_engine(args.base, base, seed, args.rate, EXPERTS)
    apart = frozen_quality.finetune(engine, seed, args.steps, texts)
    ds_mxfp8_moe.convert(engine, {**models.OURS, **SECTIONS[base], "merge_aware": True})
    losses = {UNBIASED[base]: frozen_quality.heldout(engine, seed, texts)}
    ds_mxfp8_moe.convert(engine, {**models.OURS, **SECTIONS[base]})
    size = merge_to_nearest(engine)
    losses[NEAREST[base]] = frozen_quality.heldout(engine, seed, texts)
    models.free(engine)
    engine = frozen_quality.adapted_engine(args.base, base, seed, args.rate, EXPERTS, merge_aware=True)
    losses[AWARE[base]] = frozen_quality.finetune(engine, seed, args.steps, texts)["heldout_loss"]
    models.free(engine)
    before, after = apart["heldout_loss_before"], apart["heldout_loss"]
    found = [{"contender": APART[base], "update": size, **apart}]
    found += [{"contender": name, "heldout_loss_before": before, "heldout_loss": loss, "correct": math.isfinite(loss),
               "share": (before - loss) / (before - after)} for name, loss in losses.items()]
    return found


def rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    """Those of a seed."""
    texts = frozen_quality.texts_and_base(args)
    for seed in range(args.seeds):
        case = {"seed": seed, "steps": args.steps, "base_steps": args.base_steps, "learning_rate": args.rate}
        found = [row for base in APART for row in of_format(base, seed, args, texts)]
        world.say(f"seed {seed + 1} of {args.seeds}: " + ", ".join(
            f"{row['contender']} {row['share']:.1%}" for row in found if "share" in row))
        yield [{"case": case, **row} for row in found]


def shares(result: dict) -> dict[str, list[float]]:
    return frozen_quality.costs(result, "share")


def sentences(result: dict) -> list[str]:
    return [f"{name}: {found.mean:.1%} of the gain with adapters apart, {found.of_pairs('.1%')}."
            for name, found in ((name, interval(of_pairs)) for name, of_pairs in shares(result).items())]


def plot(result: dict, pyplot) -> None:
    show.spans(pyplot, {"pairs of trainings": {name: [100 * one for one in of_pairs]
                                               for name, of_pairs in shares(result).items()}},
               "gain in held-out loss, % of that with adapters apart")


SHOWN = show.Shown(
    "merge_quality", [Measure("gain in held-out loss, of that with adapters apart", tuple(AWARE.values()),
                              figure="share", form="{:.1%}")],
    [("update / weights", "update", "{:.2%}"), ("held-out loss before", "heldout_loss_before", "{:.4f}"),
     ("after", "heldout_loss", "{:.4f}"), ("share of the gain", "share", "{:.1%}")], plot, wide=False,
    sentences=sentences)


def main() -> None:
    parser = frozen_quality.arguments(__doc__)
    parser.add_argument("--rate", type=float, default=3e-5, help="learning rate (default: %(default)s)")
    run.main(SHOWN, parser, rows, alone=True)


if __name__ == "__main__":
    main()
