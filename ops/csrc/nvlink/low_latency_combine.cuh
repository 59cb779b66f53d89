// SPDX-License-Identifier: Apache-2.0
// Combine of few tokens at low latency (low_latency.cuh): a kernel over any wire.
#pragma once
#include "low_latency_view.cuh"
#include "mxfp8.cuh"

namespace nvlink {

// Sends rows of y back to their tokens' ranks. The staging there has a row for each choice.
template <class In, class Out, class View>
__device__ void send_rows(const View &v, const LowLatencyCombine &a, int share) {
  const int W = v.world(), K = v.a.K, H = v.a.H, row_bytes = H * int(sizeof(Out)), step = v.a.crew * 256;
  const int mine = v.member() * 256 + v.lane() * 8;
  __shared__ int tokens[View::RANKS];
  if (threadIdx.x < W)
    tokens[threadIdx.x] = v.kept_tokens()[threadIdx.x];
  __syncthreads();
  const int most_tokens = most(tokens, W);
  for (int i = v.crew(share); i < most_tokens * W; i += v.crews()) {
    const int w = (i + v.rank() + 1) % W, t = i / W;
    if (t >= tokens[w])
      continue;
    const int place = v.lane() < K ? v.kept(w, t)[v.lane()] : NOT_HERE;
    const uint32_t here = __ballot_sync(~0u, place >= 0);
    const int lower = __popc(__ballot_sync(~0u, place == AT_LOWER_RANK));
    if (here == 0)
      continue;
    const int64_t begin = (int64_t(t) * K + lower) * row_bytes;
    int sent = 0;
    for (uint32_t left = here; left;) {
      const In *from[SENT_AHEAD];
      Out *to[SENT_AHEAD];
#pragma unroll
      for (int n = 0; n < SENT_AHEAD; n++) {
        const int k = __ffs(left) - 1; // -1 if no row is left
        const int64_t p = __shfl_sync(~0u, place, k & 31);
        from[n] = k < 0 ? nullptr : at<In>(a.y_ERH) + p * H;
        to[n] = at<Out>(v.x.outbox(w), begin + int64_t(sent++) * row_bytes);
        left &= left - 1;
      }
      for (int first = mine; first < H; first += AHEAD * step) {
        Piece<In, 8> in[SENT_AHEAD][AHEAD];
#pragma unroll
        for (int n = 0; n < SENT_AHEAD; n++)
#pragma unroll
          for (int j = 0; j < AHEAD; j++)
            if (from[n] && first + j * step < H)
              in[n][j].load(from[n] + first + j * step);
#pragma unroll
        for (int n = 0; n < SENT_AHEAD; n++)
#pragma unroll
          for (int j = 0; j < AHEAD; j++)
            if (from[n] && first + j * step < H) {
              float values[8];
              in[n][j].floats(values);
              Piece<Out, 8> out;
              out.set(values);
              out.store(to[n] + first + j * step);
            }
      }
    }
    v.sync_crew();
    if (v.member() == 0)
      v.x.put(w, begin, int64_t(__popc(here)) * row_bytes, t);
  }
}

// Adds up the weighted rows of each token, in ascending choice. A block computes one token. If there are more blocks
// than tokens, it computes a slice of a token's columns.
template <class Out, class View> __device__ void sum_rows(const View &v, const LowLatencyCombine &a) {
  constexpr int COLUMNS = THREADS * 8; // what a block computes at a time
  __shared__ int rows[MAX_CHOICES]; // of each choice in staging. NOT_HERE for a dropped choice
  const int K = v.a.K, H = v.a.H, tokens = v.tokens();
  const int slices = max(1, min((H + COLUMNS - 1) / COLUMNS, int(gridDim.x) / max(tokens, 1)));
  for (int i = blockIdx.x; i < tokens * slices; i += gridDim.x) {
    const int t = i / slices;
    __syncthreads(); // all threads have read the rows of the token before
    if (v.warp() == 0) {
      const int e = v.lane() < K ? v.expert(t * K + v.lane()) : -1;
      const int from = e < 0 ? v.world() : e / v.a.local_experts;
      int before = 0;
      for (int k = 0; k < K; k++) {
        const int other = __shfl_sync(~0u, from, k);
        before += other < from || (other == from && k < v.lane());
      }
      rows[v.lane()] = e < 0 ? NOT_HERE : t * K + before;
      if (e >= 0)
        v.x.await(from, t);
    }
    __syncthreads();
    for (int first = i % slices * COLUMNS + threadIdx.x * 8; first < H; first += slices * COLUMNS) {
      float sum[8] = {};
      for (int k0 = 0; k0 < K; k0 += SUMMED_AHEAD) {
        Piece<Out, 8> in[SUMMED_AHEAD];
        bool there[SUMMED_AHEAD];
#pragma unroll
        for (int j = 0; j < SUMMED_AHEAD; j++) {
          const int64_t row = k0 + j < K ? rows[k0 + j] : NOT_HERE;
          there[j] = row >= 0;
          if (there[j])
            in[j].load(at<Out>(v.x.half(v.rank())) + row * H + first);
        }
#pragma unroll
        for (int j = 0; j < SUMMED_AHEAD; j++)
          if (there[j]) {
            const float weight = at<float>(a.weight_TK)[t * K + k0 + j];
            float values[8];
            in[j].floats(values);
#pragma unroll
            for (int n = 0; n < 8; n++)
              sum[n] = __fadd_rn(sum[n], __fmul_rn(weight, values[n]));
          }
      }
      Piece<Out, 8> out;
      out.set(sum);
      out.store(at<Out>(a.out_TH) + int64_t(t) * H + first);
    }
  }
}

template <class Wire, class In, class Out>
__global__ void __launch_bounds__(THREADS, 1) low_latency_combine(const __grid_constant__ LowLatencyCombine a) {
  Shares shares(a.common);
  const Wire x(a.common);
  const View<Wire> v{a.common, x};
  if (a.common.send && x.live)
    shares.send([&](int share) { send_rows<In, Out>(v, a, share); });
  __syncthreads();
  if (a.common.receive && x.live)
    sum_rows<Out>(v, a);
  x.finish(a.common.receive);
}

} // namespace nvlink
