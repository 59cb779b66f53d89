# SPDX-License-Identifier: Apache-2.0
"""Recorded launches and their C++ executor (ops/csrc/replay), where a device can use it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import ModuleType

import torch

from ..ops.device import has_kernels
from ..ops.op_builder import replay
from .mx import MXTensor


def executor_for(device: torch.device) -> ModuleType | None:
    """The executor, which is built at its first use. None: the host launches from Python on this device."""
    return None if not has_kernels(device) or unknown_launcher() else replay.try_load()[0]


def unknown_launcher() -> str | None:
    """Why launches with this release of Triton cannot be recorded. None: they can."""
    from ..ops.triton_kernels import launcher  # Triton exists on Linux alone
    return None if launcher.KNOWN else launcher.UNKNOWN


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
    from ..ops.triton_kernels import recording  # Triton exists on Linux alone
    tensors, kinds = taken_apart(inputs)
    inputs.clear()
    there = [x is not None for x in tensors]
    key = (*key, kinds, tuple(map(len, stacks)), executor.signature([*tensors, *(stack[0] for stack in stacks)]))
    weights = [weight for stack in stacks for weight in stack]
    given = [*(x for x in tensors if x is not None), *weights]
    del tensors

    def of_tensors(given: list) -> tuple:
        tensors = iter(given)
        values = put_together([next(tensors) if one else None for one in there], kinds)
        given.clear()
        made = function(values)
        others = {name: x for name, x in made.items() if x is not None and not isinstance(x, torch.Tensor)}
        names = tuple(name for name in made if name not in others)
        made_tensors, made_kinds = taken_apart(map(made.get, names))
        return made_tensors, (names, made_kinds, others)

    device = given[0].device
    elsewhere = device.index is not None and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        between = tuple(map(executor.distances, stacks)) if within_stacks else executor.distances(weights)
        values, (names, kinds_made, others) = recording.replayed(executor, key, between, of_tensors, given)
    made = dict(zip(names, put_together(values, kinds_made) if any(kinds_made) else values, strict=True))
    made.update(others)
    return made


def taken_apart(values: Iterable[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], tuple]:
    """The plain tensors of these tensors; and of each its kind: the attributes of an MXTensor, else None."""
    tensors, kinds = [], []
    for value in values:
        if isinstance(value, MXTensor):
            tensors += value.qdata, value.scale_bytes
            kinds.append((value.block_size, value.orig_dtype, value.tiled))
        else:
            tensors.append(value)
            kinds.append(None)
    return tensors, tuple(kinds)


def put_together(tensors: list[torch.Tensor | None], kinds: Iterable) -> list[torch.Tensor | None]:
    """The inverse of `taken_apart`. It removes what it takes from the front of `tensors`."""
    return [tensors.pop(0) if kind is None else MXTensor(tensors.pop(0), tensors.pop(0), *kind) for kind in kinds]
