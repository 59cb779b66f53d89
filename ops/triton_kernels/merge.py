# SPDX-License-Identifier: Apache-2.0
"""Merges LoRA adapters into experts' weights with stochastic rounding. The oracle is ds_mxfp8_moe/compute/merging.py,
which each function equals to the bit.

    kernel                  grid                                bytes read + written for each value
    _merge_tiles_kernel     (tiles of a matrix, experts)        1 + 1
    _merge_mxfp4_kernel     (tiles of a matrix, experts)        0.53 + 1
    _merge_plain_kernel     (tiles of a matrix, experts)        2 + 2 (bf16)

A program reads, beside its part of a matrix, as many rows of one factor and columns of the other. It adds their
products one rank after the other, without fused multiply-adds: every device gets the same sums.
"""

import torch
import triton
import triton.language as tl

from ..mx_format import TILE, MXParts
from .format import (
    from_e4m3,
    largest_in_rows,
    mxfp4_scale,
    new_scale,
    over_mxfp4_scale,
    power_of_two,
    to_e4m3,
)
from .launch import Launched
from .library import cdiv
from .quantize import Tile, tile_origin

TILES_TILE, PLAIN_TILE = Tile(128, 128, 16), Tile(32, 128, 8)


@triton.jit
def _place(M, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Of a program's tile: the expert, the first row and column, the rows and columns from there to the matrix' end,
    the first value's place in the matrix, the others' from there on, and which values are inside."""
    m0, n0 = tile_origin(N, BM, BN, 1)
    height, width = tl.minimum(M - m0, BM).to(tl.int32), N - n0
    row, column = tl.arange(0, BM), tl.arange(0, BN)
    mask = (row < height)[:, None] & (column < width)[None, :]
    return tl.program_id(1).to(tl.int64), m0, n0, height, width, m0 * N + n0, row[:, None] * N + column[None, :], mask


@triton.jit
def _update(a_ptr, b_ptr, height, width, RANK, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr):
    """Of a tile: products of the rows of b and the columns of a, summed in the order of the rank, in float32."""
    row, column = tl.arange(0, BM), tl.arange(0, BN)
    update = tl.zeros([BM, BN], tl.float32)
    for r in range(RANK):
        b = tl.load(b_ptr + (row * RANK + r), row < height, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + r * N + column, column < width, other=0.0).to(tl.float32)
        update += b[:, None] * a[None, :]
    return update


@triton.jit
def _random_bits(seeds_ptr, index):
    """merging.random_bits of the values at `index`."""
    x = index.to(tl.uint32) ^ tl.load(seeds_ptr).to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x = x * 0x7FEB352D + tl.load(seeds_ptr + 1).to(tl.uint32, bitcast=True)
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept_bits(x, bits, DROPPED: tl.constexpr):
    """Rounds the magnitudes x to fewer bits of mantissa: adds random bits to those that are dropped."""
    kept = x.to(tl.uint32, bitcast=True) + (bits & DROPPED) & (0xFFFFFFFF ^ DROPPED)
    return kept.to(tl.float32, bitcast=True)


@Launched
@triton.jit
def _merge_tiles_kernel(data_ptr, data_stride, scale_ptr, scale_stride, a_ptr, b_ptr, seeds_ptr, seeds_stride, out_ptr,
                        out_scale_ptr, M, RANK, N: tl.constexpr):
    B: tl.constexpr = 128
    LEAST_NORMAL: tl.constexpr = 0.015625  # of e4m3
    tiles_n: tl.constexpr = (N + B - 1) // B
    expert, m0, n0, height, width, origin, offset, mask = _place(M, N, B, B)
    tile = m0 // B * tiles_n + n0 // B
    before = tl.load(data_ptr + (expert * data_stride + origin) + offset, mask, other=0)
    byte_before = tl.load(scale_ptr + expert * scale_stride + tile + tl.arange(0, 1)[:, None])
    update = _update(a_ptr + (expert * RANK * N + n0), b_ptr + (expert * M + m0) * RANK, height, width, RANK, B, B, N)
    merged = tl.where(mask, from_e4m3(before) * power_of_two(byte_before) + update, 0.0)
    byte, inverse = new_scale(tl.max(largest_in_rows(merged, B), axis=0)[:, None], False)
    x = merged * inverse
    lift = tl.where(tl.abs(x) < LEAST_NORMAL, LEAST_NORMAL, 0.0)
    bits = _random_bits(seeds_ptr + expert * seeds_stride, origin.to(tl.int32) + offset)
    rounded = _kept_bits(tl.abs(x) + lift, bits, 0xFFFFF) - lift
    sign = (x.to(tl.uint32, bitcast=True) >> 24 & 0x80).to(tl.uint8)
    data = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True) | sign
    data = tl.where(byte == 255, 0x7F, data).to(tl.uint8)
    changed = tl.max(tl.max((mask & (update != 0)).to(tl.int32), axis=1), axis=0) != 0
    tl.store(out_ptr + (expert * M * N + origin) + offset, tl.where(changed, data, before), mask)
    tl.store(out_scale_ptr + expert * tl.cdiv(M, B) * tiles_n + tile + tl.arange(0, 1)[:, None],
             tl.where(changed, byte, byte_before))


@Launched
@triton.jit
def _merge_mxfp4_kernel(words_ptr, scale_ptr, a_ptr, b_ptr, out_ptr, out_scale_ptr, M, RANK, N: tl.constexpr):
    """words [M, N / 8] of each expert, with eight values in each. The first two are its seeds."""
    B: tl.constexpr = 128
    tiles_n: tl.constexpr = (N + B - 1) // B
    expert, m0, n0, height, width, origin, offset, mask = _place(M, N, B, B)
    row, word, block = tl.arange(0, B), tl.arange(0, B // 8), tl.arange(0, B // 32)
    words = tl.load(words_ptr + (expert * M * (N // 8) + m0 * (N // 8) + n0 // 8) +
                    (row[:, None] * (N // 8) + word[None, :]),
                    (row < height)[:, None] & (word * 8 < width)[None, :], other=0)
    scale = tl.load(scale_ptr + (expert * M * (N // 32) + m0 * (N // 32) + n0 // 32) +
                    (row[:, None] * (N // 32) + block[None, :]),
                    (row < height)[:, None] & (block * 32 < width)[None, :], other=0)
    # The three lower bits of an e2m1 value, as exponent and mantissa of a float32, are 2^-126 of it.
    nibble = words[:, :, None] << (28 - 4 * tl.arange(0, 8))[None, None, :]
    held = tl.reshape(((nibble >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * 2.0**126, [B, B // 32, 32])
    update = _update(a_ptr + (expert * RANK * N + n0), b_ptr + (expert * M + m0) * RANK, height, width, RANK, B, B, N)
    merged = tl.reshape(held * power_of_two(scale)[:, :, None], [B, B]) + update
    merged = tl.where(mask, merged, 0.0)

    exponent = largest_in_rows(merged, 32) >> 23
    size = tl.reshape(tl.abs(merged), [B, B // 32, 32])
    chosen = mxfp4_scale(size, exponent)
    units, step = over_mxfp4_scale(size, chosen)
    bits = _random_bits(words_ptr + expert * M * (N // 8), origin.to(tl.int32) + offset)
    random = tl.reshape((bits & 0xFFFF).to(tl.float32), [B, B // 32, 32]) * 2.0**-16
    whole = (units + random).to(tl.int32).to(tl.float32)
    rounded = whole * step * power_of_two(chosen)[:, :, None]
    rounded = tl.reshape(tl.where((exponent == 255)[:, :, None], float("nan"), rounded), [B, B])
    byte, inverse = new_scale(tl.max(largest_in_rows(rounded, B), axis=0)[:, None], False)
    sign = tl.where(byte == 255, 0, merged.to(tl.uint32, bitcast=True) >> 24 & 0x80).to(tl.uint8)
    tl.store(out_ptr + (expert * M * N + origin) + offset, to_e4m3(rounded, inverse) | sign, mask)
    tl.store(out_scale_ptr + expert * tl.cdiv(M, B) * tiles_n + m0 // B * tiles_n + n0 // B +
             tl.arange(0, 1)[:, None], byte)


@Launched
@triton.jit
def _merge_plain_kernel(w_ptr, a_ptr, b_ptr, seeds_ptr, out_ptr, M, RANK, N: tl.constexpr, BM: tl.constexpr,
                        BN: tl.constexpr):
    expert, m0, n0, height, width, origin, offset, mask = _place(M, N, BM, BN)
    before = tl.load(w_ptr + (expert * M * N + origin) + offset, mask, other=0.0)
    update = _update(a_ptr + (expert * RANK * N + n0), b_ptr + (expert * M + m0) * RANK, height, width, RANK, BM, BN,
                     N)
    merged = before.to(tl.float32) + update
    if w_ptr.dtype.element_ty == tl.bfloat16:
        bits = _random_bits(seeds_ptr + expert * 2, origin.to(tl.int32) + offset)
        merged = tl.where(merged != merged, merged, _kept_bits(merged, bits, 0xFFFF))
    after = tl.where(update == 0, before, merged.to(out_ptr.dtype.element_ty))
    tl.store(out_ptr + (expert * M * N + origin) + offset, after, mask)


def merge_tiles(w_ENK: MXParts, a_ERK: torch.Tensor, b_ENR: torch.Tensor,
                seeds_E2: torch.Tensor | None = None) -> MXParts:
    """merging.merge of tiles [E, N, K], and without seeds merging.merge_as_held. Matrices are contiguous."""
    data, scale = w_ENK.qdata, w_ENK.scale_bytes
    seeds = data.view(torch.int32) if seeds_E2 is None else seeds_E2
    experts, rows, columns = data.shape
    out = torch.empty(data.shape, dtype=data.dtype, device=data.device)
    out_scale = torch.empty(scale.shape, dtype=torch.uint8, device=data.device)
    if out.numel():
        _merge_tiles_kernel[(TILES_TILE.programs(rows, columns), experts)](
            data.view(torch.uint8), data.stride(0), scale, scale.stride(0), a_ERK.contiguous(), b_ENR.contiguous(),
            seeds, seeds.stride(0), out.view(torch.uint8), out_scale, rows, a_ERK.shape[1], columns,
            num_warps=TILES_TILE.warps, enable_fp_fusion=False)
    return MXParts(out, out_scale, TILE, tiled=True)


def merge_mxfp4(codes: torch.Tensor, scale_bytes: torch.Tensor, a_ERK: torch.Tensor, b_ENR: torch.Tensor) -> MXParts:
    """merging.merge_as_held of weights in MXFP4, [E, N, K], whose parts are contiguous. K is a multiple of 32."""
    (experts, rows, halves), device = codes.shape, codes.device
    columns = 2 * halves
    out = torch.empty((experts, rows, columns), dtype=torch.float8_e4m3fn, device=device)
    out_scale = torch.empty((experts, cdiv(rows, TILE), cdiv(columns, TILE)), dtype=torch.uint8, device=device)
    if out.numel():
        _merge_mxfp4_kernel[(TILES_TILE.programs(rows, columns), experts)](
            codes.view(torch.int32), scale_bytes, a_ERK.contiguous(), b_ENR.contiguous(), out.view(torch.uint8),
            out_scale, rows, a_ERK.shape[1], columns, num_warps=TILES_TILE.warps, enable_fp_fusion=False)
    return MXParts(out, out_scale, TILE, tiled=True)


def merge_plain(w_ENK: torch.Tensor, a_ERK: torch.Tensor, b_ENR: torch.Tensor, seeds_E2: torch.Tensor) -> torch.Tensor:
    """merging.merge of plain weights [E, N, K]."""
    w_ENK = w_ENK.contiguous()
    experts, rows, columns = w_ENK.shape
    out = torch.empty_like(w_ENK)
    if out.numel():
        _merge_plain_kernel[(PLAIN_TILE.programs(rows, columns), experts)](
            w_ENK, a_ERK.contiguous(), b_ENR.contiguous(), seeds_E2, out, rows, a_ERK.shape[1], columns,
            PLAIN_TILE.rows, PLAIN_TILE.columns, num_warps=PLAIN_TILE.warps, enable_fp_fusion=False)
    return out
