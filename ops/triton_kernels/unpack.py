# SPDX-License-Identifier: Apache-2.0
"""Unpacks weights in MXFP4 into tiles of MXFP8, as they lie or transposed, for one GEMM. The oracle is unpack_tiles in
ds_mxfp8_moe/compute/mxfp4.py.

A program makes a tile of 128 x 128 values. Grid: (tiles of a matrix, experts). A value is read as half a byte, with a
byte for each 32 of them, and written as one byte. Half a byte is a sign and one of eight sizes, and under a block's
scale each size is one e4m3 byte. So one instruction, prmt, looks up four values.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from ..mx_format import TILE, MXParts
from .launch import Launched
from .library import cdiv
from .quantize import Tile, tile_origin
from .transpose import below, in_order, loaded_row, quads

# Powers of two in the scale of a block over that of its tile. Below, all values round to zero. Above, all are zero.
LOWEST, HIGHEST = -16, 15


@cache
def _sizes(device: torch.device) -> torch.Tensor:
    """The eight e4m3 bytes of e2m1's values without sign, by scale from LOWEST to HIGHEST, and then of NaN: [33]
    int64."""
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = (e2m1 * 2.0**torch.arange(LOWEST, HIGHEST + 1).unsqueeze(-1)).clamp(max=448)
    sizes = torch.cat([values, torch.full((1, 8), torch.nan)]).to(torch.float8_e4m3fn)
    return sizes.view(torch.int64)[:, 0].to(device)


@triton.jit
def _bytes_at(low, high, places):
    """Four of the eight bytes of `low` and `high`: places has the number of each in half a byte. If bit 3 is set, too,
    the byte's highest bit fills the byte."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, places], tl.int32, True, 1)


@triton.jit
def _four_values(places, low, high):
    """The e4m3 bytes of the four values in the lower half of `places`."""
    negative = _bytes_at(0x80808080, 0x80808080, places)  # 0xFF, or 0x80
    return _bytes_at(low, high, places & 0x7777) | negative << 7 & -0x7F7F7F80


