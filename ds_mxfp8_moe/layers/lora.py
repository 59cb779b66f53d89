# SPDX-License-Identifier: Apache-2.0
"""LoRA by PEFT on the experts and routers of AutoEP layers.

PEFT (`LoraConfig(target_parameters=[...])`) wraps a module of stacked experts, once for each of its parameters, and a
router. AutoEP does not recognise a wrapped module. So the wrappers are taken off while AutoEP makes its layers. They
then become a part of the layer, where PEFT's own functions find them, for example those that switch adapters off.

The layer does not merge adapters into weights. It multiplies rows by the two factors (ffn/expert_ffn.py), which needs
no gradient of the experts' weights and leaves these, and their quantised copies, as they are. A router's adapter is
PEFT's usual one of a linear layer, since AutoEP's router computes its logits by one.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import MoELayerSpec
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from torch import nn

from ..compute.formula import LowRank, gate_then_up
from ..config import ConfigError
from .extended_experts import called, extend, local, mark_replicated
from .patches import patched
from .presets import CORRECTION_BIAS, gate_and_up_in_turn, router_names

RANK_MULTIPLE = 8  # 16 bytes of a 16-bit dtype
ADAPTERS = "expert_adapters.wrapper."  # how the adapters' names begin in an AutoEP layer


def is_peft(model: nn.Module | None) -> bool:
    """Whether the model is a PeftModel."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def saves_adapters(model: nn.Module) -> bool:
    """Whether the model's own save_pretrained writes adapters: of PeftModels, and after transformers' add_adapter."""
    return is_peft(model) or getattr(model, "_hf_peft_config_loaded", False)


def has_adapters(model: nn.Module | None) -> bool:
    """Whether PEFT has put adapters into the model."""
    if is_peft(model):
        return True
    if not isinstance(model, nn.Module) or "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


class _Factor(nn.Linear):
    """One of PEFT's factors. A call returns the weight, since ZeRO-3 gathers parameters around calls."""

    def forward(self, end: torch.Tensor | None = None) -> torch.Tensor:
        return local(self.weight, (0, len(self.weight)), end)


class _ElsewhereExperts(nn.Module):
    """Stands for the experts inside PEFT's wrappers, once AutoEP has spread them over the ranks.

    PEFT reads their parameters, `names`, to merge adapters. This is an error.
    """

    def __init__(self, names: set[str]):
        super().__init__()
        self.names = names

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["names"]:
            raise RuntimeError("AutoEP has spread these experts over the ranks, so PEFT cannot merge adapters into "
                               "their weights. ds_mxfp8_moe.save_pretrained(engine, directory, weights=\"fp8\") and "
                               "export_weights(engine) merge them. Or save the adapters by save_pretrained(engine, "
                               "directory), and merge them in a process without DeepSpeed")
        return super().__getattr__(name)


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
        chain[-1].base_layer = _ElsewhereExperts({one.parameter_name for one in chain})
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
        return {gemm: _joined(factors) for gemm, factors in found.items()}

    def parameter_names(self) -> list[str]:
        """Of the experts' stacked weights that have adapters."""
        return [one.parameter_name for one in reversed(wrappers_of(self.wrapper))]

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


def _joined(factors: list[LowRank]) -> LowRank:
    a_ERK, b_ENR = factors[0]
    if len(factors) > 1:
        a_ERK, b_ENR = torch.cat([one.a_ERK for one in factors], 1), torch.cat([one.b_ENR for one in factors], 2)
    missing = -a_ERK.shape[1] % RANK_MULTIPLE
    if missing:
        a_ERK, b_ENR = F.pad(a_ERK, (0, 0, 0, missing)), F.pad(b_ENR, (0, missing))
    return LowRank(a_ERK.contiguous(), b_ENR.contiguous())


def wrappers_of(module: nn.Module) -> list[nn.Module]:
    """PEFT's ParamWrappers around a module, from the outermost."""
    found = []
    while _is_wrapper(module):
        found.append(module)
        module = module.base_layer
    return found


def _is_wrapper(module: nn.Module) -> bool:
    if "peft" not in sys.modules:
        return False
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(module, ParamWrapper)


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

    off = {(parent, name): child for parent in model.modules() for name, child in parent.named_children()
           if _hides_weights(child) and not _is_wrapper(parent)}
    routers = []

    def init(plain, self, given, config, *args, **kwargs):
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

    for (parent, name), wrapper in off.items():
        setattr(parent, name, wrappers_of(wrapper)[-1].base_layer)
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
    if _is_wrapper(adapter):
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


def adapted_parts(layer: nn.Module) -> list[str]:
    """What of an MoE layer has adapters, beside its shared experts."""
    names = layer.expert_adapters.parameter_names() if hasattr(layer, "expert_adapters") else []
    return [*names, "the router"] if has_adapters(getattr(layer, "router", None)) else names


def base_prefix(layer: AutoEPMoELayer) -> str:
    """What PEFT puts before the names of the wrapped experts' own parameters."""
    adapters = getattr(layer, "expert_adapters", None)
    return "" if adapters is None else "base_layer." * len(wrappers_of(adapters.wrapper))


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


def merged_name(name: str, model: nn.Module, prefix: str) -> str | None:
    """What a parameter of `model` is called when PEFT's adapters are merged. None: it is a part of an adapter.

    `prefix`: the name in `model` of the model that PEFT has changed.
    """
    name = name.removeprefix(f"{prefix}.")
    if ADAPTERS in name or ".original_module." in name or re.search(r"\.lora_\w+\.", name):
        return None
    if saved := re.search(r"\.modules_to_save\.([^.]+)", name):
        active = model.active_adapters
        if saved[1] not in (active() if callable(active) else active):  # transformers' own is a method
            return None
    return re.sub(r"\.(base_layer|modules_to_save\.[^.]+)(?=\.)", "", name)


def adapted_weights(model: nn.Module) -> dict[int, nn.Module]:
    """id of a weight -> PEFT's layer around it, which has adapters that are active and not merged.

    Those of AutoEP's experts are not among them.

    Raises:
        RuntimeError: there are adapters that no product of two factors replaces, as with DoRA.
    """
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora.layer import LoraLayer

    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or ADAPTERS[:-1] in name or not unmerged_adapters(layer):
            continue
        adapters = unmerged_adapters(layer)
        odd = [adapter for adapter in adapters if adapter in layer.lora_variant or layer.lora_bias.get(adapter)]
        if odd or not hasattr(layer, "get_delta_weight"):
            raise RuntimeError(f"{name}: the adapters {adapters} cannot be merged here, since they are more than a "
                               "product of two factors. Save them by ds_mxfp8_moe.save_pretrained(engine, directory), "
                               "and merge them in a process without DeepSpeed")
        weight = layer.get_param() if _is_wrapper(layer) else layer.get_base_layer().weight
        found[id(weight)] = layer
    return found


def unmerged_adapters(layer: nn.Module) -> list[str]:
    """The active adapters of one of PEFT's layers, without those that its weight holds already."""
    if layer.disable_adapters:
        return []
    return [adapter for adapter in layer.active_adapters if adapter not in layer.merged_adapters
            and (adapter in layer.lora_A or adapter in layer.lora_embedding_A)]
