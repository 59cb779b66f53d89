# SPDX-License-Identifier: Apache-2.0
"""What to do about a config that runs, but probably not as its author meant: one line each."""

import difflib
from collections.abc import Iterable

import torch
from deepspeed.module_inject.auto_ep_config import AutoEPConfig

from ..config import KEYS, READERS, MXFP8MoEConfig, shown
from ..ffn.frozen_weights import FORMATS
from ..layers.experts import MXFP8Experts
from ..layers.frozen_experts import frozen_of

AUTOEP = "expert_parallel"  # DeepSpeed's own, for AutoEP
# Its keys by which AutoEP's own layers may compute something else than the model.
ROUTER_KEYS = ("score_func", "score_apply", "route_norm", "route_scale", "routed_scaling_factor", "top_k",
               "num_expert_groups", "num_limited_groups", "expert_activation")


def about_expert_parallel(config: dict, ranks: int) -> list[str]:
    """What DeepSpeed passes over in its section for AutoEP without a word: misspelt keys, and a size left out.

    Args:
        config: the whole DeepSpeed config.
        ranks: of the job.
    """
    if AUTOEP not in config:
        near = difflib.get_close_matches(AUTOEP, map(str, config), n=1, cutoff=0.85)
        return [f'the config has {shown(near[0])}, which DeepSpeed ignores: did you mean "{AUTOEP}"?'] if near else []
    section = config[AUTOEP]
    if not isinstance(section, dict) or not section.get("enabled", False):
        return []
    valid = [key for key in AutoEPConfig.__dataclass_fields__ if not key.startswith("_")]
    lines = []
    for key in section:
        if key not in valid:
            near = difflib.get_close_matches(str(key).lower(), valid, n=1)
            meant = f'did you mean "{near[0]}"?' if near else f"valid are {', '.join(valid)}"
            lines.append(f'"{AUTOEP}" has {shown(str(key))}, which DeepSpeed ignores: {meant}')
    if "autoep_size" not in section and ranks > 1:
        lines.append(f'"{AUTOEP}" has no "autoep_size", so every rank holds all experts and no tokens travel. Write '
                     f'how many ranks share the experts of a layer, for example "autoep_size": {ranks}')
    return lines


def about_router_keys(config: dict, layers: Iterable[torch.nn.Module]) -> list[str]:
    """Keys of DeepSpeed's section for AutoEP that have no effect on experts inside of a model's own blocks."""
    if not any(isinstance(layer, MXFP8Experts) for layer in layers):
        return []
    return [f'"{key}" in "{AUTOEP}" has no effect: the router is the model\'s own. Change it in the model\'s config'
            for key in ROUTER_KEYS if key in config.get(AUTOEP, {})]


def about_enabled(config: MXFP8MoEConfig) -> list[str]:
    """A section with keys that does not say whether it is enabled."""
    if not config.model_fields_set or "enabled" in config.model_fields_set:
        return []
    return ['the section lacks "enabled": true: all layers stay DeepSpeed\'s']


def about_keys(config: MXFP8MoEConfig, layers: Iterable[torch.nn.Module]) -> list[str]:
    """Keys of the section that have no effect on the converted layers."""
    layers, lines = list(layers), []
    if layers and all(layer.ep_size == 1 for layer in layers):
        keys = ["transport"] if config.transport == "nvlink" else []
        keys += [key for key, names in READERS.items() if "nvlink" in names and getattr(config, key) is not None]
        keys += ["expert_placement"] if config.expert_placement == "balanced" else []
        lines += [f'"{key}" has no effect: every rank holds all experts of its layers, so no tokens travel'
                  for key in keys]
    if config.recipe == "bf16":
        lines += [f'"{key}" has no effect: the recipe "bf16" quantizes nothing'
                  for key, about in KEYS.items() if about["mxfp8"] and key in config.model_fields_set]
    held = [frozen_of(layer.experts) is not None for layer in layers]
    if layers and config.frozen_experts in FORMATS and not any(held):
        lines.append(f'"frozen_experts": "{config.frozen_experts}" has no effect: no layer has spread experts that '
                     "are all frozen. Classic layers keep theirs in the model's dtype, and so does ZeRO-3 in an "
                     "engine that exists")
    if layers and all(held):
        lines += [f'"{key}" has no effect: all experts are frozen and held quantized, so no call casts them'
                  for key in ("min_tokens_per_expert", "keep_quantized_weights") if getattr(config, key)]
    return lines
