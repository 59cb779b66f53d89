# SPDX-License-Identifier: Apache-2.0
"""The MXFP8 grouped GEMM on Hopper's tensor cores, in Gluon: out[rows of e] = a[rows of e] b[e]^T.

a has one scale for 128 values along K of each row. b has one scale for each tile of 128 x 128 values. A GEMM of N
columns takes 2 N K FLOP a row.

A persistent program on each multiprocessor computes tiles of 128 rows by TILE_BLOCKS (1 or 2) blocks of 128 columns.
One warp, the producer, brings operands by TMA through a ring of STAGES in shared memory. For each stage it also writes
the exponents of the scales' products. Two warpgroups multiply, 64 rows each. Hopper's FP8 accumulator has few bits, so
each product over 128 values is scaled and added to a float32 accumulator. Consumer threads have at most 216 registers:
with more, ptxas starts the second product before it adds the first, and spills.

Rows at and past the last group's end come back as zeros. Groups are multiples of 128 rows, so each tile lies in
one group.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device import multiprocessors
from ..mx_format import MXParts
from .format import tile_of
from .gluon_names import async_load, async_store
from .launch import Launched
from .library import cdiv, next_power_of_2


@gluon.jit
def add_exponents(a, b):
    """The scale byte of 2^(a - 127) * 2^(b - 127).

    255 (NaN) if either byte is 255. Else clamped to 0 and 254. `_power_of_two` reads byte 0 as the number 0.
    """
    total = gl.minimum(gl.maximum(a.to(gl.int32) + b.to(gl.int32) - 127, 0), 254)
    return gl.where((a == 255) | (b == 255), 255, total).to(gl.uint8)


@gluon.jit
def _power_of_two(byte):
    """float32 2^(byte - 127). Byte 0 gives 0, and 255 gives NaN."""
    return gl.where(byte == 255, 0x7FC00000, byte.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _power_of_sum(a, b):
    """`_power_of_two` of `add_exponents`, in fewer instructions."""
    bits = gl.minimum(gl.maximum(a.to(gl.int32) + b.to(gl.int32) - 127, 0), 254) << 23
    return gl.where((a == 255) | (b == 255), 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _ends_of(ends, E, E_PAD: gl.constexpr, layout: gl.constexpr):
    """The groups' ends. The largest int32 past the last group."""
    e = gl.arange(0, E_PAD, layout)
    return gl.load(ends + e, e < E, other=0x7FFFFFFF)


@gluon.jit
def _group_among(row, end):
    """The group that holds `row`: the number of ends at or before it. E for rows past the last group."""
    return gl.sum((end <= row).to(gl.int32), 0)


@gluon.jit
def group_of(row, ends, E, E_PAD: gl.constexpr, layout: gl.constexpr):
    """The group that holds `row`. E for rows past the last group."""
    return _group_among(row, _ends_of(ends, E, E_PAD, layout))


