# SPDX-License-Identifier: Apache-2.0
"""Balances the load of experts without an auxiliary loss, by a bias that acts on the choice of experts alone.

After each of the optimizer's steps, every expert that got fewer choices than the mean becomes `coeff` more likely to
be chosen, and every other one less (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2). The routing weights
do not contain the bias. DeepSpeed 0.19.8 has the buffers for this in its AutoEP layers, and refuses to use them.
"""

from collections.abc import Sequence

import deepspeed.comm as dist
import torch

from ..layers.autoep import MXFP8AutoEPMoELayer
from ..layers.padding import PaddingMask
from ..layers.presets import CORRECTION_BIAS
from ..transport.deadline import deadline_for


def bias_of(layer: MXFP8AutoEPMoELayer) -> torch.Tensor:
    """float32 [E], the bias that moves: the router's correction bias where the model has one (DeepSeek-V3), which
    `save_pretrained` writes; else the layer's `expert_bias`, which only checkpoints hold."""
    return getattr(layer.router, CORRECTION_BIAS) if corrects(layer) else layer.expert_bias


def corrects(layer: MXFP8AutoEPMoELayer) -> bool:
    """Whether the router has a correction bias that no optimizer holds."""
    bias = getattr(layer.router, CORRECTION_BIAS, None)
    return bias is not None and not isinstance(bias, torch.nn.Parameter)


class LoadBalancer:
    """Moves the biases of AutoEP layers. It makes sure that each layer has one, in float32: bf16 would lose its steps.

    Args:
        model: of which these are the layers.
        coeff: by how much a bias moves in a step.
    """

    def __init__(self, model: torch.nn.Module, layers: Sequence[MXFP8AutoEPMoELayer], coeff: float):
        self.layers, self.coeff = list(layers), coeff
        self._padding = PaddingMask(model, self.layers)
        for layer in self.layers:
            layer.mxfp8_padding = self._padding
            if corrects(layer):
                setattr(layer.router, CORRECTION_BIAS, bias_of(layer).float())
            elif layer.expert_bias is None:
                del layer.expert_bias
                layer.register_buffer("expert_bias", torch.zeros_like(layer.tokens_per_expert))
            layer.tokens_per_expert.zero_()

    def close(self) -> None:
        """Ends the balancer's part in the forwards of its model."""
        self._padding.close()
        for layer in self.layers:
            vars(layer).pop("mxfp8_padding", None)

    @torch.no_grad()
    def after_step(self) -> None:
        """Moves the biases by the choices since the last call, and forgets these. Collective over all ranks.

        Choices of padding tokens, and those that are repeated by activation checkpointing, do not count.
        """
        loads = torch.cat([layer.tokens_per_expert for layer in self.layers])
        if dist.is_initialized():
            with deadline_for(dist.get_world_group(), loads.device, "the sum of the experts' loads over all ranks"):
                dist.all_reduce(loads)
        for layer, load_E in zip(self.layers, loads.split([layer.num_experts for layer in self.layers]), strict=True):
            bias_of(layer).add_(torch.sign(load_E.mean() - load_E), alpha=self.coeff)
            layer.tokens_per_expert.zero_()
