// SPDX-License-Identifier: Apache-2.0
// Sends expert-sorted rows back to their tokens. The rank of the experts adds up a token's rows in ascending choice
// and rounds the sum once to the type in which it travels. The token's owner adds up the rows that arrive in ascending
// rank. Both sums are in float32.
#include "rows.cuh"

namespace nvlink {
namespace {

constexpr int ROWS_AHEAD = 4; // rows whose loads are in flight together at the owner

// Rows that travel as values of T.
template <class T> struct Plain {
  static constexpr int VALUES = 8; // values of a piece that a lane holds
  static constexpr int AHEAD = 2;  // pieces whose loads are in flight together
  using Unit = T;
  using Out = T;

  __device__ __forceinline__ void encode(int, const float (&sum)[VALUES], Piece<Unit, VALUES> &out) { out.set(sum); }
  __device__ __forceinline__ void flush(const RowsView &, int, int64_t, int, bool) {}
  struct Loaded {
    Piece<Unit, VALUES> data;
  };
  __device__ __forceinline__ void load(const RowsView &, int64_t, int, const Unit *from, Loaded &in) const {
    in.data.load(from);
  }
  __device__ __forceinline__ void add(const Loaded &in, float (&sum)[VALUES]) const {
    float values[VALUES];
    in.data.floats(values);
#pragma unroll
    for (int i = 0; i < VALUES; i++)
      sum[i] = __fadd_rn(sum[i], values[i]);
  }
};

// Rows that travel as MXFP8. The owner's sums become OUT.
template <class OUT, int BLOCK> struct Quantized {
  static constexpr int VALUES = LANE_VALUES;
  static constexpr int AHEAD = 1;
  using Unit = uint8_t;
  using Out = OUT;
  bool floor;
  ScaleWords<BLOCK> words;

  __device__ __forceinline__ void encode(int piece, const float (&sum)[VALUES], Piece<Unit, VALUES> &out) {
    words.add(piece, quantize<BLOCK>(sum, floor, out.raw[0]));
  }
  __device__ __forceinline__ void flush(const RowsView &v, int w, int64_t row, int piece, bool last) {
    if (last || words.full(piece))
      words.store(v.scales(w, row), piece);
  }
  struct Loaded {
    Piece<Unit, VALUES> data;
    uint8_t byte;
  };
  __device__ __forceinline__ void load(const RowsView &v, int64_t row, int value, const Unit *from, Loaded &in) const {
    in.data.load(from);
    in.byte = *static_cast<const volatile uint8_t *>(v.scales(v.rank(), row) + value / BLOCK);
  }
  __device__ __forceinline__ void add(const Loaded &in, float (&sum)[VALUES]) const {
    const float scale = power_of_two(in.byte);
    const int4 data = in.data.raw[0];
    const uint32_t quads[4] = {uint32_t(data.x), uint32_t(data.y), uint32_t(data.z), uint32_t(data.w)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float values[4];
      from_e4m3x4(quads[i], values);
      // Not fused: a product beyond float32's range becomes Inf before it is added.
#pragma unroll
      for (int j = 0; j < 4; j++)
        sum[4 * i + j] = __fadd_rn(sum[4 * i + j], __fmul_rn(values[j], scale));
    }
  }
};

template <class In, class Wire> struct CombineWork {
  static constexpr int VALUES = Wire::VALUES;
  static constexpr int PIECE = 32 * VALUES;
  static constexpr int AHEAD = Wire::AHEAD;
  using Unit = typename Wire::Unit;
  // If a token has one row only, the row needs no sum. These tell whether the row is then copied in its 16-bit type:
  // when it is sent, and when it has come back.
  static constexpr bool COPIES = sizeof(In) == 2 && std::is_same_v<In, Unit>;
  static constexpr bool COPIES_BACK = sizeof(Unit) == 2 && std::is_same_v<Unit, typename Wire::Out>;
  // How many loads are in flight together: of a token's rows on this rank, of the pieces of its only row on this rank,
  // and of the pieces of its only row that came back. Registers limit them. If three rows are summed, a few registers
  // are spilled.
  static constexpr int SUMMED_AHEAD = sizeof(In) == 4 ? 1 : sizeof(Unit) == 2 ? 3 : 2;
  static constexpr int ONE_AHEAD = COPIES ? 8 : sizeof(In) == 2 ? 32 / VALUES : 1;
  static constexpr int ONE_AHEAD_BACK = COPIES_BACK ? 8 : sizeof(In) == 2 && sizeof(Unit) == 1 ? 32 / VALUES : 1;
  const Combine &a;
  const RowsView v;
  const Wire wire;

  // The items to send are the chunks of the ranks in turn, this rank last. Item i is the nth chunk of its owner, in
  // the order of RowsView::turned. An owner may have fewer chunks than others.
  __device__ int sends() const { return v.most_chunks() * v.world(); }
  __device__ int owner(int i) const { return (i + v.rank() + 1) % v.world(); }
  __device__ int nth(int i) const { return i / v.world(); }

  __device__ Unit *row_at(int w, int64_t row) const {
    return at<Unit>(Address(v.data(w, row, a.rows.H * int(sizeof(Unit)))));
  }

  // Copies the `left` values of a row from this lane's first one on. With SUM, -0 becomes 0 as in a sum. The loads of
  // PIECES pieces are in flight together. The rest of the row is copied with half as many.
  template <bool SUM, int PIECES, class T>
  __device__ __forceinline__ void copy(const T *from, T *to, int left) const {
#pragma unroll 1
    for (; left > (PIECES - 1) * PIECE; left -= PIECES * PIECE) {
      Piece<T, VALUES> data[PIECES];
#pragma unroll
      for (int j = 0; j < PIECES; j++)
        data[j].load(from + j * PIECE);
#pragma unroll
      for (int j = 0; j < PIECES; j++) {
        if (SUM)
          data[j].add_zero();
        data[j].store(to + j * PIECE);
      }
      from += PIECES * PIECE;
      to += PIECES * PIECE;
    }
    if constexpr (PIECES > 1)
      copy<SUM, PIECES / 2>(from, to, left);
  }

  // Sends this rank's only row for a token, at place p, to row r of rank w.
  __device__ __forceinline__ void send_one(int w, int64_t r, int64_t p) {
    const int H = a.rows.H, mine = v.lane() * VALUES, last = (H - 1) / PIECE;
    const In *from = at<In>(a.y_PH) + p * H + mine;
    Unit *to = row_at(w, r) + mine;
    if constexpr (COPIES) {
      copy<false, ONE_AHEAD>(from, to, H - mine); // the owner's sum makes 0 of -0
    } else {
      Wire out = wire;
      for (int first = 0; first <= last; first += ONE_AHEAD) {
        Piece<In, VALUES> in[ONE_AHEAD];
#pragma unroll
        for (int j = 0; j < ONE_AHEAD; j++) {
          if ((first + j) * PIECE + mine < H)
            in[j].load(from + (first + j) * PIECE);
          else
            in[j].zero();
        }
#pragma unroll
        for (int j = 0; j < ONE_AHEAD; j++) {
          if (first + j > last)
            break;
          float sum[VALUES];
          in[j].floats(sum);
#pragma unroll
          for (int i = 0; i < VALUES; i++)
            sum[i] = __fadd_rn(0.0f, sum[i]); // -0 becomes 0, as in a longer sum
          send_piece(out, w, r, first + j, last, sum, to);
        }
      }
    }
  }

  // Sends the sum of a token's rows to row r of rank w. Each lane in `here` holds the place of one of these rows.
  __device__ __forceinline__ void send_sum(int w, int64_t r, int place, uint32_t here) {
    const int H = a.rows.H, mine = v.lane() * VALUES, last = (H - 1) / PIECE;
    Unit *to = row_at(w, r) + mine;
    Wire out = wire;
    for (int first = 0; first <= last; first += AHEAD) {
      float sum[AHEAD][VALUES] = {};
      for (uint32_t left = here; left;) {
        Piece<In, VALUES> in[SUMMED_AHEAD][AHEAD];
        bool there[SUMMED_AHEAD];
#pragma unroll
        for (int n = 0; n < SUMMED_AHEAD; n++) {
          there[n] = left != 0;
          const int64_t p = __shfl_sync(~0u, place, (__ffs(left) - 1) & 31);
          left &= left - 1;
          if (there[n])
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
              if ((first + j) * PIECE + mine < H)
                in[n][j].load(at<In>(a.y_PH) + p * H + (first + j) * PIECE + mine);
        }
#pragma unroll
        for (int n = 0; n < SUMMED_AHEAD; n++)
          if (there[n])
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
              if ((first + j) * PIECE + mine < H) {
                float values[VALUES];
                in[n][j].floats(values);
#pragma unroll
                for (int i = 0; i < VALUES; i++)
                  sum[j][i] = __fadd_rn(sum[j][i], values[i]);
              }
      }
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        const int piece = first + j;
        if (piece > last)
          break;
        send_piece(out, w, r, piece, last, sum[j], to);
      }
    }
  }

