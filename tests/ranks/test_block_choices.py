# SPDX-License-Identifier: Apache-2.0
"""Choices of experts in blocks of transformers that route by themselves: replayed, refused, biased, forced."""

import contextlib
import io
import os
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
import transformers
from autoep_models import autoep_layers, batch, ds_config, router_of, train_engine
from preset_models import COMMON, tiny_model
from test_replay import BF16, every_type, other_routes

import ds_mxfp8_moe
from ds_mxfp8_moe import record_routes, replay_routes
from ds_mxfp8_moe.engine import balance

# A softmax, a softmax of the chosen logits, groups of experts, a bias of the block, groups that mask the weights.
KNOWN = ["qwen3_moe", "gpt_oss", "deepseek_v3", "lfm2_moe", "deepseek_v2"]
_FULL = dict(layer_types=["full_attention"] * 2)
NEW = {
    # The router lies in the decoder layer, and scales the weights by expert.
    "gemma4_text": lambda: transformers.Gemma4TextConfig(
        **{**COMMON, "num_experts_per_tok": None}, **_FULL, num_experts=8, top_k_experts=2, enable_moe_block=True,
        head_dim=16, global_head_dim=16, hidden_size_per_layer_input=0),
    # The logits have a soft cap.
    "laguna": lambda: transformers.LagunaConfig(
        **COMMON, **_FULL, num_experts=8, head_dim=16, mlp_layer_types=["sparse"] * 2, gating=False,
        shared_expert_intermediate_size=64, moe_router_logit_softcapping=5.0),
    # The first layer chooses by the tokens' ids.
    "deepseek_v4": lambda: transformers.DeepseekV4Config(
        **COMMON, n_routed_experts=8, head_dim=32, q_lora_rank=32, o_groups=2, o_lora_rank=16, index_n_heads=2,
        index_head_dim=16, index_topk=4, layer_types=["sliding_attention"] * 2,
        mlp_layer_types=["hash_moe", "moe"], num_nextn_predict_layers=0, hc_mult=2,
        swiglu_limit=1e4),
}
SPREAD = mock.patch.dict(os.environ, DS_MXFP8_MOE_SPREAD_ALL="1")


def new_model(model_type: str, dtype: torch.dtype, **changes) -> torch.nn.Module:
    if model_type not in NEW:
        return tiny_model(model_type, dtype, **changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(NEW[model_type](), dtype=dtype).train()
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), 8).argsort(1)[:, :2])
    return model


def start(model_type: str, section: dict, *args, **changes):
    with SPREAD:
        return ds_mxfp8_moe.initialize(model=new_model(model_type, torch.float32),
                                       config=ds_config(section, *args, **changes))[0]


def replayed(model_type: str) -> tuple:
    with SPREAD:
        return every_type(model_type, new_model)


@pytest.mark.parametrize("model_type", [*KNOWN, "gemma4_text", "laguna"])
def test_a_given_choice_has_the_routers_own_weights(ranks2, model_type):
    for recorded, found, errors in ranks2.run(replayed, model_type):
        assert recorded == found == []
        assert max(errors) < 1e-4, errors


def refused(model_type: str) -> tuple[str, bool]:
    """The error of a replay, and whether a recording and a step after it are as without."""
    engine = start(model_type, BF16, 0, 2)
    ids = batch(0)
    plain = engine(input_ids=ids, labels=ids).loss
    with record_routes(engine) as routes:
        loss = engine(input_ids=ids, labels=ids).loss
    assert routes[0].shape == (2, 16, 2, 2)
    with pytest.raises(RuntimeError) as error, replay_routes(engine, routes):
        engine(input_ids=ids, labels=ids)
    return str(error.value), bool(plain == loss) and all(value > 0 for value in train_engine(engine, range(1)))


@pytest.mark.parametrize("model_type", ["phimoe", "deepseek_v4"])
def test_routers_without_topk_are_refused(ranks2, model_type):
    for told, same in ranks2.run(refused, model_type):
        assert "not supported for model.layers.0.mlp: its router does not choose by torch.topk" in told
        assert same or model_type == "phimoe"  # which draws at random


def excluded(engine):
    ds_mxfp8_moe.convert(engine, {**BF16, "exclude": [r".*layers\.0.*"]})


def replaced_block(engine):
    block = autoep_layers(engine.module)[1]
    block.forward = block.forward


def refused_at_once() -> list[bool]:
    """Whether layers that are not converted replay other choices. Blocks that cannot are refused at once."""
    engine = start("qwen3_moe", BF16, 0, 2)
    routes, losses = other_routes(autoep_layers(engine.module)), []
    for change in (excluded, lambda engine: ds_mxfp8_moe.convert(engine, {"enabled": False})):
        change(engine)
        losses.append(engine(input_ids=batch(0), labels=batch(0)).loss)
        with record_routes(engine) as recorded, replay_routes(engine, routes):
            losses.append(engine(input_ids=batch(0), labels=batch(0)).loss)
        assert torch.equal(recorded[0].flatten(0, 1), routes)
    for told, change in ((
            '"force_load_balance" chooses the experts',
            lambda engine: ds_mxfp8_moe.convert(engine, {**BF16, "force_load_balance": True})), (
            "not supported for model.layers.1.mlp: its forward method is replaced", replaced_block)):
        ds_mxfp8_moe.convert(engine, BF16)
        change(engine)
        for enter in (record_routes, lambda engine: replay_routes(engine, routes)):
            with pytest.raises(RuntimeError, match=told), enter(engine):
                raise AssertionError("the forward began")
    return [bool(losses[0] != losses[1]), bool(losses[2] != losses[3])]


