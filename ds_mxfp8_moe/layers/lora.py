# SPDX-License-Identifier: Apache-2.0
"""LoRA by PEFT on the experts and routers of AutoEP layers.

PEFT (`LoraConfig(target_parameters=[...])`) wraps a module of stacked experts, once for each of its parameters, and a
router. AutoEP does not recognise a wrapped module. So the wrappers are taken off while AutoEP makes its layers. They
then become a part of the layer, where PEFT's own functions find them, for example those that switch adapters off.

The layer does not merge adapters into weights. It multiplies rows by the two factors (ffn/expert_ffn.py), which needs
no gradient of the experts' weights and leaves these, and their quantised copies, as they are. A router's adapter is
PEFT's usual one of a linear layer, since AutoEP's router computes its logits by one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import MoELayerSpec
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from torch import nn

from ..compute.formula import LowRank, gate_then_up
from ..config import ConfigError
from .adapters import ElsewhereExperts, is_peft, is_wrapper, joined, unmerged_adapters, unwrapped, wrappers_of
from .extended_experts import called, extend, local, mark_replicated
from .patches import patched
from .presets import CORRECTION_BIAS, gate_and_up_in_turn, router_names

ADAPTERS = "expert_adapters.wrapper."  # how the adapters' names begin in an AutoEP layer


class _Factor(nn.Linear):
    """One of PEFT's factors. A call returns the weight, since ZeRO-3 gathers parameters around calls."""

    def forward(self, end: torch.Tensor | None = None) -> torch.Tensor:
        return local(self.weight, (0, len(self.weight)), end)


class ExpertAdapters(nn.Module):
    """PEFT's wrappers of a layer's experts, with the adapters of all experts. A call returns this rank's.

    Attributes:
        wrapper: the outermost of PEFT's ParamWrappers.
        experts_name: of the wrapped module, in the block that AutoEP replaced.
    """

    def __init__(self, wrapper: nn.Module, spec: MoELayerSpec, layer: AutoEPMoELayer):
        """`spec`, `layer`: AutoEP's description of the block, and the layer that it made in its place.

        Raises:
            ConfigError: an adapter targets another parameter than the experts' two stacked weights.
        """
        super().__init__()
        self.wrapper, self.experts_name = wrapper, spec.experts_name
        chain = wrappers_of(wrapper)
        source = chain[-1].base_layer
        both, down = (getattr(source, name, None) for name in (spec.expert_w1_name, spec.expert_w2_name))
        names = {spec.expert_w1_name: "up", spec.expert_w2_name: "down"} if spec.expert_w3_name is None else {}
        self._gemms = [names.get(one.parameter_name) for one in chain]
        if None in self._gemms:
            wrong = chain[self._gemms.index(None)].parameter_name
            raise ConfigError(f"{spec.moe_module_name}.{spec.experts_name}: an adapter targets {wrong}; expert "
                              f"parallelism takes those of {', '.join(names) or 'stacked gate and up weights'} alone: "
                              "take it out of target_parameters")
        layout = classify_fused_gate_up_layout(*(tuple(getattr(p, "ds_shape", p.shape)) for p in (both, down)))
        # PEFT's product of the factors is laid out as the parameter is, [E, out, in] or [E, in, out].
        self._exchanged = [getattr(one, "_did_swap_in_out_features", False) == layout.needs_transpose for one in chain]
        self._in_turn = gate_and_up_in_turn(spec)
        self._layer_slice = layer.ep_rank * layer.num_local_experts, layer.num_local_experts
        chain[-1].base_layer = ElsewhereExperts({one.parameter_name for one in chain})
        for one in chain:
            for factor in (*one.lora_A.values(), *one.lora_B.values()):
                factor.__class__ = _Factor

    def forward(self, factor_of: Callable = called) -> dict[str, LowRank]:
        """Name of a GEMM -> the active adapters of this rank's experts, joined along the rank.

        `factor_of`: gets a module that holds a factor, and returns the factor.
        """
        found: dict[str, list] = {}
        for one, gemm, exchanged in zip(wrappers_of(self.wrapper), self._gemms, self._exchanged, strict=True):
            for adapter in unmerged_adapters(one):
                found.setdefault(gemm, []).append(self._factors(one, adapter, gemm, exchanged, factor_of))
        return {gemm: joined(factors) for gemm, factors in found.items()}

    def whole(self) -> dict[str, LowRank]:
        """What a call returns, outside a forward. Collective in ZeRO-3."""
        with deepspeed.zero.GatheredParameters([p for p in self.parameters() if hasattr(p, "ds_id")]):
            return self.forward(_Factor.forward)  # a call would disturb ZeRO-3's record of forwards

    def _factors(self, wrapper: nn.Module, adapter: str, gemm: str, exchanged: bool, factor_of: Callable) -> LowRank:
        E = wrapper.num_experts
        a_ERK = local(factor_of(wrapper.lora_A[adapter]).unflatten(0, (E, -1)), self._layer_slice)
        # [N, R * E]: the expert is the last of these indices
        b_ENR = local(factor_of(wrapper.lora_B[adapter]).unflatten(1, (-1, E)).permute(2, 0, 1), self._layer_slice)
        if exchanged:
            a_ERK, b_ENR = b_ENR.transpose(1, 2), a_ERK.transpose(1, 2)
        if gemm == "up" and self._in_turn:
            b_ENR = gate_then_up(b_ENR, dim=1)
        scaling = wrapper.scaling[adapter]  # PEFT's default is 1
        return LowRank(a_ERK, b_ENR if scaling == 1 else b_ENR * scaling)


