// SPDX-License-Identifier: Apache-2.0
// An all-to-all of rows over peer memory: one hop of the transport in two hops. Rows are bytes here.
//
// Grid: `sms` blocks of TEAMS teams. An item is a chunk of the rows between two ranks. A team copies it into the
// region of this rank in the peer's staging and announces it. A team of the peer copies it out. Rows that stay here go
// to their place directly. The kernel is bound by memory: 2 reads and 2 writes of each byte that travels.
#include "exchange.cuh"

namespace nvlink {
namespace {

constexpr int TEAM_THREADS = 256;
constexpr int TEAMS = 3;
static_assert(TEAMS <= MAX_TEAMS);
constexpr int UNROLLED = 4; // loads of a thread that are on their way at the same time

__device__ void copy(char *to, const char *from, int64_t bytes) {
  constexpr int64_t STEP = 16 * TEAM_THREADS;
  int64_t i = 16 * int64_t(threadIdx.x);
  for (; i + (UNROLLED - 1) * STEP < bytes; i += UNROLLED * STEP) {
    int4 v[UNROLLED];
#pragma unroll
    for (int u = 0; u < UNROLLED; u++)
      v[u] = load16(from + i + u * STEP);
#pragma unroll
    for (int u = 0; u < UNROLLED; u++)
      store16(to + i + u * STEP, v[u]);
  }
  for (; i < bytes; i += STEP)
    store16(to + i, load16(from + i));
}

struct RowExchangeWork {
  const RowExchange &a;
  const Exchange &x;

  __device__ int rank() const { return a.group.rank; }
  __device__ int64_t begin(int i) const { return i / a.group.world * a.chunk; }
  // All ranks begin with different peers. The peer of send(i) takes its rows in receive(i).
  __device__ int target(int i) const { return (rank() + 1 + i % a.group.world) % a.group.world; }
  __device__ int source(int i) const { return (rank() + a.group.world - 1 - i % a.group.world) % a.group.world; }
  __device__ int64_t left(const int64_t *at, int w, int i) const { return at[w + 1] - at[w] - begin(i); }

  __device__ void send(int i) const {
    const int w = target(i);
    const int64_t bytes = min(a.chunk, left(a.send_at, w, i));
    char *to = w == rank() ? at<char>(a.out, a.recv_at[w]) : at<char>(x.half(w), rank() * a.region);
    copy(to + begin(i), at<char>(a.x, a.send_at[w] + begin(i)), bytes);
  }
  __device__ void announce(int i) const {
    const int w = target(i);
    if (threadIdx.x == 0 && w != rank() && left(a.send_at, w, i) > 0)
      x.announce(w, i / a.group.world);
  }
  __device__ bool skip(int i) const { return source(i) == rank() || left(a.recv_at, source(i), i) <= 0; }
  __device__ void await(int i) const { x.await(source(i), i / a.group.world); }
  __device__ void receive(int i) const {
    const int w = source(i);
    copy(at<char>(a.out, a.recv_at[w] + begin(i)), at<char>(x.half(rank()), w * a.region + begin(i)),
         min(a.chunk, left(a.recv_at, w, i)));
  }
};

__global__ void __launch_bounds__(TEAM_THREADS *TEAMS, 1) row_exchange(const __grid_constant__ RowExchange a) {
  const bool runs = !a.other_state || !*static_cast<volatile uint32_t *>(&at<State>(a.other_state)->failed);
  Exchange x(a.group, runs);
  RowExchangeWork work{a, x};
  const int items = a.chunks * a.group.world;
  exchange(x, work, items, items);
  x.finish(runs);
}

} // namespace

int launch(const RowExchange &a, int sms, Address stream) {
  row_exchange<<<sms, dim3(TEAM_THREADS, TEAMS), 0, reinterpret_cast<cudaStream_t>(stream)>>>(a);
  return int(cudaGetLastError());
}

int load_row_exchange() {
  cudaFuncAttributes unused;
  return int(cudaFuncGetAttributes(&unused, row_exchange));
}

} // namespace nvlink
