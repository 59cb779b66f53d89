# SPDX-License-Identifier: Apache-2.0
"""One rank's SwiGLU experts on one GPU, forward and backward, all quantisation included.

Every recipe of ds_mxfp8_moe beside our bf16 recipe and a plain PyTorch one (torch._grouped_mm and autograd). Tokens
stand sorted by expert already: nothing is exchanged. Also how many bytes a step holds between forward and backward
and at its peak, and how long the first step of a fresh process takes with kernels in Triton's cache.

    python examples/benchmarks/kernels/expert_ffn.py [--cases short]     # run, store, show
    python examples/benchmarks/kernels/expert_ffn.py --show FILE         # table and plot of a result file
"""

import importlib
import json
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, product
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe import casts, crossover
from ds_mxfp8_moe.config import MXFP8MoEConfig, Recipe, current_device, resolve
from ds_mxfp8_moe.expert_ffn import ExpertFFN
from ds_mxfp8_moe.experts import ExpertFormula
from ds_mxfp8_moe.mx import MXTensor, sqnr_db
from ds_mxfp8_moe.routing import Routes
from ds_mxfp8_moe.transport import Plan, Transport, Wire
from lib import options, results_file, show, timing
from lib.shapes import TILE, Case, ends, padded, padded_rows, starts
from lib.timing import device, on_gpu, poisoned

BF16 = torch.bfloat16
PLAIN = "plain torch"
KEPT_IN_BF16 = "mxfp8_wgrad_with_hp, pre-activation bf16"
RECIPES = {
    "bf16": {"recipe": "bf16"},
    "mxfp8_wgrad_with_hp": {"recipe": "mxfp8_wgrad_with_hp"},
    KEPT_IN_BF16: {"recipe": "mxfp8_wgrad_with_hp", "preactivation_dtype": "bf16"},
    "mxfp8": {"recipe": "mxfp8"},
}
UNTIMED = (KEPT_IN_BF16, )  # its memory is what it is for
FIRST_STEPS = ("mxfp8_wgrad_with_hp", "mxfp8")
# Against float32 without quantisation. MXFP8 adds its own noise in five or six places of a gradient.
LEAST_SQNR_DB = {PLAIN: 38, "bf16": 38}
LEAST_SQNR_MXFP8_DB = 18