@gluon.jit
def barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """The barriers of a ring of stages: `full` after ARRIVALS arrivals, and `empty` when both warpgroups have read."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)
    return full, empty


@gluon.jit
def _columns_of(column_tile, TILE_N: gl.constexpr):
    """The columns at which a tile's two pieces begin: one of 128, and one of TILE_N - 128.

    In odd tiles of 192 the piece of 64 columns comes first, so that no piece lies in two scales' blocks.
    """
    if TILE_N == 192:
        odd = column_tile % 2
        return column_tile * 192 + odd * 64, column_tile * 192 + 128 - odd * 128
    else:
        return column_tile * TILE_N, column_tile * TILE_N + 128


@gluon.jit
def _blocks_at(b_scale, group, c0, c1, n_blocks, k_blocks):
    """Where the scales of b's tiles at columns c0 and c1 lie. Those of the last block for columns beyond it."""
    b_at = b_scale + group * n_blocks * k_blocks
    block0, block1 = gl.minimum(c0 // 128, n_blocks - 1), gl.minimum(c1 // 128, n_blocks - 1)
    return b_at + block0 * k_blocks, b_at + block1 * k_blocks


@gluon.jit
def _produce(a_desc, b_desc, b1_desc, s_desc, a_smem, b_smem, b1_smem, s_smem, full, empty, a_scale, b_scale, ends, E,
             P, N, K, row_tiles, column_tiles, E_PAD: gl.constexpr, STRIP: gl.constexpr, STAGES: gl.constexpr,
             TILE_N: gl.constexpr, SCALES: gl.constexpr, WIDE_BOXES: gl.constexpr, LEAN: gl.constexpr):
    """The producer warp: brings operands by TMA. SCALES says who brings the scales."""
    ends_layout: gl.constexpr = gl.BlockedLayout([E_PAD // 32], [32], [1], [0])
    ALL_BYTES: gl.constexpr = (128 + TILE_N + (SCALES == 1)) * 128
    ONE_PIECE: gl.constexpr = ALL_BYTES - (TILE_N - 128) * 128
    row_128 = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    k_blocks = gl.cdiv(K, 128)
    n_blocks = gl.cdiv(N, 128)
    step = 0
    if LEAN:
        end = _ends_of(ends, E, E_PAD, ends_layout)
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, STRIP)
        row = row_tile * 128
        if LEAN:
            group = _group_among(row, end)
        else:
            group = group_of(row, ends, E, E_PAD, ends_layout)
        if group < E:
            c0, c1 = _columns_of(column_tile, TILE_N)
            two = TILE_N > 128 and (c1 < N or (WIDE_BOXES and TILE_N == 256))
            if SCALES == 0:
                a_at = a_scale + row + row_128
                b_at, b1_at = _blocks_at(b_scale, group, c0, c1, n_blocks, k_blocks)
                a_byte = gl.load(a_at)
                b_byte = gl.load(b_at)
                b1_byte = gl.load(b1_at)
            for k in range(k_blocks):
                stage = step % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                mbarrier.expect(bar, ALL_BYTES, pred=two)
                mbarrier.expect(bar, ONE_PIECE, pred=two == 0)
                if WIDE_BOXES:
                    async_load(a_desc, [row, k * 128], bar, a_smem.index(stage))
                else:
                    for warpgroup in gl.static_range(2):
                        async_load(a_desc, [row + 64 * warpgroup, k * 128], bar, a_smem.index(stage * 2 + warpgroup))
                async_load(b_desc, [group * N + c0, k * 128], bar, b_smem.index(stage))
                if TILE_N == 192 or (TILE_N == 256 and not WIDE_BOXES):
                    async_load(b1_desc, [group * N + c1, k * 128], bar, b1_smem.index(stage), pred=two)
                if SCALES == 1:
                    async_load(s_desc, [k, row], bar, s_smem.index(stage))
                step += 1
                if SCALES == 0:
                    s_smem.index(stage * 2).store(add_exponents(a_byte, b_byte))
                    if TILE_N > 128:
                        s_smem.index(stage * 2 + 1).store(add_exponents(a_byte, b1_byte))
                    mbarrier.arrive(bar)
                    following = gl.minimum(k + 1, k_blocks - 1)
                    a_byte = gl.load(a_at + following.to(gl.int64) * P)
                    b_byte = gl.load(b_at + following)
                    b1_byte = gl.load(b1_at + following)


@gluon.jit
def _start_product(a, b, N: gl.constexpr, layout: gl.constexpr):
    """Starts to multiply a [64, 128] by b [N, 128]^T."""
    zeros = gl.zeros([64, N], gl.float32, layout)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def multiply(a, b, layout: gl.constexpr):
    """a [64, 128] times b [128, 128]^T in float32."""
    return warpgroup_mma_wait(0, [_start_product(a, b, 128, layout)])


@gluon.jit
def _add(acc, product, power, FIRST: gl.constexpr):
    """acc + product * power. `power`: of each row, or one number. FIRST takes +0 for acc."""
    if len(power.shape) == 1:
        power = gl.expand_dims(power, 1)
    if FIRST:
        return product * power + 0.0
    return acc + product * power


@gluon.jit
def _accumulate_step(warpgroup: gl.constexpr, acc0, acc1, step, a_smem, b_smem, b1_smem, s_smem, full, empty, a_at,
                     b_at, b1_at, STAGES: gl.constexpr, SCALES: gl.constexpr, WIDE_BOXES: gl.constexpr,
                     TWO: gl.constexpr, FIRST: gl.constexpr, layout: gl.constexpr, layout1: gl.constexpr):
    """Adds the scaled products of one block along K."""
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    stage = step % STAGES
    if SCALES == 1:
        b_byte = gl.load(b_at)  # ahead of the wait, which hides most of what it takes
        b1_byte = gl.load(b1_at) if TWO else b_byte
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    if WIDE_BOXES:
        a = a_smem.index(stage).slice(warpgroup * 64, 64)
    else:
        a = a_smem.index(stage * 2 + warpgroup)
    b = b_smem.index(stage)
    b1 = b1_smem.index(stage)
    if b.shape[0] == 256:  # both pieces
        b1 = b.slice(128, 128)
        b = b.slice(0, 128)
    product = _start_product(a, b, 128, layout)
    if TWO and acc1.shape[1] < 128:
        product1 = _start_product(a, b1, acc1.shape[1], layout1)
    if SCALES == 0:
        power = _power_of_two(s_smem.index(stage * 2).slice(warpgroup * 64, 64).load(rows))
        if TWO:
            power1 = _power_of_two(s_smem.index(stage * 2 + 1).slice(warpgroup * 64, 64).load(rows))
    else:
        if SCALES == 1:
            a_byte = s_smem.index(stage).reshape([128]).slice(warpgroup * 64, 64).load(rows)
        else:  # the product hides most of what these take
            MODIFIER: gl.constexpr = ".cg" if SCALES == 3 else ""
            a_byte = gl.load(a_at, cache_modifier=MODIFIER)
            b_byte = gl.load(b_at, cache_modifier=MODIFIER)
            b1_byte = gl.load(b1_at, cache_modifier=MODIFIER) if TWO else b_byte
        power = _power_of_sum(a_byte, b_byte)
        power1 = _power_of_sum(a_byte, b1_byte)
    if not TWO:
        product = warpgroup_mma_wait(0, [product])
        mbarrier.arrive(empty.index(stage))
        return _add(acc0, product, power, FIRST), acc1
    elif acc1.shape[1] < 128:
        product, product1 = warpgroup_mma_wait(0, [product, product1])
        mbarrier.arrive(empty.index(stage))
        power1 = gl.convert_layout(power1, gl.SliceLayout(1, layout1), assert_trivial=True)
        return _add(acc0, product, power, FIRST), _add(acc1, product1, power1, FIRST)
    else:
        acc0 = _add(acc0, warpgroup_mma_wait(0, [product]), power, FIRST)
        product1 = multiply(a, b1, layout)
        mbarrier.arrive(empty.index(stage))
        return acc0, _add(acc1, product1, power1, FIRST)


@gluon.jit
def accumulate(warpgroup: gl.constexpr, acc0, acc1, step, steps, a_smem, b_smem, b1_smem, s_smem, full, empty, a_at,
               a_step, b_at, b1_at, b_step, STAGES: gl.constexpr, SCALES: gl.constexpr, WIDE_BOXES: gl.constexpr,
               TWO: gl.constexpr, LEAN: gl.constexpr, layout: gl.constexpr, layout1: gl.constexpr):
    """Adds the scaled products of all blocks along K.

    acc0 and acc1 are the tile's two pieces. Without TWO only acc0 is computed. With LEAN they start at +0, whatever is
    passed, and there is at least one step.
    """
    if LEAN:
        acc0, acc1 = _accumulate_step(warpgroup, acc0, acc1, step, a_smem, b_smem, b1_smem, s_smem, full, empty, a_at,
                                      b_at, b1_at, STAGES, SCALES, WIDE_BOXES, TWO, True, layout, layout1)
        step += 1
        a_at += a_step
        b_at += b_step
        b1_at += b_step
    for _ in range(1 if LEAN else 0, steps):
        acc0, acc1 = _accumulate_step(warpgroup, acc0, acc1, step, a_smem, b_smem, b1_smem, s_smem, full, empty, a_at,
                                      b_at, b1_at, STAGES, SCALES, WIDE_BOXES, TWO, False, layout, layout1)
        step += 1
        a_at += a_step
        b_at += b_step
        b1_at += b_step
    return acc0, acc1, step


@gluon.jit
def _consume(warpgroup: gl.constexpr, c_desc, c1_desc, a_smem, b_smem, b1_smem, s_smem, c_smem, c1_smem, full, empty,
             a_scale, b_scale, ends, E, P, N, K, row_tiles, column_tiles, E_PAD: gl.constexpr, STRIP: gl.constexpr,
             STAGES: gl.constexpr, TILE_N: gl.constexpr, BUFFERS: gl.constexpr, SCALES: gl.constexpr,
             WIDE_BOXES: gl.constexpr, LEAN: gl.constexpr):
    """A warpgroup: computes its 64 rows of each tile."""
    PIECE1: gl.constexpr = 64 if TILE_N == 192 else 128
    PENDING: gl.constexpr = 1 if TILE_N == 192 else BUFFERS - 1
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    layout1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                      instr_shape=[16, PIECE1, 32])
    ends_layout: gl.constexpr = gl.BlockedLayout([E_PAD // 32], [32], [gl.num_warps()], [0])
    row_64 = warpgroup * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    k_blocks = gl.cdiv(K, 128)
    n_blocks = gl.cdiv(N, 128)
    step = 0
    if LEAN:
        end = _ends_of(ends, E, E_PAD, ends_layout)
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, STRIP)
        c0, c1 = _columns_of(column_tile, TILE_N)
        row = row_tile * 128
        acc0 = gl.zeros([64, 128], gl.float32, layout)
        acc1 = gl.zeros([64, PIECE1], gl.float32, layout1)
        if LEAN:
            group = _group_among(row, end)
        else:
            group = group_of(row, ends, E, E_PAD, ends_layout)
        if group < E:
            b_at, b1_at = _blocks_at(b_scale, group, c0, c1, n_blocks, k_blocks)
            a_at = a_scale + (row + row_64)
            if TILE_N == 128 or c1 >= N:
                acc0, acc1, step = accumulate(warpgroup, acc0, acc1, step, k_blocks, a_smem, b_smem, b1_smem, s_smem,
                                              full, empty, a_at, P, b_at, b1_at, 1, STAGES, SCALES, WIDE_BOXES, False,
                                              LEAN, layout, layout1)
            else:
                acc0, acc1, step = accumulate(warpgroup, acc0, acc1, step, k_blocks, a_smem, b_smem, b1_smem, s_smem,
                                              full, empty, a_at, P, b_at, b1_at, 1, STAGES, SCALES, WIDE_BOXES, True,
                                              LEAN, layout, layout1)
        tma.store_wait(PENDING)
        c_buffer = c_smem.index(warpgroup * BUFFERS)
        c_buffer.store(acc0.to(c_desc.dtype))
        fence_async_shared()
        async_store(c_desc, [row + warpgroup * 64, c0], c_buffer)
        if TILE_N > 128:
            tma.store_wait(PENDING)
            c1_buffer = c1_smem.index(warpgroup * BUFFERS + BUFFERS - 1)
            c1_buffer.store(acc1.to(c_desc.dtype))
            fence_async_shared()
            async_store(c1_desc, [row + warpgroup * 64, c1], c1_buffer)
    tma.store_wait(0)


@Launched
@gluon.jit
def grouped_mm_kernel(a_desc, b_desc, b1_desc, c_desc, c1_desc, s_desc, a_scale, b_scale, ends, E, P, N, K,
                      E_PAD: gl.constexpr, STRIP: gl.constexpr, STAGES: gl.constexpr, TILE_N: gl.constexpr,
                      BUFFERS: gl.constexpr, SCALES: gl.constexpr, WIDE_BOXES: gl.constexpr, LEAN: gl.constexpr):
    """All tiles of out [P, N] from a [P, K] and b [E * N, K]. Grid: programs that run at the same time.

    Args:
        b1_desc, c1_desc: b and out in boxes of 64 columns for tiles of 192, else None.
        STRIP: row tiles of a strip, see tile_of.
        BUFFERS: blocks of columns that a warpgroup has room for in shared memory before they are stored.
        SCALES: 0: the producer stores the exponents of the scales' products. 1: a's scales come by TMA with the
            operands, and the consumers load b's. 2: the consumers load both.
        WIDE_BOXES: one box of TMA instead of two for a's rows, and for b's if the tile has 256 columns.
        LEAN: loads the groups' ends once, and assigns a tile's first product.
    """
    if TILE_N != 192:
        b1_desc = b_desc
        c1_desc = c_desc
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 128 // a_desc.block_shape[0]] + a_desc.block_shape,
                                       a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    b1_smem = b_smem
    if TILE_N > b_desc.block_shape[0]:
        b1_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b1_desc.block_shape, b1_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 128], c_desc.layout)
    c1_smem = c_smem
    if TILE_N == 192:
        c1_smem = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 64], c1_desc.layout)
    if SCALES == 0:
        s_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        full, empty = barriers(STAGES, 2)
    else:
        s_smem = a_smem
        if SCALES == 1:
            s_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, 128], s_desc.layout)
        full, empty = barriers(STAGES, 1)
    # Computed here: as an argument, a number of tiles that is 1 or a multiple of 16 would compile the kernel anew.
    row_tiles = P // 128
    column_tiles = gl.cdiv(N, TILE_N)
    gl.warp_specialize([
        (_consume, (0, c_desc, c1_desc, a_smem, b_smem, b1_smem, s_smem, c_smem, c1_smem, full, empty, a_scale,
                    b_scale, ends, E, P, N, K, row_tiles, column_tiles, E_PAD, STRIP, STAGES, TILE_N, BUFFERS, SCALES,
                    WIDE_BOXES, LEAN)),
        (_consume, (1, c_desc, c1_desc, a_smem, b_smem, b1_smem, s_smem, c_smem, c1_smem, full, empty, a_scale,
                    b_scale, ends, E, P, N, K, row_tiles, column_tiles, E_PAD, STRIP, STAGES, TILE_N, BUFFERS, SCALES,
                    WIDE_BOXES, LEAN)),
        (_produce, (a_desc, b_desc, b1_desc, s_desc, a_smem, b_smem, b1_smem, s_smem, full, empty, a_scale, b_scale,
                    ends, E, P, N, K, row_tiles, column_tiles, E_PAD, STRIP, STAGES, TILE_N, SCALES, WIDE_BOXES,
                    LEAN)),
    ], [4, 1], [216, 72])


