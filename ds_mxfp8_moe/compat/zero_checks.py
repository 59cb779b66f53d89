# SPDX-License-Identifier: Apache-2.0
"""Checks and measures all gradients of ZeRO-1 and 2 at once, and leaves out loops that change nothing."""

import math
from collections.abc import Sequence

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import is_model_parallel_parameter, mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import get_norm_dtype
from deepspeed.utils import lazy_init_hp_params_optimizer_state
from torch.nn.utils import get_total_norm


def share_masters(optimizer: DeepSpeedZeroOptimizer, on: bool) -> None:
    """Masters in the weights' own dtype are the weights of this rank's partition: one tensor holds both.

    After its step, DeepSpeed copies the master into the weights. That copies nothing where they are the same tensor.
    """
    changed = False
    for master, partitions, group in zip(optimizer.single_partition_of_fp32_groups,
                                         optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group,
                                         strict=True):
        weights = partitions[dist.get_rank(group=group)]
        if master.dtype == weights.dtype and (master.data_ptr() == weights.data_ptr()) != on:
            master.data = weights.detach() if on else weights.detach().clone()
            changed = True
    if changed:  # DeepSpeed gives access to the masters of single parameters, and to their moments once they are there
        optimizer._link_all_hp_params()
        if states := optimizer.optimizer.state:
            for parameters, master in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups,
                                          strict=True):
                lazy_init_hp_params_optimizer_state(parameters, master, states)


class BatchedChecks(DeepSpeedZeroOptimizer):
    """Checks all gradients for overflow at once, and computes their norms at once. Skips loops that change nothing."""

    def reload_states(self, *args, **kwargs) -> None:
        """As DeepSpeed's."""
        super().reload_states(*args, **kwargs)
        share_masters(self, on=True)

    def _get_groups_without_padding(self, groups_with_padding: list) -> list:
        """What a checkpoint has of the masters. A file that holds a part of the weights would hold all of them."""
        return [part.clone() if 2 * part.nbytes <= part.untyped_storage().nbytes() else part
                for part in super()._get_groups_without_padding(groups_with_padding)]

    def should_refresh_expected_hook_count(self) -> bool:
        """Whether DeepSpeed now counts the parameters that get gradients in this backward pass.

        By the count it knows when the pass has ended. In a pass by engine.backward, autograd says so, and nothing
        reads the count: then DeepSpeed counts nothing.
        """
        return self._backward_active_depth == 0 and super().should_refresh_expected_hook_count()

    def has_overflow_partitioned_grads_serial(self) -> torch.Tensor:
        """Whether any gradient of this rank's partitions holds a NaN or an Inf: bool [1], on the device."""
        gradients = [g for i in range(len(self.bit16_groups)) for g in _whole(self.averaged_gradients[i])
                     if g is not None and g.numel()]
        if not gradients:
            return torch.zeros(1, dtype=torch.bool, device=get_accelerator().current_device_name())
        return get_total_norm(gradients, math.inf).isfinite().logical_not().view(1)

    def get_grad_norm_direct(self, gradients: list, params: list, norm_type: float = 2) -> torch.Tensor:
        """As DeepSpeed's. Each gradient's norm is a float64, as there, and their sum is rounded to float32."""
        if norm_type != 2:
            return super().get_grad_norm_direct(gradients, params, norm_type)
        parts = (g for g in gradients if not getattr(g, "_mxfp8_padding", False))
        counted = [g.detach() for g, p in zip(parts, params, strict=False)
                   if not (hasattr(p, PIPE_REPLICATED) and p.ds_pipe_replicated)
                   and (self.model_parallel_rank == 0 or is_model_parallel_parameter(p))]
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

    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Points parameters at their places in the flat weights, unless all of them point there."""
        flat = self.bit16_groups_flat[group_index]
        start, size = flat.data_ptr(), flat.element_size()
        if any(p.data_ptr() != start + offset * size or p.shape != meta.shape or not p.is_contiguous()
               for p, meta, offset in zip(self.round_robin_bit16_groups[group_index],
                                          self.round_robin_bit16_meta[group_index],
                                          self.round_robin_bit16_offsets[group_index], strict=True)):
            super()._update_model_bit16_weights(group_index)


def _whole(gradients: list) -> Sequence[torch.Tensor]:
    """The gradients of a group. If they are parts of one tensor, large pieces of that tensor instead."""
    whole = getattr(gradients, "flat_partition", None)
    return gradients if whole is None else whole.split(2**30)  # kernels may count the elements of a tensor in 32 bits
