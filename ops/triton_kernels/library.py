# SPDX-License-Identifier: Apache-2.0
"""Registers the host functions of kernels as torch ops, and holds small helpers of theirs.

torch.compile sees an op as one opaque call. `operator` does what torch.library.custom_op does, but a call costs half
the time: custom_op puts layers of Python (autograd, alias checks) between the caller and the function.

    def _double_fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @operator(_double_fake)                      # registers ds_mxfp8_moe::double
    def _double(x: torch.Tensor) -> torch.Tensor:
        ...                                      # launches the kernel

    y = _double(x)

The ops ignore autograd. Their outputs never require a gradient, so callers need no torch.no_grad. An output must not
be an input or a view of one.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

NAMESPACE = "ds_mxfp8_moe"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(fake: Callable, mutates_args: Iterable[str] = ()) -> Callable[[Callable], torch._ops.OpOverload]:
    """Registers a function as an op under its own name, without leading underscores.

    The function needs type annotations, from which its schema is made. It is registered for CUDA, and for the CPU,
    where Triton's interpreter runs kernels in tests.

    Args:
        fake: takes the function's arguments and returns empty tensors like its outputs. torch.compile calls it.
        mutates_args: names of the arguments that the function writes into.
    """

    def register(function: Callable) -> torch._ops.OpOverload:
        name = function.__name__.lstrip("_")
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates_args))
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, device)
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return register


def nothing(*args) -> None:
    """The fake of an op that returns nothing and only writes into its arguments."""


def check_alike(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Raises TypeError unless all weights have this dtype.

    Kernels get the address of each matrix and the dtype of one of them.
    """
    if any(w.dtype != dtype for w in weights):
        found = ", ".join(sorted({str(w.dtype) for w in weights}))
        raise TypeError(f"the experts' weights are {found}, expected all of them in {dtype}: cast them to one dtype")


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. triton.cdiv goes through Triton's JIT and takes 10 us a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n. triton.next_power_of_2 takes 10 us a call."""
    return 1 << (n - 1).bit_length()
