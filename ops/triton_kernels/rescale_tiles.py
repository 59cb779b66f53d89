# SPDX-License-Identifier: Apache-2.0
"""Transposes and re-scales MXFP8 rows in blocks of 128, if tiles divide the matrix. In Gluon.

The oracle is transpose_rescale in ds_mxfp8_moe/compute/mx.py. A program handles one tile of BP rows by BK columns; the
grid is the number of tiles. A value is read as one byte and written as one byte.

Gluon lets the load and the store have different layouts. The largest value of a column of 128 rows is cheap to find if
one warp holds all of them, but then a warp reads only a few bytes of each row, which costs bandwidth. Here a warp
reads whole lines of 128 bytes. Bytes then change once, through shared memory, to the layout of the store. The
arithmetic follows in that layout, where a warp holds whole columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .format import from_e4m3, larger, new_scale
from .launch import Launched


@Launched
@gluon.jit
def rescale_tiles_kernel(data_ptr, scale_ptr, scale_stride_p, scale_stride_k, out_ptr, out_scale_ptr, P,
                         K: gl.constexpr, FLOOR: gl.constexpr, BP: gl.constexpr, BK: gl.constexpr,
                         WARPS: gl.constexpr):
    READ: gl.constexpr = gl.BlockedLayout([4, 16], [4, 8], [WARPS, 1], [1, 0])
    WRITTEN: gl.constexpr = gl.BlockedLayout([1, 16], [2, 16], [WARPS, 1], [1, 0])
    BLOCKS: gl.constexpr = BP // 128
    pid = gl.program_id(0)
    p0 = (pid // (K // BK)).to(gl.int64) * BP
    k0 = pid % (K // BK) * BK

    p = gl.expand_dims(gl.arange(0, BP, gl.SliceLayout(1, READ)), 1)
    k = gl.expand_dims(gl.arange(0, BK, gl.SliceLayout(0, READ)), 0)
    data = gl.load(data_ptr + (p0 * K + k0) + (p * K + k))
    p = gl.arange(0, BP, gl.SliceLayout(0, WRITTEN))
    scale = gl.load(scale_ptr + (p0 * scale_stride_p + k0 // 128 * scale_stride_k) + p * scale_stride_p)
    data = gl.convert_layout(data.permute((1, 0)), WRITTEN)
    # As power_of_two, except that byte 255 gives Inf instead of NaN. Both make the new scale 255.
    power = gl.maximum(scale.to(gl.int32) << 23, 0x00400000).to(gl.float32, bitcast=True)
    x = from_e4m3(data) * gl.expand_dims(power, 0)

    x0, x1 = gl.split(x.reshape([BK, BP // 2, 2]))
    largest = larger(x0, x1).reshape([BK, BLOCKS, 64]).to(gl.int32, bitcast=True)
    byte, inverse = new_scale(gl.max(largest, 2), FLOOR)
    x = x.reshape([BK, BLOCKS, 128])
    inverse = gl.convert_layout(inverse, gl.SliceLayout(2, x.type.layout), assert_trivial=True)
    data = (x * gl.expand_dims(inverse, 2)).to(gl.float8e4nv).to(gl.uint8, bitcast=True).reshape([BK, BP])
    k = gl.arange(0, BK, gl.SliceLayout(1, WRITTEN)).to(gl.int64)
    gl.store(out_ptr + (k0.to(gl.int64) * P + p0) + (gl.expand_dims(k, 1) * P + gl.expand_dims(p, 0)),
             gl.convert_layout(data, WRITTEN, assert_trivial=True))

    block = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, byte.type.layout)), 0)
    k = gl.expand_dims(gl.arange(0, BK, gl.SliceLayout(1, byte.type.layout)), 1)
    gl.store(out_scale_ptr + (p0 // 128 * K + k0) + (block * K + k), byte)
