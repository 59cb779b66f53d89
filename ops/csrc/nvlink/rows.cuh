// SPDX-License-Identifier: Apache-2.0
// Where rows lie in staging, and which chunks there are. Both dispatch and combine use this.
#pragma once
#include "exchange.cuh"
#include "mxfp8.cuh"

namespace nvlink {

constexpr int TEAM_THREADS = 256;
constexpr int TEAMS = 3; // in a block. While one team waits at a barrier or for its stores, the others move rows
static_assert(TEAMS <= MAX_TEAMS);
constexpr int LANE_BYTES = 16;
constexpr int PIECE_BYTES = 32 * LANE_BYTES; // what a warp moves at a time

struct RowsView {
  const Rows &a;
  const Exchange &x;

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
  // The i-th chunk of rank w, in the order in which both ends take chunks. The chunks are divided into as many
  // stretches as there are ranks, and are taken from the stretches in turn. Otherwise all ranks would send to the same
  // rank at the same time if tokens are sorted by expert.
  __device__ int turned(int w, int i) const {
    const int stretch = chunks_of(w) / world();
    return i < stretch * world() ? i % world() * stretch + i / world() : i;
  }
  // Chunk c of rank w as it arrives here: its first row among the R rows, and its number of rows.
  __device__ int2 arriving(int w, int c) const {
    int2 range = at<int2>(a.arriving_WC)[w * MAX_CHUNKS + c];
    range.x += segment(RECV_BASE, w);
    return range;
  }
  // Whether this rank sends rows of its chunk c to rank w.
  __device__ bool sent(int w, int c) const {
    const int *first = at<int>(a.first_CB) + int64_t(a.experts + w) * a.stride + c;
    return first[1] > first[0];
  }
  __device__ int64_t token_begin(int c) const { return int64_t(c) * a.chunk; }
  __device__ int64_t token_end(int c) const { return min(token_begin(c) + a.chunk, a.T); }
  // In lane w: the index of token t among the rows that this rank sends to rank w. -1 if it is not sent there.
  __device__ int slot(int64_t t) const { return lane() < world() ? at<int>(a.slot_WT)[lane() * a.T + t] : -1; }
  // In lane k: the place of choice k of row r. -1 if this rank does not serve it, or if there is no choice k.
  __device__ int place(int64_t r) const { return lane() < a.K ? at<int>(a.place_RK)[r * a.K + lane()] : -1; }

  // The data, the scales and the weights of a row in the staging of rank w.
  __device__ char *data(int w, int64_t row, int64_t row_bytes) const {
    return at<char>(x.half(w), a.data_at + row * row_bytes);
  }
  __device__ uint8_t *scales(int w, int64_t row) const {
    return at<uint8_t>(x.half(w), a.scale_at + row * a.scale_row);
  }
  __device__ float *weights(int w, int64_t row) const { return at<float>(x.half(w), a.weight_at + row * a.K * 4); }
};

// Gathers the scale bytes of a warp's row into words of four. Each lane holds the word that it will store. A piece of
// a row has 512 values.
template <int BLOCK> struct ScaleWords {
  static constexpr int WORDS = 32 * LANE_VALUES / BLOCK / 4; // in a piece
  static constexpr int PIECES = 32 / WORDS;                  // after these, every lane holds a word
  uint32_t mine = 0;

  __device__ __forceinline__ void add(int piece, uint32_t byte) {
    const int lane = threadIdx.x % 32, lanes = BLOCK / LANE_VALUES; // lanes that share a scale
    uint32_t word = byte << (8 * (lane / lanes % 4));
    word |= __shfl_xor_sync(~0u, word, lanes);
    word |= __shfl_xor_sync(~0u, word, 2 * lanes);
    const uint32_t own = __shfl_sync(~0u, word, lane % WORDS * 4 * lanes);
    if (lane / WORDS == piece % PIECES)
      mine = own;
  }
  __device__ __forceinline__ bool full(int piece) const { return piece % PIECES == PIECES - 1; }
  // Stores the words gathered since the lanes were last full, up to and including those of `piece`.
  __device__ __forceinline__ void store(uint8_t *scales, int piece) const {
    const int lane = threadIdx.x % 32;
    if (lane / WORDS <= piece % PIECES)
      at<uint32_t>(Address(scales))[piece / PIECES * 32 + lane] = mine;
  }
  // All lanes call it. Calls action(block, byte, inside) for the scales that `store` would store. count: blocks of the
  // row. inside: whether the row has the block and this lane holds its scale.
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
