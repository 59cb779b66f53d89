# SPDX-License-Identifier: Apache-2.0
"""How long `export_weights` takes for a slice of Qwen3-30B-A3B, in FP8 and in bf16, beside a plain gather.

Every rank gets all experts, one by one. The plain gather is an all-gather of each weight in bf16, on one rank a copy.
Times are of the host, from a synchronised device to a synchronised device, on the slowest rank. Rates count the bytes
of experts that each rank gets.

    python examples/benchmarks/training/export.py                            # on one GPU
    torchrun --nproc-per-node 2 examples/benchmarks/training/export.py       # two ranks may share one GPU
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import deepspeed.comm as dist
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ds_mxfp8_moe
from ds_mxfp8_moe.compute.mx import quantize_tiles
from lib import models, run, show, world
from lib.show import Measure
from lib.timing import wall_ms

PLAIN, BF16, FP8 = "plain gather, bf16", "ours, bf16", "ours, MXFP8"
SIZE = models.SIZES["qwen3"] if world.on_gpu() else replace(models.SIZES["tiny"], ffn=128)
WARM_UPS = 2
SGD = {"type": "SGD", "params": {"lr": 0.0}}  # the memory of Adam's states is not needed


def gather(engine) -> int:
    """The bytes of all experts' weights, after every rank has had them."""
    total = 0
    for layer in models.moe_layers(engine):
        for weight in layer.experts.parameters():
            if layer.ep_size == 1:
                parts = [weight.detach().clone()]
            else:
                parts = [torch.empty_like(weight) for _ in range(layer.ep_size)]
                dist.all_gather(parts, weight.detach(), group=layer.ep_group)
            total += sum(part.nbytes for part in parts)
    return total


def export(engine, weights: str) -> int:
    return sum(tensor.nbytes for name, tensor in ds_mxfp8_moe.export_weights(engine, weights) if ".experts." in name)


def correct(engine) -> bool:
    """Whether the FP8 weights are the bf16 ones, cast by mx.py. Looks at the first expert of each layer."""
    plain, cast = ({name: tensor.clone() for name, tensor in ds_mxfp8_moe.export_weights(engine, weights)
                    if ".experts.0." in name} for weights in ("model", "fp8"))
    tiles = {name: quantize_tiles(tensor) for name, tensor in plain.items()}
    return len(tiles) == 3 * len(models.moe_layers(engine)) and all(
        torch.equal(cast[name].view(torch.uint8), mx.qdata.view(torch.uint8))
        and torch.equal(cast[f"{name}_scale_inv"], mx.scale.float()) for name, mx in tiles.items())


def rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    """The rows of one case."""
    ranks = world.size()
    engine = models.engine_of(SIZE, args.layers, ranks, 1, classic=False, section={}, optimizer=SGD,
                              zero_allow_untested_optimizer=True)
    calls = {PLAIN: lambda: gather(engine), BF16: lambda: export(engine, "model"),
             FP8: lambda: export(engine, "fp8")}
    right, sizes = correct(engine), {name: call() for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UPS + args.repeats):
        for name, call in calls.items():
            times[name].append(wall_ms(call))
    case = {"layers": args.layers, "ranks": ranks, "ep": ranks}
    found = []
    for name, of_name in times.items():
        ms = median(of_name[WARM_UPS:])
        found.append({"case": case, "contender": name, "median_ms": ms, "correct": right, "bytes": sizes[name],
                      "gb_per_s": sizes[name] / ms / 1e6})
    yield found


def plot(result: dict, pyplot) -> None:
    rates = {row["contender"]: {"all": row["gb_per_s"]} for row in result["rows"]}
    show.stacked(pyplot, {f"{result['rows'][0]['case']['ranks']} ranks": rates}, "GB/s of experts")


SHOWN = show.Shown("export", [Measure("speed of an export in FP8, over a plain gather in bf16", (FP8, ), PLAIN)],
                   [("ms", "median_ms", "{:.1f}"), ("GB", "bytes", lambda value: f"{value / 1e9:.2f}"),
                    ("GB/s", "gb_per_s", "{:.0f}")], plot)


def main() -> None:
    parser = run.parser(__doc__)
    parser.add_argument("--layers", type=run.one_or_more, default=8 if world.on_gpu() else 2)
    parser.add_argument("--repeats", type=run.one_or_more, default=10, help="of each contender (default: %(default)s)")
    run.main(SHOWN, parser, rows, ranks=True, alone=True)


if __name__ == "__main__":
    main()
