# SPDX-License-Identifier: Apache-2.0
"""What recording and replaying routes cost: steps with live routing, recorded ones and replayed ones, in turn, in one
engine.

The model is a share of Qwen3-30B-A3B in whole_model.py, of which one GPU holds 16 of 128 experts in each of 8 layers.
Every step is one micro-batch, and one `with`, so that the check of the routes falls on it. The host waits for the
device before and after a block of steps, not inside. A cost is the median difference of neighboring blocks.

    python examples/benchmarks/training/replay_cost.py
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe import record_routes, replay_routes
from lib import run, show, world
from lib.show import Measure, bar
from lib.timing import wall_ms
from training.whole_model import DEFAULT, FULL, Case, Training

LIVE, RECORDED, REPLAYED = "live routing", "recorded", "replayed"
CONTENDERS = (LIVE, RECORDED, REPLAYED)
STEPS = 10  # of a block
WARM_UP_BLOCKS = 1  # of each contender
CASES = {"Qwen3-30B-A3B": Case("Qwen3-30B-A3B", FULL, 8, 2, 1, 8, 1),
         "tiny": Case("tiny", FULL, 2, 2, 1, 1, 1, sequence=128)}


def block_ms(training: Training, contender: str, routes: list) -> float:
    """Of STEPS steps, on the slowest rank. The last recording goes into `routes`, which replays take."""

    def steps() -> None:
        for _ in range(STEPS):
            with {LIVE: nullcontext, RECORDED: record_routes}.get(
                    contender, lambda engine: replay_routes(engine, routes[-1:]))(training.engine) as recorded:
                training.step()
        if contender == RECORDED:
            routes.append(recorded[0])

    return wall_ms(steps)


def rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    """The rows of one case."""
    case = CASES["Qwen3-30B-A3B" if world.on_gpu() else "tiny"]
    training, routes = Training(case, DEFAULT, 1), []
    blocks: dict[str, list] = {name: [] for name in CONTENDERS}
    for _ in range(WARM_UP_BLOCKS + args.rounds):
        for name in CONTENDERS:
            blocks[name].append(block_ms(training, name, routes))
    live, *others = (blocks[name][WARM_UP_BLOCKS:] for name in CONTENDERS)
    described = {**case.described(), "steps": STEPS}
    found = [{"case": described, "contender": LIVE, "median_ms": median(live), "correct": True}]
    for name, times in zip(CONTENDERS[1:], others, strict=True):
        cost_ms = median(b - a for a, b in zip(live, times, strict=True))
        found.append({"case": described, "contender": name, "median_ms": median(times), "correct": True,
                      "cost_share": cost_ms / median(live)})
    yield found


def plot(result: dict, pyplot) -> None:
    blocks = {row["contender"]: {"all": row["median_ms"]} for row in result["rows"]}
    show.stacked(pyplot, {result["rows"][0]["case"]["model"]: blocks}, f"ms of {STEPS} steps")


SHOWN = show.Shown(
    "replay_cost", [Measure("cost of routes, of a step", CONTENDERS[1:], figure="cost_share", better=show.SMALLER,
                            form="{:.2%}", bars=(bar(0.01), ))],
    [("block, ms", "median_ms", "{:.2f}"), ("cost", "cost_share", "{:.2%}")], plot)


def main() -> None:
    parser = run.parser(__doc__)
    parser.add_argument("--rounds", type=run.one_or_more, default=9, help="blocks of each (default: %(default)s)")
    run.main(SHOWN, parser, rows, alone=True)


if __name__ == "__main__":
    main()
