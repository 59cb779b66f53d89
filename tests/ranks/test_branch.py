# SPDX-License-Identifier: Apache-2.0
"""Shared experts and dense branches, launched before the host waits for counts: the bits of DeepSpeed's own order."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from deepspeed.moe import layer as deepspeed_layer
from models import SwiGLU
from test_autoep import MXFP8, call, layer_and_input, train
from test_layer import converted, make, step, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_mxfp8_moe
from ds_mxfp8_moe.ffn.branch import Branch
from ds_mxfp8_moe.layers.autoep import MXFP8AutoEPMoELayer
from ds_mxfp8_moe.transport.collective import Collective


@contextmanager
def deepspeeds_order():
    """Layers whose branches DeepSpeed's own code calls, after the routed experts."""
    with mock.patch.object(ds_mxfp8_moe.MoE, "forward", deepspeed_layer.MoE.forward), \
            mock.patch.object(MXFP8AutoEPMoELayer, "_shared_experts", lambda *_: None), \
            mock.patch.object(Branch, "launch", side_effect=AssertionError):
        yield


@contextmanager
def recorded(*modules: nn.Module):
    """The steps of forwards: "read" where the host reads counts, "there" when it has, and the class of each of
    `modules` that runs."""
    steps, read = [], Collective._read_counts

    def read_counts(self, counts, meanwhile):
        steps.append("read")
        values = read(self, counts, meanwhile)
        steps.append("there")
        return values

    hooks = [module.register_forward_hook(lambda module, *_: steps.append(type(module).__name__))
             for module in modules]
    with mock.patch.object(Collective, "_read_counts", read_counts):
        yield steps
    for hook in hooks:
        hook.remove()


def different(first: dict, second: dict) -> list:
    assert list(first) == list(second)
    return [name for name in first if not torch.equal(first[name], second[name])]


# ---------------------------------------------------------------- the dense branch of a residual MoE


class Tuple(SwiGLU):
    """A branch with random numbers that returns a tuple, as Megatron's do."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.dropout(super().forward(x)), None


class Recomputed(nn.Module):

    def __init__(self, model, use_reentrant):
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, x):
        y, aux, counts = checkpoint(self.model, x, use_reentrant=self.use_reentrant)
        return y, aux, counts


def residual_model(way: str, **section):
    dtype = torch.float32 if way == "autocast" else torch.bfloat16
    model = make(k=2, use_residual=True, dtype=dtype, ep_size=1 if way == "one rank" else 2)
    model.moe.mlp = Tuple().to(dtype)
    return converted(model, **section)


def both_orders(way: str) -> list:
    """The names of results that differ between the two orders."""
    model = residual_model(way)
    model.eval() if way == "evaluated" else model.train()
    x, runs = tokens(next(model.parameters()).dtype), []
    wrapped = Recomputed(model, "non" not in way) if "reentrant" in way else model
    for order in (deepspeeds_order, nullcontext):
        model.zero_grad()
        autocast = torch.autocast("cpu", torch.bfloat16) if way == "autocast" else nullcontext()
        with order(), autocast, recorded(model.moe.mlp) as steps:
            if way == "evaluated":
                torch.manual_seed(5)
                with torch.no_grad():
                    runs.append({"y": model(x)[0]})
            else:
                runs.append(step(wrapped, x))
        if way == "one rank":  # the host reads no counts
            assert steps == ["Tuple"]
        else:
            assert steps[:3] == ["read", *(["there", "Tuple"] if order is deepspeeds_order else ["Tuple", "there"])]
    assert all(value is not None for value in runs[1].values())
    return different(*runs)


@pytest.mark.parametrize("way", ["stored", "reentrant", "non-reentrant", "autocast", "evaluated", "one rank"])
def test_a_dense_branch_has_the_bits_of_deepspeeds_order(ranks2, way):
    assert ranks2.run(both_orders, way) == [[], []]


def compiled_or_timed(compiled: bool):
    """torch.compile and DeepSpeed's timers of the MoE layer see the branch outside it, as DeepSpeed has it."""
    model = converted(make(k=2, use_residual=True))
    model.moe.deepspeed_moe.wall_clock_breakdown = not compiled
    torch.manual_seed(5)
    plain = model(tokens())[0]
    torch.manual_seed(5)
    with mock.patch.object(Branch, "launch", side_effect=AssertionError):
        function = torch.compile(model, backend="eager") if compiled else model
        return torch.equal(function(tokens())[0], plain)


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_and_timed_layers_keep_deepspeeds_order(ranks2, compiled):
    assert ranks2.run(compiled_or_timed, compiled) == [True, True]


# ---------------------------------------------------------------- AutoEP's shared experts


def shared_experts(family: str, shape: str | None):
    built, layer, x, grad = layer_and_input(family, 2)
    if shape is not None:
        layer.moe_output_shape, layer.return_router_logits = shape, True
    assert ds_mxfp8_moe.convert(built, MXFP8).converted
    parts = [part for part in (layer.shared_experts, layer.shared_experts_gate) if part is not None]
    names = [type(part).__name__ for part in parts]
    with deepspeeds_order(), recorded(*parts) as steps:
        plain, _ = call(layer, x, grad)
    assert steps == ["read", "there", *names]
    with recorded(*parts) as steps:
        ours, _ = call(layer, x, grad)
    assert steps == ["read", *names, "there"]
    return different(plain, ours)


@pytest.mark.parametrize("family, shape", [("qwen2_moe", "flat"), ("deepseek_v2", None),
                                           ("deepseek_v3", "batched"), ("qwen3_5_moe", None)])
def test_shared_experts_have_the_bits_of_deepspeeds_order(ranks2, family, shape):
    assert ranks2.run(shared_experts, family, shape) == [[], []]


def trained(family, stage, **keys):
    with deepspeeds_order():
        plain = train(MXFP8, stage, 2, family=family, **keys)
    ours = train(MXFP8, stage, 2, family=family, **keys)
    assert plain[0] == ours[0] and len(ours[0]) == 2
    return different(plain[1], ours[1]) + different(plain[2], ours[2])


@pytest.mark.parametrize("family, stage, checkpointing", [
    ("deepseek_v3", 2, {"use_reentrant": False}), ("qwen2_moe", 1, {"use_reentrant": True}), ("qwen2_moe", 0, None)],
    ids=str)
def test_models_with_shared_experts_train_alike(ranks2, family, stage, checkpointing):
    assert ranks2.run(trained, family, stage, checkpointing=checkpointing) == [[], []]


def trained_in_stage_3():
    with mock.patch.object(Branch, "launch", side_effect=AssertionError):
        return len(train(MXFP8, 3, 2, family="deepseek_v3", checkpointing={"use_reentrant": False})[0])


def test_zero_3_keeps_deepspeeds_order(ranks2):
    assert ranks2.run(trained_in_stage_3) == [2, 2]


def compiled_model():
    built, layer, x, _ = layer_and_input("qwen2_moe", 2)
    ds_mxfp8_moe.convert(built, MXFP8)
    plain = layer(x)
    return torch.equal(torch.compile(layer, backend="eager")(x), plain)


def test_compiled_layers_have_the_same_bits(ranks2):
    assert ranks2.run(compiled_model) == [True, True]
