# SPDX-License-Identifier: Apache-2.0
"""`@recorded`: functions whose first call is recorded, and whose later calls are replayed from C++.

    @recorded
    def forward(settings, x_PH, weights): ...

Such a function reads nothing but its arguments, and knows nothing of recordings. Its arguments and its result are
trees: tensors, MXTensors, None and hashable settings in tuples, named tuples and dicts, and `Weights`. Calls share a
recording (ops/triton_kernels/recording.py) if their settings and the properties of their tensors are equal. A call
inside a recorded one is part of it.

A replay frees a tensor after its last use, unless its caller holds it, as a variable does. So callers pass a tensor
that they do not need afterwards without giving it a name: `forward(make_x(), ...)`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
_from_python = False  # see from_python


class Weights(NamedTuple):
    """The weights that one GEMM multiplies.

    Attributes:
        stacks: as casts.py explains. The tensors of one stack have the same properties.
        apart: whether kernels find a weight by its distance from the first one of its stack. Else from the first one
            of all stacks.
    """

    stacks: tuple[Stack, ...]
    apart: bool


class Tree:
    """What is left of a tree without its tensors. It hashes once."""

    __slots__ = "parts", "_hash"

    def __init__(self, parts: tuple):
        self.parts, self._hash = parts, None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.parts)
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return self is other or isinstance(other, Tree) and self.parts == other.parts


class Kept(NamedTuple):
    """A tree taken apart: a recorded function returns it, and another one takes it. Between the two calls nobody puts
    it together."""

    tree: Tree
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, *values: Any) -> "Kept":
        tensors: list[torch.Tensor] = []
        tree = Tree(flatten(values, tensors))
        return cls(tree, tuple(tensors))

    def values(self) -> tuple:
        """What `of` was given."""
        return unflatten(self.tree.parts, iter(self.tensors))


class _MX(NamedTuple):
    """Stands for an MXTensor."""

    block_size: int
    dtype: torch.dtype
    tiled: bool


@cache
def executor_for(device: torch.device) -> ModuleType | None:
    """The executor, which is built at its first use. None: the host launches from Python on this device."""
    return None if _from_python or not has_kernels(device) or unknown_launcher() else replay.try_load()[0]


@contextmanager
def from_python() -> Iterator[None]:
    """Inside the context, the host launches from Python on all devices, and nothing is recorded or replayed."""
    global _from_python
    try:
        _from_python = True
        executor_for.cache_clear()
        yield
    finally:
        _from_python = False
        executor_for.cache_clear()


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
            return unflatten(result, iter(program(inputs)))[0]

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
    tree = flatten((result, ), outputs)
    program = recording.program(outputs, executor)
    if program is None:
        warnings.warn(f"mxfp8_moe: the host launches kernels from Python, which is slower: {recording.obstacle}",
                      stacklevel=2)
    programs[distances] = program, tree
    return result


def _on_device_of(x: torch.Tensor) -> Any:
    device = x.get_device()  # -1: the CPU
    return torch.cuda.device(device) if device >= 0 and device != torch.cuda.current_device() else nullcontext()


def flatten(values: tuple, tensors: list[torch.Tensor], weights: list | None = None) -> tuple:
    """Adds the plain tensors of a tree to `tensors`, and returns what is left of it, which is hashable.

    It runs in every call of a layer, so it looks for the most frequent types first.

    Args:
        weights: gets the stacks of every `Weights`, joined where they are not `apart`. None: there are none.

    Returns:
        (type, *children) of every tuple, and (dict, keys, children) of every dict.
    """
    tree: list = [type(values)]
    for x in values:
        kind: Any = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            tensors.append(x)
            tree.append(_TENSOR)
        elif kind is MXTensor:
            tensors += x.qdata, x.scale_bytes
            tree.append(_MX(x.block_size, x.orig_dtype, x.tiled))
        elif kind is Weights:
            stacks = [[stack] if isinstance(stack, torch.Tensor) else list(stack) for stack in x.stacks]
            tree.append((Weights, *map(len, stacks)))
            weights.append(stacks if x.apart else [sum(stacks, [])])
        elif isinstance(x, tuple):
            tree.append(flatten(x, tensors, weights))
        elif kind is dict:
            tree.append((dict, tuple(x), flatten(tuple(x.values()), tensors, weights)))
        elif _is_tensor(kind):
            tensors.append(x)
            tree.append(_TENSOR)
        else:
            tree.append(x)
    return tuple(tree)


@cache
def _is_tensor(kind: Any) -> bool:
    return issubclass(kind, torch.Tensor)


def unflatten(tree: tuple, tensors: Iterator[torch.Tensor]) -> Any:
    """The inverse of `flatten`, without `Weights`."""
    kind, *values = tree
    if kind is dict:
        keys, children = values
        return dict(zip(keys, unflatten(children, tensors), strict=True))
    for i, one in enumerate(values):
        if one is _TENSOR:
            values[i] = next(tensors)
        elif type(one) is tuple:
            values[i] = unflatten(one, tensors)
        elif type(one) is _MX:
            values[i] = MXTensor.of(MXParts(next(tensors), next(tensors), one.block_size, one.tiled), one.dtype)
    return tuple(values) if kind is tuple else kind._make(values)
