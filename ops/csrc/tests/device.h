// SPDX-License-Identifier: Apache-2.0
// What the programs here need of a device. device.cpp implements it by CUDA. The tests' emulator implements it on the
// CPU. Errors are std::runtime_error.
#pragma once
#include "../nvlink/kernels.h"
#include <string>
#include <utility>
#include <vector>

namespace device {

int count();
void choose(int index); // the device of this process. Called first
std::string name();
int multiprocessors();

nvlink::Address stream(); // the only stream. All functions below use it
bool finished();          // whether everything on the stream is done. Never waits
void copy(void *to, const void *from, int64_t bytes); // from the host or to it. Ordered after the kernels before it
void fill(void *at, uint8_t byte, int64_t bytes);

void *allocate(int64_t bytes);
void release(void *memory); // of `allocate` and of `allocate_shared`
void *allocate_host(int64_t bytes); // zeroed. Kernels write to it. It lives as long as the process

// Memory that other processes of this host map.
struct Handle {
  char bytes[64];
};
void *allocate_shared(int64_t bytes, Handle &handle);
void *map(const Handle &handle);
void unmap(void *memory);

void mark(int i); // records a point of the stream's time under the number i
double microseconds(int from, int to); // between two marks, once `finished`

// An array in this device's memory.
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
  ~Array() {
    if (data)
      release(data);
  }

  nvlink::Address address() const { return reinterpret_cast<nvlink::Address>(data); }
  void set(const std::vector<T> &values) {
    if (data)
      copy(data, values.data(), bytes());
  }
  void fill(uint8_t byte) {
    if (data)
      device::fill(data, byte, bytes());
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

} // namespace device
