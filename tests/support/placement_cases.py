# SPDX-License-Identifier: Apache-2.0
"""Placements of experts that tests move to, and what must be the same with them."""

import random
from collections.abc import Callable
from unittest import mock

import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.engine import moving
from ds_mxfp8_moe.engine.moving import move_experts, move_home
from ds_mxfp8_moe.layers.experts import converted_layers
from ds_mxfp8_moe.layers.placement import Placement
from tests.support import models


def shuffled(num_ranks: int, num_local_experts: int, seed: int) -> list[list[int]]:
    """Experts by rank and slot, each in its slot on a random rank."""
    rng = random.Random(seed)
    columns = [rng.sample(range(slot, num_ranks * num_local_experts, num_local_experts), num_ranks)
               for slot in range(num_local_experts)]
    return [list(of_rank) for of_rank in zip(*columns, strict=True)]


def move(engine, seed: int) -> None:
    """Moves the experts of all layers, to other places in each layer, in many buckets."""
    wanted = {}
    for i, layer in enumerate(converted_layers(engine.module)):
        if layer.mxfp8_placement is None:
            layer.mxfp8_placement = Placement(layer.ep_size, layer.num_local_experts, layer.mxfp8_settings.device)
        wanted[layer] = shuffled(layer.ep_size, layer.num_local_experts, seed + i)
    with mock.patch.object(moving, "BUCKET_BYTES", 12000):
        move_experts(engine, wanted)


def exported(net) -> dict[str, torch.Tensor]:
    return {f"exported {name}": tensor.clone() for name, tensor in ds_mxfp8_moe.export_weights(net)}


def found(make: Callable, train: Callable, moves: bool) -> tuple[list, dict]:
    """What two steps after each move show, and the weights and optimizer states at the end, when experts are home."""
    net = make()
    records = train(net, 0)
    for i, seed in enumerate((1, 2), 1):
        if moves:
            move(net, seed)
        records += train(net, 2 * i)
    state = exported(net)
    if moves:
        move_home(net)
    return records, state | models.state(net)


def assert_alike(make: Callable, train: Callable) -> list:
    (records, state), (fixed_records, fixed_state) = (found(make, train, moves) for moves in (True, False))
    assert records == fixed_records
    models.assert_same_bits(state, fixed_state)
    return records
