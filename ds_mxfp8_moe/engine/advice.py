# SPDX-License-Identifier: Apache-2.0
"""What to do about a config that runs, but probably not as its author meant: one line each.

What would make a step faster, outside of this package: one line each, too.
"""

import difflib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec

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


def about_speed(config: dict, section: MXFP8MoEConfig, model: torch.nn.Module | None = None,
                optimizer: object = None) -> list[str]:
    """What is missing that would make training on GPUs faster, and costs nothing. examples/guides/fast_training.md has
    all of it.

    Args:
        config: the whole DeepSpeed config.
        section: its section "mxfp8_moe".
        model: the engine's, or one like it on the device meta. None: it is not known.
        optimizer: the engine's own, without ZeRO. None: the one in the config.
    """
    lines = []
    if _not_fused(config.get("optimizer"), optimizer):
        lines.append('AdamW is not fused: pass fused=True to torch.optim.AdamW, or write "fused": true beside '
                     '"torch_adam" in the config')
    micro_batches = config.get("gradient_accumulation_steps", 1)
    several = isinstance(micro_batches, int) and micro_batches > 1
    if section.keep_quantized_weights is False and section.recipe != "bf16" and several:
        lines.append(f'"keep_quantized_weights": false quantizes weights in each of the {micro_batches} micro-batches '
                     "of a step: leave it out")
    if config.get("wall_clock_breakdown"):
        lines.append('"wall_clock_breakdown" makes the host wait for the GPU: switch it off when you have measured')
    return lines if model is None else [*lines, *_about_model(model)]


def _not_fused(section: object, optimizer: object) -> bool:
    """Whether AdamW is torch's and not fused. DeepSpeed's own is fused. `section`: the config's "optimizer"."""
    if optimizer is not None:
        return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not optimizer.defaults.get("fused")
    params = section.get("params") if isinstance(section, dict) else None
    return isinstance(params, dict) and bool(params.get("torch_adam")) and not params.get("fused")


def _about_model(model: torch.nn.Module) -> Iterator[str]:
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager":
        faster = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}
        found = next((name for name, supports in faster.items() if getattr(model, supports, False)), None)
        if found:
            yield f'attention is "eager": load the model with attn_implementation="{found}"'
    if getattr(getattr(model, "config", None), "use_cache", False):
        yield ("model.config.use_cache is on: forward keeps keys and values of all layers, and attention cannot run "
               "in CUDA graphs. Set it to False")
    forwards = (str(getattr(module.forward, "__module__", "")) for module in model.modules())
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not any(name.startswith("liger_kernel") for name in forwards) and _liger_has_kernels(model_type):
        yield ("Liger-Kernel is installed, and the model does not use its norms and its loss: pass "
               "use_liger_kernel=True to the Trainer, or call transformers.integrations.liger.apply_liger_kernel("
               "model, None)")
    if any(map(_has_ligers_loss_in_small_chunks, model.modules())):
        yield ("Liger's loss takes few tokens at a time, since the model has many words. With Liger-Kernel 0.8.3 or "
               "later, write model.forward = functools.partial(model.forward, chunk_mem_const=16)")


def _has_ligers_loss_in_small_chunks(model: torch.nn.Module) -> bool:
    """Its chunks hold as many logits as the micro-batch has hidden values, unless chunk_mem_const multiplies them."""
    if getattr(model.forward, "__name__", None) != "lce_forward":
        return False
    config = model.config.get_text_config()
    return config.vocab_size >= 16 * config.hidden_size


def _liger_has_kernels(model_type: str | None) -> bool:
    if model_type is None or find_spec("liger_kernel") is None:
        return False
    try:
        import liger_kernel.transformers as liger
    except Exception:  # a release for another transformers, or broken
        return False
    return hasattr(liger, f"apply_liger_kernel_to_{model_type.removesuffix('_text')}")


