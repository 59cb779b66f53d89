# SPDX-License-Identifier: Apache-2.0
"""What is recorded and replayed: between ranks what runs between exchanges, on one rank whole calls. Plain torch
ops stand for the kernels here."""

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from itertools import chain
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.compute import casts, recorded
from ds_mxfp8_moe.compute.formula import LowRank
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn import expert_math
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.ffn.kept_weights import KeptWeights
from ds_mxfp8_moe.ops.op_builder import replay
from ds_mxfp8_moe.transport import room_for
from ds_mxfp8_moe.transport.local import Local
from tests.support.expert_ffn_cases import HIDDEN, RECIPES, alone, formula, make_routes, problem, transport
from tests.support.slow import slow_except
from tests.support.steps_cases import equal, launches_are, programs

pytestmark = pytest.mark.skipif(not replay.ReplayBuilder().is_compatible(),
                                reason=str(replay.ReplayBuilder()._obstacle()))
# What a forward and a backward run in Python, and how often. A replay runs none of it.
PARTS = ((expert_math, ("activate", "activate_backward", "grouped_mm_wgrad_rows")), (casts, ("quantize_weights", )))
ONCE = {"activate": 1, "activate_backward": 1, "grouped_mm_wgrad_rows": 2}
CALLS = (Local, ("plan", "combine"))
FEW = 1e6  # tokens per expert, of which every call has fewer


@contextmanager
def counted(*owned):
    """How often each of these functions, given as (owner, names), runs in Python. A replay does not."""
    counts = {name: 0 for _, names in owned for name in names}

    def counting(name: str, plain: Callable) -> Callable:
        def call(*args, **keys):
            counts[name] += 1
            return plain(*args, **keys)
        return call

    with ExitStack() as stack:
        for owner, names in owned:
            stack.enter_context(mock.patch.multiple(owner, **{
                name: counting(name, getattr(owner, name)) for name in names}))
        yield counts


def trained(recipe, name, stacked=False, adapted=False, kept=False, biased=False, few=False, dtype=torch.bfloat16,
            calls=3):
    """Outputs and gradients of calls in a row, with other tokens and routes each, and other weights in the last."""
    world, rank = dist.get_world_size(), dist.get_rank()
    local = 8 // world
    experts = problem(1, name, bias=biased, dtype=dtype)[0][rank * local:(rank + 1) * local]
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
    ffn = ExpertFFN(formula(name), recipe, transport(world), local, FEW if few else 0,
                    kept=KeptWeights() if kept else None)
    results = []
    for seed in range(calls):
        torch.manual_seed(10 * seed + rank)
        if seed == calls - 1:
            with torch.no_grad():
                for weight in flat:
                    weight.mul_(0.5)
        tokens = 40 + rank + seed if world > 1 else 40  # on one rank, other numbers of them are recorded anew
        expert_TK, weight_TK = make_routes("random", tokens, 2, 8)
        x = torch.randn(tokens, HIDDEN).bfloat16().requires_grad_()
        y = ffn(x, Routes(expert_TK=expert_TK, weight_TK=weight_TK.requires_grad_(), num_experts=8), weights,
                adapters=adapters)
        results += [y.detach(), *torch.autograd.grad(y, [x, weight_TK, *wanted], torch.randn(y.shape).bfloat16())]
    return results


def both_ways(recipe, name, **keys):
    """Whether recorded and replayed calls give the same bits as others; how often functions ran in Python; and the
    number of programs, and of those that are missing."""
    torch.manual_seed(0)
    with launches_are(replayed=False):
        wanted = trained(recipe, name, **keys)
    torch.manual_seed(0)
    with launches_are(replayed=True), counted(*PARTS, CALLS) as counts:
        found = trained(recipe, name, **keys)
        return equal(wanted, found), counts, len(programs()), programs().count(None)


RECIPE_NAMES = "hp-32", "hp-128", "mxfp8-32", "mxfp8-128", "bf16"
CASES = {f"{recipe}-{name}": dict(recipe=recipe, name=name)
         for recipe, name in zip(RECIPE_NAMES, ("gelu", "swiglu", "gelu", "swiglu", "gelu"), strict=True)}
CASES |= {f"{recipe}-{name}-stacked": dict(recipe=recipe, name=name, stacked=True)
          for recipe, name in zip(RECIPE_NAMES, ("gelu", "gelu", "swiglu", "gelu", "swiglu"), strict=True)}
CASES |= {f"{recipe}-adapters": dict(recipe=recipe, name="swiglu", adapted=True)
          for recipe in ("hp-32", "mxfp8-128", "bf16")}
CASES |= {f"{recipe}-kept": dict(recipe=recipe, name="swiglu", kept=True) for recipe in ("hp-128", "mxfp8-32")}
CASES |= {"hp-32-gelu-kept": dict(recipe="hp-32", name="gelu", kept=True),
          "hp-128-biases": dict(recipe="hp-128", name="swiglu", biased=True),
          "bf16-biases-stacked": dict(recipe="bf16", name="gelu", biased=True, stacked=True),
          "mxfp8-32-kept-biases-adapters": dict(recipe="mxfp8-32", name="swiglu", kept=True, biased=True,
                                                adapted=True),
          "hp-128-few-tokens": dict(recipe="hp-128", name="swiglu", few=True, kept=True)}


def casts_of(recipe: str, few: bool = False) -> int:
    """How many times a forward and a backward quantize the weights of a GEMM."""
    return 0 if recipe == "bf16" or few else 4


@pytest.mark.parametrize("case", slow_except(CASES, "hp-128-swiglu", "bf16-swiglu-stacked", "hp-128-kept",
                                             "hp-128-biases", "hp-128-few-tokens"))
