# SPDX-License-Identifier: Apache-2.0
"""Training a GPT-MoE: tokens per second, peak memory and where the time goes, of DeepSpeed's classic MoE and AutoEP in
bf16 beside ours in every recipe.

One model for all contenders, of Hugging Face's classes built from their config, with the same weights, batches and
seeds: AutoEP replaces its MoE layers, or deepspeed.moe.layer.MoE (dropless) stands in their place with the same
experts. Each trains with even routing first, which every router is made to give, and then with its own router; both
with one micro-batch in a step and with gradients accumulated over several. The losses, and the first step's gradient
norm, are the check. A model has as many layers as `Size.bytes_of` says fit.

One contender at a time is in memory. Rows are added to what the result file has, so that a run of ten minutes goes on
where the last one ended. Where the time goes is measured at a run's end, on engines built anew: a profiler leaves its
traces in what comes after it.

    torchrun --nproc-per-node 8 examples/benchmarks/training/train.py --cases short  # again, until nothing is lacking
    python examples/benchmarks/training/train.py --show FILE        # tables and plot of a result file
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.transport.deadline import PeerFailure
from exchange.moe_layer import RECIPES
from lib import options, results_file, show, world
from lib.show_train import AUTOEP, CLASSIC, HP, HP_CLASSIC, MXFP8, OURS_BF16
from lib.tables import read
from lib.timing import device, on_gpu, spread_ms
from training import breakdown
from training import train_models as models

WARM_UP = 4  # micro-batches
PROFILED = 2  # steps
BATCHES = 2
LEFT_BYTES = 1 << 30  # of an engine that is gone: worth a word
ROUTINGS = ("even", "router")
PHASES = ("forward", "backward", "optimizer")  # of a step
# Off AutoEP bf16 at most, relative: the loss of any step, the gradient norm of the first.
TOLERANCES, MXFP8_TOLERANCES = (0.002, 0.015), (0.003, 0.02)
REFERENCES = (AUTOEP, OURS_BF16, CLASSIC)
UNFINISHED = "did not end"


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
        return {**asdict(self), "dp": self.ranks // self.ep, "hidden": size.hidden, "ffn": size.ffn,
                "experts": size.experts, "top_k": size.top_k, "tokens_per_rank": size.tokens,
                "tokens_per_expert": self.tokens_per_expert,
                "predicted_bytes": round(size.bytes_of(self.layers, self.ranks, self.ep, self.zero))}


# ---- training -----------------------------------------------------------------------------------------------------


CONTENDERS: dict[str, Callable[..., nn.Module]] = {  # what matters most comes first
    AUTOEP: partial(models.engine_of, classic=False, section=None),
    HP: partial(models.engine_of, classic=False, section=RECIPES["mxfp8_wgrad_with_hp"]),
    MXFP8: partial(models.engine_of, classic=False, section=RECIPES["mxfp8"]),
    OURS_BF16: partial(models.engine_of, classic=False, section=RECIPES["bf16"]),
    CLASSIC: partial(models.engine_of, classic=True, section=None),  # may need more memory than there is
    HP_CLASSIC: partial(models.engine_of, classic=True, section=RECIPES["mxfp8_wgrad_with_hp"]),
}


def tokens_of_experts(engine: nn.Module, step: Callable[[], None], ep: int) -> dict[str, int]:
    """Runs a step; the most and the fewest tokens that an expert of any layer got of a micro-batch from its group."""
    counts: list[torch.Tensor] = []

    def read(_router, _inputs, outputs) -> None:
        counts.append(outputs[-1].detach().long())

    hooks = [models.router_of(layer).register_forward_hook(read) for layer in models.moe_layers(engine)]
    step()
    for hook in hooks:
        hook.remove()
    counts_LE = torch.stack(counts)
    grouped = world.gathered(counts_LE).view(-1, ep, *counts_LE.shape).sum(1)
    return {"most_tokens": int(grouped.max()), "fewest_tokens": int(grouped.min())}


class Training:
    """Steps of one engine over the batches of its rank, which are the same for every contender.

    Attributes:
        accumulation: micro-batches of the next step.
        losses: of each step, the mean over its micro-batches.
        norms: of each step's gradient.
    """

    def __init__(self, engine: nn.Module, size: models.Size):
        self.engine, self.count, self.accumulation = engine, 0, 1
        seeds = (1000 * i + world.rank() for i in range(BATCHES))
        self.batches = [torch.randint(size.vocabulary, (size.batch, size.sequence),
                                      generator=torch.Generator().manual_seed(seed)).to(device()) for seed in seeds]
        self.losses: list[torch.Tensor] = []
        self.norms: list[float] = []

    def step(self, mark: Callable[[], None] = lambda: None) -> None:
        """`mark` is called after each phase of each micro-batch."""
        losses = [self._micro_batch(i == self.accumulation - 1, mark) for i in range(self.accumulation)]
        self.losses.append(torch.stack(losses).mean())

    def _micro_batch(self, last: bool, mark: Callable[[], None]) -> torch.Tensor:
        batch = self.batches[self.count % BATCHES]
        self.count += 1
        # By hand, with the loss scaled, for steps of any length in one engine, whose config says one micro-batch.
        self.engine.set_gradient_accumulation_boundary(last)
        loss = self.engine(input_ids=batch, labels=batch).loss
        mark()
        self.engine.backward(loss / self.accumulation)
        mark()
        with breakdown.part("optimizer"):
            self.engine.step()
        mark()
        return loss.detach().float()

    def noted(self) -> None:
        """After a step: its gradient norm."""
        self.norms.append(float(self.engine.get_global_grad_norm()))

    def timed(self) -> list[float]:
        """ms of forward, backward, optimizer, each over all micro-batches, and of the whole step, from a moment at
        which all ranks have met."""
        times: list = []

        def ms(begin, end) -> float:
            return begin.elapsed_time(end) if on_gpu() else (end - begin) * 1e3

        def mark() -> None:
            times.append(torch.cuda.Event(enable_timing=True) if on_gpu() else time.perf_counter())
            if on_gpu():
                times[-1].record()

        dist.barrier()
        get_accelerator().synchronize()
        mark()
        self.step(mark)
        get_accelerator().synchronize()
        self.noted()
        parts = [ms(*pair) for pair in zip(times, times[1:], strict=False)]
        return [*(sum(parts[i::len(PHASES)]) for i in range(len(PHASES))), ms(times[0], times[-1])]

    def mean_losses(self) -> list[float]:
        """Of all steps so far, over all ranks."""
        return (world.total(torch.stack(self.losses)) / world.size()).tolist()


def measure(training: Training, case: Case, before: int) -> dict:
    """Trains case.steps steps after those of WARM_UP and one in which tokens are counted. Times are the slowest rank's
    in each step, the peak is the largest, beyond `before`: bytes allocated when there was no engine."""
    engine, accelerator = training.engine, get_accelerator()
    accelerator.reset_peak_memory_stats()
    first = len(training.losses)
    for _ in range(math.ceil(WARM_UP / case.accumulation)):
        training.step()
        training.noted()
    counted = tokens_of_experts(engine, training.step, case.ep)
    training.noted()
    samples = world.largest(torch.tensor([training.timed() for _ in range(case.steps)], dtype=torch.float64))
    *phases, step = (spread_ms(column) for column in samples.T)
    staging = models.staging_bytes(engine)
    peak = accelerator.max_memory_allocated() - before + staging if on_gpu() else 0
    losses = training.mean_losses()[first:]
    return {**step, **{f"{name}_ms": phase["median_ms"] for name, phase in zip(PHASES, phases, strict=True)},
            "tokens_per_s": round(case.shape.tokens * case.accumulation * case.ranks / step["median_ms"] * 1e3),
            **({"peak_bytes": int(world.largest(torch.tensor([peak])).item()), "staging_bytes": staging}
               if on_gpu() else {}),
            **models.experts_in(engine, case.tokens_per_expert), **counted,
            "losses": [round(loss, 5) for loss in losses],
            "gradient_norm": round(training.norms[first], 6), "correct": all(map(math.isfinite, losses))}


def broken_down(training: Training) -> dict[str, float]:
    """ms of each part in a step, the mean over ranks."""
    with breakdown.marked(training.engine.module):
        training.step()
        get_accelerator().synchronize()
        dist.barrier()
        found = breakdown.breakdown(training.step, PROFILED)
    mean = world.total(torch.tensor(list(found.values()), device=device())) / world.size()
    return {name: round(ms, 3) for name, ms in zip(found, mean.tolist(), strict=True)}


class Run(NamedTuple):
    """One contender's engine, to be timed or to be broken down in cases that differ in none of its properties."""

    cases: tuple[Case, ...]
    contender: str
    profiled: bool

    def __str__(self) -> str:
        case = self.cases[0]
        return (f"{case.size}, {case.layers} layers, ZeRO-{case.zero}, EP {case.ep} x DP {case.ranks // case.ep}, "
                f"{self.contender}{', where the time goes' if self.profiled else ''}")

    def key(self, case: Case) -> tuple:
        return key({"case": case.described(), "contender": self.contender})

    def rows(self) -> Iterator[tuple[Case, dict]]:
        """Each case with what a row about it says; collective."""
        of_all, held = self.cases[0], []
        before = get_accelerator().memory_allocated() if on_gpu() else 0
        if before > LEFT_BYTES:
            world.say(f"{before / 2**30:.1f} GiB are still held of what ran before")

        def build() -> dict:
            held.append(CONTENDERS[self.contender](of_all.shape, of_all.layers, of_all.ep, of_all.zero))
            return {}

        def trained(case: Case) -> dict:
            models.route(held[0], case.shape, case.routing)
            training.accumulation = case.accumulation
            return {"breakdown": broken_down(training)} if self.profiled else measure(training, case, before)

        found = _everywhere(build)
        training = None if "failure" in found else Training(held[0], of_all.shape)
        for case in self.cases:
            if "failure" not in found:  # it leaves gradients, and steps that were not made, to what comes after it
                found = _everywhere(partial(trained, case))
            yield case, found
        training = None
        if held:
            models.free(held.pop())


