// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"
#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <stdexcept>

using namespace nvlink;

namespace {

constexpr int LEAST_CHUNK = 16; // tokens
constexpr int ALIGNED = 128;    // bytes to which the regions of a half are aligned

void launched(int error, const char *what) {
  if (error)
    throw std::runtime_error(std::string("launching '") + what + "' failed with CUDA error " + std::to_string(error));
}

int64_t up_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int chunk_of(int64_t T, int W) {
  int chunk = LEAST_CHUNK;
  while (int64_t(chunk) * (chunk >= 4 * W ? MAX_CHUNKS : MAX_CHUNKS / 2) < T)
    chunk *= 2;
  return chunk;
}

// Offsets of regions for `rows` rows of each size, then the end.
std::vector<int64_t> regions(int64_t rows, std::initializer_list<int64_t> row_bytes) {
  std::vector<int64_t> beginnings{0};
  for (int64_t bytes : row_bytes)
    beginnings.push_back(up_to(beginnings.back() + rows * bytes, ALIGNED));
  return beginnings;
}

template <class... Values> std::string text(const Values &...values) {
  std::string all;
  ((all += std::to_string(values) + ","), ...);
  return all;
}

} // namespace

Plan Transport::plan(const Array<int64_t> &ids, int64_t T) const {
  const int K = s.K, E = s.E;
  const int W = ranks.world, experts = W * E, chunk = chunk_of(T, W), width = 2 + W + experts;
  const int chunks = int((T + chunk - 1) / chunk), stride = int(up_to(chunks + 1, 4));
  if (!fits(W, experts, K, chunk) || K > MAX_CHOICES)
    throw std::runtime_error(std::to_string(T) + " tokens of " + std::to_string(K) + " choices among " +
                             std::to_string(experts) + " experts are more than the kernels move at once");
  Plan p;
  p.first_CB = Array<int>(int64_t(experts + W) * stride);
  p.counts_WC = Array<int>(int64_t(W) * width);
  p.place_base_E = Array<int>(experts);
  p.place_end_E = Array<int>(experts);
  p.segments = Array<int>(4 * W);
  p.group_ends_E = Array<int>(E);
  p.group_sizes_E = Array<int>(E);
  p.slot_WT = Array<int>(int64_t(W) * T);
  p.arriving_WC = Array<int>(2 * W * MAX_CHUNKS);

  Count count;
  count.expert_TK = ids.address();
  count.first_CB = p.first_CB.address();
  count.T = T;
  count.K = K;
  count.experts = experts;
  count.local_experts = E;
  count.world = W;
  count.chunk = chunk;
  count.chunks = chunks;
  count.stride = stride;
  launched(launch(count, Address(stream)), "count");

  static int serial = 0;
  static int *const host = static_cast<int *>(allocate_host(1 << 20));
  const int words = 1 + W * width + E;
  if (words * int(sizeof(int)) > 1 << 20)
    throw std::runtime_error(std::to_string(experts) + " experts are more than these programs count");
  ranks.need(4ll * W * width);
  Totals totals;
  totals.group = ranks.group(COUNTS, text(K, E));
  totals.first_CB = count.first_CB;
  totals.counts_WC = p.counts_WC.address();
  totals.place_base_E = p.place_base_E.address();
  totals.place_end_E = p.place_end_E.address();
  totals.segments = p.segments.address();
  totals.group_ends_E = p.group_ends_E.address();
  totals.group_sizes_E = p.group_sizes_E.address();
  totals.host = Address(host);
  totals.T = T;
  totals.experts = experts;
  totals.local_experts = E;
  totals.chunks = chunks;
  totals.stride = stride;
  totals.serial = ++serial;
  launched(launch(totals, Address(stream)), "totals");

  ranks.wait("counts");
  if (host[0] != serial)
    throw std::runtime_error("the kernel 'totals' has ended without telling the host the counts");
  const int *counts = host + 1, *sizes = counts + W * width;
  const auto to = [&](int from, int w) { return int64_t(counts[from * width + 2 + w]); };
  int64_t received = 0;
  for (int w = 0; w < W; w++) {
    int64_t receives = 0, sends = 0;
    for (int r = 0; r < W; r++) {
      receives += to(r, w);
      sends += to(w, r);
    }
    p.most_rows = std::max({p.most_rows, receives, sends});
    if (w == ranks.rank)
      received = receives;
  }
  p.P = std::accumulate(sizes, sizes + E, int64_t(0),
                        [](int64_t sum, int size) { return sum + up_to(size, ROW_ALIGNMENT); });
  p.place_RK = Array<int>(received * K);

  const std::vector<int64_t> at = regions(p.most_rows, {4 * K});
  ranks.need(at[1] + 8ll * W * MAX_CHUNKS);
  Places places;
  places.group = ranks.group(PLACES, text(K, E));
  places.expert_TK = ids.address();
  places.first_CB = count.first_CB;
  places.counts_WC = totals.counts_WC;
  places.place_base_E = totals.place_base_E;
  places.segments = totals.segments;
  places.slot_WT = p.slot_WT.address();
  places.place_RK = p.place_RK.address();
  places.arriving_WC = p.arriving_WC.address();
  places.T = T;
  places.ranges_at = at[1];
  places.K = K;
  places.experts = experts;
  places.local_experts = E;
  places.chunk = chunk;
  places.chunks = chunks;
  places.stride = stride;
  launched(launch(places, sms, Address(stream)), "places");

  p.rows.slot_WT = places.slot_WT;
  p.rows.place_RK = places.place_RK;
  p.rows.arriving_WC = places.arriving_WC;
  p.rows.first_CB = count.first_CB;
  p.rows.counts_WC = totals.counts_WC;
  p.rows.segments = totals.segments;
  p.rows.T = T;
  p.rows.P = p.P;
  p.rows.K = K;
  p.rows.experts = experts;
  p.rows.chunk = chunk;
  p.rows.chunks = chunks;
  p.rows.stride = stride;
  return p;
}

