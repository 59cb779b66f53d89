# SPDX-License-Identifier: Apache-2.0
"""MXFP8 along the rows of a tile, its bytes transposed: FP8 tensor cores read operands along the contraction only.

Shared memory is written four bytes a lane when a thread holds four neighbours of one column, and they cost no packing
where one cast makes them. `loaded_row` picks which rows a thread loads to that end, `_quads` takes its registers
apart:

    m = loaded_row(BM, LANES, WARPS)    # LANES = 32 * VECTOR / BN: lanes of a warp side by side along the rows
    x = load(ptr + m[:, None] * stride + n[None, :])    # a thread has VECTOR neighbours along n
    store_columns(in_order(x, LANES, WARPS), ...)
"""

import triton
import triton.language as tl

from .format import larger, new_scale, to_e4m3


@triton.jit
def counted(i, FAR: tl.constexpr):
    """i, to be multiplied by a stride: in int64 if the product may be FAR. int32 takes half the registers."""
    return i.to(tl.int64) if FAR else i


@triton.jit
def loaded_row(ROWS: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr):
    """[ROWS]: which row of the tile to load as the i-th, so that a warp has ROWS / WARPS neighbouring rows and a
    thread of it quads of neighbours. Triton deals rows to LANES lane groups first, then to warps, then to registers.
    """
    i = tl.arange(0, ROWS)
    repeat = i // (LANES * WARPS)
    quads: tl.constexpr = ROWS // (LANES * WARPS * 4)
    return ((i // LANES % WARPS * quads + repeat % quads) * LANES + i % LANES) * 4 + repeat // quads


@triton.jit
def in_order(x, LANES: tl.constexpr, WARPS: tl.constexpr):
    """Undoes loaded_row on a tile loaded by it. Costs nothing: registers get other names."""
    quads: tl.constexpr = x.shape[0] // (LANES * WARPS * 4)
    x5 = tl.reshape(x, [4, quads, WARPS, LANES, x.shape[1]])
    return tl.reshape(tl.permute(x5, (2, 1, 3, 0, 4)), x.shape)


@triton.jit
def below(i, end, WHOLE: tl.constexpr):
    """i < end; nothing to compare if the tiles divide the matrix."""
    return tl.full(i.shape, True, tl.int1) if WHOLE else i < end


@triton.jit
def _quads(x):
    """The rows 4i, 4i + 1, 4i + 2 and 4i + 3 of x [M, N], which a thread holds, each as [N, M / 4]."""
    x = tl.permute(tl.reshape(x, [x.shape[0] // 4, 2, 2, x.shape[1]]), (3, 0, 1, 2))
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _quad_bytes(x0, x1, x2, x3):
    """e4m3 bytes of `_quads`, [N, M]: two casts make four neighbouring bytes in one register."""
    data = to_e4m3(tl.join(tl.join(x0, x2), tl.join(x1, x3)), 1.0)
    return tl.reshape(data, [x0.shape[0], x0.shape[1] * 4])


@triton.jit
def by_column(x):
    """e4m3 bytes of x [M, N] as [N, M]."""
    x0, x1, x2, x3 = _quads(x)
    return _quad_bytes(x0, x1, x2, x3)


@triton.jit
def store_transposed(data, data_ptr, n, M, N, stride_n, VECTOR: tl.constexpr, WHOLE: tl.constexpr,
                     FAR: tl.constexpr):
    """data [BN, BM] to memory [N, M]; `n`: the tile's columns, counted, like M and N, from the tile's first value.
    FAR: BN * stride_n or more is beyond int32."""
    m = tl.max_contiguous(tl.arange(0, data.shape[1]), VECTOR if data.shape[0] == data.shape[1] else 16)
    tl.store(data_ptr + (counted(n, FAR)[:, None] * stride_n + m[None, :]), data,
             below(n, N, WHOLE)[:, None] & below(m, M, WHOLE)[None, :])


@triton.jit
def store_columns(x, data_ptr, scale_ptr, n, M, N, stride_n, scale_stride, B: tl.constexpr, FLOOR: tl.constexpr,
                  VECTOR: tl.constexpr, WHOLE: tl.constexpr, FAR: tl.constexpr):
    """Quantises x [BM, BN] along M: data as above, scales memory [M / B, N]."""
    BM: tl.constexpr = x.shape[0]
    x0, x1, x2, x3 = _quads(x)
    largest = larger(larger(x0, x1), larger(x2, x3))
    largest = tl.reshape(largest, [x.shape[1], BM // B, B // 4]).to(tl.int32, bitcast=True)
    byte, inverse = new_scale(tl.max(largest, axis=2), FLOOR)
    inverse = tl.broadcast_to(inverse[:, :, None], [x.shape[1], BM // B, B // 4])
    inverse = tl.reshape(inverse, [x.shape[1], BM // 4])
    data = _quad_bytes(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)
    store_transposed(data, data_ptr, n, M, N, stride_n, VECTOR, WHOLE, FAR)
    block = counted(tl.arange(0, BM // B), FAR)
    tl.store(scale_ptr + (block[None, :] * scale_stride + n[:, None]), byte,
             below(block * B, M, WHOLE)[None, :] & below(n, N, WHOLE)[:, None])
