# SPDX-License-Identifier: Apache-2.0
"""Casts to and from MXFP8. Each function names its oracle in ds_mxfp8_moe/compute/mx.py, which it equals to the byte.

All kernels are bound by memory. They read the input once and write each output once. A thread moves 16 bytes at a
time, or 8 where the threads of a warp then cover one row of the tile. Neighboring programs handle neighboring
columns of the same rows, so that accesses at the same time lie together in memory.

    kernel                     grid                                   bytes read + written for each value (bf16)
    _quantize_rows_kernel      row tiles x column tiles               2 + 1
    _quantize_matrix_kernel    (row tiles x column tiles, experts)    2 + 1 for each layout written
    _rescale_kernel            row tiles x column tiles               1 + 1
    _dequantize_kernel         (row tiles x column tiles, experts)    1 + 2
    _places_kernel             1                                      writes a table of distances, no values

Numbers are float32 throughout, and subnormals are never flushed to zero. Scales are powers of two, so every product is
exact, and only the last cast rounds. 1 / scale is a normal number for every scale. Triton's cast to e4m3 is
cvt.rn.satfinite: it rounds to nearest even, saturates (scaling mode "floor" needs that) and turns NaN into 0x7F.

Offsets of tiles are int64. Offsets within a tile are int32, which takes half the registers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..mx_format import TILE, MXParts
from .format import from_e4m3, largest_in_rows, new_scale, power_of_two, quantized_rows, to_e4m3
from .launch import Launched
from .library import cdiv, even_distance, weights_of
from .transpose import below, by_column, in_order, loaded_row, store_columns, store_transposed

MOST_PLACES = 64  # places that one launch writes into a table
FAR = 2**62


class Tile(NamedTuple):
    """The part of a matrix that one program handles.

    Attributes:
        rows, columns: size of the tile.
        warps: warps of the program.
        strip: row tiles that run one after the other before the next column tile begins. The transposed output is
            then written in runs of strip * rows bytes.
        vector: most neighbors in a row that a thread holds. With fewer, a thread holds more rows, and maxima over
            rows cost less.
        registers: most registers of a thread, or None for no limit. 80 suffice for 64 values a thread and let 24 warps
            share a multiprocessor. Without the limit ptxas takes more, and only 16 warps fit.
    """

    rows: int
    columns: int
    warps: int
    strip: int = 1
    vector: int = 16
    registers: int | None = None

    def divides(self, rows: int, columns: int) -> bool:
        return rows % self.rows == 0 and columns % self.columns == 0

    def programs(self, rows: int, columns: int) -> int:
        """Programs for a matrix. Row tiles are padded to whole strips: the programs of the padding do nothing."""
        if max(self.rows * columns, self.columns * rows) > 0x7FFFFFFF:
            raise ValueError(f"a matrix of {rows} rows and {columns} columns is too large for the MXFP8 kernels: "
                             "they compute offsets within a tile in int32. Cut the matrix into parts")
        return cdiv(cdiv(rows, self.rows), self.strip) * self.strip * cdiv(columns, self.columns)


ROWS_TILE = Tile(32, 128, 8)
COLUMNS_TILE = Tile(256, 64, 8, strip=2, vector=8)
BOTH_TILES = {32: Tile(128, 64, 8, strip=4, vector=8), 128: Tile(128, 128, 8, strip=4, vector=4, registers=80)}
TILED_TILE = Tile(128, 128, 8, strip=4, registers=80)
RESCALE_TILES = {32: Tile(256, 128, 8, strip=2), 128: Tile(256, 32, 2, strip=2, vector=8)}
DEQUANTIZE_TILE = Tile(16, 128, 4)


@triton.jit
def tile_origin(N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr):
    """The first row (int64) and the first column of this program's tile."""
    pid = tl.program_id(0)
    per_strip: tl.constexpr = (N + BN - 1) // BN * STRIP
    return (pid // per_strip * STRIP + pid % STRIP).to(tl.int64) * BM, pid % per_strip // STRIP * BN


@Launched
@triton.jit
def _quantize_rows_kernel(x_ptr, data_ptr, scale_ptr, R, row_stride, scale_stride_r, scale_stride_k, K: tl.constexpr,
                          B: tl.constexpr, FLOOR: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    r0, k0 = tile_origin(K, BR, BK, 1)
    r = tl.arange(0, BR)[:, None]
    k = tl.arange(0, BK)[None, :]
    mask = (r < R - r0) & (k < K - k0)
    x = tl.load(x_ptr + (r0 * row_stride + k0) + (r * row_stride + k), mask, other=0.0).to(tl.float32)
    data, scale = quantized_rows(x, B, FLOOR)
    tl.store(data_ptr + (r0 * K + k0) + (r * K + k), data, mask)
    block = tl.arange(0, BK // B)[None, :]
    scale_ptr += r0 * scale_stride_r + k0 // B * scale_stride_k
    tl.store(scale_ptr + (r * scale_stride_r + block * scale_stride_k), scale, (r < R - r0) & (block * B < K - k0))


@Launched
@triton.jit
def _places_kernel(numbers, table_ptr, FAR: tl.constexpr):
    """Writes a table of distances, with which one launch of the cast reads matrices that lie anywhere in memory.

    `numbers`: one for each distance, as `_tables` makes them. As arguments of the launch, they need no copy from the
    host.
    """
    for i in tl.static_range(len(numbers)):
        tl.store(table_ptr + i, (numbers[i] - FAR) >> 1)


@triton.jit
def _distance(first, address):
    """How many values lie between `first` and an address."""
    return (address - first.to(tl.int64)) // (first.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def _matrix(place, stride, table_ptr, expert, ALIGNMENT: tl.constexpr):
    """The distance of the expert's matrix, where its stack begins at `place`: from the table, or expert * stride if
    there is none."""
    if table_ptr is None:
        distance = expert.to(tl.int64) * stride
    else:
        distance = tl.multiple_of(tl.load(table_ptr + expert), ALIGNMENT)
    return place + distance


@Launched
@triton.jit
def _quantize_matrix_kernel(first, second, first_stride, second_stride, first_table, second_table, rows_ptr,
                            rows_scale_ptr, rows_scale_stride_m, rows_scale_stride_n, columns_ptr, columns_scale_ptr,
                            M_FIRST, M, row_stride, N: tl.constexpr, B: tl.constexpr, FLOOR: tl.constexpr,
                            TILED: tl.constexpr, TO_ROWS: tl.constexpr, TO_COLUMNS: tl.constexpr, STACKS: tl.constexpr,
                            ALIGNMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr,
                            VECTOR: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr):
    """Quantizes one matrix [M, N] for each expert along its rows, its columns, or both.

    The matrix consists of STACKS pieces, one above the other: rows [0, M_FIRST) come from the stack that begins at
    `first`, the others from that at `second`. ALIGNMENT divides the distances, in values, between all rows. With TILED
    the program's tile of 128 x 128 values has one scale, else blocks of B values have one each.
    The scales of tiles are stored to `rows_scale_ptr`, for either form.
    """
    LANES: tl.constexpr = 32 * VECTOR // BN
    expert = tl.program_id(1)
    m0, n0 = tile_origin(N, BM, BN, STRIP)
    if m0 >= M:
        return
    height, width = tl.minimum(M - m0, BM).to(tl.int32), N - n0
    m = loaded_row(BM, LANES, WARPS)
    n = tl.max_contiguous(tl.arange(0, BN), VECTOR)
    mask = below(m, height, WHOLE)[:, None] & below(n, width, WHOLE)[None, :]
    offset = m[:, None] * row_stride + n[None, :]
    matrix = _matrix(0, first_stride, first_table, expert, ALIGNMENT)
    if STACKS == 2:
        lower = _matrix(_distance(first, second.to(tl.int64)), second_stride, second_table, expert, ALIGNMENT)
        lower -= M_FIRST.to(tl.int64) * row_stride
        matrix = tl.multiple_of(tl.where(m < M_FIRST - m0, matrix, lower), ALIGNMENT)
    pointer = first + matrix + (m0 * row_stride + n0)
    if STACKS == 2:
        pointer = pointer[:, None]
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
        else:
            store_transposed(by_column(in_order(x, LANES, WARPS)), columns_ptr, n, height, width, M, VECTOR, WHOLE)
    else:
        if TO_ROWS:
            data, scale = quantized_rows(x, B, FLOOR)
            tl.store(rows_ptr + row_offset, data, mask)
            blocks_n: tl.constexpr = (N + B - 1) // B
            rows_scale_ptr += expert * M * blocks_n + m0 * rows_scale_stride_m + n0 // B * rows_scale_stride_n
            block = tl.arange(0, BN // B)
            tl.store(rows_scale_ptr + (m[:, None] * rows_scale_stride_m + block[None, :] * rows_scale_stride_n),
                     scale, below(m, height, WHOLE)[:, None] & below(block * B, width, WHOLE)[None, :])
        if TO_COLUMNS:
            columns_scale_ptr += expert * tl.cdiv(M, B) * N + m0 // B * N + n0
            store_columns(in_order(x, LANES, WARPS), columns_ptr, columns_scale_ptr, n, height, width, M, N, B,
                          FLOOR, VECTOR, WHOLE)


@Launched
@triton.jit
def _rescale_kernel(data_ptr, scale_ptr, scale_stride_p, scale_stride_k, out_ptr, out_scale_ptr, P, K: tl.constexpr,
                    B: tl.constexpr, FLOOR: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
                    STRIP: tl.constexpr, VECTOR: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr):
    LANES: tl.constexpr = 32 * VECTOR // BK
    SHARED: tl.constexpr = min(B, BK)
    p0, k0 = tile_origin(K, BP, BK, STRIP)
    if p0 >= P:
        return
    height, width = tl.minimum(P - p0, BP).to(tl.int32), K - k0
    p = loaded_row(BP, LANES, WARPS)
    k = tl.max_contiguous(tl.arange(0, BK), VECTOR)
    data = tl.load(data_ptr + (p0 * K + k0) + (p[:, None] * K + k[None, :]),
                   below(p, height, WHOLE)[:, None] & below(k, width, WHOLE)[None, :], other=0)
    block = tl.arange(0, BK // SHARED)
    scale_ptr += p0 * scale_stride_p + k0 // B * scale_stride_k
    scale = tl.load(scale_ptr + (p[:, None] * scale_stride_p + block[None, :] * scale_stride_k),
                    below(p, height, WHOLE)[:, None] & below(block * SHARED, width, WHOLE)[None, :], other=0)
    x = tl.reshape(from_e4m3(data), [BP, BK // SHARED, SHARED])
    # As power_of_two, except that byte 255 gives Inf instead of NaN. Both make the new scale 255.
    power = tl.maximum(scale.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
    x = tl.reshape(x * power[:, :, None], [BP, BK])
    out_ptr += k0.to(tl.int64) * P + p0
    out_scale_ptr += p0 // B * K + k0
    store_columns(in_order(x, LANES, WARPS), out_ptr, out_scale_ptr, k, height, width, P, K, B, FLOOR, VECTOR, WHOLE)


@Launched
@triton.jit
def _dequantize_kernel(data_ptr, scale_ptr, scale_stride_e, scale_stride_r, scale_stride_k, out_ptr, R,
                       K: tl.constexpr, B: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, BR: tl.constexpr,
                       BK: tl.constexpr, VECTOR: tl.constexpr):
    expert = tl.program_id(1).to(tl.int64)
    r0, k0 = tile_origin(K, BR, BK, 1)
    r = tl.arange(0, BR)[:, None]
    # A thread loads as many values as it stores. Wider loads would need an exchange between threads.
    k = tl.max_contiguous(tl.arange(0, BK), VECTOR)[None, :]
    mask = (r < R - r0) & (k < K - k0)
    origin = (expert * R + r0) * K + k0
    data = tl.load(data_ptr + origin + (r * K + k), mask, other=0)
    block = tl.arange(0, BK // B)[None, :]
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


def _outputs(like: torch.Tensor, data_shape: tuple, scale_shape: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty data and scales."""
    return (torch.empty(data_shape, dtype=torch.float8_e4m3fn, device=like.device),
            torch.empty(scale_shape, dtype=torch.uint8, device=like.device))


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tables(stacks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """How many values lie between the first matrix of each stack and its others, on the device."""
    size = stacks[0][0].element_size()
    places = [(x.data_ptr() - stack[0].data_ptr()) // size for stack in stacks for x in stack]
    table = torch.empty(len(places), dtype=torch.int64, device=stacks[0][0].device)
    for at in range(0, len(places), MOST_PLACES):
        # Triton compiles anew for each pattern of arguments that are 1, multiples of 16, or fit into int32. These
        # never are.
        numbers = tuple(2 * place + 1 + FAR for place in places[at:at + MOST_PLACES])
        _places_kernel[(1, )](numbers, table[at:], FAR, num_warps=1)
    return list(table.split(len(stacks[0])))


def _quantize_matrices(x: Sequence[torch.Tensor], experts: int, block_size: int, scaling_mode: str, tiled: bool,
                       rows: bool, columns: bool, scale_k_major: bool) -> list[torch.Tensor]:
    """Quantizes each expert's matrix [M, N], where M = sum of M_i.

    Args:
        x: the stacks, one above the other along M: each one tensor [E, M_i, N], or `experts` matrices [M_i, N].
        rows, columns: the forms to write: blocks along N, and blocks along M. With `tiled` only one of the two.

    Returns:
        Data and scales of the rows, then of the columns, as far as they are asked for.
    """
    n, row_stride, size = x[0].shape[-1], x[0].stride(-2), x[0].element_size()
    if x[0].dim() == 3:
        stacks = [[stack] for stack in x]
        strides = [stack.stride(0) * size for stack in x]
    else:
        stacks = [[*x[i:i + experts]] for i in range(0, len(x), experts)]
        strides = [even_distance([w.data_ptr() for w in stack]) for stack in stacks]
    heights = [stack[0].shape[-2] for stack in stacks]
    m = sum(heights)
    blocks_m, blocks_n = cdiv(m, block_size), cdiv(n, block_size)
    out = []
    if rows:
        scale_shape = (blocks_m, blocks_n) if tiled else (blocks_n, m) if scale_k_major else (m, blocks_n)
        out += _outputs(x[0], (experts, m, n), (experts, *scale_shape))
    if columns:
        out += _outputs(x[0], (experts, n, m), (experts, *((blocks_n, blocks_m) if tiled else (blocks_m, n))))
    if m * n * experts == 0:
        return out
    # A form that is not asked for gets another one's tensors. The kernel does not write to them.
    rows_data, rows_scale, columns_data, columns_scale = *out[:2], *out[-2:]
    even = None not in strides
    starts = (row_stride * size, *(w.data_ptr() for w in x), *(strides if even else ()))
    alignment = 16 // size if all(start % 16 == 0 for start in starts) else 1
    strides = [stride // size if even else 0 for stride in strides]
    if tiled:
        scale_strides = (rows_scale.shape[2], 1) if rows else (1, rows_scale.shape[2])
    else:
        scale_strides = (1, m) if scale_k_major else (blocks_n, 1)
    tile = TILED_TILE if tiled else BOTH_TILES[block_size] if rows else COLUMNS_TILE
    # Triton gives all accesses of one shape the same layout. The widest are stores of bytes.
    vector = tile.vector if rows or tile.rows == tile.columns else min(tile.vector, 16 // size)
    # float32 input in both layouts, each with its own scales, needs more registers than the limit.
    registers = tile.registers if tiled or size == 2 else None
    tables = [None] * len(stacks) if even else _tables(stacks)
    _quantize_matrix_kernel[(tile.programs(m, n), experts)](
        stacks[0][0], stacks[-1][0], strides[0], strides[-1], tables[0], tables[-1], rows_data.view(torch.uint8),
        rows_scale, *scale_strides, columns_data.view(torch.uint8), columns_scale, heights[0], m, row_stride, n,
        block_size, scaling_mode == "floor", tiled, rows, columns, len(stacks), alignment, tile.rows, tile.columns,
        tile.strip, vector, tile.warps, tile.divides(m, n), num_warps=tile.warps, maxnreg=registers)
    return out


def quantize_rows(x_RK: torch.Tensor, block_size: int, scaling_mode: str, scale_k_major: bool) -> MXParts:
    """mx.quantize of rows [R, K].

    Args:
        x_RK: bf16, fp16 or fp32, K a multiple of 32, any stride between rows.
        scale_k_major: store the scales [R, ceil(K / block_size)] transposed in memory.
    """
    x_RK = _dense_rows(x_RK)
    rows, columns = x_RK.shape
    blocks = cdiv(columns, block_size)
    data, scale = _outputs(x_RK, (rows, columns), (blocks, rows) if scale_k_major else (rows, blocks))
    if rows and columns:
        tile = ROWS_TILE
        strides = (1, rows) if scale_k_major else (blocks, 1)
        _quantize_rows_kernel[(tile.programs(rows, columns), )](
            x_RK, data.view(torch.uint8), scale, rows, x_RK.stride(0), *strides, columns, block_size,
            scaling_mode == "floor", tile.rows, tile.columns, num_warps=tile.warps)
    return MXParts(data, scale.t() if scale_k_major else scale, block_size)


def quantize_columns(x_PN: torch.Tensor, block_size: int, scaling_mode: str) -> MXParts:
    """mx.quantize(x_PN.t()), [N, P], for GEMMs that contract over the rows. P is a multiple of 32.

    The scales lie in memory as [ceil(P / block_size), N].
    """
    x_PN = _dense_rows(x_PN)
    data, scale = _quantize_matrices([x_PN], 1, block_size, scaling_mode, False, False, True, False)
    return MXParts(data[0], scale[0].t(), block_size)


def quantize_rows_and_columns(x_PN: torch.Tensor, block_size: int, scaling_mode: str) -> tuple[MXParts, MXParts]:
    """quantize_rows(x_PN) and quantize_columns(x_PN) with one read of x. P and N are multiples of 32.

    The scales lie in memory as [ceil(N / block_size), P] and [ceil(P / block_size), N].
    """
    x_PN = _dense_rows(x_PN)
    out = _quantize_matrices([x_PN], 1, block_size, scaling_mode, False, True, True, True)
    data_PN, scale_PN, data_NP, scale_NP = (part[0] for part in out)
    return MXParts(data_PN, scale_PN.t(), block_size), MXParts(data_NP, scale_NP.t(), block_size)


def quantize_weights(stacks: Sequence[torch.Tensor | Sequence[torch.Tensor]], block_size: int, scaling_mode: str,
                     transposed: bool) -> MXParts:
    """Quantizes experts' weights, straight from their parameters.

    Args:
        stacks: one stack of weights, or two that lie one above the other along N (gate and up). A stack is one tensor
            [E, N_i, K] or E matrices [N_i, K] with dense rows. All have one dtype. K is a multiple of 32, and so is
            the sum N of N_i with block size 32.

    Returns:
        [E, N, K], for GEMMs that contract over K. With `transposed` [E, K, N], for GEMMs that contract over N. With
        block size 128 it is mx.quantize_tiles of the weights, or the transpose of that. With 32 it is mx.quantize of
        the weights, or of their transpose, whose scales lie in memory as [E, N / 32, K].
    """
    tiled = block_size == TILE
    weights = weights_of(stacks)
    steps = weights[0].stride(-2), 1
    if any(w.stride()[-2:] != steps for w in weights):
        weights = [w.contiguous() for w in weights]
    data, scale = _quantize_matrices(weights, len(stacks[0]), block_size, scaling_mode, tiled, not transposed,
                                     transposed, False)
    return MXParts(data, scale.transpose(1, 2) if transposed and not tiled else scale, block_size, tiled)


def rescale_transposed(x_PK: MXParts, scaling_mode: str) -> MXParts:
    """mx.transpose_rescale of rows [P, K]: returns [K, P] with blocks of the same size along P.

    The scales lie in memory as [ceil(P / block_size), K].
    """
    data, scale, block_size = x_PK.qdata.contiguous(), x_PK.scale_bytes, x_PK.block_size
    p, k = data.shape
    out, out_scale = _outputs(data, (k, p), (cdiv(p, block_size), k))
    if p and k:
        tile = RESCALE_TILES[block_size]
        _rescale_kernel[(tile.programs(p, k), )](
            data.view(torch.uint8), scale, *scale.stride(), out.view(torch.uint8), out_scale, p, k, block_size,
            scaling_mode == "floor", tile.rows, tile.columns, tile.strip, tile.vector, tile.warps, tile.divides(p, k),
            num_warps=tile.warps, maxnreg=tile.registers)
    return MXParts(out, out_scale.t(), block_size)


def dequantize(x: MXParts, dtype: torch.dtype) -> torch.Tensor:
    """mx.dequantize of rows [R, K] or of experts' matrices [E, R, K], tiled or not, to bf16, fp16 or fp32."""
    data, scale = x.qdata.contiguous(), x.scale_bytes
    rows, k = data.shape[-2:]
    experts, scale_strides = (1, (0, *scale.stride())) if data.dim() == 2 else (data.shape[0], scale.stride())
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    if out.numel():
        tile = DEQUANTIZE_TILE
        _dequantize_kernel[(tile.programs(rows, k), experts)](
            data.view(torch.uint8), scale, *scale_strides, out, rows, k, x.block_size, TILE if x.tiled else 1,
            tile.rows, tile.columns, 16 // out.element_size(), num_warps=tile.warps)
    return out
