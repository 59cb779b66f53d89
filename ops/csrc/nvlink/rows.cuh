// SPDX-License-Identifier: Apache-2.0
// What dispatch and combine have in common: where rows stand, and which chunks there are.
#pragma once
#include "exchange.cuh"
#include "mxfp8.cuh"

namespace nvlink {

constexpr int TEAM_THREADS = 256;
constexpr int TEAMS = 3; // while one waits at a barrier or for stores to arrive, others move rows
static_assert(TEAMS <= MAX_TEAMS);
constexpr int LANE_BYTES = 16;
constexpr int PIECE_BYTES = 32 * LANE_BYTES; // what a warp moves at a time

struct RowsTables {
  const Rows &a;

  __device__ int rank() const { return a.group.rank; }
  __device__ int world() const { return a.group.world; }
  __device__ int warp() const { return threadIdx.x / 32; }
  __device__ int warps() const { return blockDim.x / 32; }
  __device__ int lane() const { return threadIdx.x % 32; }

  __device__ int segment(Segments which, int w) const { return at<int>(a.segments)[which * world() + w]; }
  __device__ int chunks_of(int w) const { return at<int>(a.counts_WC)[w * (2 + world() + a.experts) + 1]; }
  __device__ int most_chunks() const {
    int most = 0;
    for (int w = 0; w < world(); w++)
      most = max(most, chunks_of(w));
    return most;
  }
  // The i-th of rank w's chunks, in whose order both ends take them: from as many stretches of them as there are ranks
  // in turn. Where tokens stand by their experts, all ranks would else send to one at a time.
  __device__ int turned(int w, int i) const {
    const int stretch = chunks_of(w) / world();
    return i < stretch * world() ? i % world() * stretch + i / world() : i;
  }
  // A chunk of rank w as it arrives here: its first row among the R, and how many there are.
  __device__ int2 arriving(int w, int c) const {
    int2 range = at<int2>(a.arriving_WC)[w * MAX_CHUNKS + c];
    range.x += segment(RECV_BASE, w);
    return range;
  }
  // Whether this rank sends anything of its chunk c to rank w.
  __device__ bool sent(int w, int c) const {
    const int *first = at<int>(a.first_CB) + int64_t(a.experts + w) * a.stride + c;
    return first[1] > first[0];
  }
  __device__ int64_t token_begin(int c) const { return int64_t(c) * a.chunk; }
  __device__ int64_t token_end(int c) const { return min(token_begin(c) + a.chunk, a.T); }
  // Where a lane's choice of row r stands here; -1: nowhere, or lane beyond K.
  __device__ int place(int64_t r) const { return lane() < a.K ? at<int>(a.place_RK)[r * a.K + lane()] : -1; }

  // Calls action(tile, rows) for the tiles of 128 rows here where so many of `range` stand; each on one or more threads,
  // whose rows then add up.
  template <class Action> __device__ void each_tile(int2 range, Action action) const {
    const int64_t begin = int64_t(range.x) * a.K, end = begin + int64_t(range.y) * a.K;
    for (int64_t first = begin + warp() * 32; first < end; first += blockDim.x) {
      const int p = first + lane() < end ? at<int>(a.place_RK)[first + lane()] : -1;
      const int tile = p >= 0 ? p / ROW_ALIGNMENT : -1;
      const uint32_t same = __match_any_sync(~0u, tile);
      if (tile >= 0 && lane() == __ffs(same) - 1)
        action(tile, __popc(same));
    }
  }
};

struct RowsView : RowsTables {
  const Exchange &x;

  __device__ char *data(int w, int64_t row, int64_t row_bytes) const {
    return at<char>(x.half(w), a.data_at + row * row_bytes);
  }
  __device__ uint8_t *scales(int w, int64_t row) const {
    return at<uint8_t>(x.half(w), a.scale_at + row * a.scale_row);
  }
  __device__ float *weights(int w, int64_t row) const { return at<float>(x.half(w), a.weight_at + row * a.K * 4); }
};

// The order in which a combine sends: runs of the ranks' chunks as they are turned, within each the ranks in turn, this
// rank last.
struct Sends {
  int rank, world, chunks, run;

  // parts 0: runs of one chunk.
  __device__ Sends(const RowsTables &v, int parts)
      : rank(v.rank()), world(v.world()), chunks(v.most_chunks()),
        run(parts ? max((chunks + parts - 1) / parts, 1) : 1) {}

  __device__ int count() const { return (chunks + run - 1) / run * run * world; }
  __device__ int owner(int i) const { return (i / run + rank + 1) % world; }
  // Item i is the nth of the owner's chunks, as they are turned; there may be fewer.
  __device__ int nth(int i) const { return i / (run * world) * run + i % run; }
  // Of item i: how many turns come before its own.
  __device__ int turn(int i) const { return i / run; }
};

// The scale bytes of a row as words, each in the lane that will store it: one warp's, for pieces of 512 values.
template <int BLOCK> struct ScaleWords {
  static constexpr int WORDS = 32 * LANE_VALUES / BLOCK / 4; // of a piece
  static constexpr int PIECES = 32 / WORDS;                  // until the lanes are full
  uint32_t mine = 0;

  __device__ __forceinline__ void add(int piece, uint32_t byte) {
    const int lane = threadIdx.x % 32, lanes = BLOCK / LANE_VALUES; // that share a byte
    uint32_t word = byte << (8 * (lane / lanes % 4));
    word |= __shfl_xor_sync(~0u, word, lanes);
    word |= __shfl_xor_sync(~0u, word, 2 * lanes);
    const uint32_t own = __shfl_sync(~0u, word, lane % WORDS * 4 * lanes);
    if (lane / WORDS == piece % PIECES)
      mine = own;
  }
  __device__ __forceinline__ bool full(int piece) const { return piece % PIECES == PIECES - 1; }
  // Stores the words of the pieces up to and with `piece` since the lanes were last full.
  __device__ __forceinline__ void store(uint8_t *scales, int piece) const {
    const int lane = threadIdx.x % 32;
    if (lane / WORDS <= piece % PIECES)
      at<uint32_t>(Address(scales))[piece / PIECES * 32 + lane] = mine;
  }
  // All lanes: calls action(block, byte, inside) for the scales of those pieces; a row has `count`.
  template <class Action> __device__ __forceinline__ void each_byte(int piece, int count, Action action) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int b = (piece / PIECES * 32 + lane) * 4 + i;
      action(b, uint8_t(mine >> 8 * i), lane / WORDS <= piece % PIECES && b < count);
    }
  }
};

} // namespace nvlink
