# SPDX-License-Identifier: Apache-2.0
"""Small models of every MoE type in the installed transformers, without a list of types.

A type is here a folder of `transformers.models` whose modeling file marks its experts by `use_experts_implementation`.
Its model is made from the default config of its class, in which RULES shrink the numbers by their names. EXCEPTIONS
has the few keys that a rule cannot guess.
"""

import copy
import dataclasses
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY, EXPERTS, CHOICES = 128, 8, 2
FIRST_TOKEN = 3  # smaller ids are padding, beginning and end

# The first pattern that matches a key's whole name gives its value. A default that is smaller stays, and so does None.
RULES: list[tuple[str, int]] = [
    (r".*vocab_size.*", VOCABULARY),
    (r"max_position_embeddings|model_max_length", 128),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_nextn_predict_layers", 0),
    (r"n_group|num_expert_group", 4),
    (r"topk_group", 2),
    (r"n_groups|mamba_n_groups", 1),
    (r"(num|n)_.*layers|depth", 2),
    (r".*heads", 4),
    (r".*head_dim|mamba_d_head|.*rank|.*window(_size)?|mamba_chunk_size|chunk_size", 16),
    (r".*(intermediate|ffn|mlp)_(size|dim)", 96),
    (r"canvas_length|output_channels", 32),
    (r"image_size", 64),
    (r".*(hidden|embed)_(size|dim).*|d_model|output_dim|.*state_size|.*d_state|.*position_embedding(_size|s)", 64),
]
# These take the place of any default.
FIXED: list[tuple[str, int]] = [
    (r"(moe_)?(num|n)_(local_|routed_)?experts", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts", CHOICES),
    (r"moe_intermediate_size", 64),
    (r"pad_token_id", 0), (r"bos_token_id", 1), (r"eos_token_id", 2),
]
# Lists with one kind of layer for each layer, and a kind for configs that have none by default.
KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}

# What rules cannot guess: keys of a type's config and of its sub-configs.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cohere2_moe": {"logit_scale": 1.0},
    "deepseek_ocr2": {"downsample_channels": [32, 64]},
    "diffusion_gemma": {"global_head_dim": 16},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
                   "swa_kv_lora_rank": 16, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [64, 32], "head_dim": 128},
    "gemma4": {"enable_moe_block": True, "global_head_dim": 16},
    "glm4v_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hy_v4_vl": {"qk_rope_head_dim": 64, "index_head_dim": 128},
    "inkling": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "muse_spark": {"patch_sizes": [4, 4], "hidden_sizes": [32, 32], "depths": [1, 1]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "moe_latent_size": 32},
    "qwen4_exp": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
                  "indexer_compress_ratio": 4},
    "unlimited_ocr": {"downsample_channels": [32, 64]},
    "zaya": {"num_experts_per_tok": 1},
}


def decorated_types() -> list[str]:
    """The folders of `transformers.models` with experts that are marked by `use_experts_implementation`, sorted."""
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    return sorted({file.parent.name for file in files if "\n@use_experts_implementation" in file.read_text()})


