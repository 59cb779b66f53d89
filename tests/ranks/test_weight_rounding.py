# SPDX-License-Identifier: Apache-2.0
"""Dithered weights: a call computes with mx.dithered(weights, step), and the engine counts the steps."""

from itertools import chain
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from models import DEFAULT, Layout, make_engine, train_steps
from rank_pool import reset_deepspeed_groups
from test_expert_ffn import RECIPES, formula, problem
from test_kept_weights import parameters_of

import ds_mxfp8_moe
from ds_mxfp8_moe import casts, mx
from ds_mxfp8_moe.engine_hooks import converted_layers
from ds_mxfp8_moe.expert_ffn import ExpertFFN
from ds_mxfp8_moe.routing import Routes
from ds_mxfp8_moe.transport.local import Local

NEAREST = {**DEFAULT, "weight_rounding": "nearest"}
FROZEN = r"blocks\.0\..*experts.*"


def outcome(weights, recipe, name, step, device="cpu"):
    """The output and all gradients of one call."""
    _, (x_TH, ), (g_TH, ), ((expert_TK, weight_TK), ) = problem(1, name, dtype=torch.bfloat16)
    x_TH = x_TH.to(device).requires_grad_()
    flat = [w for w in chain(*weights.values()) if w.requires_grad]
    ffn = ExpertFFN(formula(name), RECIPES[recipe], Local(), len(weights["up"]), step=step)
    routes = Routes(expert_TK=expert_TK.to(device), weight_TK=weight_TK.to(device), num_experts=len(weights["up"]))
    y_TH = ffn(x_TH, routes, weights)
    return [y_TH, *torch.autograd.grad(y_TH, [x_TH, *flat], g_TH.to(device))]


def parameters(name, device="cpu"):
    experts = parameters_of(problem(1, name, dtype=torch.bfloat16)[0])
    return {role: [torch.nn.Parameter(w.detach().to(device)) for w in values] for role, values in experts.items()}


def check_steps(recipe, name, device="cpu"):
    """Each step, forward and backward compute with the weights that mx.dithered makes of that step."""
    weights, step = parameters(name, device), torch.zeros((), dtype=torch.int32, device=device)
    seen = set()
    for number in range(5):  # with kernels, the later ones are replayed
        step.fill_(number)
        by_hand = {role: [torch.nn.Parameter(mx.dithered(w, step).to(w.dtype)) for w in values]
                   for role, values in weights.items()}
        found, wanted = outcome(weights, recipe, name, step, device), outcome(by_hand, recipe, name, None, device)
        assert [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)] == []
        seen.add(found[0].float().sum().item())
    assert len(seen) == 5
    nearest = outcome(weights, recipe, name, None, device)
    for w in chain(*weights.values()):
        w.requires_grad = False
    assert torch.equal(outcome(weights, recipe, name, step, device)[0], nearest[0])  # frozen


@pytest.mark.parametrize("recipe", ["hp-32", "hp-128", "mxfp8-128"])
@pytest.mark.parametrize("name", ["swiglu", "gelu", "packed"])
def test_a_call_computes_with_the_weights_of_its_step(recipe, name):
    check_steps(recipe, name)


def counting(section, folder):
    """What the casts of weights were given: in steps of two micro-batches, in evaluation, after a checkpoint."""
    reset_deepspeed_groups()
    layout = Layout(zero=1, dtype="bf16", steps=1, frozen=FROZEN, config={"gradient_accumulation_steps": 2})
    engine, given, plain = make_engine(layout, section), [], casts.quantize_weights
    states = []

    def note_states():
        states.append([vars(layer).get("mxfp8_step") is None for layer in converted_layers(engine.module)])

    def quantize_weights(*args):
        given[-1].add(None if args[4] is None else args[4].item())
        return plain(*args)

    def evaluation():
        engine.eval()
        with torch.no_grad():
            x, target = torch.randn(2, 4, 16, 64).to(torch.bfloat16)
            engine(x, target)
        engine.train()

    def training(first):
        given.append(set())
        train_steps(engine, layout, first)

    with mock.patch.object(casts, "quantize_weights", quantize_weights):
        for first in range(3):
            training(first)
        engine.save_checkpoint(folder, tag="3")
        given.append(set())
        evaluation()
        training(3)
        engine.load_checkpoint(folder, tag="3")
        training(4)
        ds_mxfp8_moe.convert(engine, NEAREST)
        training(5)
        note_states()
        ds_mxfp8_moe.convert(engine, section)
        note_states()
    engine.destroy()
    note_states()
    return given, states


@pytest.mark.parametrize("section", [DEFAULT, NEAREST], ids=["dithered", "nearest"])
def test_an_engine_counts_the_steps(ranks2, tmp_path, section):
    """Frozen experts, of one of the two layers, and an evaluation round to nearest."""
    for given, states in ranks2.run(counting, section, str(tmp_path)):
        steps = [{None, 0}, {None, 1}, {None, 2}, {None}, {None, 3}, {None, 3}, {None}]
        assert given == (steps if section is DEFAULT else [{None}] * 7)
        assert states == [[True, True], [section is NEAREST] * 2, [True, True]]


def unfrozen():
    """What the casts were given, by whether they are transposed, in the step in which the experts are trained at last,
    after a forward with frozen ones. Quantised weights are kept."""
    reset_deepspeed_groups()
    layout = Layout(zero=1, dtype="bf16", steps=1)
    engine = make_engine(layout, {**DEFAULT, "keep_quantized_weights": True})
    experts = [p for layer in converted_layers(engine.module) for p in layer.experts.parameters()]
    for p in experts:
        p.requires_grad = False
    x, target = torch.randn(2, 4, 16, 64).to(torch.bfloat16)
    engine(x, target)
    given, plain = set(), casts.quantize_weights

    def quantize_weights(stacks, block_size, scaling_mode, transposed, step):
        given.add((transposed, None if step is None else step.item()))
        return plain(stacks, block_size, scaling_mode, transposed, step)

    for p in experts:
        p.requires_grad = True
    with mock.patch.object(casts, "quantize_weights", quantize_weights):
        train_steps(engine, layout)
    engine.destroy()
    return given


def test_forward_and_backward_agree_when_experts_are_trained_at_last(ranks2):
    assert ranks2.run(unfrozen) == [{(False, 0), (True, 0)}] * 2


def trained(steps, folder, load=None):
    """The losses of steps, and how many of them went before."""
    reset_deepspeed_groups()
    layout = Layout(zero=2, dtype="bf16", steps=steps)
    engine = make_engine(layout, DEFAULT)
    if load:
        engine.load_checkpoint(folder, tag="t")
    first = engine.global_steps
    losses = [record["loss"] for record in train_steps(engine, layout, first)]
    if not load and steps == 2:
        engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    dist.barrier()
    return losses


def test_a_run_that_goes_on_rounds_as_it_would_have(ranks2, tmp_path):
    whole = ranks2.run(trained, 4, str(tmp_path))
    begun = ranks2.run(trained, 2, str(tmp_path))
    went_on = ranks2.run(trained, 2, str(tmp_path), True)
    assert [a + b for a, b in zip(begun, went_on, strict=True)] == whole
