# SPDX-License-Identifier: Apache-2.0
"""Routes that were recorded or invented, and outcomes to compare."""

import deepspeed.comm as dist
import torch

from ds_mxfp8_moe.routing.choices import top_k_of

MXFP8 = {"enabled": True}
BF16 = {"enabled": True, "recipe": "bf16"}  # in float32 models, this is float32


def outcome(model, ids) -> dict[str, torch.Tensor]:
    """Loss, logits and all gradients of one forward and backward."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **grads}


def different(first: dict, second: dict) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def other_routes(layers: list, tokens: int = 32) -> torch.Tensor:
    """Random choices, different on every rank."""
    generator = torch.Generator().manual_seed(9 + dist.get_rank())
    shape = tokens, len(layers), layers[0].num_experts
    return torch.rand(shape, generator=generator).argsort(-1)[..., :top_k_of(layers[0])]


WAYS = {"stored": None, "reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}


def set_way(model, way: str) -> None:
    model.gradient_checkpointing_disable()
    if WAYS[way] is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=WAYS[way])
