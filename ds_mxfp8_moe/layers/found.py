# SPDX-License-Identifier: Apache-2.0
"""Which MoE layers an engine or a model has."""

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine

from .classic import MXFP8MOELayer
from .experts import MXFP8Experts


def converted_layers(model: torch.nn.Module) -> list[MXFP8MOELayer | MXFP8Experts]:
    """The model's layers on the MXFP8 path."""
    layers = [module for module in model.modules() if isinstance(module, (MXFP8MOELayer, MXFP8Experts))]
    return [layer for layer in layers if "mxfp8_settings" in vars(layer) and layer.mxfp8_settings.config.enabled]


def trains_experts(engine: DeepSpeedEngine) -> bool:
    """Whether any parameter that belongs to this rank's experts alone is trained."""
    return any(is_moe_param(p) and p.requires_grad for p in engine.module.parameters())
