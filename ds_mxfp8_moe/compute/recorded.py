# SPDX-License-Identifier: Apache-2.0
"""`@recorded`: functions whose first call is recorded, and whose later calls are replayed from C++.

    @recorded
    def forward(settings, x_PH, weights): ...

Such a function reads nothing but its arguments, and knows nothing of recordings. Its arguments and its result are
trees: tensors, MXTensors, None and hashable settings in tuples, named tuples and dicts, and `Weights`. Calls share a
recording (ops/triton_kernels/recording.py) if their settings and the properties of their tensors are equal. A call
inside a recorded one is part of it.

A replay frees a tensor after its last use, unless its caller holds it. So callers pass what they need no longer as an
expression, not by a name.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..ops.device import has_kernels
from ..ops.mx_format import MXParts
from ..ops.op_builder import replay
from .casts import Stack
from .mx import MXTensor

MOST_KEYS, MOST_DISTANCES = 512, 16  # programs are kept for this many keys, and this many distances of one key
_PROGRAMS: dict[tuple, dict] = {}  # by key and distances; they hold no tensors
_TENSOR = object()  # stands for a plain tensor


class Weights(NamedTuple):
    """The weights that one GEMM multiplies.

    Attributes:
        stacks: as casts.py explains. The tensors of one stack have the same properties.
        apart: whether kernels find a weight by its distance from the first one of its stack. Else from the first one
            of all stacks.
    """

    stacks: tuple[Stack, ...]
    apart: bool


class _MX(NamedTuple):
    """Stands for an MXTensor."""

    block_size: int
    dtype: torch.dtype
    tiled: bool


class _Node(NamedTuple):
    """Stands for a tuple, by its type, or a dict, by its keys."""

    kind: type | tuple
    children: tuple


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


def recorded(function: Callable) -> Callable:
    """Decorates a function. The first tensor of its arguments says on which device it runs. If that tensor is empty,
    nothing is recorded."""

    @wraps(function)
    def call(*args: Any) -> Any:
        inputs, weights = [], []
        tree = flatten(args, inputs, weights)
        stacks = [stack for one in weights for stack in one]
        first = inputs[0] if inputs else stacks[0][0]
        executor = executor_for(first.device)
        if executor is None or first.numel() == 0 or _recording().active() is not None:
            return function(*args)
        key = function, tree, executor.signature([*inputs, *(stack[0] for stack in stacks)])
        distances = tuple(executor.distances(stack) for stack in stacks if len(stack) > 1)
        inputs += [weight for stack in stacks for weight in stack]
        programs = _programs_of(key)
        if distances not in programs:
            if len(programs) == MOST_DISTANCES:
                return function(*args)
            return _record(function, args, inputs, executor, programs, distances)
        program, result = programs[distances]
        if program is None:
            return function(*args)
        del args  # else the replay could free none of them
        with _on_device_of(inputs[0]):
            return unflatten(result, iter(program(inputs)))

    return call


def _programs_of(key: tuple) -> dict:
    programs = _PROGRAMS.get(key)
    if programs is None:
        if len(_PROGRAMS) == MOST_KEYS:
            _PROGRAMS.pop(next(iter(_PROGRAMS)))
        programs = _PROGRAMS[key] = {}
    return programs


def _record(function: Callable, args: tuple, inputs: list, executor: ModuleType, programs: dict,
            distances: tuple) -> Any:
    with _on_device_of(inputs[0]), _recording().Recording(inputs) as recording:
        result = function(*args)
    outputs: list[torch.Tensor] = []
    tree = flatten(result, outputs)
    program = recording.program(outputs, executor)
    if program is None:
        warnings.warn(f"mxfp8_moe: the host launches kernels from Python, which is slower: {recording.obstacle}",
                      stacklevel=2)
    programs[distances] = program, tree
    return result


def _on_device_of(x: torch.Tensor) -> Any:
    device = x.get_device()  # -1: the CPU
    return torch.cuda.device(device) if device >= 0 and device != torch.cuda.current_device() else nullcontext()


def flatten(x: Any, tensors: list[torch.Tensor], weights: list | None = None) -> Any:
    """Adds the plain tensors of a tree to `tensors`, and returns what is left of it, which is hashable.

    `weights`: gets the stacks of every `Weights`, joined where they are not `apart`. None: there are none in the tree.
    """
    if isinstance(x, torch.Tensor):
        if type(x) is MXTensor:
            tensors += x.qdata, x.scale_bytes
            return _MX(x.block_size, x.orig_dtype, x.tiled)
        tensors.append(x)
        return _TENSOR
    if isinstance(x, Weights):
        stacks = [[stack] if isinstance(stack, torch.Tensor) else list(stack) for stack in x.stacks]
        sizes = tuple(map(len, stacks))
        weights.append(stacks if x.apart else [sum(stacks, [])])
        return _Node(Weights, sizes)
    if isinstance(x, tuple):
        return _Node(type(x), tuple(flatten(one, tensors, weights) for one in x))
    if isinstance(x, dict):
        return _Node(tuple(x), tuple(flatten(one, tensors, weights) for one in x.values()))
    return x


def unflatten(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The inverse of `flatten`, without `Weights`."""
    if tree is _TENSOR:
        return next(tensors)
    if type(tree) is _MX:
        return MXTensor.of(MXParts(next(tensors), next(tensors), tree.block_size, tree.tiled), tree.dtype)
    if type(tree) is not _Node:
        return tree
    children = [unflatten(one, tensors) for one in tree.children]
    if isinstance(tree.kind, tuple):
        return dict(zip(tree.kind, children, strict=True))
    return tuple(children) if tree.kind is tuple else tree.kind(*children)
