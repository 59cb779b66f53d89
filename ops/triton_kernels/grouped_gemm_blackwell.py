# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs in MXFP8 on Blackwell's tensor cores, which apply the scales of blocks of 32 themselves. In Triton.

    grouped_mm_mxfp8         out[rows of e] = a[rows of e] b[e]^T             forward and input gradient
    grouped_mm_wgrad_mxfp8   out[e] = g[:, rows of e] a[:, rows of e]^T       weight gradient, operands in column form

A first kernel packs the scale bytes in the order in which the tensor cores read them. A scale of 128 values becomes
four scales of 32. TMA then brings scales to tensor memory without going through registers. Only so can one product
start before the last one is done. Then each program of the GEMM computes one tile of the output. A GEMM of N columns
takes 2 N K FLOP a row, and packing moves K / 16 bytes a row.

On sm_90 the same source dequantizes to bf16 in registers, which is correct but slow. There Triton reads scale byte 0
as 0, on sm_100 as 2^-127.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..mx_format import TILE, MXParts
from .format import tile_of
from .launch import Launched
from .library import cdiv, next_power_of_2

STRIP = 16  # row tiles of a strip, see tile_of
CHUNKS = 8  # chunks of 128 values whose scales one program packs
MOST_TILES = 65535  # row tiles of an operand: CUDA's limit for the second axis of a grid
GEMM_OPTIONS = {"num_warps": 8, "num_stages": 4}


