# SPDX-License-Identifier: Apache-2.0
"""The MXFP8 grouped GEMM on Hopper's tensor cores, in Gluon: out[rows of e] = a[rows of e] b[e]^T.

a has one scale for each row and 128 values along K, b one for each 128x128 tile. A persistent program on each SM
walks over tiles of 128 rows by 128 HALVES columns. One warp, the producer, brings operands by TMA through a ring of
STAGES, and beside them the exponents of the scales' products; two warpgroups, 64 rows each, multiply. Hopper's FP8
accumulator is short, so every product over 128 values is scaled and added to a float32 accumulator. The warpgroups
multiply and add side by side; taking turns at the tensor cores measured slower, and so did products of 64 columns, a
from registers, each added while the next one runs (0.95). More than 216 registers a consumer thread is slower: ptxas
then starts the second product before the first is added up, and spills. L2 is not what bounds it: it asks for 6 TB/s,
where the bf16 weight gradient gets 9.

Rows at and past the last group's end come back as zeros. Groups are multiples of 128 rows: a tile never straddles two.
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
from .launch import Launched
from .library import cdiv, next_power_of_2, operator, rows_flops


@gluon.jit
def add_exponents(a, b):
    """The byte of 2^(a - 127) 2^(b - 127): 255, NaN, where either is; else clamped to 0 (here: nothing) and 254."""
    total = gl.minimum(gl.maximum(a.to(gl.int32) + b.to(gl.int32) - 127, 0), 254)
    return gl.where((a == 255) | (b == 255), 255, total).to(gl.uint8)


@gluon.jit
def _power_of_two(byte):
    """float32 2^(byte - 127); 0 for 0, NaN for 255."""
    return gl.where(byte == 255, 0x7FC00000, byte.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def tile_of(index, row_tiles, column_tiles, GROUP: gl.constexpr):
    """Tiles in strips of GROUP rows of tiles, column by column: what runs at a time shares its operands in L2."""
    strip = index // (GROUP * column_tiles)
    first = strip * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    within = index % (GROUP * column_tiles)
    return first + within % height, within // height


@gluon.jit
def group_of(row, ends, E, E_PAD: gl.constexpr, layout: gl.constexpr):
    """The group that holds `row`: how many ends lie at or before it; E for rows past the last."""
    e = gl.arange(0, E_PAD, layout)
    end = gl.load(ends + e, e < E, other=0x7FFFFFFF)
    return gl.sum((end <= row).to(gl.int32), 0)


@gluon.jit
def _feed(a_desc, b_desc, a_smem, b_smem, s_smem, full, empty, a_scale, b_scale, ends, E, P, N, K, row_tiles,
          column_tiles, E_PAD: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr):
    """The producer: operands by TMA, and for each row and half the exponent of its product."""
    ends_layout: gl.constexpr = gl.BlockedLayout([E_PAD // 32], [32], [1], [0])
    row_128 = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    k_blocks = gl.cdiv(K, 128)
    n_blocks = gl.cdiv(N, 128)
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, GROUP)
        row = row_tile * 128
        group = group_of(row, ends, E, E_PAD, ends_layout)
        if group < E:
            n_block = column_tile * HALVES
            halves = gl.minimum(n_blocks - n_block, HALVES)
            column = group * N + n_block * 128
            a_at = a_scale + row + row_128
            b_at = b_scale + (group * n_blocks + n_block) * k_blocks
            b1_at = b_at + (halves - 1) * k_blocks
            # Loaded a step ahead: these come from memory, not through the ring of stages.
            a_byte = gl.load(a_at)
            b_byte = gl.load(b_at)
            b1_byte = gl.load(b1_at)
            for k in range(k_blocks):
                stage = step % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                mbarrier.expect(bar, (128 + HALVES * 128) * 128, pred=halves == HALVES)
                mbarrier.expect(bar, (128 + 128) * 128, pred=halves < HALVES)
                for part in gl.static_range(2):
                    tma.async_copy_global_to_shared(a_desc, [row + 64 * part, k * 128], bar,
                                                    a_smem.index(stage * 2 + part))
                for half in gl.static_range(HALVES):
                    tma.async_copy_global_to_shared(b_desc, [column + 128 * half, k * 128], bar,
                                                    b_smem.index(stage * HALVES + half), pred=half < halves)
                s_smem.index(stage * HALVES).store(add_exponents(a_byte, b_byte))
                if HALVES == 2:
                    s_smem.index(stage * HALVES + 1).store(add_exponents(a_byte, b1_byte))
                mbarrier.arrive(bar)
                step += 1
                following = gl.minimum(k + 1, k_blocks - 1)
                a_byte = gl.load(a_at + following.to(gl.int64) * P)
                b_byte = gl.load(b_at + following)
                b1_byte = gl.load(b1_at + following)


@gluon.jit
def multiply(a, b, layout: gl.constexpr):
    """a [64, 128] times b [128, 128]^T in float32."""
    zeros = gl.zeros([64, 128], gl.float32, layout)
    return warpgroup_mma_wait(0, [warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)])


@gluon.jit
def accumulate(part: gl.constexpr, acc0, acc1, step, k_blocks, a_smem, b_smem, s_smem, full, empty,
               STAGES: gl.constexpr, HALVES: gl.constexpr, TWO: gl.constexpr, layout: gl.constexpr):
    """Adds the products of all blocks along K, each scaled as it comes: TWO halves of 128 columns, or the first."""
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    for _ in range(k_blocks):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a = a_smem.index(stage * 2 + part)
        scale0 = s_smem.index(stage * HALVES).slice(part * 64, 64).load(rows)
        if TWO:
            scale1 = s_smem.index(stage * HALVES + 1).slice(part * 64, 64).load(rows)
        product = multiply(a, b_smem.index(stage * HALVES), layout)
        if TWO:
            acc0 += product * gl.expand_dims(_power_of_two(scale0), 1)
            product = multiply(a, b_smem.index(stage * HALVES + 1), layout)
            mbarrier.arrive(empty.index(stage))
            acc1 += product * gl.expand_dims(_power_of_two(scale1), 1)
        else:
            mbarrier.arrive(empty.index(stage))
            acc0 += product * gl.expand_dims(_power_of_two(scale0), 1)
        step += 1
    return acc0, acc1, step


@gluon.jit
def _consume(part: gl.constexpr, c_desc, a_smem, b_smem, s_smem, c_smem, full, empty, ends, E, N, K, row_tiles,
             column_tiles, E_PAD: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
             BUFFERS: gl.constexpr):
    """Rows [64 part, 64 part + 64) of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    ends_layout: gl.constexpr = gl.BlockedLayout([E_PAD // 32], [32], [gl.num_warps()], [0])
    k_blocks = gl.cdiv(K, 128)
    n_blocks = gl.cdiv(N, 128)
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, GROUP)
        n_block = column_tile * HALVES
        row = row_tile * 128
        acc0 = gl.zeros([64, 128], gl.float32, layout)
        acc1 = gl.zeros([64, 128], gl.float32, layout)
        if group_of(row, ends, E, E_PAD, ends_layout) < E:
            if HALVES == 1 or n_block + HALVES > n_blocks:
                acc0, acc1, step = accumulate(part, acc0, acc1, step, k_blocks, a_smem, b_smem, s_smem, full, empty,
                                              STAGES, HALVES, False, layout)
            else:
                acc0, acc1, step = accumulate(part, acc0, acc1, step, k_blocks, a_smem, b_smem, s_smem, full, empty,
                                              STAGES, HALVES, True, layout)
        for half in gl.static_range(HALVES):
            tma.store_wait(BUFFERS - 1)
            c_buffer = c_smem.index(part * BUFFERS + half % BUFFERS)
            c_buffer.store((acc0 if half == 0 else acc1).to(c_desc.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(c_desc, [row + part * 64, (n_block + half) * 128], c_buffer)
    tma.store_wait(0)


@Launched
@gluon.jit
def grouped_mm_kernel(a_desc, b_desc, c_desc, a_scale, b_scale, ends, E, P, N, K, E_PAD: gl.constexpr,
                      GROUP: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, BUFFERS: gl.constexpr):
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, 64, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES * HALVES, 128, 128], b_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 128], c_desc.layout)
    s_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * HALVES, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    row_tiles = P // 128  # from P: Triton compiles anew for counts of tiles that are 1, or multiples of 16
    column_tiles = gl.cdiv(N, 128 * HALVES)
    gl.warp_specialize([
        (_consume, (0, c_desc, a_smem, b_smem, s_smem, c_smem, full, empty, ends, E, N, K, row_tiles, column_tiles,
                    E_PAD, GROUP, STAGES, HALVES, BUFFERS)),
        (_consume, (1, c_desc, a_smem, b_smem, s_smem, c_smem, full, empty, ends, E, N, K, row_tiles, column_tiles,
                    E_PAD, GROUP, STAGES, HALVES, BUFFERS)),
        (_feed, (a_desc, b_desc, a_smem, b_smem, s_smem, full, empty, a_scale, b_scale, ends, E, P, N, K, row_tiles,
                 column_tiles, E_PAD, GROUP, STAGES, HALVES)),
    ], [4, 1], [216, 72])


