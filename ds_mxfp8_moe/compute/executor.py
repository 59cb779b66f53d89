# SPDX-License-Identifier: Apache-2.0
"""Recorded launches and their C++ executor (ops/csrc/replay), where a device can use it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from types import ModuleType

import torch

from ..ops.device import has_kernels
from ..ops.mx_format import MXParts
from ..ops.op_builder import replay
from .mx import MXTensor


@cache
def executor_for(device: torch.device) -> ModuleType | None:
    """The executor, which is built at its first use. None: the host launches from Python on this device."""
    return None if not has_kernels(device) or unknown_launcher() else replay.try_load()[0]


def unknown_launcher() -> str | None:
    """Why launches with this release of Triton cannot be recorded. None: they can."""
    from ..ops.triton_kernels import launcher  # Triton exists on Linux alone
    return None if launcher.KNOWN else launcher.UNKNOWN


@cache
def _recording() -> ModuleType:
    from ..ops.triton_kernels import recording  # Triton exists on Linux alone
    return recording


def replayed(executor: ModuleType, key: tuple, function: Callable[[list], dict], inputs: list,
             stacks: Sequence[Sequence[torch.Tensor]] = (), within_stacks: bool = True) -> dict:
    """function(inputs). The first call is recorded, later ones are replayed.

    A program runs on the current stream of the device of the inputs.

    Args:
        key: what the function depends on, beside the properties of its tensors.
        function: empties `inputs`. It returns tensors, MXTensors and None by name, and objects without tensors, which
            replays return as they are.
        inputs: tensors, MXTensors and None.
        stacks: weights that the function reads, too. Those of one stack have the same properties.
        within_stacks: a kernel finds each weight by its distance from the first weight of its stack. If false, by its
            distance from the first weight of all stacks.
    """
    tensors, kinds = taken_apart(inputs)
    inputs.clear()
    key = (*key, kinds, tuple(map(len, stacks)), executor.signature([*tensors, *(stack[0] for stack in stacks)]))
    weights = [weight for stack in stacks for weight in stack]
    between = (tuple(executor.distances(stack) for stack in stacks if len(stack) > 1) if within_stacks
               else executor.distances(weights))
    tensors += weights

    def of_tensors(tensors: list) -> tuple:
        values = put_together(tensors, kinds)
        tensors.clear()
        made = function(values)
        others = {name: x for name, x in made.items() if x is not None and not isinstance(x, torch.Tensor)}
        names = tuple(name for name in made if name not in others)
        made_tensors, made_kinds = taken_apart(map(made.get, names))
        return made_tensors, (made_kinds, names, others)

    device = tensors[0].get_device()  # -1: the CPU
    elsewhere = device >= 0 and device != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        values, (made_kinds, names, others) = _recording().replayed(executor, key, between, of_tensors, tensors)
    if any(made_kinds) or None in made_kinds:
        values = put_together(values, made_kinds)
    return dict(zip(names, values, strict=True), **others)


def taken_apart(values: Iterable[torch.Tensor | None]) -> tuple[list[torch.Tensor], tuple]:
    """The plain tensors of these tensors; and of each its kind: None if it is None, () if it is plain, else the
    attributes of an MXTensor."""
    tensors, kinds = [], []
    for value in values:
        if value is None:
            kinds.append(None)
        elif type(value) is MXTensor:
            tensors += value.qdata, value.scale_bytes
            kinds.append((value.block_size, value.orig_dtype, value.tiled))
        else:
            tensors.append(value)
            kinds.append(())
    return tensors, tuple(kinds)


def put_together(tensors: list[torch.Tensor], kinds: tuple) -> list[torch.Tensor | None]:
    """The inverse of `taken_apart`. It removes what it takes from the front of `tensors`."""
    return [None if kind is None else _mx_tensor(tensors, *kind) if kind else tensors.pop(0) for kind in kinds]


def _mx_tensor(tensors: list[torch.Tensor], block_size: int, dtype: torch.dtype, tiled: bool) -> MXTensor:
    return MXTensor.of(MXParts(tensors.pop(0), tensors.pop(0), block_size, tiled), dtype)
