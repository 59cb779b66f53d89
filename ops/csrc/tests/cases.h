// SPDX-License-Identifier: Apache-2.0
// Inputs for all ranks, the same on every rank, without a generator's state.
#pragma once
#include "oracle.h"
#include <numeric>
#include <stdexcept>

// Numbers by index.
struct Noise {
  uint64_t seed;

  uint64_t bits(uint64_t i) const { // splitmix64
    uint64_t z = (seed + 1) * 0xD1342543DE82EF95ull + (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  int64_t below(uint64_t i, int64_t n) const { return int64_t(bits(i) % uint64_t(n)); }

  // Values of all magnitudes. With `special`, one in 128 is zero, subnormal, the largest or not finite.
  float value(uint64_t i, bool special) const {
    const uint64_t z = bits(i);
    if (special && z >> 57 == 0) {
      const float special_values[] = {-0.0f, 0.0f, 1e-40f, 3.3e38f, -6e4f, INFINITY, -INFINITY, NAN};
      return special_values[z % 8];
    }
    const float whole = float(int32_t(z >> 32)) / 2147483648.0f;
    return std::ldexp(whole, int(z % 19) - 9);
  }
};

enum Routing {
  RANDOM,
  DISTINCT,   // the choices of a token are all different
  SKEWED,     // half of the choices are the first expert's
  DROPPED,    // some choices have ids of no expert
  ONE_EXPERT, // one hot expert, on the last rank
  ONE_RANK,   // all choices go to the experts of rank 0, and are all different where K allows it
  NOWHERE     // all choices are dropped
};

inline int64_t expert_of(Routing routing, const Noise &noise, int64_t t, int k, int K, int E, int W) {
  const int experts = E * W;
  const uint64_t i = uint64_t(t) * K + k;
  // A walk with a step that has no common divisor with the number of experts.
  const auto distinct = [&](int among) {
    int64_t step = 1 + noise.below(2 * t + 1, among);
    while (std::gcd(step, int64_t(among)) != 1)
      step++;
    return (noise.below(2 * t, among) + k * step) % among;
  };
  switch (routing) {
  case RANDOM: return noise.below(i, experts);
  case DISTINCT: return distinct(experts);
  case SKEWED: return noise.bits(i) >> 63 ? 0 : noise.below(i, experts);
  case ONE_EXPERT: return experts - 1;
  case ONE_RANK: return distinct(E);
  case NOWHERE: return -1;
  case DROPPED: {
    const int64_t chance = noise.below(i + (1ull << 40), 10);
    return chance < 3 ? experts + chance : chance < 5 ? -1 : distinct(experts);
  }
  }
  throw std::logic_error("unknown routing");
}

inline oracle::Inputs inputs(Routing routing, const oracle::Shape &s, int64_t T, int rank, int W, bool special) {
  const Noise ids{uint64_t(rank) + 100}, values{uint64_t(rank) + 200}, weights{uint64_t(rank) + 300};
  oracle::Inputs in;
  in.T = T;
  in.x_TH.resize(T * s.H * oracle::bytes_of(s.dtype));
  for (int64_t i = 0; i < T * s.H; i++)
    oracle::store(s.dtype, in.x_TH.data(), i, values.value(i, special));
  for (int64_t t = 0; t < T; t++)
    for (int k = 0; k < s.K; k++) {
      in.expert_TK.push_back(expert_of(routing, ids, t, k, s.K, s.E, W));
      in.weight_TK.push_back(weights.value(t * s.K + k, false));
    }
  return in;
}
