# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of training batches, each with all that it does around the links: casts, permutes, padding.

Beside ours over every transport, in bf16 and MXFP8, stands what one writes in PyTorch today (today.py). Plans are
timed apart. GB/s are link-real: bytes that leave or reach the busiest rank, over the whole call's time.

    torchrun --nproc-per-node 8 examples/benchmarks/exchange/dispatch_combine.py    # run, store, show
    python examples/benchmarks/exchange/dispatch_combine.py --show FILE             # table and plot of a result file
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe import casts
from ds_mxfp8_moe.config import MXFP8MoEConfig, current_device, resolve
from ds_mxfp8_moe.mx import MXTensor, sqnr_db
from ds_mxfp8_moe.transport import Wire
from lib import results_file, world
from lib.show_ranks import BIG, TODAY
from lib.timing import device, poisoned
from lib.today import Today
from lib.world import BF16, Contender

TOKENS, HIDDEN, TOP_K, EXPERTS = (4096, 16384), (2048, 4096, 7168), (6, 8), (64, 256)
ROUTINGS = ("random", "skewed")
# Sums of rows; an MXFP8 wire rounds each of them once more.
LEAST_SQNR_DB = {False: 38, True: 26}


@dataclass(frozen=True)
class Case:
    """One rank's tokens, and how they fall on the experts of all ranks."""

    tokens: int
    hidden: int
    top_k: int
    experts: int
    routing: str

    def expert_TK(self) -> torch.Tensor:
        """int64. Skewed: an expert's popularity falls with its place in a random order, as 1 / place."""
        popularity = torch.zeros(self.experts)
        if self.routing == "skewed":
            order = torch.randperm(self.experts, generator=torch.Generator().manual_seed(self.experts))
            popularity = -(1.0 + order).log()
        gumbel = -torch.empty(self.tokens, self.experts, device=device()).exponential_().log()
        return (popularity.to(device()) + gumbel).topk(self.top_k).indices


