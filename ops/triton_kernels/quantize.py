# SPDX-License-Identifier: Apache-2.0
"""Casts to and from MXFP8. The oracle of each is the function of ds_mxfp8_moe.mx that it names, to the byte.

All are bound by memory: one read of the input, one write of each output, 16 bytes a thread and access, or 8 where a
warp's then are a row of the tile. Programs next to each other work on neighbouring columns of the same rows, so that
what is in flight lies together in memory.

    kernel                     grid                                   bytes a value (bf16)
    _quantize_rows_kernel      row tiles x column tiles               2 + 1
    _pointers_kernel           1                                      where matrices lie that are not evenly spaced
    _quantize_matrix_kernel    (row tiles x column tiles, experts)    2 + 1 for each layout written
    _rescale_kernel            row tiles x column tiles               1 + 1; rescale_tiles.py's has the same
    _dequantize_kernel         (row tiles x column tiles, experts)    1 + 2

Numbers: float32 throughout, never flushed to zero. Scales are powers of two, so every product but the last rounding
is exact; 1 / scale is a normal number for every scale there is. Triton's cast to e4m3 is cvt.rn.satfinite: it rounds
to nearest even, saturates (`floor` needs that) and makes NaN 0x7F.

FAR: what is counted within a tile, in int32 else, is counted in int64, since the product with some stride may be
beyond int32: rows of millions of values, or so far apart; columns of tens of millions; scales beyond 2^31.
"""

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from ..mx_format import TILE, MXParts
from .format import from_e4m3, largest_in_rows, new_scale, power_of_two, quantized_rows, to_e4m3
from .launch import Launched
from .library import cdiv, check_alike, far, operator
from .rescale_tiles import rescale_tiles_kernel
from .transpose import below, by_column, counted, in_order, loaded_row, store_columns, store_transposed

MAX_POINTERS = 64  # that one launch writes into a table


class Tile(NamedTuple):
    """What one program covers: rows and columns of its input, with how many warps.

    Attributes:
        group: row tiles that run side by side before the next column tile begins, so that the transposed output is
            written in runs of group * rows bytes.
        vector: most neighbours in a row that a thread holds. Fewer mean more rows, and cheaper maxima over rows.
        registers: most that a thread may have. With 80, which is enough for all of 64 values a thread, 24 warps fit a
            multiprocessor; ptxas would take more and leave room for 16.
    """

    rows: int
    columns: int
    warps: int
    group: int = 1
    vector: int = 16
    registers: int | None = None

    def divides(self, rows: int, columns: int) -> bool:
        return rows % self.rows == 0 and columns % self.columns == 0


ROWS_TILE = Tile(32, 128, 8)
COLUMNS_TILE = Tile(256, 64, 8, group=2, vector=8)
BOTH_TILES = {32: Tile(128, 64, 8, group=4, vector=8), 128: Tile(128, 128, 8, group=4, vector=4, registers=80)}
TILED_TILE = Tile(128, 128, 8, group=4, registers=80)
RESCALE_TILES = {32: Tile(256, 128, 8, group=2), 128: Tile(256, 32, 2, group=2, vector=8)}
WHOLE_TILE = Tile(256, 128, 8)  # rescale_tiles.py's
DEQUANTIZE_TILE = Tile(16, 128, 4)


