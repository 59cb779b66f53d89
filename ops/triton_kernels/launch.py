# SPDX-License-Identifier: Apache-2.0
"""Launches compiled kernels with less work on the host than Triton's own launch.

    @Launched
    @triton.jit
    def _double_kernel(x_ptr, N, BLOCK: tl.constexpr): ...

    _double_kernel[(programs, )](x, N, BLOCK=128, num_warps=4)

Triton compiles a kernel anew for each specialization of its arguments: their types, the values of constants, and
whether integers and addresses are 1 or multiples of 16. `Launched` computes that specialization itself. It remembers
the kernel that Triton compiled for it, and launches that kernel directly the next time. The first launch of a
specialization goes through Triton. So does every launch with an argument of a type unknown here, every launch while a
profiler has set Triton's hooks, and every launch with another version of Triton.
"""

from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Whether the launch at the end of this file works with this version of Triton.
KNOWN = triton.__version__.startswith("3.6.")


class _Unknown(Exception):
    """An argument whose specialization this file does not compute."""


def _specialization(x: Any) -> Any:
    """The properties of an argument that decide which code Triton compiles.

    Arguments that Triton specializes differently get different results. Arguments that it treats alike may also get
    different results. That costs one more launch through Triton.
    """
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
        return tuple(map(_specialization, x))
    if kind is bool or kind is float:
        return kind
    specialization = getattr(x, "specialization", None)  # grouped_gemm_hopper.py's descriptors have it
    if specialization is None:
        raise _Unknown
    return specialization


def _device(values: tuple) -> int:
    """Index of the GPU that holds the first tensor among the values. -1 if no GPU does, or if there is no tensor."""
    for x in values:
        x = getattr(x, "base", x)
        if isinstance(x, torch.Tensor):
            return x.get_device()
    return -1


class Launched:
    """Decorates a kernel that the host launches. It runs on the device of its first tensor.

    The kernel's parameters must not have defaults.
    """

    remembers = KNOWN

    def __init__(self, jitted: Any):
        self.fn = jitted  # Triton's own wrappers use this name
        self._compiled: dict = {}
        self._bound: dict = {}
        self._names: list = list(getattr(jitted, "arg_names", ()))
        self._constant: list = [param.is_constexpr for param in getattr(jitted, "params", ())]

    def __getitem__(self, grid: tuple) -> Any:
        return partial(self._launch, grid)

    def bind(self, *constants: Any, **options: Any) -> "Bound":
        """The kernel with its constants, which are its last parameters, and with Triton's options (num_warps)."""
        key = constants, *options.items()
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = Bound(self, constants, options)
        return bound

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
                value if constant else _specialization(value)
                for value, constant in zip(values, self._constant, strict=True)])
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


class Bound:
    """A kernel whose constants are known. A call takes the grid and the other arguments: tensors, integers, None."""

    def __init__(self, kernel: Launched, constants: tuple, options: dict):
        self._kernel, self._constants, self._options = kernel, constants, options
        self._compiled: dict = {}

    def __call__(self, grid: tuple, *args: Any) -> None:
        values, key, address = [], [], 0
        for x in args:
            if isinstance(x, torch.Tensor):
                at = x.data_ptr()
                address |= at
                values.append(at)
                key.append(x.dtype)
            elif type(x) is int:
                values.append(x)
                key.append(x if x == 1 else x % 16 == 0 if x <= 0x7FFFFFFF else "int64")
            else:
                values.append(x)
                key.append(None if x is None else x.specialization)
        device = _device(args)
        if device < 0 or address % 16 or not self._kernel.remembers or device != torch._C._cuda_getDevice():
            return self._kernel[grid](*args, *self._constants, **self._options)
        key = device, *key
        found = self._compiled.get(key)
        if found is None:
            compiled = self._kernel.fn[grid](*args, *self._constants, **self._options)
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
            return None
        run, function, metadata = found
        run(*grid, *(1, ) * (3 - len(grid)), torch._C._cuda_getCurrentRawStream(device), function, metadata, None,
            None, None, *values, *self._constants)
        return None
