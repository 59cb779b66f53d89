// SPDX-License-Identifier: Apache-2.0
// The items of an all-to-all of rows, for the kernels over peer memory and over NVSHMEM. An item is a chunk of the rows
// between two ranks. Items of a rank take its peers in turn.
#pragma once
#include "exchange.cuh"

namespace nvlink {

// Bytes of one buffer, behind each other.
struct Dense {
  const char *const first;
  __device__ const char *operator()(int64_t byte) const { return first + byte; }
};

// Bytes of the rows that are sent, beginning with byte `first` of all of them.
struct Sent {
  __device__ Sent(const RowExchange &a, int64_t first)
      : x(at<char>(a.x)), rows(a.rows ? at<int64_t>(a.rows, first / a.row * 8) : nullptr),
        first(rows ? first % a.row : first), row(a.row) {}
  // `byte`: a multiple of 16.
  __device__ const char *operator()(int64_t byte) const {
    if (!rows)
      return x + first + byte;
    // Of a chunk: 32 bits are enough, and divide faster.
    const uint32_t word = uint32_t((first + byte) / 16), words = uint32_t(row / 16), nth = word / words;
    return x + rows[nth] * row + 16 * int64_t(word - nth * words);
  }

private:
  const char *const x;
  const int64_t *const rows;
  const int64_t first, row;
};

struct RowItems {
  const RowExchange &a;

  __device__ int rank() const { return a.group.rank; }
  __device__ int world() const { return a.group.world; }
  __device__ int count() const { return a.chunks * world(); }
  __device__ int chunk(int i) const { return i / world(); }
  __device__ int64_t begin(int i) const { return chunk(i) * a.chunk; }
  // All ranks begin with different peers. The peer of item i, when it is sent, takes its rows as its own item i.
  __device__ int target(int i) const { return (rank() + 1 + i % world()) % world(); }
  __device__ int source(int i) const { return (rank() + world() - 1 - i % world()) % world(); }
  // Bytes of an item. 0 or less if there are no rows in it.
  __device__ int64_t to_send(int i) const { return bytes(a.send_at, target(i), begin(i)); }
  __device__ int64_t to_receive(int i) const { return bytes(a.recv_at, source(i), begin(i)); }
  // The bytes of an item that is sent.
  __device__ Sent sent(int i) const { return {a, a.send_at[target(i)] + begin(i)}; }
  // Where an item begins in out. The other rank's part of an item has another place.
  __device__ char *received(int i, int w) const { return nvlink::at<char>(a.out, a.recv_at[w] + begin(i)); }

private:
  __device__ int64_t bytes(const int64_t *at, int w, int64_t begin) const {
    return min(a.chunk, at[w + 1] - at[w] - begin);
  }
};

} // namespace nvlink
