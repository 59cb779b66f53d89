// SPDX-License-Identifier: Apache-2.0
// Sends tokens to the ranks of their experts. Each token is read and quantized once, and sent once to each rank. The
// rows that arrive, and the rows of this rank's own tokens, are stored to their places among the expert-sorted rows.
#include "rows.cuh"

namespace nvlink {
namespace {

constexpr int AHEAD = 4; // pieces whose loads are in flight together
constexpr int AHEAD_QUANTISED = 2; // the same for pieces that are quantized

// All lanes of a warp call it. Calls action(lane, value) for each lane in `lanes`, with the value that it holds.
template <class T, class Action> __device__ __forceinline__ void each(uint32_t lanes, T value, Action action) {
  for (; lanes; lanes &= lanes - 1) {
    const int lane = __ffs(lanes) - 1;
    action(lane, __shfl_sync(~0u, value, lane));
  }
}

// The addresses that a warp writes a row to. Each lane in `peers` holds one in the staging of another rank. Each lane
// in `here` holds one of a place on this rank.
struct Targets {
  const Dispatch &a;
  const RowsView &v;
  int row, place;
  uint32_t peers, here;
  Address peer_row, own_row;

  // row: in lane w, the row in the staging of rank w, or -1. place: in lane k, the place of choice k, or -1. bytes:
  // size of a row.
  __device__ __forceinline__ Targets(const Dispatch &a, const RowsView &v, int row, int place, int bytes)
      : a(a), v(v), row(row), place(place), peers(__ballot_sync(~0u, row >= 0)), here(__ballot_sync(~0u, place >= 0)),
        peer_row(row >= 0 ? Address(v.data(v.lane(), row, bytes)) : 0), own_row(a.out_PH + int64_t(place) * bytes) {}

  // Calls store(row) for the address of each target.
  template <class Store> __device__ __forceinline__ void rows(Store store) const {
    each(peers, peer_row, [&](int, Address row) { store(row); });
    each(here, own_row, [&](int, Address row) { store(row); });
  }
  __device__ __forceinline__ void weight(float weight) const {
    if (place >= 0)
      at<float>(a.out_weight_P)[place] = weight;
  }
  __device__ __forceinline__ void own_scale(int block, uint8_t byte, bool inside) const {
    each(here, place, [&](int, int64_t p) {
      if (inside)
        *at<uint8_t>(a.out_scale, p * a.scale_stride_p + block * a.scale_stride_b) = byte;
    });
  }
};

// Sends a token as it is.
struct Plain {
  int bytes; // of a row

  __device__ __forceinline__ int row_bytes() const { return bytes; }

