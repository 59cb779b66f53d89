# SPDX-License-Identifier: Apache-2.0
"""The expert-parallel pipeline of torchao's tutorial, by its method: dispatch, one grouped GEMM dim -> hidden,
combine, and back from a random gradient.

131072 rows on each rank, 8 experts on each, even routing. Weights are quantised in every forward and backward. What
depends on the routing alone (splits, orders, plans) is made beforehand, for every contender. Ours must give the bits
that they give over the collective transport.

    torchrun --nproc-per-node 8 examples/benchmarks/exchange/ep_pipeline.py   # run, store, show
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.compute import casts
from ds_mxfp8_moe.compute.formula import ExpertFormula
from ds_mxfp8_moe.compute.recorded import Weights
from ds_mxfp8_moe.config import FORMAT_KEYS, Recipe
from ds_mxfp8_moe.ffn.expert_math import ExpertMath, Projection
from ds_mxfp8_moe.transport import RowFormat
from exchange.dispatch_combine import Today
from kernels.shapes import SEED_SHAPES
from lib import run, show, timing, world
from lib.show import Measure, bar
from lib.timing import TOTAL, Contender, poisoned
from lib.world import BF16, device, recipe

NCCL_BF16, NCCL_MXFP8_GEMM, OURS_BF16 = "NCCL bf16", "NCCL bf16, MXFP8 GEMM", "ours, bf16"
HP, MXFP8 = "ours, mxfp8_wgrad_with_hp", "ours, mxfp8"
ROWS, TINY_ROWS, EXPERTS = 131072, 2048, 8  # of each rank
SHAPES = {"tiny": ((256, 128), ), "short": SEED_SHAPES[:1], "full": SEED_SHAPES}
ALL_BF16, ALL_MXFP8 = (dict.fromkeys(FORMAT_KEYS, dtype) for dtype in ("bf16", "mxfp8"))
OURS = {OURS_BF16: {"recipe": "bf16"}, HP: {"recipe": "mxfp8_wgrad_with_hp"}, MXFP8: {"recipe": "mxfp8", **ALL_MXFP8}}
LEAST_SQNR_DB, LEAST_SQNR_MXFP8_DB = 38, 22  # against the pipeline over NCCL in bf16


class Case:
    """Tensors and routing of one shape. Tokens stand by their experts, equally many of each.

    Attributes:
        x_TD, w_EHD: leaves; g_TH: the gradient of the output.
    """

    def __init__(self, rows: int, dim: int, hidden: int, experts: int):
        self.rows, self.dim, self.hidden, self.experts = rows, dim, hidden, experts
        self.x_TD = world.randn(rows, dim).requires_grad_()
        self.g_TH = world.randn(rows, hidden)
        self.w_EHD = (world.randn(experts, hidden, dim) / dim**0.5).requires_grad_()
        self.per = rows // (world.size() * experts)  # tokens of a rank for an expert
        self.expert_TK = torch.arange(rows, device=device()).div(self.per, rounding_mode="floor").view(-1, 1)

    def described(self) -> dict:
        return {"dim": self.dim, "hidden": self.hidden, "rows": self.rows, "experts_per_rank": self.experts,
                "flops": 2 * self.rows * self.dim * self.hidden, "block_size": recipe().block_size}

    def backward(self, y_TH: torch.Tensor) -> tuple:
        return y_TH.detach(), *torch.autograd.grad(y_TH, (self.x_TD, self.w_EHD), self.g_TH)


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    """Equal shares of rows, by NCCL or gloo."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


class _OverNCCL(torch.autograd.Function):
    """The pipeline in bf16: all-to-all, index_select, torch._grouped_mm, index_select, all-to-all."""

    @staticmethod
    def forward(ctx, x_TD, w_EHD, order, inverse, ends_E):
        rows = _exchanged(x_TD).index_select(0, order)
        ctx.save_for_backward(rows, w_EHD, order, inverse, ends_E)
        y = torch._grouped_mm(rows, w_EHD.transpose(-2, -1), offs=ends_E)
        return _exchanged(y.index_select(0, inverse))

    @staticmethod
    def backward(ctx, g_TH):
        rows, w_EHD, order, inverse, ends_E = ctx.saved_tensors
        g = _exchanged(g_TH).index_select(0, order)
        dx_TD = _exchanged(torch._grouped_mm(g, w_EHD, offs=ends_E).index_select(0, inverse))
        return dx_TD, torch._grouped_mm(g.t(), rows, offs=ends_E), None, None, None


