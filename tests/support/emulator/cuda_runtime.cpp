// SPDX-License-Identifier: Apache-2.0
// CUDA's runtime for the programs of ops/csrc/tests, for ranks without GPUs: the emulator runs the kernels. Launches
// return when they have ended. Errors end the program.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

extern "C" void emulator_seed(uint64_t seed);

namespace {

using Time = std::chrono::steady_clock::time_point;

struct Mapping {
  int file;
  size_t bytes;
};
std::map<void *, Mapping> mapped;

void *mapping(int file, size_t bytes) {
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file < 0 || memory == MAP_FAILED) {
    std::perror("the emulator cannot map memory");
    std::abort();
  }
  mapped[memory] = {file, bytes};
  return memory;
}

} // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return emulator_seed(getpid()), cudaSuccess; } // ranks differ in the order of things
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
  return std::strcpy(properties->name, "CUDA emulator"), cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *multiprocessors, cudaDeviceAttr, int) {
  return *multiprocessors = 4, cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *at, int byte, size_t bytes, cudaStream_t) {
  return std::memset(at, byte, bytes), cudaSuccess;
}

// All memory can be shared.
cudaError_t cudaMalloc(void **memory, size_t bytes) {
  const int file = memfd_create("device memory", 0);
  return *memory = ftruncate(file, bytes) ? nullptr : mapping(file, bytes), cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
  if (memory) {
    munmap(memory, mapped.at(memory).bytes);
    close(mapped.at(memory).file);
    mapped.erase(memory);
  }
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned) { return *memory = std::malloc(bytes), cudaSuccess; }

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *memory) {
  std::snprintf(handle->reserved, sizeof handle->reserved, "/proc/%d/fd/%d", int(getpid()), mapped.at(memory).file);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **memory, cudaIpcMemHandle_t handle, unsigned) {
  const int file = open(handle.reserved, O_RDWR);
  struct stat status {};
  fstat(file, &status);
  return *memory = mapping(file, status.st_size), cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void *memory) { return cudaFree(memory); }

cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = cudaEvent_t(new Time), cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete (Time *)event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  return *(Time *)event = std::chrono::steady_clock::now(), cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = std::chrono::duration<float, std::milli>(*(Time *)to - *(Time *)from).count();
  return cudaSuccess;
}

} // extern "C"
