# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Ulysses beside expert parallelism: ranks share sequences, and around attention they share heads instead.

A MoE layer computes with a rank's own tokens, whichever part of a sequence they are, so the exchange needs nothing.
What else differs is here: what AutoEP reads of Ulysses' mpu, and transformers' auxiliary loss.
"""

import sys
from collections.abc import Callable
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel.parallel_state_sp import get_sequence_parallel_group

from ..config import ConfigError
from .patches import wrap


class SequenceParallel:
    """Ulysses' mpu, except that it says that no tensors are parallel.

    Ulysses' own has no tensor-parallel size, so AutoEP reads its model-parallel size: the ranks that share a sequence.
    """

    def __init__(self, mpu: Any):
        self._mpu = mpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mpu, name)

    def get_tensor_model_parallel_world_size(self) -> int:
        """As Megatron's mpu has it."""
        return 1


def for_autoep(mpu: Any, stage: int) -> Any:
    """The mpu of an engine of ZeRO `stage` as AutoEP can read it. It stays as it is unless it is Ulysses'.

    Raises:
        ConfigError: DeepSpeed 0.19.8 would train the experts with smaller gradients than the other weights.
    """
    if not hasattr(mpu, "initialize_sequence_parallel") or hasattr(mpu, "get_tensor_model_parallel_world_size"):
        return mpu
    if stage == 0:
        raise ConfigError(f"sequence parallelism needs ZeRO 1 or 2: in ZeRO 0, DeepSpeed divides the gradients of "
                          f"experts, and only these, by its size of {mpu.get_sequence_parallel_world_size()}")
    return SequenceParallel(mpu)


def balance_whole_sequences(engine: DeepSpeedEngine) -> None:
    """Computes the auxiliary loss of transformers' models over whole sequences, on each rank that has a part."""
    if isinstance(engine.mpu, SequenceParallel):
        for name in {type(module).__module__ for module in engine.module.modules()}:
            if hasattr(sys.modules[name], "load_balancing_loss_func"):
                wrap(sys.modules[name], "load_balancing_loss_func", _of_whole_sequences, until=engine)


def _of_whole_sequences(plain: Callable, gate_logits: Any, num_experts: int | None = None, top_k: int = 2,
                        attention_mask: torch.Tensor | None = None) -> Any:
    """As transformers' function of a rank's logits [tokens, experts], one a layer. In evaluation, when ranks may have
    sequences of their own, it is the rank's own loss."""
    if isinstance(gate_logits, tuple) and torch.is_grad_enabled():
        gate_logits = tuple(map(_Whole.apply, gate_logits))
        attention_mask = None if attention_mask is None else _Whole.apply(attention_mask)
    return plain(gate_logits, num_experts, top_k, attention_mask)


class _Whole(torch.autograd.Function):
    """The parts of all ranks that share a sequence, one after the other. torch.distributed.nn's function does the
    same, except that its backward needs NCCL if the group is not the world."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        ctx.group = get_sequence_parallel_group()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group=ctx.group))]
        dist.all_gather(parts, part.contiguous(), group=ctx.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(group=ctx.group))[dist.get_rank(group=ctx.group)]
