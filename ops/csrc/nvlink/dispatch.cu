// SPDX-License-Identifier: Apache-2.0
// Tokens to the ranks of their experts, each read and quantised once and sent once to a rank; and into expert-sorted,
// padded rows: what arrives, and this rank's own.
#include "rows.cuh"

namespace nvlink {
namespace {

constexpr int AHEAD = 4; // pieces whose loads are in flight together
constexpr int AHEAD_QUANTISED = 2;

// What each of `lanes` holds, for all of a warp in turn: calls action(lane, value).
template <class T, class Action> __device__ __forceinline__ void each(uint32_t lanes, T value, Action action) {
  for (; lanes; lanes &= lanes - 1) {
    const int lane = __ffs(lanes) - 1;
    action(lane, __shfl_sync(~0u, value, lane));
  }
}

// Where a warp writes a row: to the staging of other ranks, one in each lane of `peers`, and to places here, one in
// each lane of `here`. A lane beyond them holds anything.
struct Targets {
  const Dispatch &a;
  const RowsView &v;
  int row, place;
  uint32_t peers, here;
  Address peer_row, own_row;

  // row: in the staging of the rank of the lane's number; place: of the lane's choice; -1: none. Rows of `bytes`.
  __device__ __forceinline__ Targets(const Dispatch &a, const RowsView &v, int row, int place, int bytes)
      : a(a), v(v), row(row), place(place), peers(__ballot_sync(~0u, row >= 0)), here(__ballot_sync(~0u, place >= 0)),
        peer_row(row >= 0 ? Address(v.data(v.lane(), row, bytes)) : 0), own_row(a.out_PH + int64_t(place) * bytes) {}

  // Calls store(row) for the beginning of each row.
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

// What a warp makes of a token: as it is.
struct Plain {
  static constexpr bool COUNTED = false;
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

// The same: quantised to MXFP8. COUNTS: Dispatch::arrived is there.
template <class T, int BLOCK, bool COUNTS = false> struct Quantised {
  static constexpr bool COUNTED = COUNTS;
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

  // Lane w: where token t stands among the rows that this rank sends to rank w; -1: nowhere.
  __device__ int slot(int64_t t) const {
    return v.lane() < v.world() ? at<int>(a.rows.slot_WT)[v.lane() * a.rows.T + t] : -1;
  }

  // Item i: a chunk of this rank's tokens. What this rank itself serves goes to its places at once.
  __device__ void send(int i) {
    const Rows &rows = a.rows;
    const int c = v.turned(v.rank(), i);
    const int64_t end = v.token_end(c);
    int64_t t = v.token_begin(c) + v.warp();
    int following = t < end ? slot(t) : -1;
    for (; t < end; t += v.warps()) {
      const bool nowhere = __ballot_sync(~0u, following >= 0) == 0;
      const int own_slot = __shfl_sync(~0u, following, v.rank());
      const bool to_peer = following >= 0 && v.lane() != v.rank();
      const int peer_slot = to_peer ? following + v.segment(PEER_RECV_BASE, v.lane()) : -1;
      if (t + v.warps() < end)
        following = slot(t + v.warps());
      if (nowhere)
        continue;
      const int place = own_slot >= 0 ? v.place(own_slot + v.segment(RECV_BASE, v.rank())) : -1;
      const Targets to(a, v, peer_slot, place, wire.row_bytes());
      wire.send(a.x_TH, t / rows.fanout, to);
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
    if constexpr (Row::COUNTED)
      count(v.arriving(v.rank(), c));
  }

  // All threads, after a barrier behind the stores: rows of `range` are in their places.
  __device__ void count(int2 range) const {
    v.each_tile(range, [&](int tile, int rows) {
      __threadfence();
      atomicAdd(at<uint32_t>(a.arrived) + tile, uint32_t(rows));
    });
  }

  // Item i: a chunk of another rank's tokens.
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
      // What is small, ahead of the data.
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
    if constexpr (Row::COUNTED) {
      sync_team();
      count(range);
    }
  }

  // Zeros in the rows that fill up a group; weights of 0 also behind the last group.
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
      if constexpr (Row::COUNTED) {
        __syncwarp();
        if (v.lane() == 0) {
          __threadfence();
          atomicAdd(at<uint32_t>(a.arrived) + p / ROW_ALIGNMENT, 1u);
        }
      }
    }
    if (rows.weights)
      for (int64_t p = ends[a.local_experts - 1] + warp * 32 + v.lane(); p < rows.P; p += warps * 32)
        at<float>(a.out_weight_P)[p] = 0;
  }
};

template <class Row>
__global__ void __launch_bounds__(TEAM_THREADS *TEAMS, 1) dispatch(const __grid_constant__ Dispatch a, Row wire) {
  if (Row::COUNTED && threadIdx.x == 0 && threadIdx.y == 0)
    atomicAdd(at<uint32_t>(a.begun), 1u);
  Exchange x(a.rows.group);
  DispatchWork<Row> work{a, RowsView{a.rows, x}, wire};
  if (Row::COUNTED && x.live) // somebody waits for it
    work.pad();
  exchange(x, work, a.rows.chunks, work.receives());
  if (!Row::COUNTED && x.live)
    work.pad();
  x.finish();
}

__global__ void begun(const __grid_constant__ Begun a) {
  if (threadIdx.x != 0)
    return;
  const auto *failed = static_cast<volatile uint32_t *>(&at<State>(a.group.state)->failed);
  const uint64_t start = nanoseconds();
  while (load_acquire(at<uint32_t>(a.begun)) < uint32_t(a.blocks) && !*failed)
    if (nanoseconds() - start > a.group.timeout_ns)
      record(a.group, at<State>(a.group.state)->epoch, TIMEOUT, a.group.rank, OWN_PLACE);
}

template <class T, class Action> int with_block(const Dispatch &a, Action action) {
  const int H = a.rows.H;
  const bool floor = a.rows.floor;
  return a.rows.block == 32 ? action(Quantised<T, 32>{H, floor})
         : a.arrived        ? action(Quantised<T, 128, true>{H, floor})
                            : action(Quantised<T, 128>{H, floor});
}

template <class Action> int with_wire(const Dispatch &a, Action action) {
  return a.rows.block == 0   ? action(Plain{a.rows.H * (a.dtype == FP32 ? 4 : 2)})
         : a.dtype == BF16   ? with_block<__nv_bfloat16>(a, action)
         : a.dtype == FP16   ? with_block<__half>(a, action)
                             : with_block<float>(a, action);
}

} // namespace

int launch(const Dispatch &a, int sms, Address stream) {
  return with_wire(a, [&](auto wire) {
    dispatch<<<sms, dim3(TEAM_THREADS, TEAMS), 0, reinterpret_cast<cudaStream_t>(stream)>>>(a, wire);
    return int(cudaGetLastError());
  });
}

int launch(const Begun &a, Address stream) {
  begun<<<1, 32, 0, reinterpret_cast<cudaStream_t>(stream)>>>(a);
  return int(cudaGetLastError());
}

int load_dispatch() {
  cudaFuncAttributes unused;
  if (const int error = cudaFuncGetAttributes(&unused, begun))
    return error;
  for (int block : {0, 32, 128})
    for (int dtype : {BF16, FP16, FP32})
      for (Address arrived : {0, 1}) {
        Dispatch a;
        a.rows.block = block;
        a.dtype = dtype;
        a.arrived = arrived;
        const int error = with_wire(a, [&](auto wire) {
          return int(cudaFuncGetAttributes(&unused, dispatch<decltype(wire)>));
        });
        if (error)
          return error;
      }
  return 0;
}

} // namespace nvlink
