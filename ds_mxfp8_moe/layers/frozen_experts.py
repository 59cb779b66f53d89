# SPDX-License-Identifier: Apache-2.0
"""Spread experts whose weights are FrozenWeights, in place of the parameters w1, w2 and w3."""


import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import nn

from ..ffn.frozen_weights import FrozenWeights
from .placement import experts_of


def frozen_of(experts: nn.Module) -> FrozenWeights | None:
    """What a layer's experts hold in place of parameters. None: they hold parameters."""
    return experts._modules.get("frozen")


def dtype_of(experts: nn.Module) -> torch.dtype:
    """The dtype of the experts' weights, which FrozenWeights stand for."""
    frozen = frozen_of(experts)
    return experts.w1.dtype if frozen is None else frozen.dtype


def frozen_layers(model: nn.Module) -> dict[str, AutoEPMoELayer]:
    """The blocks whose experts hold FrozenWeights, by their names in the model."""
    return {name: module for name, module in model.named_modules()
            if isinstance(module, AutoEPMoELayer) and frozen_of(module.experts) is not None}


def checksums_of_frozen(model: nn.Module) -> dict[str, dict[str, int]]:
    """For each layer with FrozenWeights, a checksum of each expert on this rank, by its number in the layer."""
    return {name: {str(expert): checksum for expert, checksum in zip(
                experts_of(layer, layer.ep_rank), frozen_of(layer.experts).checksums(), strict=True)}
            for name, layer in frozen_layers(model).items()}
