# SPDX-License-Identifier: Apache-2.0
"""Training a GPT-MoE: tokens per second, peak memory and the phases of a step, of DeepSpeed's classic MoE and AutoEP
in bf16 beside ours in every recipe.

One model for all contenders, of Hugging Face's classes built from their config, with the same weights, batches and
seeds: AutoEP replaces its MoE layers, or deepspeed.moe.layer.MoE (dropless) stands in their place with the same
experts. Each trains with even routing first, which every router is made to give, and then with its own router; both
with one micro-batch in a step and with gradients accumulated over several. The losses, and the first step's gradient
norm, are the check. A model has as many layers as `Size.bytes_of` says fit.

With "expert_placement": "balanced", experts move as each case's warm-up ends. move_ms is the time of a move of a
quarter of all experts with their states, in which all ranks send at once. The routing "as recorded" has the statistics
of routes.py: batches differ, and the experts' loads move on after the decision.

One contender at a time is in memory. Rows are added to what the result file has, so that a run of ten minutes goes on
where the last one ended.

    torchrun --nproc-per-node 8 examples/benchmarks/training/train.py  # again, until nothing is lacking
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.engine.hooks import place_experts
from ds_mxfp8_moe.engine.moe_engine import MoEEngine
from ds_mxfp8_moe.engine.moving import move_experts
from ds_mxfp8_moe.layers.experts import converted_layers
from exchange.moe_layer import RECIPES
from lib import models, results_file, run, show, world
from lib.show import Measure, bar
from lib.timing import apart_ms, moment, spread_ms
from lib.trainings import complete, found, key, settle
from lib.world import on_gpu
from training.whole_model import ADAPTERS
from training.whole_model_results import FULL, LORA

AUTOEP, CLASSIC, OURS_BF16 = "AutoEP bf16", "classic bf16", "ours, bf16"
HP, MXFP8 = "ours, mxfp8_wgrad_with_hp", "ours, mxfp8"
HP_CLASSIC = "ours, mxfp8_wgrad_with_hp, classic"
BALANCED = "ours, mxfp8_wgrad_with_hp, balanced placement"
IN_TURNS = "ours, mxfp8_wgrad_with_hp, balanced placement, 4 turns"
WARM_UP = 4  # micro-batches
ROUTINGS = ("even", "router")
MORE_ROUTINGS = (*models.UNEVEN, models.AS_RECORDED)
PHASES = ("forward", "backward", "optimizer")  # of a step
REFERENCES = (AUTOEP, OURS_BF16, CLASSIC)


@dataclass(frozen=True)
class Case:
    """Steps of an engine: `steps` are timed, each of `accumulation` micro-batches on every rank."""

    size: str
    layers: int
    zero: int
    ep: int
    ranks: int
    steps: int
    routing: str
    accumulation: int
    training: str = FULL

    @property
    def shape(self) -> models.Size:
        return models.SIZES[self.size]

    @property
    def tokens_per_expert(self) -> float:
        """What an expert gets of a micro-batch from its group, the mean."""
        return self.shape.tokens * self.ep * self.shape.top_k / self.shape.experts

    def described(self) -> dict:
        """The case in a result file. tokens_per_rank: of a micro-batch."""
        size = self.shape
        fields = {key: value for key, value in asdict(self).items() if value != FULL}
        return {**fields, "dp": self.ranks // self.ep, "hidden": size.hidden, "ffn": size.ffn,
                "experts": size.experts, "top_k": size.top_k, "tokens_per_rank": size.tokens,
                "tokens_per_expert": self.tokens_per_expert,
                "predicted_bytes": round(size.bytes_of(self.layers, self.ranks))}


# ---- training -----------------------------------------------------------------------------------------------------


CONTENDERS: dict[str, Callable[..., nn.Module]] = {  # what matters most comes first
    AUTOEP: partial(models.engine_of, classic=False, section=None),
    HP: partial(models.engine_of, classic=False, section=RECIPES["mxfp8_wgrad_with_hp"]),
    MXFP8: partial(models.engine_of, classic=False, section=RECIPES["mxfp8"]),
    OURS_BF16: partial(models.engine_of, classic=False, section=RECIPES["bf16"]),
    CLASSIC: partial(models.engine_of, classic=True, section=None),  # may need more memory than there is
    HP_CLASSIC: partial(models.engine_of, classic=True, section=RECIPES["mxfp8_wgrad_with_hp"]),
    BALANCED: partial(models.engine_of, classic=False,
                      section={**RECIPES["mxfp8_wgrad_with_hp"], "expert_placement": "balanced"}),
    IN_TURNS: partial(models.engine_of, classic=False, section={
        **RECIPES["mxfp8_wgrad_with_hp"], "expert_placement": "balanced", "expert_turns": 4}),
}


class Training:
    """Steps of one engine over the batches of its rank, which are the same for every contender.

    Attributes:
        accumulation: micro-batches of the next step.
        losses: of each step, the mean over its micro-batches.
        norms: of each step's gradient.
    """

    def __init__(self, engine: nn.Module, size: models.Size):
        self.engine, self.count, self.accumulation = engine, 0, 1
        self.batches = models.random_batches(size.vocabulary, size.batch, size.sequence)
        self.losses: list[torch.Tensor] = []
        self.norms: list[float] = []

    def step(self, mark: Callable[[], None] = lambda: None) -> None:
        """`mark` is called after each phase of each micro-batch."""
        losses = [self._micro_batch(i == self.accumulation - 1, mark) for i in range(self.accumulation)]
        self.losses.append(torch.stack(losses).mean())

    def _micro_batch(self, last: bool, mark: Callable[[], None]) -> torch.Tensor:
        batch = self.batches[self.count % len(self.batches)]
        self.count += 1
        # By hand, with the loss scaled, for steps of any length in one engine, whose config says one micro-batch.
        self.engine.set_gradient_accumulation_boundary(last)
        loss = self.engine(input_ids=batch, labels=batch).loss
        mark()
        self.engine.backward(loss / self.accumulation)
        mark()
        self.engine.step()
        mark()
        return loss.detach().float()

    def noted(self) -> None:
        """After a step: its gradient norm."""
        self.norms.append(float(self.engine.get_global_grad_norm()))

    def timed(self) -> list[float]:
        """ms of forward, backward, optimizer, each over all micro-batches, of the whole step, and of the step on the
        host; from a moment at which all ranks have met."""
        world.barrier()
        get_accelerator().synchronize()
        marks = [moment()]
        begin = time.perf_counter()
        self.step(lambda: marks.append(moment()))
        host_ms = (time.perf_counter() - begin) * 1e3
        get_accelerator().synchronize()
        self.noted()
        parts = apart_ms(marks)
        return [*(sum(parts[i::len(PHASES)]) for i in range(len(PHASES))), *apart_ms([marks[0], marks[-1]]), host_ms]


def measure(training: Training, case: Case, before: int) -> dict:
    """Trains case.steps steps after those of WARM_UP. Times are the slowest rank's
    in each step, the peak is the largest, beyond `before`: bytes allocated when there was no engine."""
    engine, accelerator = training.engine, get_accelerator()
    accelerator.reset_peak_memory_stats()
    first, placing = len(training.losses), None
    if isinstance(engine, MoEEngine):
        place_experts(engine)  # begins a window of this case's routing
        placing = engine._mxfp8.after_step.get("placement")
    for _ in range(math.ceil(WARM_UP / case.accumulation)):
        training.step()
        training.noted()
    if placing is not None:
        placing.decide()
    samples = world.largest(torch.tensor([training.timed() for _ in range(case.steps)], dtype=torch.float64))
    *phases, step, host = (spread_ms(column) for column in samples.T)
    staging = models.staging_bytes(models.moe_layers(engine)[0])
    peak = accelerator.max_memory_allocated() - before + staging if on_gpu() else 0
    losses = world.gathered(torch.stack(training.losses[first:])).mean(0).tolist()
    return {**step, **{f"{name}_ms": phase["median_ms"] for name, phase in zip(PHASES, phases, strict=True)},
            "host_ms": host["median_ms"], "parameters": len(list(engine.module.parameters())),
            "tokens_per_s": round(case.shape.tokens * case.accumulation * case.ranks / step["median_ms"] * 1e3),
            **({"peak_bytes": int(world.largest(torch.tensor([peak])).item()), "staging_bytes": staging}
               if on_gpu() else {}),
            **models.experts_in(engine, case.tokens_per_expert), **(moved(engine) if placing is not None else {}),
            "losses": [round(loss, 5) for loss in losses],
            "gradient_norm": round(training.norms[first], 6), "correct": all(map(math.isfinite, losses))}


def moved(engine: nn.Module) -> dict:
    """How long it takes to move a quarter of all experts with their states to the next rank, the fastest of three."""
    layers, seconds = converted_layers(engine.module), []
    before = {layer: layer.mxfp8_placement.experts_RL for layer in layers}
    wanted = {}
    for layer, experts_RL in before.items():
        quarter = math.ceil(layer.num_local_experts / 4)
        wanted[layer] = [experts_RL[rank - 1][:quarter] + own[quarter:] for rank, own in enumerate(experts_RL)]
    for goal in (wanted, before, wanted, before):  # NCCL connects in the first one
        world.barrier()
        get_accelerator().synchronize()
        begin = time.perf_counter()
        move_experts(engine, goal)
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - begin)
    return {"move_ms": world.largest(torch.tensor(seconds[1:], dtype=torch.float64)).min().item() * 1e3}


class Run(NamedTuple):
    """One contender's engine, in cases that differ in none of its properties."""

    cases: tuple[Case, ...]
    contender: str

    def __str__(self) -> str:
        return f"{self.cases[0].size}, {self.cases[0].layers} layers, {self.contender}"

    def key(self, case: Case) -> tuple:
        return key({"case": case.described(), "contender": self.contender})

    def build(self) -> Training:
        case = self.cases[0]
        adapters = ADAPTERS if case.training == LORA else None
        return Training(CONTENDERS[self.contender](case.shape, case.layers, case.ep, case.zero, adapters=adapters),
                        case.shape)

    def rows(self) -> Iterator[tuple[Case, dict]]:
        """Each case with what was measured; collective."""

        def trained(case: Case, training: Training, before: int) -> dict:
            models.route(training.engine, case.shape, case.routing)
            training.accumulation = case.accumulation
            return measure(training, case, before)

        return zip(self.cases, found(self.build, [partial(trained, case) for case in self.cases]), strict=True)