def _hides_weights(module: nn.Module) -> bool:
    """Whether PEFT has wrapped a module of stacked experts [E, ..., ...], or a router that is not a linear layer."""
    chain = wrappers_of(module)
    if not chain or isinstance(chain[-1].base_layer, nn.Linear):
        return False
    return any(one.parameter_name == "weight" or len(getattr(p, "ds_shape", p.shape)) == 3
               for one in chain for p in (one.get_param(), ))


@contextmanager
def adapted_layers(model: nn.Module | None) -> Iterator[None]:
    """Inside the context, AutoEP finds the MoE blocks of a model that PEFT has changed, and keeps their adapters.

    A PeftModel's blocks are looked for under their names in the model that it holds, unless "expert_parallel" has a
    `moe_layer_pattern`.

    Raises:
        ConfigError: a part of a block that AutoEP makes anew has an adapter that it would lose.
    """
    if model is None or "peft" not in sys.modules:
        yield
        return
    from peft.tuners.lora.layer import LoraLayer

    off, routers = {}, []

    def init(plain, self, given, config, *args, **kwargs):
        off.update({(parent, name): child for parent in model.modules() for name, child in parent.named_children()
                    if _hides_weights(child) and not is_wrapper(parent)})
        for (parent, name), wrapper in off.items():
            setattr(parent, name, unwrapped(wrapper))
        inner = given.get_base_model() if is_peft(given) and config.moe_layer_pattern is None else given
        plain(self, inner, config, *args, **kwargs)

    def replace_layer(plain, self, spec, *args, **kwargs):
        block = self.model.get_submodule(spec.moe_module_name)
        place, _, name = router_names(spec)[0].rpartition(".")
        place = block.get_submodule(place)
        gate = off.pop((place, name), None) or getattr(place, name)
        if isinstance(gate, LoraLayer):
            setattr(place, name, gate.get_base_layer())
        _refuse_lost_adapters(block, spec)
        layer, sources = plain(self, spec, *args, **kwargs)
        layer.published_parts = published_parts(spec)
        if isinstance(gate, LoraLayer):
            routers.append((layer.router, gate))
        wrapper = off.pop((block, spec.experts_name), None)
        if wrapper is not None:
            extend(layer, "expert_adapters", ExpertAdapters(wrapper, spec, layer))
        return layer, sources

    def replace_layers(plain, self, *args, **kwargs):
        sources = plain(self, *args, **kwargs)
        for router, adapter in routers:
            _adapt_router(router, adapter)
        return sources

    try:
        with patched(AutoEP, "__init__", init), patched(AutoEP, "replace_moe_layers", replace_layers), \
                patched(AutoEP, "_replace_moe_layer_without_retarget", replace_layer):
            yield
    finally:
        for (parent, name), wrapper in off.items():
            setattr(parent, name, wrapper)


def _adapt_router(router: nn.Module, adapter: nn.Module) -> None:
    """Puts PEFT's adapter of the original router around the linear layer of AutoEP's.

    transformers' hook, which records the logits, moves to the adapter. DeepSpeed has put it onto the linear layer.
    """
    from peft.tuners.lora.layer import Linear

    gate = router.gate
    if is_wrapper(adapter):
        adapter.__class__ = Linear  # with one matrix in place of a stack, the factors are the same
    adapter.base_layer, router.gate = gate, adapter
    adapter._forward_hooks, gate._forward_hooks = gate._forward_hooks, adapter._forward_hooks
    mark_replicated(adapter)


def _refuse_lost_adapters(block: nn.Module, spec: MoELayerSpec) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper  # modules_to_save

    kept = tuple(f"{name}." for name in (spec.shared_experts_name, spec.shared_experts_gate_name) if name)
    for name, module in block.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not f"{name}.".startswith(kept):
            raise ConfigError(f"{spec.moe_module_name}.{name} is wrapped by PEFT's {type(module).__name__}, which "
                              "AutoEP would lose, since it makes routers and experts anew. In MoE blocks, expert "
                              "parallelism takes LoRA of routers, of shared experts and of the stacked weights "
                              f"{spec.expert_w1_name} and {spec.expert_w2_name}, and shared experts in "
                              'modules_to_save. Take it out of the LoraConfig; target_modules="all-linear" works')


def published_parts(spec: MoELayerSpec) -> dict[str, str]:
    """How names in an AutoEP layer begin -> how the same names begin in the block that it replaced.

    The experts' own weights and biases are not among them: AutoEP arranges them in another way.
    """
    gate, correction_bias = router_names(spec)
    return {"router.gate.": f"{gate}.", f"router.{CORRECTION_BIAS}": correction_bias,
            "shared_experts.": f"{spec.shared_experts_name}.",
            "shared_experts_gate.": f"{spec.shared_experts_gate_name}.", ADAPTERS: f"{spec.experts_name}."}


def with_published_names(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """`state`, which has the names of the modules in `model`, with the names that plain PEFT gives to adapters."""
    renamed = {f"{name}.{own}": f"{name}.{published}" for name, layer in model.named_modules()
               for own, published in getattr(layer, "published_parts", {}).items()}
    starts, found = tuple(renamed), {}
    for key, value in state.items():
        if key.startswith(starts):
            start = next(start for start in starts if key.startswith(start))
            key = renamed[start] + key.removeprefix(start)
        found[key] = value
    return found


def with_module_names(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The inverse of `with_published_names`: PEFT finds adapters by the names of their modules."""
    own = {key: key for key in model.state_dict()}
    of_published = with_published_names(own, model)
    return {key if key in own else of_published.get(key, key): value for key, value in state.items()}
