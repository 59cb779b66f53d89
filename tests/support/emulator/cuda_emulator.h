// SPDX-License-Identifier: Apache-2.0
// CUDA's execution model on the CPU, as far as ops/csrc/nvlink uses it.
//
// Each block of a launch is an operating system thread. A random number of blocks runs at a time, since a device may
// have room for few or for many. The threads of a block are fibers of its operating system thread. They are switched
// in random order at barriers, at a warp's collectives and, now and then, at accesses to memory. Shared memory is
// filled with 0xA5 before a block begins.
//
// Three things that CUDA leaves undefined end the launch with an exception that says where each thread was: barriers
// and collectives in which not all threads take part, misaligned accesses, and writes outside of shared memory.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <functional>
#include <source_location>
#include <string>
#include <type_traits>

namespace emulator {

using Site = std::source_location;

struct Coordinates {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
extern constinit thread_local const Coordinates *here; // of the fiber that runs

// Runs a kernel to its end. Throws std::runtime_error.
void launch(dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t, const std::function<void()> &kernel);
// A barrier of the block. Returns whether any of its threads gave its vote.
bool sync_block(Site, bool vote = false);
// The same for a team: the threads with the same threadIdx.y.
bool sync_team(Site, bool vote = false);
// Returns the values that the 32 lanes of this warp passed.
const uint64_t *collective(const char *what, unsigned mask, uint64_t value, Site);
// Lets other fibers run. `spin` always does: for loops that wait for memory to change. `maybe_yield` sometimes does.
void spin(Site);
void maybe_yield(Site);
// With an adversary (emulator_adversary), stores wait, and happen in random order: before a signal of the same team
// that comes after them, or at the end of the launch. Signals wait too, and overtake each other.
void put(void *to, int4 value);
void signal(void *to, uint64_t value, std::size_t bytes);
void settle(); // stores of this team that wait happen now, also those before its signals
[[noreturn]] void fault(const std::string &what, Site);
void *dynamic_shared_bytes();
template <class T> T *dynamic_shared() { return static_cast<T *>(dynamic_shared_bytes()); }

// A __shared__ variable. It is thread_local: each block has a new operating system thread, which all its fibers share.
constexpr int POISON = 0xA5;
template <class T> struct Shared {
  T value;
  Shared() { std::memset(&value, POISON, sizeof value); }
};

template <class T> uint64_t to_bits(T value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T> T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int lane() { return int(here->thread.x % 32); }

} // namespace emulator

#define threadIdx (emulator::here->thread)
#define blockIdx (emulator::here->block)
#define blockDim (emulator::here->block_dim)
#define gridDim (emulator::here->grid_dim)
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __shared__ // the builder has rewritten its uses

inline void __syncthreads(emulator::Site site = emulator::Site::current()) { emulator::sync_block(site); }
inline int __syncthreads_or(int vote, emulator::Site site = emulator::Site::current()) {
  return emulator::sync_block(site, vote != 0);
}
inline int __syncthreads_and(int vote, emulator::Site site = emulator::Site::current()) {
  return !emulator::sync_block(site, vote == 0);
}
inline void __syncwarp(unsigned mask = ~0u, emulator::Site site = emulator::Site::current()) {
  emulator::collective("__syncwarp", mask, 0, site);
}
inline unsigned __ballot_sync(unsigned mask, int vote, emulator::Site site = emulator::Site::current()) {
  const uint64_t *votes = emulator::collective("__ballot_sync", mask, vote != 0, site);
  unsigned all = 0;
  for (int i = 0; i < 32; i++)
    all |= unsigned(votes[i]) << i;
  return all;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from, emulator::Site site = emulator::Site::current()) {
  return emulator::from_bits<T>(emulator::collective("__shfl_sync", mask, emulator::to_bits(value), site)[from & 31]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by, emulator::Site site = emulator::Site::current()) {
  const uint64_t *all = emulator::collective("__shfl_xor_sync", mask, emulator::to_bits(value), site);
  return emulator::from_bits<T>(all[(emulator::lane() ^ by) & 31]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, emulator::Site site = emulator::Site::current()) {
  const uint64_t *all = emulator::collective("__shfl_up_sync", mask, emulator::to_bits(value), site);
  return emulator::from_bits<T>(all[emulator::lane() - (int(by) <= emulator::lane() ? int(by) : 0)]);
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, emulator::Site site = emulator::Site::current()) {
  const uint64_t *all = emulator::collective("__match_any_sync", mask, emulator::to_bits(value), site);
  unsigned same = 0;
  for (int i = 0; i < 32; i++)
    same |= unsigned(all[i] == all[emulator::lane()]) << i;
  return same;
}

template <class T> T atomicAdd(T *p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::current()) {
  emulator::maybe_yield(site);
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
template <class T> T atomicOr(T *p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::current()) {
  emulator::maybe_yield(site);
  return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}
template <class T> T atomicExch(T *p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::current()) {
  emulator::maybe_yield(site);
  return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() {
  emulator::settle();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

inline int __popc(unsigned v) { return std::popcount(v); }
inline int __ffs(int v) { return v ? std::countr_zero(unsigned(v)) + 1 : 0; }
// The position of the nth bit that is set in v, counted upwards from `base`. Only for nth > 0.
inline unsigned __fns(unsigned v, unsigned base, int nth) {
  for (unsigned i = base; i < 32; i++)
    if (v >> i & 1 && --nth == 0)
      return i;
  return ~0u;
}
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return y < x ? y : x;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return x < y ? y : x;
}

template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel *, cudaFuncAttribute, int) { return cudaSuccess; }
template <class Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, Kernel *) { return cudaSuccess; }
