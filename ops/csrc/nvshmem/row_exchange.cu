// SPDX-License-Identifier: Apache-2.0
// An all-to-all of rows over NVSHMEM: the hop between nodes of the transport in two hops. The GPU starts all transfers.
// NVSHMEM's environment chooses what carries them: IBRC, IBGDA, libfabric, or peer memory inside a host.
//
// Grid: `sms` blocks. An item is a chunk of the rows between two ranks. A block copies it into the symmetric heap and
// puts it, with a signal behind it, into the region of this rank at the peer. A block of the peer waits for the signal
// and copies the chunk out.
#include "../nvlink/row_exchange.cuh"
#include "exchange.cuh"

namespace nvshmem {
namespace {

constexpr int THREADS = 512;

// `from`: gives the place of a byte.
template <class From> __device__ void copy(char *to, const From &from, int64_t bytes) {
  for (int64_t i = 16 * int64_t(threadIdx.x); i < bytes; i += 16 * THREADS)
    store16(to + i, load16(from(i)));
}

struct Work {
  const RowItems items;
  const Exchange &x;

  __device__ int rank() const { return items.rank(); }

  // All threads of a block call it.
  __device__ void send(int i) const {
    const int w = items.target(i);
    const int64_t bytes = items.to_send(i);
    if (bytes <= 0)
      return;
    if (w == rank())
      return copy(items.received(i, w), items.sent(i), bytes);
    const int64_t sent = (items.world() + w) * items.a.region + items.begin(i);
    copy(at<char>(x.half(), sent), items.sent(i), bytes);
    __syncthreads();
    x.put_block(w, rank() * items.a.region + items.begin(i), sent, bytes, items.chunk(i));
  }
  // One thread calls them.
  __device__ bool skip(int i) const { return items.source(i) == rank() || items.to_receive(i) <= 0; }
  __device__ bool await(int i) const { return x.await(items.source(i), items.chunk(i)); }
  // All threads of a block call it.
  __device__ void receive(int i) const {
    const int w = items.source(i);
    copy(items.received(i, w), Dense{at<char>(x.half(), w * items.a.region + items.begin(i))}, items.to_receive(i));
  }
};

__global__ void __launch_bounds__(THREADS, 1) row_exchange(const __grid_constant__ ShmemExchange a) {
  __shared__ int claimed;
  const RowExchange &rows = a.rows;
  const bool runs = !rows.other_state || !*static_cast<volatile uint32_t *>(&at<State>(rows.other_state)->failed);
  const Exchange x(rows.group, a.pe, runs);
  const Work work{{rows}, x};
  State *state = at<State>(rows.group.state);
  const int items = work.items.count();

  while (x.live) {
    if (threadIdx.x == 0)
      claimed = atomicAdd(&state->sends_claimed, 1);
    __syncthreads();
    const int i = claimed;
    if (i >= items)
      break;
    work.send(i);
    __syncthreads();
  }
  __syncthreads();
  while (x.live) {
    if (threadIdx.x == 0) {
      int i;
      do
        i = atomicAdd(&state->receives_claimed, 1);
      while (i < items && work.skip(i));
      claimed = i < items && !work.await(i) ? items : i;
    }
    __syncthreads();
    const int i = claimed;
    if (i >= items)
      break;
    work.receive(i);
    __syncthreads();
  }
  x.finish(runs);
}

} // namespace

int launch(const ShmemExchange &a, int sms, Address stream) {
  row_exchange<<<sms, THREADS, 0, reinterpret_cast<cudaStream_t>(stream)>>>(a);
  return int(cudaGetLastError());
}

int load_row_exchange() {
  cudaFuncAttributes unused;
  return int(cudaFuncGetAttributes(&unused, row_exchange));
}

} // namespace nvshmem
