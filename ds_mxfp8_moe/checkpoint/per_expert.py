# SPDX-License-Identifier: Apache-2.0
"""Adapters of stacked experts as adapters of each expert's matrices, for engines that serve base and adapters apart.

PEFT saves one pair of factors for a stacked parameter. vLLM documents adapters with one pair for each matrix of each
expert, `...experts.7.gate_proj.lora_A.weight`. gate and up then have the same A.
"""

import json
from pathlib import Path

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ..layers.adapters import by_expert, outermost_wrapper, saves_adapters, wrappers_of
from ..layers.experts import expert_blocks
from .gathering import base_of, held_model
from .published import Published, published

PEFT = "base_model.model."  # how names in its files begin


def checked(engine: DeepSpeedEngine) -> Published:
    """The names of the model's tensors.

    Raises:
        ValueError: the model has no adapters of experts that can be served apart from it, one expert after the other.
    """
    blocks, model = dict(expert_blocks(engine.module)), published(engine)
    held = held_model(engine.module)[0]
    if not saves_adapters(held) or not any(map(outermost_wrapper, blocks.values())):
        raise ValueError('adapters="per_expert" needs a model with adapters of experts by PEFT: leave it out')
    if any(block.experts.merges for block in blocks.values()):
        raise ValueError('the adapters were trained by "merge_aware", and are right only where they are merged: '
                         'take weights="fp8", or export_weights')
    if odd := next((one.parameter_name for block in blocks.values() for one in wrappers_of(outermost_wrapper(block))
                    for name, alpha in one.lora_alpha.items()
                    if (one.r[name], alpha) != (held.peft_config[name].r, held.peft_config[name].lora_alpha)), None):
        raise ValueError(f"rank_pattern or alpha_pattern gives {odd} a rank or alpha of its own, which files of "
                         'single experts would lose: leave adapters="per_expert" out')
    if model.names.stacked:
        raise ValueError(f"published checkpoints of {model.names.skeleton.config.model_type} hold the experts of a "
                         f"layer in one tensor ({model.names.stacked[0]}), and so do adapters: leave "
                         'adapters="per_expert" out')
    return model


def split_experts(folder: Path, model: Published) -> None:
    """Rewrites PEFT's files in a folder, of each adapter. `model`: of `checked`."""
    from safetensors.torch import load_file, save_file  # transformers brings it

    for path in folder.rglob("adapter_model.safetensors"):
        tensors, modules = load_file(path), set()
        for names, low in _found(tensors, model):
            for e, name in enumerate(names):
                modules.add(name.removesuffix(".weight").rpartition(".")[2])
                for factor, one_E in zip("AB", low, strict=True):
                    key = f"{PEFT}{name.removesuffix('.weight')}.lora_{factor}.weight"
                    tensors[key] = one_E[e].clone(memory_format=torch.contiguous_format)
        save_file(tensors, path, {"format": "pt"})
        config_path = path.with_name("adapter_config.json")
        config = json.loads(config_path.read_text())
        targets = config["target_modules"] or []
        config["target_modules"] = sorted({*targets, *modules}) if isinstance(targets, list) else (
            rf"({targets})|.*\.experts\.\d+\.({'|'.join(sorted(modules))})")
        config["target_parameters"] = None
        config_path.write_text(json.dumps(config, indent=2, sort_keys=True))


def _found(tensors: dict[str, torch.Tensor], model: Published) -> list:
    """Takes the factors of stacked parameters out of `tensors`: pairs (names of a matrix of each expert, LowRank)."""
    found, prefix = [], f"{base_of(model.engine.module)[1]}."
    for name, block in expert_blocks(model.engine.module):
        roles, layout = model.names.experts[name], block.experts.layout
        for depth, wrapper in enumerate(wrappers_of(outermost_wrapper(block))):
            key = f"{PEFT}{name.removeprefix(prefix)}.experts.{'base_layer.' * depth}lora_"
            if f"{key}A.weight" not in tensors:  # of another adapter
                continue
            low = by_expert(block.num_experts, *(tensors.pop(f"{key}{factor}.weight") for factor in "AB"))
            of_rows = [role for role in ("gate", "up") if role in roles] if wrapper.parameter_name == layout.up else [
                "down"]
            found += [(roles[role], low._replace(b_ENR=rows)) for role, rows in zip(
                of_rows, low.b_ENR.chunk(len(of_rows), dim=1), strict=True)]
    return found
