# SPDX-License-Identifier: Apache-2.0
"""An exchange beside a GEMM, by the multiprocessors that it gets: what the constants of
ds_mxfp8_moe/transport/overlap.py rest on.

Forward, where the first GEMM begins ahead of its dispatch's end, or the last one feeds the combine, and backward,
where the gradient's way home runs beside the weight gradient, of ep_pipeline.py's pipelines, whose tokens have one
choice, and of SwiGLU experts whose tokens have several: one after the other, with the model's share, and with others.
On CPUs the collective transport stands in, which knows no share.

    torchrun --nproc-per-node 8 examples/benchmarks/overlap.py       # run, write a result file, print its table
    python examples/benchmarks/overlap.py --show FILE                # table and plot of a result file
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

import dispatch_combine
import ep_pipeline
import results_file
import world
from ds_mxfp8_moe.expert_ffn import ExpertFFN
from ds_mxfp8_moe.experts import ExpertFormula
from ds_mxfp8_moe.routing import Routes
from ds_mxfp8_moe.transport.nvlink import NVLink
from show_ranks import AHEAD, FED, MODELS_SHARE, ONE_BY_ONE
from timing import poisoned
from world import Contender

RECIPES = {"mxfp8_wgrad_with_hp": {"recipe": "mxfp8_wgrad_with_hp"}, "mxfp8": {"recipe": "mxfp8"},
           "all MXFP8": {"recipe": "mxfp8", **ep_pipeline.ALL_MXFP8}}
PASSES = ("forward", "backward")
SHARES = (8, 12, 16, 20, 24, 28, 32, 40, 48)


@dataclass(frozen=True)
class Case:
    """top_k 1: the pipeline, on `tokens` rows of a rank and `experts` of a rank; else SwiGLU experts, as many.
    forward: the first GEMM begins AHEAD of its dispatch's end, or the last one has its combine FED."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    recipe: str
    forward: str = AHEAD


@dataclass(frozen=True)
class Shared(NVLink):
    """Gives exchanges `share` multiprocessors; None: the model's. What they got is in `picked`: none where nothing can
    run beside. With `feeds`, dispatches run alone."""

    share: int | None = None
    picked: dict = field(default_factory=lambda: dict.fromkeys(PASSES, 0))

    def sms_beside(self, *args, steps: int | None = None) -> int:
        sms = super().sms_beside(*args, steps=steps) if self.share is None else self.share
        self.picked["forward" if steps else "backward"] = sms
        return sms

    def sms_ahead(self, *args) -> tuple[int, float]:
        if self.feeds or self.share == 0:
            return 0, 0.0
        given = {} if self.share is None else {"shares": (self.share, ), "gain": 0}
        sms, first = super().sms_ahead(*args, **given)
        self.picked["forward"] = max(self.picked["forward"], sms)
        return sms, first


def with_share(transport: Any, share: int | None, forward: str = AHEAD) -> Any:
    if not isinstance(transport, NVLink):
        return transport
    given = {one.name: getattr(transport, one.name) for one in fields(NVLink)}
    return Shared(**given | {"feeds": forward == FED}, share=share)


def experts(case: Case) -> Callable[[Any], dict]:
    """SwiGLU experts on random tokens: over a transport, the stages of a step."""
    W, E = world.size(), case.experts
    x_TH, g_TH = world.randn(case.tokens, case.dim).requires_grad_(), world.randn(case.tokens, case.dim)
    shapes = {"gate": (E, case.hidden, case.dim), "up": (E, case.hidden, case.dim), "down": (E, case.dim, case.hidden)}
    weights = {role: (world.randn(*shape) / shape[-1]**0.5).requires_grad_() for role, shape in shapes.items()}
    chosen = dispatch_combine.Case(case.tokens, case.dim, case.top_k, W * E, "random")
    routes = Routes(expert_TK=chosen.expert_TK(), num_experts=W * E,
                    weight_TK=torch.rand(case.tokens, case.top_k, device=x_TH.device))
    formula = ExpertFormula("gated", "silu", case.dim, case.hidden, gate="gate", up="up", down="down")

    def stages(transport: Any) -> dict[str, Callable]:
        ffn = ExpertFFN(formula, ep_pipeline.recipe(**RECIPES[case.recipe]), transport, E)
        return {"forward": lambda: ffn(x_TH, routes, weights),
                "backward": lambda y: (y.detach(), *torch.autograd.grad(y, (x_TH, *weights.values()), g_TH))}

    return stages


def pipeline(case: Case) -> Callable[[Any], dict]:
    """The same of a pipeline."""
    of = ep_pipeline.Case(case.tokens, case.dim, case.hidden, case.experts)
    recipe = ep_pipeline.recipe(**RECIPES[case.recipe])
    return lambda transport: {"forward": ep_pipeline.over(transport, of, recipe), "backward": of.backward}


def check(stages: dict, one_by_one: dict) -> dict:
    """The bits of one after the other, on poisoned memory."""
    with poisoned():
        results, expected = world.run(stages), world.run(one_by_one)
    return {"correct": all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))}


def measure(case: Case, budget_s: float) -> list[dict]:
    make = pipeline(case) if case.top_k == 1 else experts(case)
    base = world.transport()
    found = {ONE_BY_ONE: 0, MODELS_SHARE: None} | {str(share): share for share in SHARES}
    transports = {name: with_share(base, share, case.forward) for name, share in found.items()}
    stages = {name: make(transport) for name, transport in transports.items()}
    # Filled while they are checked.
    shares = {name: getattr(transport, "picked", dict.fromkeys(PASSES, 0)) for name, transport in transports.items()}
    contenders = {name: Contender(calls, partial(check, calls, stages[ONE_BY_ONE]), {"share": shares[name]})
                  for name, calls in stages.items()}
    return world.rows(asdict(case), contenders, budget_s)


def cases(which: str) -> list[Case]:
    if which == "tiny":
        return [Case(512, 128, 128, 2, top_k, "mxfp8_wgrad_with_hp") for top_k in (1, 2)]
    sizes = [(131072, dim, hidden, ep_pipeline.EXPERTS, 1) for dim, hidden in ep_pipeline.SHAPES["full"]]
    sizes += [(8192, 2048, 1408, 64 // world.size(), 6), (16384, 4096, 1024, 64 // world.size(), 8)]
    found = [Case(*size, recipe, forward) for forward in (AHEAD, FED) for size in sizes for recipe in RECIPES
             if forward == AHEAD or size[-1] == 1]
    return found[::2] if which == "short" else found


def run(which: str, budget_s: float, seconds: float) -> Iterator[list[dict]]:
    for case in world.in_time(cases(which), seconds):
        yield measure(case, budget_s)
        get_accelerator().empty_cache()


def main() -> None:
    args = results_file.parse(world.parser(__doc__, budget=0.2, seconds=120))
    world.main("overlap", args, lambda: run(args.cases, args.budget, args.seconds - world.ENDING_S))


if __name__ == "__main__":
    main()