def over_nccl(case: Case) -> Callable[[], torch.Tensor]:
    W, E, T = world.size(), case.experts, case.rows
    order = torch.arange(T, device=device()).view(W, E, case.per).transpose(0, 1).reshape(-1).contiguous()
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(T, device=device()))
    ends_E = torch.arange(1, E + 1, device=device(), dtype=torch.int32) * (T // E)
    return lambda: _OverNCCL.apply(case.x_TD, case.w_EHD, order, inverse, ends_E)


def row_format(chosen: Recipe, dtype: str) -> RowFormat:
    return RowFormat(dtype == "mxfp8", chosen.block_size, chosen.scaling_mode)


def projection(math: ExpertMath, w_EHD: torch.Tensor) -> Projection:
    return Projection(("up", ), w_EHD.dtype, Weights((w_EHD, ), math.recipe.quantize_gemm))


class _Pipeline(torch.autograd.Function):
    """Dispatch, GEMM and combine over a transport.

    Kept for backward: the rows as they arrived, in MXFP8 if they travelled in MXFP8.
    """

    @staticmethod
    def forward(ctx, transport: Any, plan: Any, math: ExpertMath, x_TD: torch.Tensor,
                w_EHD: torch.Tensor) -> torch.Tensor:
        chosen, weights = math.recipe, projection(math, w_EHD)
        x_PD, _ = transport.dispatch(plan, x_TD, row_format(chosen, chosen.dispatch_fwd))
        y_PH = math.gemm(math.quantized(x_PD), weights, plan.group_ends_E)
        y_TH, _ = transport.combine(plan, y_PH, row_format(chosen, chosen.combine_fwd), BF16)
        ctx.call, ctx.kept = (transport, plan, math, weights), x_PD
        return y_TH

    @staticmethod
    def backward(ctx, g_TH: torch.Tensor) -> tuple:
        (transport, plan, math, weights), x_PD = ctx.call, ctx.kept
        chosen, ends_E = math.recipe, plan.group_ends_E
        g_PH, _ = transport.dispatch(plan, g_TH, row_format(chosen, chosen.combine_bwd))
        columns = math.reads_columns(g_PH)
        if columns:
            g_rows, g_wgrad = casts.quantize_both(g_PH, chosen.block_size, chosen.scaling_mode)
        else:
            g_rows = math.quantized(g_PH)
            g_wgrad = g_rows if math.wgrad_quantized else g_PH
        dx_PD = math.gemm(g_rows, weights, ends_E, transposed=True)
        dx_TD, _ = transport.combine(plan, dx_PD, row_format(chosen, chosen.dispatch_bwd), BF16)
        return None, None, None, dx_TD, math.wgrad_gemm(g_wgrad, x_PD, ends_E, weights.dtype, columns)


def over(transport: Any, case: Case, chosen: Recipe) -> Callable[[], torch.Tensor]:
    """The pipeline in a recipe; its plan is made here."""
    formula = ExpertFormula("mlp", None, case.dim, case.hidden, up="up")
    plan = transport.plan(case.expert_TK, case.experts)
    return lambda: _Pipeline.apply(transport, plan, ExpertMath(formula, chosen, BF16), case.x_TD, case.w_EHD)


def compared(results: tuple) -> dict[str, torch.Tensor]:
    """Some rows of the output and of the tokens' gradient, and the weights' gradient."""
    y_TH, dx_TD, dw_EHD = results
    step = max(1, len(y_TH) // 256)
    return {"y": y_TH[::step], "x": dx_TD[::step], "w": dw_EHD}


def check(name: str, stages: dict[str, Callable], nccl: dict[str, Callable], collective: dict | None) -> dict:
    """Runs it once, on poisoned memory, and compares with the pipeline over NCCL in bf16; over another transport than
    `collective`, with the bits over that too."""
    expected = compared(timing.run(nccl))
    with poisoned():
        results = timing.run(stages)
    least = LEAST_SQNR_DB if name in (NCCL_BF16, OURS_BF16) else LEAST_SQNR_MXFP8_DB
    found = timing.close(expected, compared(results), least)
    if collective is not None:
        found["correct"] &= all(map(torch.equal, results, timing.run(collective)))
    return found


def contenders(case: Case, transport: Any) -> dict[str, Contender]:

    def stages(forward: Callable) -> dict[str, Callable]:
        return {"forward": forward, "backward": case.backward}

    nccl = stages(over_nccl(case))
    today = stages(over(Today(world.group()), case, recipe(**ALL_BF16)))
    found = {NCCL_BF16: Contender(nccl, partial(check, NCCL_BF16, nccl, nccl, None)),
             NCCL_MXFP8_GEMM: Contender(today, partial(check, NCCL_MXFP8_GEMM, today, nccl, None))}
    for name, keys in OURS.items():
        collective = None
        if world.name_of(transport) == "nvlink":
            collective = stages(over(world.transport("collective"), case, recipe(**keys)))
        ours = stages(over(transport, case, recipe(**keys)))
        found[name] = Contender(ours, partial(check, name, ours, nccl, collective),
                                {"transport": world.name_of(transport)})
    return found


def measured_rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    rows = TINY_ROWS if args.cases == "tiny" else ROWS
    for dim, hidden in world.in_time(SHAPES[args.cases], args.seconds):
        case = Case(rows, dim, hidden, EXPERTS)
        yield timing.rows(case.described(), contenders(case, world.transport()), args.budget)
        del case
        get_accelerator().empty_cache()


# ---- how results are shown ------------------------------------------------------------------------------------------


PAIRS = ((NCCL_BF16, HP), (NCCL_BF16, MXFP8), (NCCL_MXFP8_GEMM, HP))
BARS = ((1.43, 1.5, 1.5), (1.6, 1.75, 1.9), (1.2, 1.4, 1.45))  # of the pairs, for 8192, 7168 and 2048 values a row
MEASURES = [Measure(f"forward and backward: {name} over {over}", (name, ), over,
                    when=lambda case: case["operation"] == TOTAL,
                    bars=tuple(bar(value, dim=dim) for value, dim in zip(bars, (8192, 7168, 2048), strict=True)))
            for (over, name), bars in zip(PAIRS, BARS, strict=True)]


def prepare(result: dict) -> list[dict]:
    return [row for row in result["rows"] if row["case"]["operation"] in ("forward", "backward", TOTAL)]


def plot(result: dict, pyplot) -> None:
    show.stacked(pyplot, show.parts_of_cases(result, ("forward", "backward")), "ms")


SHOWN = show.Shown("ep_pipeline", MEASURES, [show.MS], plot, ratios=PAIRS,
                   contenders=(NCCL_BF16, NCCL_MXFP8_GEMM, *OURS), prepare=prepare,
                   note="Even routing, known to all ranks beforehand: plans and splits are not timed.")


def main() -> None:
    run.main(SHOWN, run.timed_parser(__doc__, budget=1.0, seconds=95), measured_rows, ranks=True)


if __name__ == "__main__":
    main()
