// SPDX-License-Identifier: Apache-2.0
// MXFP8's arithmetic, with the same bits as the casts in plain torch, and the pieces of rows that one lane holds.
#pragma once
#include "kernels.h"
#include "memory.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <type_traits>

namespace nvlink {

// The E8M0 byte of a block. bits: its largest magnitude, as the bits of a float.
__device__ __forceinline__ uint32_t scale_byte(uint32_t bits, bool floor) {
  if (bits >= 0x7F800000u)
    return 255;
  // The largest e4m3 value is 448 = 1.75 * 2^8. For rceil, a magnitude above 1.75 * 2^e carries into the exponent.
  const int exponent = int((floor ? bits : bits + 0x1FFFFFu) >> 23) - 8;
  return exponent > 0 ? exponent : 0;
}

// 2^(byte - 127). Byte 255 gives NaN.
__device__ __forceinline__ float power_of_two(uint32_t byte) {
  return __uint_as_float(byte == 255 ? 0x7FC00000u : byte == 0 ? 0x00400000u : byte << 23);
}

// 2^(127 - byte) for bytes 0 to 247. Byte 255 gives NaN.
__device__ __forceinline__ float inverse_scale(uint32_t byte) {
  return __uint_as_float(byte == 255 ? 0x7FC00000u : (254 - byte) << 23);
}

__device__ __forceinline__ uint32_t to_e4m3x4(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

__device__ __forceinline__ void from_e4m3x4(uint32_t data, float *out) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(data >> (16 * i), __NV_E4M3);
    const float2 two = __half22float2(__half2(pair));
    out[2 * i] = two.x;
    out[2 * i + 1] = two.y;
  }
}

template <class T> __device__ __forceinline__ float to_float(T v);
template <> __device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <> __device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
template <> __device__ __forceinline__ float to_float(float v) { return v; }

template <class T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }
template <> __device__ __forceinline__ __half from_float(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ float from_float(float v) { return v; }

// A type as a value.
template <class T> struct Type {
  using type = T;
};

// Calls action with the Type of a Dtype.
template <class Action> int with_type(int dtype, Action action) {
  return dtype == BF16   ? action(Type<__nv_bfloat16>())
         : dtype == FP16 ? action(Type<__half>())
                         : action(Type<float>());
}

// N neighboring values. N * sizeof(T) is a multiple of 16.
template <class T, int N> struct Piece {
  static constexpr int LOADS = N * int(sizeof(T)) / 16;
  int4 raw[LOADS];

  __device__ __forceinline__ void load(const T *p) {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      raw[i] = load16(reinterpret_cast<const char *>(p) + 16 * i);
  }
  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      raw[i] = make_int4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void floats(float (&out)[N]) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) { // the compiler's code takes three instructions for two values
      const uint32_t *pairs = reinterpret_cast<const uint32_t *>(raw);
#pragma unroll
      for (int i = 0; i < N; i++)
        out[i] = __uint_as_float(i % 2 ? pairs[i / 2] & 0xFFFF0000u : pairs[i / 2] << 16);
    } else {
      const T *values = reinterpret_cast<const T *>(raw);
#pragma unroll
      for (int i = 0; i < N; i++)
        out[i] = to_float<T>(values[i]);
    }
  }
  __device__ __forceinline__ void set(const float (&in)[N]) {
    T *values = reinterpret_cast<T *>(raw);
#pragma unroll
    for (int i = 0; i < N; i++)
      values[i] = from_float<T>(in[i]);
  }
  // Adds 0 to 16-bit values, so that -0 becomes 0 as in a float32 sum. _rn keeps the compiler from dropping the add.
  __device__ __forceinline__ void add_zero() {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair *pairs = reinterpret_cast<Pair *>(raw);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      pairs[i] = __hadd2_rn(pairs[i], Pair{});
  }
  __device__ __forceinline__ void store(T *p) const {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      store16(reinterpret_cast<char *>(p) + 16 * i, raw[i]);
  }
};

constexpr int LANE_VALUES = 16; // values of an MXFP8 row that a lane holds: 16 bytes

// Quantizes the 16 values of each lane. The BLOCK / 16 lanes that hold a block share its scale. Returns the scale's
// E8M0 byte.
template <int BLOCK>
__device__ __forceinline__ uint32_t quantize(const float (&v)[LANE_VALUES], bool floor, int4 &data) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < LANE_VALUES; i++)
    largest = max(largest, __float_as_uint(v[i]) & 0x7FFFFFFFu);
#pragma unroll
  for (int other = 1; other < BLOCK / LANE_VALUES; other *= 2)
    largest = max(largest, __shfl_xor_sync(~0u, largest, other));
  const uint32_t byte = scale_byte(largest, floor);
  const float inverse = inverse_scale(byte);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    words[i] = to_e4m3x4(v[4 * i] * inverse, v[4 * i + 1] * inverse, v[4 * i + 2] * inverse, v[4 * i + 3] * inverse);
  data = make_int4(words[0], words[1], words[2], words[3]);
  return byte;
}

} // namespace nvlink
