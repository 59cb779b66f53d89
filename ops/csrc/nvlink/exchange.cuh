// SPDX-License-Identifier: Apache-2.0
// One exchange, as every kernel of the transport makes it: send, announce, wait, acknowledge.
//
// What works together is a team: the threads of one y of a block. A block of several teams fills a multiprocessor, so
// that as many blocks as an exchange has multiprocessors leave all others to whatever else runs.
//
// Stores to peers are plain 16-byte stores. A team announces a chunk once all its threads have stored their part of
// it: a barrier, then st.release.sys of the epoch into the peer's flag. Whoever reads the chunk does ld.acquire.sys of
// that flag, then a barrier. The halves of the staging serve exchanges in turn, so exchange n overwrites what peers
// read in n-2: before it sends, a team sees that they have acknowledged that. What is sent never waits for anything of
// the same exchange, and is sent by whichever teams the device has room for: no two ranks wait in a ring, whatever
// else runs on their devices. (But for a combine that a GEMM feeds: that has to have multiprocessors left to it. A GEMM
// that awaits a dispatch begins when that has its own.)
//
// A wait that lasts too long, or a peer that makes another call, ends with a record in host memory. Every wait and
// every later kernel then returns at once, with whatever is there: the host raises when it next looks.
#pragma once
#include "kernels.h"
#include "memory.cuh"
#include <cuda_runtime.h>

namespace nvlink {

template <class T> __device__ __forceinline__ T *at(Address base, int64_t byte = 0) {
  return reinterpret_cast<T *>(base + byte);
}

constexpr int MAX_TEAMS = 4; // of a block

__device__ __forceinline__ int team() { return blockIdx.x * blockDim.y + threadIdx.y; }
__device__ __forceinline__ int teams() { return gridDim.x * blockDim.y; }

// Any thread: the first failure is the one that is told.
__device__ inline void record(const Group &g, uint32_t epoch, Code code, int peer, uint32_t detail) {
  if (atomicExch(&at<State>(g.state)->failed, 1u) != 0)
    return;
  volatile Failure *told = at<Failure>(g.failure);
  told->rank = g.rank;
  told->peer = peer;
  told->phase = g.signature & 255;
  told->epoch = epoch;
  told->detail = detail;
  __threadfence_system();
  told->code = code;
}

class Exchange {
public:
  // Called by all threads. Afterwards it may send, if `live`.
  __device__ explicit Exchange(const Group &group) : g(group) {
    epoch = *static_cast<volatile uint32_t *>(&at<State>(g.state)->epoch);
    bool ok = threadIdx.x != 0 || !failed();
    if (threadIdx.x < g.world) {
      const int peer = threadIdx.x;
      if (team() == 0)
        store_release(at<uint64_t>(g.peer[peer], Staging::CALLS) + (epoch & 1) * MAX_RANKS + g.rank, call());
      const uint32_t *ack = at<uint32_t>(g.peer[g.rank], Staging::ACKS) + peer;
      ok &= wait(peer, [&] { return reached(load_acquire(ack), epoch - 2); });
    }
    live = !any_of_team(!ok);
  }

  __device__ bool failed() const { return *static_cast<volatile uint32_t *>(&at<State>(g.state)->failed) != 0; }

  // This exchange's half of a rank's staging.
  __device__ Address half(int rank) const { return g.peer[rank] + Staging::HALVES + (epoch & 1) * g.half_bytes; }

  // One thread, after a barrier behind the stores: tells a peer that a chunk is complete in its staging.
  __device__ void announce(int peer, int chunk) const {
    store_release(at<uint64_t>(g.peer[peer], Staging::FLAGS) + g.rank * MAX_CHUNKS + chunk, call());
  }

  // One thread: waits for a chunk from a peer; false: in vain. A barrier must follow before others read.
  __device__ bool await(int peer, int chunk) const {
    const uint64_t *flag = at<uint64_t>(g.peer[g.rank], Staging::FLAGS) + peer * MAX_CHUNKS + chunk;
    const uint64_t *calls = at<uint64_t>(g.peer[g.rank], Staging::CALLS) + (epoch & 1) * MAX_RANKS + peer;
    return wait(peer, [&] {
      const uint64_t told = load_acquire(flag);
      // Of this call, or of the next: a peer is no further. What was told 2^31 exchanges ago seems to lie ahead.
      return uint32_t(told) - epoch <= 1 ? same(told, peer) : same(load_acquire(calls), peer) && false;
    });
  }

