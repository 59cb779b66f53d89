# SPDX-License-Identifier: Apache-2.0
"""FlashAdamW by the config, with its moments in 8 bits: checkpoints go on with the same bits, and states are as small
as guides/memory.md says. tests/ranks/test_flash_adamw.py has what needs no GPU."""

import gc

import pytest
import torch

import ds_mxfp8_moe
from tests.support.autoep_models import batch, ds_config, model, train_engine

FLASH = {"type": "FlashAdamW", "params": {"lr": 1e-3}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
BF16 = {"enabled": True}
BF16_MASTERS = {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
SIZES = {"hidden_size": 512, "moe_intermediate_size": 512}


def started(stage: int, optimizer: dict, bf16: dict, world: int, **sizes):
    section = {"enabled": True, "recipe": "bf16", "graph_attention": False}
    zero = {"reduce_bucket_size": 10000}
    config = ds_config(section, stage, world, optimizer=optimizer, bf16=bf16, zero_optimization=zero)
    del config["zero_allow_untested_optimizer"]
    return ds_mxfp8_moe.initialize(model=model(dtype=torch.bfloat16, use_cache=False, **sizes), config=config)[0]


def resumed(directory, stage: int, bits: int, bf16: dict) -> tuple[list[float], list[float]]:
    """The losses of eight steps in a run, and of the last four in a run that resumes there."""
    optimizer = {**FLASH, "params": {"lr": 1e-3, "master_weight_bits": bits}}
    world = torch.distributed.get_world_size()
    engine = started(stage, optimizer, bf16, world)
    losses = train_engine(engine, range(4))
    engine.save_checkpoint(directory)
    losses += train_engine(engine, range(4, 8))
    engine.destroy()
    again = started(stage, optimizer, bf16, world)
    again.load_checkpoint(directory)
    return losses, train_engine(again, range(4, 8))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bits, bf16", [(None, BF16), (24, BF16_MASTERS), (32, BF16_MASTERS)], ids=str)
def test_a_checkpoint_goes_on_with_the_same_bits(gpu_ranks, tmp_path, stage, bits, bf16):
    for losses, last in gpu_ranks.run(resumed, tmp_path, stage, bits, bf16, seconds=120):
        assert losses[4:] == last


def held(optimizer: dict, bf16: dict) -> float:
    """Bytes of each parameter at the end of a backward pass: weight, gradient, master, and Adam's states."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = started(1, optimizer, bf16, 1, **SIZES)
    train_engine(engine, range(2))
    ids = batch(2).to(engine.device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    found = (torch.cuda.memory_allocated() - before) / sum(p.numel() for p in engine.module.parameters())
    engine.destroy()
    return found


def all_held() -> list[float]:
    held(ADAMW, BF16)  # the workspaces of libraries
    return [held(ADAMW, BF16), held(FLASH, BF16), held(FLASH, BF16_MASTERS)]


def test_states_are_as_small_as_the_guide_says(alone):
    adamw, flash, flash_bf16 = alone.run(all_held, seconds=120)[0]
    print(f"bytes a parameter: {adamw:.2f} {flash:.2f} {flash_bf16:.2f}")
    assert adamw == pytest.approx(16, abs=0.3)
    assert flash == pytest.approx(10.125, abs=0.3)
    assert flash_bf16 == pytest.approx(7.125, abs=0.3)
