// SPDX-License-Identifier: Apache-2.0
// One exchange. Every kernel of the transport takes these steps: send, announce, wait, acknowledge.
//
// A team is the threads of a block that share threadIdx.y. It works on one item at a time. A block of several teams
// fills a multiprocessor. An exchange that launches as many blocks as it has multiprocessors therefore leaves all
// other multiprocessors to other kernels.
//
// Stores to peers are plain 16-byte stores. When all threads of a team have stored their part of a chunk, the team
// announces the chunk: a barrier, then st.release.sys of the call into the peer's flag. A team that reads the chunk
// first executes ld.acquire.sys on that flag, then a barrier.
//
// Exchanges use the two halves of the staging in turn, so exchange n overwrites what peers read in exchange n-2.
// Before a team sends, it waits until the peers have acknowledged exchange n-2. Sending waits for nothing of the same
// exchange, and the teams that run send everything, even if the device has no room for others. Ranks therefore never
// wait for each other in a ring, whatever else runs on their devices.
//
// If a wait exceeds the timeout, or a peer makes another call, the kernel records the failure in host memory. From
// then on every wait and every later kernel returns at once and leaves its results as they are. The host raises an
// error when it next checks.
#pragma once
#include "kernels.h"
#include "memory.cuh"
#include <cuda_runtime.h>

namespace nvlink {

template <class T> __device__ __forceinline__ T *at(Address base, int64_t byte = 0) {
  return reinterpret_cast<T *>(base + byte);
}

constexpr int MAX_TEAMS = 4; // in a block

__device__ __forceinline__ int team() { return blockIdx.x * blockDim.y + threadIdx.y; }
__device__ __forceinline__ int teams() { return gridDim.x * blockDim.y; }

// Any thread may call it. Only the first failure is recorded.
__device__ inline void record(const Group &g, uint32_t epoch, Code code, int peer, uint32_t detail) {
  if (atomicExch(&at<State>(g.state)->failed, 1u) != 0)
    return;
  volatile Failure *failure = at<Failure>(g.failure);
  failure->rank = g.rank;
  failure->peer = peer;
  failure->phase = g.signature & 255;
  failure->epoch = epoch;
  failure->detail = detail;
  __threadfence_system();
  failure->code = code;
}

class Exchange {
public:
  // All threads call it. Afterwards the kernel may send, if `live` is true.
  // runs: false if this exchange must do nothing.
  __device__ explicit Exchange(const Group &group, bool runs = true) : g(group) {
    epoch = *static_cast<volatile uint32_t *>(&at<State>(g.state)->epoch);
    bool ok = runs && (threadIdx.x != 0 || !failed());
    if (runs && threadIdx.x < g.world) {
      const int peer = threadIdx.x;
      if (team() == 0)
        store_release(at<uint64_t>(g.peer[peer], Staging::CALLS) + (epoch & 1) * MAX_RANKS + g.rank, call());
      const uint32_t *ack = at<uint32_t>(g.peer[g.rank], Staging::ACKS) + peer;
      ok &= wait(peer, [&] { return reached(load_acquire(ack), epoch - 2); });
    }
    live = !any_of_team(!ok);
  }

  __device__ bool failed() const { return *static_cast<volatile uint32_t *>(&at<State>(g.state)->failed) != 0; }

  // This exchange's half of `rank`'s staging.
  __device__ Address half(int rank) const { return g.peer[rank] + Staging::HALVES + (epoch & 1) * g.half_bytes; }

  // One thread calls it, after a barrier behind the stores. Tells a peer that a chunk in its staging is complete.
  __device__ void announce(int peer, int chunk) const {
    store_release(at<uint64_t>(g.peer[peer], Staging::FLAGS) + g.rank * MAX_CHUNKS + chunk, call());
  }

