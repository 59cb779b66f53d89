// SPDX-License-Identifier: Apache-2.0
// The symmetric heap of the emulated NVSHMEM: tests tell where the PEs' memory is mapped.
#include "nvshmem.h"
#include <map>
#include <mutex>

namespace {

struct Heap {
  uint64_t bytes;
  std::map<int, char *> of_pe;
};

std::map<const char *, Heap> heaps; // by this process's own address
std::mutex mutex;

} // namespace

extern "C" __attribute__((visibility("default"))) void emulator_heap(char *own, uint64_t bytes, int pe, char *mapped) {
  std::lock_guard lock(mutex);
  heaps[own].bytes = bytes;
  heaps[own].of_pe[pe] = mapped;
}

void *nvshmem_emulated(const void *address, int pe, emulator::Site site) {
  const char *at = static_cast<const char *>(address);
  std::unique_lock lock(mutex);
  for (const auto &[own, heap] : heaps)
    if (at >= own && at < own + heap.bytes && heap.of_pe.count(pe))
      return heap.of_pe.at(pe) + (at - own);
  lock.unlock();
  emulator::fault("an address outside of the symmetric heap, or a PE of another hop", site);
}