  // Any thread: waits until this rank's own work beside the exchange has counted so far. A barrier must follow before
  // others read what was counted. False: in vain.
  __device__ bool await_count(const uint32_t *count, uint32_t least) const {
    return wait(g.rank, [&] { return load_acquire(count) >= least; }, OWN_GEMM);
  }

  // All threads, at their end: once every team is here, tells the peers that this rank has read what they sent.
  // Not `complete`: the exchange goes on in another kernel.
  __device__ void finish(bool complete = true) const {
    __shared__ bool last_of[MAX_TEAMS];
    bool &last = last_of[threadIdx.y];
    State *state = at<State>(g.state);
    sync_team();
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicAdd(&state->finished, 1) == teams() - 1;
      __threadfence();
      if (last) {
        state->arrived = state->finished = 0;
        state->sent = state->received = 0;
        state->epoch = epoch + complete;
      }
    }
    sync_team();
    if (last && complete && threadIdx.x < g.world)
      store_release(at<uint32_t>(g.peer[threadIdx.x], Staging::ACKS) + g.rank, epoch);
  }

  __device__ void fail(Code code, int peer, uint32_t detail = 0) const { record(g, epoch, code, peer, detail); }

  const Group &g;
  uint32_t epoch;
  bool live; // no exchange has failed; the same for all threads of a team

private:
  static __device__ bool reached(uint32_t value, uint32_t wanted) { return int32_t(value - wanted) >= 0; }

  __device__ uint64_t call() const { return uint64_t(g.signature) << 32 | epoch; }

  // Whether a peer is in this very call, as far as it has told; else that is recorded.
  __device__ bool same(uint64_t told, int peer) const {
    if (uint32_t(told) != epoch || told == call())
      return true;
    fail(MISMATCH, peer, uint32_t(told >> 32));
    return false;
  }

  template <class Arrived> __device__ bool wait(int peer, Arrived arrived, uint32_t whose = 0) const {
    if (arrived())
      return true;
    const uint64_t start = nanoseconds();
    while (!failed()) {
      for (int i = 0; i < 32; i++)
        if (arrived())
          return true;
      if (nanoseconds() - start > g.timeout_ns)
        fail(TIMEOUT, peer, whose);
    }
    return false;
  }
};

// Runs the `sends` items of an exchange and its `receives`. The third of the teams that begins last receives from the
// start, so that what arrives is read while the rest is sent; the others send first. Teams claim items one by one:
// which team has which changes nothing in the result, and whichever the device has room for send all that there is.
// Work has
//   send(i)        all threads: stores item i where it belongs, at the peers or here
//   announce(i)    all threads, after a barrier: tells whoever waits for it that it is complete
//   skip(i)        one thread: nothing to receive;  await(i): waits for all that item i reads
//   receive(i)     all threads
template <class Work> __device__ void exchange(const Exchange &x, Work &work, int sends, int receives) {
  __shared__ int claimed_of[MAX_TEAMS][2];
  int(&claimed)[2] = claimed_of[threadIdx.y];
  State *state = at<State>(x.g.state);
  const bool begins_early = threadIdx.x == 0 && x.live && int(atomicAdd(&state->arrived, 1)) < teams() - teams() / 3;
  if (any_of_team(begins_early)) {
    if (threadIdx.x == 0)
      claimed[0] = atomicAdd(&state->sent, 1);
    sync_team();
    for (int turn = 0;; turn ^= 1) {
      const int i = claimed[turn];
      if (i >= sends)
        break;
      if (threadIdx.x == 0)
        claimed[turn ^ 1] = atomicAdd(&state->sent, 1); // while the item is sent
      work.send(i);
      sync_team();
      work.announce(i); // without a barrier behind: only the threads that announce wait until their stores are done
    }
  }
  while (true) {
    sync_team();
    if (threadIdx.x == 0) {
      int i = receives;
      if (x.live) { // else the tables may not have been written
        do
          i = atomicAdd(&state->received, 1);
        while (i < receives && work.skip(i));
        if (i < receives)
          work.await(i);
      }
      claimed[0] = x.failed() ? receives : i;
    }
    sync_team();
    const int i = claimed[0];
    if (i >= receives)
      return;
    work.receive(i);
  }
}

} // namespace nvlink
