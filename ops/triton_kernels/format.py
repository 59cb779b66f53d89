# SPDX-License-Identifier: Apache-2.0
"""MXFP8's and MXFP4's arithmetic inside kernels, the order of a GEMM's tiles, and the expert of a row.

The oracles of the arithmetic are mx.py and mxfp4.py in ds_mxfp8_moe/compute: the bits are the same for every input.

    data, byte = quantized_rows(x, B, FLOOR)   # e4m3 data and E8M0 scales, both as uint8
    x = from_e4m3(data) * power_of_two(byte)

B is the block size. FLOOR selects the scaling mode: "floor" if true, else "rceil". A block with NaN or Inf gets scale
byte 255, and 0x7F for each of its values.
"""

import triton
import triton.language as tl


@triton.jit
def larger(x, y):
    """The larger of |x| and |y| in float32. NaN if either is NaN."""
    return tl.maximum(tl.abs(x), tl.abs(y), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def new_scale(largest, FLOOR: tl.constexpr):
    """The E8M0 scale byte of a block, and 1 / scale in float32.

    `largest`: the int32 bits of the largest |x| in the block.
    """
    finite = largest < 0x7F800000
    # The largest e4m3 value is 448 = 1.75 * 2^8. For rceil, a mantissa above 1.75 carries into the exponent.
    exponent = tl.maximum((largest if FLOOR else largest + 0x1FFFFF) >> 23, 8)
    byte = tl.where(finite, exponent - 8, 255)
    inverse = tl.where(finite, (262 - exponent) << 23, 0x7FC00000)
    return byte.to(tl.uint8), inverse.to(tl.float32, bitcast=True)


@triton.jit
def largest_in_rows(x, B: tl.constexpr):
    """The largest |x| of each block of B neighbors in a row of float32 x [M, N], as int32 bits [M, N / B].

    Groups of four neighbors are compared as floats, where taking |x| costs no instruction. What remains is compared
    as integers: the bits of NaN are larger than those of any number, so NaN needs no extra care.
    """
    M: tl.constexpr = x.shape[0]
    x0, x1 = tl.split(tl.reshape(x, [M, x.shape[1] // 2, 2]))
    x0, x1 = tl.split(tl.reshape(larger(x0, x1), [M, x.shape[1] // 4, 2]))
    largest = tl.reshape(larger(x0, x1), [M, x.shape[1] // B, B // 4])
    return tl.max(largest.to(tl.int32, bitcast=True), axis=2)


@triton.jit
def quantized_rows(x, B: tl.constexpr, FLOOR: tl.constexpr):
    """Quantizes float32 x [M, N] in blocks of B neighbors in a row: data [M, N] and scales [M, N / B], uint8."""
    byte, inverse = new_scale(largest_in_rows(x, B), FLOOR)
    blocks = tl.reshape(x, [x.shape[0], x.shape[1] // B, B])
    data = to_e4m3(blocks, inverse[:, :, None])
    return tl.reshape(data, x.shape), byte


@triton.jit
def power_of_two(byte):
    """float32 2^(byte - 127) for bytes 0 to 254, and NaN for 255."""
    byte = byte.to(tl.int32)
    bits = tl.maximum(byte << 23, 0x00400000)  # 2^-127 is subnormal in float32
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x, inverse):
    """x * inverse as e4m3 bytes (uint8), rounded to nearest even and saturated at +-448. NaN gives 0x7F."""
    return (x * inverse).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(data):
    """The float32 values of e4m3 bytes (uint8)."""
    return data.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def over_mxfp4_scale(x, scale_byte):
    """Magnitudes [M, N / 32, 32] over a scale, at most 6, in units of the e2m1 values around them; and this unit."""
    scaled = tl.minimum(x * ((254 - scale_byte) << 23).to(tl.float32, bitcast=True)[:, :, None], 6.0)
    step = tl.where(scaled < 2.0, 0.5, tl.where(scaled < 4.0, 1.0, 2.0))
    return scaled * tl.where(scaled < 2.0, 2.0, tl.where(scaled < 4.0, 1.0, 0.5)), step


@triton.jit
def _mxfp4_error(x, scale_byte):
    """The squared error of each block with this scale, [M, N / 32], if magnitudes are rounded to nearest."""
    units, step = over_mxfp4_scale(x, scale_byte)
    nearest = (units + 8388608.0) - 8388608.0  # 2^23 leaves no fraction: rounded to nearest even
    error = nearest * step * power_of_two(scale_byte)[:, :, None] - x
    error = error * error
    for _ in tl.static_range(5):  # in the order of mxfp4._sum
        even, odd = tl.split(tl.reshape(error, [x.shape[0], x.shape[1], error.shape[2] // 2, 2]))
        error = even + odd
    return tl.reshape(error, [x.shape[0], x.shape[1]])


@triton.jit
def mxfp4_scale(x, exponent):
    """The scale bytes that mxfp4.quantize gives to blocks of magnitudes [M, N / 32, 32], but for NaN. The bits are the
    same without fused multiply-adds. `exponent`: of the largest magnitudes, as in their bits."""
    lower = tl.minimum(tl.maximum(exponent - 2, 0), 252)
    return lower + (_mxfp4_error(x, lower + 1) < _mxfp4_error(x, lower)).to(tl.int32)


@triton.jit
def tile_of(index, row_tiles, column_tiles, STRIP: tl.constexpr):
    """The row tile and the column tile of an index.

    Tiles run in strips of STRIP row tiles, and within a strip column by column. Those that run at the same time then
    share operands in L2.
    """
    first = index // (STRIP * column_tiles) * STRIP
    rows = tl.minimum(row_tiles - first, STRIP)
    within = index % (STRIP * column_tiles)
    return first + within % rows, within // rows


@triton.jit
def expert_of(row, ends_ptr, E, E_PAD: tl.constexpr):
    """The group that holds `row`: the number of groups that end at or before it. The last one for rows past all."""
    e = tl.arange(0, E_PAD)
    ends = tl.load(ends_ptr + e, e < E, other=0x7FFFFFFF)
    return tl.minimum(tl.sum((ends <= row).to(tl.int32), 0), E - 1).to(tl.int64)
