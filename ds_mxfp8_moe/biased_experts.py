# SPDX-License-Identifier: Apache-2.0
"""AutoEP's experts with biases, which DeepSpeed's have not: gpt-oss.

Weights are sharded over the expert-parallel group. Biases are small, so every rank holds those of all experts, as
parameters like any other. DeepSpeed's checkpoints know no expert parameters but w1, w2, w3; other parameters they
save and load as they are, for any number of ranks.
"""

import deepspeed
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.ep_experts import GroupedExperts, apply_expert_activation
from torch import nn

from .activation import bias_rows


class ExpertBiases(nn.Module):
    """The biases of all experts of a layer: gate [E, F], up [E, F], down [E, H]. A call returns this rank's.

    Gradients of the other ranks' experts are zero here. DeepSpeed sums a parameter's gradient over all ranks and
    divides it by their number, whether it is sharded or not, so both kinds get the same gradient.
    """

    def __init__(self, gate_EF: torch.Tensor, up_EF: torch.Tensor, down_EH: torch.Tensor, first: int, count: int):
        """`first`, `count`: this rank's experts."""
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(x.clone()) for x in (gate_EF, up_EF, down_EH))
        self.first, self.count = first, count
        for parameter in self.parameters():
            parameter.allreduce = True
            parameter.ds_zero_placement_family = "replicated"

    def forward(self) -> dict[str, torch.Tensor]:
        """Role -> [experts of this rank, ...]."""
        found = {f"{name}_bias": p.narrow(0, self.first, self.count) for name, p in self.named_parameters()}
        if hasattr(self.gate, "ds_id"):  # ZeRO-3 releases the parameters after this call
            found = {role: bias.clone() for role, bias in found.items()}
        return found


class BiasedGroupedExperts(GroupedExperts):
    """`GroupedExperts` with the layer's biases."""

    held: tuple[AutoEPMoELayer]  # the layer, in a tuple, so that it does not become a part of its own part

    def biases(self) -> dict[str, torch.Tensor]:
        """Role -> [experts of this rank, ...]."""
        return self.held[0].expert_biases()

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """As GroupedExperts: rows [P, H] sorted by expert, and how many each expert gets.

        Raises:
            ValueError: the layer is folded with AutoTP.
        """
        handles = self.held[0].folding_group_handles
        if handles is not None and handles.spec.tp_size > 1:  # DeepSpeed would average the biases' gradients
            raise ValueError("experts with biases (gpt_oss) do not work with AutoTP: set "
                             f'"tensor_parallel": {{"autotp_size": 1}} (given: {handles.spec.tp_size})')
        ends_E = num_tokens_per_expert.cumsum(0).int()
        # Rows past the last group belong to no expert, and torch._grouped_mm leaves any values in them.
        inside_P = torch.arange(len(x), device=x.device).unsqueeze(1) < ends_E[-1]
        bias = self.biases()

        def project(rows: torch.Tensor, weight: torch.Tensor, role: str) -> torch.Tensor:
            y = torch._grouped_mm(rows, weight.to(rows.dtype).transpose(1, 2), offs=ends_E)
            return torch.where(inside_P, y + bias_rows(bias[role], ends_E, len(rows)), 0).to(rows.dtype)

        h = apply_expert_activation(project(x, self.w1, "gate_bias"), project(x, self.w3, "up_bias"), self.activation,
                                    self.activation_alpha, self.activation_limit)
        return project(h, self.w2, "down_bias")


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
    layer.expert_biases = biases
    experts.__class__ = BiasedGroupedExperts
    experts.held = (layer, )
    return {id(biases.gate): [gate_up], id(biases.up): [gate_up], id(biases.down): [down]}
