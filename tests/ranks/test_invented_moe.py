# SPDX-License-Identifier: Apache-2.0
"""A model type that this package cannot know trains on shared experts as transformers trains it."""

import deepspeed.comm as dist
import pytest
import torch

import ds_mxfp8_moe
from architectures import BARS, SECTIONS, difference
from ds_mxfp8_moe.layers.experts import converted_layers
from tests.support.autoep_models import engine_of
from tests.support.invented_moe import VOCABULARY, InventedConfig, InventedModel
from tests.support.slow import WIDE


def model(dtype: torch.dtype) -> InventedModel:
    torch.manual_seed(0)
    return InventedModel._from_config(InventedConfig(), dtype=dtype).train()


def losses(engine, steps: int = 6) -> list[float]:
    """The mean loss of all ranks before each step, on fresh tokens at each."""
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(0, VOCABULARY, (2 + step % 3, 17 + dist.get_rank()), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        found.append(mean.item() / dist.get_world_size())
        engine.backward(loss)
        engine.step()
    return found


def engine(recipe: str | None, dtype: torch.dtype, stage: int):
    return engine_of(model(dtype), recipe and SECTIONS[recipe], stage, bf16={"enabled": dtype == torch.bfloat16},
                     optimizer={"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}})


def train(recipe: str | None, dtype: torch.dtype, stage: int) -> tuple[list[float], int]:
    """The losses, and how many layers are ours."""
    made = engine(recipe, dtype, stage)
    return losses(made), len(converted_layers(made.module))


def beside_transformers(recipe: str, dtype: torch.dtype, stage: int) -> tuple[float, int, list[float]]:
    """The difference of the losses, how many layers are ours, and the losses of transformers' experts."""
    own, none = train(None, dtype, 0)
    ours, layers = train(recipe, dtype, stage)
    return difference(ours, own), layers - none, own


@pytest.mark.parametrize("recipe, dtype, stage, bar", [
    ("bf16", torch.float32, 1, 1e-5),  # float32 throughout
    pytest.param("bf16", torch.bfloat16, 0, BARS["bf16"], marks=WIDE), ("mxfp8", torch.bfloat16, 3, BARS["mxfp8"])])
def test_it_trains_like_transformers(ranks2, recipe, dtype, stage, bar):
    for apart, layers, own in ranks2.run(beside_transformers, recipe, dtype, stage):
        assert layers == 2 and apart < bar and len(set(own)) == len(own)


def saved(folder) -> tuple[bool, float]:
    """Whether a replay has the bits of its recording, and how far the loss of the model is that was saved."""
    made = engine("bf16", torch.float32, 0)
    losses(made, 2)
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        with ds_mxfp8_moe.record_routes(made) as routes:
            recorded = made(input_ids=ids, labels=ids)
        with ds_mxfp8_moe.replay_routes(made, routes):
            replayed = made(input_ids=ids, labels=ids)
        ds_mxfp8_moe.save_pretrained(made, folder)
        own = InventedModel.from_pretrained(folder, dtype=torch.float32)(ids, ids)
    return torch.equal(recorded.logits, replayed.logits), (recorded.loss / own.loss - 1).abs().item()


def test_it_is_replayed_saved_and_loaded(ranks2, tmp_path):
    for same, apart in ranks2.run(saved, tmp_path):
        assert same and apart < 1e-5
