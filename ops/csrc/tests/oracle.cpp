// SPDX-License-Identifier: Apache-2.0
#include "oracle.h"
#include <cstdio>

namespace oracle {
namespace {

constexpr int64_t ALIGNMENT = 128; // a group's rows are padded to a multiple of it

int64_t padded(int64_t rows) { return (rows + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

int64_t row_bytes_of(const Shape &s) { return s.block ? s.H : s.H * bytes_of(s.dtype); }
int64_t blocks_of(const Shape &s) { return s.block ? (s.H + s.block - 1) / s.block : 0; }

bool valid(int64_t expert, int experts) { return expert >= 0 && expert < experts; }

// Cuts the groups of one rank to `room` rows, as route.cu says. Returns how many rows are lost.
int64_t cut(int *size_E, int E, int64_t room) {
  const auto rows_with = [&](int64_t limit) {
    int64_t rows = 0;
    for (int e = 0; e < E; e++)
      rows += std::min(padded(size_E[e]), limit);
    return rows;
  };
  int64_t all = 0, limit = 0, lost = 0;
  for (int e = 0; e < E; e++)
    all += padded(size_E[e]);
  if (all <= room)
    return 0;
  while (rows_with(limit + ALIGNMENT) <= room)
    limit += ALIGNMENT;
  int64_t left = (room - rows_with(limit)) / ALIGNMENT;
  for (int e = 0; e < E; e++)
    if (size_E[e] > limit) {
      const int kept = int(std::min<int64_t>(size_E[e], left-- > 0 ? limit + ALIGNMENT : limit));
      lost += size_E[e] - kept;
      size_E[e] = kept;
    }
  return lost;
}

// Rows of one rank's tokens as they travel in dispatch, and the scales.
struct Travelling {
  Bytes row, scale;
};
Travelling travelling(const Inputs &in, const Shape &s, int64_t t) {
  if (s.block == 0) {
    const auto from = in.x_TH.begin() + t * row_bytes_of(s);
    return {Bytes(from, from + row_bytes_of(s)), {}};
  }
  std::vector<float> row(s.H);
  for (int h = 0; h < s.H; h++)
    row[h] = load(s.dtype, in.x_TH.data(), t * s.H + h);
  Travelling made{Bytes(s.H), Bytes(blocks_of(s))};
  quantize(row.data(), s.H, s.block, s.floor, made.row.data(), made.scale.data());
  return made;
}

template <class T> std::string described(int64_t i, int64_t columns, const char *format, T want, T got) {
  char text[200], values[2][40];
  std::snprintf(values[0], sizeof values[0], format, want);
  std::snprintf(values[1], sizeof values[1], format, got);
  std::snprintf(text, sizeof text, "row %lld, column %lld: expected %s, got %s", static_cast<long long>(i / columns),
                static_cast<long long>(i % columns), values[0], values[1]);
  return text;
}

std::string sizes_differ(const Bytes &want, const Bytes &got) {
  return "expected " + std::to_string(want.size()) + " bytes, got " + std::to_string(got.size());
}

} // namespace

Places find_places(const std::vector<Inputs> &ranks, const Shape &s) {
  const int W = int(ranks.size()), experts = W * s.E;
  std::vector<std::vector<int>> count_WE(W, std::vector<int>(experts));
  for (int w = 0; w < W; w++)
    for (int64_t e : ranks[w].expert_TK)
      if (valid(e, experts))
        count_WE[w][e]++;
  Places at;
  at.size_E.resize(experts);
  for (int e = 0; e < experts; e++)
    for (int w = 0; w < W; w++)
      at.size_E[e] += count_WE[w][e];
  const std::vector<int> all_E = at.size_E;
  for (int w = 0; w < W; w++)
    at.dropped_W.push_back(s.room ? cut(&at.size_E[w * s.E], s.E, s.room) : 0);
  std::vector<int64_t> start_E(experts);
  for (int w = 0; w < W; w++) {
    int64_t end = 0;
    for (int e = w * s.E; e < (w + 1) * s.E; e++) {
      start_E[e] = end;
      end += padded(at.size_E[e]);
    }
    at.end_W.push_back(end);
  }
  // Of an expert that was cut, each rank keeps the share of its choices that all ranks keep.
  const auto fitting = [&](int e, int64_t rows) { return all_E[e] ? rows * at.size_E[e] / all_E[e] : 0; };
  std::vector<int64_t> before_E(experts);
  for (int w = 0; w < W; w++) {
    std::vector<int64_t> next_E(experts);
    for (int e = 0; e < experts; e++)
      next_E[e] = fitting(e, before_E[e]);
    auto &place = at.place_TK.emplace_back();
    for (int64_t e : ranks[w].expert_TK) {
      const bool fits = valid(e, experts) && next_E[e] < fitting(int(e), before_E[e] + count_WE[w][e]);
      place.push_back(fits ? int(start_E[e] + next_E[e]++) : -1);
    }
    for (int e = 0; e < experts; e++)
      before_E[e] += count_WE[w][e];
  }
  return at;
}

Dispatched dispatch(const std::vector<Inputs> &ranks, const Shape &s, const Places &at, int w, int64_t P) {
  const int64_t row_bytes = row_bytes_of(s), blocks = blocks_of(s);
  Dispatched made{Bytes(P * row_bytes), Bytes(P * blocks), std::vector<float>(P)};
  for (size_t r = 0; r < ranks.size(); r++)
    for (int64_t t = 0; t < ranks[r].T; t++) {
      const Travelling sent = travelling(ranks[r], s, t);
      for (int64_t i = t * s.K; i < (t + 1) * s.K; i++)
        if (const int64_t p = at.place_TK[r][i]; p >= 0 && ranks[r].expert_TK[i] / s.E == w) {
          std::copy(sent.row.begin(), sent.row.end(), made.out_PH.begin() + p * row_bytes);
          std::copy(sent.scale.begin(), sent.scale.end(), made.scale_PB.begin() + p * blocks);
          made.weight_P[p] = ranks[r].weight_TK[i];
        }
    }
  return made;
}

Combined combine(const std::vector<Inputs> &ranks, const Shape &s, const Places &at, int me, const Answer &y,
                 const Number &number, int node_size) {
  const Inputs &in = ranks[me];
  const int W = int(ranks.size());
  Combined made{Bytes(in.T * s.H * bytes_of(s.dtype)), std::vector<float>(in.T * s.K)};
  std::vector<float> partial(s.H), of_node(s.H), total(s.H);
  Bytes data(s.H), scale(s.H);
  for (int64_t t = 0; t < in.T; t++) {
    std::fill(total.begin(), total.end(), 0.0f);
    for (int node = 0; node < W / node_size; node++) {
      std::fill(of_node.begin(), of_node.end(), 0.0f);
      bool served = false;
      for (int w = node * node_size; w < (node + 1) * node_size; w++) {
        std::fill(partial.begin(), partial.end(), 0.0f);
        for (int64_t i = t * s.K; i < (t + 1) * s.K; i++) {
          const int64_t p = at.place_TK[me][i];
          if (p < 0 || in.expert_TK[i] / s.E != w)
            continue;
          served = true;
          made.weight_TK[i] = 0.0f + number(w, p);
          for (int h = 0; h < s.H; h++)
            partial[h] += y(w, p, h);
        }
        for (int h = 0; h < s.H; h++)
          of_node[h] += partial[h];
      }
      if (!served)
        continue;
      if (s.block)
        quantize(of_node.data(), s.H, s.block, s.floor, data.data(), scale.data());
      for (int h = 0; h < s.H; h++)
        total[h] += s.block ? dequantized(data[h], scale[h / s.block]) : rounded(s.dtype, of_node[h]);
    }
    for (int h = 0; h < s.H; h++)
      store(s.dtype, made.out_TH.data(), t * s.H + h, total[h]);
  }
  return made;
}

namespace {

// Calls action(rank, choice, row) for each choice of the experts of rank w. row: among the rows of all of w's experts.
template <class Action>
std::vector<int> each_row(const std::vector<Inputs> &ranks, const Shape &s, int w, int64_t rows, Action action) {
  std::vector<int> count_E(s.E);
  for (size_t r = 0; r < ranks.size(); r++)
    for (size_t i = 0; i < ranks[r].expert_TK.size(); i++)
      if (const int64_t e = ranks[r].expert_TK[i] - w * s.E; e >= 0 && e < s.E)
        action(int(r), int64_t(i), e * rows + count_E[e]++);
  return count_E;
}

} // namespace

LowLatencyDispatched low_latency_dispatch(const std::vector<Inputs> &ranks, const Shape &s, int w, int64_t rows,
                                          uint8_t poison) {
  const int64_t row_bytes = row_bytes_of(s), blocks = blocks_of(s);
  LowLatencyDispatched made{{}, Bytes(s.E * rows * row_bytes, poison), Bytes(s.E * rows * blocks, poison)};
  made.count_E = each_row(ranks, s, w, rows, [&](int r, int64_t i, int64_t row) {
    const Travelling sent = travelling(ranks[r], s, i / s.K);
    std::copy(sent.row.begin(), sent.row.end(), made.out_ERH.begin() + row * row_bytes);
    std::copy(sent.scale.begin(), sent.scale.end(), made.scale_ERB.begin() + row * blocks);
  });
  return made;
}

Bytes low_latency_combine(const std::vector<Inputs> &ranks, const Shape &s, int me, int64_t rows, const Answer &y) {
  const Inputs &in = ranks[me];
  std::vector<int64_t> row_TK(in.T * s.K, -1);
  for (int w = 0; w < int(ranks.size()); w++)
    each_row(ranks, s, w, rows, [&](int r, int64_t i, int64_t row) {
      if (r == me)
        row_TK[i] = row;
    });
  Bytes made(in.T * s.H * bytes_of(s.dtype));
  for (int64_t t = 0; t < in.T; t++)
    for (int h = 0; h < s.H; h++) {
      float sum = 0;
      for (int64_t i = t * s.K; i < (t + 1) * s.K; i++)
        if (row_TK[i] >= 0)
          sum += in.weight_TK[i] * rounded(s.dtype, y(int(in.expert_TK[i] / s.E), row_TK[i], h));
      store(s.dtype, made.data(), t * s.H + h, sum);
    }
  return made;
}

std::string first_difference(int dtype, const Bytes &want, const Bytes &got, int64_t columns) {
  if (want.size() != got.size())
    return sizes_differ(want, got);
  const int bytes = bytes_of(dtype);
  for (size_t i = 0; i < want.size() / bytes; i++)
    if (std::memcmp(&want[i * bytes], &got[i * bytes], bytes)) {
      const float a = load(dtype, want.data(), int64_t(i)), b = load(dtype, got.data(), int64_t(i));
      if (!std::isnan(a) || !std::isnan(b))
        return described(int64_t(i), columns, "%.9g", double(a), double(b));
    }
  return "";
}

std::string first_difference(const Bytes &want, const Bytes &got, int64_t columns) {
  if (want.size() != got.size())
    return sizes_differ(want, got);
  const auto at = std::mismatch(want.begin(), want.end(), got.begin());
  return at.first == want.end() ? ""
                                : described(at.first - want.begin(), columns, "%#x", unsigned(*at.first),
                                            unsigned(*at.second));
}

} // namespace oracle