@dataclass(frozen=True)
class InPlace(Transport):
    """The transport of one rank whose tokens stand expert-sorted and padded already: dispatch quantises, no more.

    Attributes:
        plan_of_all: what `plan` returns whatever the routing; see `InPlace.of`.
    """

    plan_of_all: Plan

    @staticmethod
    def of(counts: tuple[int, ...]) -> "InPlace":
        """For groups of so many tokens, each padded to whole tiles with zero rows of weight 0."""
        group_ends = ends(padded(counts))
        rows = torch.arange(group_ends[-1], device=device())
        return InPlace(Plan(
            num_tokens=len(rows), top_k=1, tokens_per_expert=sum(counts) / len(counts), send_splits=(len(rows), ),
            recv_splits=(len(rows), ), send_token_S=rows, sent_slot_WT=rows.view(1, -1), group_ends=group_ends,
            group_ends_E=torch.tensor(group_ends, dtype=torch.int32, device=device()), slot_RK=rows.view(-1, 1),
            source_P=rows))

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int,
             meanwhile: Callable[[], None] | None = None, rows: str = "") -> Plan:
        return self.plan_of_all

    def dispatch(self, plan: Plan, x_TH: torch.Tensor, wire: Wire, weight_TK: torch.Tensor | None = None,
                 phase: str = "dispatch") -> tuple:
        weight_P = None if weight_TK is None else weight_TK.float().view(-1)
        return _quantized(x_TH, wire) if wire.mxfp8 else x_TH, weight_P

    def combine(self, plan: Plan, y_PH: torch.Tensor, wire: Wire, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        if wire.mxfp8:
            y_PH = _quantized(y_PH, wire).dequantize(dtype)
        return y_PH.to(dtype), None if weight_P is None else weight_P.view(-1, 1)


def _quantized(x_PH: torch.Tensor, wire: Wire) -> MXTensor:
    return casts.quantize(x_PH, wire.block_size, wire.scaling_mode, scale_k_major=True)


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
        starts: of the groups among its rows.
        gradients: (gradients of inputs) -> those of gate and up [E, 2F, H] and of down [E, H, F], as functions of e.
        unquantized: the selection has a recipe of MXFP8 compute in bf16.
    """

    inputs: list
    g_PH: torch.Tensor
    forward: Callable[[torch.Tensor], torch.Tensor]
    starts: tuple
    gradients: Callable[[tuple], tuple[Callable, Callable]]
    unquantized: bool = False

    def __call__(self) -> tuple:
        """The output, and the gradients of the inputs."""
        y_PH = self.forward(self.inputs[0])
        return y_PH.detach(), torch.autograd.grad(y_PH, self.inputs, self.g_PH)


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def recipe(name: str) -> Recipe:
    return resolve(MXFP8MoEConfig(enabled=True, **RECIPES[name]), *current_device())


def plain_step(shape: Shape, case: Case) -> Step:
    """On the tokens alone, without padding."""
    counts = case.counts()
    rows, E = sum(counts), case.experts
    ends_E = torch.tensor(ends(counts), dtype=torch.int32, device=device())
    inputs = [_leaf(shape.x_PH[:rows]), _leaf(shape.weight_P[:rows]), _leaf(shape.up_EGH[:E]),
              _leaf(shape.down_EHF[:E])]
    return Step(inputs, shape.g_PH[:rows], lambda x: plain_ffn(x, *inputs[1:], ends_E), starts(counts),
                lambda grads: (grads[2].__getitem__, grads[3].__getitem__))


def our_step(shape: Shape, case: Case, name: str, min_tokens_per_expert: int | None) -> Step:
    """The recipe `name`, with weights as parameters of each expert."""
    counts, E, F = case.counts(), case.experts, case.hidden
    x_TH, g_TH, weight_T = (padded_rows(x, counts) for x in (shape.x_PH, shape.g_PH, shape.weight_P))
    weights = {"gate": [_leaf(shape.up_EGH[e, :F]) for e in range(E)],
               "up": [_leaf(shape.up_EGH[e, F:]) for e in range(E)],
               "down": [_leaf(shape.down_EHF[e]) for e in range(E)]}
    formula = ExpertFormula("gated", "silu", case.dim, F, up="up", gate="gate", down="down")
    chosen = recipe(name)
    fewest = crossover.min_tokens_per_expert(min_tokens_per_expert, formula, chosen, E, device())
    ffn = ExpertFFN(formula, chosen, InPlace.of(counts), E, fewest)
    inputs = [_leaf(x_TH), _leaf(weight_T.view(-1, 1)), *chain(*weights.values())]
    expert_TK = torch.arange(E, device=device()).repeat_interleave(
        torch.tensor(padded(counts), device=device())).view(-1, 1)
    routes = Routes(expert_TK=expert_TK, weight_TK=inputs[1], num_experts=E)

    def gradients(grads):
        gate, up, down = grads[2:2 + E], grads[2 + E:2 + 2 * E], grads[2 + 2 * E:]
        return lambda e: torch.cat([gate[e], up[e]]), down.__getitem__

    few = ffn.transport.plan_of_all.tokens_per_expert < fewest
    return Step(inputs, g_TH, lambda x: ffn(x, routes, weights), starts(padded(counts)), gradients, few)


def checked_groups(counts: tuple) -> list[int]:
    """First, largest and last of the groups that have rows."""
    filled = [e for e, count in enumerate(counts) if count]
    return sorted({filled[0], max(filled, key=counts.__getitem__), filled[-1]})


class Expected:
    """Parts of a case's results, computed in float32 without quantisation: some rows, and some of one group's weight
    gradients."""

    def __init__(self, shape: Shape, case: Case, rows: int = 16, columns: int = 16):
        self.counts = counts = case.counts()
        self.group = min((e for e, count in enumerate(counts) if count), key=counts.__getitem__)
        self.h = torch.linspace(0, case.dim - 1, columns, dtype=torch.float64).round().long().to(device())
        self.f = torch.linspace(0, case.hidden - 1, columns, dtype=torch.float64).round().long().to(device())
        self.within, self.rows = {}, {}
        for e in checked_groups(counts):
            self.within[e] = torch.linspace(0, counts[e] - 1, min(rows, counts[e]),
                                            dtype=torch.float64).round().long().to(device())
            self.rows[e] = self._rows(shape, e, self.within[e] + starts(counts)[e])
        self.up, self.down = self._weights(shape, case, slice(starts(counts)[self.group], ends(counts)[self.group]))

    @staticmethod
    def _rows(shape: Shape, e: int, rows: torch.Tensor) -> tuple:
        """Output, and the gradients of rows and routing weights."""
        x, weight = (t[rows].float().requires_grad_() for t in (shape.x_PH, shape.weight_P))
        gate, up = (x @ shape.up_EGH[e].float().t()).chunk(2, dim=1)
        h = torch.nn.functional.silu(gate) * up * weight.unsqueeze(1)
        y = h @ shape.down_EHF[e].float().t()
        return y.detach(), *torch.autograd.grad(y, (x, weight), shape.g_PH[rows].float())

    def _weights(self, shape: Shape, case: Case, rows: slice) -> tuple:
        """[2 columns, columns] of the gradient of gate and up, and [columns, columns] of down's."""
        e, F = self.group, case.hidden
        gate_and_up = shape.up_EGH[e][torch.cat([self.f, self.f + F])].float()
        x, g = shape.x_PH[rows].float(), shape.g_PH[rows].float()
        pre = (x @ gate_and_up.t()).requires_grad_()
        gate, up = pre.chunk(2, dim=1)
        h = torch.nn.functional.silu(gate) * up * shape.weight_P[rows].unsqueeze(1)
        t = g @ shape.down_EHF[e][:, self.f].float()
        dpre, = torch.autograd.grad(h, pre, t)
        return dpre.t() @ x[:, self.h], g[:, self.h].t() @ h.detach()

    def sqnr_db(self, step: Step, results: tuple) -> dict[str, float]:
        """Of the output and every gradient of a step."""
        y, (dx, dweight, *_) = results[0], results[1]
        dup, ddown = (of(self.group) for of in step.gradients(results[1]))
        picked = {e: self.within[e] + step.starts[e] for e in self.rows}
        got = {name: torch.cat([out[rows].reshape(-1) for rows in picked.values()])
               for name, out in (("y", y), ("x", dx), ("weight", dweight))}
        expected = {name: torch.cat([values[i].reshape(-1) for values in self.rows.values()])
                    for i, name in enumerate(got)}
        F = dup.shape[0] // 2
        got["up"], expected["up"] = dup[torch.cat([self.f, self.f + F])][:, self.h], self.up
        got["down"], expected["down"] = ddown[self.h][:, self.f], self.down
        return {name: sqnr_db(expected[name], got[name]) for name in got}


def check(name: str, step: Step, expected: Expected) -> dict:
    """Runs it once, on poisoned memory, and then once more to see what memory it takes."""
    with poisoned():
        results = step()
    sqnr = expected.sqnr_db(step, results)
    least = LEAST_SQNR_DB.get(name, LEAST_SQNR_MXFP8_DB)
    correct = all(value >= least for value in sqnr.values())  # NaN is not
    del results
    return {"correct": correct, "sqnr_db": {key: round(value, 1) for key, value in sqnr.items() if value == value},
            **memory(step)}


def memory(step: Step) -> dict[str, int]:
    """Bytes of one step beyond its weights: held between forward and backward, without the output; and at most.

    The tokens count as held where nothing else keeps them: they come from dispatch.
    """
    if not on_gpu():
        return {}
    accelerator = get_accelerator()
    accelerator.synchronize()
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    x_PH = step.inputs[0].clone()  # no leaf, which autograd would keep alive
    y_PH = step.forward(x_PH)
    del x_PH
    held = accelerator.memory_allocated() - before - y_PH.nbytes
    grads = torch.autograd.grad(y_PH, step.inputs, step.g_PH)
    accelerator.synchronize()
    del grads
    return {"held_bytes": held, "peak_bytes": accelerator.max_memory_allocated() - before}


def measure(shape: Shape, case: Case, budget_s: float, min_tokens_per_expert: int | None) -> list[dict]:
    """The rows of one case."""
    steps = {PLAIN: plain_step(shape, case)}
    steps |= {name: our_step(shape, case, name, min_tokens_per_expert) for name in RECIPES}
    expected = Expected(shape, case)
    described = {"operation": "forward and backward", **case.as_dict(), "flops": 18 * sum(case.counts()) * case.dim
                 * case.hidden, "min_tokens_per_expert": min_tokens_per_expert}
    rows = timing.rows(described, {name: (step, partial(check, name, step, expected)) for name, step in steps.items()},
                       budget_s, UNTIMED)
    for row in rows[1:]:
        row["unquantized"] = steps[row["contender"]].unquantized
    return rows


def run(cases: list[Case], budget_s: float, min_tokens_per_expert: int | None) -> Iterator[dict]:
    """The rows of all cases; a shape's buffers are freed before the next one's are made."""
    with tqdm(total=len(cases), unit="case") as progress:
        for _, group in groupby(cases, key=lambda case: (case.dim, case.hidden)):
            same = list(group)
            shape = Shape(same)
            for case in same:
                progress.set_postfix_str(str(case))
                yield from measure(shape, case, budget_s, min_tokens_per_expert)
                progress.update()
            del shape
            get_accelerator().empty_cache()


def bytes_needed(case: Case) -> float:
    return 2 * case.rows() * (4 * case.dim + 11 * case.hidden) + 12 * case.experts * case.dim * case.hidden


def first_step_s(case: Case, name: str, min_tokens_per_expert: int | None) -> float:
    """Of this process: kernels are loaded, and compiled if they wait in no cache; imports are done before."""
    if on_gpu():
        from ds_mxfp8_moe.ops import triton_kernels
        for module in pkgutil.iter_modules(triton_kernels.__path__):
            importlib.import_module(f"{triton_kernels.__name__}.{module.name}")
    step = our_step(Shape([case]), case, name, min_tokens_per_expert)
    get_accelerator().synchronize()
    begin = time.perf_counter()
    step()
    get_accelerator().synchronize()
    return time.perf_counter() - begin


def first_steps(case: Case, names: tuple, min_tokens_per_expert: int | None) -> Iterator[dict]:
    """The first step of one fresh process for each recipe."""
    get_accelerator().empty_cache()  # the device's memory is theirs now
    for name in names:
        command = [sys.executable, __file__, "--first", json.dumps(case.as_dict()), name]
        if min_tokens_per_expert is not None:
            command += ["--min-tokens-per-expert", str(min_tokens_per_expert)]
        row = {"case": {"operation": "first step of a process", **case.as_dict()}, "contender": name}
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if ended.returncode:
            yield {**row, "correct": False, "failure": ended.stderr[-300:]}
        else:
            yield {**row, "first_s": json.loads(ended.stdout.splitlines()[-1]), "correct": True}


def main() -> None:
    parser = options.parser(__doc__)
    options.add_shapes(parser)
    parser.add_argument("--min-tokens-per-expert", type=int,
                        help="below it, the layer runs the bf16 recipe (default: what was measured for its shape and "
                        "recipe; 0: never)")
    parser.add_argument("--first", nargs=2, metavar=("CASE", "RECIPE"),
                        help="only print the seconds that this process takes for its first step")
    args = results_file.parse(parser, unwritten=("show", "first"))
    if args.show:
        show.show(args.show)
        return
    torch.manual_seed(0)
    selection = args.min_tokens_per_expert
    if args.first:
        print(first_step_s(Case(**json.loads(args.first[0])), args.first[1], selection))
        return
    cases = options.chosen(args, bytes_needed)
    if args.warm_up is not None:
        for dims, experts in options.part(product({(case.dim, case.hidden): None for case in cases}, (4, 32)), args):
            case = Case(*dims, experts, TILE, "even")
            for name in RECIPES:
                our_step(Shape([case]), case, name, 0)()
        return
    options.compile_beforehand(args)
    first = Case(cases[0].dim, cases[0].hidden, 8, 2048, "even")
    names = {"tiny": (), "short": FIRST_STEPS[-1:], "full": FIRST_STEPS}[args.cases]
    options.finish("expert_ffn", chain(run(cases, args.budget, selection), first_steps(first, names, selection)), args)


if __name__ == "__main__":
    main()
