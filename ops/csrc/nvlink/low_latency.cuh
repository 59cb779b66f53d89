// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine of few tokens at low latency, over any wire.
//
// In dispatch, each rank has a region in every staging, where a token has a record at its own index. A token can
// therefore be sent before anything is counted. Its record holds its row, its scales and its route: for each choice,
// the expert, and the index of its row among the rows of the same rank and expert. A token is sent once to each rank
// that serves it. Other ranks get only its route. The rows of an expert are in the order of (rank, token, choice).
// Combine sends a row for each choice, because only the token's owner has the weights. There the rows of a token are
// in the order of (rank, choice), so that those from one rank lie together.
//
// A Wire is an exchange of its kind (exchange.cuh), and has
//   RANKS                         the most ranks, at most 32
//   outbox(w)                     where this rank writes its message for rank w
//   put(w, begin, bytes, chunk)   all lanes of a warp call it, after a barrier behind the writes. Brings this part of
//                                 the message to rank w, and announces the chunk
//   half(rank)                    this exchange's half of the own staging, where the messages of others arrive
#pragma once
#include "exchange.cuh"
#include "mxfp8.cuh"

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

__device__ __forceinline__ int most(const int *values, int count) {
  int most = 0;
  for (int i = 0; i < count; i++)
    most = max(most, values[i]);
  return most;
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

template <class Action> int with_row(const LowLatencyDispatch &a, Action action) {
  switch (a.block * 4 + a.dtype) {
  case 32 * 4 + BF16: return action(Quantized<__nv_bfloat16, 32>());
  case 32 * 4 + FP16: return action(Quantized<__half, 32>());
  case 128 * 4 + BF16: return action(Quantized<__nv_bfloat16, 128>());
  case 128 * 4 + FP16: return action(Quantized<__half, 128>());
  default: return action(Plain());
  }
}

template <class Action> int with_types(const LowLatencyCombine &a, Action action) {
  return with_type(a.dtype, [&](auto in) {
    return a.out_dtype == FP16 ? action(in, Type<__half>()) : action(in, Type<__nv_bfloat16>());
  });
}

// The functions of kernels.h, for one wire.
template <class Wire> int launch_over(const LowLatencyDispatch &a, int sms, Address stream) {
  const LowLatency &c = a.common;
  const int bytes = max(c.T * c.K + c.local_experts, c.group.world * c.local_experts) * int(sizeof(int));
  return with_row(a, [&](auto row) {
    low_latency_dispatch<Wire, decltype(row)>
        <<<sms, THREADS, bytes, reinterpret_cast<cudaStream_t>(stream)>>>(a, row);
    return int(cudaGetLastError());
  });
}

template <class Wire> int launch_over(const LowLatencyCombine &a, int sms, Address stream) {
  return with_types(a, [&](auto in, auto out) {
    low_latency_combine<Wire, typename decltype(in)::type, typename decltype(out)::type>
        <<<sms, THREADS, 0, reinterpret_cast<cudaStream_t>(stream)>>>(a);
    return int(cudaGetLastError());
  });
}

template <class Wire> int load_over() {
  const auto load = [](auto *kernel, int most_shared_bytes) {
    if (const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared_bytes))
      return error;
    cudaFuncAttributes unused;
    return int(cudaFuncGetAttributes(&unused, kernel));
  };
  for (int block : {0, 32, 128})
    for (int dtype : {BF16, FP16}) {
      LowLatencyDispatch a;
      a.block = block;
      a.dtype = dtype;
      if (int error = with_row(a, [&](auto row) {
            return load(low_latency_dispatch<Wire, decltype(row)>, MOST_SHARED_BYTES);
          }))
        return error;
    }
  for (int dtype : {BF16, FP16, FP32})
    for (int out_dtype : {BF16, FP16}) {
      LowLatencyCombine a;
      a.dtype = dtype;
      a.out_dtype = out_dtype;
      if (int error = with_types(a, [&](auto in, auto out) {
            return load(low_latency_combine<Wire, typename decltype(in)::type, typename decltype(out)::type>, 0);
          }))
        return error;
    }
  return 0;
}

} // namespace nvlink
