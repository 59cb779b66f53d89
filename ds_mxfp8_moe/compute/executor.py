# SPDX-License-Identifier: Apache-2.0
"""Recorded launches and their C++ executor (ops/csrc/replay), where a device can use it."""

from collections.abc import Callable, Iterable
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


def replayed(executor: ModuleType, key: tuple, between: bytes | tuple, function: Callable[[list], tuple],
             inputs: list[torch.Tensor | None]) -> tuple:
    """function(inputs), which empties `inputs`: see `recording.replayed`. Inputs may be None, but not the first one.

    A program runs on the current stream of the device of the inputs.
    """
    from ..ops.triton_kernels import recording  # Triton exists on Linux alone
    there = tuple(x is not None for x in inputs)
    given = [x for x in inputs if x is not None]
    inputs.clear()

    def of_given(given: list) -> tuple:
        tensors = iter(given)
        all_inputs = [next(tensors) if one else None for one in there]
        given.clear()
        return function(all_inputs)

    device = given[0].device
    elsewhere = device.index is not None and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        return recording.replayed(executor, (*key, there), between, of_given, given)


def taken_apart(values: Iterable[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], tuple]:
    """The plain tensors of these tensors; and of each its kind: the attributes of an MXTensor, else None."""
    tensors, kinds = [], []
    for value in values:
        quantized = isinstance(value, MXTensor)
        kinds.append((value.block_size, value.orig_dtype, value.tiled) if quantized else None)
        tensors += [value.qdata, value.scale_bytes] if quantized else [value]
    return tensors, tuple(kinds)


def put_together(tensors: list[torch.Tensor | None], kinds: Iterable) -> list[torch.Tensor | None]:
    """The inverse of `taken_apart`. It removes what it takes from the front of `tensors`."""
    return [tensors.pop(0) if kind is None else MXTensor(tensors.pop(0), tensors.pop(0), *kind) for kind in kinds]
