// SPDX-License-Identifier: Apache-2.0
#include "device.h"
#include <cstring>
#include <cuda_runtime.h>
#include <map>
#include <stdexcept>

namespace device {
namespace {

cudaStream_t the_stream = nullptr;
std::map<int, cudaEvent_t> marks;

void check(cudaError_t error, const char *what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(error));
}

} // namespace

int count() {
  int found = 0;
  return cudaGetDeviceCount(&found) == cudaSuccess ? found : 0;
}

void choose(int index) {
  check(cudaSetDevice(index), "cudaSetDevice");
  check(cudaStreamCreateWithFlags(&the_stream, cudaStreamNonBlocking), "cudaStreamCreate");
}

std::string name() {
  int index;
  cudaDeviceProp properties;
  check(cudaGetDevice(&index), "cudaGetDevice");
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  return properties.name;
}

int multiprocessors() {
  int index, sms;
  check(cudaGetDevice(&index), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, index), "cudaDeviceGetAttribute");
  return sms;
}

nvlink::Address stream() { return reinterpret_cast<nvlink::Address>(the_stream); }

bool finished() {
  const cudaError_t state = cudaStreamQuery(the_stream);
  if (state != cudaErrorNotReady)
    check(state, "a kernel");
  return state == cudaSuccess;
}

void copy(void *to, const void *from, int64_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, the_stream), "cudaMemcpyAsync");
}

void fill(void *at, uint8_t byte, int64_t bytes) {
  check(cudaMemsetAsync(at, byte, bytes, the_stream), "cudaMemsetAsync");
}

void *allocate(int64_t bytes) {
  void *memory;
  check(cudaMalloc(&memory, bytes), ("cudaMalloc of " + std::to_string(bytes) + " bytes").c_str());
  return memory;
}

void release(void *memory) { cudaFree(memory); }

void *allocate_host(int64_t bytes) {
  void *memory;
  check(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  return std::memset(memory, 0, bytes);
}

void *allocate_shared(int64_t bytes, Handle &handle) {
  static_assert(sizeof(Handle) == sizeof(cudaIpcMemHandle_t));
  void *memory = allocate(bytes);
  check(cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t *>(&handle), memory), "cudaIpcGetMemHandle");
  return memory;
}

void *map(const Handle &handle) {
  cudaIpcMemHandle_t of_peer;
  std::memcpy(&of_peer, &handle, sizeof of_peer);
  void *memory;
  check(cudaIpcOpenMemHandle(&memory, of_peer, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  return memory;
}

void unmap(void *memory) { check(cudaIpcCloseMemHandle(memory), "cudaIpcCloseMemHandle"); }

void mark(int i) {
  cudaEvent_t &event = marks[i];
  if (!event)
    check(cudaEventCreate(&event), "cudaEventCreate");
  check(cudaEventRecord(event, the_stream), "cudaEventRecord");
}

double microseconds(int from, int to) {
  float ms;
  check(cudaEventElapsedTime(&ms, marks.at(from), marks.at(to)), "cudaEventElapsedTime");
  return 1000.0 * ms;
}

} // namespace device
