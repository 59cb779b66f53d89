// SPDX-License-Identifier: Apache-2.0
#include "two_hops.h"
#include "formats.h"
#include <algorithm>
#include <cstring>
#include <stdexcept>

using namespace nvlink;
using oracle::Bytes;

namespace {

using Numbers = std::vector<int64_t>;

constexpr int LANE_BYTES = 16;            // that a thread of the kernel moves at a time
constexpr int64_t CHUNK_BYTES = 32 << 10; // the least that one flag announces
constexpr int64_t ALIGNED = 128;          // bytes to which the regions of a half are aligned
constexpr int64_t BEHIND = 256;           // bytes behind the rows that arrive, which must stay as they are

int64_t up_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::vector<int> every(int step, int first, int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; i++)
    ranks.push_back(first + i * step);
  return ranks;
}

// Where the parts of a row that travels lie: data, scales, weights.
struct Message {
  int64_t data, scales, weights; // bytes
  int64_t weights_at() const { return data + scales; }
  int64_t row() const { return up_to(data + scales + weights, LANE_BYTES); }
};

Message message_of(const Wire &wire, int K) {
  if (wire.block)
    return {wire.H, (wire.H + wire.block - 1) / wire.block, 4 * K};
  return {wire.H * oracle::bytes_of(wire.dtype), 0, 4 * K};
}

// `id_NK`: ids of experts, of which each rank of the hop has `experts_per_rank`. Others are dropped choices.
Sends sends(const Numbers &id_NK, int K, int64_t experts_per_rank, int ranks) {
  Sends made;
  const int64_t N = int64_t(id_NK.size()) / K;
  for (int w = 0; w < ranks; w++) {
    const size_t before = made.row_S.size();
    auto &slot_N = made.slot_WN.emplace_back(N, -1);
    for (int64_t n = 0; n < N; n++)
      if (std::any_of(&id_NK[n * K], &id_NK[n * K] + K,
                      [&](int64_t id) { return id >= 0 && id / experts_per_rank == w; })) {
        slot_N[n] = int64_t(made.row_S.size());
        made.row_S.push_back(n);
      }
    made.send_W.push_back(int64_t(made.row_S.size() - before));
  }
  return made;
}

// The choices beside each row sent, as rows of int32: ids of experts of its rank. -1: others serve them.
Bytes ids_there(const Numbers &id_NK, int K, int64_t experts_per_rank, const Sends &sends, int64_t row_bytes) {
  Bytes all(sends.row_S.size() * row_bytes);
  for (size_t w = 0, s = 0; w < sends.send_W.size(); w++)
    for (int64_t i = 0; i < sends.send_W[w]; i++, s++)
      for (int k = 0; k < K; k++) {
        const int64_t id = id_NK[sends.row_S[s] * K + k] - int64_t(w) * experts_per_rank;
        const int32_t told = id >= 0 && id < experts_per_rank ? int32_t(id) : -1;
        std::memcpy(&all[s * row_bytes + 4 * k], &told, 4);
      }
  return all;
}

Numbers ids_in(const Bytes &rows, int K, int64_t row_bytes) {
  Numbers id_NK;
  for (size_t at = 0; at < rows.size(); at += row_bytes)
    for (int k = 0; k < K; k++) {
      int32_t id;
      std::memcpy(&id, &rows[at + 4 * k], 4);
      id_NK.push_back(id);
    }
  return id_NK;
}

// What came back of each of N rows: float32 sums in ascending rank.
struct Sums {
  std::vector<float> row_NH, weight_NK;
};
// `value(row, h)`: value h of a row that came back.
template <class Value> Sums sums(const Bytes &rows, const Message &m, const Sends &sends, int H, Value value) {
  const int64_t N = int64_t(sends.slot_WN[0].size()), K = m.weights / 4;
  Sums made{std::vector<float>(N * H), std::vector<float>(N * K)};
  for (const auto &slot_N : sends.slot_WN)
    for (int64_t n = 0; n < N; n++)
      if (slot_N[n] >= 0) {
        const uint8_t *row = &rows[slot_N[n] * m.row()];
        for (int h = 0; h < H; h++)
          made.row_NH[n * H + h] += value(row, h);
        for (int64_t k = 0; k < K; k++)
          made.weight_NK[n * K + k] += oracle::load(FP32, row + m.weights_at(), k);
      }
  return made;
}