@lru_cache  # building one takes longer than launching a kernel
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout in shared memory of a box of TMA."""
    names = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16,
             torch.float32: gl.float32, torch.int32: gl.int32, torch.uint8: gl.uint8}
    return gl.NVMMASharedLayout.get_default_for(list(block), names[dtype])


class _Descriptor(TensorDescriptor):

    def __post_init__(self):
        """Leaves out Triton's checks, which take as long as a launch. `descriptor`'s arguments always pass them."""
        self.specialization = (self.base.dtype, *self.block_shape)  # for launch.py


def descriptor(x: torch.Tensor, block: list[int], shape: list[int] | None = None,
               strides: list[int] | None = None) -> TensorDescriptor:
    """A TMA descriptor of x for boxes of the shape `block`, swizzled as wgmma reads them.

    `shape` and `strides`: those of the tensor that TMA sees at x's address. They default to x's own.
    """
    assert x.data_ptr() % 16 == 0, "TMA reads and writes at multiples of 16 bytes"
    return _Descriptor(x, shape or list(x.shape), strides or list(x.stride()), block, _layout(tuple(block), x.dtype))


def grouped_mm_mxfp8(a_PK: MXParts, b_ENK: MXParts, ends_E: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiplies each group's rows with its own matrix: [P, N] in `out_dtype` (bf16, fp16 or fp32).

    Args:
        a_PK: blocks of 128, contiguous data, P a multiple of 128. Scales in K-block-major memory (strides (1, P)) are
            read as they are, others are copied.
        b_ENK: tiled, contiguous data.
        ends_E: int32 ends of the groups on the device, multiples of 128.

    A product of two scales counts as 0 if it is 2^-127 or less. Above 2^127 it is clamped. A scale byte of 255 gives
    NaN.
    """
    a = a_PK.qdata
    (P, K), N = a.shape, b_ENK.qdata.shape[1]
    out_PN = torch.empty(P, N, dtype=out_dtype, device=a.device)
    if out_PN.numel() == 0:
        return out_PN
    grouped_mm_with(_variant(P, N, K, multiprocessors(a.device), out_dtype), a_PK, b_ENK, ends_E, out_PN)
    return out_PN


