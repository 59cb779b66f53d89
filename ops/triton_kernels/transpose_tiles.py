# SPDX-License-Identifier: Apache-2.0
"""Transposes MXFP8 weights that have one scale for each tile of 128 x 128 values. The oracle is transpose_tiles in
ds_mxfp8_moe/compute/mx.py.

FP8 tensor cores read weights along the contraction only, so the GEMM of the input gradient needs the transpose. No
value changes. Grid: (tiles of a matrix, experts). A value is read as one byte and written as one byte.
"""

import torch
import triton
import triton.language as tl

from ..mx_format import TILE, MXParts
from .launch import Launched
from .library import cdiv
from .quantize import TILED_TILE, tile_origin
from .transpose import below, in_order, loaded_row, quads


@Launched
@triton.jit
def _transpose_tiles_kernel(data_ptr, scale_ptr, words_ptr, out_scale_ptr, M, N: tl.constexpr, STRIP: tl.constexpr,
                            VECTOR: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr):
    """data [M, N] of each expert to words [N, M / 4], each of which holds four neighbors along M."""
    B: tl.constexpr = 128
    LANES: tl.constexpr = 32 * VECTOR // B
    expert = tl.program_id(1).to(tl.int64)
    m0, n0 = tile_origin(N, B, B, STRIP)
    if m0 >= M:
        return
    tiles_n: tl.constexpr = (N + B - 1) // B
    tiles_m = tl.cdiv(M, B)
    m_tile, n_tile = m0 // B, n0 // B
    first = expert * tiles_m * tiles_n
    tl.store(out_scale_ptr + first + n_tile * tiles_m + m_tile, tl.load(scale_ptr + first + m_tile * tiles_n + n_tile))

    height, width = tl.minimum(M - m0, B).to(tl.int32), N - n0
    m = loaded_row(B, LANES, WARPS)
    n = tl.max_contiguous(tl.arange(0, B), VECTOR)
    x = tl.load(data_ptr + expert * M * N + m0 * N + n0 + (m[:, None] * N + n[None, :]),
                below(m, height, WHOLE)[:, None] & below(n, width, WHOLE)[None, :], other=0)
    x0, x1, x2, x3 = quads(in_order(x, LANES, WARPS))
    words = x0.to(tl.uint32) | x1.to(tl.uint32) << 8 | x2.to(tl.uint32) << 16 | x3.to(tl.uint32) << 24
    word = tl.arange(0, B // 4)
    words_ptr += (expert * M * N + n0.to(tl.int64) * M + m0) // 4
    tl.store(words_ptr + (n[:, None] * (M // 4) + word[None, :]), words.to(tl.int32, bitcast=True),
             below(n, width, WHOLE)[:, None] & below(word * 4, height, WHOLE)[None, :])


def transpose_tiles(x_ENK: MXParts) -> MXParts:
    """mx.transpose_tiles of experts' weights [E, N, K]. N and K are multiples of 32, and both parts are contiguous."""
    data, scale = x_ENK.qdata, x_ENK.scale_bytes
    experts, rows, columns = data.shape
    out = torch.empty((experts, columns, rows), dtype=torch.float8_e4m3fn, device=data.device)
    out_scale = torch.empty((experts, cdiv(columns, TILE), cdiv(rows, TILE)), dtype=torch.uint8, device=data.device)
    tile = TILED_TILE
    _transpose_tiles_kernel[(tile.programs(rows, columns), experts)](
        data.view(torch.uint8), scale, out.view(torch.int32), out_scale, rows, columns, tile.strip, tile.vector,
        tile.warps, tile.divides(rows, columns), num_warps=tile.warps)
    return MXParts(out, out_scale, TILE, tiled=True)
