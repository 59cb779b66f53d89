# SPDX-License-Identifier: Apache-2.0
"""The expert-parallel pipeline of torchao's tutorial, by its method: dispatch, one grouped GEMM dim -> hidden,
combine, and back from a random gradient.

131072 rows on each rank, 8 experts on each, even routing. Weights are quantised in every forward and backward. What
depends on the routing alone (splits, orders, plans) is made beforehand, for every contender. Also the rates of links
and GEMMs in this run, of which the floor is made: bytes over the one, FLOPs over the other, perfectly overlapped.

    torchrun --nproc-per-node 8 examples/benchmarks/exchange/ep_pipeline.py   # run, store, show
    python examples/benchmarks/exchange/ep_pipeline.py --show FILE               # table and plot of a result file
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe import casts
from ds_mxfp8_moe.config import WIRE_KEYS, MXFP8MoEConfig, Recipe, current_device, resolve
from ds_mxfp8_moe.expert_math import ExpertMath
from ds_mxfp8_moe.experts import ExpertFormula
from ds_mxfp8_moe.grouped_gemm import grouped_mm, grouped_mm_wgrad, grouped_mm_wgrad_rows, wgrad_cost
from ds_mxfp8_moe.mx import sqnr_db
from ds_mxfp8_moe.transport import Wire
from lib import options, results_file, shapes, world
from lib.show_ranks import HP, MXFP8, NCCL_BF16, NCCL_MXFP8_GEMM, OURS_BF16
from lib.timing import device, poisoned
from lib.today import Today
from lib.world import BF16, Contender

ROWS, TINY_ROWS, EXPERTS = 131072, 2048, 8  # of each rank
SHAPES = {"tiny": ((256, 128), ), "short": shapes.SEED_SHAPES[:1], "full": shapes.SEED_SHAPES}
ALL_BF16, ALL_MXFP8 = (dict.fromkeys(WIRE_KEYS, dtype) for dtype in ("bf16", "mxfp8"))
OURS = {OURS_BF16: {"recipe": "bf16"}, HP: {"recipe": "mxfp8_wgrad_with_hp"}, MXFP8: {"recipe": "mxfp8", **ALL_MXFP8}}
LEAST_SQNR_DB = {NCCL_BF16: 38, OURS_BF16: 38}
LEAST_SQNR_MXFP8_DB = 22


def recipe(**keys) -> Recipe:
    return resolve(MXFP8MoEConfig(enabled=True, **keys), *current_device())


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

    def ends_E(self) -> torch.Tensor:
        """int32, on the device: where each expert's rows end on every rank."""
        return torch.arange(1, self.experts + 1, device=device(), dtype=torch.int32) * (self.rows // self.experts)

    def described(self) -> dict:
        return {"dim": self.dim, "hidden": self.hidden, "rows": self.rows, "experts_per_rank": self.experts,
                "flops": 2 * self.rows * self.dim * self.hidden, "block_size": recipe().block_size}

    def backward(self, y_TH: torch.Tensor) -> tuple:
        return y_TH.detach(), *torch.autograd.grad(y_TH, (self.x_TD, self.w_EHD), self.g_TH)


class _Permute(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, g):
        return g.index_select(0, ctx.saved_tensors[0]), None, None


class _AllToAll(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x):
        return _exchanged(x)

    @staticmethod
    def backward(ctx, g):
        return _exchanged(g)


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    """Equal shares of rows, by NCCL or gloo."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def over_nccl(case: Case) -> Callable[[], torch.Tensor]:
    """The pipeline in bf16: all-to-all, index_select, torch._grouped_mm, index_select, all-to-all."""
    W, E, T = world.size(), case.experts, case.rows
    order = torch.arange(T, device=device()).view(W, E, case.per).transpose(0, 1).reshape(-1).contiguous()
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(T, device=device()))
    ends_E = case.ends_E()

    def forward():
        x = _Permute.apply(_AllToAll.apply(case.x_TD), order, inverse)
        y = torch._grouped_mm(x, case.w_EHD.transpose(-2, -1), offs=ends_E)
        return _AllToAll.apply(_Permute.apply(y, inverse, order))

    return forward


def wire(chosen: Recipe, dtype: str) -> Wire:
    return Wire(dtype == "mxfp8", chosen.block_size, chosen.scaling_mode)


class _Pipeline(torch.autograd.Function):
    """Dispatch, GEMM and combine over a transport. Backward overlaps them as ExpertFFN does.

    Kept for backward: the rows as they arrived, in MXFP8 if they travelled in MXFP8.
    """

    @staticmethod
    def forward(ctx, transport: Any, experts: ExpertMath, x_TD: torch.Tensor, w_EHD: torch.Tensor) -> torch.Tensor:
        plan, chosen = experts.plan, experts.recipe
        x_PD, _ = transport.dispatch(plan, x_TD, wire(chosen, chosen.dispatch_fwd))
        y_PH = experts.forward_gemm(experts.quantized(x_PD), [w_EHD])
        y_TH, _ = transport.combine(plan, y_PH, wire(chosen, chosen.combine_fwd), BF16)
        ctx.call, ctx.kept = (transport, experts, w_EHD), x_PD
        return y_TH

    @staticmethod
    def backward(ctx, g_TH: torch.Tensor) -> tuple:
        (transport, experts, w_EHD), x_PD = ctx.call, ctx.kept
        plan, chosen = experts.plan, experts.recipe
        g_PH, _ = transport.dispatch(plan, g_TH, wire(chosen, chosen.combine_bwd))
        columns = experts.reads_columns(g_PH)
        if columns:
            g_rows, g_wgrad = casts.quantize_both(g_PH, chosen.block_size, chosen.scaling_mode)
        else:
            g_rows = experts.quantized(g_PH)
            g_wgrad = g_rows if experts.wgrad_quantized else g_PH
        dx_PD = experts.dgrad_gemm(g_rows, [w_EHD])
        wire_back = wire(chosen, chosen.dispatch_bwd)
        beside = transport.sms_beside(plan, dx_PD.shape[1], BF16, wire_back,
                                      *wgrad_cost(g_wgrad, x_PD, len(w_EHD), experts.wgrad_quantized))
        back = transport.start_combine(plan, dx_PD, wire_back, BF16, sms=beside)
        dw_EHD = experts.wgrad_gemm(g_wgrad, x_PD, w_EHD.dtype, columns, beside)
        dx_TD, _ = back.result()
        return None, None, dx_TD, dw_EHD


def over(transport: Any, case: Case, chosen: Recipe) -> Callable[[], torch.Tensor]:
    """The pipeline in a recipe; its plan is made here."""
    formula = ExpertFormula("linear", None, case.dim, case.hidden, up="up")
    experts = ExpertMath(formula, chosen, transport.plan(case.expert_TK, case.experts), {"up": case.w_EHD}, BF16)
    return lambda: _Pipeline.apply(transport, experts, case.x_TD, case.w_EHD)


class Expected(NamedTuple):
    """Parts of a case's results in float32: some tokens of each expert, some of each weight gradient."""

    tokens: torch.Tensor
    h: torch.Tensor
    d: torch.Tensor
    values: dict

    @staticmethod
    def of(case: Case, tokens: int = 16, columns: int = 16) -> "Expected":
        W, E, me = world.size(), case.experts, world.rank()
        of_each = torch.linspace(0, case.per - 1, min(tokens, case.per), device=device()).long()
        tokens_C = (torch.arange(W * E, device=device()).unsqueeze(1) * case.per + of_each).view(-1)
        h, d = (torch.linspace(0, n - 1, min(columns, n), device=device()).long() for n in (case.hidden, case.dim))
        values = {}
        with torch.no_grad():
            # Everybody multiplies everybody's tokens with its own experts' weights, and sends all the results.
            for name, rows, weights in (("y", case.x_TD, case.w_EHD), ("x", case.g_TH, case.w_EHD.transpose(1, 2))):
                here = world.gathered(rows[tokens_C]).view(W, W, E, -1, rows.shape[1])[:, me].float()
                out = torch.einsum("weck,enk->wecn", here, weights.float())
                values[name] = world.gathered(out)[:, me].flatten(0, 2)
            x, g = (t.view(W, E, case.per, -1) for t in (case.x_TD[:, d], case.g_TH[:, h]))
            values["w"] = world.total(torch.einsum("wech,wecd->wehd", g.float(), x.float()))[me]
        return Expected(tokens_C, h, d, values)

    def sqnr_db(self, results: tuple) -> dict[str, float]:
        y_TH, dx_TD, dw_EHD = results
        got = {"y": y_TH[self.tokens], "x": dx_TD[self.tokens], "w": dw_EHD[:, self.h][:, :, self.d]}
        return {name: sqnr_db(value, got[name]) for name, value in self.values.items()}


def check(name: str, stages: dict[str, Callable], expected: Expected, collective: dict | None) -> dict:
    """Runs it once, on poisoned memory; over another transport than `collective`, to the same bits as over that."""
    with poisoned():
        results = world.run(stages)
    sqnr = expected.sqnr_db(results)
    correct = all(value >= LEAST_SQNR_DB.get(name, LEAST_SQNR_MXFP8_DB) for value in sqnr.values())  # NaN is not
    if collective is not None:
        same = [torch.equal(a, b) for a, b in zip(results, world.run(collective), strict=True)]
        correct &= all(same)
    return {"correct": correct, "sqnr_db": {key: round(value, 1) for key, value in sqnr.items() if value == value}}


def contenders(case: Case, transport: Any, bits: bool) -> dict[str, Contender]:
    """`bits`: ours must give the bits that they give over the collective transport."""
    expected = Expected.of(case)

    def contender(name, forward, collective=None, **about):
        stages = {"forward": forward, "backward": case.backward}
        other = None if collective is None else {"forward": collective, "backward": case.backward}
        return Contender(stages, partial(check, name, stages, expected, other), about)

    found = {NCCL_BF16: contender(NCCL_BF16, over_nccl(case)),
             NCCL_MXFP8_GEMM: contender(NCCL_MXFP8_GEMM, over(Today(world.group()), case, recipe(**ALL_BF16)))}
    for name, keys in OURS.items():
        collective = None
        if bits and world.name_of(transport) != "collective":
            collective = over(world.transport("collective"), case, recipe(**keys))
        found[name] = contender(name, over(transport, case, recipe(**keys)), collective,
                                transport=world.name_of(transport))
    return found


def rate_rows(case: Case, budget_s: float) -> list[dict]:
    """Rows of a result file: an all-to-all of the tokens in bf16, and every GEMM of the pipeline in bf16 and MXFP8."""
    x, g, w, out = case.x_TD.detach(), case.g_TH, case.w_EHD.detach(), torch.empty_like(case.x_TD)
    bytes_off_rank = x.nbytes * (world.size() - 1) // world.size()
    exchange = {NCCL_BF16: _unchecked("all-to-all", lambda: dist.all_to_all_single(out, x))}
    rows = world.rows(case.described() | {"bytes": bytes_off_rank}, exchange, budget_s)
    chosen, ends_E = recipe(), case.ends_E()
    cast = partial(casts.quantize, block_size=chosen.block_size, scaling_mode=chosen.scaling_mode,
                   scale_k_major=True)
    mx_x, mx_g = cast(x), cast(g)
    operands = {"forward GEMM": ((x, w), (mx_x, _weights(w, chosen, False))),
                "dgrad GEMM": ((g, w.transpose(1, 2)), (mx_g, _weights(w, chosen, True)))}
    for operation, pairs in operands.items():
        ways = {name: _unchecked(operation, partial(grouped_mm, *pair, ends_E, covered=True))
                for name, pair in zip(("bf16", "mxfp8"), pairs, strict=True)}
        rows += world.rows(case.described(), ways, budget_s)
    columns = [casts.quantize_columns(t, chosen.block_size, chosen.scaling_mode) for t in (g, x)]
    calls = {"bf16": partial(grouped_mm_wgrad_rows, g, x, ends_E, BF16),
             "mxfp8": partial(grouped_mm_wgrad, *columns, ends_E, BF16),
             "bf16 of mxfp8 rows": partial(grouped_mm_wgrad_rows, mx_g, mx_x, ends_E, BF16),
             "mxfp8 of rows": partial(grouped_mm_wgrad_rows, mx_g, mx_x, ends_E, BF16, chosen.scaling_mode)}
    ways = {name: _unchecked("wgrad GEMM", call) for name, call in calls.items()}
    return rows + world.rows(case.described(), ways, budget_s)


def _unchecked(operation: str, call: Callable) -> Contender:
    """Run once and called correct: other benchmarks compare its results."""

    def check():
        call()
        return {"correct": True}

    return Contender({operation: call}, check)


def _weights(w_ENK: torch.Tensor, chosen: Recipe, transposed: bool) -> torch.Tensor:
    return casts.quantize_weights([w_ENK], chosen.block_size, chosen.scaling_mode, transposed)


def run(cases: list[tuple], rows: int, experts: int, budget_s: float, seconds: float, requested: str | None = None,
        bits: bool = False) -> Iterator[list[dict]]:
    for dim, hidden in world.in_time(cases, seconds):
        case = Case(rows, dim, hidden, experts)
        yield world.rows(case.described(), contenders(case, world.transport(requested), bits), budget_s)
        yield rate_rows(case, budget_s / 4)
        del case
        get_accelerator().empty_cache()


def main() -> None:
    parser = world.parser(__doc__, budget=1.0, seconds=95)
    parser.add_argument("--transport", choices=("collective", "nvlink"), help="ours (default: chosen for the machine)")
    parser.add_argument("--bits", action="store_true", help="compare ours with those over the collective transport")
    parser.add_argument("--shapes", nargs="+", type=options.dims, metavar="DIMxHIDDEN", help="other shapes")
    parser.add_argument("--rows", type=options.one_or_more,
                        help=f"rows of a rank (default: {ROWS}; of --cases tiny {TINY_ROWS})")
    parser.add_argument("--experts", type=options.one_or_more, default=EXPERTS, help="experts of a rank")
    args: argparse.Namespace = results_file.parse(parser)
    cases = args.shapes or list(SHAPES[args.cases])
    rows = args.rows or (TINY_ROWS if args.cases == "tiny" else ROWS)
    world.main("ep_pipeline", args, lambda: run(cases, rows, args.experts, args.budget,
                                                args.seconds - world.ENDING_S, args.transport, args.bits))


if __name__ == "__main__":
    main()