@triton.jit
def _joined(x0, x1, x2, x3):
    """[..., 4]. One thread holds the four."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [x0.shape[0], x0.shape[1], 4])


@triton.jit
def _transposed(x, LANES: tl.constexpr, WARPS: tl.constexpr):
    """The bytes of x [M, N], four neighbors along N in each, as [N, 4, M / 4], four neighbors along M in each."""
    x0, x1, x2, x3 = quads(in_order(x, LANES, WARPS))
    left, right = _bytes_at(x0, x1, 0x5140), _bytes_at(x2, x3, 0x5140)
    first, second = _bytes_at(left, right, 0x5410), _bytes_at(left, right, 0x7632)
    left, right = _bytes_at(x0, x1, 0x7362), _bytes_at(x2, x3, 0x7362)
    x = _joined(first, second, _bytes_at(left, right, 0x5410), _bytes_at(left, right, 0x7632))
    return tl.permute(x, (0, 2, 1))


@Launched
@triton.jit
def _unpack_kernel(words_ptr, scale_ptr, tile_ptr, sizes_ptr, out_ptr, out_tile_ptr, M, N: tl.constexpr,
                   TRANSPOSED: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, STRIP: tl.constexpr,
                   WARPS: tl.constexpr, WHOLE: tl.constexpr):
    """words [M, N / 8] of each expert, with eight values in each, to words [M, N / 4] with four bytes in each, or to
    [N, M / 4] if TRANSPOSED."""
    B: tl.constexpr = 128
    LANES: tl.constexpr = 2  # a row's 16 words in 16 lanes
    expert = tl.program_id(1).to(tl.int64)
    m0, n0 = tile_origin(N, B, B, STRIP)
    if m0 >= M:
        return
    tiles_n: tl.constexpr = (N + B - 1) // B
    tiles_m = tl.cdiv(M, B)
    first, m_tile, n_tile = expert * tiles_m * tiles_n, m0 // B, n0 // B
    tile = tl.load(tile_ptr + first + m_tile * tiles_n + n_tile).to(tl.int32)
    if TRANSPOSED:
        tl.store(out_tile_ptr + first + n_tile * tiles_m + m_tile, tile.to(tl.uint8))

    height, width = tl.multiple_of(tl.minimum(M - m0, B).to(tl.int32), 32), N - n0
    m = loaded_row(B, LANES, WARPS) if TRANSPOSED else tl.arange(0, B)
    word = tl.max_contiguous(tl.arange(0, B // 8), 1 if TRANSPOSED else 4)
    mask = below(m, height, WHOLE)[:, None] & below(word * 8, width, WHOLE)[None, :]
    words = tl.load(words_ptr + (expert * M + m0) * (N // 8) + n0 // 8 + (m[:, None] * (N // 8) + word[None, :]), mask,
                    other=0)
    scale = tl.load(scale_ptr + (expert * M + m0) * (N // 32) + n0 // 32 +
                    (m[:, None] * (N // 32) + (word // 4)[None, :]), mask, other=0)
    row = tl.minimum(tl.maximum(scale.to(tl.int32) - tile, LOWEST), HIGHEST) - LOWEST
    row = tl.where(tile == 255, HIGHEST - LOWEST + 1, row)
    words &= tl.where(tile == 255, 0x77777777, -1)  # NaN has no sign
    sizes = tl.load(sizes_ptr + row)
    low, high = sizes.to(tl.int32), (sizes >> 32).to(tl.int32)
    left, right = _four_values(words, low, high), _four_values(words >> 16, low, high)
    out_ptr += expert * M * (N // 4)
    if TRANSPOSED:
        x = tl.join(_transposed(left, LANES, WARPS), _transposed(right, LANES, WARPS))  # [N / 8, 4, M / 4, 2]
        x = tl.reshape(tl.permute(x, (0, 3, 1, 2)), [B, B // 4])
        n, four = tl.arange(0, B), tl.arange(0, B // 4)
        tl.store(out_ptr + (n0.to(tl.int64) * M + m0) // 4 + (n[:, None] * (M // 4) + four[None, :]), x,
                 below(n, width, WHOLE)[:, None] & below(four, height // 4, WHOLE)[None, :])
    else:
        x = tl.reshape(tl.join(left, right), [B, B // 4])
        four = tl.arange(0, B // 4)
        tl.store(out_ptr + (m0 * (N // 4) + n0 // 4) + (m[:, None] * (N // 4) + four[None, :]), x,
                 below(m, height, WHOLE)[:, None] & below(four, width // 4, WHOLE)[None, :])


def unpack_tiles(codes: torch.Tensor, scale_bytes: torch.Tensor, tile_bytes: torch.Tensor,
                 transposed: bool) -> MXParts:
    """mxfp4.unpack_tiles of weights [N, K] or [E, N, K], whose parts are contiguous. K is a multiple of 32, as N
    is for the transpose."""
    *experts, rows, halves = codes.shape
    columns, device = 2 * halves, codes.device
    shape = (columns, rows) if transposed else (rows, columns)
    out, out_tile = torch.empty((*experts, *shape), dtype=torch.float8_e4m3fn, device=device), tile_bytes
    if transposed:
        out_tile = torch.empty((*experts, cdiv(columns, TILE), cdiv(rows, TILE)), dtype=torch.uint8, device=device)
    tile = Tile(TILE, TILE, 8, strip=4 if transposed else 1)
    _unpack_kernel[(tile.programs(rows, columns), *(experts or [1]))](
        codes.view(torch.int32), scale_bytes, tile_bytes, _sizes(device), out.view(torch.int32), out_tile, rows,
        columns, transposed, LOWEST, HIGHEST, tile.strip, tile.warps, tile.divides(rows, columns),
        num_warps=tile.warps)
    return MXParts(out, out_tile, TILE, tiled=True)