# ---- rows ---------------------------------------------------------------------------------------------------------


def fill(args: argparse.Namespace, rows: dict[tuple, dict], commit: str | None) -> Iterator[None]:
    """Adds the times that the rows lack, and yields whenever they are to be written. An engine runs all its cases
    again if one is lacking."""
    runs = [Run(cases, name) for cases in cases_of(args) for name in args.contenders]
    lacking = [one for one in runs if any(one.key(case) not in rows for case in one.cases)]
    for one in world.in_time(lacking, args.seconds):
        for case, told in one.rows():
            rows[one.key(case)] = {"case": case.described(), "contender": one.contender, "commit": commit, **told}
            settle(rows.values(), REFERENCES)
            yield


def cases_of(args: argparse.Namespace) -> list[tuple[Case, ...]]:
    """What was asked for, by engine, with the experts over all ranks."""
    ranks = world.size()
    memory = 2 * models.SCRATCH_BYTES
    if on_gpu():  # which ranks may share
        memory = torch.cuda.mem_get_info()[1] / math.ceil(ranks / get_accelerator().device_count())
    found = []
    for name in args.sizes or (models.FULL_SIZES if on_gpu() else ("tiny", )):
        size = models.SIZES[name]
        layers = size.most_layers(ranks, memory)
        if not layers:
            world.say(f"{name}: no layer fits into {memory / 2**30:.0f} GiB on each of {ranks} ranks")
            continue
        of = name, layers, args.zero, ranks, ranks
        found.append(tuple(Case(*of, math.ceil(args.steps / count), routing, count, args.training)
                           for count in sorted(set(args.accumulation)) for routing in args.routings))
    return found


