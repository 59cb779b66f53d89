# SPDX-License-Identifier: Apache-2.0
"""MXFP8's arithmetic inside kernels: the same bits as `ds_mxfp8_moe.mx`, for every input.

    bits = tl.max(magnitude(x), axis)        # x float32; NaN and Inf win
    byte = scale_byte(bits, FLOOR)           # int32, 0..255
    data = to_e4m3(x, inverse_scale(byte))   # uint8; byte 255 makes every one of them 0x7F
    x    = from_e4m3(data) * power_of_two(byte)
"""

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """int32 bits of |x| for float32 x: ordered as the values, with Inf and NaN above all others."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(bits, FLOOR: tl.constexpr):
    """The E8M0 byte (int32, 0..255) for a block whose largest `magnitude` is `bits`."""
    # 448 = 1.75 * 2^8: for rceil, what lies above 1.75 * 2^e carries into the exponent.
    carried = bits if FLOOR else bits + 0x1FFFFF
    return tl.where(bits >= 0x7F800000, 255, tl.maximum((carried >> 23) - 8, 0))


@triton.jit
def power_of_two(byte):
    """float32 2^(byte - 127) for integers 0..254, and NaN for 255."""
    byte = byte.to(tl.int32)
    bits = tl.maximum(byte << 23, 0x00400000)  # 2^-127 is subnormal in float32
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def inverse_scale(byte):
    """float32 2^(127 - byte) for `scale_byte`'s int32 0..247, and NaN for 255."""
    return tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x, inverse):
    """x * inverse as e4m3 bytes (uint8): to nearest even, saturated at +-448, 0x7F for NaN."""
    return (x * inverse).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(data):
    """float32 values of e4m3 bytes (uint8)."""
    return data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
