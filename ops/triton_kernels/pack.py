# SPDX-License-Identifier: Apache-2.0
"""Rounds weights to MXFP4. The oracle is `quantize` in ds_mxfp8_moe/compute/mxfp4.py, which it equals to the bit.

A program makes a tile of 128 x 128 values. Grid: (tiles of a matrix, experts). A value is read once and written as
half a byte, with a byte for each 32 of them.
"""

import torch
import triton
import triton.language as tl

from ..mx_format import TILE
from .format import largest_in_rows, mxfp4_scale, new_scale, over_mxfp4_scale, power_of_two
from .launch import Launched
from .library import cdiv
from .quantize import Tile, tile_origin

PACKED_TILE = Tile(TILE, TILE, 4)


@Launched
@triton.jit
def _pack_kernel(w_ptr, codes_ptr, scale_ptr, tile_ptr, M, N: tl.constexpr):
    """w [M, N] of each expert to codes [M, N / 2], scales [M, N / 32] and the scales of tiles of MXFP8."""
    B: tl.constexpr = 128
    ROWS: tl.constexpr = 32  # at a time
    expert = tl.program_id(1).to(tl.int64)
    m0, n0 = tile_origin(N, B, B, 1)
    n, byte_n, block = tl.arange(0, B), tl.arange(0, B // 2), tl.arange(0, B // 32)
    tile_largest = 0
    for start in range(0, B, ROWS):
        m = start + tl.arange(0, ROWS)
        inside, first = (m < M - m0)[:, None], expert * M + m0
        w = tl.load(w_ptr + first * N + n0 + (m[:, None] * N + n[None, :]), inside & (n < N - n0)[None, :],
                    other=0.0).to(tl.float32)
        exponent = largest_in_rows(w, 32) >> 23
        sizes = tl.reshape(tl.abs(w), [ROWS, B // 32, 32])
        scale = mxfp4_scale(sizes, exponent)
        units, step = over_mxfp4_scale(sizes, scale)
        values = ((units + 8388608.0) - 8388608.0) * step  # 2^23 leaves no fraction: rounded to nearest even
        byte = tl.where(exponent == 255, 255, scale)

        # As exponent and mantissa of a float32, the three lower bits of an e2m1 value are 2^-126 of it.
        code = tl.reshape((values * 2.0**-126).to(tl.int32, bitcast=True) >> 22, [ROWS, B])
        code |= w.to(tl.int32, bitcast=True) >> 28 & 8
        early, late = tl.split(tl.reshape(code.to(tl.uint8), [ROWS, B // 2, 2]))
        tl.store(codes_ptr + first * (N // 2) + n0 // 2 + (m[:, None] * (N // 2) + byte_n[None, :]), early | late << 4,
                 inside & (byte_n * 2 < N - n0)[None, :])
        tl.store(scale_ptr + first * (N // 32) + n0 // 32 + (m[:, None] * (N // 32) + block[None, :]),
                 byte.to(tl.uint8), inside & (block * 32 < N - n0)[None, :])
        largest = tl.max(values, axis=2) * power_of_two(byte)  # NaN, whose bits are the largest, for byte 255
        bits = tl.abs(largest).to(tl.int32, bitcast=True)
        tile_largest = tl.maximum(tile_largest, tl.max(tl.max(bits, axis=1), axis=0))
    tile_byte, _ = new_scale(tile_largest, False)
    tiles_n: tl.constexpr = (N + B - 1) // B
    tl.store(tile_ptr + expert * (tl.cdiv(M, B) * tiles_n) + m0 // B * tiles_n + n0 // B, tile_byte)


def pack(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The buffers of mxfp4.quantize of [N, K] or [E, N, K]. K is a multiple of 32."""
    *experts, rows, columns = w.shape
    w, byte = w.contiguous(), {"dtype": torch.uint8, "device": w.device}
    codes, scale = (torch.empty(*experts, rows, columns // share, **byte) for share in (2, 32))
    tile = torch.empty(*experts, cdiv(rows, TILE), cdiv(columns, TILE), **byte)
    _pack_kernel[(PACKED_TILE.programs(rows, columns), *(experts or [1]))](
        w, codes, scale, tile, rows, columns, num_warps=PACKED_TILE.warps, enable_fp_fusion=False)
    return codes, scale, tile
