# SPDX-License-Identifier: Apache-2.0
"""One rank's SwiGLU experts on one GPU, forward and backward, all quantization included.

Every recipe of ds_mxfp8_moe beside our bf16 recipe and a plain PyTorch one (torch._grouped_mm and autograd). Tokens
stand sorted by expert already: nothing is exchanged. Also how many bytes a step holds between forward and backward
and at its peak.

    python examples/benchmarks/kernels/expert_ffn.py [--cases short]     # run, store, show
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.compute import casts, crossover
from ds_mxfp8_moe.compute.formula import ExpertFormula
from ds_mxfp8_moe.compute.mx import MXTensor
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.transport import Plan, RowFormat, Transport
from kernels import shapes
from kernels.shapes import Case, ends, padded, padded_rows, starts
from lib import run, show, timing
from lib.show import Measure, bar
from lib.timing import Contender, poisoned
from lib.world import BF16, device, on_gpu, recipe

STEP = "forward and backward"
PLAIN, BF16_RECIPE, HP, MXFP8 = "plain torch", "bf16", "mxfp8_wgrad_with_hp", "mxfp8"
KEPT_IN_BF16 = "mxfp8_wgrad_with_hp, pre-activation bf16"
RECIPES = {
    BF16_RECIPE: {"recipe": "bf16"},
    HP: {"recipe": "mxfp8_wgrad_with_hp"},
    KEPT_IN_BF16: {"recipe": "mxfp8_wgrad_with_hp", "preactivation_dtype": "bf16"},
    MXFP8: {"recipe": "mxfp8"},
}
UNTIMED = (KEPT_IN_BF16, )  # its memory is what it is for
# Against plain PyTorch in bf16. MXFP8 adds its own noise in five or six places of a gradient.
LEAST_SQNR_DB, LEAST_SQNR_MXFP8_DB = 38, 18


class InPlace(Transport):
    """The transport of one rank whose tokens stand expert-sorted and padded already: dispatch quantizes, no more."""

    def __init__(self, counts: tuple[int, ...]):
        """For groups with these numbers of tokens, each padded to whole tiles with zero rows of weight 0."""
        group_ends = ends(padded(counts))
        rows = torch.arange(group_ends[-1], device=device())
        self.plan_of_all = Plan(
            num_tokens=len(rows), top_k=1, tokens_per_expert=sum(counts) / len(counts), send_splits=(len(rows), ),
            recv_splits=(len(rows), ), send_token_S=rows, sent_slot_WT=rows.view(1, -1),
            group_ends_E=torch.tensor(group_ends, dtype=torch.int32, device=device()), slot_RK=rows.view(-1, 1),
            source_P=rows)

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int,
             meanwhile: Callable[[], None] | None = None, rows: str = "") -> Plan:
        return self.plan_of_all

    def dispatch(self, plan: Plan, x_TH: torch.Tensor, row_format: RowFormat, weight_TK: torch.Tensor | None = None,
                 phase: str = "dispatch") -> tuple:
        weight_P = None if weight_TK is None else weight_TK.float().view(-1)
        return _quantized(x_TH, row_format) if row_format.mxfp8 else x_TH, weight_P

    def combine(self, plan: Plan, y_PH: torch.Tensor, row_format: RowFormat, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        if row_format.mxfp8:
            y_PH = _quantized(y_PH, row_format).dequantize(dtype)
        return y_PH.to(dtype), None if weight_P is None else weight_P.view(-1, 1)


def _quantized(x_PH: torch.Tensor, row_format: RowFormat) -> MXTensor:
    return casts.quantize(x_PH, row_format.block_size, row_format.scaling_mode, scale_k_major=True)


def plain_ffn(x_PH: torch.Tensor, weight_P: torch.Tensor, up_EGH: torch.Tensor, down_EHF: torch.Tensor,
              ends_E: torch.Tensor) -> torch.Tensor:
    """What one writes in PyTorch: two grouped GEMMs and an activation; autograd does the rest."""
    gate_PF, up_PF = torch._grouped_mm(x_PH, up_EGH.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    h_PF = torch.nn.functional.silu(gate_PF) * up_PF * weight_P.unsqueeze(1).to(x_PH.dtype)
    return torch._grouped_mm(h_PF, down_EHF.transpose(1, 2), offs=ends_E)


class Shape:
    """Tokens, gradients and weights of one shape, for the most rows and experts of its cases."""

    def __init__(self, cases: list[Case]):
        H, F = cases[0].dim, cases[0].hidden
        P, E = max(case.rows() for case in cases), max(case.experts for case in cases)
        self.x_PH = torch.randn(P, H, dtype=BF16, device=device())
        self.g_PH = torch.randn(P, H, dtype=BF16, device=device())
        self.weight_P = torch.rand(P, device=device())
        # Gate, then up, as they lie in ZeRO's flat buffers.
        self.up_EGH = torch.randn(E, 2 * F, H, dtype=BF16, device=device()) / H**0.5
        self.down_EHF = torch.randn(E, H, F, dtype=BF16, device=device()) / F**0.5


class Step(NamedTuple):
    """One contender's forward and backward.

    Attributes:
        inputs: leaves: rows, routing weights, then all expert weights.
        forward: takes rows in place of the first input.
        counts, starts: of the groups' tokens, and where they begin among its rows.
        gradients: (gradients of inputs, e) -> those of an expert's gate and up [2F, H] and of its down [H, F].
        unquantized: the selection has a recipe of MXFP8 compute in bf16.
    """

    inputs: list
    g_PH: torch.Tensor
    forward: Callable[[torch.Tensor], torch.Tensor]
    counts: tuple
    starts: tuple
    gradients: Callable[[tuple, int], tuple]
    unquantized: bool = False

    def __call__(self) -> tuple:
        """The output, and the gradients of the inputs."""
        y_PH = self.forward(self.inputs[0])
        return y_PH.detach(), torch.autograd.grad(y_PH, self.inputs, self.g_PH)


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def plain_step(shape: Shape, case: Case) -> Step:
    """On the tokens alone, without padding."""
    counts = case.counts()
    rows, E = sum(counts), case.experts
    ends_E = torch.tensor(ends(counts), dtype=torch.int32, device=device())
    inputs = [_leaf(shape.x_PH[:rows]), _leaf(shape.weight_P[:rows]), _leaf(shape.up_EGH[:E]),
              _leaf(shape.down_EHF[:E])]
    return Step(inputs, shape.g_PH[:rows], lambda x: plain_ffn(x, *inputs[1:], ends_E), counts, starts(counts),
                lambda grads, e: (grads[2][e], grads[3][e]))


def our_step(shape: Shape, case: Case, name: str, min_tokens_per_expert: int | None) -> Step:
    """The recipe `name`, with weights as parameters of each expert."""
    counts, E, F = case.counts(), case.experts, case.hidden
    x_TH, g_TH, weight_T = (padded_rows(x, counts) for x in (shape.x_PH, shape.g_PH, shape.weight_P))
    weights = {"gate": [_leaf(shape.up_EGH[e, :F]) for e in range(E)],
               "up": [_leaf(shape.up_EGH[e, F:]) for e in range(E)],
               "down": [_leaf(shape.down_EHF[e]) for e in range(E)]}
    formula = ExpertFormula("gated", "silu", case.dim, F, up="up", gate="gate", down="down")
    chosen = recipe(**RECIPES[name])
    fewest = min_tokens_per_expert
    if fewest is None:
        fewest = crossover.break_even_tokens(formula, chosen, E, device()) if chosen.quantize_gemm else 0
    ffn = ExpertFFN(formula, chosen, InPlace(counts), E, fewest)
    inputs = [_leaf(x_TH), _leaf(weight_T.view(-1, 1)), *chain(*weights.values())]
    expert_TK = torch.arange(E, device=device()).repeat_interleave(
        torch.tensor(padded(counts), device=device())).view(-1, 1)
    routes = Routes(expert_TK=expert_TK, weight_TK=inputs[1], num_experts=E)

    def gradients(grads, e):
        return torch.cat([grads[2 + e], grads[2 + E + e]]), grads[2 + 2 * E + e]

    few = ffn.transport.plan_of_all.tokens_per_expert < fewest
    return Step(inputs, g_TH, lambda x: ffn(x, routes, weights), counts, starts(padded(counts)), gradients, few)


def compared(step: Step, results: tuple) -> dict[str, torch.Tensor]:
    """Some rows of the output and of the tokens' gradients, and the weights' gradients of the smallest group."""
    y, (dx, dweight, *_) = results[0], results[1]
    rows, e = shapes.some_rows(step.counts, step.starts), shapes.filled(step.counts)[-1]
    dup, ddown = step.gradients(results[1], e)
    # Clones: a view would keep the gradients of all experts.
    return {"y": y[rows], "x": dx[rows], "weight": dweight.view(-1)[rows], "up": dup.clone(), "down": ddown.clone()}


def check(name: str, step: Step, plain: Step) -> dict:
    """Runs it once, on poisoned memory, compares with plain PyTorch, and runs it once more to see what memory it
    takes."""
    expected = compared(plain, plain())
    with poisoned():
        got = compared(step, step())
    least = LEAST_SQNR_DB if name in (PLAIN, BF16_RECIPE) else LEAST_SQNR_MXFP8_DB
    return timing.close(expected, got, least) | memory(step)


def memory(step: Step) -> dict[str, int]:
    """Bytes of one step beyond its weights: held between forward and backward, without the output; and at most.

    The tokens count as held where nothing else keeps them: they come from dispatch.
    """
    if not on_gpu():
        return {}
    held = 0

    def once() -> None:
        nonlocal held
        before = get_accelerator().memory_allocated()
        x_PH = step.inputs[0].clone()  # no leaf, which autograd would keep alive
        y_PH = step.forward(x_PH)
        del x_PH
        held = get_accelerator().memory_allocated() - before - y_PH.nbytes
        torch.autograd.grad(y_PH, step.inputs, step.g_PH)

    peak = timing.peak_bytes(once)
    return {"held_bytes": held, "peak_bytes": peak}


def measure(shape: Shape, case: Case, budget_s: float, min_tokens_per_expert: int | None) -> list[dict]:
    """The rows of one case."""
    steps = {PLAIN: plain_step(shape, case)}
    steps |= {name: our_step(shape, case, name, min_tokens_per_expert) for name in RECIPES}
    described = asdict(case) | {"flops": 18 * sum(case.counts()) * case.dim * case.hidden,
                                  "min_tokens_per_expert": min_tokens_per_expert}
    contenders = {name: Contender({STEP: step}, partial(check, name, step, steps[PLAIN]), timed=name not in UNTIMED)
                  for name, step in steps.items()}
    rows = timing.rows(described, contenders, budget_s)
    for row in rows[1:]:
        row["unquantized"] = steps[row["contender"]].unquantized
    return rows


def measured_rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    torch.manual_seed(0)
    for shape, case in shapes.with_buffers(shapes.cases(args.cases, bytes_needed), Shape, args.seconds):
        yield measure(shape, case, args.budget, args.min_tokens_per_expert)
        del shape


def bytes_needed(case: Case) -> float:
    return 2 * case.rows() * (4 * case.dim + 11 * case.hidden) + 12 * case.experts * case.dim * case.hidden


# ---- how results are shown ------------------------------------------------------------------------------------------


MXFP8_RECIPES = (HP, MXFP8)


def of_large_experts(case: dict) -> bool:
    return (case["dim"], case["hidden"]) in ((8192, 5120), (7168, 2048))


def is_large(case: dict) -> bool:
    return of_large_experts(case) and case["tokens_per_expert"] == 16384


def prepare(result: dict) -> list[dict]:
    """An MXFP8 recipe that computed in bf16 saves no memory: its rows do not say what it takes."""
    return [{key: value for key, value in row.items() if not (row.get("unquantized") and key.endswith("_bytes"))}
            for row in result["rows"] if row["case"]["operation"] == STEP]


MEASURES = [
    Measure(f"8192x5120 and 7168x2048, 16384 tokens each: {HP} over bf16", (HP, ), BF16_RECIPE, when=is_large,
            bars=(bar(1.2), )),
    Measure("8192x5120 and 7168x2048, 16384 tokens each: mxfp8 over bf16", (MXFP8, ), BF16_RECIPE, when=is_large,
            bars=(bar(1.35), )),
    Measure("smaller shapes from 2048 tokens each: both MXFP8 recipes over bf16", MXFP8_RECIPES, BF16_RECIPE,
            when=lambda case: not of_large_experts(case) and case["tokens_per_expert"] >= 2048, bars=(bar(1.1), )),
    Measure("every case, min_tokens_per_expert left out: both MXFP8 recipes over bf16", MXFP8_RECIPES, BF16_RECIPE,
            when=lambda case: case.get("min_tokens_per_expert") is None, bars=(bar(0.98), )),
    Measure("our bf16 recipe over plain torch", (BF16_RECIPE, ), PLAIN, bars=(bar(1.0), )),
    Measure("bytes held for backward, of bf16's", MXFP8_RECIPES, BF16_RECIPE, "held_bytes", better=show.SMALLER,
            form="{:.1%}", bars=(bar(0.55), )),
    Measure("bytes held with a pre-activation in bf16, of bf16's", (KEPT_IN_BF16, ), BF16_RECIPE, "held_bytes",
            better=show.SMALLER, form="{:.1%}", bars=(bar(0.8), )),
    Measure("peak memory of a step, of bf16's", MXFP8_RECIPES, BF16_RECIPE, "peak_bytes", better=show.SMALLER,
            form="{:.1%}", bars=(bar(1.0), ))]


def plot(result: dict, pyplot) -> None:
    over = {"x": "tokens_per_expert", "keys": ("dim", "hidden"), "over": BF16_RECIPE, "when": shapes.plotted}
    panels = show.points_over(result, contenders=(PLAIN, *MXFP8_RECIPES), title="time, ", **over)
    panels |= show.points_over(result, contenders=(PLAIN, *MXFP8_RECIPES, KEPT_IN_BF16), figure="held_bytes",
                               title="bytes held, ", **over)
    show.lines(pyplot, panels, "tokens per expert", "of our bf16's", xscale="log")


SHOWN = show.Shown("expert_ffn", MEASURES, [show.MS, ("held, MiB", "held_bytes", show.MIB),
                                            ("peak, MiB", "peak_bytes", show.MIB)], plot,
                   ratios=((PLAIN, BF16_RECIPE), (BF16_RECIPE, HP), (BF16_RECIPE, MXFP8)),
                   prepare=prepare)


# ---- command line ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = run.timed_parser(__doc__, budget=0.1)
    parser.add_argument("--min-tokens-per-expert", type=int,
                        help="below it, the layer runs the bf16 recipe (default: what was measured for its shape and "
                        "recipe; 0: never)")
    run.main(SHOWN, parser, measured_rows)


if __name__ == "__main__":
    main()
