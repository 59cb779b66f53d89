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
from .gluon_names import async_load, async_store, barrier
from .launch import Launched
from .library import cdiv, next_power_of_2


@gluon.jit
def _add_exponents(a, b):
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
def load_ends(ends, E, E_PAD: gl.constexpr, layout: gl.constexpr):
    """The groups' ends, padded to E_PAD with the largest int32."""
    e = gl.arange(0, E_PAD, layout)
    return gl.load(ends + e, e < E, other=0x7FFFFFFF)


@gluon.jit
def group_of(row, end):
    """The group that holds `row`: how many of the ends that `load_ends` returned are at or before it.

    E for rows past the last group.
    """
    return gl.sum((end <= row).to(gl.int32), 0)


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
def _produce(a_desc, b_desc, a_smem, b_smem, s_smem, full, empty, a_scale, b_scale, ends, last_end, E, P, N, K,
             row_tiles, column_tiles, E_PAD: gl.constexpr, STRIP: gl.constexpr, STAGES: gl.constexpr,
             TILE_BLOCKS: gl.constexpr):
    """The producer warp: brings operands by TMA, and the exponent of the product for each row and block of columns."""
    row_128 = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    k_blocks = gl.cdiv(K, 128)
    n_blocks = gl.cdiv(N, 128)
    end = load_ends(ends, E, E_PAD, gl.BlockedLayout([E_PAD // 32], [32], [1], [0]))
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, STRIP)
        row = row_tile * 128
        if row < last_end:
            group = group_of(row, end)
            n_block = column_tile * TILE_BLOCKS
            inside = gl.minimum(n_blocks - n_block, TILE_BLOCKS)
            column = group * N + n_block * 128
            a_at = a_scale + row + row_128
            b_at = b_scale + (group * n_blocks + n_block) * k_blocks
            b1_at = b_at + (inside - 1) * k_blocks
            # Loaded one step ahead, since these do not come through the ring of stages.
            a_byte = gl.load(a_at)
            b_byte = gl.load(b_at)
            b1_byte = gl.load(b1_at)
            for k in range(k_blocks):
                stage = step % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                mbarrier.expect(bar, (128 + TILE_BLOCKS * 128) * 128, pred=inside == TILE_BLOCKS)
                mbarrier.expect(bar, (128 + 128) * 128, pred=inside < TILE_BLOCKS)
                for warpgroup in gl.static_range(2):
                    async_load(a_desc, [row + 64 * warpgroup, k * 128], bar, a_smem.index(stage * 2 + warpgroup))
                for block in gl.static_range(TILE_BLOCKS):
                    async_load(b_desc, [column + 128 * block, k * 128], bar,
                               b_smem.index(block * STAGES + stage), pred=block < inside)
                step += 1
                s_smem.index(stage).store(_add_exponents(a_byte, b_byte))
                if TILE_BLOCKS == 2:
                    s_smem.index(STAGES + stage).store(_add_exponents(a_byte, b1_byte))
                mbarrier.arrive(bar)
                following = gl.minimum(k + 1, k_blocks - 1)
                a_byte = gl.load(a_at + following.to(gl.int64) * P)
                b_byte = gl.load(b_at + following)
                b1_byte = gl.load(b1_at + following)


@gluon.jit
def start_product(a, b, layout: gl.constexpr):
    """Starts to multiply a [64, 128] by b [128, 128]^T in float32."""
    zeros = gl.zeros([64, 128], gl.float32, layout)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def multiply(a, b, layout: gl.constexpr):
    """a [64, 128] times b [128, 128]^T in float32."""
    return warpgroup_mma_wait(0, [start_product(a, b, layout)])


@gluon.jit
def add_products(acc0, acc1, product, power0, power1, a, b_smem, empty, stage, STAGES: gl.constexpr,
                 TWO: gl.constexpr, layout: gl.constexpr):
    """Adds the products of a stage, each times a power of two, and frees the stage.

    Args:
        product: that of a and b's first block, which `start_product` has started.
        TWO: also multiplies a by b's second block. Without it acc1 stays as it is.
    """
    product = warpgroup_mma_wait(0, [product])
    if TWO:
        acc0 += product * power0
        product = multiply(a, b_smem.index(STAGES + stage), layout)
        mbarrier.arrive(empty.index(stage))
        acc1 += product * power1
    else:
        mbarrier.arrive(empty.index(stage))
        acc0 += product * power0
    return acc0, acc1


@gluon.jit
def _accumulate_step(warpgroup: gl.constexpr, acc0, acc1, step, a_smem, b_smem, s_smem, full, empty,
                     STAGES: gl.constexpr, TWO: gl.constexpr, layout: gl.constexpr):
    """Adds the scaled products of one block along K."""
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    a = a_smem.index(stage * 2 + warpgroup)
    product = start_product(a, b_smem.index(stage), layout)
    power0 = gl.expand_dims(_power_of_two(s_smem.index(stage).slice(warpgroup * 64, 64).load(rows)), 1)
    power1 = power0
    if TWO:
        power1 = gl.expand_dims(_power_of_two(s_smem.index(STAGES + stage).slice(warpgroup * 64, 64).load(rows)), 1)
    return add_products(acc0, acc1, product, power0, power1, a, b_smem, empty, stage, STAGES, TWO, layout)


@gluon.jit
def _accumulate(warpgroup: gl.constexpr, step, k_blocks, a_smem, b_smem, s_smem, full, empty, STAGES: gl.constexpr,
                TWO: gl.constexpr, layout: gl.constexpr):
    """Adds up the scaled products of all blocks along K, of which there is at least one.

    Returns:
        The sums of the tile's two blocks of columns, and the next step. Without TWO the second sum is 0.
    """
    # The first step stands apart: the compiler knows that it adds to zeros, and sets no registers to zero.
    zeros = gl.zeros([64, 128], gl.float32, layout)
    acc0, acc1 = _accumulate_step(warpgroup, zeros, zeros, step, a_smem, b_smem, s_smem, full, empty, STAGES, TWO,
                                  layout)
    step += 1
    for _ in range(1, k_blocks):
        barrier()  # the compiler sets this one itself until Triton 3.7: from 3.8 on, a step would begin without it
        acc0, acc1 = _accumulate_step(warpgroup, acc0, acc1, step, a_smem, b_smem, s_smem, full, empty, STAGES, TWO,
                                      layout)
        step += 1
    return acc0, acc1, step


@gluon.jit
def _consume(warpgroup: gl.constexpr, c_desc, a_smem, b_smem, s_smem, c_smem, full, empty, last_end, N, K, row_tiles,
             column_tiles, STRIP: gl.constexpr, STAGES: gl.constexpr, TILE_BLOCKS: gl.constexpr,
             BUFFERS: gl.constexpr):
    """A warpgroup: computes its 64 rows of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    k_blocks = gl.cdiv(K, 128)
    n_blocks = gl.cdiv(N, 128)
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, STRIP)
        n_block = column_tile * TILE_BLOCKS
        row = row_tile * 128
        acc0 = gl.zeros([64, 128], gl.float32, layout)
        acc1 = gl.zeros([64, 128], gl.float32, layout)
        if row < last_end:
            if TILE_BLOCKS == 1 or n_block + TILE_BLOCKS > n_blocks:
                acc0, acc1, step = _accumulate(warpgroup, step, k_blocks, a_smem, b_smem, s_smem, full, empty, STAGES,
                                               False, layout)
            else:
                acc0, acc1, step = _accumulate(warpgroup, step, k_blocks, a_smem, b_smem, s_smem, full, empty, STAGES,
                                               True, layout)
        for block in gl.static_range(TILE_BLOCKS):
            tma.store_wait(BUFFERS - 1)
            c_buffer = c_smem.index(warpgroup * BUFFERS + block % BUFFERS)
            c_buffer.store((acc0 if block == 0 else acc1).to(c_desc.dtype))
            fence_async_shared()
            async_store(c_desc, [row + warpgroup * 64, (n_block + block) * 128], c_buffer)
    tma.store_wait(0)


@Launched
@gluon.jit
def grouped_mm_kernel(a_desc, b_desc, c_desc, a_scale, b_scale, ends, E, P, N, K, E_PAD: gl.constexpr,
                      STRIP: gl.constexpr, STAGES: gl.constexpr, TILE_BLOCKS: gl.constexpr, BUFFERS: gl.constexpr):
    """All tiles of out [P, N] from a [P, K] and b [E * N, K]. Grid: programs that run at the same time.

    Args:
        STRIP: row tiles of a strip, see tile_of.
        BUFFERS: blocks of columns that a warpgroup has room for in shared memory before they are stored.
    """
    # Two blocks of b, or of exponents, that belong to one stage lie STAGES blocks apart.
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, 64, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [TILE_BLOCKS * STAGES, 128, 128], b_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 128], c_desc.layout)
    s_smem = gl.allocate_shared_memory(gl.uint8, [TILE_BLOCKS * STAGES, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(STAGES, 2)
    # Computed here: as an argument, a number of tiles that is 1 or a multiple of 16 would compile the kernel anew.
    row_tiles = P // 128
    column_tiles = gl.cdiv(N, 128 * TILE_BLOCKS)
    last_end = gl.load(ends + E - 1)
    gl.warp_specialize([
        (_consume, (0, c_desc, a_smem, b_smem, s_smem, c_smem, full, empty, last_end, N, K, row_tiles, column_tiles,
                    STRIP, STAGES, TILE_BLOCKS, BUFFERS)),
        (_consume, (1, c_desc, a_smem, b_smem, s_smem, c_smem, full, empty, last_end, N, K, row_tiles, column_tiles,
                    STRIP, STAGES, TILE_BLOCKS, BUFFERS)),
        (_produce, (a_desc, b_desc, a_smem, b_smem, s_smem, full, empty, a_scale, b_scale, ends, last_end, E, P, N, K,
                    row_tiles, column_tiles, E_PAD, STRIP, STAGES, TILE_BLOCKS)),
    ], [4, 1], [216, 72])


@lru_cache  # building one takes longer than launching a kernel
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout in shared memory of a box of TMA."""
    names = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16,
             torch.float32: gl.float32, torch.int32: gl.int32}
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
    a, b = a_PK.qdata, b_ENK.qdata
    (P, K), (E, N, _), sms = a.shape, b.shape, multiprocessors(a.device)
    if 0 in (P, E, N, K):  # the kernel takes at least one step along K
        return torch.zeros(P, N, dtype=out_dtype, device=a.device)
    out_PN = torch.empty(P, N, dtype=out_dtype, device=a.device)
    # The wide tile moves a quarter fewer bytes for a product. Narrow tiles are more, so that they occupy all
    # multiprocessors when there is little to do.
    tile_blocks = 2 if P // 128 * cdiv(N, 256) >= sms else 1
    tiles = P // 128 * cdiv(N, 128 * tile_blocks)
    grouped_mm_kernel[(min(sms, tiles), )](
        descriptor(a, [64, 128]), descriptor(b.view(E * N, K), [128, 128]), descriptor(out_PN, [64, 128]),
        a_PK.scale_bytes.t().contiguous(), b_ENK.scale_bytes.contiguous(), ends_E, E, P, N, K,
        E_PAD=max(32, next_power_of_2(E)), STRIP=16, STAGES=3, TILE_BLOCKS=tile_blocks,
        BUFFERS=tile_blocks if out_PN.element_size() == 2 else 1, num_warps=4)
    return out_PN
