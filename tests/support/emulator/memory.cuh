// SPDX-License-Identifier: Apache-2.0
// The emulator's replacement of ops/csrc/nvlink/memory.cuh.
#pragma once
#include "cuda_emulator.h"
#include <ctime>

namespace nvlink {

template <class T> T load_acquire(const T *p, emulator::Site site = emulator::Site::current()) {
  emulator::spin(site);
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

template <class T> void store_release(T *p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::current()) {
  emulator::maybe_yield(site);
  emulator::signal(p, v, sizeof v);
}

inline void check_aligned(const void *p, emulator::Site site) {
  if (reinterpret_cast<uintptr_t>(p) % 16)
    emulator::fault("an access of 16 bytes at an address that is no multiple of 16", site);
}

inline int4 load16(const void *p, emulator::Site site = emulator::Site::current()) {
  check_aligned(p, site);
  emulator::maybe_yield(site);
  int4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store16(void *p, int4 v, emulator::Site site = emulator::Site::current()) {
  check_aligned(p, site);
  emulator::maybe_yield(site);
  emulator::put(p, v);
}

inline uint64_t nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000 + uint64_t(t.tv_nsec);
}

inline void sync_team(emulator::Site site = emulator::Site::current()) { emulator::sync_team(site); }
inline bool any_of_team(bool one, emulator::Site site = emulator::Site::current()) {
  return emulator::sync_team(site, one);
}

} // namespace nvlink
