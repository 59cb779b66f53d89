# SPDX-License-Identifier: Apache-2.0
"""The C++ executor of recorded launches (ops/csrc/replay), where a device can use it."""

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

from .ops.device import has_kernels
from .ops.op_builder import replay


def executor_for(device: torch.device) -> ModuleType | None:
    """The executor, which is built at its first use. None: the host launches from Python on this device."""
    return replay.try_load()[0] if has_kernels(device) else None


def current(device: torch.device) -> AbstractContextManager:
    """Makes a CUDA device the current one: programs run on its current stream."""
    if device.index is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
