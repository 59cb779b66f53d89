# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton and Gluon kernels for GPUs that this machine does not have, down to machine code.

    with launches_for(90) as launches:     # every launch inside compiles for sm_90 instead of running
        quantize_rows(torch.empty(256, 512))
    launches[0].ptx, launches[0].registers, launches[0].stack_bytes

so a host function is compiled just as it launches its kernels: same types, same divisibility by 16, same constants.
Kernels must have been imported without TRITON_INTERPRET.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ds_mxfp8_moe.ops.triton_kernels.launch import Launched

SHARED_BYTES = 227 * 1024  # what a block can have on sm_90 and sm_100
TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True)
class Launch:
    """One launch, compiled: what ptxas made of it. `stack_bytes` is local memory a thread: spills, mostly."""

    kernel: str
    arch: int
    ptx: str
    registers: int
    stack_bytes: int


class _Driver:
    """As much of a Triton driver as compilation asks for."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self):
        return self.arch  # the key of a kernel's cache

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)


def _launch(name: str, arch: int, compiled) -> Launch:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name],
                                        text=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    meta = compiled.metadata
    if meta.shared > SHARED_BYTES or (meta.tmem_size or 0) > TENSOR_MEMORY_COLUMNS:
        raise RuntimeError(f"{name} cannot start on sm_{arch}: it needs {meta.shared} bytes of shared memory and "
                           f"{meta.tmem_size} columns of tensor memory; a block has {SHARED_BYTES} and "
                           f"{TENSOR_MEMORY_COLUMNS}")
    return Launch(name, arch, compiled.asm["ptx"], int(registers), int(stack))


@contextmanager
def launches_for(arch: int) -> Iterator[list[Launch]]:
    """Inside, launches of Triton kernels compile for sm_`arch` (90, 100) and run nothing; yields the list of them.

    Functions that launch them take CPU tensors; those that ask how many multiprocessors there are, hear 132.
    """
    launches, run, properties = [], JITFunction.run, SimpleNamespace(multi_processor_count=132)

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(_launch(f"{self.module}.{self.fn.__name__}", arch, compiled))
        return compiled

    with mock.patch.object(triton.runtime.driver, "_active", _Driver(arch)), \
            mock.patch.object(JITFunction, "run", compile_only), \
            mock.patch.object(Launched, "remembers", False), \
            mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        yield launches