def _everywhere(call: Callable[[], dict]) -> dict:
    """world.everywhere; but when ranks have lost each other nothing further can be measured, and this process ends."""

    def checked() -> dict:
        try:
            return call()
        except (dist.DistError, PeerFailure) as error:
            sys.exit(f"rank {world.rank()}: {type(error).__name__}: {error}")

    return world.everywhere(checked)


# ---- rows ---------------------------------------------------------------------------------------------------------


def key(row: dict) -> tuple:
    return json.dumps(row["case"], sort_keys=True), row["contender"]


def settle(rows: Iterable[dict]) -> None:
    """Compares each row's losses and first gradient norm with those of the case's reference, and says what is
    correct."""
    rows = list(rows)
    for row in rows:
        if "losses" not in row:
            continue
        others = {other["contender"]: other for other in rows if other["case"] == row["case"] and "losses" in other}
        reference = next((others[name] for name in REFERENCES if name in others), row)
        offs = [abs(a / b - 1) for a, b in zip(row["losses"], reference["losses"], strict=True)]
        off = max(offs, key=lambda each: math.inf if math.isnan(each) else each)
        norm_off = abs(row["gradient_norm"] / reference["gradient_norm"] - 1)
        most, most_norm = TOLERANCES if row["contender"] in REFERENCES else MXFP8_TOLERANCES
        row.update(loss_off=round(off, 6), norm_off=round(norm_off, 6), correct=off <= most and norm_off <= most_norm)
        row.pop("error", None)
        if not row["correct"]:
            row["error"] = (f"losses {off:.2%} off {reference['contender']} (at most {most:.2%}), the first gradient "
                            f"norm {norm_off:.2%} (at most {most_norm:.2%})")