template <class T> void store(const device::Array<T> &out, const std::vector<T> &values) {
  if (!values.empty())
    device::copy(reinterpret_cast<void *>(out.address()), values.data(), int64_t(values.size() * sizeof(T)));
}

} // namespace

Hops::Hops(const Ranks &all, int node_size, int64_t half_bytes)
    : nodes(all.world / node_size), node_size(node_size), node(all.rank / node_size), index(all.rank % node_size),
      between(all, every(node_size, index, nodes), half_bytes),
      inside(all, every(1, node * node_size, node_size), half_bytes) {}

int64_t row_bytes_of(const Wire &wire, int weights) { return message_of(wire, weights).row(); }

RowsOfHop::RowsOfHop(const Ranks &hop, const Ranks &other, const Bytes &rows, int64_t row_bytes, const Numbers &send,
                     const Numbers &receive, int64_t most, const Numbers &row_S)
    : hop(hop), x(rows), sent(row_S) {
  for (int w = 0; w < hop.world; w++) {
    args.send_at[w + 1] = args.send_at[w] + send[w] * row_bytes;
    args.recv_at[w + 1] = args.recv_at[w] + receive[w] * row_bytes;
  }
  out = device::Array<uint8_t>(args.recv_at[hop.world] + BEHIND);
  out.fill(UNWRITTEN);
  args.x = x.address();
  args.rows = sent.address();
  args.row = row_bytes;
  args.out = out.address();
  args.other_state = other.state_address();
  args.region = up_to(most * row_bytes, ALIGNED);
  args.chunk = std::max(CHUNK_BYTES, up_to((most * row_bytes + MAX_CHUNKS - 1) / MAX_CHUNKS, LANE_BYTES));
  args.chunks = int((most * row_bytes + args.chunk - 1) / args.chunk);
  args.group = hop.group(ROWS, std::to_string(row_bytes) + "," + std::to_string(most));
  hop.need(hop.world * args.region);
}

void RowsOfHop::launch(int sms) const {
  if (const int error = nvlink::launch(args, sms, device::stream()))
    throw std::runtime_error("launching 'rows' failed with CUDA error " + std::to_string(error));
}

Bytes RowsOfHop::arrived() const {
  hop.wait("rows");
  Bytes rows = out.values();
  const int64_t end = args.recv_at[hop.world];
  if (std::count(rows.begin() + end, rows.end(), UNWRITTEN) != BEHIND)
    throw std::runtime_error("the kernel 'rows' wrote behind the last row");
  rows.resize(end);
  return rows;
}

Bytes TwoHops::between(const Bytes &rows, int64_t row_bytes, const Numbers &send, const Numbers &receive,
                       int64_t most, const Numbers &row_S) const {
  const RowsOfHop exchange(hops.between, hops.inside, rows, row_bytes, send, receive, most, row_S);
  exchange.launch(sms);
  return exchange.arrived();
}

Bytes TwoHops::inside(const Bytes &rows, int64_t row_bytes, const Numbers &send, const Numbers &receive,
                      int64_t most, const Numbers &row_S) const {
  const RowsOfHop exchange(hops.inside, hops.between, rows, row_bytes, send, receive, most, row_S);
  exchange.launch(sms);
  return exchange.arrived();
}

