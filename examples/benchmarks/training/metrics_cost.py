# SPDX-License-Identifier: Apache-2.0
"""What `metrics` cost: blocks of steps with one sampled step and blocks with none, in turn, in one engine.

The model is that of train.py. The host waits for the device before and after a block, not inside. A sample's cost is
the difference of two neighbouring blocks. At `"every": 100` it falls on 100 steps.

    torchrun --nproc-per-node 2 examples/benchmarks/training/metrics_cost.py
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib import models, run, show, world
from lib.show import Measure
from training.train import Training

OFF, ON = "no sample", "one sampled step"
STEPS = 10  # of a block
EVERY = 100  # for which the cost is told
WARM_UP_BLOCKS = 2
SIZE = "deepseek" if world.on_gpu() else "tiny"


def block_ms(training: Training) -> float:
    """Of STEPS steps, on the slowest rank."""
    world.barrier()
    get_accelerator().synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        training.step()
    get_accelerator().synchronize()
    return world.largest(torch.tensor([1e3 * (time.perf_counter() - begin)], dtype=torch.float64)).item()


def rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    """The rows of one case."""
    size, ranks = models.SIZES[SIZE], world.size()
    with tempfile.TemporaryDirectory() as folder:
        engine = models.engine_of(size, args.layers, ranks, 1, classic=False, section={"metrics": {"every": STEPS}},
                                  csv_monitor={"enabled": True, "output_path": folder, "job_name": "cost"})
        training, metrics = Training(engine, size), engine._mxfp8_metrics
        samples: dict[str, list] = {OFF: [], ON: []}
        for turn in range(2 * (WARM_UP_BLOCKS + args.pairs)):
            contender = (OFF, ON)[turn % 2]
            engine._mxfp8_metrics = metrics if contender == ON else None  # samples are asked for by the sampled step
            samples[contender].append(block_ms(training))
    off, on = (samples[name][WARM_UP_BLOCKS:] for name in (OFF, ON))
    cost_ms = median(b - a for a, b in zip(off, on, strict=True))
    case = {"size": SIZE, "layers": args.layers, "ranks": ranks, "ep": ranks, "steps": STEPS}
    step_ms = median(off) / STEPS
    yield [{"case": case, "contender": OFF, "median_ms": median(off), "correct": True},
           {"case": case, "contender": ON, "median_ms": median(on), "correct": True, "sample_ms": cost_ms,
            "cost_share": cost_ms / (EVERY * step_ms)}]


def plot(result: dict, pyplot) -> None:
    case, blocks = result["rows"][0]["case"], {row["contender"]: {"all": row["median_ms"]} for row in result["rows"]}
    show.stacked(pyplot, {f"{case['size']}, {case['ranks']} ranks": blocks}, f"ms of {STEPS} steps")


SHOWN = show.Shown(
    "metrics_cost", [Measure(f"cost of metrics at every {EVERY}, of a step", (ON, ), figure="cost_share",
                             better=show.SMALLER, form="{:.3%}")],
    [("block, ms", "median_ms", "{:.2f}"), ("a sample, ms", "sample_ms", "{:.2f}"),
     (f"cost at every {EVERY}", "cost_share", "{:.3%}")], plot)


def main() -> None:
    parser = run.parser(__doc__)
    parser.add_argument("--layers", type=run.one_or_more, default=4 if world.on_gpu() else 2)
    parser.add_argument("--pairs", type=run.one_or_more, default=15, help="of blocks (default: %(default)s)")
    args = run.parse(parser)
    run.main(SHOWN, args, lambda: rows(args), ranks=True)


if __name__ == "__main__":
    main()
