# SPDX-License-Identifier: Apache-2.0
"""One MoE layer on one GPU: what the host spends on it, and how close forward and backward in a row come to the sum of
their kernels.

AutoEP and classic layers, DeepSpeed's own and ours in every recipe, each in a DeepSpeed engine of its own (ZeRO-1);
and SonicMoE in bf16 where it is installed. All have the same router, weights and tokens. In one case the layer is so
small that the device always waits for the host, in the others it is as large as a training's. Every pass casts the
weights anew.

All times are taken before the first profiled pass: a profiler may slow down the process in which it has run.

    python examples/benchmarks/kernels/host.py [--cases short]     # run, store, show
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib import models, run, show, timing, trainings, world
from lib.models import Layer
from lib.show import Measure, bar
from lib.timing import poisoned
from lib.world import BF16, device, on_gpu

RECIPES = ("bf16", "mxfp8_wgrad_with_hp", "mxfp8")
AUTOEP, CLASSIC, SONIC = "AutoEP bf16", "classic bf16", "SonicMoE bf16"
OURS = BF16_RECIPE, HP, MXFP8 = tuple(f"AutoEP, ours, {recipe}" for recipe in RECIPES)
SAMPLES = 30  # of the host's time
ROUNDS, PASSES = 5, 20  # of passes in a row
WARM_UP = 3  # passes
# Against AutoEP in bf16. The other routers round their scores otherwise, and send a few tokens to another expert.
LEAST_SQNR_DB, LEAST_SQNR_OTHER_ROUTER_DB, LEAST_SQNR_MXFP8_DB = 35, 22, 17


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return "x".join(map(str, asdict(self).values()))


TINY, HOST_BOUND = Case(64, 128, 64, 8, 2), Case(512, 2048, 1408, 8, 6)
LARGE = (Case(16384, 2048, 768, 128, 8), Case(16384, 2048, 1408, 64, 6), Case(32768, 4096, 1024, 64, 4),
         Case(16384, 1536, 256, 128, 8))
CASES = {"tiny": (TINY, ), "short": (HOST_BOUND, *LARGE[:1]), "full": (HOST_BOUND, *LARGE)}


def is_host_bound(case: dict) -> bool:
    return case["tokens"] <= HOST_BOUND.tokens


def is_large(case: dict) -> bool:
    return not is_host_bound(case)


# ---- contenders -----------------------------------------------------------------------------------------------------


class Tokens:
    """The tokens of a case and the gradients of its output.

    Attributes:
        expected: output and gradient of the tokens, by AutoEP in bf16. Empty before it has run.
    """

    def __init__(self, case: Case):
        torch.manual_seed(1)
        self.x, self.g = (world.randn(1, case.tokens, case.hidden) for _ in range(2))
        self.x.requires_grad_()
        self.expected: dict[str, torch.Tensor] = {}


def of_engine(case: Case, classic: bool, recipe: str | None) -> Layer:
    section = None if recipe is None else {"recipe": recipe, "min_tokens_per_expert": 0}
    return models.layer_of(models.one_layer(**asdict(case)), classic=classic, section=section)


def sonic(case: Case) -> Layer:
    """SonicMoE's layer, which also returns a balancing loss: a few small kernels of its forward."""
    from sonicmoe import MoE
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import backward, forward
    for module in (forward, backward):  # their default tiles: tuning takes many minutes for each shape
        for name in {"gemm", "gemm_gated", "gemm_dgated"}.intersection(vars(module)):
            if not isinstance(getattr(module, name), partial):
                setattr(module, name, partial(getattr(module, name), tuned=False))
    source = models.hugging_face(models.one_layer(**asdict(case)), 1).model.layers[0].mlp
    moe = MoE(case.experts, case.top_k, case.hidden, case.ffn, ActivationType.SWIGLU, False, 0.02).to(device(), BF16)
    gate_up_EGH = source.experts.gate_up_proj  # all rows of gate, then those of up; SonicMoE has them in turn
    with torch.no_grad():
        moe.router.weight.copy_(source.gate.weight)
        moe.c_fc.weight.copy_(torch.stack(gate_up_EGH.chunk(2, dim=1), 2).flatten(1, 2))
        moe.c_proj.weight.copy_(source.experts.down_proj)
    return Layer(moe)


