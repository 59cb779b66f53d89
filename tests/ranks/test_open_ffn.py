# SPDX-License-Identifier: Apache-2.0
"""OpenFFN, which runs a model's own code between the GEMMs, against plain float32 torch and against ExpertFFN."""

import weakref
from contextlib import nullcontext
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.compute import casts
from ds_mxfp8_moe.compute.formula import LowRank
from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.frozen_weights import FrozenWeights
from ds_mxfp8_moe.ffn.kept_weights import KeptWeights
from ds_mxfp8_moe.ffn.open_ffn import OpenFFN, OpenFormula
from ds_mxfp8_moe.transport.deadline import absence
from ds_mxfp8_moe.transport.local import Local
from tests.support.autoep_models import batch, engine_of
from tests.support.expert_ffn_cases import BF16, FFN, HIDDEN, RECIPES, problem
from tests.support.invented_moe import InventedConfig, InventedExperts, InventedModel
from tests.support.open_ffn_cases import LEAST, Model, assert_near_plain_torch, decibels, flat, make_adapters, run
from tests.support.slow import slow_except

CASES = ["silu", "softplus", "mlp", "in_turn", "in place", "normed", "hostile"]


@pytest.mark.parametrize("case", CASES)
def test_equals_plain_torch_without_quantization(ranks2, case):
    assert_near_plain_torch(ranks2, BF16, case, 90, bias=case != "hostile", adapted=True)


