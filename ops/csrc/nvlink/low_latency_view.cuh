// SPDX-License-Identifier: Apache-2.0
// What dispatch and combine of few tokens share (low_latency.cuh): where things lie, and who sends what.
//
// A Wire is an exchange of its kind (exchange.cuh), and has
//   RANKS                         the most ranks, at most 32
//   outbox(w)                     where this rank writes its message for rank w
//   put(w, begin, bytes, chunk)   all lanes of a warp call it, after a barrier behind the writes. Brings this part of
//                                 the message to rank w, and announces the chunk
//   half(rank)                    this exchange's half of the own staging, where the messages of others arrive
#pragma once
#include "exchange.cuh"

namespace nvlink {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int COUNTS_FLAG = MAX_CHUNKS - 1; // behind the tokens' flags
constexpr int AHEAD = 4;        // pieces whose loads are in flight together
constexpr int SENT_AHEAD = 2;   // rows of a token whose loads are in flight together
constexpr int SUMMED_AHEAD = 8; // rows of a sum whose loads are in flight together
constexpr int MAX_SCALE_WORDS = 512; // words of four scales in a row
constexpr int MOST_SHARED_BYTES = 160 << 10; // enough for the most choices and experts that AllToAll accepts
constexpr int NOT_HERE = -1, AT_LOWER_RANK = -2; // in place of a row: who serves a choice

template <class Wire> struct View {
  static constexpr int RANKS = Wire::RANKS;
  const LowLatency &a;
  const Wire &x;

  __device__ int warp() const { return threadIdx.x / 32; }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int world() const { return a.group.world; }
  __device__ int rank() const { return a.group.rank; }
  __device__ int tokens() const { return a.bound ? int(min(*at<uint32_t>(a.bound), uint32_t(a.T))) : a.T; }
  // The expert of choice i. -1 if the choice is dropped.
  __device__ int expert(int i) const {
    const int64_t e = a.index_bytes == 4 ? at<int32_t>(a.index_TK)[i] : at<int64_t>(a.index_TK)[i];
    return e >= 0 && e < a.experts ? int(e) : -1;
  }
  // A token's record: in the message for rank w, and in the message from rank `source`. The row comes first.
  __device__ Address record(int w, int t) const { return x.outbox(w) + t * a.record; }
  __device__ Address arrived(int source, int t) const { return x.half(rank()) + source * a.message + t * a.record; }
  __device__ int route_bytes() const { return (a.K * 4 + 15) / 16 * 16; }
  // The counts that came from rank `source`: its number of tokens, then its choices for each expert of this rank.
  __device__ volatile int *counts(int source) const {
    return at<int>(x.half(rank()), source * a.message + a.count_at);
  }
  // Dispatch keeps these for combine: the places of a token's choices, and the number of tokens of each rank.
  __device__ int *kept(int source, int t) const {
    return at<int>(a.routes) + (int64_t(source) * a.max_tokens + t) * a.K;
  }
  __device__ int *kept_tokens() const { return at<int>(a.routes) + int64_t(world()) * a.max_tokens * a.K; }

  // A crew consists of the warps that move a row together.
  __device__ int crews() const { return gridDim.x * (WARPS / a.crew); }
  __device__ int crew(int block) const { return a.crew == 1 ? block * WARPS + warp() : block; }
  __device__ int member() const { return a.crew == 1 ? 0 : warp(); }
  __device__ void sync_crew() const {
    if (a.crew == 1)
      __syncwarp();
    else
      __syncthreads();
  }
};

// Divides what is sent into one share for each block. Blocks claim shares, so the blocks that run also send the shares
// of blocks that the device has no room for yet. Otherwise those blocks would wait until this one ends, while this one
// waits for peers, whose blocks may be in the same position.
class Shares {
public:
  // The first claim is made while the exchange begins, and each next claim while a share is sent.
  __device__ explicit Shares(const LowLatency &common) : state(at<State>(common.group.state)) {
    if (common.send && threadIdx.x == 0)
      next = atomicAdd(&state->sends_claimed, 1);
  }
  // All threads call it. Calls send(share) with all threads.
  template <class Send> __device__ void send(Send send) {
    __shared__ int claimed;
    while (true) {
      __syncthreads(); // all threads have read the previous share
      if (threadIdx.x == 0)
        claimed = next;
      __syncthreads();
      if (claimed >= gridDim.x)
        return;
      if (threadIdx.x == 0)
        next = atomicAdd(&state->sends_claimed, 1);
      send(claimed);
    }
  }

private:
  State *state;
  int next = 0; // in the first thread
};

__device__ __forceinline__ int most(const int *values, int count) {
  int most = 0;
  for (int i = 0; i < count; i++)
    most = max(most, values[i]);
  return most;
}

} // namespace nvlink
