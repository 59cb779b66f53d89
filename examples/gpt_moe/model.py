# SPDX-License-Identifier: Apache-2.0
"""A small GPT whose feed-forward layers are DeepSpeed MoE layers, and Hugging Face MoE models for AutoEP.

Both kinds are called as `model(input_ids=...)` and return an object with `.logits` [B, S, vocabulary] and `.aux_loss`,
a scalar summed over the MoE layers (the caller multiplies it by its coefficient).
"""

import inspect
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import deepspeed.comm as dist
import torch
import torch.nn.functional as F
import yaml
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from torch import nn
from torch.utils.checkpoint import checkpoint

from data import VOCABULARY


class Output(NamedTuple):
    logits: torch.Tensor
    aux_loss: torch.Tensor


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the GPT. `moe` holds arguments of deepspeed.moe.layer.MoE (num_experts, k, capacity_factor, ...)."""

    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    seq_len: int
    moe: dict
    vocabulary: int = VOCABULARY
    rope_base: float = 10000.0


class SwiGLU(nn.Module):
    """One expert: down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden_size: int, ffn_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_tables(seq_len: int, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary position embedding, each float32 [seq_len, head_dim / 2]."""
    frequency_D = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle_SD = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequency_D)
    return angle_SD.cos(), angle_SD.sin()


def rotate(x_BNSD: torch.Tensor, cos_SD: torch.Tensor, sin_SD: torch.Tensor) -> torch.Tensor:
    """Turns the two halves of each head's vector by the angle of its position."""
    a, b = x_BNSD.chunk(2, dim=-1)
    cos, sin = cos_SD[:a.shape[-2]].to(a.dtype), sin_SD[:a.shape[-2]].to(a.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        cos, sin = rotary_tables(config.seq_len, config.hidden_size // config.num_heads, config.rope_base)
        self.register_buffer("cos_SD", cos, persistent=False)
        self.register_buffer("sin_SD", sin, persistent=False)

    def forward(self, x_BSH):
        B, S, H = x_BSH.shape
        q, k, v = self.qkv(x_BSH).view(B, S, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, self.cos_SD, self.sin_SD), rotate(k, self.cos_SD, self.sin_SD)
        y_BNSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y_BNSD.transpose(1, 2).reshape(B, S, H))


class Block(nn.Module):

    def __init__(self, config: GPTConfig, ep_size: int):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size)
        self.moe = MoE(config.hidden_size, SwiGLU(config.hidden_size, config.ffn_size), ep_size=ep_size, **config.moe)

    def forward(self, x_BSH):
        x_BSH = x_BSH + self.attention(self.norm1(x_BSH))
        y_BSH, aux_loss, _ = self.moe(self.norm2(x_BSH))
        return x_BSH + y_BSH, aux_loss


class GPT(nn.Module):
    """Decoder-only transformer over tokens [B, S]. Every block's feed-forward layer is an MoE of SwiGLU experts."""

    def __init__(self, config: GPTConfig, ep_size: int, activation_checkpointing: bool = False):
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(config.vocabulary, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, ep_size) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocabulary, bias=False)

    def forward(self, input_ids):
        x_BSH = self.embedding(input_ids)
        aux_loss = 0.0
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x_BSH, block_aux = checkpoint(block, x_BSH, use_reentrant=False)
            else:
                x_BSH, block_aux = block(x_BSH)
            aux_loss = aux_loss + block_aux
        return Output(self.head(self.norm(x_BSH)), aux_loss)


@torch.no_grad()
def initialize_weights(model: GPT, seed: int, rank: int) -> None:
    """Draws normal weights, smaller for layers that write into the residual stream.

    DeepSpeed copies one template into all local experts. Here each expert gets its own weights. Shared parameters
    depend on `seed`, experts on `seed` and `rank`. DeepSpeed then copies them to the ranks that hold the same experts.
    """
    shared = torch.Generator().manual_seed(seed)
    local = torch.Generator().manual_seed(seed + 7919 * (rank + 1))
    residual_std = 0.02 / math.sqrt(2 * model.config.num_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            std = residual_std if name.endswith(("down_proj.weight", "attention.out.weight")) else 0.02
            parameter.normal_(0.0, std, generator=local if is_moe_param(parameter) else shared)


def is_yaml(name_or_path: str) -> bool:
    return Path(name_or_path).suffix in (".yaml", ".yml")


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def expert_parallel_size(num_experts: int) -> int:
    """The largest expert-parallel size that divides both the experts and the ranks."""
    return math.gcd(num_experts, dist.get_world_size())


def build_gpt(path: Path, ep_size: int | None, seed: int, activation_checkpointing: bool,
              seq_len: int | None = None) -> GPT:
    """The GPT of a YAML file of sizes (configs/models), with weights drawn from `seed`.

    It has positions for `seq_len` tokens if the file has fewer. Exits with a message if sizes are missing or wrong.
    """
    try:
        config = GPTConfig(**yaml.safe_load(path.read_text()))
        experts = config.moe["num_experts"]
        inspect.signature(MoE).bind(config.hidden_size, None, ep_size=1, **config.moe)
        if config.hidden_size % (2 * config.num_heads):
            raise ValueError(f"hidden_size {config.hidden_size} is no multiple of twice the {config.num_heads} heads")
    except (TypeError, KeyError, ValueError, yaml.YAMLError) as error:
        sys.exit(f"--model {path}: {_in_a_line(error)}; expected the fields of GPTConfig, with num_experts in moe")
    config = replace(config, seq_len=max(seq_len or 0, config.seq_len))
    ep_size = ep_size or expert_parallel_size(experts)
    if experts % ep_size or dist.get_world_size() % ep_size:
        sys.exit(f"--ep_size {ep_size}: expected a divisor of the {experts} experts and of the "
                 f"{dist.get_world_size()} ranks")
    model = GPT(config, ep_size, activation_checkpointing)
    initialize_weights(model, seed, dist.get_rank())
    return model


def build_hf(name_or_path: str, seed: int, activation_checkpointing: bool) -> nn.Module:
    """A Hugging Face causal language model for AutoEP.

    name_or_path: a YAML file with the arguments of its transformers config and `model_type`, or a directory with only
        a config.json: the weights are random. Or anything that `from_pretrained` takes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    path = Path(name_or_path)
    torch.manual_seed(seed)
    config = None
    if is_yaml(name_or_path):
        try:
            config = AutoConfig.for_model(**yaml.safe_load(path.read_text()))
        except (TypeError, ValueError, yaml.YAMLError) as error:
            sys.exit(f"--hf_model {path}: {_in_a_line(error)}; expected the arguments of a transformers config, with "
                     "model_type")
    elif path.is_dir() and not any((*path.glob("*.safetensors"), *path.glob("*.bin"))):
        config = AutoConfig.from_pretrained(path)
    if config:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=torch.bfloat16)
    model.config.use_cache = False
    model.config.output_router_logits = True  # with them the model returns its load-balancing loss
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
