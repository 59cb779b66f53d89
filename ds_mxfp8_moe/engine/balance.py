# SPDX-License-Identifier: Apache-2.0
"""Balances the load of experts without an auxiliary loss, by a bias that acts on the choice of experts alone.

After each of the optimizer's steps, every expert that got fewer choices than the mean becomes `coeff` more likely to
be chosen, and every other one less (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2). The routing weights
do not contain the bias.
"""

from collections.abc import Sequence

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ..layers.experts import ExpertBlock
from ..ops.log import log_on_rank_0
from ..routing.choices import NO_TOPK, correction_bias
from ..routing.padding import PaddingMask
from ..transport.deadline import deadline_for
from .convert import folded


def bias_of(layer: ExpertBlock) -> torch.Tensor:
    """float32 [E], the bias that moves: the router's correction bias where the model has one (DeepSeek-V3), which
    `save_pretrained` writes; else `expert_bias`, which only checkpoints hold."""
    if (found := correction_bias(layer)) is not None:
        return getattr(*found)
    return layer.experts.expert_bias


def corrects(layer: ExpertBlock) -> bool:
    """Whether the router has a correction bias that no optimizer holds."""
    return correction_bias(layer) is not None


class LoadBalancer:
    """Moves the biases of layers. It makes sure that each layer has one, in float32: bf16 would lose its steps.

    Args:
        model: of which these are the layers.
        coeff: by how much a bias moves in a step.
    """

    def __init__(self, model: nn.Module, layers: Sequence[ExpertBlock], coeff: float):
        self.layers, self.coeff, self._said = list(layers), coeff, False
        self._padding = PaddingMask(model, [layer.experts for layer in self.layers])
        device = torch.device(get_accelerator().current_device_name())
        for layer in self.layers:
            experts, loads_E = layer.experts, torch.zeros(layer.num_experts, device=device)
            experts.mxfp8_padding = self._padding
            experts.register_buffer("tokens_per_expert", loads_E, persistent=False)
            if (found := correction_bias(layer)) is not None:
                setattr(*found, getattr(*found).float())
            elif not hasattr(experts, "expert_bias"):
                experts.register_buffer("expert_bias", torch.zeros_like(loads_E))
                layer.mxfp8_chooses = True

    def close(self) -> None:
        """Ends the balancer's part in the forwards of its model."""
        self._padding.close()
        for layer in self.layers:
            layer.experts.mxfp8_padding = None
            del layer.experts.tokens_per_expert

    @torch.no_grad()
    def after_step(self) -> None:
        """Moves the biases by the choices since the last call, and forgets these. Collective over all ranks.

        Choices of padding tokens, and those that are repeated by activation checkpointing, do not count.
        """
        loads = torch.cat([layer.experts.tokens_per_expert for layer in self.layers])
        if dist.is_initialized():
            with deadline_for(dist.get_world_group(), loads.device, "the sum of the experts' loads over all ranks"):
                dist.all_reduce(loads)
        for layer, load_E in zip(self.layers, loads.split([layer.num_experts for layer in self.layers]), strict=True):
            bias_of(layer).add_(torch.sign(load_E.mean() - load_E), alpha=self.coeff)
            layer.experts.tokens_per_expert.zero_()
        unbiased = [layer.experts.mxfp8_settings.name for layer in self.layers if layer.experts.mxfp8_unbiased]
        if unbiased and not self._said:
            self._said = True
            log_on_rank_0(f'mxfp8_moe: WARNING: "load_balance_coeff" has no effect on {folded(unbiased)}, whose '
                            f"router {NO_TOPK}")
