# SPDX-License-Identifier: Apache-2.0
"""Clips gradients by the norm of the whole model in ZeRO-0.

There, DeepSpeed 0.19.8 computes other norms if ranks hold different experts: in fp32 the mean of the ranks' norms, in
16 bits the norm of the dense parameters. With its FusedAdam in 16 bits, and in ZeRO-1 to 3, the norm is right.
"""

from collections.abc import Callable

import deepspeed.comm as dist
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..transport.deadline import deadline_for
from .patches import wrap
from .private_names import say_if_missing


def clip_by_whole_norm(engine: DeepSpeedEngine) -> None:
    """Applies the above to an engine in 16 bits, and says if it does not work. A second call changes nothing."""
    if not needs_whole_norm(engine) or say_if_missing("clipping"):
        return

    def clip_16_bits(plain: Callable, total_norm: torch.Tensor | float, *args, **kwargs) -> float:
        experts = norm_of_experts(engine.module)
        engine.optimizer._global_grad_norm = experts.hypot(torch.as_tensor(total_norm).to(experts))
        return plain(engine.optimizer._global_grad_norm, *args, **kwargs)

    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        wrap(engine.optimizer, "unscale_and_clip_grads", clip_16_bits, until=engine)


def needs_whole_norm(engine: DeepSpeedEngine) -> bool:
    """Whether DeepSpeed's own norm would be another. Engines whose ranks share layers by tensor or pipeline
    parallelism clip as before."""
    return engine.zero_optimization_stage() == 0 and engine.has_moe_layers and engine.mpu is None


def clip_whole_model(engine: DeepSpeedEngine) -> None:
    """Clips the gradients of an engine in fp32."""
    params = [p for p in engine.module.parameters() if p.grad is not None]
    dense = get_total_norm([p.grad for p in params if not is_moe_param(p)])
    clip_grads_with_norm_(params, engine.gradient_clipping(), dense.hypot(norm_of_experts(engine.module)))


def norm_of_experts(model: torch.nn.Module) -> torch.Tensor:
    """float32 [], the norm of the gradients of all ranks' experts. Collective over all ranks."""
    device = next(model.parameters()).device
    square, world_size = torch.zeros((), device=device), dist.get_world_size()
    for layer in model.modules():
        if isinstance(layer, (AutoEPMoELayer, MoE)):
            grads = [p.grad.float() for p in layer.parameters() if p.grad is not None and is_moe_param(p)]
            # world_size / ep_size ranks hold the same experts, with the same gradients.
            square += get_total_norm(grads).to(device).square() * (layer.ep_size / world_size)
    with deadline_for(dist.get_world_group(), device, "the norm of the experts' gradients over all ranks"):
        dist.all_reduce(square)
    return square.sqrt()
