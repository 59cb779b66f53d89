# SPDX-License-Identifier: Apache-2.0
"""What Gluon calls differently in different releases of Triton, under the newest names. Kernels import them from here.

    async_load       starts a copy by TMA into shared memory    tma.async_copy_global_to_shared until 3.7
    async_store      starts a copy by TMA out of shared memory  tma.async_copy_shared_to_global until 3.7
    barrier          waits for all threads of a partition       gl.thread_barrier in 3.6
    reinterpret      shared memory with another dtype, shape    a method, called _reinterpret until 3.8
                     and layout of the same size
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return memory.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return memory._reinterpret(dtype, shape, layout)
