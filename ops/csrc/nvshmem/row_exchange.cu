// SPDX-License-Identifier: Apache-2.0
// An all-to-all of rows over NVSHMEM: the hop between nodes of the transport in two hops. The GPU starts all transfers.
// NVSHMEM's environment chooses what carries them: IBRC, IBGDA, libfabric, or peer memory inside a host.
//
// Grid: `sms` blocks. An item is a chunk of the rows between two ranks. A block copies it into the symmetric heap and
// puts it, with a signal behind it, into the region of this rank at the peer. A block of the peer waits for the signal
// and copies the chunk out.
#include "exchange.cuh"

namespace nvshmem {
namespace {

constexpr int THREADS = 512;

__device__ void copy(char *to, const char *from, int64_t bytes) {
  for (int64_t i = 16 * int64_t(threadIdx.x); i < bytes; i += 16 * THREADS)
    store16(to + i, load16(from + i));
}

struct Work {
  const RowExchange &a;
  const Exchange &x;

  __device__ int rank() const { return a.group.rank; }
  __device__ int world() const { return a.group.world; }
  __device__ int64_t begin(int i) const { return i / world() * a.chunk; }
  __device__ int target(int i) const { return (rank() + 1 + i % world()) % world(); }
  __device__ int source(int i) const { return (rank() + world() - 1 - i % world()) % world(); }
  __device__ int64_t left(const int64_t *at, int w, int i) const { return at[w + 1] - at[w] - begin(i); }

  // All threads of a block call it.
  __device__ void send(int i) const {
    const int w = target(i);
    const int64_t bytes = min(a.chunk, left(a.send_at, w, i));
    if (bytes <= 0)
      return;
    const char *from = at<char>(a.x, a.send_at[w] + begin(i));
    if (w == rank())
      return copy(at<char>(a.out, a.recv_at[w] + begin(i)), from, bytes);
    const int64_t sent = (world() + w) * a.region + begin(i);
    copy(at<char>(x.half(), sent), from, bytes);
    __syncthreads();
    x.put_block(w, rank() * a.region + begin(i), sent, bytes, i / world());
  }
  // One thread calls them.
  __device__ bool skip(int i) const { return source(i) == rank() || left(a.recv_at, source(i), i) <= 0; }
  __device__ bool await(int i) const { return x.await(source(i), i / world()); }
  // All threads of a block call it.
  __device__ void receive(int i) const {
    const int w = source(i);
    copy(at<char>(a.out, a.recv_at[w] + begin(i)), at<char>(x.half(), w * a.region + begin(i)),
         min(a.chunk, left(a.recv_at, w, i)));
  }
};

__global__ void __launch_bounds__(THREADS, 1) row_exchange(const __grid_constant__ ShmemExchange a) {
  __shared__ int claimed;
  const RowExchange &rows = a.rows;
  const bool runs = !rows.other_state || !*static_cast<volatile uint32_t *>(&at<State>(rows.other_state)->failed);
  const Exchange x(rows.group, a.pe, runs);
  const Work work{rows, x};
  State *state = at<State>(rows.group.state);
  const int items = rows.chunks * rows.group.world;

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
