# SPDX-License-Identifier: Apache-2.0
"""AutoEP's experts with biases, which DeepSpeed's have not: gpt-oss."""

import deepspeed
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import nn

from .extended_experts import extend, local


class ExpertBiases(nn.Module):
    """The biases of all experts of a layer: gate [E, F], up [E, F], down [E, H]. A call returns this rank's."""

    def __init__(self, gate_EF: torch.Tensor, up_EF: torch.Tensor, down_EH: torch.Tensor, first: int, count: int):
        """`first`, `count`: this rank's experts."""
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(x.clone()) for x in (gate_EF, up_EF, down_EH))
        self.layer_slice = first, count

    def forward(self, end: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Role -> [experts of this rank, ...]. `end`: see `called`."""
        return {f"{name}_bias": local(p, self.layer_slice, end) for name, p in self.named_parameters()}


def add_biases(layer: AutoEPMoELayer, source: nn.Module) -> dict[int, list[nn.Parameter]]:
    """Makes the experts of a new AutoEP layer those of gpt-oss.

    Args:
        source: transformers' experts. gate_up_proj [E, H, 2F] and its bias [E, 2F] have the columns of gate and up in
            turn, which AutoEP took for one after the other.

    Returns:
        For each new parameter's id, those that it was made of, as in DeepSpeed's ReplacementSourceMap.
    """
    experts = layer.experts
    both_EGH = torch.cat([experts.w1.data, experts.w3.data], dim=1)
    experts.w1.data.copy_(both_EGH[:, 0::2])
    experts.w3.data.copy_(both_EGH[:, 1::2])
    gate_up, down = source.gate_up_proj_bias, source.down_proj_bias
    with deepspeed.zero.GatheredParameters([gate_up, down]):
        biases = ExpertBiases(gate_up.data[:, 0::2], gate_up.data[:, 1::2], down.data,
                              layer.ep_rank * layer.num_local_experts, layer.num_local_experts)
    biases.gate.requires_grad_(gate_up.requires_grad)
    biases.up.requires_grad_(gate_up.requires_grad)
    biases.down.requires_grad_(down.requires_grad)
    extend(layer, "expert_biases", biases)
    return {id(biases.gate): [gate_up], id(biases.up): [gate_up], id(biases.down): [down]}
