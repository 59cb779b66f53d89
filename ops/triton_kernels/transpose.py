# SPDX-License-Identifier: Apache-2.0
"""Quantizes the columns of a tile [M, N] and stores them transposed, as [N, M].

FP8 tensor cores read operands along the contraction only, so a GEMM that contracts over M needs this form.

Transposing goes through shared memory. A lane writes it four bytes at a time if it holds four neighbors of one
column. `loaded_row` therefore chooses the rows that each thread loads. `quads` splits a thread's registers into such
quads, and two casts turn a quad into one register of four bytes:

    m = loaded_row(BM, LANES, WARPS)    # LANES = 32 * VECTOR / BN: lanes of a warp side by side along the rows
    x = load(ptr + m[:, None] * stride + n[None, :])    # a thread has VECTOR neighbors along n
    store_columns(in_order(x, LANES, WARPS), ...)

WHOLE: whether the tiles divide the matrix, so that no access needs a mask.
"""

import triton
import triton.language as tl

from .format import larger, new_scale, to_e4m3


@triton.jit
def loaded_row(ROWS: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr):
    """For each i, the row of the tile to load as the i-th: [ROWS].

    A warp then has ROWS / WARPS neighboring rows, and each of its threads quads of neighboring rows. Triton deals
    rows to LANES groups of lanes first, then to warps, then to registers.
    """
    i = tl.arange(0, ROWS)
    repeat = i // (LANES * WARPS)
    quads: tl.constexpr = ROWS // (LANES * WARPS * 4)
    return ((i // LANES % WARPS * quads + repeat % quads) * LANES + i % LANES) * 4 + repeat // quads


@triton.jit
def in_order(x, LANES: tl.constexpr, WARPS: tl.constexpr):
    """Undoes `loaded_row` on a tile that was loaded by it. It only renames registers, which costs nothing."""
    quads: tl.constexpr = x.shape[0] // (LANES * WARPS * 4)
    x5 = tl.reshape(x, [4, quads, WARPS, LANES, x.shape[1]])
    return tl.reshape(tl.permute(x5, (2, 1, 3, 0, 4)), x.shape)


@triton.jit
def below(i, end, WHOLE: tl.constexpr):
    """i < end. True without a comparison if WHOLE."""
    return tl.full(i.shape, True, tl.int1) if WHOLE else i < end


@triton.jit
def quads(x):
    """The rows 4i, 4i + 1, 4i + 2 and 4i + 3 of x [M, N], each as [N, M / 4]. One thread holds the four of a quad."""
    x = tl.permute(tl.reshape(x, [x.shape[0] // 4, 2, 2, x.shape[1]]), (3, 0, 1, 2))
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _quad_bytes(x0, x1, x2, x3):
    """The e4m3 bytes [N, M] of what `quads` returned. Two casts make four neighboring bytes in one register."""
    data = to_e4m3(tl.join(tl.join(x0, x2), tl.join(x1, x3)), 1.0)
    return tl.reshape(data, [x0.shape[0], x0.shape[1] * 4])


@triton.jit
def by_column(x):
    """The e4m3 bytes of x [M, N], transposed: [N, M]."""
    x0, x1, x2, x3 = quads(x)
    return _quad_bytes(x0, x1, x2, x3)


@triton.jit
def store_transposed(data, data_ptr, n, M, N, stride_n, VECTOR: tl.constexpr, WHOLE: tl.constexpr):
    """Stores data [BN, BM] to memory [N, M].

    `n`: the tile's columns. n, M and N count from the tile's first value.
    """
    m = tl.max_contiguous(tl.arange(0, data.shape[1]), VECTOR if data.shape[0] == data.shape[1] else 16)
    tl.store(data_ptr + (n[:, None] * stride_n + m[None, :]), data,
             below(n, N, WHOLE)[:, None] & below(m, M, WHOLE)[None, :])


@triton.jit
def store_columns(x, data_ptr, scale_ptr, n, M, N, stride_n, scale_stride, B: tl.constexpr, FLOOR: tl.constexpr,
                  VECTOR: tl.constexpr, WHOLE: tl.constexpr):
    """Quantizes x [BM, BN] in blocks along M. Stores data as `store_transposed` does, and scales to [M / B, N]."""
    BM: tl.constexpr = x.shape[0]
    x0, x1, x2, x3 = quads(x)
    largest = larger(larger(x0, x1), larger(x2, x3))
    largest = tl.reshape(largest, [x.shape[1], BM // B, B // 4]).to(tl.int32, bitcast=True)
    byte, inverse = new_scale(tl.max(largest, axis=2), FLOOR)
    inverse = tl.broadcast_to(inverse[:, :, None], [x.shape[1], BM // B, B // 4])
    inverse = tl.reshape(inverse, [x.shape[1], BM // 4])
    data = _quad_bytes(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)
    store_transposed(data, data_ptr, n, M, N, stride_n, VECTOR, WHOLE)
    block = tl.arange(0, BM // B)
    tl.store(scale_ptr + (block[None, :] * scale_stride + n[:, None]), byte,
             below(block * B, M, WHOLE)[None, :] & below(n, N, WHOLE)[:, None])
