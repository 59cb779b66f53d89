# SPDX-License-Identifier: Apache-2.0
"""LoRA by PEFT on stacked experts, and on the rest of a model.

PEFT (`LoraConfig(target_parameters=[...])`) wraps a module of stacked experts, once for each of its parameters.
DeepSpeed looks for the weights in `block.experts`. So `take_wrappers` moves the wrappers from around the experts into
them, as their child `adapters`. Modules, parameters and state dicts keep the names that the wrappers gave: PEFT's own
functions go by them.

The experts do not merge adapters into weights. They multiply rows by the two factors (ffn/expert_ffn.py), which needs
no gradient of the experts' weights and leaves these, and their quantized copies, as they are.

Weights are sharded over the expert-parallel group. Factors are small, so every rank holds them for all experts, as
parameters like any other. The gradients of the other ranks' experts are zero on a rank. DeepSpeed sums a parameter's
gradient over all ranks and divides it by their number, whether it is sharded or not, so both kinds get the same
gradient.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

from ..compat.private_names import missing
from ..compute.formula import LowRank
from ..config import ConfigError
from ..recognition.stacked import SPREAD_NAMES, Layout, is_stacked
from .placement import own_part

RANK_MULTIPLE = 8  # 16 bytes of a 16-bit dtype
ADAPTERS = "adapters."  # how their names begin in the experts


# ---- PEFT's modules in a model --------------------------------------------------------------------------------------


def is_peft(model: nn.Module | None) -> bool:
    """Whether the model is a PeftModel."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def saves_adapters(model: nn.Module) -> bool:
    """Whether the model's own save_pretrained writes adapters: of PeftModels, and after transformers' add_adapter."""
    try:
        return is_peft(model) or bool(getattr(model, "active_adapters", list)())
    except (ImportError, ValueError):  # PEFT is not there, or was not used
        return False


def has_adapters(model: nn.Module | None) -> bool:
    """Whether PEFT has put adapters into the model."""
    if is_peft(model):
        return True
    if not isinstance(model, nn.Module) or "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def wrappers_of(module: nn.Module | None) -> list[nn.Module]:
    """PEFT's ParamWrappers around a module, from the outermost."""
    found = []
    while is_wrapper(module):
        found.append(module)
        module = module.base_layer
    return found


def is_wrapper(module: nn.Module | None) -> bool:
    """Whether a module is PEFT's ParamWrapper."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(module, ParamWrapper)


def unwrapped(module: nn.Module | None) -> nn.Module | None:
    """The module inside PEFT's ParamWrappers."""
    chain = wrappers_of(module)
    return chain[-1].base_layer if chain else module


def unmerged_adapters(layer: nn.Module) -> list[str]:
    """The active adapters of one of PEFT's layers, without those that its weight holds already."""
    if layer.disable_adapters:
        return []
    return [adapter for adapter in layer.active_adapters if adapter not in layer.merged_adapters
            and adapter in layer.scaling]


# ---- adapters of spread experts -------------------------------------------------------------------------------------


NO_MERGE = ("expert parallelism has spread these experts over the ranks, so PEFT cannot merge adapters into their "
            "weights, nor remove them. ds_mxfp8_moe.save_pretrained(engine, directory, weights=\"fp8\") and "
            "export_weights(engine) merge them. Or save the adapters by save_pretrained(engine, directory), and merge "
            "them in a process without DeepSpeed")


class ElsewhereExperts(nn.Module):
    """Stands for the experts inside PEFT's wrappers, once they are spread over the ranks.

    PEFT reads their parameters, `names`, to merge adapters. This is an error.
    """

    def __init__(self, names: set[str]):
        super().__init__()
        self.names = names

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["names"]:
            raise RuntimeError(NO_MERGE)
        return super().__getattr__(name)


def check_adapters(model: nn.Module) -> None:
    """Raises ConfigError if PEFT has changed stacked experts in another way than by adapters of their two weights, or
    is a release that this package does not know."""
    if "peft" not in sys.modules:
        return
    from peft.utils import AuxiliaryTrainingWrapper  # modules_to_save

    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and any(map(is_stacked, module.modules())):
            raise ConfigError(f"{name} holds experts, and is in modules_to_save: expert parallelism would spread both "
                              "copies over the ranks. Leave it out, and train the experts themselves: set "
                              "requires_grad of their parameters after get_peft_model")
        if not is_wrapper(module) or not is_stacked(experts := unwrapped(module)):
            continue
        if gone := missing("LoRA on experts"):
            raise ConfigError(f"{name}: expert parallelism cannot take adapters of experts: {gone}. Leave "
                              "target_parameters out")
        targets = Layout.of(experts).names
        if module.parameter_name not in targets:
            name = name.replace(".base_layer", "")
            raise ConfigError(f"{name}: an adapter targets {module.parameter_name}; expert parallelism takes adapters "
                              f"of {' and '.join(targets)} alone: take it out of target_parameters")


