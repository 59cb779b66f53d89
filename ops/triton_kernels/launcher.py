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

import triton
from triton import knobs
from triton.runtime import driver

RELEASES = ("3.6", "3.7", "3.8", "3.9")
KNOWN = triton.__version__.rpartition(".")[0] in RELEASES
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
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def is_compiled(found: Any) -> bool:
    """Whether a launch returned a kernel. It returns None if a hook of Triton's compiled instead."""
    return hasattr(found, "packed_metadata")


def launch(compiled: Any, grid: tuple[int, int, int], device: int, args: Sequence) -> None:
    """Launches a compiled kernel on a device's current stream. `args`: addresses and numbers, then the constants."""
    compiled.run(*grid, driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata, None,
                 None, None, *args)


def current_stream() -> Callable[[int], int]:
    """A function of a device's index."""
    return driver.active.get_current_stream


def described(name: str, compiled: Any, arguments: int) -> Kernel | None:
    """What a recording launches. None if only Triton can: with scratch memory, clusters or launch attributes.

    `arguments`: how many the kernel has before its constants.
    """
    run = compiled.run
    if getattr(run, "launch", None) is None or run.global_scratch_size or run.profile_scratch_size:
        return None
    warps, cluster, shared_bytes = compiled.packed_metadata
    if cluster != 1 or run.launch_cooperative_grid or run.launch_pdl:
        return None
    return Kernel(name, compiled.function, 32 * warps, shared_bytes,
                  tuple(compiled.src.signature.values())[:arguments], tuple(compiled.metadata.tensordesc_meta or ()))


def map_arguments(descriptor: Any, of: dict) -> tuple:
    """What the driver makes a TMA descriptor of, beside the address. `of`: the descriptor's entry in Kernel.maps."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    return (of["swizzle"], of["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[of["elem_type"]], list(of["block_size"]),
            list(descriptor.shape), list(descriptor.strides))