def _model_classes(model_type: str) -> list[type[PreTrainedModel]]:
    """Its model classes with a head, the most preferred first."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    classes = [one for one in vars(module).values() if inspect.isclass(one) and issubclass(one, PreTrainedModel)
               and one.__module__ == module.__name__]
    heads = ("ForCausalLM", "ForConditionalGeneration", "ForBlockDiffusion", "ForTokenClassification")
    return [one for head in heads for one in classes if one.__name__.endswith(head)]


def is_experts(module: nn.Module) -> bool:
    """Whether `use_experts_implementation` decorated the class of this module."""
    return all(hasattr(module, name) for name in ("_apply_gate", "has_gate", "is_transposed", "down_proj"))


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The stacked experts of a model, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def _number(rules: list[tuple[str, int]], key: str) -> int | None:
    return next((number for pattern, number in rules if re.fullmatch(pattern, key)), None)


def shrunk(config_class: type[PreTrainedConfig], layers: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a config of this class with small numbers, its sub-configs included.

    Args:
        layers: number of layers, except where the config names one kind of layer more.
        changes: these keys win in this config and in its sub-configs.
    """
    found, default = dict(changes), vars(config_class())
    for field in dataclasses.fields(config_class):
        key, written, value = field.name, field.default, default.get(field.name)
        if isinstance(value, PreTrainedConfig):
            found[key] = type(value)(**shrunk(type(value), layers, changes))
        elif key in changes:
            continue
        elif key in KINDS:
            kinds = list(dict.fromkeys(value or [KINDS[key]]))
            found[key] = (kinds + kinds[-1:] * layers)[:layers]
        elif key == "num_hidden_layers":
            found[key] = layers
        elif (number := _number(FIXED, key)) is not None:
            found[key] = number
        elif (number := _number(RULES, key)) is not None and type(written) is int and written > number:
            found[key] = number
    return found


@functools.cache
def small_config(model_type: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class of the model and its config, with as few layers, two at least, as give two layers of experts.

    Raises:
        ValueError: no class of this type can be made small with experts. The reason for each is given.
    """
    reasons = []
    changes = EXCEPTIONS.get(model_type, {})
    for model_class in _model_classes(model_type):
        config_class, best = model_class.config_class, None
        try:
            for layers in (2, 3, 4, 6, 8):
                config = config_class(**shrunk(config_class, layers, changes))
                with torch.device("meta"):
                    found = len(experts_of(model_class(config)))
                best = best or (config if found else None)
                if found > 1:
                    return model_class, config
        except Exception as error:
            reasons.append(f"{model_class.__name__}: {type(error).__name__}: {error}")
            continue
        if best is not None:
            return model_class, best
        reasons.append(f"{model_class.__name__} has no experts")
    raise ValueError("; ".join(reasons) or "it has no model with a head")


def small_model(model_type: str, dtype: torch.dtype = torch.bfloat16, **changes) -> PreTrainedModel:
    """A model of this type in training mode, with the same random weights wherever it is made.

    Experts, routers and their biases are as large as trained ones, so that the MoE blocks matter for the loss.

    Args:
        changes: keys of the config.

    Raises:
        ValueError: see `small_config`.
    """
    model_class, config = small_config(model_type)
    config = copy.deepcopy(config)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                if name.endswith("tid2eid"):  # experts by the token's id
                    tensor.copy_(torch.rand(len(tensor), EXPERTS).argsort(1)[:, :tensor.shape[1]])
            elif re.search(r"(correction_bias|expert_bias|balancing_biases|router\.bias)$", name):
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
            elif name.endswith("proj_bias"):
                tensor.normal_(std=0.5)
            elif re.search(r"(gate|router)(\.gate|\.proj|\.wg|\.router_mlp\.\w+)?\.weight$", name):
                tensor.normal_(std=0.15)
            elif "experts" in name and tensor.dim() > 1:
                tensor.normal_(std=0.08)
    return model.train()


def loss_of(model: nn.Module, ids_BT: torch.Tensor, forward: Any = None) -> torch.Tensor:
    """The loss of the model's own head on these tokens; without one that takes labels, the cross entropy with them.

    Args:
        forward: what is called in place of the model, as an engine around it.
    """
    call, accepted = forward or model, inspect.signature(model.forward).parameters
    more = {key: value for key, value in {"decoder_input_ids": ids_BT, "moe_mm_token_type_ids": (ids_BT % 3 == 0).int()
                                          }.items() if key in accepted}
    if type(model).__name__.endswith(("ForCausalLM", "ForConditionalGeneration")):
        return call(input_ids=ids_BT, labels=ids_BT, **more).loss
    logits = call(input_ids=ids_BT, **more).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids_BT.flatten() % logits.shape[-1])
