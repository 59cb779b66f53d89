# SPDX-License-Identifier: Apache-2.0
"""Small helpers of functions that launch kernels, and `operator`, which registers a function as a torch op.

torch.compile sees an op as one opaque call. `operator` does what torch.library.custom_op does, but a call costs half
the time: custom_op puts layers of Python (autograd, alias checks) between the caller and the function. The functions
of this folder are not ops, since nothing that torch.compile traces calls them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

NAMESPACE = "ds_mxfp8_moe"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(mutates_args: Iterable[str]) -> Callable[[Callable], Callable]:
    """Registers a function that returns nothing as an op under its own name, without leading underscores.

    The function needs type annotations, from which its schema is made. The op is registered for CUDA, and for the CPU,
    where tests run it. It ignores autograd.

    Args:
        mutates_args: names of the arguments that the function writes into.
    """

    def register(function: Callable) -> Callable:
        name = function.__name__.lstrip("_")
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates_args))
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, device)
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: None, lib=_LIBRARY)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return register


def weights_of(stacks: Sequence[torch.Tensor | Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """One tensor [E, N, K] for each stack of experts' weights, or all matrices [N, K], stack by stack.

    Raises TypeError unless all have one dtype, and ValueError unless all lie on one device: kernels get the address of
    each, and the dtype of the first.
    """
    weights: list[Any] = list(stacks)
    if not all(isinstance(stack, torch.Tensor) for stack in stacks):
        weights = [matrix for stack in stacks for matrix in stack]
    dtype, device = weights[0].dtype, weights[0].device
    if any(w.dtype != dtype for w in weights):
        found = ", ".join(sorted({str(w.dtype) for w in weights}))
        raise TypeError(f"the experts' weights are {found}, expected all of them in {dtype}: cast them to one dtype")
    if any(w.device != device for w in weights):
        found = ", ".join(sorted({str(w.device) for w in weights}))
        raise ValueError(f"the experts' weights lie on {found}, expected all of them on one device")
    return weights


def even_distance(addresses: Sequence[int]) -> int | None:
    """The distance from each address to the next, 0 for a single address. None if it differs."""
    distances = {b - a for a, b in zip(addresses, addresses[1:], strict=False)}
    return None if len(distances) > 1 else distances.pop() if distances else 0


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. triton.cdiv goes through Triton's JIT and takes 10 us a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n. triton.next_power_of_2 takes 10 us a call."""
    return 1 << (n - 1).bit_length()
