# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with PEFT's adapters, plain and in an engine."""

import peft
import torch

import ds_mxfp8_moe
from tests.support.autoep_models import ds_config, model

LEARNING_RATE = 0.5


def adapted(family="qwen3_moe", seed=1, rank=4, targets=("gate_up_proj", "down_proj"), prefix="experts.", **changes):
    """A model with adapters that are not zero at the start."""
    return with_adapters(model(family, **changes), seed, rank, targets, prefix)


def with_adapters(net, seed=1, rank=4, targets=("gate_up_proj", "down_proj"), prefix="experts."):
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False,
                             target_parameters=[f"{prefix}{name}" for name in targets])
    return peft.get_peft_model(net, config)


def build(net, section, stage=0, ep_size=2, rate=LEARNING_RATE, **changes):
    optimizer = {"type": "SGD", "params": {"lr": rate, "momentum": 0.9}}
    return ds_mxfp8_moe.initialize(model=net, config=ds_config(section, stage, ep_size, optimizer=optimizer,
                                                               **changes))[0]