  // One thread calls it, and a barrier must follow before other threads read. Waits for a chunk from a peer. Returns
  // false if the exchange failed.
  __device__ bool await(int peer, int chunk) const {
    const uint64_t *flag = at<uint64_t>(g.peer[g.rank], Staging::FLAGS) + peer * MAX_CHUNKS + chunk;
    const uint64_t *calls = at<uint64_t>(g.peer[g.rank], Staging::CALLS) + (epoch & 1) * MAX_RANKS + peer;
    return wait(peer, [&] {
      const uint64_t announced = load_acquire(flag);
      // A flag of this exchange or of the next one counts: a peer is at most one exchange ahead. Any other flag is
      // old.
      if (uint32_t(announced) - epoch <= 1)
        return same(announced, peer);
      same(load_acquire(calls), peer); // the chunk is not there. This only records a mismatch
      return false;
    });
  }

  // All threads call it last. When every team has called it, tells the peers that this rank has read what they sent.
  // complete: false if another kernel continues this exchange. The peers are then not told yet.
  __device__ void finish(bool complete = true) const {
    __shared__ bool last_of[MAX_TEAMS];
    bool &last = last_of[threadIdx.y];
    State *state = at<State>(g.state);
    sync_team();
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicAdd(&state->teams_finished, 1) == teams() - 1;
      __threadfence();
      if (last) {
        state->teams_begun = state->teams_finished = 0;
        state->sends_claimed = state->receives_claimed = 0;
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
  bool live; // whether no exchange has failed; equal for all threads of a team

private:
  static __device__ bool reached(uint32_t value, uint32_t wanted) { return int32_t(value - wanted) >= 0; }

  __device__ uint64_t call() const { return uint64_t(g.signature) << 32 | epoch; }

  // Records a mismatch and returns false if `its_call`, a peer's call, has the epoch of this one but not its
  // signature.
  __device__ bool same(uint64_t its_call, int peer) const {
    if (uint32_t(its_call) != epoch || its_call == call())
      return true;
    fail(MISMATCH, peer, uint32_t(its_call >> 32));
    return false;
  }

  template <class Arrived> __device__ bool wait(int peer, Arrived arrived) const {
    if (arrived())
      return true;
    const uint64_t start = nanoseconds();
    while (!failed()) {
      for (int i = 0; i < 32; i++)
        if (arrived())
          return true;
      if (nanoseconds() - start > g.timeout_ns)
        fail(TIMEOUT, peer);
    }
    return false;
  }
};

// Handles all items of an exchange: `sends` items to send and `receives` items to receive. Two thirds of the teams,
// those that begin first, send before they receive. The others receive from the start, so that this rank reads what
// arrives while it still sends. Teams claim items one by one. The result does not depend on which team claims an item.
// Work has
//   send(i)        called by all threads of a team: stores item i where it belongs, at the peers or here
//   announce(i)    called by all threads, after a barrier: tells the ranks that wait for item i that it is complete
//   skip(i)        called by one thread: whether item i has nothing to receive
//   await(i)       called by one thread: waits for everything that receiving item i reads
//   receive(i)     called by all threads
template <class Work> __device__ void exchange(const Exchange &x, Work &work, int sends, int receives) {
  __shared__ int claimed_of[MAX_TEAMS][2];
  int(&claimed)[2] = claimed_of[threadIdx.y];
  State *state = at<State>(x.g.state);
  const bool begins_early =
      threadIdx.x == 0 && x.live && int(atomicAdd(&state->teams_begun, 1)) < teams() - teams() / 3;
  if (any_of_team(begins_early)) {
    if (threadIdx.x == 0)
      claimed[0] = atomicAdd(&state->sends_claimed, 1);
    sync_team();
    for (int turn = 0;; turn ^= 1) {
      const int i = claimed[turn];
      if (i >= sends)
        break;
      if (threadIdx.x == 0)
        claimed[turn ^ 1] = atomicAdd(&state->sends_claimed, 1); // while the item is sent
      work.send(i);
      sync_team();
      work.announce(i); // no barrier follows: only the threads that announce wait until their stores are done
    }
  }
  while (true) {
    sync_team();
    if (threadIdx.x == 0) {
      int i = receives;
      if (x.live) { // otherwise the tables may not have been written
        do
          i = atomicAdd(&state->receives_claimed, 1);
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
