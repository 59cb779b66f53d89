# SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face models of the types that AutoEP or layers/presets.py knows, and trainings of them."""

import io
from contextlib import redirect_stdout
from typing import Any

import deepspeed.comm as dist
import torch
import transformers
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.autoep import MXFP8AutoEPMoELayer

VOCABULARY, STEPS, RANKS = 128, 6, 2

# Two layers, hidden size 64, eight experts of FFN size 64, two of them for each token.
COMMON = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=4, max_position_embeddings=64, num_experts_per_tok=2, bos_token_id=1,
               eos_token_id=2, pad_token_id=0, moe_intermediate_size=64, tie_word_embeddings=False)
NARROW = {**COMMON, "intermediate_size": 64}  # where this is the size of the experts
_FULL = dict(layer_types=["full_attention"] * 2)
_SHARED = dict(**COMMON, num_experts=8, head_dim=16, shared_expert_intermediate_size=96)
_DEEPSEEK = dict(**COMMON, n_routed_experts=8, n_shared_experts=1, kv_lora_rank=16, qk_nope_head_dim=16,
                 qk_rope_head_dim=8, v_head_dim=16, n_group=4, topk_group=2, routed_scaling_factor=1.5)

# Model type -> its configuration class, and the arguments for a tiny model.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("AfmoeConfig", dict(**COMMON, **_FULL, num_experts=8, head_dim=16, num_dense_layers=0,
                                  num_shared_experts=1, route_scale=1.5)),
    "cohere2_moe": ("Cohere2MoeConfig", dict(**NARROW, **_FULL, num_experts=8, head_dim=16, logit_scale=1.0,
                                             num_shared_experts=1, shared_expert_combination_strategy="sum")),
    "deepseek_v2": ("DeepseekV2Config", dict(**_DEEPSEEK, q_lora_rank=None, first_k_dense_replace=0,
                                             topk_method="group_limited_greedy")),
    "deepseek_v3": ("DeepseekV3Config", dict(**_DEEPSEEK, q_lora_rank=24, first_k_dense_replace=1)),
    "deepseek_v32": ("DeepseekV32Config", dict(**_DEEPSEEK, q_lora_rank=24, first_k_dense_replace=0)),
    "dots1": ("Dots1Config", dict(**_DEEPSEEK, **_FULL, first_k_dense_replace=0)),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", dict(**COMMON, moe_num_experts=8, moe_num_shared_experts=1,
                                                moe_layer_start_index=0)),
    "exaone_moe": ("ExaoneMoeConfig", dict(**_DEEPSEEK, **_FULL, num_experts=8, num_shared_experts=1,
                                           first_k_dense_replace=0, head_dim=16)),
    "flex_olmo": ("FlexOlmoConfig", dict(**NARROW, num_experts=8)),
    "glm4_moe": ("Glm4MoeConfig", dict(**_DEEPSEEK, first_k_dense_replace=0, head_dim=16)),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", dict(**_DEEPSEEK, q_lora_rank=24)),
    "glm_moe_dsa": ("GlmMoeDsaConfig", dict(**_DEEPSEEK, q_lora_rank=24, first_k_dense_replace=0)),
    "gpt_oss": ("GptOssConfig", dict(**NARROW, **_FULL, num_local_experts=8, head_dim=16)),
    "granitemoe": ("GraniteMoeConfig", dict(**NARROW, num_local_experts=8)),
    "granitemoehybrid": ("GraniteMoeHybridConfig", dict(**NARROW, num_local_experts=8, shared_intermediate_size=64,
                                                        layer_types=["attention"] * 2)),
    "granitemoeshared": ("GraniteMoeSharedConfig", dict(**NARROW, num_local_experts=8, shared_intermediate_size=64)),
    "jamba": ("JambaConfig", dict(**NARROW, num_experts=8, attn_layer_period=1, attn_layer_offset=0,
                                  expert_layer_period=1, expert_layer_offset=0, use_mamba_kernels=False)),
    "lfm2_moe": ("Lfm2MoeConfig", dict(**COMMON, **_FULL, num_experts=8, num_dense_layers=0)),
    "mellum": ("MellumConfig", dict(**COMMON, **_FULL, num_experts=8, head_dim=16)),
    "mimo_v2_flash": ("MiMoV2FlashConfig", dict(**_DEEPSEEK, **_FULL, head_dim=16)),
    "minimax": ("MiniMaxConfig", dict(**NARROW, **_FULL, num_local_experts=8)),
    "minimax_m3_vl_text": ("MiniMaxM3VLTextConfig", COMMON),
    "minimax_m2": ("MiniMaxM2Config", dict(**NARROW, num_local_experts=8, head_dim=16)),
    "mixtral": ("MixtralConfig", dict(**NARROW, num_local_experts=8)),
    "olmoe": ("OlmoeConfig", dict(**NARROW, num_experts=8)),
    "phimoe": ("PhimoeConfig", dict(**NARROW, num_local_experts=8)),
    "qwen2_moe": ("Qwen2MoeConfig", _SHARED),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", dict(**_SHARED, **_FULL)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(**COMMON, num_experts=8, head_dim=16, norm_topk_prob=True)),
    "qwen3_next": ("Qwen3NextConfig", dict(**_SHARED, **_FULL, decoder_sparse_step=1)),
    "solar_open": ("SolarOpenConfig", dict(**_DEEPSEEK, head_dim=16)),
}


