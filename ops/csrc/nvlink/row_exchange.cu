// SPDX-License-Identifier: Apache-2.0
// An all-to-all of rows over peer memory: one hop of the transport in two hops. Rows are bytes here.
//
// Grid: `sms` blocks of TEAMS teams. An item is a chunk of the rows between two ranks. A team copies it into the
// region of this rank in the peer's staging and announces it. A team of the peer copies it out. Rows that stay here go
// to their place directly. The kernel is bound by memory: 2 reads and 2 writes of each byte that travels.
#include "row_exchange.cuh"

namespace nvlink {
namespace {

constexpr int TEAM_THREADS = 256;
constexpr int TEAMS = 3;
static_assert(TEAMS <= MAX_TEAMS);
constexpr int UNROLLED = 4; // loads of a thread that are on their way at the same time

// `from`: gives the place of a byte.
template <class From> __device__ void copy(char *to, const From &from, int64_t bytes) {
  constexpr int64_t STEP = 16 * TEAM_THREADS;
  int64_t i = 16 * int64_t(threadIdx.x);
  for (; i + (UNROLLED - 1) * STEP < bytes; i += UNROLLED * STEP) {
    int4 v[UNROLLED];
#pragma unroll
    for (int u = 0; u < UNROLLED; u++)
      v[u] = load16(from(i + u * STEP));
#pragma unroll
    for (int u = 0; u < UNROLLED; u++)
      store16(to + i + u * STEP, v[u]);
  }
  for (; i < bytes; i += STEP)
    store16(to + i, load16(from(i)));
}

struct RowExchangeWork {
  const RowItems items;
  const Exchange &x;

  // Where an item lies in the staging of its target, or of this rank.
  __device__ char *staged(int i, int owner, int sender) const {
    return at<char>(x.half(owner), sender * items.a.region + items.begin(i));
  }
  __device__ void send(int i) const {
    const int w = items.target(i), me = items.rank();
    copy(w == me ? items.received(i, me) : staged(i, w, me), items.sent(i), items.to_send(i));
  }
  __device__ void announce(int i) const {
    const int w = items.target(i);
    if (threadIdx.x == 0 && w != items.rank() && items.to_send(i) > 0)
      x.announce(w, items.chunk(i));
  }
  __device__ bool skip(int i) const { return items.source(i) == items.rank() || items.to_receive(i) <= 0; }
  __device__ void await(int i) const { x.await(items.source(i), items.chunk(i)); }
  __device__ void receive(int i) const {
    const int w = items.source(i);
    copy(items.received(i, w), Dense{staged(i, items.rank(), w)}, items.to_receive(i));
  }
};

__global__ void __launch_bounds__(TEAM_THREADS *TEAMS, 1) row_exchange(const __grid_constant__ RowExchange a) {
  const bool runs = !a.other_state || !*static_cast<volatile uint32_t *>(&at<State>(a.other_state)->failed);
  Exchange x(a.group, runs);
  RowExchangeWork work{{a}, x};
  exchange(x, work, work.items.count(), work.items.count());
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
