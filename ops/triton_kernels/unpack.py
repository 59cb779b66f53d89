# SPDX-License-Identifier: Apache-2.0
"""Unpacks weights in MXFP4 into tiles of MXFP8, as they lie or transposed, for one GEMM. The oracle is unpack_tiles in
ds_mxfp8_moe/compute/mxfp4.py.

Grid: (parts of a matrix, experts). A thread has blocks of 32 values, which share a scale. A value is read as half a
byte, and written as one byte. Half a byte is a sign and one of eight sizes, and under a block's scale each size is one
e4m3 byte. So one instruction, prmt, looks up four values.
"""

import torch
import triton
import triton.language as tl

from ..mx_format import TILE, MXParts
from .format import to_e4m3
from .launch import Launched
from .library import cdiv
from .quantize import Tile, tile_origin
from .transpose import below

BLOCKS = 256  # of a program that does not transpose


@triton.jit
def _bytes_at(low, high, places):
    """Four of the eight bytes of `low` and `high`: places has the number of each in half a byte. If bit 3 is set, too,
    the byte's highest bit fills the byte."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, places], tl.int32, True, 1)


@triton.jit
def _sizes(a, b, c, d, scale):
    """The e4m3 bytes of a, b, c and d times `scale`, from the lowest byte on."""
    a, b, c, d = to_e4m3(scale, a), to_e4m3(scale, b), to_e4m3(scale, c), to_e4m3(scale, d)
    return a.to(tl.int32) | b.to(tl.int32) << 8 | c.to(tl.int32) << 16 | d.to(tl.int32) << 24


@triton.jit
def _unpacked(words, scale, tile):
    """The e4m3 bytes of words [blocks, 4] of eight values, as two [blocks, 4]: of the first four of each word, and of
    the last four.

    `scale` and `tile`: the blocks' scale bytes and those of their tiles.
    """
    # In a block of zeros, any scale may be far above the tile's. What lies below e4m3's range is rounded.
    exponent = tl.minimum(tl.maximum(scale.to(tl.int32) - tile.to(tl.int32) + 127, 1), 254)
    factor = tl.where(tile == 255, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)
    low, high = _sizes(0.0, 0.5, 1.0, 1.5, factor)[:, None], _sizes(2.0, 3.0, 4.0, 6.0, factor)[:, None]
    signs = tl.where(tile == 255, 0, -0x7F7F7F80)[:, None]  # NaN has none
    first, last = words, words >> 16
    negative = _bytes_at(0x80808080, 0x80808080, first), _bytes_at(0x80808080, 0x80808080, last)  # 0xFF, or 0x80
    return (_bytes_at(low, high, first & 0x7777) | negative[0] << 7 & signs,
            _bytes_at(low, high, last & 0x7777) | negative[1] << 7 & signs)


@Launched
@triton.jit
def _unpack_kernel(words_ptr, scale_ptr, tile_ptr, out_ptr, M, N: tl.constexpr, BLOCKS: tl.constexpr):
    """words [M, N / 8] of each expert, with eight values in each, to words [M, N / 4] with four bytes in each."""
    expert, blocks = tl.program_id(1).to(tl.int64), M * (N // 32)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row, column = block // (N // 32), block % (N // 32)
    tiles_n: tl.constexpr = (N + 127) // 128
    there = block < blocks
    tile = tl.load(tile_ptr + expert * (tl.cdiv(M, 128) * tiles_n) + (row // 128 * tiles_n + column // 4), there,
                   other=0)
    scale = tl.load(scale_ptr + expert * blocks + block, there, other=0)
    words = tl.load(words_ptr + expert * blocks * 4 + (block[:, None] * 4 + tl.arange(0, 4)[None, :]), there[:, None],
                    other=0)
    first, last = _unpacked(words, scale, tile)
    x = tl.reshape(tl.join(first, last), [BLOCKS, 8])
    tl.store(out_ptr + expert * blocks * 8 + (block[:, None] * 8 + tl.arange(0, 8)[None, :]), x, there[:, None])


@triton.jit
def _four_rows(x):
    """x [512, 4] as `_unpack_transposed_kernel` loads it, with four neighbors along N in each, as [32, 16, 4]: four
    neighbors along M in each, by the quad of rows, the word of a row, and the byte in x."""
    x = tl.permute(tl.reshape(x, [2, 2, 32, 16]), (2, 3, 0, 1))
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    left, right = _bytes_at(x0, x1, 0x5140), _bytes_at(x2, x3, 0x5140)
    first, second = _bytes_at(left, right, 0x5410), _bytes_at(left, right, 0x7632)
    left, right = _bytes_at(x0, x1, 0x7362), _bytes_at(x2, x3, 0x7362)
    third, fourth = _bytes_at(left, right, 0x5410), _bytes_at(left, right, 0x7632)
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [32, 16, 4])


@Launched
@triton.jit
def _unpack_transposed_kernel(words_ptr, scale_ptr, tile_ptr, out_ptr, out_tile_ptr, M, N: tl.constexpr,
                              STRIP: tl.constexpr, WHOLE: tl.constexpr):
    """words [M, N / 8] of each expert, with eight values in each, to words [N, M / 4], each of which holds four
    neighbors along M. A program makes a tile of 128 x 128 values."""
    B: tl.constexpr = 128
    expert = tl.program_id(1).to(tl.int64)
    m0, n0 = tile_origin(N, B, B, STRIP)
    if m0 >= M:
        return
    tiles_n: tl.constexpr = (N + B - 1) // B
    tiles_m = tl.cdiv(M, B)
    first, m_tile, n_tile = expert * tiles_m * tiles_n, m0 // B, n0 // B
    tile = tl.load(tile_ptr + first + m_tile * tiles_n + n_tile)
    tl.store(out_tile_ptr + first + n_tile * tiles_m + m_tile, tile)

    height, width = tl.multiple_of(tl.minimum(M - m0, B).to(tl.int32), 32), N - n0
    # A thread of four warps has the same block of four neighboring rows.
    i = tl.arange(0, 4 * B)
    m, block = i // 4 % 32 * 4 + i // B, i % 4
    there = below(m, height, WHOLE) & below(block * 32, width, WHOLE)
    scale = tl.load(scale_ptr + (expert * M + m0) * (N // 32) + n0 // 32 + (m * (N // 32) + block), there, other=0)
    words = tl.load(words_ptr + (expert * M + m0) * (N // 8) + n0 // 8 +
                    ((m * (N // 8) + block * 4)[:, None] + tl.arange(0, 4)[None, :]), there[:, None], other=0)
    first, last = _unpacked(words, scale, tl.broadcast_to(tile, [4 * B]))
    x = tl.permute(tl.join(_four_rows(first), _four_rows(last)), (1, 3, 2, 0))  # word, half of it, byte, quad of rows
    x = tl.reshape(x, [B, B // 4])
    n, quad = tl.arange(0, B), tl.arange(0, B // 4)
    tl.store(out_ptr + expert * (M // 4) * N + n0.to(tl.int64) * (M // 4) + m0 // 4 +
             (n[:, None] * (M // 4) + quad[None, :]), x,
             below(n, width, WHOLE)[:, None] & below(quad, height // 4, WHOLE)[None, :])


def unpack_tiles(codes: torch.Tensor, scale_bytes: torch.Tensor, tile_bytes: torch.Tensor,
                 transposed: bool) -> MXParts:
    """mxfp4.unpack_tiles of weights [N, K] or [E, N, K], whose parts are contiguous. K is a multiple of 32, as N
    is for the transpose."""
    *experts, rows, halves = codes.shape
    columns, device = 2 * halves, codes.device
    words, each = codes.view(torch.int32), experts[0] if experts else 1
    if not transposed:
        out = torch.empty((*experts, rows, columns), dtype=torch.float8_e4m3fn, device=device)
        _unpack_kernel[(cdiv(rows * columns, 32 * BLOCKS), each)](
            words, scale_bytes, tile_bytes, out.view(torch.int32), rows, columns, BLOCKS, num_warps=4)
        return MXParts(out, tile_bytes, TILE, tiled=True)
    out = torch.empty((*experts, columns, rows), dtype=torch.float8_e4m3fn, device=device)
    out_tile = torch.empty((*experts, cdiv(columns, TILE), cdiv(rows, TILE)), dtype=torch.uint8, device=device)
    tile = Tile(TILE, TILE, 4, strip=4)
    _unpack_transposed_kernel[(tile.programs(rows, columns), each)](
        words, scale_bytes, tile_bytes, out.view(torch.int32), out_tile, rows, columns, tile.strip,
        tile.divides(rows, columns), num_warps=tile.warps)
    return MXParts(out, out_tile, TILE, tiled=True)