@triton.jit
def _tile_origin(N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, FAR: tl.constexpr):
    """First row, int64, and column of this program's tile."""
    pid = tl.program_id(0)
    per_group: tl.constexpr = (N + BN - 1) // BN * GROUP
    return (pid // per_group * GROUP + pid % GROUP).to(tl.int64) * BM, counted(pid % per_group // GROUP * BN, FAR)


@Launched
@triton.jit
def _quantize_rows_kernel(x_ptr, data_ptr, scale_ptr, R, row_stride, scale_stride_r, scale_stride_k, K: tl.constexpr,
                          B: tl.constexpr, FLOOR: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
                          FAR: tl.constexpr):
    r0, k0 = _tile_origin(K, BR, BK, 1, FAR)
    r = counted(tl.arange(0, BR), FAR)[:, None]
    k = tl.arange(0, BK)[None, :]
    mask = (r < R - r0) & (k < K - k0)
    x = tl.load(x_ptr + (r0 * row_stride + k0) + (r * row_stride + k), mask, other=0.0).to(tl.float32)
    data, scale = quantized_rows(x, B, FLOOR)
    tl.store(data_ptr + (r0 * K + k0) + (r * K + k), data, mask)
    block = counted(tl.arange(0, BK // B), FAR)[None, :]
    scale_ptr += r0 * scale_stride_r + k0 // B * scale_stride_k
    tl.store(scale_ptr + (r * scale_stride_r + block * scale_stride_k), scale, (r < R - r0) & (block * B < K - k0))


@Launched
@triton.jit
def _pointers_kernel(odd, table_ptr):
    """Writes pointers: with their table, matrices that lie anywhere take one launch, and no copy from the host.

    `odd`: pointers p as 2 p + 1. Triton compiles anew for each pattern of arguments that are multiples of 16.
    """
    for i in tl.static_range(len(odd)):
        tl.store(table_ptr + i, odd[i].to(tl.int64) >> 1)


@triton.jit
def _matrix(first, stride, table_ptr, expert, ALIGNMENT: tl.constexpr):
    """The expert's matrix: so far from the first one, or the table's."""
    if table_ptr is None:
        matrix = first + expert.to(tl.int64) * stride
    else:
        matrix = tl.multiple_of(tl.load(table_ptr + expert).to(first.dtype), ALIGNMENT)
    return matrix


@Launched
@triton.jit
def _quantize_matrix_kernel(first, second, first_stride, second_stride, first_table, second_table, rows_ptr,
                            rows_scale_ptr, rows_scale_stride_m, rows_scale_stride_n, columns_ptr, columns_scale_ptr,
                            M_FIRST, M, row_stride, N: tl.constexpr, B: tl.constexpr, FLOOR: tl.constexpr,
                            TILED: tl.constexpr, TO_ROWS: tl.constexpr, TO_COLUMNS: tl.constexpr, PARTS: tl.constexpr,
                            ALIGNMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
                            VECTOR: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr, FAR: tl.constexpr):
    """One matrix [M, N] for each expert: rows [0, M_FIRST) from `first`, the others, if any, from `second`. TILED: the
    program's tile, then 128 x 128, has one scale."""
    LANES: tl.constexpr = 32 * VECTOR // BN
    expert = tl.program_id(1)
    m0, n0 = _tile_origin(N, BM, BN, GROUP, FAR)
    if m0 >= M:
        return
    height, width = tl.minimum(M - m0, BM).to(tl.int32), N - n0
    m = counted(loaded_row(BM, LANES, WARPS), FAR)
    n = tl.max_contiguous(tl.arange(0, BN), VECTOR)
    mask = below(m, height, WHOLE)[:, None] & below(n, width, WHOLE)[None, :]
    offset = m[:, None] * row_stride + n[None, :]
    pointer = _matrix(first, first_stride, first_table, expert, ALIGNMENT) + (m0 * row_stride + n0)
    if PARTS == 2:
        lower = _matrix(second, second_stride, second_table, expert, ALIGNMENT)
        lower += (m0 - M_FIRST) * row_stride + n0
        x = tl.load(tl.where(m < M_FIRST - m0, pointer, lower)[:, None] + offset, mask, other=0.0).to(tl.float32)
    else:
        x = tl.load(pointer + offset, mask, other=0.0).to(tl.float32)

    expert = expert.to(tl.int64)
    rows_ptr += expert * M * N + m0 * N + n0
    columns_ptr += expert * M * N + n0.to(tl.int64) * M + m0
    row_offset = m[:, None] * N + n[None, :]
    if TILED:
        byte, inverse = new_scale(tl.max(largest_in_rows(x, BN), axis=0)[:, None], FLOOR)
        tiles_n: tl.constexpr = (N + BN - 1) // BN
        rows_scale_ptr += expert * tl.cdiv(M, BM) * tiles_n
        rows_scale_ptr += m0 // BM * rows_scale_stride_m + n0 // BN * rows_scale_stride_n
        tl.store(rows_scale_ptr + tl.arange(0, 1)[:, None], byte)
        x *= inverse
        if TO_ROWS:
            tl.store(rows_ptr + row_offset, to_e4m3(x, 1.0), mask)
        if TO_COLUMNS:
            store_transposed(by_column(in_order(x, LANES, WARPS)), columns_ptr, n, height, width, M, VECTOR, WHOLE,
                             FAR)
    else:
        if TO_ROWS:
            data, scale = quantized_rows(x, B, FLOOR)
            tl.store(rows_ptr + row_offset, data, mask)
            blocks_n: tl.constexpr = (N + B - 1) // B
            rows_scale_ptr += expert * M * blocks_n + m0 * rows_scale_stride_m + n0 // B * rows_scale_stride_n
            block = counted(tl.arange(0, BN // B), FAR)
            tl.store(rows_scale_ptr + (m[:, None] * rows_scale_stride_m + block[None, :] * rows_scale_stride_n),
                     scale, below(m, height, WHOLE)[:, None] & below(block * B, width, WHOLE)[None, :])
        if TO_COLUMNS:
            columns_scale_ptr += expert * tl.cdiv(M, B) * N + m0 // B * N + n0
            store_columns(in_order(x, LANES, WARPS), columns_ptr, columns_scale_ptr, n, height, width, M, N, B,
                          FLOOR, VECTOR, WHOLE, FAR)


@Launched
@triton.jit
def _rescale_kernel(data_ptr, scale_ptr, scale_stride_p, scale_stride_k, out_ptr, out_scale_ptr, P, K: tl.constexpr,
                    B_IN: tl.constexpr, B: tl.constexpr, FLOOR: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
                    GROUP: tl.constexpr, VECTOR: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr,
                    FAR: tl.constexpr):
    LANES: tl.constexpr = 32 * VECTOR // BK
    SHARED: tl.constexpr = min(B_IN, BK)
    p0, k0 = _tile_origin(K, BP, BK, GROUP, FAR)
    if p0 >= P:
        return
    height, width = tl.minimum(P - p0, BP).to(tl.int32), K - k0
    p = counted(loaded_row(BP, LANES, WARPS), FAR)
    k = tl.max_contiguous(tl.arange(0, BK), VECTOR)
    data = tl.load(data_ptr + (p0 * K + k0) + (p[:, None] * K + k[None, :]),
                   below(p, height, WHOLE)[:, None] & below(k, width, WHOLE)[None, :], other=0)
    block = counted(tl.arange(0, BK // SHARED), FAR)
    scale_ptr += p0 * scale_stride_p + k0 // B_IN * scale_stride_k
    scale = tl.load(scale_ptr + (p[:, None] * scale_stride_p + block[None, :] * scale_stride_k),
                    below(p, height, WHOLE)[:, None] & below(block * SHARED, width, WHOLE)[None, :], other=0)
    x = tl.reshape(from_e4m3(data), [BP, BK // SHARED, SHARED])
    # power_of_two, but for byte 255: Inf makes new scales 255 as NaN does.
    power = tl.maximum(scale.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
    x = tl.reshape(x * power[:, :, None], [BP, BK])
    out_ptr += k0.to(tl.int64) * P + p0
    out_scale_ptr += p0 // B * K + k0
    store_columns(in_order(x, LANES, WARPS), out_ptr, out_scale_ptr, k, height, width, P, K, B, FLOOR, VECTOR, WHOLE,
                  FAR)


@Launched
@triton.jit
def _dequantize_kernel(data_ptr, scale_ptr, scale_stride_e, scale_stride_r, scale_stride_k, out_ptr, R,
                       K: tl.constexpr, B: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, BR: tl.constexpr,
                       BK: tl.constexpr, VECTOR: tl.constexpr, FAR: tl.constexpr):
    expert = tl.program_id(1).to(tl.int64)
    r0, k0 = _tile_origin(K, BR, BK, 1, FAR)
    r = counted(tl.arange(0, BR), FAR)[:, None]
    # As many values as a store of the wider type takes: a load as wide in bytes would deal them to other threads.
    k = tl.max_contiguous(tl.arange(0, BK), VECTOR)[None, :]
    mask = (r < R - r0) & (k < K - k0)
    origin = (expert * R + r0) * K + k0
    data = tl.load(data_ptr + origin + (r * K + k), mask, other=0)
    block = counted(tl.arange(0, BK // B), FAR)[None, :]
    if ROWS_PER_SCALE > 1:
        scale_ptr += r0 // ROWS_PER_SCALE * scale_stride_r
        scale_row = tl.zeros([BR, 1], tl.int32)
    else:
        scale_ptr += r0 * scale_stride_r
        scale_row = r
    scale = tl.load(scale_ptr + (expert * scale_stride_e + k0 // B * scale_stride_k) +
                    (scale_row * scale_stride_r + block * scale_stride_k), (r < R - r0) & (block * B < K - k0),
                    other=0)
    x = tl.reshape(from_e4m3(data), [BR, BK // B, B])
    x = tl.reshape(x * power_of_two(scale)[:, :, None], [BR, BK])
    tl.store(out_ptr + origin + (r * K + k), x.to(out_ptr.dtype.element_ty), mask)


def _programs(rows: int, columns: int, tile: Tile) -> int:
    """Programs for one matrix; those that fill up the last group of row tiles have nothing to do."""
    return cdiv(cdiv(rows, tile.rows), tile.group) * tile.group * cdiv(columns, tile.columns)


def _outputs(like: torch.Tensor, data_shape: tuple, scale_shape: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales."""
    return (torch.empty(data_shape, dtype=torch.float8_e4m3fn, device=like.device),
            torch.empty(scale_shape, dtype=torch.uint8, device=like.device))


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _spans(scale: torch.Tensor) -> map:
    """How far scales lie apart along each axis: those of a few rows as far as those of all rows."""
    return map(mul, scale.shape, scale.stride())


def _rows_outputs(x_RK, block_size, scaling_mode, scale_k_major):
    rows, columns = x_RK.shape
    blocks = cdiv(columns, block_size)
    return _outputs(x_RK, (rows, columns), (blocks, rows) if scale_k_major else (rows, blocks))


@operator(_rows_outputs)
def _quantize_rows(x_RK: torch.Tensor, block_size: int, scaling_mode: str,
                   scale_k_major: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x_RK = _dense_rows(x_RK)
    rows, columns = x_RK.shape
    data, scale = _rows_outputs(x_RK, block_size, scaling_mode, scale_k_major)
    if rows and columns:
        tile = ROWS_TILE
        strides = (1, rows) if scale_k_major else (scale.shape[1], 1)
        _quantize_rows_kernel[(_programs(rows, columns, tile), )](
            x_RK, data.view(torch.uint8), scale, rows, x_RK.stride(0), *strides, columns, block_size,
            scaling_mode == "floor", tile.rows, tile.columns,
            far(tile.rows * max(columns, x_RK.stride(0)), scale.numel()), num_warps=tile.warps)
    return data, scale


def _matrix_outputs(x, experts, block_size, scaling_mode, tiled, rows, columns, scale_k_major):
    like = x[0]
    m = sum(part.shape[-2] for part in x[::1 if like.dim() == 3 else experts])
    n = like.shape[-1]
    blocks_m, blocks_n = cdiv(m, block_size), cdiv(n, block_size)
    rows_scale, columns_scale = (m, blocks_n), (blocks_m, n)
    if tiled:
        rows_scale, columns_scale = (blocks_m, blocks_n), (blocks_n, blocks_m)
    elif scale_k_major:
        rows_scale = blocks_n, m
    out = []
    if rows:
        out += _outputs(like, (experts, m, n), (experts, *rows_scale))
    if columns:
        out += _outputs(like, (experts, n, m), (experts, *columns_scale))
    return out[:3] if tiled else out


def _even_distance(matrices: Sequence[torch.Tensor]) -> int | None:
    """Elements from each matrix to the next in memory if they are the same for all, else None."""
    addresses = [x.data_ptr() for x in matrices]
    distances = {b - a for a, b in zip(addresses, addresses[1:], strict=False)}
    return None if len(distances) > 1 else (distances.pop() if distances else 0) // matrices[0].element_size()


def _tables(parts: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], int]:
    """Each part's pointers on the device, and the bytes of which all are multiples: 16 or 1."""
    pointers = [x.data_ptr() for part in parts for x in part]
    table = torch.empty(len(pointers), dtype=torch.int64, device=parts[0][0].device)
    for at in range(0, len(pointers), MAX_POINTERS):
        _pointers_kernel[(1, )](tuple(2 * p + 1 for p in pointers[at:at + MAX_POINTERS]), table[at:], num_warps=1)
    aligned = all(p % 16 == 0 for p in pointers)
    return list(table.split(len(parts[0]))), 16 if aligned else 1


@operator(_matrix_outputs)
def _quantize_matrices(x: Sequence[torch.Tensor], experts: int, block_size: int, scaling_mode: str, tiled: bool,
                       rows: bool, columns: bool, scale_k_major: bool) -> list[torch.Tensor]:
    """Parts of matrices, each [M_i, N] times `experts` or one [E, M_i, N]; data and scales along N, then along M, of
    what is wanted. With `tiled` the first scales are the tiles', of columns alone transposed; there are no others."""
    out = _matrix_outputs(x, experts, block_size, scaling_mode, tiled, rows, columns, scale_k_major)
    # Of what is not wanted, tensors to which nothing is written.
    rows_data, rows_scale, columns_data, columns_scale = out[0], out[1], out[2 if rows and columns else 0], out[-1]
    n, row_stride = x[0].shape[-1], x[0].stride(-2)
    if x[0].dim() == 3:
        parts = [[part] for part in x]
        strides = [part.stride(0) for part in x]
    else:
        parts = [x[i:i + experts] for i in range(0, len(x), experts)]
        strides = [_even_distance(part) for part in parts]
    heights = [part[0].shape[-2] for part in parts]
    m = sum(heights)
    if m * n * experts == 0:
        return out
    even = None not in strides
    strides = strides if even else [0] * len(parts)
    if tiled:
        scale_strides = (rows_scale.shape[2], 1) if rows else (1, rows_scale.shape[2])
    else:
        scale_strides = (1, m) if scale_k_major else (cdiv(n, block_size), 1)
    tile = TILED_TILE if tiled else BOTH_TILES[block_size] if rows else COLUMNS_TILE
    # Triton deals values to threads alike for all accesses of one shape; stores of bytes are the widest.
    vector = tile.vector if rows or tile.rows == tile.columns else min(tile.vector, 16 // x[0].element_size())
    # Both layouts of float32 with scales of their own need more than others.
    registers = tile.registers if tiled or x[0].element_size() == 2 else None
    tables, alignment = ([None] * len(parts), 1) if even else _tables(parts)
    whole, distant = tile.divides(m, n), far(tile.rows * max(n, row_stride), tile.columns * m, rows_scale.numel())
    _quantize_matrix_kernel[(_programs(m, n, tile), experts)](
        parts[0][0], parts[-1][0], strides[0], strides[-1], tables[0], tables[-1], rows_data.view(torch.uint8),
        rows_scale, *scale_strides, columns_data.view(torch.uint8), columns_scale, heights[0], m, row_stride, n,
        block_size, scaling_mode == "floor", tiled, rows, columns, len(parts), alignment, tile.rows, tile.columns,
        tile.group, vector, tile.warps, whole, distant, num_warps=tile.warps, maxnreg=registers)
    return out


def _rescale_outputs(data_PK, scale, block_size_in, block_size, scaling_mode):
    p, k = data_PK.shape
    return _outputs(data_PK, (k, p), (cdiv(p, block_size), k))


@operator(_rescale_outputs)
def _rescale_transposed(data_PK: torch.Tensor, scale: torch.Tensor, block_size_in: int, block_size: int,
                        scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    p, k = data_PK.shape
    out, out_scale = _rescale_outputs(data_PK, scale, block_size_in, block_size, scaling_mode)
    # Gluon has no interpreter.
    if p and k and block_size_in == block_size == 128 and WHOLE_TILE.divides(p, k) and not knobs.runtime.interpret:
        rescale_tiles_kernel[(p // WHOLE_TILE.rows * (k // WHOLE_TILE.columns), )](
            data_PK.view(torch.uint8), scale, *scale.stride(), out.view(torch.uint8), out_scale, p, k,
            scaling_mode == "floor", *WHOLE_TILE[:3], num_warps=WHOLE_TILE.warps)
    elif p and k:
        tile = RESCALE_TILES[block_size]
        _rescale_kernel[(_programs(p, k, tile), )](
            data_PK.view(torch.uint8), scale, *scale.stride(), out.view(torch.uint8), out_scale, p, k,
            block_size_in, block_size, scaling_mode == "floor", tile.rows, tile.columns, tile.group,
            tile.vector, tile.warps, tile.divides(p, k), far(tile.rows * k, tile.columns * p, *_spans(scale)),
            num_warps=tile.warps, maxnreg=tile.registers)
    return out, out_scale


def _dequantized(data_ERK, scale, block_size, tiled, dtype):
    return torch.empty(data_ERK.shape, dtype=dtype, device=data_ERK.device)


@operator(_dequantized)
def _dequantize(data_ERK: torch.Tensor, scale: torch.Tensor, block_size: int, tiled: bool,
                dtype: torch.dtype) -> torch.Tensor:
    experts, rows, k = data_ERK.shape
    out = _dequantized(data_ERK, scale, block_size, tiled, dtype)
    if out.numel():
        tile = DEQUANTIZE_TILE
        _dequantize_kernel[(_programs(rows, k, tile), experts)](
            data_ERK.view(torch.uint8), scale, *scale.stride(), out, rows, k, block_size, TILE if tiled else 1,
            tile.rows, tile.columns, 16 // out.element_size(), far(tile.rows * k, *_spans(scale)),
            num_warps=tile.warps)
    return out


def quantize_rows(x_RK: torch.Tensor, block_size: int, scaling_mode: str, scale_k_major: bool) -> MXParts:
    """mx.quantize of rows [R, K] (bf16, fp16, fp32; K a multiple of 32; any distance between rows).

    Scales are [R, ceil(K / block_size)], in memory as such or, with `scale_k_major`, transposed.
    """
    data, scale = _quantize_rows(x_RK, block_size, scaling_mode, scale_k_major)
    return MXParts(data, scale.t() if scale_k_major else scale, block_size)


def quantize_columns(x_PN: torch.Tensor, block_size: int, scaling_mode: str) -> MXParts:
    """mx.quantize(x_PN.t()), [N, P], for GEMMs that contract over the rows; P a multiple of 32. Scales in memory:
    [ceil(P / block_size), N]."""
    x_PN = _dense_rows(x_PN)
    data, scale = _quantize_matrices([x_PN], 1, block_size, scaling_mode, False, False, True, False)
    return MXParts(data[0], scale[0].t(), block_size)


def quantize_rows_and_columns(x_PN: torch.Tensor, block_size: int, scaling_mode: str,
                              scale_k_major: bool) -> tuple[MXParts, MXParts]:
    """quantize_rows(x_PN) and quantize_columns(x_PN) out of one read; P and N multiples of 32."""
    x_PN = _dense_rows(x_PN)
    data_PN, scale_PN, data_NP, scale_NP = _quantize_matrices([x_PN], 1, block_size, scaling_mode, False, True, True,
                                                              scale_k_major)
    scale_PN = scale_PN[0].t() if scale_k_major else scale_PN[0]
    return MXParts(data_PN[0], scale_PN, block_size), MXParts(data_NP[0], scale_NP[0].t(), block_size)


def quantize_weights(weights: Sequence[torch.Tensor | Sequence[torch.Tensor]], block_size: int, scaling_mode: str,
                     rows: bool, columns: bool) -> tuple[MXParts | None, MXParts | None]:
    """Expert weights, straight from their parameters, for the GEMMs that contract over K (`rows`) and N (`columns`).

    Args:
        weights: one part, or two that lie one above the other (gate and up): each E matrices [N_i, K] with dense rows,
            or one stacked [E, N_i, K]. One dtype; K, and with block size 32 also the sum N of N_i, multiples of 32.

    Returns:
        [E, N, K] and [E, K, N], None where not asked for. With block size 128 mx.quantize_tiles of the parts, its
        bytes also transposed, one set of scales for both, contiguous for one alone; with 32 mx.quantize of the parts
        and of their transpose, the latter's scales in memory [E, N / 32, K].
    """
    tiled = block_size == TILE
    experts = len(weights[0])
    if not all(isinstance(part, torch.Tensor) for part in weights):
        weights = [matrix for part in weights for matrix in part]
    dtype, steps = weights[0].dtype, (weights[0].stride(-2), 1)
    check_alike(weights, dtype)
    if any(w.stride()[-2:] != steps for w in weights):
        weights = [w.contiguous() for w in weights]
    out = _quantize_matrices(list(weights), experts, block_size, scaling_mode, tiled, rows, columns, False)
    of_columns = None
    if columns:
        # The tiles' scales stand in the order of the rows' where there are rows.
        scale = out[1] if tiled else out[-1]
        of_columns = MXParts(out[2 * rows], scale if tiled and not rows else scale.transpose(1, 2), block_size, tiled)
    return MXParts(out[0], out[1], block_size, tiled) if rows else None, of_columns


def rescale_transposed(x_PK: MXParts, block_size: int, scaling_mode: str) -> MXParts:
    """mx.transpose_rescale of rows [P, K]: [K, P] with blocks along P, scales in memory [ceil(P / block_size), K]."""
    data, scale = _rescale_transposed(x_PK.qdata.contiguous(), x_PK.scale_bytes, x_PK.block_size, block_size,
                                      scaling_mode)
    return MXParts(data, scale.t(), block_size)


def dequantize(x: MXParts, dtype: torch.dtype) -> torch.Tensor:
    """mx.dequantize of rows [R, K] or of each expert's matrix [E, R, K], tiled or not, to bf16, fp16 or fp32."""
    data, scale = x.qdata.contiguous(), x.scale_bytes
    if data.dim() == 2:
        return _dequantize(data.unsqueeze(0), scale.unsqueeze(0), x.block_size, x.tiled, dtype)[0]
    return _dequantize(data, scale, x.block_size, x.tiled, dtype)
