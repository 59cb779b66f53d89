# SPDX-License-Identifier: Apache-2.0
"""What users changed in MoE blocks before the engine is made is taken over, or refused by name."""

import io
from contextlib import redirect_stdout
from types import FunctionType, SimpleNamespace
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from autoep_models import batch, ds_config, engine, model
from torch.nn.utils import parametrize
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import ds_mxfp8_moe
from ds_mxfp8_moe.layers import user_changes

SECTION = {"enabled": True, "recipe": "bf16"}


def nothing(*_) -> None:
    """A hook that changes nothing."""


def with_class(module, **methods) -> None:
    module.__class__ = type("Mine", (type(module), ), methods)


def by_a_library(function):
    return FunctionType(function.__code__, {"__name__": "pytest"})


CHANGES = {
    "gate: a forward hook": lambda block: block.gate.register_forward_hook(nothing),
    "mlp: a backward hook": lambda block: block.register_full_backward_hook(nothing),
    "experts: a forward pre hook": lambda block: block.experts.register_forward_pre_hook(nothing),
    "experts: a gradient hook of down_proj": lambda block: block.experts.down_proj.register_hook(nothing),
    "gate: a gradient hook of weight":
        lambda block: block.gate.weight.register_post_accumulate_grad_hook(nothing),
    "gate: its class is Mine, where transformers has Qwen3MoeTopKRouter": lambda block: with_class(block.gate),
    "mlp: its class is Mine, where transformers has Qwen3MoeSparseMoeBlock":
        lambda block: with_class(block, forward=nothing),
    "gate: its method forward was replaced": lambda block: setattr(block.gate, "forward", nothing),
    "gate: norm_topk_prob is False, where the model's config gives True":
        lambda block: setattr(block.gate, "norm_topk_prob", False),
    "gate: its class is ParametrizedQwen3MoeTopKRouter":
        lambda block: parametrize.register_parametrization(block.gate, "weight", torch.nn.Identity()),
}


def changes_of(net: torch.nn.Module) -> list[str]:
    spec = SimpleNamespace(moe_module_name="model.layers.0.mlp", shared_experts_name="", shared_experts_gate_name="")
    return [f"{name or '.mlp'}: {change}" for name, change, _ in user_changes.changes_of(net, spec)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(change):
    net = model(num_hidden_layers=1)
    assert changes_of(net) == []
    CHANGES[change](net.model.layers[0].mlp)
    assert any(f".{change}" in found for found in changes_of(net))


def error_of_a_hook_on_rank_1() -> str:
    net = model()
    if dist.get_rank() == 1:  # rank 0 would wait for it
        CHANGES["gate: a forward hook"](net.model.layers[0].mlp)
    with pytest.raises(ds_mxfp8_moe.ConfigError) as error:
        ds_mxfp8_moe.initialize(model=net, config=ds_config(SECTION))
    return str(error.value)


def test_every_rank_raises_the_error(ranks2):
    first, second = ranks2.run(error_of_a_hook_on_rank_1)
    assert first == second and "rank 1: model.layers.0.mlp.gate: a forward hook" in first and "after ds_mxfp8" in first


def of_a_library_and_on_the_class() -> tuple[str, str]:
    """The line about a hook of a library, and the error about a method that was replaced on transformers' class."""
    net, said = model(), io.StringIO()
    net.model.layers[1].mlp.gate.register_forward_hook(by_a_library(nothing))
    with redirect_stdout(said):
        ds_mxfp8_moe.initialize(model=net, config=ds_config(SECTION))
    with mock.patch.object(Qwen3MoeExperts, "forward", nothing), pytest.raises(ds_mxfp8_moe.ConfigError) as error:
        ds_mxfp8_moe.initialize(model=model(), config=ds_config(SECTION))
    return said.getvalue(), str(error.value)


def test_libraries_are_said_and_methods_of_the_class_refused(ranks2):
    said, error = ranks2.run(of_a_library_and_on_the_class)[0]
    assert "without what libraries changed in them: model.layers.1.mlp.gate: a forward hook\n" in said
    assert "model.layers.0.mlp.experts: Qwen3MoeExperts.forward was replaced" in error


def with_other_top_k() -> tuple[list[int], str]:
    net, said = model(), io.StringIO()
    net.model.layers[1].mlp.gate.top_k = 4
    with redirect_stdout(said):
        made = ds_mxfp8_moe.initialize(model=net, config=ds_config(SECTION))[0]
    return [layer.mlp.router.top_k for layer in made.module.model.layers], said.getvalue()


def test_top_k_of_a_router_is_taken_over(ranks2):
    (top_k, said), _ = ranks2.run(with_other_top_k)
    assert top_k == [2, 4] and "top_k is 4 in 1 of 2 MoE blocks" in said


def changed_afterwards() -> tuple[list[int], list[bool]]:
    """What the error advises: hooks of the layer and of its experts' weights, after the engine is made."""
    net, seen = engine(SECTION, 1), []
    layer = net.module.model.layers[0].mlp
    layer.register_forward_hook(lambda *_: seen.append(0))
    layer.router.gate.register_forward_hook(lambda *_: seen.append(1))
    layer.experts.w1.register_hook(torch.zeros_like)
    weights = layer.experts.w1, layer.experts.w2
    before = [p.detach().clone() for p in weights]
    net.backward(net(input_ids=batch(0), labels=batch(0)).loss)
    net.step()
    return sorted(seen), [torch.equal(*pair) for pair in zip(before, weights, strict=True)]


def test_the_same_changes_afterwards_have_an_effect(ranks2):
    assert ranks2.run(changed_afterwards) == [([0, 1], [True, False])] * 2


def test_a_model_has_no_changes_to_random_numbers_or_itself():
    net = model()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    fresh = user_changes._fresh_modules(net, "model.layers.0.mlp")
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: type(module) for name, module in fresh.items()} == {
        name: type(module) for name, module in net.model.layers[0].mlp.named_modules()}
    assert all(p.is_meta for module in fresh.values() for p in module.parameters())
