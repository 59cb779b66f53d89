# SPDX-License-Identifier: Apache-2.0
"""One MoE layer, router to output, SwiGLU experts, forward and backward: DeepSpeed's classic MoE and AutoEP in bf16
beside ours in every recipe, over every transport that the machine has.

Each contender is a layer of a DeepSpeed engine of its own (ZeRO-1), as users make it: ours by the section "mxfp8_moe".
Gradients of the tokens and of every parameter of the layer. Each timed step follows an untimed one of the same layer,
as in a training, where the host has just run the same code for the layer before. The ranks' devices begin it together,
when the host is ahead. They wait for the host only where it is late even so, as after it has read something from them.
Also peak memory beyond the weights, and how often the host waits for the device in a forward and backward.

    torchrun --nproc-per-node 8 examples/benchmarks/exchange/moe_layer.py   # run, store, show
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.config import FORMAT_KEYS
from ds_mxfp8_moe.transport import deadline
from ds_mxfp8_moe.transport.kernel_reports import KernelReports
from lib import models, run, show, timing, world
from lib.models import Layer
from lib.show import Measure, bar
from lib.timing import TOTAL, Contender, poisoned
from lib.world import on_gpu

AUTOEP, CLASSIC, DROPLESS = "AutoEP bf16", "classic bf16, drops", "classic bf16, dropless"
BF16_EXACT, HP_EXACT = "nvlink, bf16", "nvlink, mxfp8_wgrad_with_hp"
HP_STATIC = "nvlink, mxfp8_wgrad_with_hp, static"
HP_CLASSIC = "nvlink, mxfp8_wgrad_with_hp, classic"
RECIPES = {"bf16": {"recipe": "bf16"}, "mxfp8_wgrad_with_hp": {"recipe": "mxfp8_wgrad_with_hp"},
           "mxfp8": {"recipe": "mxfp8", **dict.fromkeys(FORMAT_KEYS, "mxfp8")}}
STATIC = {**RECIPES["mxfp8_wgrad_with_hp"], "transport": "nvlink", "capacity_factor": 2.0}
# Against DeepSpeed's layer in bf16 with the same weights.
LEAST_SQNR_DB, LEAST_SQNR_MXFP8_DB = 35, 17
BUILDING = 0.6  # at most, of a run's time


@dataclass(frozen=True)
class Case:
    tokens: int = 8192
    dim: int = 2048
    hidden: int = 1408
    experts: int = 64
    top_k: int = 6


TINY = Case(tokens=256, dim=128, hidden=128, experts=8, top_k=2)


class Way(Layer):
    """One contender: a layer on a rank's tokens, with gradients g of its output."""

    def __init__(self, layer: Layer, x: torch.Tensor, g: torch.Tensor):
        super().__init__(layer.module, layer.engine)
        self.inner = models.moe_layers(layer.engine)[0]  # which a conversion settles
        x = x.clone().requires_grad_()
        self.stages = {"forward": lambda: self.forward(x), "backward": lambda y: (y.detach(), *self.backward(x, y, g))}


def build(case: Case, classic: bool = False, section: dict | None = None, drop: bool = False) -> Layer:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    size = models.one_layer(case.tokens, case.dim, case.hidden, case.experts, case.top_k)
    return models.layer_of(size, world.size(), classic=classic, section=section, drop=drop, **sgd)


def seeded(way: Way) -> tuple:
    """Its results with the same random numbers each time: DeepSpeed's top-2 gate draws some."""
    torch.manual_seed(world.rank())
    return timing.run(way.stages)


def check(way: Way, reference: Way | None, twin: Way | None, least_db: float) -> dict:
    """Runs it once on poisoned memory.

    Args:
        reference: the same layer on DeepSpeed's path, to which results must come close.
        twin: the same recipe over the collective transport, whose bits they must be.
    """
    found = {}
    with poisoned():
        results = seeded(way)
        right = all(bool(part.isfinite().all()) for part in results)
        if reference is not None:
            sqnr = [sqnr_db(a, b) for a, b in zip(seeded(reference), results, strict=True)]
            found["sqnr_db"] = round(min(sqnr), 1)
            right &= min(sqnr) >= least_db
        if twin is not None:
            right &= all(torch.equal(a, b) for a, b in zip(seeded(twin), results, strict=True))
    return {"correct": right, **found}


def memory(way: Way) -> dict[str, int]:
    """Bytes at most beyond the weights in one forward and backward; the staging of peer memory apart."""
    if not on_gpu():
        return {}
    return {"peak_bytes": timing.peak_bytes(partial(timing.run, way.stages)),
            "staging_bytes": models.staging_bytes(way.inner)}


def waits(way: Way) -> dict[str, int]:
    """How often the host waits for the device in a forward and backward of ours: by the one function of each transport
    that does. tests/gpu checks that nothing else does."""
    if not hasattr(way.inner, "mxfp8_settings"):
        return {}
    with (mock.patch.object(deadline, "wait_for_device", wraps=deadline.wait_for_device) as over_nccl,
          mock.patch.object(KernelReports, "wait_for_counts", autospec=True,
                            side_effect=KernelReports.wait_for_counts) as over_nvlink):
        timing.run(way.stages)
    return {"counted_waits": over_nccl.call_count + over_nvlink.call_count}