def test_replayed_steps_give_the_same_bits(ranks2, case):
    recipe, name, keys = (keys := dict(CASES[case])).pop("recipe"), keys.pop("name"), keys
    casts = casts_of(recipe, keys.get("few", False))
    once = ONCE | {"quantize_weights": casts, "plan": 0, "combine": 0}
    for same, counts, number, missing in ranks2.run(both_ways, RECIPES[recipe], name, **keys):
        assert same and missing == 0 and number >= 1 and counts == once


@pytest.mark.parametrize("case", slow_except(CASES, "hp-32-gelu", "hp-128-swiglu", "bf16-swiglu-stacked",
                                             "hp-128-kept", "mxfp8-32-kept-biases-adapters", "hp-128-few-tokens"))
def test_replayed_calls_of_one_rank_give_the_same_bits(one_rank, case):
    recipe, name, keys = (keys := dict(CASES[case])).pop("recipe"), keys.pop("name"), keys
    casts = casts_of(recipe, keys.get("few", False))
    once = ONCE | {"quantize_weights": casts, "plan": 1, "combine": 2}
    kept = casts if keys.get("kept") else 0  # each by a program of its own
    assert both_ways(RECIPES[recipe], name, **keys) == (True, once, 2 + kept, 0)


def other_dtypes(recipe, **keys):
    """Whether layers whose weights have other dtypes, and whose rows have the same, share no recordings."""
    dtypes, same = (torch.bfloat16, torch.float32), []
    for replayed in (False, True):
        with launches_are(replayed):
            torch.manual_seed(0)
            same.append([x for dtype in dtypes for x in trained(recipe, "swiglu", dtype=dtype, **keys)])
    return equal(*same) and {x.dtype for x in same[1]} == set(dtypes)


@pytest.mark.parametrize("kept", slow_except([False, True], True))
def test_weights_of_another_dtype_are_recorded_apart(ranks2, one_rank, kept):
    assert other_dtypes(RECIPES["hp-128"], kept=kept)
    assert ranks2.run(other_dtypes, RECIPES["hp-128"], kept=kept) == [True, True]


def one_call(ffn, x, g, routes, weights, frozen=False):
    x = x.clone().requires_grad_()
    y = ffn(x, routes, weights)
    return [y.detach(), *torch.autograd.grad(y, [x, *([] if frozen else chain(*weights.values()))], g)]


def layer(recipe="hp-128", **keys):
    """An FFN of one rank, and what a call of it takes. A role's weights lie in one storage, so that the distances
    between them are the same in all layers."""
    x, g, routes, weights = alone("swiglu", **keys)
    weights = {role: [*map(torch.nn.Parameter, torch.stack(of_role).detach())] for role, of_role in weights.items()}
    ffn = ExpertFFN(formula("swiglu"), RECIPES[recipe], Local(), len(weights["up"]), kept=KeptWeights())
    return ffn, x, g, routes, weights


def test_layers_share_recordings_which_hold_nothing_of_them(one_rank):
    with launches_are(replayed=False):
        wanted = one_call(*layer())
    with launches_are(replayed=True), counted(CALLS) as counts:
        first = layer()
        for _ in range(3):
            assert equal(one_call(*first), wanted)
        assert list(counts.values()) == [1, 2] and len(programs()) == 2 + 4
        held = [weakref.ref(x) for x in (first[0], *chain(*first[-1].values()), *first[0].kept._forward.values())]
        del first
        gc.collect()
        assert not any(ref() for ref in held) and len(held) == 1 + 3 * 8 + 2
        for _ in range(3):
            assert equal(one_call(*layer()), wanted)
        assert list(counts.values()) == [1, 2] and len(programs()) == 2 + 4


def test_what_a_call_depends_on_is_recorded_apart(one_rank):
    """The number of tokens, and which gradients are needed. Dropped choices are data."""
    changes = [dict(), dict(tokens=(51, )), dict(routing="dropped"), dict(frozen=True), dict(tokens=(0, ))]

    def results():
        found = []
        for change in (*changes, *changes):
            change = dict(change)
            frozen, one = change.pop("frozen", False), layer(**change)
            for of_role in one[-1].values():
                for weight in of_role:
                    weight.requires_grad_(not frozen)
            found += one_call(*one, frozen=frozen)
            with torch.no_grad():
                found.append(one[0](one[1], *one[3:]))
        return found

    with launches_are(replayed=False):
        wanted = results()
    with launches_are(replayed=True), counted(CALLS) as counts:
        assert equal(results(), wanted)
        # Two numbers of tokens, with a backward and without; and the calls without tokens, which run in Python.
        forwards, backwards = 2 * 2 + 2 * 2, 3 + 2
        assert counts == {"plan": forwards, "combine": forwards + backwards}


def test_calls_without_a_recording_give_the_same_bits(one_rank, monkeypatch):
    monkeypatch.setattr(recorded, "MOST_DISTANCES", 0)
    same, counts, *none = both_ways(RECIPES["mxfp8-32"], "swiglu", kept=True, biased=True)
    assert same and none == [0, 0] and counts == {
        **{name: 3 * times for name, times in ONCE.items()}, "quantize_weights": 2 * 4, "plan": 3, "combine": 6}


def test_few_sizes_hold_all_numbers_of_rows():
    sizes = {room_for(rows) for rows in range(0, 1 << 20, 128)}
    assert all(rows <= room_for(rows) <= rows + max(128, rows // 16) for rows in range(0, 1 << 20, 128))
    assert all(size % 128 == 0 for size in sizes) and len(sizes) == 16 + 16 * 9 + 1
