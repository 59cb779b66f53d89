# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of training batches, each with all that it does around the links: casts, permutes, padding.

Beside ours over every transport, in bf16 and MXFP8, stands what one writes in PyTorch today. Plans are
timed apart. GB/s are link-real: bytes that leave or reach the busiest rank, over the whole call's time.

    torchrun --nproc-per-node 8 examples/benchmarks/exchange/dispatch_combine.py    # run, store, show
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.compute import casts
from ds_mxfp8_moe.compute.mx import MXTensor
from ds_mxfp8_moe.transport import ROW_ALIGNMENT, RowFormat, Transport, room_for
from lib import run, show, timing, world
from lib.show import Measure, bar
from lib.timing import TOTAL, Contender, poisoned
from lib.world import BF16, device

TODAY = "today, NCCL bf16"
TOKENS, HIDDEN, TOP_K, EXPERTS = (4096, 16384), (2048, 4096, 7168), (6, 8), (64, 256)
ROUTINGS = ("random", "skewed")
# Sums of rows; an MXFP8 row_format rounds each of them once more.
LEAST_SQNR_DB = {False: 38, True: 26}


# ---- the exchange as one writes it in PyTorch today -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TodayPlan:
    """C: choices of this rank's tokens, R: rows received; the others as in ds_mxfp8_moe.transport.

    Attributes:
        choice_C: the choice (token * K + k) in each row sent, ascending by (expert, token); None: the tokens stand so.
        place_C: the row sent of each choice.
        row_P: the received row at each of the expert-sorted places, R in padding.
        place_R: the inverse.
    """

    top_k: int
    send_splits: list
    recv_splits: list
    choice_C: torch.Tensor | None
    place_C: torch.Tensor
    row_P: torch.Tensor
    place_R: torch.Tensor
    group_ends_E: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.row_P.shape[0]


@dataclass(frozen=True)
class Today(Transport):
    """One row for each choice of a token, in bf16, gathered into expert order before and after an all_to_all_single.

    Every choice must have an expert.
    """

    group: dist.ProcessGroup

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int) -> TodayPlan:
        W, E, device = self.group.size(), num_local_experts, expert_TK.device
        flat = expert_TK.reshape(-1)
        choice_C = flat.argsort(stable=True)
        sent_WE = torch.bincount(flat, minlength=W * E).view(W, E)
        arriving_WE = torch.empty_like(sent_WE)
        dist.all_to_all_single(arriving_WE, sent_WE, group=self.group)
        sent, arriving = torch.stack([sent_WE, arriving_WE]).tolist()

        sizes = [sum(column) for column in zip(*arriving, strict=True)]
        ends, end = [], 0
        for size in sizes:
            end += -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
            ends.append(end)
        # Received rows stand by (rank, expert); wanted: by (expert, rank), every expert's padded.
        expert_R = torch.arange(E, device=device).repeat(W).repeat_interleave(arriving_WE.view(-1))
        order_R = expert_R.argsort(stable=True)
        shift_E = torch.tensor([0, *ends[:-1]], device=device) - (arriving_WE.sum(0).cumsum(0) - arriving_WE.sum(0))
        place = torch.arange(len(order_R), device=device) + shift_E[expert_R[order_R]]
        row_P = torch.full((room_for(end), ), len(order_R), device=device).scatter_(0, place, order_R)
        place_R = torch.empty_like(order_R).scatter_(0, order_R, place)
        here = torch.arange(len(flat), device=device)
        place_C = torch.empty_like(choice_C).scatter_(0, choice_C, here)
        in_order = expert_TK.shape[1] == 1 and torch.equal(choice_C, here)
        return TodayPlan(expert_TK.shape[1], [sum(counts) for counts in sent], [sum(counts) for counts in arriving],
                         None if in_order else choice_C, place_C, row_P, place_R,
                         torch.tensor(ends, dtype=torch.int32, device=device))

    def dispatch(self, plan: TodayPlan, x_TH: torch.Tensor, row_format=None, weight_TK=None, phase: str = "") -> tuple:
        rows_CH = x_TH
        if plan.choice_C is not None:
            rows_CH = x_TH.index_select(0, plan.choice_C.div(plan.top_k, rounding_mode="floor"))
        arrived = x_TH.new_empty(sum(plan.recv_splits) + 1, x_TH.shape[1])
        arrived[-1] = 0  # what padding reads
        dist.all_to_all_single(arrived[:-1], rows_CH, plan.recv_splits, plan.send_splits, group=self.group)
        return arrived.index_select(0, plan.row_P), None

    def combine(self, plan: TodayPlan, y_PH: torch.Tensor, row_format=None, dtype: torch.dtype = torch.bfloat16,
                weight_P=None, phase: str = "") -> tuple:
        back = y_PH.new_empty(sum(plan.send_splits), y_PH.shape[1])
        dist.all_to_all_single(back, y_PH.index_select(0, plan.place_R), plan.send_splits, plan.recv_splits,
                               group=self.group)
        if plan.choice_C is not None:
            back = back.index_select(0, plan.place_C)
        return (back.view(-1, plan.top_k, y_PH.shape[1]).sum(1) if plan.top_k > 1 else back), None