@lru_cache  # to build one takes longer than to launch a kernel
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    names = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16,
             torch.float32: gl.float32, torch.int32: gl.int32}
    return gl.NVMMASharedLayout.get_default_for(list(block), names[dtype])


class _Descriptor(TensorDescriptor):

    def __post_init__(self):
        """Without Triton's checks, which take as long as its launch, and hold for whatever our kernels read."""
        self.fact = (self.base.dtype, *self.block_shape)  # launch.py: what the kernel is compiled for


def descriptor(x: torch.Tensor, block: list[int], shape: list[int] | None = None,
               strides: list[int] | None = None) -> TensorDescriptor:
    """A TMA descriptor of x, or of what lies there in another shape, for boxes of `block`, swizzled as far as their
    rows are long, which is how wgmma reads them."""
    assert x.data_ptr() % 16 == 0, "TMA reads and writes at multiples of 16 bytes"
    return _Descriptor(x, shape or list(x.shape), strides or list(x.stride()), block, _layout(tuple(block), x.dtype))


def _grouped_mm_fake(a_PK, a_scale_KP, b_ENK, b_scale_ENK, ends_E, out_dtype):
    return a_PK.new_empty(a_PK.shape[0], b_ENK.shape[1], dtype=out_dtype)


@operator(_grouped_mm_fake, flops=rows_flops)
def _grouped_mm_mxfp8_hopper(a_PK: torch.Tensor, a_scale_KP: torch.Tensor, b_ENK: torch.Tensor,
                             b_scale_ENK: torch.Tensor, ends_E: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    (P, K), (E, N, _), sms = a_PK.shape, b_ENK.shape, multiprocessors(a_PK.device)
    out_PN = torch.empty(P, N, dtype=out_dtype, device=a_PK.device)
    if out_PN.numel() == 0:
        return out_PN
    # The wide tile moves a quarter fewer bytes for a product; the narrow one fills the GPU when there is little to do.
    halves = 2 if P // 128 * cdiv(N, 256) >= sms else 1
    tiles = P // 128 * cdiv(N, 128 * halves)
    grouped_mm_kernel[(min(sms, tiles), )](
        descriptor(a_PK, [64, 128]), descriptor(b_ENK.view(E * N, K), [128, 128]), descriptor(out_PN, [64, 128]),
        a_scale_KP, b_scale_ENK, ends_E, E, P, N, K, E_PAD=max(32, next_power_of_2(E)), GROUP=16, STAGES=3,
        HALVES=halves, BUFFERS=halves if out_PN.element_size() == 2 else 1, num_warps=4)
    return out_PN


def grouped_mm_mxfp8(a_PK: MXParts, b_ENK: MXParts, ends_E: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiplies each group's rows with its own matrix: [P, N] in `out_dtype` (bf16, fp16 or fp32).

    Args:
        a_PK: blocks of 128, contiguous data, P a multiple of 128. Scales are best K-block-major (strides (1, P)).
        b_ENK: tiled, contiguous data.
        ends_E: int32 ends of the groups on the device, multiples of 128.

    A product of scales of 2^-127 or less counts as zero; above 2^127 it is clamped; 255 gives NaN.
    """
    # Where a row-major scale becomes the GEMM's own: a copy unless it is already.
    return _grouped_mm_mxfp8_hopper(a_PK.qdata, a_PK.scale_bytes.t().contiguous(), b_ENK.qdata,
                                    b_ENK.scale_bytes.contiguous(), ends_E, out_dtype)
