# SPDX-License-Identifier: Apache-2.0
"""Triton's launcher: what launch.py calls of it, and what a recording repeats without it.

Nothing of this is documented by Triton. It is the same in the RELEASES. With other releases KNOWN is false: Triton
launches every kernel itself, from Python, and nothing is recorded.

In all of them, a compiled kernel's `run` takes the grid, the stream, the driver's function, the launch's metadata, two
hooks and the kernel's arguments. An address may stand in place of a tensor. Compiled code gets the arguments that are
no constants, with tuples laid out flat, a descriptor followed by its shape and strides, and two addresses of scratch
memory at the end.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver

RELEASES = ("3.6", "3.7", "3.8", "3.9")
KNOWN = triton.__version__.rpartition(".")[0] in RELEASES
# CUDA's CUtensorMapDataType. Integers and FP8 count as unsigned integers of their size.
TMA_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
UNKNOWN = (f"the launcher of Triton {triton.__version__} is not known to this package, those of {RELEASES[0]} to "
           f"{RELEASES[-1]} are")


class Kernel(NamedTuple):
    """Compiled code, and what a launch of it needs beside its grid and arguments.

    Attributes:
        function: address of the driver's function.
        types: Triton's types of the arguments, tuples for tuples. "constexpr": compiled in.
        maps: Triton's tensordesc_meta.
    """

    name: str
    function: int
    threads: int
    shared_bytes: int
    types: tuple
    maps: tuple


def is_watched() -> bool:
    """Whether a profiler has set Triton's hooks, which it calls with what only Triton's own launch computes."""
    return bool(knobs.runtime.launch_enter_hook.calls)  # a profiler sets both


def is_compiled(found: Any) -> bool:
    """Whether a launch returned a kernel. Triton's interpreter has none, nor a hook of Triton's that compiles."""
    return hasattr(found, "packed_metadata")


def launch(compiled: Any, grid: tuple[int, int, int], device: int, args: Sequence) -> None:
    """Launches a compiled kernel on a device's current stream. `args`: addresses and numbers, then the constants."""
    compiled.run(*grid, driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata, None,
                 None, None, *args)


def current_stream() -> Callable[[int], int]:
    """A function of a device's index."""
    return driver.active.get_current_stream


def described(name: str, compiled: Any, arguments: int) -> Kernel | None:
    """What a recording launches. None if only Triton can, as with scratch memory.

    `arguments`: how many the kernel has before its constants.
    """
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    warps, _, shared_bytes = compiled.packed_metadata
    return Kernel(name, compiled.function, 32 * warps, shared_bytes,
                  tuple(compiled.src.signature.values())[:arguments], tuple(metadata.tensordesc_meta or ()))


def map_arguments(descriptor: Any, of: dict) -> tuple:
    """What the driver makes a TMA descriptor of, beside the address. `of`: the descriptor's entry in Kernel.maps."""
    base = descriptor.base
    kind = TMA_TYPES.get(base.dtype, {1: 0, 2: 1, 4: 2}[base.itemsize])
    return of["swizzle"], base.itemsize, kind, list(of["block_size"]), list(descriptor.shape), list(descriptor.strides)