# ---- cases and contenders ------------------------------------------------------------------------------------------


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
        end: of the last group's rows. A transport may leave those behind it as they are.
        rows_WW: rows that go from each rank to each: one for each choice of a token (today's), and one for each rank
            that a token goes to (ours).
    """

    def __init__(self, case: Case):
        self.case, self.local = case, case.experts // world.size()
        self.x_TH, self.expert_TK = world.randn(case.tokens, case.hidden), case.expert_TK()
        self.weight_TK = torch.rand(case.tokens, case.top_k, device=device())
        self.today = Today(world.group())
        plan = self.today.plan(self.expert_TK, self.local)
        self.y_PH, _ = self.today.dispatch(plan, self.x_TH)
        self.end = int(plan.group_ends_E[-1])
        chosen_TW = torch.nn.functional.one_hot(self.expert_TK // self.local, world.size()).sum(1)
        self.rows_WW = {"today": world.gathered(chosen_TW.sum(0)), "ours": world.gathered((chosen_TW > 0).sum(0))}
        self.row_formats = row_formats()

    def bytes_on_links(self, row_format: RowFormat, whose: str) -> int:
        """Off-rank, of the rank that sends or receives the most."""
        off_WW = self.rows_WW[whose].clone().fill_diagonal_(0)
        rows = max(off_WW.sum(0).max().item(), off_WW.sum(1).max().item())
        hidden = self.case.hidden
        return rows * (hidden + hidden // row_format.block_size if row_format.mxfp8 else 2 * hidden)

    def right_rows(self, x_PH: torch.Tensor, row_format: RowFormat) -> bool:
        if x_PH.shape != self.y_PH.shape or isinstance(x_PH, MXTensor) != row_format.mxfp8:
            return False
        wanted = self.y_PH
        if row_format.mxfp8:
            wanted = casts.quantize(wanted, row_format.block_size, row_format.scaling_mode)
        return same_bits(x_PH[:self.end], wanted[:self.end])


def row_formats() -> dict[str, RowFormat]:
    recipe = world.recipe()
    return {"bf16": RowFormat(False), "mxfp8": RowFormat(True, recipe.block_size, recipe.scaling_mode)}


def same_bits(x: torch.Tensor | MXTensor, y: torch.Tensor | MXTensor) -> bool:
    """Of two tensors of one type."""
    pairs = [(x.qdata, y.qdata), (x.scale_bytes, y.scale_bytes)] if isinstance(x, MXTensor) else [(x, y)]
    return all(torch.equal(*(part.contiguous().view(torch.uint8) for part in pair)) for pair in pairs)


def stages(batch: Batch, transport: Any, plan: Any, row_format: RowFormat) -> dict[str, Callable]:
    return {"dispatch": lambda: transport.dispatch(plan, batch.x_TH, row_format, batch.weight_TK)[0],
            "combine": lambda _: transport.combine(plan, batch.y_PH, row_format, BF16)[0]}


def check(batch: Batch, calls: dict[str, Callable], row_format: RowFormat,
          combined: Callable[[], torch.Tensor] | None) -> dict:
    """Runs them on poisoned memory. `combined`: gives what combine has to give, bit for bit."""
    with poisoned():
        x_PH = calls["dispatch"]()
        y_TH = calls["combine"](None)
    found = timing.close({"y": batch.x_TH.float() * batch.case.top_k}, {"y": y_TH}, LEAST_SQNR_DB[row_format.mxfp8])
    found["correct"] &= batch.right_rows(x_PH, row_format) and (combined is None or torch.equal(y_TH, combined()))
    return found


def measure(case: Case, budget_s: float, transports: dict | None = None,
            exact: dict[str, Callable] = MappingProxyType({})) -> list[dict]:
    """The rows of one case.

    Args:
        transports: by name. Default: those of this machine.
        exact: by transport, a function (batch, row format) -> what combine has to give, bit for bit.
    """
    batch, transports = Batch(case), transports or world.transports()
    described, plan_of = asdict(case), partial(Today.plan, batch.today, batch.expert_TK, batch.local)
    planners: dict = {TODAY: plan_of}
    calls = stages(batch, batch.today, plan_of(), batch.row_formats["bf16"])
    exchanges = {TODAY: Contender(calls, partial(check, batch, calls, batch.row_formats["bf16"], None),
                                  {"bytes": batch.bytes_on_links(batch.row_formats["bf16"], "today")})}
    for name, transport in transports.items():
        planners[name] = partial(transport.plan, batch.expert_TK, batch.local)
        plan = planners[name]()
        for dtype, row_format in batch.row_formats.items():
            calls = stages(batch, transport, plan, row_format)
            same = partial(exact[name], batch, row_format) if name in exact else None
            if name == "nvlink":
                same = partial(exchanges[f"collective, {dtype}"].stages["combine"], None)
            exchanges[f"{name}, {dtype}"] = Contender(calls, partial(check, batch, calls, row_format, same),
                                                      {"bytes": batch.bytes_on_links(row_format, "ours")})
    return timing.rows(described, exchanges, budget_s) + timing.rows(
        described, {name: Contender({"plan": call}, lambda call=call: {"correct": call().num_rows > 0})
                    for name, call in planners.items()},
        budget_s / 4)


def measured_rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    for case in world.in_time(cases(args.cases), args.seconds):
        yield measure(case, args.budget)
        get_accelerator().empty_cache()


def cases(which: str) -> list[Case]:
    """Those of "tiny"; those of "short"; and of "full" these first, then the rest."""
    if which == "tiny":
        return [Case(256, 256, 2, 8, routing) for routing in ROUTINGS]
    short = [Case(16384, 7168, 8, 256, "random"), Case(16384, 7168, 8, 256, "skewed"),
             Case(4096, 2048, 6, 64, "random")]
    # By what kernels are compiled for.
    full = [Case(tokens, hidden, top_k, *rest) for hidden, top_k, tokens, *rest in product(
        reversed(HIDDEN), reversed(TOP_K), reversed(TOKENS), reversed(EXPERTS), ROUTINGS)]
    return short if which == "short" else list(dict.fromkeys(short + full))


# ---- how results are shown ------------------------------------------------------------------------------------------


NVLINK_BF16, NVLINK_MXFP8 = "nvlink, bf16", "nvlink, mxfp8"
CONTENDERS = (TODAY, "collective", "nvlink", "collective, bf16", "collective, mxfp8", NVLINK_BF16, NVLINK_MXFP8)
LARGEST = bar(3.0, tokens=16384, hidden=7168, top_k=8, experts=256, routing="random")
MEASURES = [Measure(f"{operation}: nvlink in MXFP8 over today's bf16 exchange by NCCL", (NVLINK_MXFP8, ), TODAY,
                    when=lambda case, operation=operation: case["operation"] == operation,
                    bars=(LARGEST, ) if operation == "dispatch" else ())
            for operation in ("dispatch", "combine")]


def prepare(result: dict) -> list[dict]:
    return [{**row, "gb_per_s": row["bytes"] / row["median_ms"] / 1e6}
            if row["contender"] in (NVLINK_BF16, NVLINK_MXFP8) and "median_ms" in row else row
            for row in result["rows"] if row["case"]["operation"] != TOTAL]


def plot(result: dict, pyplot) -> None:
    panels = {title: {name.replace("no dedup", "one copy a choice"): parts for name, parts in bars.items()}
              for title, bars in show.parts_of_cases(result, ("dispatch", "combine")).items()}
    show.stacked(pyplot, dict(list(panels.items())[:3]), "ms")  # those of --cases short


SHOWN = show.Shown("dispatch_combine", MEASURES, [show.MS, ("GB/s", "gb_per_s", "{:.0f}")], plot,
                   contenders=CONTENDERS, ratios=((TODAY, "collective, mxfp8"), (TODAY, NVLINK_MXFP8)),
                   prepare=prepare,
                   note="GB/s: bytes that leave or reach the busiest rank, over the time of the whole call.")


def main() -> None:
    run.main(SHOWN, run.timed_parser(__doc__, budget=0.15, seconds=85), measured_rows, ranks=True)


if __name__ == "__main__":
    main()
