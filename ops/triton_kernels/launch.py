# SPDX-License-Identifier: Apache-2.0
"""Launches of compiled kernels without most of what Triton's own take of the host.

    @Launched
    @triton.jit
    def _double_kernel(x_ptr, N, BLOCK: tl.constexpr): ...

    _double_kernel[(programs, )](x, N, BLOCK=128, num_warps=4)

Triton asks at every launch what decides about the code that it compiled: types, constants, multiples of 16. So do
these, of plain values, and go straight to what Triton compiled when they last met the same. Whatever else comes, and
every first time, is Triton's own launch.
"""

from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Those whose compiled kernels are launched as below.
KNOWN = triton.__version__.startswith("3.6.")


class _Unknown(Exception):
    """An argument that Triton alone can tell."""


def _fact(x: Any) -> Any:
    """What of an argument decides about the code; told apart at least where Triton does."""
    kind = type(x)
    if kind is int:
        if x == 1:
            return 1
        if -0x80000000 <= x <= 0x7FFFFFFF:
            return 16 if x % 16 == 0 else 0
        if x > 0x7FFFFFFFFFFFFFFF:
            raise _Unknown
        return -16 if x % 16 == 0 else -1
    if x is None:
        return None
    if isinstance(x, torch.Tensor):
        return x.dtype if x.data_ptr() % 16 == 0 else (x.dtype, )
    if kind is tuple:
        return tuple(map(_fact, x))
    if kind is bool or kind is float:
        return kind
    fact = getattr(x, "fact", None)  # of tensor descriptors
    if fact is None:
        raise _Unknown
    return fact


def _device(values: tuple) -> int:
    """Index of the GPU on which the first tensor lies; -1: it lies on none, or there is none."""
    for x in values:
        x = getattr(x, "base", x)
        if isinstance(x, torch.Tensor):
            return x.get_device()
    return -1


class Launched:
    """Decorates a kernel that the host launches, on the device of its first tensor; no parameter has a default."""

    remembers = KNOWN

    def __init__(self, jitted: Any):
        self.fn = jitted  # under Triton's name for what a wrapper wraps
        self._compiled: dict = {}
        self._names: list = list(getattr(jitted, "arg_names", ()))
        self._constant: list = [param.is_constexpr for param in getattr(jitted, "params", ())]

    def __getitem__(self, grid: tuple) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple, *args: Any, **named: Any) -> None:
        device = _device(args)
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._launch(grid, *args, **named)
        if not self.remembers or not isinstance(self.fn, JITFunction) or knobs.runtime.launch_enter_hook.calls or (
                knobs.runtime.launch_exit_hook.calls):
            self.fn[grid](*args, **named)
            return None
        options = dict(named)
        values = (*args, *[options.pop(name) for name in self._names[len(args):]])
        try:
            key = (device, *options.items(), *[
                value if constant else _fact(value) for value, constant in zip(values, self._constant, strict=True)])
        except _Unknown:
            self.fn[grid](*args, **named)
            return None
        found = self._compiled.get(key)
        if found is None:
            compiled = self.fn[grid](*args, **named)
            if isinstance(compiled, CompiledKernel):
                self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
            return None
        run, function, metadata = found
        stream = driver.active.get_current_stream(device)
        run(*grid, *(1, ) * (3 - len(grid)), stream, function, metadata, None, None, None, *values)
        return None
