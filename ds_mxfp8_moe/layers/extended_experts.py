# SPDX-License-Identifier: Apache-2.0
"""AutoEP's experts with more than DeepSpeed's three weights: biases (gpt-oss) and LoRA adapters.

Weights are sharded over the expert-parallel group. What this file adds is small, so every rank holds that of all
experts, in modules of the layer, as parameters like any other. DeepSpeed's checkpoints know no expert parameters but
w1, w2, w3; other parameters they save and load as they are, for any number of ranks.

Gradients of the other ranks' experts are zero on a rank. DeepSpeed sums a parameter's gradient over all ranks and
divides it by their number, whether it is sharded or not, so both kinds get the same gradient.
"""

from typing import Any

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.ep_experts import GroupedExperts, apply_expert_activation
from torch import nn

from ..compute.activation import bias_rows
from ..compute.formula import LowRank


class ExtendedGroupedExperts(GroupedExperts):
    """`GroupedExperts` with the layer's biases and adapters. A layer has both, or one of them."""

    held: tuple[AutoEPMoELayer]  # the layer, in a tuple, so that it does not become a part of its own part

    def biases(self) -> dict[str, torch.Tensor]:
        """Role -> [experts of this rank, ...]."""
        return self._of_layer("expert_biases")

    def adapters(self) -> dict[str, LowRank]:
        """Name of a GEMM ("up" includes the gate) -> the adapter of this rank's experts."""
        return self._of_layer("expert_adapters")

    def _of_layer(self, name: str) -> dict:
        module = getattr(self.held[0], name, None)
        return {} if module is None else called(module)

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """As GroupedExperts: rows [P, H] sorted by expert, and how many each expert gets.

        Raises:
            ValueError: the layer is folded with AutoTP.
        """
        handles = self.held[0].folding_group_handles
        if handles is not None and handles.spec.tp_size > 1:  # DeepSpeed would average these parameters' gradients
            raise ValueError("experts with biases (gpt_oss) or LoRA adapters do not work with AutoTP: set "
                             f'"tensor_parallel": {{"autotp_size": 1}} (given: {handles.spec.tp_size})')
        ends_E = num_tokens_per_expert.cumsum(0).int()
        # Rows past the last group belong to no expert, and torch's grouped_mm leaves any values in them.
        inside_P = torch.arange(len(x), device=x.device).unsqueeze(1) < ends_E[-1]
        bias, adapters = self.biases(), self.adapters()

        def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.grouped_mm(rows, weight.to(rows.dtype).transpose(1, 2), offs=ends_E)
            return torch.where(inside_P, y, 0).to(rows.dtype)

        def project(rows: torch.Tensor, weight: torch.Tensor, role: str) -> torch.Tensor:
            y = multiply(rows, weight)
            if role in bias:
                y = y + bias_rows(bias[role], ends_E, len(rows))
            return torch.where(inside_P, y, 0).to(rows.dtype)

        gate, up = project(x, self.w1, "gate_bias"), project(x, self.w3, "up_bias")
        if "up" in adapters:
            low = multiply(multiply(x, adapters["up"].a_ERK), adapters["up"].b_ENR)
            gate, up = gate + low[:, :gate.shape[1]], up + low[:, gate.shape[1]:]
        h = apply_expert_activation(gate, up, self.activation, self.activation_alpha, self.activation_limit)
        y = project(h, self.w2, "down_bias")
        if "down" in adapters:
            y = y + multiply(multiply(h, adapters["down"].a_ERK), adapters["down"].b_ENR)
        return y


def extend(layer: AutoEPMoELayer, name: str, module: nn.Module) -> None:
    """Adds `module` to a new AutoEP layer, whose experts find it there. `name`: expert_biases or expert_adapters.

    Args:
        module: a call returns what ExtendedGroupedExperts.biases or .adapters does.
    """
    mark_replicated(module)
    setattr(layer, name, module)
    layer.experts.__class__ = ExtendedGroupedExperts
    layer.experts.held = (layer, )


def mark_replicated(module: nn.Module) -> None:
    """Lets DeepSpeed treat the parameters of a module that it does not know as equal on all ranks."""
    for parameter in module.parameters():
        parameter.allreduce = True
        parameter.ds_zero_placement_family = "replicated"


def called(module: nn.Module) -> Any:
    """module(end), where the call returns parts of the module's own parameters by `local`.

    ZeRO-3 gathers the parameters for the module's backward. It releases them when an input of the module gets its
    gradient: without an input, the parameters of all layers would stay gathered until the whole backward has ended.
    """
    of_zero3 = [p for p in module.parameters(recurse=False) if p.requires_grad and hasattr(p, "ds_id")]
    return module(torch.empty((), device=of_zero3[0].device, requires_grad=True)) if of_zero3 else module()


def local(tensor_E: torch.Tensor, layer_slice: tuple[int, int], end: torch.Tensor | None = None) -> torch.Tensor:
    """The part [E, ...] of this rank's experts; `layer_slice` is the first of them, and how many they are.

    With ZeRO-3 it is a copy, since DeepSpeed releases parameters after the call of their module. `end`: see `called`.
    """
    part = tensor_E.narrow(0, *layer_slice)
    if not hasattr(tensor_E, "ds_id"):
        return part
    return part.clone() if end is None else _CopyWithEnd.apply(part, end)


class _CopyWithEnd(torch.autograd.Function):
    """A copy of a tensor. A second tensor gets a gradient, too, which means nothing."""

    @staticmethod
    def forward(ctx, tensor, end):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_empty(())