def stored(path: Path) -> list[dict]:
    """The rows of a result file of this kind of machine; none where there is no such file."""
    if not path.exists():
        return []
    result = read(path)
    here = torch.cuda.get_device_name() if on_gpu() else platform.machine()
    if result["benchmark"] != "train" or not result["machine"].endswith(here):
        sys.exit(f"{path} has results of {result['benchmark']} on {result['machine']}: name another file by --out")
    return result["rows"]


def wanted(engines: list[tuple[Case, ...]], contenders: Iterable[str], rows: dict[tuple, dict],
           retry: bool) -> list[Run]:
    """What the rows lack: first times, engine by engine; then where the time goes, of these too, in steps of one
    micro-batch. An engine runs all its cases again if one is lacking."""

    def lacks(run: Run) -> bool:
        there = [rows.get(run.key(case)) for case in run.cases]
        if run.profiled:
            return any(row is None or retry and "failure" in row or "losses" in row and (
                "breakdown" not in row or retry and not row["breakdown"]) for row in there)
        return any(row is None or retry and "failure" in row for row in there)

    return [run for profiled in (False, True) for cases in engines for name in contenders if lacks(
        run := Run(tuple(case for case in cases if case.accumulation == 1 or not profiled), name, profiled))]


def run(wanted_runs: list[Run], rows: dict[tuple, dict], seconds: float, commit: str | None) -> Iterator[None]:
    """Fills `rows`, and yields whenever they are to be written: before each run too, so that one which ends the
    process does not do so again and again."""
    for one in world.in_time(wanted_runs, seconds):
        if one.profiled and not all("losses" in rows.get(one.key(case), ()) for case in one.cases):
            continue  # it failed
        for case in one.cases:
            _note(rows, one, case, {"correct": False, "failure": UNFINISHED}, commit)
        yield
        for case, found in one.rows():
            _note(rows, one, case, found, commit)
            if "failure" in found:
                world.say(f"{one}, {case.routing}, {case.accumulation} micro-batches: {found['failure']}")
            settle(rows.values())
            yield


