// SPDX-License-Identifier: Apache-2.0
// One exchange over NVSHMEM: put, signal, wait, acknowledge.
//
// The rules of ../nvlink/exchange.cuh hold: exchanges use two halves in turn, nothing is sent before the peers have
// acknowledged exchange n-2, and the blocks that run send everything before they wait for rows. Every signal is
// awaited before its exchange is acknowledged. An acknowledgement therefore also says that the sender's copy of the
// rows has left, and that its flags are free.
//
// Waits have a deadline, which nvshmem_signal_wait_until has not. It is called once the signal is there, since it does
// what some platforms need before data from the network may be read.
#pragma once
#include "../nvlink/exchange.cuh"
#include "kernels.h"
#include <nvshmem.h>
#include <nvshmemx.h>

namespace nvshmem {

class Exchange {
public:
  // All threads of a block call it. Afterwards the kernel may send, if `live` is true.
  // pe: the PE of each rank. Null means that rank i is PE i.
  // runs: false if this exchange must do nothing.
  __device__ explicit Exchange(const Group &group, const int *pe = nullptr, bool runs = true)
      : g(group), epoch(*static_cast<volatile uint32_t *>(&at<State>(group.state)->epoch)), pes(pe) {
    live = __syncthreads_and(runs && (threadIdx.x >= g.world || await_ack(threadIdx.x)));
  }

  __device__ bool failed() const { return *static_cast<volatile uint32_t *>(&at<State>(g.state)->failed) != 0; }

  // This exchange's half of the own staging. NVSHMEM finds the same place at PEs by this address.
  __device__ Address half() const { return own() + ShmemStaging::HALVES + (epoch & 1) * g.half_bytes; }

  // All lanes of a warp call it, after a barrier behind the writes. Puts bytes of this half at `from` to the place
  // `to` in the half of another rank, and announces a chunk there.
  __device__ void put_warp(int w, int64_t to, int64_t from, int64_t bytes, int chunk) const {
    __threadfence_system(); // the network may read all that was written before the barrier
    nvshmemx_putmem_signal_nbi_warp(at<char>(half(), to), at<char>(half(), from), bytes, flag(g.rank, chunk), call(),
                                    NVSHMEM_SIGNAL_SET, pe(w));
  }

  // The same for all threads of a block.
  __device__ void put_block(int w, int64_t to, int64_t from, int64_t bytes, int chunk) const {
    __threadfence_system();
    nvshmemx_putmem_signal_nbi_block(at<char>(half(), to), at<char>(half(), from), bytes, flag(g.rank, chunk), call(),
                                     NVSHMEM_SIGNAL_SET, pe(w));
  }

  // One thread calls it. Announces a chunk in the own staging.
  __device__ void announce_here(int chunk) const { store_release(flag(g.rank, chunk), call()); }

  // One thread calls it, and a barrier must follow before other threads read. Waits for a chunk from a peer. Returns
  // false if the exchange failed.
  __device__ bool await(int peer, int chunk) const {
    uint64_t *signal = flag(peer, chunk);
    return wait(peer, [&] {
      const uint64_t arrived = load_acquire(signal);
      if (uint32_t(arrived) != epoch) // of the exchange before the last
        return false;
      if (arrived != call()) {
        record(g, epoch, MISMATCH, peer, uint32_t(arrived >> 32));
        return false;
      }
      nvshmem_signal_wait_until(signal, NVSHMEM_CMP_NE, 0); // no call is 0
      return true;
    });
  }

  // All threads call it last. When every block has called it, tells the peers that this rank has read what they sent.
  // complete: false if another kernel continues this exchange. The peers are then not told yet.
  __device__ void finish(bool complete = true) const {
    __shared__ bool last;
    State *state = at<State>(g.state);
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicAdd(&state->teams_finished, 1) == gridDim.x - 1;
      __threadfence_system();
      if (last) {
        state->teams_finished = state->sends_claimed = state->receives_claimed = 0;
        state->epoch = epoch + complete;
      }
    }
    __syncthreads();
    if (last && complete && threadIdx.x < g.world && threadIdx.x != g.rank)
      nvshmemx_signal_op(ack(g.rank), 1, NVSHMEM_SIGNAL_ADD, pe(threadIdx.x));
  }

  __device__ void fail(Code code, int peer, uint32_t detail = 0) const { record(g, epoch, code, peer, detail); }

  const Group &g;
  uint32_t epoch;
  bool live; // whether no exchange has failed; equal for all threads of a block

private:
  __device__ Address own() const { return g.peer[0]; }
  __device__ int pe(int w) const { return pes ? pes[w] : w; }
  __device__ uint64_t call() const { return uint64_t(g.signature) << 32 | epoch; }
  __device__ uint64_t *ack(int w) const { return at<uint64_t>(own(), ShmemStaging::ACKS) + w; }
  __device__ uint64_t *flag(int w, int chunk) const {
    return at<uint64_t>(own(), ShmemStaging::FLAGS) + ((epoch & 1) * MAX_PES + w) * MAX_CHUNKS + chunk;
  }
  __device__ bool await_ack(int w) const {
    return w == g.rank ? !failed()
                       : wait(w, [&] { return int32_t(uint32_t(load_acquire(ack(w))) - (epoch - 2)) >= 0; });
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

  const int *pes;
};

} // namespace nvshmem
