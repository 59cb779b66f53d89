# SPDX-License-Identifier: Apache-2.0
"""Unpacks weights in MXFP4 into tiles of MXFP8, as they lie or transposed, for one GEMM. The oracle is unpack_tiles in
ds_mxfp8_moe/compute/mxfp4.py.

A program makes a tile of 128 x 128 values. Grid: (tiles of a matrix, experts). A value is read as half a byte, with a
byte for each 32 of them, and written as one byte. Products with powers of two are exact in float32, and the last cast
rounds what lies below e4m3's range.
"""

import torch
import triton
import triton.language as tl

from ..mx_format import TILE, MXParts
from .format import to_e4m3
from .launch import Launched
from .library import cdiv
from .quantize import Tile, tile_origin
from .transpose import below, in_order, loaded_row, quads


@triton.jit
def _value(words, factor, J: tl.constexpr):
    """The J-th of eight values in each word, in float32."""
    # The three lower bits of an e2m1 value, as exponent and mantissa of a float32, are 2^-126 of it.
    bits = (words << (28 - 4 * J)) >> 6 & -0x7E400000
    return bits.to(tl.float32, bitcast=True) * 2.0**120 * factor


@triton.jit
def _joined(x0, x1, x2, x3, x4, x5, x6, x7):
    """[..., 8] of eight tensors. A thread holds the eight of a place."""
    x = tl.join(tl.join(tl.join(x0, x4), tl.join(x2, x6)), tl.join(tl.join(x1, x5), tl.join(x3, x7)))
    return tl.reshape(x, [x0.shape[0], x0.shape[1], 8])


@triton.jit
def _four_rows(x, LANES: tl.constexpr, WARPS: tl.constexpr):
    """x [M, N] to [N, M / 4], each of which holds the e4m3 bytes of four neighbors along M."""
    x0, x1, x2, x3 = quads(in_order(x, LANES, WARPS))
    x0, x1, x2, x3 = to_e4m3(x0, 1.0), to_e4m3(x1, 1.0), to_e4m3(x2, 1.0), to_e4m3(x3, 1.0)
    return x0.to(tl.int32) | x1.to(tl.int32) << 8 | x2.to(tl.int32) << 16 | x3.to(tl.int32) << 24


@Launched
@triton.jit
def _unpack_kernel(words_ptr, scale_ptr, tile_ptr, out_ptr, out_tile_ptr, M, N: tl.constexpr,
                   TRANSPOSED: tl.constexpr, STRIP: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr):
    """words [M, N / 8] of each expert, with eight values in each, to bytes [M, N], or if TRANSPOSED to words
    [N, M / 4], each of which holds four neighbors along M."""
    B: tl.constexpr = 128
    LANES: tl.constexpr = 2  # a word of a row in each of 16 lanes
    expert = tl.program_id(1).to(tl.int64)
    m0, n0 = tile_origin(N, B, B, STRIP)
    if m0 >= M:
        return
    tiles_n: tl.constexpr = (N + B - 1) // B
    tiles_m = tl.cdiv(M, B)
    first, m_tile, n_tile = expert * tiles_m * tiles_n, m0 // B, n0 // B
    tile = tl.load(tile_ptr + first + m_tile * tiles_n + n_tile)
    if TRANSPOSED:
        tl.store(out_tile_ptr + first + n_tile * tiles_m + m_tile, tile)

    height, width = tl.minimum(M - m0, B).to(tl.int32), N - n0
    m = loaded_row(B, LANES, WARPS) if TRANSPOSED else tl.arange(0, B)
    word = tl.max_contiguous(tl.arange(0, B // 8), 1 if TRANSPOSED else 4)
    mask = below(m, height, WHOLE)[:, None] & below(word * 8, width, WHOLE)[None, :]
    words = tl.load(words_ptr + (expert * M + m0) * (N // 8) + n0 // 8 + (m[:, None] * (N // 8) + word[None, :]), mask,
                    other=0)
    scale = tl.load(scale_ptr + (expert * M + m0) * (N // 32) + n0 // 32 +
                    (m[:, None] * (N // 32) + (word // 4)[None, :]), mask, other=0)
    # In a block of zeros, any scale may be far above the tile's.
    exponent = tl.minimum(tl.maximum(scale.to(tl.int32) - tile.to(tl.int32) + 133, 1), 254)
    factor = tl.where(tile == 255, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)  # 2^6 * scale / tile

    x0, x1 = _value(words, factor, 0), _value(words, factor, 1)
    x2, x3 = _value(words, factor, 2), _value(words, factor, 3)
    x4, x5 = _value(words, factor, 4), _value(words, factor, 5)
    x6, x7 = _value(words, factor, 6), _value(words, factor, 7)
    if TRANSPOSED:
        x0, x1 = _four_rows(x0, LANES, WARPS), _four_rows(x1, LANES, WARPS)
        x2, x3 = _four_rows(x2, LANES, WARPS), _four_rows(x3, LANES, WARPS)
        x4, x5 = _four_rows(x4, LANES, WARPS), _four_rows(x5, LANES, WARPS)
        x6, x7 = _four_rows(x6, LANES, WARPS), _four_rows(x7, LANES, WARPS)
        x = tl.reshape(tl.permute(_joined(x0, x1, x2, x3, x4, x5, x6, x7), (0, 2, 1)), [B, B // 4])
        n, four, fours = tl.arange(0, B), tl.arange(0, B // 4), tl.multiple_of(height, 32) // 4
        tl.store(out_ptr + (expert * M * N + n0.to(tl.int64) * M + m0) // 4 + (n[:, None] * (M // 4) + four[None, :]),
                 x, below(n, width, WHOLE)[:, None] & below(four, fours, WHOLE)[None, :])
    else:
        x = tl.reshape(to_e4m3(_joined(x0, x1, x2, x3, x4, x5, x6, x7), 1.0), [B, B])
        n = tl.max_contiguous(tl.arange(0, B), 16)
        tl.store(out_ptr + (expert * M + m0) * N + n0 + (m[:, None] * N + n[None, :]), x,
                 below(m, height, WHOLE)[:, None] & below(n, width, WHOLE)[None, :])


def unpack_tiles(codes: torch.Tensor, scale_bytes: torch.Tensor, tile_bytes: torch.Tensor,
                 transposed: bool) -> MXParts:
    """mxfp4.unpack_tiles of weights [N, K] or [E, N, K], whose parts are contiguous. K is a multiple of 32, and
    for the transpose N, too."""
    *experts, rows, halves = codes.shape
    columns, device = 2 * halves, codes.device
    shape = (columns, rows) if transposed else (rows, columns)
    out, out_tile = torch.empty((*experts, *shape), dtype=torch.float8_e4m3fn, device=device), tile_bytes
    if transposed:
        out_tile = torch.empty((*experts, cdiv(columns, TILE), cdiv(rows, TILE)), dtype=torch.uint8, device=device)
    tile = Tile(TILE, TILE, 8, strip=4 if transposed else 1)
    _unpack_kernel[(tile.programs(rows, columns), *(experts or [1]))](
        codes.view(torch.int32), scale_bytes, tile_bytes, out.view(torch.int32 if transposed else torch.uint8),
        out_tile, rows, columns, transposed, tile.strip, tile.warps, tile.divides(rows, columns),
        num_warps=tile.warps)
    return MXParts(out, out_tile, TILE, tiled=True)