class Wanted(NamedTuple):
    """A contender of a case before its layer is there."""

    case: Case
    name: str
    build: Callable[[], Layer]
    least_db: float

    def __str__(self) -> str:
        return f"{self.case}, {self.name}"


def wanted(case: Case) -> list[Wanted]:
    """The reference comes first."""
    found = [Wanted(case, AUTOEP, partial(of_engine, case, False, None), LEAST_SQNR_DB)]
    found += [Wanted(case, name, partial(of_engine, case, False, recipe),
                     LEAST_SQNR_DB if recipe == "bf16" else LEAST_SQNR_MXFP8_DB)
              for name, recipe in zip(OURS, RECIPES, strict=True)]
    if is_host_bound(asdict(case)):
        found += [Wanted(case, CLASSIC if recipe is None else f"classic, ours, {recipe}",
                         partial(of_engine, case, True, recipe),
                         LEAST_SQNR_OTHER_ROUTER_DB if recipe in (None, "bf16") else LEAST_SQNR_MXFP8_DB)
                  for recipe in (None, *RECIPES)]
    elif on_gpu() and find_spec("sonicmoe"):
        found.append(Wanted(case, SONIC, partial(sonic, case), LEAST_SQNR_OTHER_ROUTER_DB))
    return found


def step(layer: Layer, tokens: Tokens) -> tuple[torch.Tensor, tuple]:
    """The output, and the gradients of tokens and parameters."""
    y = layer.forward(tokens.x)
    return y.detach(), layer.backward(tokens.x, y, tokens.g)


# ---- measuring ------------------------------------------------------------------------------------------------------


def check(layer: Layer, tokens: Tokens, one: Wanted) -> dict:
    """Compares one pass, on poisoned memory, with AutoEP's in bf16."""
    with poisoned():
        y, (dx, *grads) = step(layer, tokens)
    got = {"y": y.view_as(dx), "x": dx}
    if one.name == AUTOEP:
        tokens.expected.update({part: value.clone() for part, value in got.items()})
    if not tokens.expected:
        raise RuntimeError(f"{AUTOEP} failed, with which this was to be compared")
    found = timing.close(tokens.expected, got, one.least_db)
    found["correct"] &= all(bool(grad.isfinite().all()) for grad in grads)
    return found


def host_ms(layer: Layer, tokens: Tokens) -> dict[str, float]:
    """The host's milliseconds in forward and in backward, each from an idle device until the call returns."""
    synchronize, now, samples = get_accelerator().synchronize, time.perf_counter, []
    for _ in range(SAMPLES):
        synchronize()
        begin = now()
        y = layer.forward(tokens.x)
        forward = now() - begin
        synchronize()
        begin = now()
        grads = layer.backward(tokens.x, y, tokens.g)
        backward = now() - begin
        synchronize()
        del y, grads
        samples.append((forward * 1e3, backward * 1e3, (forward + backward) * 1e3))
    names = "forward_host_ms", "backward_host_ms", "host_ms"
    return {name: timing.spread_ms(column)["median_ms"]
            for name, column in zip(names, zip(*samples, strict=True), strict=True)}


def in_a_row_ms(layer: Layer, tokens: Tokens) -> dict[str, float]:
    """Milliseconds of a pass of many in a row: begun on an idle device, and until it is idle again."""

    def passes() -> None:
        for _ in range(PASSES):
            step(layer, tokens)

    return timing.spread_ms([timing.wall_ms(passes) / PASSES for _ in range(ROUNDS)])


def timed(tokens: Tokens, one: Wanted, layer: Layer, _before: int) -> dict:
    for _ in range(WARM_UP):  # compiles and records
        step(layer, tokens)
    found = check(layer, tokens, one) | host_ms(layer, tokens)
    if on_gpu():
        found |= in_a_row_ms(layer, tokens) | {"peak_bytes": timing.peak_bytes(partial(step, layer, tokens))}
    return found


