# SPDX-License-Identifier: Apache-2.0
"""The table of guides/memory.md: bytes of a parameter, from the tensors of engines. tests/gpu/test_flash_adamw_gpu.py
has what needs a GPU: moments in 8 bits, and corrections."""

from functools import partial

import pytest
import torch

import ds_mxfp8_moe
from tests.support.autoep_models import ds_config, model
from tests.support.held_bytes import bytes_of_a_parameter
from tests.support.slow import WIDE
from training import memory

BF16 = {"enabled": True}
BF16_MASTERS = {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def started(stage: int, bf16: dict, **sizes):
    config = ds_config({"enabled": True, "recipe": "bf16"}, stage, bf16=bf16, gradient_accumulation_steps=2,
                       optimizer={"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
                       zero_optimization={"reduce_bucket_size": 1000, "allgather_bucket_size": 1000})
    return ds_mxfp8_moe.initialize(model=model(dtype=torch.bfloat16, use_cache=False, **sizes), config=config)[0]


def measured(stage: int, bf16: dict) -> tuple[float, float]:
    return bytes_of_a_parameter(partial(started, stage, bf16), {"moe_intermediate_size": 256}, {"vocab_size": 4096})


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=WIDE), 3])
@pytest.mark.parametrize("masters", [pytest.param("float32", marks=WIDE), "bf16"])
def test_bytes_of_a_parameter(ranks2, stage, masters):
    expert, each, spread = memory.bytes_of("AdamW" if masters == "float32" else "`FlashAdamW`, masters in bf16", stage)
    less = 0 if masters == "float32" else 1 + memory.IN_8_BITS - 4  # moments in bf16, and no correction
    for found in ranks2.run(measured, stage, BF16 if masters == "float32" else BF16_MASTERS):
        assert found == pytest.approx((expert - less, each + (spread - less) / 2), abs=0.1)