TwoHopPlan TwoHops::plan(const device::Array<int64_t> &ids, int64_t T, int K, int E) const {
  const int N = hops.nodes, G = hops.node_size, W = N * G, me = hops.node * G + hops.index;
  const Numbers expert_TK = ids.values();
  TwoHopPlan p;
  p.T = T;
  p.K = K;
  p.between = sends(expert_TK, K, int64_t(G) * E, N);
  const Numbers needed_W = sends(expert_TK, K, E, W).send_W;

  // What this rank tells each rank: choices of each of its experts. And what it tells all: rows for each node, and for
  // each rank.
  const int64_t width = up_to(E + N + W, 2), told_bytes = 8 * width;
  Numbers told_W(W * width);
  for (int w = 0; w < W; w++) {
    int64_t *told = &told_W[w * width];
    for (int e = 0; e < E; e++)
      told[e] = std::count(expert_TK.begin(), expert_TK.end(), int64_t(w) * E + e);
    std::copy(p.between.send_W.begin(), p.between.send_W.end(), told + E);
    std::copy(needed_W.begin(), needed_W.end(), told + E + N);
  }
  const auto bytes_of = [](const Numbers &numbers) {
    Bytes bytes(8 * numbers.size());
    std::memcpy(bytes.data(), numbers.data(), bytes.size());
    return bytes;
  };
  const Bytes landed_NG = between(bytes_of(told_W), G * told_bytes, Numbers(N, 1), Numbers(N, 1), 1);
  Bytes passed_GN;
  for (int g = 0; g < G; g++)
    for (int n = 0; n < N; n++) {
      const auto from = landed_NG.begin() + (n * G + g) * told_bytes;
      passed_GN.insert(passed_GN.end(), from, from + told_bytes);
    }
  const Bytes arrived_GN = inside(passed_GN, N * told_bytes, Numbers(G, 1), Numbers(G, 1), 1);
  const auto heard = [&](int from, int64_t i) {
    int64_t number;
    std::memcpy(&number, &arrived_GN[(from % G * N + from / G) * told_bytes + 8 * i], 8);
    return number;
  };
  const auto crossing = [&](int from, int to_node) { return heard(from, E + to_node); };
  const auto needed = [&](int from, int to) { return heard(from, E + N + to); };

  for (int n = 0; n < N; n++)
    p.between.receive_W.push_back(crossing(n * G + hops.index, hops.node));
  for (int w = 0; w < W; w++)
    for (int n = 0; n < N; n++)
      p.between.most = std::max(p.between.most, crossing(w, n));

  const int64_t id_bytes = up_to(4 * K, LANE_BYTES);
  const Numbers id_LK = ids_in(between(ids_there(expert_TK, K, int64_t(G) * E, p.between, id_bytes), id_bytes,
                                       p.between.send_W, p.between.receive_W, p.between.most), K, id_bytes);
  p.inside = sends(id_LK, K, E, G);
  // Rows that rank g of a node passes on to rank `to`.
  const auto passed = [&](int g, int to) {
    int64_t rows = 0;
    for (int n = 0; n < N; n++)
      rows += needed(n * G + g, to);
    return rows;
  };
  for (int g = 0; g < G; g++)
    p.inside.receive_W.push_back(passed(g, me));
  for (int g = 0; g < G; g++)
    for (int w = 0; w < W; w++)
      p.inside.most = std::max(p.inside.most, passed(g, w));
  const Numbers id_RK = ids_in(inside(ids_there(id_LK, K, E, p.inside, id_bytes), id_bytes, p.inside.send_W,
                                      p.inside.receive_W, p.inside.most), K, id_bytes);

  std::vector<int> size_E(E), end_E;
  Numbers next_E;
  for (int e = 0; e < E; e++) {
    for (int w = 0; w < W; w++)
      size_E[e] += int(heard(w, e));
    next_E.push_back(p.P);
    p.P += up_to(size_E[e], ROW_ALIGNMENT);
    end_E.push_back(int(p.P));
  }
  p.group_sizes_E = device::Array<int>(size_E);
  p.group_ends_E = device::Array<int>(end_E);
  // Rows arrive by (index, node) of their token's rank. An expert's rows are in ascending rank of their tokens.
  Numbers first_W(W);
  for (int g = 0, first = 0; g < G; g++)
    for (int n = 0; n < N; n++) {
      first_W[n * G + g] = first;
      first += int(needed(n * G + g, me));
    }
  p.place_RK.resize(id_RK.size(), -1);
  for (int w = 0; w < W; w++)
    for (int64_t i = first_W[w] * K; i < (first_W[w] + needed(w, me)) * K; i++)
      if (id_RK[i] >= 0)
        p.place_RK[i] = next_E[id_RK[i]]++;
  return p;
}