  __device__ __forceinline__ void send(Address x, int64_t source, const Targets &to) const {
    copy(at<char>(x, source * bytes), bytes, to);
  }
  static __device__ __forceinline__ void copy(const char *from, int bytes, const Targets &to) {
    const int mine = to.v.lane() * LANE_BYTES;
    for (int first = mine; first - mine < bytes; first += AHEAD * PIECE_BYTES) {
      int4 data[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (first + i * PIECE_BYTES < bytes)
          data[i] = load16(from + first + i * PIECE_BYTES);
      to.rows([&](Address row) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
          if (first + i * PIECE_BYTES < bytes)
            store16(at<char>(row, first + i * PIECE_BYTES), data[i]);
      });
    }
  }
};

// Sends a token quantized to MXFP8.
template <class T, int BLOCK> struct Quantized {
  int H;
  bool floor;

  __device__ __forceinline__ int row_bytes() const { return H; }

  __device__ __forceinline__ void send(Address x, int64_t source, const Targets &to) const {
    constexpr int PIECE = 32 * LANE_VALUES;
    const int mine = to.v.lane() * LANE_VALUES;
    const T *from = at<T>(x) + source * H;
    ScaleWords<BLOCK> words;
    const int last = (H - 1) / PIECE;
    static_assert(ScaleWords<BLOCK>::PIECES % AHEAD_QUANTISED == 0);
    for (int piece = 0; piece <= last; piece += AHEAD_QUANTISED) {
      const int first = piece * PIECE + mine;
      Piece<T, LANE_VALUES> in[AHEAD_QUANTISED];
#pragma unroll
      for (int i = 0; i < AHEAD_QUANTISED; i++) {
        if (first + i * PIECE < H)
          in[i].load(from + first + i * PIECE);
        else
          in[i].zero();
      }
      int4 data[AHEAD_QUANTISED];
#pragma unroll
      for (int i = 0; i < AHEAD_QUANTISED; i++) {
        float values[LANE_VALUES];
        in[i].floats(values);
        words.add(piece + i, quantize<BLOCK>(values, floor, data[i]));
      }
      to.rows([&](Address row) {
#pragma unroll
        for (int i = 0; i < AHEAD_QUANTISED; i++)
          if (first + i * PIECE < H)
            store16(at<char>(row, first + i * PIECE), data[i]);
      });
      const int end = min(piece + AHEAD_QUANTISED - 1, last);
      if (words.full(end) || end == last) {
        each(to.peers, to.row, [&](int w, int64_t row) { words.store(to.v.scales(w, row), end); });
        words.each_byte(end, (H + BLOCK - 1) / BLOCK,
                        [&](int b, uint8_t byte, bool inside) { to.own_scale(b, byte, inside); });
      }
    }
  }
};

template <class Row> struct DispatchWork {
  const Dispatch &a;
  const RowsView v;
  const Row wire;

  // The items to send are the chunks of this rank's tokens. Rows that this rank serves go to their places at once.
  __device__ void send(int i) {
    const Rows &rows = a.rows;
    const int c = v.turned(v.rank(), i);
    const int64_t end = v.token_end(c);
    int64_t t = v.token_begin(c) + v.warp();
    int following = t < end ? v.slot(t) : -1;
    for (; t < end; t += v.warps()) {
      const bool nowhere = __ballot_sync(~0u, following >= 0) == 0;
      const int own_slot = __shfl_sync(~0u, following, v.rank());
      const bool to_peer = following >= 0 && v.lane() != v.rank();
      const int peer_slot = to_peer ? following + v.segment(PEER_RECV_BASE, v.lane()) : -1;
      if (t + v.warps() < end)
        following = v.slot(t + v.warps());
      if (nowhere)
        continue;
      const int place = own_slot >= 0 ? v.place(own_slot + v.segment(RECV_BASE, v.rank())) : -1;
      const Targets to(a, v, peer_slot, place, wire.row_bytes());
      wire.send(a.x_TH, t, to);
      if (rows.weights) {
        const bool mine = v.lane() < rows.K;
        const float weight = mine ? at<float>(a.weight_TK)[t * rows.K + v.lane()] : 0;
        each(to.peers, to.row, [&](int w, int64_t row) {
          if (mine)
            v.weights(w, row)[v.lane()] = weight;
        });
        to.weight(weight);
      }
    }
  }

  __device__ void announce(int i) {
    const int c = v.turned(v.rank(), i);
    if (threadIdx.x < v.world() && threadIdx.x != v.rank())
      v.x.announce(threadIdx.x, c);
  }

  // The items to receive are the chunks of the other ranks in turn.
  __device__ int receives() const { return v.most_chunks() * (v.world() - 1); }
  __device__ int source(int i) const { return (i % (v.world() - 1) + v.rank() + 1) % v.world(); }
  __device__ int nth(int i) const { return i / (v.world() - 1); }
  __device__ int chunk(int i) const { return v.turned(source(i), nth(i)); }
  __device__ bool skip(int i) const {
    return nth(i) >= v.chunks_of(source(i)) || v.arriving(source(i), chunk(i)).y == 0;
  }
  __device__ void await(int i) const { v.x.await(source(i), chunk(i)); }

  __device__ void receive(int i) {
    const Rows &rows = a.rows;
    const int2 range = v.arriving(source(i), chunk(i));
    const int bytes = wire.row_bytes();
    const int scale_count = rows.block ? (rows.H + rows.block - 1) / rows.block : 0;
    const int64_t end = range.x + range.y;
    int following = range.x + v.warp() < end ? v.place(range.x + v.warp()) : -1;
    for (int64_t r = range.x + v.warp(); r < end; r += v.warps()) {
      const Targets to(a, v, -1, following, bytes);
      if (r + v.warps() < end)
        following = v.place(r + v.warps());
      // Scales and weights are small, so they are loaded before the data.
      const volatile uint8_t *scales = v.scales(v.rank(), r);
      uint8_t byte = v.lane() < scale_count ? scales[v.lane()] : 0;
      const float weight =
          rows.weights && to.place >= 0 ? *static_cast<volatile float *>(v.weights(v.rank(), r) + v.lane()) : 0;
      Plain::copy(v.data(v.rank(), r, bytes), bytes, to);
      for (int b = v.lane(); b - v.lane() < scale_count; b += 32) {
        if (b >= 32 && b < scale_count)
          byte = scales[b];
        to.own_scale(b, byte, b < scale_count);
      }
      if (rows.weights)
        to.weight(weight);
    }
  }

  // Writes zeros to the rows that pad a group, and weights of 0 also to the rows behind the last group.
  __device__ void pad() {
    const Rows &rows = a.rows;
    const int bytes = wire.row_bytes(), count = rows.block ? (rows.H + rows.block - 1) / rows.block : 0;
    const int64_t warp = int64_t(team()) * v.warps() + v.warp(), warps = int64_t(teams()) * v.warps();
    const int *ends = at<int>(a.group_ends_E), *sizes = at<int>(a.group_sizes_E);
    for (int64_t i = warp; i < int64_t(a.local_experts) * ROW_ALIGNMENT; i += warps) {
      const int e = int(i / ROW_ALIGNMENT), begin = e ? ends[e - 1] : 0;
      const int64_t p = begin + sizes[e] + i % ROW_ALIGNMENT;
      if (p >= ends[e] || p >= rows.P)
        continue;
      for (int byte = v.lane() * LANE_BYTES; byte < bytes; byte += PIECE_BYTES)
        store16(at<char>(a.out_PH, p * bytes + byte), make_int4(0, 0, 0, 0));
      for (int b = v.lane(); b < count; b += 32)
        at<uint8_t>(a.out_scale)[p * a.scale_stride_p + b * a.scale_stride_b] = 0;
      if (rows.weights && v.lane() == 0)
        at<float>(a.out_weight_P)[p] = 0;
    }
    if (rows.weights)
      for (int64_t p = ends[a.local_experts - 1] + warp * 32 + v.lane(); p < rows.P; p += warps * 32)
        at<float>(a.out_weight_P)[p] = 0;
  }
};

template <class Row>
__global__ void __launch_bounds__(TEAM_THREADS *TEAMS, 1) dispatch(const __grid_constant__ Dispatch a, Row wire) {
  Exchange x(a.rows.group);
  DispatchWork<Row> work{a, RowsView{a.rows, x}, wire};
  exchange(x, work, a.rows.chunks, work.receives());
  if (x.live)
    work.pad();
  x.finish();
}

template <class Action> int with_wire(const Dispatch &a, Action action) {
  const int H = a.rows.H;
  const bool floor = a.rows.floor;
  if (a.rows.block == 0)
    return action(Plain{H * (a.dtype == FP32 ? 4 : 2)});
  return with_type(a.dtype, [&](auto in) {
    using In = typename decltype(in)::type;
    return a.rows.block == 32 ? action(Quantized<In, 32>{H, floor}) : action(Quantized<In, 128>{H, floor});
  });
}

} // namespace

int launch(const Dispatch &a, int sms, Address stream) {
  return with_wire(a, [&](auto wire) {
    dispatch<<<sms, dim3(TEAM_THREADS, TEAMS), 0, reinterpret_cast<cudaStream_t>(stream)>>>(a, wire);
    return int(cudaGetLastError());
  });
}

int load_dispatch() {
  cudaFuncAttributes unused;
  for (int block : {0, 32, 128})
    for (int dtype : {BF16, FP16, FP32}) {
      Dispatch a;
      a.rows.block = block;
      a.dtype = dtype;
      const int error = with_wire(a, [&](auto wire) {
        return int(cudaFuncGetAttributes(&unused, dispatch<decltype(wire)>));
      });
      if (error)
        return error;
    }
  return 0;
}

} // namespace nvlink
