// SPDX-License-Identifier: Apache-2.0
// An all-to-all of rows over NVSHMEM: the hop between nodes of the transport in two hops. The GPU starts all transfers.
// NVSHMEM's environment chooses what carries them: IBRC, IBGDA, libfabric, or peer memory inside a host.
//
// Grid: `sms` blocks. An item is a chunk of the rows between two ranks. A block copies it into the symmetric heap and
// puts it, with a signal behind it, into the region of this rank at the peer. A block of the peer waits for the signal
// and copies the chunk out. The rules of ../nvlink/exchange.cuh hold: exchanges use two halves in turn, nothing is sent
// before the peers have acknowledged exchange n-2, and the blocks that run send everything before they wait for rows.
// Acknowledgements also say that the sender's copy of a chunk has left, since they come after its arrival.
//
// Waits have a deadline, which nvshmem_signal_wait_until has not. It is called once the signal is there, since it does
// what some platforms need before data from the network may be read.
#include "../nvlink/row_exchange.cuh"
#include "kernels.h"
#include <nvshmem.h>
#include <nvshmemx.h>

namespace nvshmem {
namespace {

constexpr int THREADS = 512;

__device__ void copy(char *to, const char *from, int64_t bytes) {
  for (int64_t i = 16 * int64_t(threadIdx.x); i < bytes; i += 16 * THREADS)
    store16(to + i, load16(from + i));
}

struct Work {
  const ShmemExchange &a;
  const Group &g;
  uint32_t epoch;
  const RowItems items;

  __device__ uint64_t call() const { return uint64_t(g.signature) << 32 | epoch; }
  __device__ bool failed() const { return *static_cast<volatile uint32_t *>(&at<State>(g.state)->failed) != 0; }
  // The region of a rank in this exchange's half of the staging. The address is valid here and, for NVSHMEM, at PEs.
  __device__ char *region(int which) const {
    return at<char>(g.peer[g.rank], Staging::HALVES + (epoch & 1) * g.half_bytes + which * a.rows.region);
  }
  __device__ uint64_t *flag(int w, int chunk) const {
    return at<uint64_t>(g.peer[g.rank], Staging::FLAGS) + w * MAX_CHUNKS + chunk;
  }
  __device__ uint64_t *ack(int w) const { return at<uint64_t>(g.peer[g.rank], Staging::ACKS) + w; }

  // All threads of a block call it.
  __device__ void send(int i) const {
    const int w = items.target(i);
    const int64_t bytes = items.to_send(i);
    if (bytes <= 0)
      return;
    if (w == g.rank)
      return copy(items.received(i, w), items.sent(i), bytes);
    char *sent = region(g.world + w) + items.begin(i);
    copy(sent, items.sent(i), bytes);
    __threadfence_system();
    __syncthreads();
    nvshmemx_putmem_signal_nbi_block(region(g.rank) + items.begin(i), sent, bytes, flag(g.rank, items.chunk(i)), call(),
                                     NVSHMEM_SIGNAL_SET, a.pe[w]);
    if (threadIdx.x == 0)
      atomicAdd(reinterpret_cast<unsigned long long *>(&at<ShmemState>(g.state)->puts), 1ull);
  }
  __device__ bool skip(int i) const { return items.source(i) == g.rank || items.to_receive(i) <= 0; }
  __device__ void receive(int i) const {
    const int w = items.source(i);
    copy(items.received(i, w), region(w) + items.begin(i), items.to_receive(i));
  }

  // One thread calls them. They return false if the exchange failed.
  __device__ bool await(int i) const {
    const int w = items.source(i);
    uint64_t *signal = flag(w, items.chunk(i));
    return wait(w, [&] {
      const uint64_t arrived = load_acquire(signal);
      if (uint32_t(arrived) - epoch > 1) // of an earlier exchange
        return false;
      if (uint32_t(arrived) == epoch && arrived != call()) {
        record(g, epoch, MISMATCH, w, uint32_t(arrived >> 32));
        return false;
      }
      nvshmem_signal_wait_until(signal, NVSHMEM_CMP_NE, 0); // no call is 0
      return true;
    });
  }
  __device__ bool await_ack(int w) const {
    return w == g.rank || wait(w, [&] { return int32_t(uint32_t(load_acquire(ack(w))) - (epoch - 2)) >= 0; });
  }
  template <class Arrived> __device__ bool wait(int peer, Arrived arrived) const {
    const uint64_t start = nanoseconds();
    while (!failed()) {
      if (arrived())
        return true;
      if (nanoseconds() - start > g.timeout_ns)
        record(g, epoch, TIMEOUT, peer, 0);
    }
    return false;
  }
};

__global__ void __launch_bounds__(THREADS, 1) row_exchange(const __grid_constant__ ShmemExchange a) {
  __shared__ int claimed;
  const Group &g = a.rows.group;
  State *state = at<State>(g.state);
  const Work work{a, g, *static_cast<volatile uint32_t *>(&state->epoch), {a.rows}};
  const int items = work.items.count();
  const bool runs =
      !a.rows.other_state || !*static_cast<volatile uint32_t *>(&at<State>(a.rows.other_state)->failed);
  const bool live = __syncthreads_and(runs && (threadIdx.x >= g.world || work.await_ack(threadIdx.x)));

  while (live) {
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
  while (live) {
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

  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&state->teams_finished, 1) == gridDim.x - 1;
    __threadfence();
    if (last) {
      state->teams_finished = state->sends_claimed = state->receives_claimed = 0;
      state->epoch = work.epoch + runs;
    }
  }
  __syncthreads();
  if (last && runs && threadIdx.x < g.world && threadIdx.x != g.rank)
    nvshmemx_signal_op(work.ack(g.rank), work.epoch, NVSHMEM_SIGNAL_SET, a.pe[threadIdx.x]);
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