void TwoHops::dispatch(const TwoHopPlan &plan, const Wire &wire, const device::Array<uint8_t> &x_TH,
                       const device::Array<float> &weight_TK, const device::Array<uint8_t> &out_PH,
                       const device::Array<uint8_t> &out_scale, const device::Array<float> &out_weight_P,
                       bool weights) const {
  const int H = wire.H, K = plan.K;
  const Message m = message_of(wire, weights ? K : 0);
  const Bytes x = x_TH.values();
  const std::vector<float> weight = weight_TK.values();
  Bytes row_T(plan.T * m.row());
  for (int64_t t = 0; t < plan.T; t++) {
    uint8_t *row = &row_T[t * m.row()];
    if (wire.block) {
      std::vector<float> values(H);
      for (int h = 0; h < H; h++)
        values[h] = oracle::load(wire.dtype, x.data(), t * H + h);
      oracle::quantize(values.data(), H, wire.block, wire.floor, row, row + m.data);
    } else {
      std::copy_n(x.begin() + t * m.data, m.data, row);
    }
    if (weights)
      std::memcpy(row + m.weights_at(), &weight[t * K], m.weights);
  }
  const Bytes row_L = between(row_T, m.row(), plan.between.send_W, plan.between.receive_W, plan.between.most,
                              plan.between.row_S);
  const Bytes row_R = inside(row_L, m.row(), plan.inside.send_W, plan.inside.receive_W, plan.inside.most,
                             plan.inside.row_S);

  Bytes data_PH(plan.P * m.data), scale_P(plan.P * m.scales);
  std::vector<float> weight_P(plan.P);
  for (size_t i = 0; i < plan.place_RK.size(); i++)
    if (const int64_t p = plan.place_RK[i]; p >= 0) {
      const uint8_t *row = &row_R[i / K * m.row()];
      std::copy_n(row, m.data, data_PH.begin() + p * m.data);
      std::copy_n(row + m.data, m.scales, scale_P.begin() + p * m.scales);
      if (weights)
        weight_P[p] = oracle::load(FP32, row + m.weights_at(), int64_t(i % K));
    }
  store(out_PH, data_PH);
  store(out_scale, scale_P);
  if (weights)
    store(out_weight_P, weight_P);
}

void TwoHops::combine(const TwoHopPlan &plan, const Wire &wire, int y_dtype, const device::Array<uint8_t> &y_PH,
                      const device::Array<float> &weight_P, const device::Array<uint8_t> &out_TH,
                      const device::Array<float> &out_weight_TK, bool weights) const {
  const int H = wire.H, K = plan.K;
  const Message plain = message_of({H, FP32}, weights ? K : 0), m = message_of(wire, weights ? K : 0);
  const Bytes y = y_PH.values();
  const std::vector<float> weight = weight_P.values();
  Bytes row_R(plan.place_RK.size() / K * plain.row());
  for (size_t r = 0; r < plan.place_RK.size() / K; r++) {
    std::vector<float> partial(H), weight_K(K);
    for (int k = 0; k < K; k++)
      if (const int64_t p = plan.place_RK[r * K + k]; p >= 0) {
        for (int h = 0; h < H; h++)
          partial[h] += oracle::load(y_dtype, y.data(), p * H + h);
        weight_K[k] = weight[p];
      }
    std::memcpy(&row_R[r * plain.row()], partial.data(), plain.data);
    std::memcpy(&row_R[r * plain.row()] + plain.weights_at(), weight_K.data(), plain.weights);
  }
  const Bytes row_S = inside(row_R, plain.row(), plan.inside.receive_W, plan.inside.send_W, plan.inside.most);
  const Sums of_node = sums(row_S, plain, plan.inside, H,
                            [](const uint8_t *row, int h) { return oracle::load(FP32, row, h); });

  const int64_t L = int64_t(plan.inside.slot_WN[0].size());
  Bytes row_L(L * m.row());
  for (int64_t n = 0; n < L; n++) {
    uint8_t *row = &row_L[n * m.row()];
    if (wire.block)
      oracle::quantize(&of_node.row_NH[n * H], H, wire.block, wire.floor, row, row + m.data);
    else
      for (int h = 0; h < H; h++)
        oracle::store(wire.dtype, row, h, of_node.row_NH[n * H + h]);
    if (weights)
      std::memcpy(row + m.weights_at(), &of_node.weight_NK[n * K], m.weights);
  }
  const Bytes row_C = between(row_L, m.row(), plan.between.receive_W, plan.between.send_W, plan.between.most);
  const Sums total = sums(row_C, m, plan.between, H, [&](const uint8_t *row, int h) {
    return wire.block ? oracle::dequantized(row[h], row[m.data + h / wire.block]) : oracle::load(wire.dtype, row, h);
  });

  Bytes y_TH(plan.T * H * oracle::bytes_of(wire.dtype));
  for (int64_t i = 0; i < plan.T * H; i++)
    oracle::store(wire.dtype, y_TH.data(), i, total.row_NH[i]);
  store(out_TH, y_TH);
  if (weights)
    store(out_weight_TK, total.weight_NK);
}
