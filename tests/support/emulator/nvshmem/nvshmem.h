// SPDX-License-Identifier: Apache-2.0
// NVSHMEM as far as ops/csrc/nvshmem uses it, for the emulator of CUDA. A PE's memory is mapped into this process.
#pragma once
#include "../nvlink/memory.cuh"
#include <cstdint>

constexpr int NVSHMEM_SIGNAL_SET = 9, NVSHMEM_SIGNAL_ADD = 10, NVSHMEM_CMP_NE = 1;

// Hands a message to the network. One thread calls it.
void nvshmem_emulated_send(void *to, const void *from, size_t bytes, uint64_t *signal, uint64_t value, int operation,
                           int pe, emulator::Site site);

inline void nvshmemx_putmem_signal_nbi_block(void *to, const void *from, size_t bytes, uint64_t *signal,
                                             uint64_t value, int operation, int pe,
                                             emulator::Site site = emulator::Site::current()) {
  emulator::sync_block(site);
  if (threadIdx.x == 0)
    nvshmem_emulated_send(to, from, bytes, signal, value, operation, pe, site);
  emulator::sync_block(site);
}

inline void nvshmemx_putmem_signal_nbi_warp(void *to, const void *from, size_t bytes, uint64_t *signal,
                                            uint64_t value, int operation, int pe,
                                            emulator::Site site = emulator::Site::current()) {
  __syncwarp(~0u, site);
  if (emulator::lane() == 0)
    nvshmem_emulated_send(to, from, bytes, signal, value, operation, pe, site);
  __syncwarp(~0u, site);
}

inline void nvshmemx_signal_op(uint64_t *signal, uint64_t value, int operation, int pe,
                               emulator::Site site = emulator::Site::current()) {
  nvshmem_emulated_send(signal, signal, 0, signal, value, operation, pe, site);
}

inline void nvshmem_signal_wait_until(uint64_t *, int, uint64_t) {}

// Of the host. Nothing has to be started here.
struct nvshmemx_uniqueid_t {
  char bytes[8];
};
struct nvshmemx_init_attr_t {};
struct nvshmemi_version_t {
  int major, minor, patch;
};
#define NVSHMEMX_UNIQUEID_INITIALIZER {}
#define NVSHMEMX_INIT_ATTR_INITIALIZER {}
constexpr int NVSHMEM_VENDOR_MAJOR_VERSION = 3, NVSHMEM_VENDOR_MINOR_VERSION = 4, NVSHMEM_VENDOR_PATCH_VERSION = 0;
constexpr int NVSHMEM_THREAD_SERIALIZED = 2, NVSHMEMX_INIT_WITH_UNIQUEID = 8, NVSHMEM_STATUS_NOT_INITIALIZED = 0;
inline int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t *) { return 0; }
inline int nvshmemx_set_attr_uniqueid_args(int, int, nvshmemx_uniqueid_t *, nvshmemx_init_attr_t *) { return 0; }
inline int nvshmemi_init_thread(int, int *, unsigned, nvshmemx_init_attr_t *, nvshmemi_version_t) { return 0; }
inline int nvshmemx_init_status() { return 0; }
inline void *nvshmem_malloc(size_t) { return nullptr; }
inline void nvshmem_free(void *) {}