Rows Transport::rows(const Plan &plan, Kind kind) const {
  Rows r = plan.rows;
  r.H = s.H;
  r.block = s.block;
  r.floor = s.floor;
  r.weights = 1;
  r.scale_row = s.block ? int(up_to(s.H, s.block * 16) / s.block) : 0;
  const std::vector<int64_t> at = regions(plan.most_rows, {s.row_bytes(), r.scale_row, 4 * r.K});
  ranks.need(at[3]);
  r.data_at = at[0];
  r.scale_at = at[1];
  r.weight_at = at[2];
  r.group = ranks.group(kind, text(s.H, s.dtype, s.block, s.K));
  return r;
}

void Transport::dispatch(const Plan &plan, const Array<uint8_t> &x_TH, const Array<float> &weight_TK,
                         const Array<uint8_t> &out_PH, const Array<uint8_t> &out_scale,
                         const Array<float> &out_weight_P) const {
  Dispatch d;
  d.rows = rows(plan, DISPATCH);
  d.x_TH = x_TH.address();
  d.weight_TK = weight_TK.address();
  d.out_PH = out_PH.address();
  d.out_scale = out_scale.address();
  d.out_weight_P = out_weight_P.address();
  d.group_ends_E = plan.group_ends_E.address();
  d.group_sizes_E = plan.group_sizes_E.address();
  d.scale_stride_p = s.blocks();
  d.scale_stride_b = 1;
  d.dtype = s.dtype;
  d.local_experts = s.E;
  launched(launch(d, sms, Address(stream)), "dispatch");
}

void Transport::combine(const Plan &plan, const Array<uint8_t> &y_PH, const Array<float> &weight_P,
                        const Array<uint8_t> &out_TH, const Array<float> &out_weight_TK) const {
  Combine c;
  c.rows = rows(plan, COMBINE);
  c.y_PH = y_PH.address();
  c.weight_P = weight_P.address();
  c.out_TH = out_TH.address();
  c.out_weight_TK = out_weight_TK.address();
  c.dtype = s.y_dtype;
  c.out_dtype = s.dtype;
  launched(launch(c, sms, Address(stream)), "combine");
}

LowLatencyExchange::LowLatencyExchange(const Ranks &ranks, int sms, int max_tokens, const Shape &s)
    : ranks(ranks), sms(sms), max_tokens(max_tokens), s(s), scale_row(int(up_to(s.blocks(), 16))),
      routes(rows() * s.K + ranks.world) {
  route_at = s.row_bytes() + scale_row;
  record = up_to(route_at + up_to(4 * s.K, 16), ALIGNED);
  count_at = max_tokens * record;
  message = up_to(count_at + 4 * (1 + s.E), ALIGNED);
  ranks.need(std::max(ranks.world * message, int64_t(max_tokens) * s.K * s.H * 2));
}

LowLatency LowLatencyExchange::common(Kind kind, const Array<int64_t> &ids, int64_t T) const {
  LowLatency c;
  c.group = ranks.group(kind, text(max_tokens, s.K, s.E, s.H, s.dtype, s.block));
  c.index_TK = ids.address();
  c.routes = routes.address();
  c.message = message;
  c.lands_at = kind == LOW_LATENCY_DISPATCH ? ranks.rank * message : 0;
  c.record = record;
  c.count_at = count_at;
  c.scale_at = s.row_bytes();
  c.route_at = route_at;
  c.T = int(T);
  c.K = s.K;
  c.experts = s.E * ranks.world;
  c.local_experts = s.E;
  c.max_tokens = max_tokens;
  c.H = s.H;
  c.crew = rows() <= sms ? 8 : 1;
  return c;
}

void LowLatencyExchange::dispatch(const Array<int64_t> &ids, int64_t T, const Array<uint8_t> &x_TH,
                                  const Array<int> &out_count_E, const Array<uint8_t> &out_ERH,
                                  const Array<uint8_t> &out_scale) const {
  LowLatencyDispatch d;
  d.common = common(LOW_LATENCY_DISPATCH, ids, T);
  d.x_TH = x_TH.address();
  d.out_ERH = out_ERH.address();
  d.out_scale = out_scale.address();
  d.out_count_E = out_count_E.address();
  d.scale_strides[0] = rows() * s.blocks();
  d.scale_strides[1] = s.blocks();
  d.scale_strides[2] = 1;
  d.row_bytes = s.row_bytes();
  d.dtype = s.block ? s.dtype : 0;
  d.block = s.block;
  d.floor = s.floor;
  d.scale_row = scale_row;
  d.scales = s.blocks();
  d.scale_kind = BYTES;
  launched(launch(d, sms, Address(stream)), "low_latency_dispatch");
}

void LowLatencyExchange::combine(const Array<int64_t> &ids, int64_t T, const Array<float> &weight_TK,
                                 const Array<uint8_t> &y_ERH, const Array<uint8_t> &out_TH) const {
  LowLatencyCombine c;
  c.common = common(LOW_LATENCY_COMBINE, ids, T);
  c.y_ERH = y_ERH.address();
  c.weight_TK = weight_TK.address();
  c.out_TH = out_TH.address();
  c.dtype = s.y_dtype;
  c.out_dtype = s.dtype;
  launched(launch(c, sms, Address(stream)), "low_latency_combine");
}
