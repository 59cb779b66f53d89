# SPDX-License-Identifier: Apache-2.0
"""Counts of recorded launches."""

from contextlib import contextmanager
from unittest import mock

import torch

from ds_mxfp8_moe.compute import grouped_gemm, recorded
from ds_mxfp8_moe.ops.op_builder import replay
from ds_mxfp8_moe.ops.triton_kernels import recording


@contextmanager
def launches_are(replayed: bool):
    """Within it, what can be recorded is recorded and replayed on the CPU, or not."""
    executor = replay.ReplayBuilder().jit_load() if replayed else None
    with mock.patch.object(recorded, "executor_for", lambda device: executor), \
            mock.patch.object(recording.launcher, "current_stream", lambda: lambda device: 0), \
            mock.patch.object(recorded, "_PROGRAMS", {}), \
            mock.patch.object(grouped_gemm, "emulated", lambda device, dtype: True):  # else an op without tensors
        yield


def programs() -> list:
    return [program for found in recorded._PROGRAMS.values() for program, _ in found.values()]


def equal(a: list, b: list) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
