# SPDX-License-Identifier: Apache-2.0
"""Lets AutoEP's layers hold frozen experts in MXFP8 alone: the key "frozen_experts".

While an engine starts, AutoEP replaces one MoE block after the other. The weights of a block's experts then go to the
device, one expert after the other, and are quantised there. The block's own are freed before the next block. So beside
the user's model the start takes no memory of the host. On the device it takes that of all experts in MXFP8, which
stay, and of two copies of one expert in the model's dtype. Of parameters that ZeRO-3 has partitioned, a layer is
gathered at once.

In an engine that exists, `convert` does the same, layer by layer.
"""

from contextlib import AbstractContextManager
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import MoELayerSpec
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups

from ..compute.formula import ExpertFormula, NotRecognised
from ..config import ConfigError, MXFP8MoEConfig
from ..ffn.frozen_weights import FrozenWeights
from ..layers.frozen_experts import WEIGHTS, experts_of, free, hold, sources_of, wants_mxfp8, without_weights
from ..layers.held_experts import HeldExperts, holds_experts
from ..layers.patches import patched
from ..transport.deadline import failure_in_world
from .convert import autoep_formula, shared_parameters


def frozen_experts_held(config: MXFP8MoEConfig, model: Any) -> AbstractContextManager:
    """Engines made inside the context hold frozen experts as the section asks for it.

    Args:
        model: the model of the engine, with PEFT's adapters where PEFT has put them.

    Raises:
        RuntimeError: inside the context, on every rank, if one of them cannot hold the experts of a layer.
    """
    wanted = wants_mxfp8(config, model)

    def configure(plain, engine, model, *args, **kwargs):
        if not wanted and not holds_experts(model):
            return plain(engine, model, *args, **kwargs)
        if engine.local_rank >= 0:  # as DeepSpeed does later in the start
            get_accelerator().set_device(engine.local_rank)
        start = _Start(engine, model, config)
        with patched(AutoEP, "_replace_moe_layer_without_retarget", start.replace_layer):
            sources = plain(engine, model, *args, **kwargs)
        start.end()
        left = [name for name, one in model.named_modules() if isinstance(one, HeldExperts) and not one.original]
        if left:
            given = engine._config._param_dict.get("expert_parallel", "missing")
            raise ConfigError(f"{left[0]} is held in MXFP8 alone, and AutoEP has not made a layer of it: the section "
                              f'"expert_parallel" is {given}. Write the one that from_pretrained was given')
        return sources

    return patched(DeepSpeedEngine, "_configure_expert_parallel", configure)


class _Start:
    """The layers that AutoEP makes while one engine starts."""

    def __init__(self, engine: DeepSpeedEngine, model: torch.nn.Module, config: MXFP8MoEConfig):
        self.engine, self.model, self.config = engine, model, config
        self.shared = shared_parameters(model)
        self.device = torch.device(get_accelerator().current_device_name())
        self.layers: list[AutoEPMoELayer] = []
        self.failure: str | None = None

    def replace_layer(self, plain, autoep, spec, *args, **kwargs) -> tuple:
        """AutoEP's function that makes a layer and puts it into the place of the block."""
        block = autoep.model.get_submodule(spec.moe_module_name)
        name = next(name for name, module in self.model.named_modules() if module is block)
        source = getattr(block, spec.experts_name)
        weights, in_8_bits = sources_of(source, spec), isinstance(source, HeldExperts)
        if not in_8_bits and (not self.config.selects(name) or any(p.requires_grad for p in weights)
                              or not self.shared.keys().isdisjoint(weights)):
            return plain(autoep, spec, *args, **kwargs)
        dtype = weights[0].dtype  # to which DeepSpeed casts the weights
        if self.engine.fp16_enabled():
            dtype = torch.float16
        elif self.engine.bfloat16_enabled():
            dtype = torch.bfloat16
        with without_weights(dtype):
            layer, sources = plain(autoep, spec, *args, **kwargs)
        origins = [sources.sources.pop(id(getattr(layer.experts, key)), None) for key in WEIGHTS]
        device = weights[0].device if self.engine.dont_change_device else self.device
        name = f"{name}.{spec.experts_name}"
        if in_8_bits:
            frozen = self._taken(name, layer, source, dtype, device)
        else:
            try:
                formula = autoep_formula(layer, {})
            except NotRecognised:  # DeepSpeed's own path needs parameters
                stacks = map(torch.stack, zip(*experts_of(source, spec, layer, weights[0].device), strict=True))
                for key, origin, stack in zip(WEIGHTS, origins, stacks, strict=True):
                    parameter = torch.nn.Parameter(stack, requires_grad=False)
                    vars(parameter).update(vars(getattr(layer.experts, key)))
                    setattr(layer.experts, key, parameter)
                    if origin is not None:  # a client optimizer needs them
                        sources.sources[id(parameter)] = origin
                return layer, sources
            frozen = self._quantized(name, layer, formula, source, spec, dtype, device)
        hold(layer, frozen)
        for parameter in weights:
            if not hasattr(parameter, "ds_id"):  # ZeRO-3 frees its partitions by itself
                free(parameter)
        self.layers.append(layer)
        return layer, sources

    def _taken(self, name: str, layer: AutoEPMoELayer, source: HeldExperts, dtype: torch.dtype,
               device: torch.device) -> FrozenWeights | None:
        """Experts that are in 8 bits already. None if this rank has failed, in this layer or before."""
        try:
            if self.failure is None:
                count = layer.num_local_experts
                return source.take(name, layer.ep_rank * count, count, dtype, device)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        return None

    def _quantized(self, name: str, layer: AutoEPMoELayer, formula: ExpertFormula, source: torch.nn.Module,
                   spec: MoELayerSpec, dtype: torch.dtype, device: torch.device) -> FrozenWeights | None:
        """None if this rank has failed, in this layer or before."""
        frozen, done = None, 0
        try:
            if self.failure is None:
                frozen = FrozenWeights(layer.num_local_experts, formula.hidden_size, formula.ffn_size, dtype, device)
            for weights in experts_of(source, spec, layer, device):
                if frozen is not None:
                    frozen.put(done, *weights, self.config.scaling_mode)
                done += 1
        except Exception as error:
            self.failure = (f"{name}, with {done} of {layer.num_local_experts} experts done: {type(error).__name__}: "
                            f"{error}")
        return None if self.failure else frozen

    def end(self) -> None:
        """Raises RuntimeError on every rank, if one of them failed. Makes copies of experts on several ranks equal, as
        DeepSpeed does with parameters."""
        failure = failure_in_world(self.failure, "the start (every rank quantises its experts)")
        if failure:
            raise RuntimeError(f"frozen experts could not be held in MXFP8: {failure}")
        for layer in self.layers:
            group = groups._get_expert_data_parallel_group(layer.ep_group_name)
            if dist.get_world_size(group=group) > 1:
                for buffer in layer.experts.frozen.buffers():
                    dist.broadcast(buffer, groups._get_expert_broadcast_src_rank(layer.ep_group_name), group=group)
