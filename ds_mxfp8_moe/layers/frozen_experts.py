# SPDX-License-Identifier: Apache-2.0
"""AutoEP layers whose experts' weights are FrozenWeights, in place of the parameters w1, w2 and w3.

A layer gets them while AutoEP makes it, so that no copy of the weights in high precision is made on the way:

    with without_weights(dtype):
        layer, sources = ...                # AutoEP makes the layer. Its w1, w2, w3 are on the device meta
    frozen = FrozenWeights(...)             # whose bytes come from anywhere
    hold(layer, frozen)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.module_inject import auto_ep_layer
from deepspeed.module_inject.auto_ep_config import MoELayerSpec
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe import ep_repack
from torch import nn

from ..config import MXFP8MoEConfig
from ..ffn.frozen_weights import FrozenWeights
from .adapters import has_adapters
from .patches import patched
from .presets import gate_and_up_in_turn

WEIGHTS = ("w1", "w2", "w3")  # AutoEP's names of gate, down and up


def frozen_of(experts: nn.Module) -> FrozenWeights | None:
    """What a layer's experts hold in place of parameters. None: they hold parameters."""
    return experts._modules.get("frozen")


def dtype_of(experts: nn.Module) -> torch.dtype:
    """The dtype of the experts' weights, which FrozenWeights stand for."""
    frozen = frozen_of(experts)
    return experts.w1.dtype if frozen is None else frozen.dtype


def frozen_layers(model: nn.Module) -> dict[str, AutoEPMoELayer]:
    """AutoEP's layers with FrozenWeights, by their names in the model."""
    return {name: module for name, module in model.named_modules()
            if isinstance(module, AutoEPMoELayer) and frozen_of(module.experts) is not None}


def checksums_of_frozen(model: nn.Module) -> dict[str, dict[str, int]]:
    """For each layer with FrozenWeights, a checksum of each expert on this rank, by its number in the layer."""
    return {name: {str(layer.ep_rank * layer.num_local_experts + i): checksum
                   for i, checksum in enumerate(frozen_of(layer.experts).checksums())}
            for name, layer in frozen_layers(model).items()}


def wants_mxfp8(config: MXFP8MoEConfig, model: Any) -> bool:
    """Whether frozen experts of AutoEP's layers are to be held in MXFP8.

    Without the key, they are where the model has adapters by PEFT: its users save the adapters, and memory decides.
    """
    if config.recipe == "bf16" or config.frozen_experts == "keep":
        return False
    return config.frozen_experts == "mxfp8" or has_adapters(model)


def hold(layer: AutoEPMoELayer, frozen: FrozenWeights) -> None:
    """Frees the parameters of a layer's experts, and gives it `frozen` instead."""
    experts = layer.experts
    for name in WEIGHTS:
        parameter = getattr(experts, name)
        delattr(experts, name)
        free(parameter)
    experts.frozen = frozen


def hold_quantized(layer: AutoEPMoELayer, scaling_mode: str) -> None:
    """Quantises the experts' weights of a layer, one expert after the other, and lets it hold the result alone."""
    w1_EFH, w2_EHF, w3_EFH = (getattr(layer.experts, name) for name in WEIGHTS)
    gated = getattr(layer.experts, "has_gate", True)
    frozen = FrozenWeights(*w2_EHF.shape, w1_EFH.dtype, w1_EFH.device, gated)
    for i, (gate, down, up) in enumerate(zip(w1_EFH, w2_EHF, w3_EFH, strict=True)):
        frozen.put(i, gate, down, up, scaling_mode)
    hold(layer, frozen)


@contextmanager
def without_weights(dtype: torch.dtype) -> Iterator[None]:
    """Inside the context, AutoEP's new layers have experts on the device meta, and read nothing of their sources."""

    def repack(plain, experts_source, spec, ep_rank, ep_size):
        E, F, H = spec.num_experts // ep_size, spec.ffn_hidden_size, spec.hidden_size
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in ((E, F, H), (E, H, F), (E, F, H)))

    def experts(plain, *args, **kwargs):
        with torch.device("meta"):
            return plain(*args, **kwargs)

    with patched(auto_ep_layer, "repack_expert_weights", repack), patched(auto_ep_layer, "GroupedExperts", experts):
        yield


def experts_of(source: nn.Module, spec: MoELayerSpec, layer: AutoEPMoELayer,
               device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields this rank's experts of a block that AutoEP replaces: gate [F, H], down [H, F] and up [F, H] of each.

    Without ZeRO-3, one expert at a time is copied to `device`. With ZeRO-3, all parameters are gathered first, which
    is collective.
    """
    first, count = layer.ep_rank * layer.num_local_experts, layer.num_local_experts
    if any(hasattr(p, "ds_id") for p in sources_of(source, spec)):
        parts = [(source, spec, layer.ep_rank, layer.ep_size)]
    else:
        one = replace(spec, num_experts=1)
        parts = ((_one_of(source, spec, i, device), one, 0, 1) for i in range(first, first + count))
    for part in parts:
        gate, down, up = ep_repack.repack_expert_weights(*part)
        if gate_and_up_in_turn(spec):
            both = torch.cat([gate, up], dim=1)
            gate, up = both[:, 0::2], both[:, 1::2]
        yield from zip(gate, down, up, strict=True)


def _one_of(source: nn.Module, spec: MoELayerSpec, expert: int, device: torch.device) -> Any:
    """What AutoEP reads of a block's experts, for one of them."""
    if spec.expert_storage != "fused_3d":
        return nn.ModuleList([source[expert]])
    names = filter(None, (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name))
    return SimpleNamespace(**{name: getattr(source, name).data[expert:expert + 1].to(device) for name in names})


def sources_of(source: nn.Module, spec: MoELayerSpec) -> list[nn.Parameter]:
    """The parameters of all experts' weights, before AutoEP replaces their block."""
    of_weights = ep_repack.repack_expert_source_params(source, spec, 0, 1)
    return list(dict.fromkeys(p for of_weight in of_weights for p in of_weight))


def free(parameter: nn.Parameter) -> None:
    """Frees the memory of a parameter, even if an optimizer holds it."""
    parameter.data = parameter.data.new_empty(0)
