# SPDX-License-Identifier: Apache-2.0
"""Choices of experts in blocks of transformers that route by themselves: refused, biased, forced."""

import contextlib
import io
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
import transformers

import ds_mxfp8_moe
from ds_mxfp8_moe import record_routes, replay_routes
from ds_mxfp8_moe.engine import balance
from small_models import small_model
from tests.support.autoep_models import autoep_layers, batch, ds_config, router_of, train_engine
from tests.support.replay_cases import BF16, other_routes


def start(model_type: str, section: dict, *args, **changes):
    return ds_mxfp8_moe.initialize(model=small_model(model_type, torch.float32),
                                   config=ds_config(section, *args, **changes))[0]


def without_topk(model_type: str) -> tuple[list[bool], str]:
    """What holds of a router that chooses by other means: recordings and replays of what it would choose anyway have
    the loss of neither. The error of a replay of other experts in the first block."""
    engine = start(model_type, BF16, 0, 2)
    engine.eval()  # phimoe's draws at random in training
    ids = batch(0)
    plain = engine(input_ids=ids, labels=ids).loss
    with record_routes(engine) as recorded:
        losses = [engine(input_ids=ids, labels=ids).loss]
    routes = recorded[0]
    assert routes.shape == (2, 16, 2, 2)
    given = [routes, routes.flip(-1), routes.clone()]
    given[2][:, 3:] = -1  # these tokens choose by themselves
    for one in given:
        with replay_routes(engine, one):
            losses.append(engine(input_ids=ids, labels=ids).loss)
    routes[:, :, 0] = (routes[:, :, 0] + 1) % 8
    with pytest.raises(RuntimeError) as error, replay_routes(engine, routes):
        engine(input_ids=ids, labels=ids)
    engine.train()
    losses_after = train_engine(engine, range(1))
    return [*(bool(loss == plain) for loss in losses), losses_after[0] > 0], str(error.value)


@pytest.mark.parametrize("model_type", ["phimoe", "deepseek_v4"])
def test_routers_without_topk_choose_what_is_replayed_by_themselves_or_are_refused(ranks2, model_type):
    for same, told in ranks2.run(without_topk, model_type):
        assert "not supported for model.layers.0.mlp: its router does not choose by torch.topk" in told
        assert all(same)


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


def saved(folder: str) -> tuple[list, list[str]]:
    """Which names of a saved model transformers does not expect, or does not find; and what was said of a block whose
    forward is replaced."""
    net = small_model("qwen3_moe", torch.float32)
    block = net.model.layers[1].mlp
    block.forward = block.forward
    with contextlib.redirect_stdout(io.StringIO()) as told:
        engine = ds_mxfp8_moe.initialize(model=net, config=ds_config({**BF16, "load_balance_coeff": 0.01}, 1, 2))[0]
    train_engine(engine, range(1))
    ds_mxfp8_moe.save_pretrained(engine, folder)
    info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)[1]
    return [*info["unexpected_keys"], *info["missing_keys"]], [
        line for line in told.getvalue().splitlines() if "no effect" in line]


def test_a_saved_model_has_no_bias_of_ours_and_replaced_forwards_get_none(ranks2, tmp_path):
    for rank, (names, told) in enumerate(ranks2.run(saved, str(tmp_path))):
        assert names == []
        assert told == ([] if rank else ['mxfp8_moe: WARNING: "load_balance_coeff" has no effect on '
                                         "model.layers.1.mlp, whose forward method is replaced"])


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