def profiled(tokens: Tokens, _one: Wanted, layer: Layer, _before: int) -> dict:
    """What the device does in a pass of many in a row. A GPU under load lowers its clock: the first passes are faster
    than those that `in_a_row_ms` times."""
    for _ in range(PASSES):
        step(layer, tokens)
    return timing.profiled(partial(step, layer, tokens), PASSES)


def measured_rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    every = [one for case in CASES[args.cases] for one in wanted(case)]
    rows: dict[str, dict] = {}
    for measure in (timed, profiled) if on_gpu() else (timed, ):
        sound = [one for one in every if measure is timed or "median_ms" in rows.get(str(one), ())]
        tokens, of_case = None, None
        for one in world.in_time(sound, args.seconds):
            if one.case != of_case:
                tokens, of_case = Tokens(one.case), one.case
            found, = trainings.found(one.build, [partial(measure, tokens, one)])
            if not found["correct"] and "failure" not in found:
                world.say(f"{one}: {found}")
            row = rows.setdefault(str(one), {"case": asdict(one.case), "contender": one.name, "correct": True})
            row.update(found, correct=row["correct"] and found["correct"])
            yield [row] if measure is timed else []


# ---- how results are shown ------------------------------------------------------------------------------------------


def prepare(result: dict) -> list[dict]:
    """The rows with wall over kernels."""
    return [{**row, "over_kernels": row["median_ms"] / row["kernels_ms"]} if row.get("kernels_ms") else row
            for row in result["rows"]]


ON_HOST = {"figure": "host_ms", "better": show.SMALLER, "when": is_host_bound}
MEASURES = [
    Measure("host, ms of forward and backward of a small layer", OURS, form="{:.2f}", bars=(bar(1.5), ), **ON_HOST),
    Measure("host, forward and backward of a small layer, of DeepSpeed's AutoEP", OURS, AUTOEP, form="{:.0%}",
            bars=(bar(0.4), ), **ON_HOST),
    Measure("large layers: time in a row over the sum of kernels", OURS, figure="over_kernels", better=show.SMALLER,
            when=is_large, bars=(bar(1.08), )),
    *(Measure(f"large layers: {name} over {SONIC}", (name, ), SONIC, when=is_large, bars=bars)
      for name, bars in ((HP, (bar(1.08, ffn=768), bar(1.12, ffn=1408), bar(1.12, ffn=1024))),
                         (MXFP8, (bar(1.18, ffn=768), bar(1.25, ffn=1408), bar(1.25, ffn=1024)))))]


def plot(result: dict, pyplot) -> None:
    panels: dict = {}
    keys = show.varying(result)
    for row in result["rows"]:
        if "host_ms" not in row:
            continue
        if is_host_bound(row["case"]):
            parts = {"host, forward": row["forward_host_ms"], "host, backward": row["backward_host_ms"]}
        else:
            kernels = row.get("kernels_ms", 0)
            parts = {"kernels": kernels, "beyond them": max(0, row["median_ms"] - kernels)}
        panels.setdefault(show.described(row["case"], keys), {})[row["contender"]] = parts
    show.stacked(pyplot, panels, "ms")


SHOWN = show.Shown(
    "host", MEASURES, [("host, forward, ms", "forward_host_ms", "{:.2f}"),
                       ("host, backward, ms", "backward_host_ms", "{:.2f}"), ("in a row, ms", "median_ms", "{:.3f}"),
                       ("kernels, ms", "kernels_ms", "{:.3f}"), ("in a row over kernels", "over_kernels", "{:.2f}"),
                       ("device events", "device_events", "{:g}"), ("host waits", "host_waits", "{:g}"),
                       ("peak, GiB", "peak_bytes", show.GIB)], plot, wide=False,
    contenders=(AUTOEP, *OURS, CLASSIC, *(f"classic, ours, {recipe}" for recipe in RECIPES), SONIC),
    ratios=((AUTOEP, HP), (SONIC, HP)), prepare=prepare)


# ---- command line ---------------------------------------------------------------------------------------------------


def main() -> None:
    run.main(SHOWN, run.timed_parser(__doc__, None, seconds=540), measured_rows, alone=True)


if __name__ == "__main__":
    main()