@pytest.mark.parametrize("recipe_name", ["hp-32", "mxfp8-128", "all-wires-mxfp8"])
@pytest.mark.parametrize("case", ["in_turn", "mlp", "normed"])
def test_in_mxfp8(ranks2, case, recipe_name):
    assert_near_plain_torch(ranks2, RECIPES[recipe_name], case, LEAST, bias=True, adapted=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe_name", ["bf16", "hp-128"])
def test_on_one_rank_and_on_four(ranks4, recipe_name):
    for case in ("softplus", "normed"):
        least = 90 if recipe_name == "bf16" else LEAST
        assert_near_plain_torch(None, RECIPES[recipe_name], case, least, stacked=False)
        assert_near_plain_torch(ranks4, RECIPES[recipe_name], case, least, top_k=4)


@pytest.mark.parametrize("recipe_name", ["bf16", "hp-32"])
@pytest.mark.parametrize("keys", [
    {"routing": "dropped"}, {"routing": "one-expert"}, {"routing": "nowhere"}, {"tokens": (0, 20)},
    {"tokens": (20, 0)}, {"tokens": (0, 0)}, {"tokens": (1, 129)}], ids=str)
def test_padding_and_hard_routings(ranks2, keys, recipe_name):
    """The hostile formula computes NaN in rows of zeros."""
    least = 60 if recipe_name == "bf16" else LEAST - 2
    for result in assert_near_plain_torch(ranks2, RECIPES[recipe_name], "hostile", least, **keys):
        assert all(one.isfinite().all() for one in flat(result))
    if recipe_name == "bf16":
        assert_near_plain_torch(None, BF16, "hostile", 60, **keys)


@pytest.mark.parametrize("recipe_name, bias", slow_except(
    [(recipe_name, bias) for recipe_name in RECIPES for bias in (False, True)],
    *((recipe_name, bool(i % 2)) for i, recipe_name in enumerate(RECIPES))))
def test_is_as_exact_as_the_fused_kernels(ranks2, recipe_name, bias):
    sizes = dict(hidden=256, ffn=512, tokens=(256, 192), num_experts=4, dtype=torch.bfloat16, bias=bias)
    ours, fused = (run(ranks2, RECIPES[recipe_name], "silu", fused=name, **sizes) for name in (None, "swiglu"))
    ours_db, fused_db = (decibels(results, "silu", **sizes) for results in (ours, fused))
    # In bf16, torch rounds silu(gate), its product with up, and their gradients. Kernels do not.
    slack = 3 if recipe_name == "bf16" else 1
    assert all(ours_db[name] >= fused_db[name] - slack for name in fused_db), (ours_db, fused_db)
    assert min(ours_db.values()) >= (43 if recipe_name == "bf16" else LEAST), ours_db


@pytest.mark.parametrize("recipe_name", ["hp-32", "mxfp8-128"])
def test_every_way_to_run_gives_the_same_bits(ranks2, recipe_name):
    """Twice, and with activation checkpointing of both kinds."""
    for case in ("normed", "softplus"):
        wanted = run(ranks2, RECIPES[recipe_name], case, bias=True)
        for how in (None, "reentrant", "not reentrant"):
            for one, other in zip(wanted, run(ranks2, RECIPES[recipe_name], case, bias=True, how=how), strict=True):
                assert all(map(torch.equal, flat(one), flat(other)))


# ---------------------------------------------------------------- one call


def alone(case="normed", dtype=torch.bfloat16, trained=True, **keys):
    """A model's formula and its parameters, tokens, gradient, routes and weights of a rank that has all experts."""
    experts, (x, ), (g, ), ((expert_TK, weight_TK), ) = problem(1, "swiglu", dtype=dtype, **keys)
    weights = {role: torch.nn.Parameter(torch.stack([e[role] for e in experts]), requires_grad=trained)
               for role in experts[0]}
    model = Model(case)
    return (model.formula(), [*model.parameters()], x.requires_grad_(), g,
            Routes(expert_TK=expert_TK, weight_TK=weight_TK.requires_grad_(), num_experts=len(experts)), weights)


def test_without_gradients_the_output_is_the_same_and_nothing_is_kept():
    formula_, parameters, x, _, routes, weights = alone()
    seen = []

    class Watching(Local):

        def dispatch(self, *args, **keys):
            rows = super().dispatch(*args, **keys)
            seen.append(weakref.ref(rows[0].qdata))
            return rows

        def combine(self, *args, **keys):
            seen.append(seen.pop()() is not None)
            return super().combine(*args, **keys)

    ffn = OpenFFN(formula_, RECIPES["hp-32"], Watching(), 8)
    wanted = ffn(x, routes, weights)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(ffn(x, routes, weights), wanted)
    assert wanted.requires_grad and seen == [True, False, False]


@pytest.mark.parametrize("case", ["normed", "softplus"])
def test_autocast(case):
    """Tokens, weights and norm are float32. The model's code runs under autocast, which casts as for any module."""
    formula_, parameters, x, g, routes, weights = alone(case, dtype=torch.float32, bias=True)
    inside = []
    leaves = [x, routes.weight_TK, *parameters, *weights.values()]

    def between(pre):
        inside.append((pre.dtype, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return formula_.between(pre)

    def gradients(context, x):
        with context:
            y = OpenFFN(OpenFormula(between, formula_.after), RECIPES["hp-32"], Local(), 8)(x, routes, weights)
            return [y, *torch.autograd.grad(y, leaves, g.to(y.dtype))]

    got = gradients(torch.autocast("cpu", torch.bfloat16), x)
    wanted = gradients(nullcontext(), x.bfloat16())
    assert inside == [(torch.bfloat16, True, torch.bfloat16), (torch.bfloat16, False, torch.bfloat16)]
    assert got[0].dtype == torch.bfloat16
    for leaf, one, other in zip([got[0], *leaves], got, wanted, strict=True):
        assert one.dtype == leaf.dtype and sqnr_db(other, one) >= 30


@pytest.mark.parametrize("case", ["normed", "softplus"])
def test_a_routing_weight_of_zero_gets_its_gradient(case):
    formula_, _, x, g, routes, weights = alone(case, dtype=torch.float32)
    with torch.no_grad():
        routes.weight_TK[:, 0] = 0

    def run(weight_TK):
        made = Routes(expert_TK=routes.expert_TK, weight_TK=weight_TK, num_experts=8)
        return OpenFFN(formula_, BF16, Local(), 8)(x, made, weights)

    grad, = torch.autograd.grad(run(routes.weight_TK), [routes.weight_TK], g)
    tangent = torch.zeros_like(grad)
    tangent[:, 0] = 1.0
    with torch.no_grad():
        slope = ((run(routes.weight_TK + tangent) - run(routes.weight_TK)) * g).sum(1)
    assert sqnr_db(slope, grad[:, 0]) >= 90 and (grad[:, 0] != 0).all()


def calls(frozen, recipe_name, case, count=2, **keys):
    formula_, parameters, x, g, routes, weights = alone(case, trained=False, **keys)
    held = None
    if frozen:
        held = FrozenWeights(8, HIDDEN, FFN, torch.bfloat16, "cpu")
        for e in range(8):
            held.put(e, weights["gate"][e], weights["down"][e], weights["up"][e], "rceil")
    factors = {name: [one.bfloat16().requires_grad_() for one in pair] for name, pair in make_adapters(
        [{role: value[e] for role, value in weights.items()} for e in range(8)]).items()}
    ffn, found = OpenFFN(formula_, RECIPES[recipe_name], Local(), 8), []
    for _ in range(count):
        y = ffn(x, routes, {} if frozen else weights, adapters={n: LowRank(*pair) for n, pair in factors.items()},
                frozen=held)
        leaves = [x, routes.weight_TK, *parameters, *(one for pair in factors.values() for one in pair)]
        found += [y.detach(), *torch.autograd.grad(y, leaves, g)]
    return found


@pytest.mark.parametrize("recipe_name, case, keys", [
    ("hp-128", "normed", {}), ("mxfp8-128", "softplus", {}), ("hp-128", "normed", {"routing": "nowhere"}),
    ("hp-128", "softplus", {"tokens": (0, )})], ids=str)
def test_frozen_weights_give_the_bits_of_kept_ones(recipe_name, case, keys):
    with mock.patch("ds_mxfp8_moe.ffn.expert_math.grouped_mm_wgrad_rows") as wgrad:
        held, kept = (calls(frozen, recipe_name, case, **keys) for frozen in (True, False))
    assert all(map(torch.equal, held, kept)) and not wgrad.called


def test_calls_share_quantized_weights(monkeypatch):
    formula_, _, x, g, routes, weights = alone()
    quantize_weights, steps = casts.quantize_weights, []

    def quantize(stacks, block_size, scaling_mode, transposed=False):
        steps.append("dgrad" if transposed else "forward")
        return quantize_weights(stacks, block_size, scaling_mode, transposed)

    monkeypatch.setattr(casts, "quantize_weights", quantize)
    leaves = [x, routes.weight_TK, *weights.values()]

    def run(kept, fewest=0):
        ffn, steps[:] = OpenFFN(formula_, RECIPES["hp-32"], Local(), 8, fewest, kept=kept), []
        y = ffn(x, routes, weights)
        return [y, *torch.autograd.grad(y, leaves, g)]

    kept = KeptWeights()
    wanted = run(None)
    assert steps == ["forward", "forward", "dgrad", "dgrad"]
    for expected in (["forward", "forward", "dgrad", "dgrad"], []):
        assert all(map(torch.equal, run(kept), wanted)) and steps == expected
    with torch.no_grad():
        weights["up"].mul_(2)
    assert not torch.equal(run(kept)[0], wanted[0]) and len(steps) == 4
    run(kept, fewest=1e6)  # which runs unquantized
    assert not steps


def test_a_second_derivative_is_refused():
    formula_, _, x, _, routes, weights = alone()
    y = OpenFFN(formula_, BF16, Local(), 8, name="layer 3")(x, routes, weights)
    with pytest.raises(RuntimeError, match="layer 3 has no second derivative"):
        torch.autograd.grad(y.sum(), [x], create_graph=True)


class Failing(torch.autograd.Function):
    """The identity, whose backward is an error."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError(f"of rank {dist.get_rank()}")


def errors_told() -> str:
    """What the other rank is told of an error in the backward of the model's own code, which both have here."""
    plain, fails = InventedExperts._apply_gate, []

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return Failing.apply(plain(self, x)) if fails else plain(self, x)

    with mock.patch.object(InventedExperts, "_apply_gate", gate):
        engine = engine_of(InventedModel._from_config(InventedConfig()), {"enabled": True, "recipe": "bf16"})
    fails.append(True)
    loss = engine(input_ids=batch(0), labels=batch(0)).loss
    with pytest.raises(RuntimeError, match="of rank"):
        engine.backward(loss)
    dist.barrier()
    return absence(1 - dist.get_rank())


def test_peers_are_told_of_errors_in_the_models_own_code(ranks2):
    for rank, told in enumerate(ranks2.run(errors_told)):
        assert f"it raised RuntimeError: of rank {1 - rank}" in told
