# SPDX-License-Identifier: Apache-2.0
"""Experts that move between ranks over NCCL, with their states, those in 8 bits too, and frozen ones. tests/ranks/
test_placement.py has all that needs no GPU."""

import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.engine.moving import move_home
from ds_mxfp8_moe.layers.experts import converted_layers
from tests.gpu.capture import capture
from tests.support import models
from tests.support.adapted_models import adapted, build
from tests.support.autoep_models import ds_config, model, train_engine
from tests.support.placement_cases import assert_alike, exported, move

FLASH = {"type": "FlashAdamW", "params": {"lr": 1e-3}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
BF16 = {"enabled": True}
BF16_MASTERS = {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
SECTION = {"enabled": True, "graph_attention": False}
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "use_cache": False}


def of_autoep(stage: int, optimizer: dict, bf16: dict):
    config = ds_config(SECTION, stage, torch.distributed.get_world_size(), optimizer=optimizer, bf16=bf16)
    return ds_mxfp8_moe.initialize(model=model(dtype=torch.bfloat16, **SIZES), config=config)[0]


def of_lora(form: str):
    return build(adapted(dtype=torch.bfloat16, **SIZES), {**SECTION, "frozen_experts": form}, 1,
                 torch.distributed.get_world_size(), bf16=BF16)


MADE = {"AdamW": (of_autoep, 1, ADAMW, BF16), "8 bits": (of_autoep, 2, FLASH, BF16),
        "24 bits": (of_autoep, 1, {**FLASH, "params": {"lr": 1e-3, "master_weight_bits": 24}}, BF16_MASTERS),
        "ZeRO-3": (of_autoep, 3, ADAMW, BF16), "frozen": (of_lora, "mxfp8"), "frozen in 4 bits": (of_lora, "mxfp4")}


def there_and_back(make, *args) -> None:
    net = make(*args)
    train_engine(net, range(2))
    home, weights = models.state(net), exported(net)
    for seed in (1, 2):
        move(net, seed)
        models.assert_same_bits(exported(net), weights)
    move_home(net)
    models.assert_same_bits(models.state(net), home)


@pytest.mark.parametrize("name", MADE)
def test_weights_and_states_come_back_as_they_left(pair, name):
    pair.run(there_and_back, *MADE[name], seconds=120)


def trained(make, *args) -> list[float]:
    return assert_alike(lambda: make(*args), lambda net, first: train_engine(net, range(first, first + 2)))


@pytest.mark.parametrize("name", ["8 bits", "frozen"])
def test_training_is_that_of_fixed_experts(pair, name):
    """With the same bits: a token has two choices."""
    for losses in pair.run(trained, *MADE[name], seconds=120):
        assert len({*losses}) == 6


def balanced() -> list[bool]:
    section = {**SECTION, "expert_placement": "balanced", "transport": "collective"}
    config = ds_config(section, 1, torch.distributed.get_world_size(), optimizer=ADAMW, bf16=BF16)
    net = ds_mxfp8_moe.initialize(model=model(dtype=torch.bfloat16, **SIZES), config=config)[0]
    placing = net._mxfp8.after_step["placement"]
    counted = []
    for step in range(4):
        train_engine(net, range(step, step + 1))
        counted.append(any(layer.mxfp8_loads is not None for layer in placing.layers))
    return counted


def test_loads_are_counted_on_the_device(pair):
    assert pair.run(balanced, seconds=120) == [[True, True, True, False]] * 2


def captured() -> list[bool]:
    """Whether replays of a layer's forward, captured before any move, have the bits of eager calls after each."""
    section = {**SECTION, "expert_placement": "balanced", "transport": "nvlink", "capacity_factor": 2.0}
    config = ds_config(section, 1, torch.distributed.get_world_size(), optimizer=ADAMW, bf16=BF16)
    net = ds_mxfp8_moe.initialize(model=model(dtype=torch.bfloat16, **SIZES), config=config)[0]
    experts, alike = converted_layers(net.module)[0], []
    torch.manual_seed(torch.distributed.get_rank())
    x_TH = torch.randn(96, SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)
    weight_TK, expert_TK = torch.rand(96, 8, device="cuda").softmax(1).topk(2)
    with torch.no_grad():
        first = experts(x_TH, expert_TK, weight_TK)
        torch.cuda.synchronize(), torch.distributed.barrier()
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            y_TH = experts(x_TH, expert_TK, weight_TK)
        for seed in (1, 2, 3):
            move(net, seed)
            graph.replay()
            replayed = y_TH.clone()
            alike += [torch.equal(replayed, first), torch.equal(replayed, experts(x_TH, expert_TK, weight_TK))]
    torch.cuda.synchronize(), torch.distributed.barrier()  # before the graph's memory goes
    return alike


def test_a_captured_layer_goes_on_after_moves(pair):
    assert pair.run(captured, seconds=120) == [[True] * 6] * 2