# ---- how results are shown ------------------------------------------------------------------------------------------


def prepare(result: dict) -> list[dict]:
    """Cases without what follows from their size."""
    keys = "size", "training", "zero", "ep", "dp", "ranks", "routing", "accumulation", "layers", "overflow_check"
    return [{**row, "case": {key: row["case"][key] for key in keys if key in row["case"]}} for row in result["rows"]]


MEASURES = [
    Measure(f"tokens per second: {HP} over {AUTOEP}", (HP, ), AUTOEP, bars=tuple(
        bar(1.15 if size == "mixtral" else 1.25, size=size) for size in models.FULL_SIZES)),
    Measure(f"tokens per second: {HP_CLASSIC} over {CLASSIC}", (HP_CLASSIC, ), CLASSIC),
    Measure(f"tokens per second: {HP} over {OURS_BF16}", (HP, ), OURS_BF16),
    Measure("peak memory with staging, of AutoEP's", (HP, MXFP8), AUTOEP, "peak_bytes", better=show.SMALLER,
            form="{:.1%}", bars=(bar(1.0), ))]


def plot(result: dict, pyplot) -> None:
    panels: dict = {}
    keys = show.varying(result)
    for row in result["rows"]:
        if "median_ms" in row:
            phases = {phase: row[f"{phase}_ms"] for phase in PHASES}
            panels.setdefault(show.described(row["case"], keys), {})[results_file.shown_name(row)] = phases
    show.stacked(pyplot, panels, "ms of a step")


