// SPDX-License-Identifier: Apache-2.0
// Inputs for all ranks, and what the exchanges make of them, in plain C++ on the host. CUDA's types convert numbers.
// tests/ranks/test_nvlink.py compares the kernels with torch's conversions. Letters in names are those of kernels.h.
#pragma once
#include "shape.h"
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <numeric>
#include <utility>
#include <vector>

namespace oracle {

using Bytes = std::vector<uint8_t>;

// ---- number formats

// Element i of an array of `dtype`.
inline float load(int dtype, const uint8_t *array, int64_t i) {
  const auto as = [&](auto value) {
    std::memcpy(&value, array + sizeof value * i, sizeof value);
    return float(value);
  };
  return dtype == nvlink::FP32 ? as(0.0f) : dtype == nvlink::BF16 ? as(__nv_bfloat16()) : as(__half());
}

inline void store(int dtype, uint8_t *array, int64_t i, float v) {
  const auto as = [&](auto value) { std::memcpy(array + sizeof value * i, &value, sizeof value); };
  dtype == nvlink::FP32 ? as(v) : dtype == nvlink::BF16 ? as(__nv_bfloat16(v)) : as(__half(v));
}

// `v` as it comes back after a store as `dtype`.
inline float rounded(int dtype, float v) {
  uint8_t at[4];
  store(dtype, at, 0, v);
  return load(dtype, at, 0);
}

inline std::vector<float> values(int dtype, const Bytes &array) {
  std::vector<float> all(array.size() / bytes_of(dtype));
  for (size_t i = 0; i < all.size(); i++)
    all[i] = load(dtype, array.data(), int64_t(i));
  return all;
}

// The E8M0 byte of a block whose largest magnitude is `largest`.
inline int scale_byte(float largest, bool floor) {
  if (!std::isfinite(largest))
    return 255;
  if (largest == 0)
    return 0;
  if (floor)
    return std::max(0, std::ilogb(largest) - 8 + 127);
  int byte = 0;
  while (std::ldexp(448.0, byte - 127) < largest)
    byte++;
  return byte;
}

// A row of `H` values in MXFP8. data: [H]. scale: [H / block], rounded up.
inline void quantize(const float *row, int H, int block, bool floor, uint8_t *data, uint8_t *scale) {
  for (int begin = 0; begin < H; begin += block) {
    const int end = std::min(begin + block, H);
    float largest = 0;
    for (int i = begin; i < end; i++)
      largest = std::isnan(row[i]) ? NAN : std::max(largest, std::fabs(row[i])); // which stays NaN
    const int byte = scale_byte(largest, floor);
    scale[begin / block] = uint8_t(byte);
    for (int i = begin; i < end; i++)
      data[i] = byte == 255 ? 0x7F : __nv_fp8_e4m3(float(std::ldexp(double(row[i]), 127 - byte))).__x;
  }
}

inline float dequantized(uint8_t data, uint8_t scale) {
  __nv_fp8_e4m3 value;
  value.__x = data;
  return scale == 255 ? NAN : float(value) * float(std::ldexp(1.0, scale - 127));
}

// ---- inputs

// What one rank brings. A choice with an id below 0 or above the last expert is dropped.
struct Inputs {
  int64_t T = 0;
  std::vector<int64_t> expert_TK;
  Bytes x_TH; // of Shape::dtype
  std::vector<float> weight_TK;
};

// Numbers by index, the same on every rank.
struct Noise {
  uint64_t seed;

