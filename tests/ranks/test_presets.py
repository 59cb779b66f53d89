# SPDX-License-Identifier: Apache-2.0
"""Every architecture that AutoEP or presets.py knows computes what transformers' own layers do."""

import pytest
import torch
from architectures import ARCHITECTURES, difference, losses, tiny_model

from ds_mxfp8_moe.presets import PRESETS

BF16 = {"enabled": True, "recipe": "bf16"}  # in float32 models, this is float32
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}


def model_of(model_type: str, **changes):
    """In float32, with MoE blocks that matter: experts and routers as large as those of a trained model."""
    model = tiny_model(model_type, torch.float32, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "gate.w" in name or "router" in name:
                parameter.mul_(8)
    return model


def beside_hugging_face(model_type, stage=1, expert_parallel=None, model_changes=None):
    changes = {**SGD, "zero_optimization": {"stage": stage}}
    own, *_ = losses(model_of(model_type, **(model_changes or {})), None, steps=3, **changes)
    ours = losses(model_of(model_type, **(model_changes or {})), BF16, expert_parallel, steps=3, **changes)
    return own, *ours


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_trains_like_hugging_face(ranks2, model_type):
    for own, ours, layers, converted, _ in ranks2.run(beside_hugging_face, model_type):
        print(own, ours)
        assert layers == converted > 0
        assert difference(ours, own) < 1e-5
