// SPDX-License-Identifier: Apache-2.0
// Arrays in this device's memory. Everything runs on one stream. Errors are std::runtime_error. Without a GPU the
// tests link tests/support/emulator/cuda_runtime.cpp in place of CUDA's runtime.
#pragma once
#include "../nvlink/kernels.h"
#include <algorithm>
#include <cuda_runtime.h>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

inline cudaStream_t stream = nullptr; // Ranks creates it

inline void check(cudaError_t error, const std::string &what) {
  if (error != cudaSuccess)
    throw std::runtime_error(what + " failed: " + cudaGetErrorString(error));
}

inline int multiprocessors() {
  int index, sms;
  check(cudaGetDevice(&index), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, index), "cudaDeviceGetAttribute");
  return sms;
}

inline void *allocate(int64_t bytes) {
  void *memory;
  check(cudaMalloc(&memory, bytes), "cudaMalloc of " + std::to_string(bytes) + " bytes");
  return memory;
}

// Zeroed memory of the host that kernels write to. It lives as long as the process.
inline void *allocate_host(int64_t bytes) {
  void *memory;
  check(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::fill_n(static_cast<char *>(memory), bytes, 0);
  return memory;
}

// From the host or to it. Ordered after the kernels before it.
inline void copy(void *to, const void *from, int64_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}

template <class T> class Array {
public:
  explicit Array(int64_t size = 0) : size(size), data(size ? static_cast<T *>(allocate(bytes())) : nullptr) {}
  explicit Array(const std::vector<T> &values) : Array(int64_t(values.size())) { set(values); }
  Array(Array &&other) noexcept : size(std::exchange(other.size, 0)), data(std::exchange(other.data, nullptr)) {}
  Array &operator=(Array &&other) noexcept {
    std::swap(size, other.size);
    std::swap(data, other.data);
    return *this;
  }
  ~Array() { cudaFree(data); }

  nvlink::Address address() const { return nvlink::Address(data); }
  void set(const std::vector<T> &values) {
    if (data)
      copy(data, values.data(), bytes());
  }
  void fill(uint8_t byte) {
    if (data)
      check(cudaMemsetAsync(data, byte, bytes(), stream), "cudaMemsetAsync");
  }
  std::vector<T> values() const {
    std::vector<T> read(size);
    if (data)
      copy(read.data(), data, bytes());
    return read;
  }

private:
  int64_t bytes() const { return size * int64_t(sizeof(T)); }
  int64_t size;
  T *data;
};
