# SPDX-License-Identifier: Apache-2.0
"""FlashAdamW by the config, with its moments in 8 bits: checkpoints go on with the same bits, and states are as small
as guides/memory.md says. tests/ranks/test_flash_adamw.py has what needs no GPU."""

import gc

import pytest
import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, SINGLE_PARTITION_OF_FP32_GROUPS

import ds_mxfp8_moe
from ds_mxfp8_moe.checkpoint.flash_states import in_full
from tests.support.autoep_models import batch, ds_config, model, train_engine
from tests.support.held_bytes import bytes_of_a_parameter
from tests.support.spread_checkpoints_cases import to_universal
from training import memory

FLASH = {"type": "FlashAdamW", "params": {"lr": 1e-3}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
BF16 = {"enabled": True}
BF16_MASTERS = {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
SIZES = {"hidden_size": 512, "moe_intermediate_size": 512}


def started(stage: int, optimizer: dict, bf16: dict, world: int, universal: bool = False, accumulation: int = 1,
            **sizes):
    section = {"enabled": True, "recipe": "bf16", "graph_attention": False}
    zero = {"reduce_bucket_size": 10000}
    config = ds_config(section, stage, world, optimizer=optimizer, bf16=bf16, zero_optimization=zero,
                       checkpoint={"load_universal": universal}, gradient_accumulation_steps=accumulation)
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


OPTIMIZERS = {"AdamW": (ADAMW, BF16), "float32": (FLASH, BF16),
              **{f"{bits} bits": ({**FLASH, "params": {"lr": 1e-3, "master_weight_bits": bits}}, BF16_MASTERS)
                 for bits in (24, 32)}}


def exact_masters(engine) -> torch.Tensor:
    """All masters of this rank with their correction, as a file has them."""
    zero = in_full({OPTIMIZER_STATE_DICT: engine.optimizer.state_dict()}, engine.optimizer)[OPTIMIZER_STATE_DICT]
    masters = zero[FP32_FLAT_GROUPS if FP32_FLAT_GROUPS in zero else SINGLE_PARTITION_OF_FP32_GROUPS]
    return torch.cat([master.detach().cpu() for master in masters])


def saved(directory, stage: int, kind: str) -> tuple[list[float], torch.Tensor]:
    """Losses of eight steps, and the masters that are saved after four."""
    engine = started(stage, *OPTIMIZERS[kind], torch.distributed.get_world_size())
    losses = train_engine(engine, range(4))
    masters = exact_masters(engine)
    engine.save_checkpoint(directory, tag="two")
    return losses + train_engine(engine, range(4, 8)), masters


def loaded(directory, stage: int, kind: str, universal: bool = False) -> tuple[list[float], torch.Tensor]:
    """The last four losses and the masters of a run that begins with a checkpoint. A universal one has its experts
    spread otherwise, but for ZeRO-3."""
    world = torch.distributed.get_world_size() if stage == 3 or not universal else 1
    engine = started(stage, *OPTIMIZERS[kind], world, universal, seed=1)
    engine.load_checkpoint(directory, tag="two_universal" if universal else "two")
    masters = exact_masters(engine)
    return train_engine(engine, range(4, 8)), masters


def has_correction(masters: torch.Tensor) -> bool:
    return (masters.bfloat16() != masters).float().mean() > 0.5


@pytest.mark.parametrize("stage, writer, reader", [
    (1, "AdamW", "24 bits"), (1, "float32", "32 bits"), (2, "32 bits", "float32"), (3, "AdamW", "32 bits"),
    (3, "24 bits", "AdamW")])
def test_other_precisions_go_on_with_a_checkpoint(gpu_ranks, tmp_path, stage, writer, reader):
    for (losses, expected), (last, masters) in zip(gpu_ranks.run(saved, tmp_path, stage, writer, seconds=120),
                                                   gpu_ranks.run(loaded, tmp_path, stage, reader, seconds=120),
                                                   strict=True):
        assert torch.allclose(masters, expected, rtol=2.0**-15, atol=1e-12) and has_correction(masters)
        assert last == pytest.approx(losses[4:], rel=2e-3)


@pytest.mark.parametrize("stage, kind", [(1, "24 bits"), (2, "float32"), (3, "24 bits"), (3, "32 bits")])
def test_a_universal_checkpoint_keeps_masters_and_moments(gpu_ranks, tmp_path, stage, kind):
    expected = gpu_ranks.run(saved, tmp_path, stage, kind, seconds=120)
    to_universal(tmp_path)
    for (losses, _), (last, masters) in zip(expected, gpu_ranks.run(loaded, tmp_path, stage, kind, True, seconds=120),
                                            strict=True):
        assert has_correction(masters)
        assert last == pytest.approx(losses[4:], rel=2e-3)


PRECISIONS = dict(zip(memory.PRECISIONS, OPTIMIZERS.values(), strict=True))


def measured(stage: int, precision: str) -> tuple[float, float]:
    def engine(**sizes):
        return started(stage, *PRECISIONS[precision], torch.distributed.get_world_size(), accumulation=2,
                       **{**SIZES, **sizes})

    return bytes_of_a_parameter(engine, {"moe_intermediate_size": 1024}, {"vocab_size": 2**14})


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_of_a_parameter(pair, precision, stage):
    expert, each, spread = memory.bytes_of(precision, stage)
    for found in pair.run(measured, stage, precision, seconds=120):
        assert found == pytest.approx((expert, each + spread / 2), abs=0.3)


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
