# SPDX-License-Identifier: Apache-2.0
"""Launches compiled kernels with less work on the host than Triton's own launch.

    @Launched
    @triton.jit
    def _double_kernel(x_ptr, N, BLOCK: tl.constexpr): ...

    _double_kernel[(programs, )](x, N, BLOCK=128, num_warps=4)

Triton compiles a kernel anew for each specialization of its arguments: their types, the values of constants, and
whether integers and addresses are 1 or multiples of 16. `Launched` computes that specialization itself. It remembers
the kernel that Triton compiled for it, and the next time hands its launcher addresses and numbers, which spares a
query of the driver for each tensor. The first launch of a specialization goes through Triton. So does every launch
with an argument of a type unknown here, every launch while a profiler has set Triton's hooks, and every launch with
a release of Triton whose launcher is not known (launcher.py). `Launched` does not check that a tensor is on the GPU.
The caller must.

Whether the compiler fuses a multiplication and an addition changes bits, and Triton's default moves: on until 3.9, off
from 3.10. So it is chosen here. It is on unless a launch says `enable_fp_fusion=False`.
"""

from functools import partial
from typing import Any

import torch
from triton import JITFunction

from . import launcher
from .recording import active


class _Unknown(Exception):
    """An argument whose specialization only Triton knows."""


def _prepared(x: Any) -> tuple[Any, Any]:
    """The value that the launcher gets for an argument, and a key.

    If Triton compiles two arguments differently, their keys differ. Keys may also differ without need: the first
    launch with each key goes through Triton.
    """
    if isinstance(x, torch.Tensor):
        address = x.data_ptr()
        return address, x.dtype if address % 16 == 0 else (x.dtype, )
    kind = type(x)
    if kind is int:
        if x == 1:
            return x, 1
        if -0x80000000 <= x <= 0x7FFFFFFF:
            return x, 16 if x % 16 == 0 else 0
        return x, -16 if x % 16 == 0 else -1
    if x is None:
        return None, None
    if kind is tuple:
        parts = [_prepared(part) for part in x]
        return tuple(value for value, _ in parts), tuple(key for _, key in parts)
    if kind is bool or kind is float:
        return x, kind
    specialization = getattr(x, "specialization", None)  # grouped_gemm_hopper.py's descriptors have it
    if specialization is None:
        raise _Unknown
    return x, specialization


def _device(values: tuple) -> int:
    """Index of the GPU that holds the first tensor among the values; -1 if no GPU holds it, or there is no tensor."""
    for x in values:
        x = getattr(x, "base", x)
        if isinstance(x, torch.Tensor):
            return x.get_device()
    return -1


class Launched:
    """Decorates a kernel that the host launches. It runs on the device of the first tensor among its arguments.

    The kernel's constants are its last parameters. They alone may be named in a call. No parameter has a default.
    """

    remembers = launcher.KNOWN

    def __init__(self, jitted: Any):
        self.fn = jitted  # Triton's own wrappers use this name
        params = getattr(jitted, "params", ())
        self._constants = [param.name for param in params if param.is_constexpr]
        self._variable = len(params) - len(self._constants)
        if any(param.is_constexpr for param in params[:self._variable]):
            raise TypeError(f"{jitted.__name__}: its constants must be its last parameters")
        self._bound: dict = {}

    def __getitem__(self, grid: tuple) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple, *args: Any, **named: Any) -> None:
        variable = args[:self._variable]
        device = _device(variable)
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._launch(grid, *args, **named)
        if not self.remembers or not isinstance(self.fn, JITFunction) or launcher.is_watched():
            self.fn[grid](*args, **{"enable_fp_fusion": True, **named})
            if (recording := active()) is not None:
                recording.obstacle = f"a launch of {self.fn.__name__} is Triton's own"
            return None
        key = device, args[self._variable:], *named.items()
        bound = self._bound.get(key)
        if bound is None:
            options = {"enable_fp_fusion": True, **named}
            constants = args[self._variable:]
            constants += tuple(options.pop(name) for name in self._constants[len(constants):])
            bound = self._bound[key] = _Bound(self.fn, device, constants, options)
        bound.launch(grid, variable)
        return None


class _Bound:
    """A kernel on one device with all its constants and options: what is known before a launch."""

    def __init__(self, jitted: JITFunction, device: int, constants: tuple, options: dict):
        self.jitted, self.device, self.constants, self.options = jitted, device, constants, options
        self.compiled: dict = {}

    def launch(self, grid: tuple, args: tuple) -> None:
        try:
            values, key = _prepared(args)
        except _Unknown:
            key = None
        grid = *grid, *(1, ) * (3 - len(grid))
        found = self.compiled.get(key)
        if found is None:
            found = self.jitted[grid](*args, *self.constants, **self.options)
            if key is not None and launcher.is_compiled(found):
                self.compiled[key] = found
        else:
            launcher.launch(found, grid, self.device, values + self.constants)
        recording = active()
        if recording is not None:
            kernel = launcher.described(self.jitted.__name__, found, len(args))
            if kernel is None:
                recording.obstacle = f"a launch of {self.jitted.__name__} is Triton's own"
            else:
                recording.note_launch(kernel, grid, args)