  uint64_t bits(uint64_t i) const { // splitmix64
    uint64_t z = (seed + 1) * 0xD1342543DE82EF95ull + (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  int64_t below(uint64_t i, int64_t n) const { return int64_t(bits(i) % uint64_t(n)); }

  // Of all magnitudes. With `special`, one in 128 is zero, subnormal, the largest or not finite.
  float value(uint64_t i, bool special) const {
    const uint64_t z = bits(i);
    if (special && z >> 57 == 0) {
      const float special_values[] = {-0.0f, 0.0f, 1e-40f, 3.3e38f, -6e4f, INFINITY, -INFINITY, NAN};
      return special_values[z % 8];
    }
    return std::ldexp(float(int32_t(z >> 32)) / 2147483648.0f, int(z % 19) - 9);
  }
};

enum Routing {
  RANDOM,
  DISTINCT,  // the choices of a token are all different
  DROPPED,   // some choices have ids of no expert
  ONE_EXPERT // one hot expert, on the last rank
};

inline int64_t expert_of(Routing routing, const Noise &noise, int64_t t, int k, int K, int experts) {
  const uint64_t i = uint64_t(t) * K + k;
  if (routing == RANDOM)
    return noise.below(i, experts);
  if (routing == ONE_EXPERT)
    return experts - 1;
  const int64_t chance = noise.below(i + (1ull << 40), 10);
  if (routing == DROPPED && chance < 5)
    return chance < 3 ? experts + chance : -1;
  // A walk with a step that has no common divisor with the number of experts.
  int64_t step = 1 + noise.below(2 * t + 1, experts);
  while (std::gcd(step, int64_t(experts)) != 1)
    step++;
  return (noise.below(2 * t, experts) + k * step) % experts;
}

// Of rank `rank` among W. `special`: whether some values of x are.
inline Inputs inputs(Routing routing, const Shape &s, int64_t T, int rank, int W, bool special) {
  const Noise ids{uint64_t(rank) + 100}, numbers{uint64_t(rank) + 200}, weights{uint64_t(rank) + 300};
  Inputs in;
  in.T = T;
  in.x_TH.resize(T * s.H * bytes_of(s.dtype));
  for (int64_t i = 0; i < T * s.H; i++)
    store(s.dtype, in.x_TH.data(), i, numbers.value(i, special));
  for (int64_t t = 0; t < T; t++)
    for (int k = 0; k < s.K; k++) {
      in.expert_TK.push_back(expert_of(routing, ids, t, k, s.K, s.E * W));
      in.weight_TK.push_back(weights.value(t * s.K + k, false));
    }
  return in;
}

// The answer of rank w's experts to row p: value h, and the row's number, which no routing weight equals.
inline float answer(const Shape &s, int w, int64_t p, int h) {
  return rounded(s.y_dtype, Noise{uint64_t(w) + 400}.value(p * s.H + h, true));
}
inline float number(int w, int64_t p) { return Noise{uint64_t(w) + 500}.value(p, false); }

// ---- exchanges

// Row t of one rank's tokens as it travels in dispatch, and its scales.
inline std::pair<Bytes, Bytes> travelling(const Inputs &in, const Shape &s, int64_t t) {
  const auto begin = in.x_TH.begin() + t * s.H * bytes_of(s.dtype), end = begin + s.H * bytes_of(s.dtype);
  if (s.block == 0)
    return {Bytes(begin, end), {}};
  Bytes data(s.H), scale(s.blocks());
  quantize(values(s.dtype, Bytes(begin, end)).data(), s.H, s.block, s.floor, data.data(), scale.data());
  return {data, scale};
}

// Where rows lie. An expert's rows are in ascending order of (rank, token, choice).
struct Places {
  std::vector<int> size_E;                    // of all ranks' experts
  std::vector<std::vector<int64_t>> place_TK; // of each rank, among the rows of the choice's rank. -1: dropped
};
// The rows of a rank's experts begin `apart` rows apart, or where apart is 0, at the next multiple of ROW_ALIGNMENT.
inline Places find_places(const std::vector<Inputs> &ranks, const Shape &s, int64_t apart = 0) {
  const int experts = int(ranks.size()) * s.E;
  Places at{std::vector<int>(experts), {}};
  const auto valid = [&](int64_t e) { return e >= 0 && e < experts; };
  for (const Inputs &in : ranks)
    for (int64_t e : in.expert_TK)
      if (valid(e))
        at.size_E[e]++;
  std::vector<int64_t> next_E(experts);
  for (int e = 0; e < experts; e++)
    if (e % s.E) {
      const int64_t padded = (at.size_E[e - 1] + nvlink::ROW_ALIGNMENT - 1) / nvlink::ROW_ALIGNMENT;
      next_E[e] = next_E[e - 1] + (apart ? apart : padded * nvlink::ROW_ALIGNMENT);
    }
  for (const Inputs &in : ranks) {
    auto &place_TK = at.place_TK.emplace_back();
    for (int64_t e : in.expert_TK)
      place_TK.push_back(valid(e) ? next_E[e]++ : -1);
  }
  return at;
}

struct Dispatched {
  Bytes out_PH, scale_PB;
  std::vector<float> weight_P;
};
// What rank `w` receives in P rows. All others keep `unwritten`.
inline Dispatched dispatch(const std::vector<Inputs> &ranks, const Shape &s, const Places &at, int w, int64_t P,
                           uint8_t unwritten) {
  Dispatched made{Bytes(P * s.row_bytes(), unwritten), Bytes(P * s.blocks(), unwritten), std::vector<float>(P)};
  for (size_t r = 0; r < ranks.size(); r++)
    for (int64_t t = 0; t < ranks[r].T; t++) {
      const auto [row, scale] = travelling(ranks[r], s, t);
      for (int64_t i = t * s.K; i < (t + 1) * s.K; i++)
        if (const int64_t p = at.place_TK[r][i]; p >= 0 && ranks[r].expert_TK[i] / s.E == w) {
          std::copy(row.begin(), row.end(), made.out_PH.begin() + p * s.row_bytes());
          std::copy(scale.begin(), scale.end(), made.scale_PB.begin() + p * s.blocks());
          made.weight_P[p] = ranks[r].weight_TK[i];
        }
    }
  return made;
}

struct Combined {
  Bytes out_TH;
  std::vector<float> weight_TK;
};
// What the answers to the tokens of rank `me` add up to. Each rank adds up its own before it rounds.
inline Combined combine(const std::vector<Inputs> &ranks, const Shape &s, const Places &at, int me) {
  const Inputs &in = ranks[me];
  Combined made{Bytes(in.T * s.H * bytes_of(s.dtype)), std::vector<float>(in.T * s.K)};
  Bytes data(s.H), scale(s.blocks());
  for (int64_t t = 0; t < in.T; t++) {
    std::vector<float> total(s.H);
    for (int w = 0; w < int(ranks.size()); w++) {
      std::vector<float> partial(s.H);
      bool served = false;
      for (int64_t i = t * s.K; i < (t + 1) * s.K; i++) {
        const int64_t p = at.place_TK[me][i];
        if (p < 0 || in.expert_TK[i] / s.E != w)
          continue;
        served = true;
        made.weight_TK[i] = 0.0f + number(w, p);
        for (int h = 0; h < s.H; h++)
          partial[h] += answer(s, w, p, h);
      }
      if (!served)
        continue;
      if (s.block)
        quantize(partial.data(), s.H, s.block, s.floor, data.data(), scale.data());
      for (int h = 0; h < s.H; h++)
        total[h] += s.block ? dequantized(data[h], scale[h / s.block]) : rounded(s.dtype, partial[h]);
    }
    for (int h = 0; h < s.H; h++)
      store(s.dtype, made.out_TH.data(), t * s.H + h, total[h]);
  }
  return made;
}

// The same at low latency: weighted, and added up where the tokens come from.
inline Bytes low_latency_combine(const std::vector<Inputs> &ranks, const Shape &s, const Places &at, int me) {
  const Inputs &in = ranks[me];
  Bytes made(in.T * s.H * bytes_of(s.dtype));
  for (int64_t t = 0; t < in.T; t++)
    for (int h = 0; h < s.H; h++) {
      float sum = 0;
      for (int64_t i = t * s.K; i < (t + 1) * s.K; i++)
        if (const int64_t p = at.place_TK[me][i]; p >= 0)
          sum += in.weight_TK[i] * rounded(s.dtype, answer(s, int(in.expert_TK[i] / s.E), p, h));
      store(s.dtype, made.data(), t * s.H + h, sum);
    }
  return made;
}

} // namespace oracle
