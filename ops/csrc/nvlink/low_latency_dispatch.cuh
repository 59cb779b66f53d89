// SPDX-License-Identifier: Apache-2.0
// Dispatch of few tokens at low latency (low_latency.cuh): a kernel over any wire.
#pragma once
#include "low_latency_view.cuh"
#include "mxfp8.cuh"

namespace nvlink {

// Sends token t as it is to each rank whose bit in `ranks` is set. Warps take turns at a row's pieces.
struct Plain {
  template <class View>
  __device__ __forceinline__ void send(const View &v, const LowLatencyDispatch &a, int t, uint32_t ranks,
                                       uint32_t *) const {
    const char *from = at<char>(a.x_TH, int64_t(t) * a.row_bytes);
    for (int byte = threadIdx.x * 16; byte < a.row_bytes; byte += THREADS * 16) {
      const int4 data = load16(from + byte);
#pragma unroll
      for (int w = 0; w < View::RANKS; w++)
        if (ranks >> w & 1)
          store16(at<char>(v.record(w, t), byte), data);
    }
  }
};

// Sends token t quantized to MXFP8 instead. The scales are written to `words`.
template <class T, int BLOCK> struct Quantized {
  template <class View>
  __device__ __forceinline__ void send(const View &v, const LowLatencyDispatch &a, int t, uint32_t ranks,
                                       uint32_t *words) const {
    constexpr int PIECE = 32 * LANE_VALUES, LANES = BLOCK / LANE_VALUES, WORDS = PIECE / BLOCK / 4;
    const int H = v.a.H, mine = v.lane() * LANE_VALUES;
    for (int piece = v.warp(); piece * PIECE < H; piece += WARPS) {
      const bool inside = piece * PIECE + mine < H;
      Piece<T, LANE_VALUES> in;
      if (inside)
        in.load(at<T>(a.x_TH) + int64_t(t) * H + piece * PIECE + mine);
      else
        in.zero();
      float values[LANE_VALUES];
      in.floats(values);
      int4 data;
      uint32_t word = quantize<BLOCK>(values, a.floor, data) << (8 * (v.lane() / LANES % 4));
      word |= __shfl_xor_sync(~0u, word, LANES);
      word |= __shfl_xor_sync(~0u, word, 2 * LANES);
      if (v.lane() % (4 * LANES) == 0)
        words[piece * WORDS + v.lane() / (4 * LANES)] = word;
#pragma unroll
      for (int w = 0; w < View::RANKS; w++)
        if (inside && ranks >> w & 1)
          store16(at<char>(v.record(w, t), piece * PIECE + mine), data);
    }
  }
};

// All threads of a block call it. Sends rank w this rank's number of tokens, and its choices for each of w's experts.
template <class View>
__device__ void send_counts(const View &v, const int *expert, int choices, int tokens, int w, int *counted) {
  const int first = w * v.a.local_experts;
  for (int e = threadIdx.x; e < v.a.local_experts; e += THREADS)
    counted[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < choices; i += THREADS)
    if (const int e = expert[i] - first; expert[i] >= 0 && e >= 0 && e < v.a.local_experts)
      atomicAdd(&counted[e], 1);
  __syncthreads();
  int *to = at<int>(v.x.outbox(w), v.a.count_at);
  for (int e = threadIdx.x; e < v.a.local_experts; e += THREADS)
    to[1 + e] = counted[e];
  if (threadIdx.x == 0)
    to[0] = tokens;
  __syncthreads();
  if (v.warp() == 0)
    v.x.put(w, v.a.count_at, (1 + v.a.local_experts) * 4, COUNTS_FLAG);
}

// Loads the experts of all choices into shared memory, where every share reads them.
template <class View> __device__ void load_experts(const View &v, int *expert) {
  const int choices = v.tokens() * v.a.K;
  for (int i = threadIdx.x; i < choices; i += THREADS)
    expert[i] = v.expert(i);
}

template <class View, class Row>
__device__ void send_tokens(const View &v, const LowLatencyDispatch &a, const Row &row, int share, int *expert) {
  __shared__ uint32_t words[MAX_SCALE_WORDS];
  __shared__ int slots[MAX_CHOICES];
  __shared__ uint32_t serving; // bits of ranks
  const int K = v.a.K, W = v.world(), tokens = v.tokens(), choices = tokens * K;
  for (int t = share; t < tokens; t += gridDim.x) {
    if (threadIdx.x == 0)
      serving = 0;
    __syncthreads();
    // A choice's slot is the number of this rank's earlier choices of the same expert.
    for (int k = v.warp(); k < K; k += WARPS) {
      const int i = t * K + k, e = expert[i];
      int before = 0;
      for (int j = v.lane(); j < i; j += 32)
        before += expert[j] == e;
#pragma unroll
      for (int by = 16; by; by /= 2)
        before += __shfl_xor_sync(~0u, before, by);
      if (v.lane() == 0) {
        slots[k] = before;
        if (e >= 0)
          atomicOr(&serving, 1u << e / v.a.local_experts);
      }
    }
    __syncthreads();
    row.send(v, a, t, serving, words);
    __syncthreads();
    for (int w = v.warp(); w < W; w += WARPS) { // one warp for each rank sends the route, the scales and the flag
      const Address record = v.record(w, t);
      if (v.lane() < K) {
        const int e = expert[t * K + v.lane()];
        at<int>(record, v.a.route_at)[v.lane()] = e < 0 ? -1 : e << 16 | slots[v.lane()];
      }
      const bool serves = serving >> w & 1;
      if (serves)
        for (int i = v.lane(); i < a.scale_row / 4; i += 32)
          at<uint32_t>(record, v.a.scale_at)[i] =
              a.scale_in ? at<uint32_t>(a.scale_in, int64_t(t) * a.scale_row)[i] : words[i];
      __syncwarp();
      const int begin = serves ? 0 : v.a.route_at;
      v.x.put(w, t * v.a.record + begin, v.a.route_at + v.route_bytes() - begin, t);
    }
    __syncthreads(); // before the next token overwrites shared memory
  }
  // The last blocks, which have the fewest tokens, send the counts after their tokens.
  for (int w = gridDim.x - 1 - share; w < W; w += gridDim.x)
    send_counts(v, expert, choices, tokens, w, expert + choices);
}

// A crew calls it. Copies a row of `bytes` bytes from staging to the places that the lanes in `here` hold.
template <class View>
__device__ void copy_row(const View &v, const char *from, Address to, int bytes, int place, uint32_t here) {
  const int step = v.a.crew * 512, mine = v.member() * 512 + v.lane() * 16;
  for (int first = 0; first < bytes; first += AHEAD * step) {
    int4 data[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++)
      if (first + j * step + mine < bytes)
        data[j] = load16(from + first + j * step + mine);
    for (uint32_t left = here; left; left &= left - 1) {
      const int64_t p = __shfl_sync(~0u, place, __ffs(left) - 1);
#pragma unroll
      for (int j = 0; j < AHEAD; j++)
        if (first + j * step + mine < bytes)
          store16(at<char>(to, p * bytes + first + j * step + mine), data[j]);
    }
  }
}

template <class View> __device__ void receive_tokens(const View &v, const LowLatencyDispatch &a, int *shared) {
  const int W = v.world(), K = v.a.K, E = v.a.local_experts, rows = v.a.max_tokens * W;
  int *before = shared; // [W, E]: the number of rows of an expert that come from lower ranks
  const bool counted = threadIdx.x >= W || v.x.await(threadIdx.x, COUNTS_FLAG);
  if (__syncthreads_or(!counted))
    return;
  __shared__ int tokens[View::RANKS];
  if (threadIdx.x < W) {
    tokens[threadIdx.x] = *v.counts(threadIdx.x);
    if (blockIdx.x == 0)
      v.kept_tokens()[threadIdx.x] = tokens[threadIdx.x];
  }
  for (int e = threadIdx.x; e < E; e += THREADS) {
    int sum = 0;
    for (int w = 0; w < W; w++) {
      before[w * E + e] = sum;
      sum += v.counts(w)[1 + e];
    }
    if (blockIdx.x == 0) {
      at<int>(a.out_count_E)[e] = sum;
      if (sum > rows)
        v.x.fail(OVERFLOW, v.rank(), sum);
    }
  }
  __syncthreads();

  const int most_tokens = most(tokens, W);
  for (int i = v.crew(blockIdx.x); i < most_tokens * W; i += v.crews()) {
    const int w = (i + v.rank()) % W, t = i / W;
    if (t >= tokens[w])
      continue;
    const bool there = v.x.await(w, t); // every lane waits for itself
    v.sync_crew();
    const Address record = v.arrived(w, t);
    int place = NOT_HERE;
    if (there && v.lane() < K) {
      const int route = at<volatile int>(record, v.a.route_at)[v.lane()];
      const int e = (route >> 16) - v.rank() * E;
      if (route >= 0 && e < 0) {
        place = AT_LOWER_RANK;
      } else if (route >= 0 && e < E) {
        const int row = before[w * E + e] + (route & 0xFFFF);
        if (row < rows) // otherwise the overflow is recorded above
          place = e * rows + row;
      }
      if (v.member() == 0)
        v.kept(w, t)[v.lane()] = place;
    }
    const uint32_t here = __ballot_sync(~0u, place >= 0);
    if (here == 0)
      continue;
    copy_row(v, at<char>(record), a.out_ERH, a.row_bytes, place, here);
    if (a.out_scale == 0 || v.member() != 0)
      continue;
    const volatile uint32_t *words = at<uint32_t>(record, v.a.scale_at);
    for (int b = v.lane(); b - v.lane() < a.scales; b += 32) {
      const bool inside = b < a.scales;
      const uint32_t word = inside ? words[a.scale_kind == WORDS ? b : b / 4] : 0, byte = word >> (8 * (b % 4)) & 255;
      for (uint32_t left = here; left; left &= left - 1) {
        const int p = __shfl_sync(~0u, place, __ffs(left) - 1);
        if (!inside)
          continue;
        const Address to = a.out_scale + p / rows * a.scale_strides[0] + p % rows * a.scale_strides[1] +
                           b * a.scale_strides[2];
        if (a.scale_kind == WORDS)
          *at<uint32_t>(to) = word;
        else if (a.scale_kind == BYTES_TO_FLOATS)
          *at<float>(to) = power_of_two(byte);
        else
          *at<uint8_t>(to) = uint8_t(byte);
      }
    }
  }
}

template <class Wire, class Row>
__global__ void __launch_bounds__(THREADS, 1)
low_latency_dispatch(const __grid_constant__ LowLatencyDispatch a, Row row) {
  extern __shared__ int shared[]; // the experts of all choices, then a count for each local expert
  Shares shares(a.common);
  const Wire x(a.common);
  const View<Wire> v{a.common, x};
  if (a.common.send && x.live) {
    load_experts(v, shared);
    shares.send([&](int share) { send_tokens(v, a, row, share, shared); });
  }
  __syncthreads();
  if (a.common.receive && x.live)
    receive_tokens(v, a, shared);
  x.finish(a.common.receive);
}

} // namespace nvlink