def named_modules(experts: nn.Module, plain: Callable, memo: set | None, prefix: str,
                  remove_duplicate: bool) -> Iterator[tuple[str, nn.Module]]:
    """`plain(memo, prefix, remove_duplicate)`, where PEFT's wrappers have the names that they had around the experts.

    The outermost wrapper comes first, under the name of the experts.
    """
    wrapper, memo = outermost_wrapper(experts), set() if memo is None else memo
    if wrapper is not None and not (remove_duplicate and experts in memo):
        yield from wrapper.named_modules(memo, prefix, remove_duplicate)
    for name, module in plain(memo, prefix, remove_duplicate):
        if wrapper is None or not f"{name}.".removeprefix(f"{prefix}." if prefix else "").startswith(ADAPTERS):
            yield name, module


def take_wrappers(experts: nn.Module, wrapper: nn.Module) -> None:
    """Moves PEFT's wrappers from around spread experts into them. `wrapper`: the outermost."""
    chain = wrappers_of(wrapper)
    vars(wrapper).pop("forward", None)  # Liger's, which took the wrapper for the experts
    chain[-1].base_layer = ElsewhereExperts({one.parameter_name for one in chain})
    experts.adapters = wrapper
    experts.register_state_dict_post_hook(_publish_names)
    experts.register_load_state_dict_pre_hook(_accept_published_names)


def register_factors(block: nn.Module) -> None:
    """Lets ZeRO-3 gather the factors of a block's adapters with the call of the experts, or of the wrapper, that reads
    them: neither calls the factors' modules, around whose calls ZeRO-3 would gather them."""
    for module in block.modules():
        held = module._modules.get("adapters")
        if is_wrapper(held):
            parameters = held.parameters()
        elif is_wrapper(module) and not isinstance(unwrapped(module), ElsewhereExperts):
            parameters = module.parameters()
        else:
            continue
        for parameter in parameters:
            deepspeed.zero.register_external_parameter(module, parameter)


def low_rank(experts: nn.Module) -> dict[str, LowRank]:
    """Name of a GEMM -> the active adapters of this rank's experts, joined along the rank.

    `experts`: MXFP8Experts. In ZeRO-3, this is a part of their forward.
    """
    gemms = dict(zip(experts.layout.names, ("up", "down"), strict=True))
    found: dict[str, list[LowRank]] = {}
    for wrapper in wrappers_of(outermost_wrapper(experts)):
        for adapter in unmerged_adapters(wrapper):
            gemm = gemms[wrapper.parameter_name]
            found.setdefault(gemm, []).append(_factors(experts, wrapper, adapter, gemm))
    return {gemm: joined(factors) for gemm, factors in found.items()}