def _note(rows: dict[tuple, dict], one: Run, case: Case, found: dict, commit: str | None) -> None:
    if one.profiled:
        rows[one.key(case)]["breakdown"] = found.get("breakdown", {})
    else:
        rows[one.key(case)] = {"case": case.described(), "contender": one.contender, "commit": commit, **found}


def cases_of(args: argparse.Namespace) -> list[tuple[Case, ...]]:
    """What was asked for, by engine; full: ZeRO-1 and 2, expert parallelism over the world and over half of it."""
    ranks = world.size()
    memory = torch.cuda.mem_get_info()[1] if on_gpu() else 2 * models.SCRATCH_BYTES
    found = []
    for name in args.sizes or (models.FULL_SIZES if on_gpu() else ("tiny", )):
        size = models.SIZES[name]
        layers = min(size.most_layers(ranks, memory), args.layers or size.layers)
        if not layers:
            world.say(f"{name}: no layer fits into {memory / 2**30:.0f} GiB on each of {ranks} ranks")
            continue
        parallel, stages = models.expert_parallel(size, ranks), (1, 2)
        if args.cases == "short":
            parallel, stages = parallel[:1], (1, )
        found += [tuple(Case(name, layers, zero, ep, ranks, math.ceil(args.steps / count), routing, count)
                        for count in sorted(set(args.accumulation)) for routing in ROUTINGS)
                  for ep in parallel for zero in stages
                  if zero in (args.zero or stages) and ep in (args.ep or parallel)]
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=("short", "full"), default="full", help="short: ZeRO-1, EP over all ranks")
    parser.add_argument("--sizes", nargs="+", choices=models.SIZES, help="default: those that fill GPUs; on CPUs tiny")
    parser.add_argument("--zero", nargs="+", type=int, choices=(1, 2))
    parser.add_argument("--ep", nargs="+", type=int, help="of the cases, only those of this expert parallelism")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--layers", type=options.one_or_more, help="at most; default: as many as fit")
    parser.add_argument("--accumulation", nargs="+", type=options.one_or_more, default=[1, 4], metavar="N",
                        help="micro-batches of a step, one case after the other in one engine (default: 1 4); losses "
                        "compare between contenders that have run the same cases before")
    parser.add_argument("--steps", type=options.one_or_more, default=10,
                        help="timed in each case, counted in micro-batches (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=540,
                        help="for the whole run with its start (default: %(default)s): what does not fit is left out")
    parser.add_argument("--retry", action="store_true", help="run again what failed, or did not end")
    parser.add_argument("--out", type=Path, help="the result file, which is added to (default: under results)")
    parser.add_argument("--commit", help="the commit measured, where the repository is not at hand")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show a result file and run nothing")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher's, which sets LOCAL_RANK too
    return results_file.parse(parser)


def train(args: argparse.Namespace) -> None:
    """What the result file lacks, as far as time allows. Shows it and ends this process."""
    path = args.out or results_file.RESULTS / f"train_{world.size()}ranks.json"
    box = [stored(path), args.commit or results_file.commit()] if world.rank() == 0 else [None, None]
    dist.broadcast_object_list(box)
    rows, commit = {key(row): row for row in box[0]}, box[1]
    engines = cases_of(args)
    if not engines:
        sys.exit(f"there is no such case on {world.size()} ranks: its expert parallelism is over all of them or half, "
                 "ZeRO is 1 in --cases short, and a layer has to fit")
    runs = wanted(engines, args.contenders, rows, args.retry)
    for _ in run(runs, rows, args.seconds - world.ENDING_S, commit):
        if world.rank() == 0:
            results_file.write("train", list(rows.values()), path, of_commit=commit)
    world.say("nothing is lacking" if not runs else "measured")
    world.end(list(rows.values()), path)


def main() -> None:
    args = parse_args()
    if args.show:
        show.show(args.show)
        return
    world.start()
    train(args)


if __name__ == "__main__":
    main()
