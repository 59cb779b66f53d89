# SPDX-License-Identifier: Apache-2.0
"""Where a rank holds the values of a parameter: its weights, and what the optimizer keeps for them.

DeepSpeed's optimizers keep masters and moments of many parameters in one flat tensor, of which a rank of ZeRO has a
partition. FlashAdamW keeps moments in 8 bits, with a scale for each 32 of them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import deepspeed.comm as dist
import torch

GROUP = 32  # values of flashoptim that share a scale
LEAVE_OUT = 'leave "expert_placement" out, and go on from the last checkpoint'


class Part(NamedTuple):
    """Values of a parameter's elements on this rank, which may be written.

    Attributes:
        values: a view of one dimension.
        first: the element of the first value.
        each: how many elements one value is for.
    """

    values: torch.Tensor
    first: int
    each: int = 1

    def of(self, start: int, end: int) -> torch.Tensor:
        """The values of the elements from `start` to `end` that are here.

        Raises:
            RuntimeError: a value is for elements inside and outside of them.
        """
        low, high = (min(max(edge - self.first, 0), len(self.values) * self.each) for edge in (start, end))
        if low < high and (low % self.each or high % self.each):
            raise RuntimeError(f"elements {start} to {end} of a parameter begin or end within {self.each} that share "
                               f"one value of the optimizer's state, and cannot be moved apart: {LEAVE_OUT}")
        return self.values[low // self.each:high // self.each]


def obstacle(optimizer: Any) -> str | None:
    """Why `parts_of` does not find what this optimizer of an engine keeps. None: it does."""
    if getattr(optimizer, "swap_optimizer", False):
        return "the optimizer's states are on NVMe"
    known = isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "grad_position") or _flat(optimizer)
    return None if known else f"the masters of {type(optimizer).__name__} are not moved: use ZeRO"


@torch.no_grad()
def parts_of(optimizer: Any, parameter: torch.nn.Parameter) -> Iterator[Part]:
    """All values that this rank holds for a parameter, each of them once.

    Args:
        optimizer: of an engine. None: there is none.

    Raises:
        RuntimeError: the optimizer keeps a state of a form that is not known.
    """
    if hasattr(parameter, "ds_id"):
        shard = parameter.ds_tensor.view(-1)
        start = dist.get_rank(group=parameter.ds_process_group) * len(shard)
        yield Part(shard, start)
        # ZeRO-3 keeps a small one whole, too, which on one rank is the same memory.
        if parameter.data.numel() == parameter.ds_numel and parameter.data_ptr() != shard.data_ptr():
            yield Part(parameter.data.view(-1), 0)
        yield from _of_stage_3(optimizer, parameter, start)
        return
    yield Part(parameter.data.view(-1), 0)
    if isinstance(optimizer, torch.optim.Optimizer):
        yield from _states(optimizer, parameter, 0, parameter.numel(), 0)
        return
    for flat, master, group in _flat(optimizer):
        inside = flat.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if inside:
            begin = parameter.storage_offset() - flat.storage_offset()
            partition = dist.get_rank(group=group) * master.numel()
            first, end = max(begin, partition), min(begin + parameter.numel(), partition + master.numel())
            if first < end:
                # Masters in the weights' own dtype may be the weights (zero.py).
                if master.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
                    yield Part(master.view(-1)[first - partition:end - partition], first - begin)
                yield from _states(optimizer.optimizer, master, first - partition, end - partition, first - begin)


def _flat(optimizer: Any) -> list[tuple]:
    """Of ZeRO-1 and 2 and of the BF16_Optimizer: flat weights, this rank's masters, and the group of the partitions.
    """
    for weights, masters in (("bit16_groups_flat", "single_partition_of_fp32_groups"),
                             ("bf16_groups_flat", "fp32_groups_flat_partition")):
        if hasattr(optimizer, masters):
            return [*zip(getattr(optimizer, weights), getattr(optimizer, masters), optimizer.real_dp_process_group,
                         strict=True)]
    return []


def _of_stage_3(optimizer: Any, parameter: torch.nn.Parameter, start: int) -> Iterator[Part]:
    places = getattr(optimizer, "grad_position", {})  # of parameters that it trains
    if places and (place := places.get(optimizer.get_param_id(parameter))) is not None:
        i, first, elements = place
        master = optimizer.fp32_partitioned_groups_flat[i]
        yield Part(master.view(-1)[first:first + elements], start)
        yield from _states(optimizer.optimizer, master, first, first + elements, start)


def _states(optimizer: torch.optim.Optimizer, key: torch.Tensor, low: int, high: int, first: int) -> Iterator[Part]:
    """What the optimizer keeps of elements [low, high) of a tensor that it steps, of which `first` is the parameter's
    element of the first."""
    for name, state in optimizer.state.get(key, {}).items():
        if isinstance(state, torch.Tensor):
            tensors = [state]
        elif hasattr(state, "is_quantized"):  # flashoptim's
            tensors = [state.quantized, state.scales] if state.is_quantized() else [state.data]
        elif state is None or isinstance(state, (int, float)):
            continue
        else:
            raise _unknown_form(optimizer, name, type(state).__name__)
        for tensor in tensors:
            each = 1 if tensor.numel() == key.numel() else GROUP
            if tensor.numel() == -(-key.numel() // each):
                yield Part(Part(tensor.view(-1), 0, each).of(low, high), first, each)
            elif tensor.numel() > 1:
                raise _unknown_form(optimizer, name, f"{tuple(tensor.shape)} for {key.numel()} values")


def _unknown_form(optimizer: torch.optim.Optimizer, name: str, form: str) -> RuntimeError:
    return RuntimeError(f"{type(optimizer).__name__} keeps {name}, {form}, in a form that cannot be moved: "
                        f"{LEAVE_OUT}")