def whole_low_rank(experts: nn.Module) -> dict[str, LowRank]:
    """`low_rank` outside a forward, without gradients. Collective in ZeRO-3."""
    wrapper = outermost_wrapper(experts)
    factors = [] if wrapper is None else [p for p in wrapper.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(factors), torch.no_grad():
        return low_rank(experts)


def _factors(experts: nn.Module, wrapper: nn.Module, adapter: str, gemm: str) -> LowRank:
    layout = experts.layout
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    a_ERK, b_ENR = (own_part(experts, one) for one in by_expert(experts.num_experts, a, b))
    if hasattr(a, "ds_id"):  # ZeRO-3 releases the factors after the call. Views would keep their memory until backward
        a_ERK, b_ENR = (one.clone(memory_format=torch.contiguous_format) for one in (a_ERK, b_ENR))
    if gemm == "up" and not layout.is_concatenated:
        b_ENR = torch.cat(layout.halves(b_ENR), dim=1)
    scaling = wrapper.scaling[adapter]  # PEFT's default is 1
    return LowRank(a_ERK, b_ENR if scaling == 1 else b_ENR * scaling)


def by_expert(num_experts: int, a: torch.Tensor, b: torch.Tensor) -> LowRank:
    """The factors of all experts, of a wrapper's `lora_A` [E * R, ...] and `lora_B` [..., R * E]."""
    return LowRank(a.unflatten(0, (num_experts, -1)), b.unflatten(1, (-1, num_experts)).permute(2, 0, 1))


def joined(factors: list[LowRank]) -> LowRank:
    """Adapters of the same weight as one, whose rank is the sum of theirs, padded to a multiple of 8."""
    a_ERK, b_ENR = factors[0]
    if len(factors) > 1:
        a_ERK, b_ENR = torch.cat([one.a_ERK for one in factors], 1), torch.cat([one.b_ENR for one in factors], 2)
    missing = -a_ERK.shape[1] % RANK_MULTIPLE
    if missing:
        a_ERK, b_ENR = F.pad(a_ERK, (0, 0, 0, missing)), F.pad(b_ENR, (0, missing))
    return LowRank(a_ERK.contiguous(), b_ENR.contiguous())


def outermost_wrapper(layer: nn.Module) -> nn.Module | None:
    """The outermost PEFT wrapper of a layer's experts, or of experts passed directly. None if nothing wraps them."""
    experts = getattr(layer, "experts", None)
    return None if experts is None else experts._modules.get("adapters")


# ---- names ----------------------------------------------------------------------------------------------------------


def base_prefix(layer: nn.Module) -> str:
    """What PEFT puts before the names of the wrapped experts' own parameters."""
    return "base_layer." * len(wrappers_of(outermost_wrapper(layer)))


def bias_name(name: str, layer: nn.Module) -> str:
    """What a state dict calls the bias that engine/balance.py adds to the experts of an MoE layer of this name."""
    return f"{name}.experts.{base_prefix(layer)}expert_bias"


def _published(name: str, base: str) -> str:
    """The name in wrapped experts of a tensor in experts that hold their wrappers. `base`: of `base_prefix`."""
    if name.startswith(ADAPTERS):
        return name.removeprefix(ADAPTERS)
    return name if name in SPREAD_NAMES else base + name


def _publish_names(experts: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    """A hook of the experts' state_dict."""
    base = base_prefix(experts)
    for key in [key for key in state if key.startswith(prefix)]:
        value = state.pop(key)
        state[prefix + _published(key.removeprefix(prefix), base)] = value


def _accept_published_names(experts: nn.Module, state: dict, prefix: str, *args) -> None:
    """A hook of the experts' load_state_dict."""
    base, factors = base_prefix(experts), {name for name, _ in experts.adapters.named_parameters()}
    for key in [key for key in state if key.startswith(prefix)]:
        name, value = key.removeprefix(prefix), state.pop(key)
        state[prefix + (ADAPTERS + name if name in factors else name.removeprefix(base))] = value


def merged_name(name: str, model: nn.Module, prefix: str) -> str | None:
    """What a parameter of `model` is called when PEFT's adapters are merged. None: it is a part of an adapter.

    `prefix`: the name in `model` of the model that PEFT has changed.
    """
    name = name.removeprefix(f"{prefix}.")
    if ".original_module." in name or re.search(r"\.lora_\w+\.", name):
        return None
    if saved := re.search(r"\.modules_to_save\.([^.]+)", name):
        active = model.active_adapters
        if saved[1] not in (active() if callable(active) else active):  # transformers' own is a method
            return None
    return re.sub(r"\.(base_layer|modules_to_save\.[^.]+)(?=\.)", "", name)


def adapted_weights(model: nn.Module) -> dict[str, nn.Module]:
    """Name of a weight in the model's state dict -> PEFT's layer around it.

    Weights of spread experts are not among them.

    Raises:
        RuntimeError: there are adapters that no product of two factors replaces, as with DoRA.
    """
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora.layer import LoraLayer

    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or isinstance(unwrapped(layer), ElsewhereExperts):
            continue
        adapters, own = unmerged_adapters(layer), dict(layer.named_parameters())
        odd = [adapter for adapter in adapters if adapter in layer.lora_variant or f"lora_B.{adapter}.bias" in own]
        if odd or adapters and not hasattr(layer, "get_delta_weight"):
            raise RuntimeError(f"{name}: the adapters {adapters} cannot be merged here, since they are more than a "
                               "product of two factors. Save them by ds_mxfp8_moe.save_pretrained(engine, directory), "
                               "and merge them in a process without DeepSpeed")
        weight = getattr(layer.get_base_layer(), layer.parameter_name if is_wrapper(layer) else "weight")
        found |= {f"{name}.{key}": layer for key, value in own.items() if value is weight}
    return found
