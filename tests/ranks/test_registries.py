# SPDX-License-Identifier: Apache-2.0
"""`ds_mxfp8_moe.register`: models under plain torch, DDP, FSDP2 and transformers' expert parallelism."""

import copy
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.moe import use_experts_implementation

from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.config import ConfigError
from ds_mxfp8_moe.layers.registries import register
from tests.support.autoep_models import batch, model
from tests.support.registries_cases import (
    APART,
    DATA_PARALLEL,
    check_a_rank_without_tokens,
    check_data_parallelism,
    check_expert_parallelism,
    check_near_eager,
    loss_of,
    needs_exchange,
    on_cpu,
    tiny,
)
from tests.support.slow import WIDE, slow_except

# ---- one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, bar", (("qwen3_moe", 22), ("gpt_oss", 20), ("nemotron_h", 20)))
def test_loss_and_gradients_are_near_those_of_eager(family, bar):
    """In one layer, where both choose the same experts."""
    check_near_eager(family, bar)


def called(experts: torch.nn.Module, implementation: str, index_TK: torch.Tensor, H: int = 64) -> list[torch.Tensor]:
    """The output of one call, and the gradients of tokens, routing weights and parameters."""
    experts.config._experts_implementation = implementation
    g = torch.Generator().manual_seed(5)
    x, weights, grad = (torch.randn(len(index_TK), n, generator=g) for n in (H, index_TK.shape[1], H))
    weights = weights.abs().masked_fill(index_TK >= experts.num_experts, 0)
    leaves = [x.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    y = experts(x, index_TK, weights)
    return [y, *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("case", ("none", "one token", "all to one expert", "sentinels", "sentinels alone"))
def test_hard_routes(case):
    register()
    experts = model().model.layers[0].mlp.experts
    tokens = {"none": 0, "one token": 1}.get(case, 37)
    index_TK = torch.rand(tokens, 8).argsort(dim=1)[:, :2]
    if case == "all to one expert":
        index_TK = torch.full((tokens, 1), 3)
    if "sentinels" in case:
        experts._is_expert_parallel = True  # as transformers' expert parallelism marks the module
        index_TK[torch.rand(tokens, 2) < (1 if "alone" in case else 0.5)] = experts.num_experts
    expected, actual = (called(experts, one, index_TK) for one in ("grouped_mm", "mxfp8"))
    for one, other in zip(expected, actual, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert sqnr_db(one, other) > 15 if one.any() else torch.equal(other, one)


class Invented(torch.nn.Module):
    """Experts of no model: transposed, with biases, gate and up in turn, and a formula that no kernel has."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = E = 4
        for name, shape in (("gate_up_proj", (E, 64, 192)), ("gate_up_proj_bias", (E, 192)),
                            ("down_proj", (E, 96, 64)), ("down_proj_bias", (E, 64))):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) * 64**-0.5))
        self.post_expert_norm = torch.nn.LayerNorm(64)

    def _apply_gate(self, both):
        return torch.tanh(both[..., 0::2]) * both[..., 1::2].cos()


@pytest.mark.parametrize("flags", ({}, dict(has_post_expert_norm=True)), ids=("plain", "norm"))
def test_experts_that_transformers_does_not_know(flags):
    if flags.keys() - inspect.signature(use_experts_implementation).parameters.keys():
        pytest.skip("transformers has norms behind experts from 5.21 on")
    kind = type("Invented", (Invented, ), {"forward": None})  # which the decorator replaces
    kind = use_experts_implementation(kind, is_transposed=True, has_bias=True, is_concatenated=False, **flags)
    register()
    torch.manual_seed(0)
    experts = kind(SimpleNamespace())
    if not flags:
        del experts.post_expert_norm
    index_TK = torch.rand(50, 4).argsort(dim=1)[:, :2]
    for one, other in zip(*(called(experts, name, index_TK) for name in ("grouped_mm", "mxfp8")), strict=True):
        assert one.shape == other.shape and 15 < sqnr_db(one, other) < 60


def test_autocast_and_the_model_in_bf16():
    register()
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = (loss_of(tiny("qwen3_moe", one)) for one in ("eager", "mxfp8"))
    assert actual.item() == pytest.approx(expected.item(), rel=2e-3)
    half = tiny("qwen3_moe", "mxfp8", dtype=torch.bfloat16)
    loss_of(half).backward()
    assert {p.grad.dtype for p in half.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_generate():
    register()
    net, ids = tiny("qwen3_moe", "mxfp8").eval(), batch(0, 0)
    found = net.generate(ids, max_new_tokens=4, do_sample=False)
    assert found.shape == (2, 20)
    assert torch.equal(found[:, 16], net(input_ids=ids).logits[:, -1].argmax(-1))


@pytest.mark.slow
@pytest.mark.wide
def test_compiled_models():
    register()
    plain, compiled = (tiny("qwen3_moe", "mxfp8", num_hidden_layers=1) for _ in range(2))
    for loss in (loss_of(plain), loss_of(torch.compile(compiled, backend="eager"))):
        loss.backward()
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_checkpointing_and_copies_give_the_same_bits():
    register()
    net = tiny("qwen3_moe", "mxfp8")
    loss_of(net).backward()
    again = copy.deepcopy(net)
    again.zero_grad()
    again.gradient_checkpointing_enable()
    loss_of(again).backward()
    for one, two in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_keys_of_the_section():
    register(recipe="bf16")
    exact = tiny("qwen3_moe", "mxfp8")
    torch.testing.assert_close(loss_of(exact), loss_of(tiny("qwen3_moe", "eager")), rtol=1e-6, atol=0)
    before = loss_of(exact)
    register()  # holds for models that are there
    assert loss_of(exact) != before
    with pytest.raises(ConfigError, match='unknown key "recipes"'):
        register(recipes="bf16")


def test_sizes_that_mxfp8_does_not_take():
    register()
    with pytest.raises(ValueError, match="FFN size 48 are not both multiples of 32.*grouped_mm"):
        loss_of(tiny("qwen3_moe", "mxfp8", moe_intermediate_size=48))


def test_a_release_without_the_second_registry(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    register()
    assert 'no ep_implementation="mxfp8", which needs 5.23 or later' in capsys.readouterr().out
    loss_of(tiny("qwen3_moe", "mxfp8")).backward()


# ---- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how, family", slow_except(DATA_PARALLEL, ("ddp", "qwen3_moe"), ("fsdp2", "gpt_oss")))
def test_data_parallelism(ranks2, how, family):
    check_data_parallelism(ranks2, how, family)


@pytest.mark.slow
@needs_exchange
@on_cpu
@pytest.mark.parametrize("family, sizes", [APART[0], pytest.param(*APART[1], marks=WIDE), APART[2]], ids=str)
def test_expert_parallelism(ranks2, tmp_path, family, sizes):
    check_expert_parallelism(ranks2, tmp_path, family, sizes)


@needs_exchange
@on_cpu
def test_a_rank_without_tokens(ranks2, tmp_path):
    check_a_rank_without_tokens(ranks2, tmp_path)


