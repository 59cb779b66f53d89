// SPDX-License-Identifier: Apache-2.0
// Number formats in plain C++, by their definitions. They share no code with the kernels.
#pragma once
#include "../nvlink/kernels.h"
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace oracle {

using Bytes = std::vector<uint8_t>;

inline float from_bits(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// A binary format with a sign, an exponent and a mantissa.
struct Format {
  int bits;       // of a value
  int mantissa;   // bits
  int smallest;   // exponent of the smallest normal value
  uint32_t above; // code of what values above the largest become: infinity, or the largest value itself
  uint32_t nan;
};
constexpr Format BF16_FORMAT{16, 7, -126, 0x7F80, 0x7FC0};
constexpr Format FP16_FORMAT{16, 10, -14, 0x7C00, 0x7E00};
constexpr Format E4M3_FORMAT{8, 3, -6, 0x7E, 0x7F};

// Rounds to the nearest value, to the even one of two.
inline uint32_t encode(const Format &f, float v) {
  if (std::isnan(v))
    return f.nan;
  const uint32_t sign = std::signbit(v) ? 1u << (f.bits - 1) : 0;
  if (std::isinf(v))
    return sign | f.above;
  if (v == 0)
    return sign;
  const int exponent = std::max(std::ilogb(v), f.smallest);
  // In units of the last place. A carry into the next exponent gives its code by itself.
  const double units = std::nearbyint(std::ldexp(std::fabs(double(v)), f.mantissa - exponent));
  const uint64_t code = (uint64_t(exponent - f.smallest) << f.mantissa) + uint64_t(units);
  return sign | uint32_t(std::min<uint64_t>(code, f.above));
}

inline float decode(const Format &f, uint32_t code) {
  const uint32_t magnitude = code & ((1u << (f.bits - 1)) - 1);
  const float sign = code >> (f.bits - 1) & 1 ? -1.0f : 1.0f;
  const bool has_infinity = f.bits == 16;
  if (has_infinity ? magnitude > f.above : magnitude == f.nan)
    return from_bits(0x7FC00000u);
  if (has_infinity && magnitude == f.above)
    return sign * INFINITY;
  const int exponent = int(magnitude >> f.mantissa), rest = int(magnitude & ((1u << f.mantissa) - 1));
  const int whole = exponent == 0 ? rest : rest + (1 << f.mantissa);
  return sign * float(std::ldexp(whole, std::max(exponent, 1) - 1 + f.smallest - f.mantissa));
}

inline int bytes_of(int dtype) { return dtype == nvlink::FP32 ? 4 : 2; }

// Element i of an array of `dtype`.
inline float load(int dtype, const uint8_t *array, int64_t i) {
  if (dtype == nvlink::FP32) {
    float v;
    std::memcpy(&v, array + 4 * i, 4);
    return v;
  }
  uint16_t code;
  std::memcpy(&code, array + 2 * i, 2);
  return decode(dtype == nvlink::BF16 ? BF16_FORMAT : FP16_FORMAT, code);
}

inline void store(int dtype, uint8_t *array, int64_t i, float v) {
  if (dtype == nvlink::FP32) {
    std::memcpy(array + 4 * i, &v, 4);
    return;
  }
  const uint16_t code = uint16_t(encode(dtype == nvlink::BF16 ? BF16_FORMAT : FP16_FORMAT, v));
  std::memcpy(array + 2 * i, &code, 2);
}

// `v` as it comes back after a store as `dtype`.
inline float rounded(int dtype, float v) {
  uint8_t at[4];
  store(dtype, at, 0, v);
  return load(dtype, at, 0);
}

// The E8M0 byte of a block whose largest magnitude is `largest`. NaN counts as larger than any number.
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

inline float scale_of(int byte) { return byte == 255 ? from_bits(0x7FC00000u) : float(std::ldexp(1.0, byte - 127)); }

// A row of `H` values in MXFP8. data: [H]. scale: [H / block], rounded up.
inline void quantize(const float *row, int H, int block, bool floor, uint8_t *data, uint8_t *scale) {
  for (int begin = 0; begin < H; begin += block) {
    const int end = std::min(begin + block, H);
    float largest = 0;
    for (int i = begin; i < end; i++)
      if (!(std::fabs(row[i]) <= largest))
        largest = std::isnan(largest) ? largest : std::fabs(row[i]);
    const int byte = scale_byte(largest, floor);
    scale[begin / block] = uint8_t(byte);
    for (int i = begin; i < end; i++)
      data[i] = uint8_t(byte == 255 ? 0x7F : encode(E4M3_FORMAT, float(std::ldexp(double(row[i]), 127 - byte))));
  }
}

inline float dequantized(uint8_t data, uint8_t scale) { return decode(E4M3_FORMAT, data) * scale_of(scale); }

} // namespace oracle
