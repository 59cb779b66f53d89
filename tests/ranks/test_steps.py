# SPDX-License-Identifier: Apache-2.0
"""Between ranks, what runs between exchanges is recorded and replayed. Plain torch ops stand for the kernels here."""

from contextlib import contextmanager
from itertools import chain
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from slow import slow_except
from test_expert_ffn import HIDDEN, RECIPES, formula, make_routes, problem, transport

from ds_mxfp8_moe.compute import grouped_gemm
from ds_mxfp8_moe.compute.formula import LowRank
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn import expert_ffn
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.ffn.expert_math import ExpertMath
from ds_mxfp8_moe.ffn.kept_weights import KeptWeights
from ds_mxfp8_moe.ops.op_builder import replay
from ds_mxfp8_moe.ops.triton_kernels import recording
from ds_mxfp8_moe.transport import room_for

pytestmark = pytest.mark.skipif(not replay.ReplayBuilder().is_compatible(),
                                reason=str(replay.ReplayBuilder()._obstacle()))
STEPS = "_forward_rows", "_backward_to_dpre", "_backward_to_dx", "_ups_wgrad", "_quantize_weights"


@contextmanager
def steps_are(recorded: bool):
    """Within it, steps are recorded and replayed on the CPU, or not."""
    executor = replay.ReplayBuilder().jit_load() if recorded else None
    with mock.patch.object(expert_ffn, "executor_for", lambda device: executor), \
            mock.patch.object(recording.launcher, "current_stream", lambda: lambda device: 0), \
            mock.patch.object(recording, "_PROGRAMS", {}), \
            mock.patch.object(grouped_gemm, "emulated", lambda device, dtype: True):  # else an op without tensors
        yield


@contextmanager
def counted():
    """How often each step runs in Python. A replay does not."""
    counts = dict.fromkeys(STEPS, 0)

    def counting(name: str, plain):
        def call(*args, **keys):
            counts[name] += 1
            return plain(*args, **keys)
        return call

    with mock.patch.multiple(ExpertMath, **{name: counting(name, getattr(ExpertMath, name)) for name in STEPS}):
        yield counts


def trained(recipe, name, stacked, adapted, kept, calls=3):
    """Outputs and gradients of calls in a row, with other tokens and routes each, and other weights in the last."""
    rank, local = dist.get_rank(), 8 // dist.get_world_size()
    experts = problem(1, name, dtype=torch.bfloat16)[0][rank * local:(rank + 1) * local]
    weights = {role: [torch.nn.Parameter(e[role]) for e in experts] for role in experts[0]}
    if stacked:
        weights = {role: torch.nn.Parameter(torch.stack(list(values)).detach()) for role, values in weights.items()}
    flat = list(chain(*([value] if stacked else value for value in weights.values())))
    adapters = {}
    if adapted:
        outs = {"up": 2 * experts[0]["up"].shape[0], "down": HIDDEN}
        ins = {"up": HIDDEN, "down": experts[0]["up"].shape[0]}
        adapters = {gemm: LowRank(*(torch.randn(local, *shape, dtype=torch.bfloat16).mul(0.05).requires_grad_()
                                    for shape in ((8, ins[gemm]), (outs[gemm], 8)))) for gemm in outs}
    wanted = [*flat, *chain(*adapters.values())]
    ffn = ExpertFFN(formula(name), recipe, transport(dist.get_world_size()), local,
                    kept=KeptWeights() if kept else None)
    results = []
    for seed in range(calls):
        torch.manual_seed(10 * seed + rank)
        if seed == calls - 1:
            with torch.no_grad():
                for weight in flat:
                    weight.mul_(0.5)
        expert_TK, weight_TK = make_routes("random", 40 + rank + seed, 2, 8)
        x = torch.randn(len(expert_TK), HIDDEN).bfloat16().requires_grad_()
        y = ffn(x, Routes(expert_TK=expert_TK, weight_TK=weight_TK.requires_grad_(), num_experts=8), weights,
                adapters=adapters)
        results += [y.detach(), *torch.autograd.grad(y, [x, weight_TK, *wanted], torch.randn(y.shape).bfloat16())]
    return results


def both_ways(*case):
    """Which results differ; how often steps ran in Python; and the programs that there are not."""
    torch.manual_seed(0)
    with steps_are(recorded=False):
        wanted = trained(*case)
    torch.manual_seed(0)
    with steps_are(recorded=True), counted() as counts:
        found = trained(*case)
        programs = [program for found in recording._PROGRAMS.values() for program, _ in found.values()]
    return [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if not torch.equal(a, b)], counts, (
        len(programs), programs.count(None))


RECIPE_NAMES = "hp-32", "hp-128", "mxfp8-32", "mxfp8-128", "bf16"
CASES = {f"{recipe}-{name}": (recipe, name, False, False, False)
         for recipe, name in zip(RECIPE_NAMES, ("linear", "swiglu", "gelu", "swiglu", "linear"), strict=True)}
CASES |= {f"{recipe}-{name}-stacked": (recipe, name, True, False, False)
          for recipe, name in zip(RECIPE_NAMES, ("gelu", "linear", "swiglu", "gelu", "swiglu"), strict=True)}
CASES |= {f"{recipe}-adapters": (recipe, "swiglu", False, True, False) for recipe in ("hp-32", "mxfp8-128", "bf16")}
CASES |= {f"{recipe}-kept": (recipe, "swiglu", False, False, True) for recipe in ("hp-128", "mxfp8-32")}


@pytest.mark.parametrize("case", slow_except(CASES, "hp-128-swiglu", "bf16-swiglu-stacked", "hp-128-kept"))
def test_replayed_steps_give_the_same_bits(ranks2, case):
    recipe, name, *others = CASES[case]
    gemms = 1 if name == "linear" else 2
    once = dict.fromkeys(STEPS, 1) | {"_quantize_weights": 0 if recipe == "bf16" else 2 * gemms}
    if name == "linear":  # its backward is not made of steps
        once |= dict.fromkeys(("_backward_to_dpre", "_backward_to_dx", "_ups_wgrad"), 0)
        once["_quantize_weights"] = 0 if recipe == "bf16" else 1 + 3
    for different, counts, (programs, missing) in ranks2.run(both_ways, RECIPES[recipe], name, *others):
        assert different == [] and missing == 0 and programs >= 1 and counts == once


def test_few_sizes_hold_all_numbers_of_rows():
    sizes = {room_for(rows) for rows in range(0, 1 << 20, 128)}
    assert all(rows <= room_for(rows) <= rows + max(128, rows // 16) for rows in range(0, 1 << 20, 128))
    assert all(size % 128 == 0 for size in sizes) and len(sizes) == 16 + 16 * 9 + 1
