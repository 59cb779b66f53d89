# SPDX-License-Identifier: Apache-2.0
"""Host functions of kernels as torch ops: opaque to torch.compile, dispatched at half the cost of
torch.library.custom_op, which puts layers of Python (autograd, alias checks) between the caller and the function.

    def _double_fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @operator(_double_fake)                      # ds_mxfp8_moe::double
    def _double(x: torch.Tensor) -> torch.Tensor:
        ...                                      # launches the kernel

    y = _double(x)

Ops know nothing of autograd: their outputs never require a gradient, in whatever mode they are called, so callers
need no torch.no_grad. Outputs must not be inputs or views of them.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "ds_mxfp8_moe"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(fake: Callable, mutates_args: Iterable[str] = (),
             flops: Callable | None = None) -> Callable[[Callable], torch._ops.OpOverload]:
    """Registers a function, annotated as for custom_op, under its own name without leading underscores.

    Args:
        fake: takes the same arguments; returns empty tensors like the function's outputs.
        mutates_args: names of the arguments that the function writes into.
        flops: takes the same arguments, shapes in place of tensors, and `out_shape`; what torch.utils.flop_counter
            counts. None: nothing.
    """

    def register(function: Callable) -> torch._ops.OpOverload:
        name = function.__name__.lstrip("_")
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates_args))
        for device in ("CPU", "CUDA"):  # CPU: Triton's interpreter
            _LIBRARY.impl(name, function, device)
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        if flops is not None:
            register_flop_formula(packet)(flops)
        return packet.default

    return register


def nothing(*args) -> None:
    """The fake of an op that only writes into its arguments."""


def rows_flops(a_PK: tuple, *args, out_shape: tuple) -> int:
    """Of an op that multiplies each row of its first argument by one group's weights."""
    return 2 * math.prod(a_PK) * out_shape[1]


def check_alike(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Raises TypeError unless all have this dtype: kernels read matrices by address, in the dtype of one of them."""
    if any(w.dtype != dtype for w in weights):
        found = ", ".join(sorted({str(w.dtype) for w in weights}))
        raise TypeError(f"the experts' weights are {found}, expected all of them in {dtype}: cast them to one dtype")


# Triton's own functions of these names go through its JIT, at some 10 us a call.


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def far(*offsets: int) -> bool:
    """Whether int32, in which kernels count within a tile, does not hold one of them: they take int64 then."""
    return max(offsets) > 0x7FFFFFFF
