# SPDX-License-Identifier: Apache-2.0
"""Rows of trainings: each of a contender that is built for it, kept from one run to the next, and right if its losses
agree with the others'."""

import argparse
import gc
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from . import models, results_file, run, show, world

# Off the reference at most, relative: the loss of any step, the gradient norm of the first.
TOLERANCES, MXFP8_TOLERANCES = (0.002, 0.015), (0.003, 0.02)


def key(row: dict) -> tuple:
    return json.dumps(row["case"], sort_keys=True), row["contender"]


def found(build: Callable[[], Any], calls: Iterable[Callable[[Any, int], dict]]) -> Iterator[dict]:
    """What each call says of a training, which is built for them and then freed. Collective.

    A failure is what the calls after it say, too: it leaves gradients, and steps that were not made.

    Args:
        build: makes the training, which has an `engine`, or None.
        calls: each takes the training, and the bytes that were allocated before it.
    """
    accelerator, held = get_accelerator(), []
    before = accelerator.memory_allocated() if world.on_gpu() else 0
    said = world.everywhere(lambda: held.append(build()) or {})
    for call in calls:
        if "failure" not in said:
            said = world.everywhere(partial(call, held[0], before))
        yield said
    if "failure" in said:
        world.say(said["failure"])
    if held and (engine := held.pop().engine) is not None:
        models.free(engine)
    gc.collect()
    accelerator.empty_cache()
    if world.on_gpu() and (left := accelerator.memory_allocated() - before) > 2**30:
        world.say(f"{left / 2**30:.1f} GiB were not given back")


def complete(shown: show.Shown, parser: argparse.ArgumentParser,
             fill: Callable[[argparse.Namespace, dict[tuple, dict], str | None], Iterator[None]]) -> None:
    """Adds to the result file what it lacks, as far as time allows. Ends this process.

    Args:
        fill: takes the arguments, the rows by `key`, to which it adds, and the commit. It yields whenever the rows
            are to be written.
    """
    args = run.parse(shown, parser)
    world.start(alone=True, timeout=10 * world.TIMEOUT)
    path = args.out or results_file.RESULTS / f"{shown.benchmark}_{world.size()}ranks.json"
    box: list = [[], args.commit or results_file.commit()]
    if world.rank() == 0 and path.exists():
        result = results_file.read(path, shown.benchmark)
        if result["machine"] != results_file.machine():
            sys.exit(f"{path} has results of {result['machine']}: name another file by --out")
        box[0] = result["rows"]
    dist.broadcast_object_list(box)
    rows, commit = {key(row): row for row in box[0]}, box[1]
    for _ in fill(args, rows, commit):
        if world.rank() == 0:
            results_file.write(shown.benchmark, list(rows.values()), path, commit)
    if not rows:
        sys.exit("there is no such case, or no time for any")
    run.finish(shown, path, args.check)


def settle(rows: Iterable[dict], references: Collection[str], changes: Collection[str] = ()) -> None:
    """Compares each row's losses and first gradient norm with those of the case's reference, and says what is
    correct.

    Args:
        references: contenders in bf16. The first of them that has losses is the reference.
        changes: keys of cases that change no result. A case has the reference of that without them.
    """
    rows = list(rows)
    unchanged = dict.fromkeys(changes)
    for row in rows:
        if "losses" not in row:
            continue
        others = {other["contender"]: other for other in rows
                  if other["case"] == row["case"] | unchanged and "losses" in other}
        reference = next((others[name] for name in references if name in others), row)
        offs = [abs(a / b - 1) for a, b in zip(row["losses"], reference["losses"], strict=True)]
        off = max(offs, key=lambda each: math.inf if math.isnan(each) else each)
        norm_off = abs(row["gradient_norm"] / reference["gradient_norm"] - 1)
        most, most_norm = TOLERANCES if row["contender"] in references else MXFP8_TOLERANCES
        row.update(loss_off=round(off, 6), norm_off=round(norm_off, 6), correct=off <= most and norm_off <= most_norm)
        row.pop("error", None)
        if not row["correct"]:
            row["error"] = (f"losses {off:.2%} off {reference['contender']} (at most {most:.2%}), the first gradient "
                            f"norm {norm_off:.2%} (at most {most_norm:.2%})")
