# SPDX-License-Identifier: Apache-2.0
"""Facts about the device that decide which kernels run."""

from functools import lru_cache

import torch


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability as (major, minor). (0, 0) off NVIDIA."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run on a device. They need casts to e4m3, which NVIDIA has from sm_89 on."""
    return capability(device) >= (8, 9)


def runs_triton(x: torch.Tensor) -> bool:
    """Whether the Triton kernels of casts, activations and exchanges take x: its last axis is a multiple of 32."""
    return has_kernels(x.device) and x.shape[-1] % 32 == 0
