// SPDX-License-Identifier: Apache-2.0
// The items of an all-to-all of rows, for the kernels over peer memory and over NVSHMEM. An item is a chunk of the rows
// between two ranks. Items of a rank take its peers in turn.
#pragma once
#include "exchange.cuh"

namespace nvlink {

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
  __device__ int64_t to_send(int i) const { return bytes(a.send_rows, a.send_at, target(i), begin(i)); }
  __device__ int64_t to_receive(int i) const { return bytes(a.recv_rows, a.recv_at, source(i), begin(i)); }
  // Where an item begins in x and in out. The other rank's part of an item has another place.
  __device__ char *sent(int i) const { return nvlink::at<char>(a.x, a.send_at[target(i)] + begin(i)); }
  __device__ char *received(int i, int w) const { return nvlink::at<char>(a.out, a.recv_at[w] + begin(i)); }

private:
  // Rows never leave the room of their rank, even if a failed exchange left anything in `rows`.
  __device__ int64_t bytes(Address rows, const int64_t *at, int w, int64_t begin) const {
    int64_t of_rank = at[w + 1] - at[w];
    if (rows)
      of_rank = min(of_rank, a.row * nvlink::at<int>(rows)[w]);
    return min(a.chunk, of_rank - begin);
  }
};

} // namespace nvlink
