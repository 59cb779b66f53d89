# SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face MoE models of a few families, and engines that train them on gloo ranks."""

import re
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.classic import MXFP8MOELayer
from ds_mxfp8_moe.layers.experts import converted_layers
from small_models import small_model
from tests.support.invented_moe import InventedConfig, InventedModel

VOCABULARY = 128
_COMMON = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=4, max_position_embeddings=64, num_experts_per_tok=2, bos_token_id=1,
               eos_token_id=2, pad_token_id=0, moe_intermediate_size=64)
_QWEN = dict(**_COMMON, num_experts=8, head_dim=16)
_DEEPSEEK = dict(**_COMMON, n_routed_experts=8, n_shared_experts=1, kv_lora_rank=16, qk_nope_head_dim=16,
                 qk_rope_head_dim=8, v_head_dim=16, n_group=4, topk_group=2, routed_scaling_factor=1.5)

# What each adds: plain softmax routing; an auxiliary loss on the router's logits; a shared expert behind a gate; the
# layer itself returning its logits; group-limited routing beside shared experts; sigmoid scores with a correction bias
# and a dense first layer; the FFN formula swiglu_oai; biases, and stacks that are transposed and interleaved.
FAMILIES = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_QWEN, norm_topk_prob=True),
    "mixtral": lambda: transformers.MixtralConfig(**{**_COMMON, "intermediate_size": 64}, num_local_experts=8,
                                                  output_router_logits=True, router_aux_loss_coef=0.1),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**_QWEN, shared_expert_intermediate_size=96),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**_QWEN, shared_expert_intermediate_size=96,
                                                             layer_types=["full_attention"] * 2),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**_DEEPSEEK, q_lora_rank=None, first_k_dense_replace=0,
                                                         topk_method="group_limited_greedy"),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**_DEEPSEEK, q_lora_rank=24, first_k_dense_replace=1),
    "minimax_m3": lambda: transformers.MiniMaxM3VLTextConfig(**_COMMON),
    "gpt_oss": lambda: transformers.GptOssConfig(**{**_COMMON, "intermediate_size": 64}, num_local_experts=8,
                                                 head_dim=16, layer_types=["full_attention"] * 2),
}


def model(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, seed: int = 0, **changes):
    """A model of 2 layers, hidden 64, 8 experts of FFN size 64; the same weights on every rank. `family`: of FAMILIES,
    "invented_moe", or any type of `small_model`."""
    torch.manual_seed(seed)
    if family == "invented_moe":
        return InventedModel._from_config(InventedConfig(), dtype=dtype).train()
    if family not in FAMILIES:
        return small_model(family, dtype, **changes)
    config = FAMILIES[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    return net.train()


def converted(engine) -> int:
    """How many of the engine's layers of Hugging Face blocks are on the MXFP8 path."""
    return sum(not isinstance(layer, MXFP8MOELayer) for layer in converted_layers(engine.module))


def ds_config(section: dict | None, stage: int = 0, ep_size: int = 2, expert_parallel: dict | None = None,
              **changes) -> dict:
    """A DeepSpeed config of ZeRO `stage` with AutoEP and the section "mxfp8_moe" (None: left out).

    SGD, since Adam turns the noise of vanishing gradients into whole steps. ZeRO-3 would keep parameters as small as
    these gathered; here it partitions every one.
    """
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero | changes.pop("zero_optimization", {}),
        "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "expert_parallel": {"enabled": True, "autoep_size": ep_size, **(expert_parallel or {})},
    }
    if section is not None:
        config["mxfp8_moe"] = section
    return {**config, **changes}


def engine(section: dict | None, *args, family: str = "qwen3_moe", model_changes: dict | None = None,
           frozen: str = "", **kwargs):
    """A new engine over a new model; see `engine_of`. `frozen` is a pattern of Hugging Face's parameter names."""
    net = model(family, **(model_changes or {}))
    for name, p in net.named_parameters():
        p.requires_grad = not re.fullmatch(frozen, name)
    return engine_of(net, section, *args, **kwargs)


def engine_of(net: torch.nn.Module, section: dict | None, *args, **kwargs):
    """An engine over a model; see `ds_config`. Without a section, its experts are transformers' own, in plain data
    parallelism."""
    config = ds_config(section, *args, **kwargs)
    if section is None:
        del config["expert_parallel"]
    trained = [p for p in net.parameters() if p.requires_grad] if section is None else None
    return ds_mxfp8_moe.initialize(model=net, config=config, model_parameters=trained)[0]


def batch(step: int, rank: int | None = None, size: int = 2, length: int = 16) -> torch.Tensor:
    """Token ids [size, length], different on every rank and in every step."""
    rank = deepspeed.comm.get_rank() if rank is None else rank
    return torch.randint(3, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(100 * step + rank))


def autoep_layers(module: torch.nn.Module) -> list:
    return [layer for layer in module.modules() if isinstance(layer, AutoEPMoELayer)]


def router_of(block: torch.nn.Module) -> torch.nn.Module:
    """The router of a MoE block, which has the weight [E, H], itself or in its gate."""
    return block.router if hasattr(block, "router") else block.gate


def gate_weight(block: torch.nn.Module) -> torch.nn.Parameter:
    """The weight [E, H] of a MoE block's router."""
    router = router_of(block)
    return next(p for p in router.parameters() if len(getattr(p, "ds_shape", p.shape)) == 2)


def watch_choices(block: torch.nn.Module, take: Callable[[torch.Tensor], None]) -> Any:
    """Calls take(expert_TK) in each forward of the block. Returns the hook's handle."""
    return block.experts.register_forward_pre_hook(lambda module, args: take(args[1]))


def weights(engine) -> dict[str, torch.Tensor]:
    """Copies of all weights on every rank, under the names of published checkpoints. Collective."""
    return {name: tensor.float().clone() for name, tensor in ds_mxfp8_moe.export_weights(engine, "model")}


def train_engine(engine, steps, rank: int | None = None) -> list[float]:
    """The loss of each of `steps`, which are numbers of batches."""
    losses = []
    for step in steps:
        ids = batch(step, rank).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def gathered(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A copy of a parameter that ZeRO-3 may have partitioned."""
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()
