# SPDX-License-Identifier: Apache-2.0
"""Lets ZeRO-1 and 2 check the gradients of all parameters in a few calls.

DeepSpeed checks the gradient of each parameter for overflow and computes its norm. This takes eight kernels for each
parameter. A classic MoE model often has more than a thousand parameters: several for each expert. Its optimizer step
then spends most of its time on launches. The methods in this file check all gradients together. They skip the same
steps as DeepSpeed's methods, and gradients are clipped to the same values.
"""

import math
from types import MethodType
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import is_model_parallel_parameter, mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import get_norm_dtype
from torch.nn.utils import get_total_norm

TESTED = ("0.19.8", )  # releases of DeepSpeed whose optimizer has these methods, and calls them so


def batch_gradient_checks(optimizer: Any, on: bool) -> str | None:
    """Gives an engine's optimizer the methods of this file. `on` false: gives it back its own.

    Returns:
        The reason if the optimizer of ZeRO-1 or 2 cannot use them. Otherwise None. Other optimizers are left alone.
    """
    if type(optimizer) is not DeepSpeedZeroOptimizer:
        return None
    for name in ("has_overflow_partitioned_grads_serial", "get_grad_norm_direct"):
        vars(optimizer).pop(name, None)
    if not on:
        return None
    if deepspeed.__version__.split("+")[0] not in TESTED:
        return f"this was tested with DeepSpeed {', '.join(TESTED)}, and {deepspeed.__version__} is installed"
    if optimizer.cpu_offload:
        return "with offload it checks them where it copies them"
    optimizer.has_overflow_partitioned_grads_serial = MethodType(_has_overflow, optimizer)
    optimizer.get_grad_norm_direct = MethodType(_grad_norm, optimizer)
    return None


def _has_overflow(self: DeepSpeedZeroOptimizer) -> torch.Tensor:
    """Whether any gradient of this rank's partitions holds a NaN or an Inf: bool [1], on the device."""
    gradients = [g for i in range(len(self.bit16_groups)) for g in _whole(self.averaged_gradients[i])
                 if g is not None and g.numel()]
    if not gradients:
        return torch.zeros(1, dtype=torch.bool, device=get_accelerator().current_device_name())
    return get_total_norm(gradients, math.inf).isfinite().logical_not().view(1)


def _whole(gradients: list) -> list:
    """One tensor where DeepSpeed accumulates in float32, and the gradients of a group are parts of it."""
    whole = getattr(gradients, "flat_partition", None)
    return gradients if whole is None else [whole]


def _grad_norm(self: DeepSpeedZeroOptimizer, gradients: list, params: list, norm_type: float = 2) -> torch.Tensor:
    """DeepSpeed's `get_grad_norm_direct`, with the norms of all gradients taken together.

    Each gradient's norm is a float64, as in DeepSpeed. Their sum is rounded to float32.
    """
    if norm_type != 2:
        return DeepSpeedZeroOptimizer.get_grad_norm_direct(self, gradients, params, norm_type)
    parts = (g for g in gradients if not getattr(g, "_zero_padding", False))
    counted = [g.detach() for g, p in zip(parts, params, strict=False)
               if not (hasattr(p, PIPE_REPLICATED) and p.ds_pipe_replicated)
               and (is_model_parallel_parameter(p) or self.model_parallel_rank == 0)]
    if counted:
        norms = torch._foreach_norm(counted, 2, dtype=get_norm_dtype())
        total = torch.stack(norms).pow(2).sum().float()
    else:
        total = torch.tensor(0.0, dtype=torch.float32, device=self.device)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.dp_process_group)
    self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
    total = total.pow(1. / norm_type)
    mask_nan_or_inf_with_val_inplace(total, device=self.device)
    return total