@Launched
@triton.jit
def _pack_scales_kernel(packed, scale, rows, blocks, chunks, group_stride, row_stride, block_stride,
                        BLOCK: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, CHUNKS: tl.constexpr):
    """Packs scale [E, rows, blocks] to packed [E, ceil(rows / 128), chunks, 32, 4, 4], with zeros in the padding.

    A chunk has the scales of 128 rows and 128 values of each. Its byte (i, j, l) belongs to row 32 j + i and to the
    values from 32 l on. Grid (ceil(chunks / CHUNKS), ceil(rows / 128), E).
    """
    group = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, 512 * CHUNKS)
    chunk = tl.program_id(0) * CHUNKS + i // 512
    row = tl.program_id(1) * 128 + i // 4 % 4 * 32 + i // 16 % 32
    block = (chunk * 4 + i % 4) // (BLOCK // 32)
    source = scale + group * group_stride + (row // ROWS_PER_SCALE).to(tl.int64) * row_stride
    byte = tl.load(source + block.to(tl.int64) * block_stride, (row < rows) & (block < blocks), other=0)
    first = (group * tl.num_programs(1) + tl.program_id(1)) * chunks
    tl.store(packed + (first + chunk) * 512 + i % 512, byte, chunk < chunks)


@triton.jit
def _scales(desc, tile, k):
    """The scale bytes [rows, 4] of the 128 values from k on."""
    TILES: tl.constexpr = desc.block_shape[0]
    packed = desc.load([tile, k // 128, 0, 0]).reshape(TILES, 1, 32, 4, 4)
    return packed.trans(0, 3, 2, 1, 4).reshape(TILES * 128, 4)


@triton.jit
def _product(a_desc, a_scale_desc, a_row, a_tile, b_desc, b_scale_desc, b_row, b_tile, first, last):
    """a[from a_row, first to last] b[from b_row, first to last]^T in float32.

    a_tile, b_tile: where the rows' scales are, in tiles of 128 rows.
    """
    ROWS: tl.constexpr = a_desc.block_shape[0]
    COLUMNS: tl.constexpr = b_desc.block_shape[0]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(first, last, 128):
        acc = tl.dot_scaled(a_desc.load([a_row, k]), _scales(a_scale_desc, a_tile, k), "e4m3",
                            b_desc.load([b_row, k]).T, _scales(b_scale_desc, b_tile, k), "e4m3", acc)
    return acc


@Launched
@triton.jit
def _grouped_mm_kernel(out_desc, a_desc, a_scale_desc, b_desc, b_scale_desc, ends, E, P, N, K, E_PAD: tl.constexpr,
                       STRIP: tl.constexpr):
    """One tile of out [P, N] from a [P, K] and b [E * N, K]. Grid: tiles."""
    ROWS: tl.constexpr = out_desc.block_shape[0]
    COLUMNS: tl.constexpr = out_desc.block_shape[1]
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(P, ROWS), tl.cdiv(N, COLUMNS), STRIP)
    row, column = row_tile * ROWS, column_tile * COLUMNS
    e = tl.arange(0, E_PAD)
    # The row's group is the number of ends at or before it. Past the last end the sum is empty, which gives zeros.
    group = tl.sum((tl.load(ends + e, e < E, other=0x7FFFFFFF) <= row).to(tl.int32))
    acc = _product(a_desc, a_scale_desc, row, row_tile, b_desc, b_scale_desc, group * N + column,
                   group * tl.cdiv(N, 128) + column // 128, 0, tl.where(group < E, K, 0))
    out_desc.store([row, column], acc.to(out_desc.dtype))


@Launched
@triton.jit
def _grouped_mm_wgrad_kernel(out_desc, g_desc, g_scale_desc, a_desc, a_scale_desc, ends, N, K, STRIP: tl.constexpr):
    """One tile of out [E, N, K] from g [N, P] and a [K, P]. Grid: (tiles, E)."""
    ROWS: tl.constexpr = out_desc.block_shape[1]
    COLUMNS: tl.constexpr = out_desc.block_shape[2]
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(N, ROWS), tl.cdiv(K, COLUMNS), STRIP)
    row, column, group = row_tile * ROWS, column_tile * COLUMNS, tl.program_id(1)
    first = tl.load(ends + group - 1, group > 0, other=0)
    acc = _product(g_desc, g_scale_desc, row, row_tile, a_desc, a_scale_desc, column, column // 128, first,
                   tl.load(ends + group))
    out_desc.store([group, row, column], acc.to(out_desc.dtype).reshape(1, ROWS, COLUMNS))


def _pack_scales(scale: torch.Tensor, rows: int, depth: int, block: int, rows_per_scale: int = 1) -> torch.Tensor:
    """Packs scales [(E,) rows / rows_per_scale, ceil(depth / block)] of any strides as the tensor cores read them."""
    scale = scale if scale.dim() == 3 else scale.unsqueeze(0)
    groups, tiles, chunks = scale.shape[0], cdiv(rows, TILE), cdiv(depth, TILE)
    if tiles > MOST_TILES:
        raise ValueError(f"a matrix of {rows} rows is too large: expected at most {MOST_TILES * TILE}")
    packed = scale.new_empty((groups * tiles, chunks, 2, 256))
    _pack_scales_kernel[(cdiv(chunks, CHUNKS), tiles, groups)](
        packed, scale, rows, scale.shape[2], chunks, *scale.stride(), block, rows_per_scale, CHUNKS)
    return packed


def _descriptors(data: torch.Tensor, packed_scales: torch.Tensor, rows: int) -> tuple:
    """TMA descriptors of an operand and its packed scales, for boxes of `rows` rows by 128 values."""
    return (TensorDescriptor.from_tensor(data, [rows, TILE]),
            TensorDescriptor.from_tensor(packed_scales, [rows // TILE, 1, 2, 256]))


def _columns(size: int) -> int:
    """Columns of a tile. 256 need the least traffic in shared memory, unless too many of them lie outside the matrix.
    """
    return 256 if size % 256 == 0 or size > 1024 else 128


def grouped_mm_mxfp8(a_PK: MXParts, b_ENK: MXParts, ends_E: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiplies the rows of group e with b_ENK[e]^T: [P, N] in `out_dtype` (bf16, fp16 or fp32).

    Args:
        a_PK: contiguous data, scales of any strides, blocks of 32 or 128.
        b_ENK: the same. It may be tiled.
        ends_E: int32 ends of the groups' rows on the device, multiples of 128.

    Rows at and past ends_E[-1] come back as zeros.
    """
    a, b = a_PK.qdata, b_ENK.qdata
    (P, K), (E, N, _) = a.shape, b.shape
    out = a.new_empty((P, N), dtype=out_dtype)
    if P == 0:
        return out
    columns = _columns(N)
    a_packed = _pack_scales(a_PK.scale_bytes, P, K, a_PK.block_size)
    b_packed = _pack_scales(b_ENK.scale_bytes, N, K, b_ENK.block_size, TILE if b_ENK.tiled else 1)
    _grouped_mm_kernel[(cdiv(P, TILE) * cdiv(N, columns), )](
        TensorDescriptor.from_tensor(out, [TILE, columns]), *_descriptors(a, a_packed, TILE),
        *_descriptors(b.view(E * N, K), b_packed, columns), ends_E, E, P, N, K, next_power_of_2(E), STRIP,
        **GEMM_OPTIONS)
    return out


def grouped_mm_wgrad_mxfp8(g_NP: MXParts, a_KP: MXParts, ends_E: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Contracts over each group's rows: out[e] = g_NP[:, rows of e] a_KP[:, rows of e]^T, [E, N, K] in `out_dtype`.

    Args:
        g_NP, a_KP: column forms, with blocks along the rows; otherwise as in `grouped_mm_mxfp8`.
        ends_E: as in `grouped_mm_mxfp8`. An empty group gives zeros.
    """
    g, a = g_NP.qdata, a_KP.qdata
    (N, P), K, E = g.shape, a.shape[0], ends_E.shape[0]
    out = g.new_empty((E, N, K), dtype=out_dtype)
    if P == 0:
        return out.zero_()
    columns = _columns(K)
    g_packed = _pack_scales(g_NP.scale_bytes, N, P, g_NP.block_size)
    a_packed = _pack_scales(a_KP.scale_bytes, K, P, a_KP.block_size)
    _grouped_mm_wgrad_kernel[(cdiv(N, TILE) * cdiv(K, columns), E)](
        TensorDescriptor.from_tensor(out, [1, TILE, columns]), *_descriptors(g, g_packed, TILE),
        *_descriptors(a, a_packed, columns), ends_E, N, K, STRIP, **GEMM_OPTIONS)
    return out