class Variant(NamedTuple):
    """How the kernel runs: constants of grouped_mm_kernel."""

    TILE_N: int = 256
    STAGES: int = 3
    BUFFERS: int = 2
    SCALES: int = 0
    WIDE_BOXES: bool = False
    LEAN: bool = False


def _variant(P: int, N: int, K: int, sms: int, out_dtype: torch.dtype) -> Variant:
    """The fastest variant for a shape.

    The wide tile moves a quarter fewer bytes for a product. Narrow tiles are more, so that they occupy all
    multiprocessors when there is little to do.
    """
    tile_n = 256 if P // 128 * cdiv(N, 256) >= sms else 128
    return Variant(tile_n, BUFFERS=2 if tile_n == 256 and out_dtype.itemsize == 2 else 1)


def grouped_mm_with(how: Variant, a_PK: MXParts, b_ENK: MXParts, ends_E: torch.Tensor, out_PN: torch.Tensor) -> None:
    """grouped_mm_mxfp8 by a given variant, into out_PN. Nothing may be empty."""
    a, b = a_PK.qdata, b_ENK.qdata
    (P, K), (E, N, _) = a.shape, b.shape
    tiles = P // 128 * cdiv(N, how.TILE_N)
    b_EN = b.view(E * N, K)
    a_scale = a_PK.scale_bytes.t().contiguous()
    apart = how.TILE_N == 192
    wide = how.WIDE_BOXES
    grouped_mm_kernel[(min(multiprocessors(a.device), tiles), )](
        descriptor(a, [128 if wide else 64, 128]), descriptor(b_EN, [256 if wide and how.TILE_N == 256 else 128, 128]),
        descriptor(b_EN, [64, 128]) if apart else None, descriptor(out_PN, [64, 128]),
        descriptor(out_PN, [64, 64]) if apart else None,
        descriptor(a_scale, [1, 128]) if how.SCALES == 1 else None, a_scale, b_ENK.scale_bytes.contiguous(), ends_E, E,
        P, N, K, E_PAD=max(32, next_power_of_2(E)), STRIP=16, **how._asdict(), num_warps=4)
