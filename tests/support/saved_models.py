# SPDX-License-Identifier: Apache-2.0
"""Configs of adapters, and losses of saved models."""

import deepspeed.comm as dist
import peft

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.frozen_experts import frozen_layers
from tests.support.pretrained_models import held_out_loss


def loss_of(engine) -> float:
    """On DeepSpeed's own path, which rounds as plain transformers does. Frozen experts in MXFP8 stay on ours."""
    if not frozen_layers(engine.module):
        ds_mxfp8_moe.convert(engine, {"enabled": False})
    return held_out_loss(engine)


def write_config(net, directory) -> None:
    """What users add to weights that they save without transformers."""
    if dist.get_rank() == 0:
        net.config.save_pretrained(directory)


LORA = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
PATTERN = {"moe_layer_pattern": r"base_model\.model\.model\.layers\.\d+\.mlp"}
