# SPDX-License-Identifier: Apache-2.0
"""Placements of experts that tests move to."""

import random

import torch

from ds_mxfp8_moe.engine.moving import move_experts
from ds_mxfp8_moe.layers.experts import converted_layers
from ds_mxfp8_moe.layers.placement import Placement


def shuffled(num_ranks: int, num_local_experts: int, seed: int) -> list[list[int]]:
    """Experts by rank and slot, each in its slot on a random rank."""
    rng = random.Random(seed)
    columns = [rng.sample(range(slot, num_ranks * num_local_experts, num_local_experts), num_ranks)
               for slot in range(num_local_experts)]
    return [list(of_rank) for of_rank in zip(*columns, strict=True)]


def move(engine, seed: int | None) -> None:
    """Moves the experts of all layers, to other places in each layer. None: home."""
    wanted = {}
    for i, layer in enumerate(converted_layers(engine.module)):
        experts_RL = shuffled(layer.ep_size, layer.num_local_experts, seed + i) if seed is not None else None
        wanted[layer] = experts_RL and Placement(experts_RL, torch.device(engine.device))
    move_experts(engine, wanted)