SHOWN = show.Shown("train", MEASURES, [
    ("experts in", "experts_in", "{}"), ("tokens/s", "tokens_per_s", "{}"), ("step, ms", "median_ms", "{:.1f}"),
    ("p90, ms", "p90_ms", "{:.1f}"), ("host, ms", "host_ms", "{:.1f}"), ("kernels, ms", "kernels_ms", "{:.1f}"),
    ("device events", "device_events", "{:g}"), ("host waits", "host_waits", "{:g}"),
    ("parameters", "parameters", "{}"), *((f"{phase}, ms", f"{phase}_ms", "{:.1f}") for phase in PHASES),
    ("peak, GiB", "peak_bytes", show.GIB), ("move, ms", "move_ms", "{:.0f}"), ("loss off", "loss_off", "{:.2%}"),
    ("gradient norm off", "norm_off", "{:.2%}"), ("commit", "commit", "{:.10}")], plot, wide=False,
    ratios=((AUTOEP, HP), (CLASSIC, HP_CLASSIC)), prepare=prepare)


# ---- command line ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = run.parser(__doc__, seconds=540)
    parser.add_argument("--sizes", nargs="+", choices=models.SIZES, help="default: those that fill GPUs; on CPUs tiny")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--accumulation", nargs="+", type=run.one_or_more, metavar="N", default=[1, 4],
                        help="micro-batches of a step, one case after the other in one engine (default: 1 4); losses "
                        "compare between contenders that have run the same cases before")
    parser.add_argument("--routings", nargs="+", choices=(*ROUTINGS, *MORE_ROUTINGS), metavar="ROUTING",
                        default=ROUTINGS, help=f"some of {', '.join((*ROUTINGS, *MORE_ROUTINGS))} (default: the first "
                        "two)")
    parser.add_argument("--training", choices=(FULL, LORA), default=FULL, help="LoRA of attention and experts needs "
                        "contenders of ours: AutoEP finds no experts that PEFT wraps (default: %(default)s)")
    parser.add_argument("--zero", type=int, choices=(1, 2), default=1, help="stage (default: %(default)s)")
    parser.add_argument("--steps", type=run.one_or_more, default=10,
                        help="timed in each case, counted in micro-batches (default: %(default)s)")
    complete(SHOWN, parser, fill)


if __name__ == "__main__":
    main()
