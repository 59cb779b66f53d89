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
from .transpose import below, by_column, in_order, loaded_row, store_transposed


@Launched
@triton.jit
def _unpack_kernel(words_ptr, scale_ptr, tile_ptr, out_ptr, out_tile_ptr, M, N: tl.constexpr,
                   TRANSPOSED: tl.constexpr, STRIP: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr):
    """words [M, N / 8] of each expert, with eight values in each, to bytes [M, N], or [N, M] if TRANSPOSED."""
    B: tl.constexpr = 128
    VECTOR: tl.constexpr = 128 // WARPS  # values of a thread side by side
    LANES: tl.constexpr = 32 * VECTOR // B
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
    word = tl.max_contiguous(tl.arange(0, B // 8), VECTOR // 8)
    mask = below(m, height, WHOLE)[:, None] & below(word * 8, width, WHOLE)[None, :]
    words = tl.load(words_ptr + (expert * M + m0) * (N // 8) + n0 // 8 + (m[:, None] * (N // 8) + word[None, :]), mask,
                    other=0)
    scale = tl.load(scale_ptr + (expert * M + m0) * (N // 32) + n0 // 32 +
                    (m[:, None] * (N // 32) + (word // 4)[None, :]), mask, other=0)
    # In a block of zeros, any scale may be far above the tile's.
    exponent = tl.minimum(tl.maximum(scale.to(tl.int32) - tile.to(tl.int32) + 133, 1), 254)
    factor = tl.where(tile == 255, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)  # 2^6 * scale / tile

    # The three lower bits of an e2m1 value, as exponent and mantissa of a float32, are 2^-126 of it.
    nibble = words[:, :, None] << (28 - 4 * tl.arange(0, 8))[None, None, :]
    x = ((nibble >> 6) & -0x7E400000).to(tl.float32, bitcast=True)
    x = tl.reshape(x * 2.0**120 * factor[:, :, None], [B, B])
    n = tl.max_contiguous(tl.arange(0, B), 16)
    if TRANSPOSED:
        store_transposed(by_column(in_order(x, LANES, WARPS)), out_ptr + expert * M * N + n0.to(tl.int64) * M + m0, n,
                         height, width, M, 16, WHOLE)
    else:
        tl.store(out_ptr + (expert * M + m0) * N + n0 + (m[:, None] * N + n[None, :]), to_e4m3(x, 1.0),
                 below(m, height, WHOLE)[:, None] & below(n, width, WHOLE)[None, :])


def unpack_tiles(codes: torch.Tensor, scale_bytes: torch.Tensor, tile_bytes: torch.Tensor,
                 transposed: bool) -> MXParts:
    """mxfp4.unpack_tiles of weights [N, K] or [E, N, K], whose parts are contiguous. K is a multiple of 32."""
    *experts, rows, halves = codes.shape
    columns, device = 2 * halves, codes.device
    shape = (columns, rows) if transposed else (rows, columns)
    out, out_tile = torch.empty((*experts, *shape), dtype=torch.float8_e4m3fn, device=device), tile_bytes
    if transposed:
        out_tile = torch.empty((*experts, cdiv(columns, TILE), cdiv(rows, TILE)), dtype=torch.uint8, device=device)
    tile = Tile(TILE, TILE, 16, strip=4) if transposed else Tile(TILE, TILE, 8)
    _unpack_kernel[(tile.programs(rows, columns), *(experts or [1]))](
        codes.view(torch.int32), scale_bytes, tile_bytes, out.view(torch.uint8), out_tile, rows, columns, transposed,
        tile.strip, tile.warps, tile.divides(rows, columns), num_warps=tile.warps)
    return MXParts(out, out_tile, TILE, tiled=True)
