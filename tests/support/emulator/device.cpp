// SPDX-License-Identifier: Apache-2.0
// ops/csrc/tests/device.h for ranks without GPUs: the emulator runs the kernels. Launches return when they have ended.
#include "device.h"
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

extern "C" void emulator_seed(uint64_t seed);

namespace device {
namespace {

std::map<void *, int64_t> mapped; // bytes of each mapping
std::map<int, std::chrono::steady_clock::time_point> marks;

void *mapping(int file, int64_t bytes) {
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file < 0 || memory == MAP_FAILED)
    throw std::runtime_error("the staging cannot be mapped");
  mapped[memory] = bytes;
  return memory;
}

} // namespace

int count() { return 1; }
void choose(int) { emulator_seed(uint64_t(getpid())); } // ranks differ in the order in which things happen
std::string name() { return "CUDA emulator"; }
int multiprocessors() { return 4; }

nvlink::Address stream() { return 0; }
bool finished() { return true; }
void copy(void *to, const void *from, int64_t bytes) { std::memcpy(to, from, bytes); }
void fill(void *at, uint8_t byte, int64_t bytes) { std::memset(at, byte, bytes); }

void *allocate(int64_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
void release(void *memory) {
  if (mapped.count(memory))
    unmap(memory);
  else
    std::free(memory);
}
void *allocate_host(int64_t bytes) { return std::calloc(1, bytes); }

void *allocate_shared(int64_t bytes, Handle &handle) {
  const int file = memfd_create("staging", 0);
  if (file < 0 || ftruncate(file, bytes))
    throw std::runtime_error("the staging cannot be allocated");
  std::snprintf(handle.bytes, sizeof handle.bytes, "/proc/%d/fd/%d", int(getpid()), file);
  return mapping(file, bytes);
}

void *map(const Handle &handle) {
  const int file = open(handle.bytes, O_RDWR);
  struct stat status {};
  fstat(file, &status);
  return mapping(file, status.st_size);
}

void unmap(void *memory) {
  munmap(memory, mapped.at(memory));
  mapped.erase(memory);
}

void mark(int i) { marks[i] = std::chrono::steady_clock::now(); }
double microseconds(int from, int to) {
  return std::chrono::duration<double, std::micro>(marks.at(to) - marks.at(from)).count();
}

} // namespace device