def tiny_model(model_type: str, dtype: torch.dtype = torch.bfloat16, **changes) -> transformers.PreTrainedModel:
    """A model of this type with the same random weights on every rank.

    Experts, routers and their biases are as large as trained ones, so that the MoE blocks matter for the loss.
    """
    name, arguments = ARCHITECTURES[model_type]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**arguments, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("correction_bias", "expert_bias", "router.bias")):
                tensor.normal_(std=0.1)
            elif name.endswith("proj_bias"):
                tensor.normal_(std=0.5)
            elif name.endswith(("gate.weight", "router.weight")):
                tensor.normal_(std=0.15)
            elif "experts" in name:
                tensor.mul_(4)
    return model.train()


def losses(model: transformers.PreTrainedModel, section: dict | None, expert_parallel: dict | None = None,
           steps: int = STEPS, **changes) -> tuple[list[float], int, int, str]:
    """Trains on one batch for each rank. Collective.

    Args:
        section: "mxfp8_moe". None: transformers' own layers, in plain data parallelism.
        expert_parallel: more keys of that section.
        changes: more keys of the DeepSpeed config.

    Returns:
        The mean loss of all ranks at each step; how many layers are AutoEP's; how many of these are converted; what
        was printed while the engine was made.
    """
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0},
              "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, **changes}
    if section is not None:
        config["mxfp8_moe"] = section
        config["expert_parallel"] = {"enabled": True, "autoep_size": RANKS, **(expert_parallel or {})}
    printed = io.StringIO()
    with redirect_stdout(printed):
        engine = ds_mxfp8_moe.initialize(model=model, config=config, model_parameters=model.parameters()
                                         if section is None else None)[0]
    layers = [layer for layer in engine.module.modules() if isinstance(layer, AutoEPMoELayer)]
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    ids = torch.randint(3, VOCABULARY, (4, 32), generator=generator)
    found = []
    for step in range(steps):
        torch.manual_seed(1000 * step + dist.get_rank())  # for routers that draw at random
        loss = engine(input_ids=ids, labels=ids).loss
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        found.append(mean.item() / dist.get_world_size())
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return found, len(layers), sum(isinstance(layer, MXFP8AutoEPMoELayer) for layer in layers), printed.getvalue()


def difference(first: list[float], second: list[float]) -> float:
    """The largest relative difference at any step. NaN if one of the numbers is NaN."""
    a, b = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    return ((a - b).abs() / b.abs()).max().item()