  __device__ __forceinline__ void send_piece(Wire &out, int w, int64_t r, int piece, int last,
                                             const float (&sum)[VALUES], Unit *to) {
    Piece<Unit, VALUES> data;
    out.encode(piece, sum, data);
    if (piece * PIECE + v.lane() * VALUES < a.rows.H)
      data.store(to + piece * PIECE);
    out.flush(v, w, r, piece, piece == last);
  }

  __device__ void send(int i) {
    const int w = owner(i);
    if (nth(i) >= v.chunks_of(w))
      return;
    const int2 range = v.arriving(w, v.turned(w, nth(i)));
    // From a row's index among the R here to its index among the S of rank w.
    const int64_t shift = int64_t(v.segment(PEER_SEND_BASE, w)) - v.segment(RECV_BASE, w);
    const int64_t end = range.x + range.y;
    int following = range.x + v.warp() < end ? v.place(range.x + v.warp()) : -1;
    for (int64_t r = range.x + v.warp(); r < end; r += v.warps()) {
      const int place = following;
      if (r + v.warps() < end)
        following = v.place(r + v.warps());
      const uint32_t here = __ballot_sync(~0u, place >= 0);
      if (ONE_AHEAD > 1 && __popc(here) == 1)
        send_one(w, r + shift, __shfl_sync(~0u, place, __ffs(here) - 1));
      else
        send_sum(w, r + shift, place, here);
      if (a.rows.weights && v.lane() < a.rows.K)
        v.weights(w, r + shift)[v.lane()] = place >= 0 ? at<float>(a.weight_P)[place] : 0.0f;
    }
  }

