// SPDX-License-Identifier: Apache-2.0
// PTX for accesses to memory that several GPUs share, for the device's clock, and for barriers of a team, which is the
// threads of a block that share threadIdx.y. The tests' emulator replaces this file.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

namespace nvlink {

__device__ __forceinline__ uint32_t load_acquire(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t *p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_release(uint32_t *p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void store_release(uint64_t *p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Does not read through the read-only cache, since peers write to staging while kernels run.
__device__ __forceinline__ int4 load16(const void *p) {
  int4 v;
  asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void store16(void *p, int4 v) {
  asm volatile("st.global.v4.s32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// A barrier of the team's threads.
__device__ __forceinline__ void sync_team() {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}

// The same barrier. Returns whether `one` is true for any of the team's threads.
__device__ __forceinline__ bool any_of_team(bool one) {
  int any;
  asm volatile("{\n"
               ".reg .pred one, any;\n"
               "setp.ne.s32 one, %1, 0;\n"
               "barrier.cta.red.or.pred any, %2, %3, one;\n"
               "selp.s32 %0, 1, 0, any;\n"
               "}"
               : "=r"(any)
               : "r"(int(one)), "r"(threadIdx.y + 1), "r"(blockDim.x)
               : "memory");
  return any;
}

} // namespace nvlink