class Batch:
    """A case's tensors, and what the exchanges must give.

    Attributes:
        y_PH: the bf16 rows as they are dispatched, which combine takes: a token comes back times top_k.
        rows_WW: rows that go from each rank to each: one for each choice of a token (today's), and one for each rank
            that a token goes to (ours).
    """

    def __init__(self, case: Case):
        self.case, self.local = case, case.experts // world.size()
        self.x_TH, self.expert_TK = world.randn(case.tokens, case.hidden), case.expert_TK()
        self.weight_TK = torch.rand(case.tokens, case.top_k, device=device())
        self.today = Today(world.group())
        self.y_PH, _ = self.today.dispatch(self.today.plan(self.expert_TK, self.local), self.x_TH)
        chosen_TW = torch.nn.functional.one_hot(self.expert_TK // self.local, world.size()).sum(1)
        self.rows_WW = {"today": world.gathered(chosen_TW.sum(0)), "ours": world.gathered((chosen_TW > 0).sum(0))}
        recipe = resolve(MXFP8MoEConfig(enabled=True), *current_device())
        self.wires = {"bf16": Wire(False), "mxfp8": Wire(True, recipe.block_size, recipe.scaling_mode)}

    def bytes_on_links(self, wire: Wire, whose: str) -> int:
        """Off-rank, of the rank that sends or receives the most."""
        off_WW = self.rows_WW[whose].clone().fill_diagonal_(0)
        rows = max(off_WW.sum(0).max().item(), off_WW.sum(1).max().item())
        return rows * (self.case.hidden + self.case.hidden // wire.block_size if wire.mxfp8 else 2 * self.case.hidden)

    def right_rows(self, x_PH: torch.Tensor, wire: Wire) -> bool:
        if not wire.mxfp8:
            return torch.equal(x_PH, self.y_PH)
        wanted = casts.quantize(self.y_PH, wire.block_size, wire.scaling_mode)
        return isinstance(x_PH, MXTensor) and torch.equal(_bytes(x_PH), _bytes(wanted)) and torch.equal(
            x_PH.scale_bytes, wanted.scale_bytes)


def _bytes(x: MXTensor) -> torch.Tensor:
    return x.qdata.view(torch.uint8)


def stages(batch: Batch, transport: Any, plan: Any, wire: Wire) -> dict[str, Callable]:
    return {"dispatch": lambda: transport.dispatch(plan, batch.x_TH, wire, batch.weight_TK)[0],
            "combine": lambda _: transport.combine(plan, batch.y_PH, wire, BF16)[0]}


def check(batch: Batch, calls: dict[str, Callable], wire: Wire, collective: Callable | None) -> dict:
    """Runs them on poisoned memory. `collective`: combine to the same bits as it does."""
    with poisoned():
        x_PH = calls["dispatch"]()
        y_TH = calls["combine"](None)
    db = sqnr_db(batch.x_TH.float() * batch.case.top_k, y_TH)
    right = batch.right_rows(x_PH, wire) and db >= LEAST_SQNR_DB[wire.mxfp8]
    if collective is not None:
        right &= torch.equal(y_TH, collective(None))
    return {"correct": right, "sqnr_db": round(db, 1)}


def measure(case: Case, budget_s: float) -> list[dict]:
    """The rows of one case."""
    batch, transports = Batch(case), world.transports()
    described, plan_of = asdict(case), partial(Today.plan, batch.today, batch.expert_TK, batch.local)
    planners: dict = {TODAY: plan_of}
    calls = stages(batch, batch.today, plan_of(), batch.wires["bf16"])
    exchanges = {TODAY: Contender(calls, partial(check, batch, calls, batch.wires["bf16"], None),
                                  {"bytes": batch.bytes_on_links(batch.wires["bf16"], "today")})}
    for name, transport in transports.items():
        planners[name] = partial(transport.plan, batch.expert_TK, batch.local)
        plan = planners[name]()
        for dtype, wire in batch.wires.items():
            calls = stages(batch, transport, plan, wire)
            same = None if name == "collective" else exchanges[f"collective, {dtype}"].stages["combine"]
            exchanges[f"{name}, {dtype}"] = Contender(calls, partial(check, batch, calls, wire, same),
                                                      {"bytes": batch.bytes_on_links(wire, "ours")})
    return world.rows(described, exchanges, budget_s) + world.rows(
        described, {name: Contender({"plan": call}, partial(_planned, call)) for name, call in planners.items()},
        budget_s / 4)


def _planned(call: Callable) -> dict:
    return {"correct": call().num_rows > 0}


def run(cases: list[Case], budget_s: float, seconds: float) -> Iterator[list[dict]]:
    for case in world.in_time(cases, seconds):
        yield measure(case, budget_s)
        get_accelerator().empty_cache()


def cases(which: str) -> list[Case]:
    """Those of "tiny"; those of "short", what the bars speak of and its neighbours, and then of "full" the rest."""
    if which == "tiny":
        return [Case(256, 256, 2, 8, routing) for routing in ROUTINGS]
    short = [BIG_CASE, Case(16384, 7168, 8, 256, "skewed"), Case(4096, 2048, 6, 64, "random")]
    # By what kernels are compiled for.
    full = [Case(tokens, hidden, top_k, *rest) for hidden, top_k, tokens, *rest in product(
        reversed(HIDDEN), reversed(TOP_K), reversed(TOKENS), reversed(EXPERTS), ROUTINGS)]
    return short if which == "short" else list(dict.fromkeys(short + full))


BIG_CASE = Case(**BIG)


def main() -> None:
    parser = world.parser(__doc__, budget=0.15, seconds=85)
    parser.add_argument("--case", nargs=5, metavar=("TOKENS", "HIDDEN", "TOP_K", "EXPERTS", "ROUTING"),
                        help="only this one; ROUTING is random or skewed")
    args = results_file.parse(parser)
    if args.case and not (all(map(str.isdecimal, args.case[:4])) and args.case[4] in ROUTINGS):
        parser.error(f"--case {' '.join(args.case)}: expected four numbers and one of {' '.join(ROUTINGS)}")
    chosen = [Case(*map(int, args.case[:4]), args.case[4])] if args.case else cases(args.cases)
    world.main("dispatch_combine", args, lambda: run(chosen, args.budget, args.seconds - world.ENDING_S))


if __name__ == "__main__":
    main()