  __device__ void announce(int i) {
    const int w = owner(i);
    if (threadIdx.x == 0 && nth(i) < v.chunks_of(w))
      v.x.announce(w, v.turned(w, nth(i)));
  }

  // The items to receive are the chunks of this rank's tokens.
  __device__ bool skip(int) const { return false; }
  __device__ void await(int i) const {
    const int c = v.turned(v.rank(), i);
    for (int w = 0; w < v.world(); w++)
      if (v.sent(w, c))
        v.x.await(w, c);
  }

  __device__ void receive(int i) {
    const int c = v.turned(v.rank(), i);
    const int64_t end = v.token_end(c);
    int64_t t = v.token_begin(c) + v.warp();
    int following = t < end ? v.slot(t) : -1;
    for (; t < end; t += v.warps()) {
      const int slot = following;
      if (t + v.warps() < end)
        following = v.slot(t + v.warps());
      int own;
      const int count = rows_back(slot, own);
      if (ONE_AHEAD_BACK > 1 && count == 1)
        one_back(t, own);
      else
        add_up<ROWS_AHEAD, 1>(t, own, count);
      if (a.rows.weights)
        weights_back(t);
    }
  }

  // Writes token t, of which one row came back. Lane 0's `own` is that row.
  __device__ __forceinline__ void one_back(int64_t t, int own) const {
    if constexpr (COPIES_BACK) {
      const int H = a.rows.H, mine = v.lane() * VALUES, row = __shfl_sync(~0u, own, 0);
      copy<true, ONE_AHEAD_BACK>(row_at(v.rank(), row) + mine, at<Unit>(a.out_TH) + t * H + mine, H - mine);
    } else {
      add_up<1, ONE_AHEAD_BACK>(t, own, 1);
    }
  }

