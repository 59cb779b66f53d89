# SPDX-License-Identifier: Apache-2.0
"""Trainings of transformers' models with spread experts, compared weight by weight with plain data parallelism."""

from collections.abc import Callable

import pytest
import torch

from ds_mxfp8_moe.compute.mx import sqnr_db
from tests.support.autoep_models import autoep_layers, batch, converted, weights

PLAIN = None  # transformers' own experts
BF16 = {"enabled": True, "recipe": "bf16"}  # in float32 models, this is float32


def trained(built, steps: int = 2, one_batch: bool = False, use: Callable = lambda built: None) -> tuple[
        list[float], dict[str, torch.Tensor], int]:
    """Losses, by how much each weight of the whole model has moved, and how many layers are ours. `use`: what is done
    with the engine before its end."""
    before, losses = weights(built), []
    for step in range(steps):
        for micro in range(built.gradient_accumulation_steps()):
            ids = batch(0 if one_batch else 10 * step + micro)
            loss = built(input_ids=ids, labels=ids).loss
            built.backward(loss)
            losses.append(loss.item())
            built.step()
    if built.zero_optimization_stage() == 3:  # nothing stays gathered: backward had to gather the experts again
        assert not any(p.numel() for layer in autoep_layers(built.module) for p in layer.experts.parameters())
    result = losses, {name: value - before[name] for name, value in weights(built).items()}, converted(built)
    use(built)
    built.destroy()
    return result


def near(own: tuple, ours: tuple) -> tuple[list[float], list[float], dict[str, float], int]:
    """Of what `trained` returns: both losses, in dB how near our change of each weight is to transformers', and how
    many layers are ours."""
    assert own[2] == 0 and own[1].keys() == ours[1].keys()
    return own[0], ours[0], {name: float(sqnr_db(moved, ours[1][name])) for name, moved in own[1].items()}, ours[2]


def assert_trains_like_transformers(results: list, tolerance: float = 1e-5, least: float = 60) -> None:
    for own, ours, db, layers in results:
        assert layers > 0 and ours == pytest.approx(own, abs=tolerance)
        assert min(db.values()) >= least, min(db.items(), key=lambda item: item[1])