def test_what_is_refused_at_once(ranks2):
    assert ranks2.run(refused_at_once) == [[True, True]] * 2


def changed_choice(hidden: bool) -> str:
    """The error for a router that changes the choice which it was given. `hidden`: in one token of one rank."""
    engine = start("qwen3_moe", BF16, 0, 2)
    routes = other_routes(autoep_layers(engine.module))

    def change(module, args, out):
        weights, choice = out[1], out[2].clone()
        choice[5 if hidden else slice(None)] = torch.tensor([6, 7])
        return out[0], weights, choice

    if dist.get_rank() or not hidden:
        routes[5] = torch.tensor([0, 1])
        router_of(autoep_layers(engine.module)[1]).register_forward_hook(change)
    told = ""
    try:
        with replay_routes(engine, routes):
            train_engine(engine, range(1))
    except RuntimeError as error:
        told = str(error)
    with pytest.raises(ZeroDivisionError), replay_routes(engine, routes):  # that error counts
        engine(input_ids=batch(0))
        raise ZeroDivisionError
    return told


@pytest.mark.parametrize("hidden", [False, True])
def test_a_router_that_changes_the_choice_is_refused(ranks2, hidden):
    first, second = ranks2.run(changed_choice, hidden)
    assert "not supported for model.layers.1.mlp: its router changes the choice" in second
    assert first == ("" if hidden else second)


def moved(model_type: str) -> tuple:
    """By how much biases lie off the rule after a step, which of them are the model's, and what was said."""
    section = {"enabled": True, "load_balance_coeff": 0.01}
    with contextlib.redirect_stdout(io.StringIO()) as told:
        engine = start(model_type, section, 1, 2, bf16={"enabled": True})
        layers, loads = autoep_layers(engine.module), []
        before = [balance.bias_of(layer).clone() for layer in layers]
        hooks = [layer.experts.register_forward_pre_hook(lambda module, args: loads.append(
            args[1].flatten().bincount(minlength=8).float())) for layer in layers]
        train_engine(engine, range(1))
    for hook in hooks:
        hook.remove()
    for load_E in loads:
        dist.all_reduce(load_E)
    errors = [float((balance.bias_of(layer) - old - 0.01 * torch.sign(load_E.mean() - load_E)).abs().max())
              for layer, old, load_E in zip(layers, before, loads, strict=True)]
    return max(errors), [balance.corrects(layer) for layer in layers], "has no effect on" in told.getvalue()


@pytest.mark.parametrize("model_type, own", [("lfm2_moe", True), ("laguna", False), ("gemma4_text", False),
                                             ("deepseek_v4", [False, True])])
def test_a_bias_of_the_block_or_of_ours_moves(ranks2, model_type, own):
    for rank, (error, corrects, told) in enumerate(ranks2.run(moved, model_type)):
        assert error < 1e-6
        assert corrects == (own if isinstance(own, list) else [own] * 2)
        assert told == (model_type == "deepseek_v4" and rank == 0)


def biased(model_type: str) -> tuple[bool, float]:
    """Whether a bias that prefers four experts in each block has its way; how much the weights differ from the
    router's own at these experts."""
    engine = start(model_type, {**BF16, "load_balance_coeff": 0.01}, 0, 2)
    engine.eval()
    layers, seen = autoep_layers(engine.module), []
    for layer in layers:
        balance.bias_of(layer)[4:] += 100
        layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1:]))
    engine(input_ids=batch(0))
    taken = torch.stack([expert_TK for expert_TK, _ in seen], dim=1)
    with replay_routes(engine, taken):
        engine(input_ids=batch(0))
    half = len(seen) // 2
    return bool((taken >= 4).all()), max(float((first[1] - second[1]).abs().max())
                                         for first, second in zip(seen[:half], seen[half:], strict=True))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "lfm2_moe"])
def test_a_bias_acts_on_the_choice_alone(ranks2, model_type):
    assert ranks2.run(biased, model_type) == [(True, 0.0)] * 2


def forced() -> tuple[list[int], float]:
    """The choices of each expert, and the weights' distance from the router's."""
    engine = start("qwen3_moe", {**BF16, "force_load_balance": True}, 0, 2)
    experts, weights = autoep_layers(engine.module)[0].experts, []
    experts.register_forward_pre_hook(lambda module, args: weights.append(args[2]))
    settings, routes = experts.mxfp8_settings, []
    with mock.patch.object(type(settings), "ffn", lambda self, layer, x_TH, given, *rest: routes.append(given) or (
            lambda x_TH, *rest: x_TH)):
        engine(input_ids=batch(0))
    return routes[0].counts_E().tolist(), float((routes[0].weight_TK - weights[0]).abs().max())


def test_force_load_balance(ranks2):
    assert ranks2.run(forced) == [([8] * 8, 0.0)] * 2