class Wanted(NamedTuple):
    """A contender before its layer is there.

    Attributes:
        reference, twin: as `check` takes them, by name; no twin where there is no such contender.
    """

    build: Callable[[], Layer]
    reference: str | None = None
    twin: str | None = None
    least_db: float = LEAST_SQNR_MXFP8_DB


def wanted(case: Case) -> dict[str, Wanted]:
    """What matters most comes first."""
    found = {AUTOEP: Wanted(partial(build, case)), DROPLESS: Wanted(partial(build, case, True))}
    transports = sorted(world.transports(), reverse=True)  # nvlink before its twins
    for transport in transports:
        for recipe, keys in reversed(RECIPES.items()):
            section = {**keys, "transport": transport}
            found[f"{transport}, {recipe}"] = Wanted(partial(build, case, section=section), AUTOEP,
                                                     f"collective, {recipe}" if transport == "nvlink" else None,
                                                     LEAST_SQNR_DB if recipe == "bf16" else LEAST_SQNR_MXFP8_DB)
        if transport == "nvlink":
            found[HP_STATIC] = Wanted(partial(build, case, section=STATIC), AUTOEP)
    best = transports[0]
    found[f"{best}, mxfp8_wgrad_with_hp, classic"] = Wanted(partial(build, case, True, {"transport": best}), DROPLESS)
    return found | {CLASSIC: Wanted(partial(build, case, True, drop=True))}


def measured_rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    case = TINY if args.cases == "tiny" else Case()
    x, g = (world.randn(1, case.tokens, case.dim) for _ in range(2))
    ways: dict = {}
    contenders, asked = {}, wanted(case)
    for name in world.in_time(asked, BUILDING * args.seconds):
        one = asked[name]
        built = world.everywhere(lambda name=name, one=one: ways.update({name: Way(one.build(), x, g)}) or {})
        if "failure" in built:
            world.say(f"{name}: {built}")
            described = {"operation": TOTAL, "ranks": world.size(), **asdict(case)}
            yield [{"case": described, "contender": name, **built}]
        else:
            contenders[name] = Contender(ways[name].stages, lambda name=name, one=one: check(
                ways[name], ways.get(one.reference), ways.get(one.twin), one.least_db))
    world.say("all are built")
    rows = timing.rows(asdict(case), contenders, args.budget, warm=True)
    yield rows
    sound = dict.fromkeys(row["contender"] for row in rows if "failure" not in row)
    for name in world.in_time(sound, args.seconds):
        found = world.everywhere(lambda way=ways[name]: memory(way) | waits(way))
        for row in (row for row in rows if row["contender"] == name):
            row.update(found, correct=row["correct"] and found["correct"])
        yield []


# ---- how results are shown ------------------------------------------------------------------------------------------


PARTS = ("forward", "backward")
WAITED = {"better": show.SMALLER, "form": "{:g}"}


def prepare(result: dict) -> list[dict]:
    """One row for each layer, with the times of its parts. Host waits are counted of ours alone."""
    of_part = {(row["contender"], row["case"]["operation"]): row for row in result["rows"]}
    rows = []
    for (name, operation), row in of_part.items():
        if operation == TOTAL:
            parts = {f"{part}_ms": of_part.get((name, part), {}).get("median_ms") for part in PARTS}
            case = {key: value for key, value in row["case"].items() if key != "operation"}
            rows.append({**row, **parts, "case": case})
            if name in (AUTOEP, CLASSIC, DROPLESS):
                rows[-1].pop("counted_waits", None)
    return rows


MEASURES = [
    Measure(f"{HP_EXACT} over AutoEP bf16", (HP_EXACT, ), AUTOEP, bars=(bar(1.55, **asdict(Case())), )),
    Measure(f"{HP_CLASSIC} over {DROPLESS}", (HP_CLASSIC, ), DROPLESS, bars=(bar(1.9, **asdict(Case())), )),
    Measure(f"{HP_EXACT} over our own bf16", (HP_EXACT, ), BF16_EXACT),
    Measure("times that the host waits for the GPU in a step", (HP_EXACT, ), figure="counted_waits",
            bars=(bar(1), ), **WAITED),
    Measure("times that the host waits for the GPU in a step, with capacity_factor", (HP_STATIC, ),
            figure="counted_waits", bars=(bar(0), ), **WAITED)]


def plot(result: dict, pyplot) -> None:
    layers = {row["contender"]: {part: row[f"{part}_ms"] for part in PARTS} for row in result["rows"]}
    show.stacked(pyplot, {"": layers}, "ms")


SHOWN = show.Shown(
    "moe_layer", MEASURES, [*((f"{part}, ms", f"{part}_ms", "{:.3f}") for part in PARTS), show.MS,
                            ("host, ms", "host_ms", "{:.3f}"), ("peak, GiB", "peak_bytes", show.GIB),
                            ("staging, GiB", "staging_bytes", show.GIB), ("host waits", "counted_waits", "{}")],
    plot, wide=False, ratios=((AUTOEP, HP_EXACT), (DROPLESS, HP_CLASSIC)), prepare=prepare)


def main() -> None:
    run.main(SHOWN, run.timed_parser(__doc__, budget=0.6, seconds=85), measured_rows, ranks=True)


if __name__ == "__main__":
    main()