  // Writes token t, the sum of the `count` rows that came back. Lane n's `own` is the n-th of these rows. The loads of
  // PIECES pieces of ROWS rows are in flight together. If PIECES is more than 1, count must be ROWS.
  template <int ROWS, int PIECES> __device__ __forceinline__ void add_up(int64_t t, int own, int count) const {
    const int H = a.rows.H, mine = v.lane() * VALUES;
    for (int first = mine; first - mine < H; first += PIECES * PIECE) {
      typename Wire::Loaded in[PIECES][ROWS];
      const auto load = [&](int n, int j) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
          const int row = __shfl_sync(~0u, own, n + i), value = first + j * PIECE;
          if (n + i < count && value < H)
            wire.load(v, row, value, row_at(v.rank(), row) + value, in[j][i]);
        }
      };
#pragma unroll
      for (int j = 0; j < PIECES; j++)
        load(0, j);
#pragma unroll
      for (int j = 0; j < PIECES; j++) {
        float sum[VALUES] = {};
        for (int n = 0; n == 0 || (PIECES == 1 && n < count); n += ROWS) {
          if (n > 0)
            load(n, j);
#pragma unroll
          for (int i = 0; i < ROWS; i++)
            if (n + i < count && first + j * PIECE < H)
              wire.add(in[j][i], sum);
        }
        if (first + j * PIECE < H) {
          Piece<typename Wire::Out, VALUES> out;
          out.set(sum);
          out.store(at<typename Wire::Out>(a.out_TH) + t * H + first + j * PIECE);
        }
      }
    }
  }

  // Sets lane n's `row` to the n-th of a token's rows that came back, in ascending rank. Returns how many came back.
  // slot: what RowsView::slot returned for the token.
  __device__ int rows_back(int slot, int &row) const {
    const int own = slot < 0 ? -1 : slot + v.segment(SEND_BASE, v.lane());
    const uint32_t valid = __ballot_sync(~0u, own >= 0);
    const int count = __popc(valid);
    const int from = v.lane() < count ? __fns(valid, 0, v.lane() + 1) : 0;
    const int found = __shfl_sync(~0u, own, from);
    row = v.lane() < count ? found : 0;
    return min(count, MAX_RANKS); // count is never more, but the compiler spills fewer registers if it knows that
  }

  __device__ void weights_back(int64_t t) const {
    const int K = a.rows.K;
    for (int k = v.lane(); k < K; k += 32) {
      float sum = 0;
      for (int w = 0; w < v.world(); w++)
        if (const int slot = at<int>(a.rows.slot_WT)[w * a.rows.T + t]; slot >= 0) {
          const int row = slot + v.segment(SEND_BASE, w);
          sum = __fadd_rn(sum, static_cast<const volatile float *>(v.weights(v.rank(), row))[k]);
        }
      at<float>(a.out_weight_TK)[t * K + k] = sum;
    }
  }
};

template <class In, class Wire>
__global__ void __launch_bounds__(TEAM_THREADS *TEAMS, 1) combine(const __grid_constant__ Combine a, Wire wire) {
  Exchange x(a.rows.group);
  const RowsView v{a.rows, x};
  CombineWork<In, Wire> work{a, v, wire};
  exchange(x, work, work.sends(), a.rows.chunks);
  x.finish();
}

// Rows in float32 become any type. Other rows keep theirs.
template <class Action> int with_types(const Combine &a, Action action) {
  const bool floor = a.rows.floor;
  return with_type(a.dtype, [&](auto in) {
    return with_type(a.out_dtype, [&](auto out) {
      using In = typename decltype(in)::type;
      using Out = typename decltype(out)::type;
      if constexpr (std::is_same_v<In, Out> || std::is_same_v<In, float>)
        return a.rows.block == 32    ? action(in, Quantized<Out, 32>{floor, {}})
               : a.rows.block == 128 ? action(in, Quantized<Out, 128>{floor, {}})
                                     : action(in, Plain<Out>{});
      else
        return int(cudaErrorInvalidValue);
    });
  });
}

} // namespace

int launch(const Combine &a, int sms, Address stream) {
  return with_types(a, [&](auto in, auto wire) {
    using In = typename decltype(in)::type;
    combine<In><<<sms, dim3(TEAM_THREADS, TEAMS), 0, reinterpret_cast<cudaStream_t>(stream)>>>(a, wire);
    return int(cudaGetLastError());
  });
}

int load_combine() {
  for (int block : {0, 32, 128})
    for (int in_dtype : {BF16, FP16, FP32})
      for (int out_dtype : {BF16, FP16, FP32}) {
        if (in_dtype != out_dtype && in_dtype != FP32)
          continue;
        Combine a;
        a.rows.block = block;
        a.dtype = in_dtype;
        a.out_dtype = out_dtype;
        const int error = with_types(a, [&](auto in, auto wire) {
          cudaFuncAttributes unused;
          return int(cudaFuncGetAttributes(&unused, combine<typename decltype(in)::type, decltype(wire)>));
        });
        if (error)
          return error;
      }
  return 0;
}

} // namespace nvlink
