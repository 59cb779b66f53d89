# SPDX-License-Identifier: Apache-2.0
"""TEMPORARY, beside gemm_variants.py: Hopper's FP8 GEMM with two multiprocessors that share operands, from Triton 3.9.

A program is a cluster of two blocks. The first kernel shares a's rows: the blocks compute neighbouring tiles of the
same 128 rows. The program's tile is 128 x 2 TILE_N, in two pieces of 2 x 128 and 2 x (TILE_N - 128) columns. The first
block's producer brings a's rows and their scales into both blocks. Each producer brings its own half of b's rows.

A stage has three barriers. Phases of all three advance once for each use of the stage.

    full    of each block: 1 arrival, its own producer's, and the bytes that come into this block, whoever sent them
    local   of each block: 2 arrivals, its own warpgroups'. Its producer waits for it before it announces bytes
    both    of the first block alone: 4 arrivals, the warpgroups' of both blocks. Its producer waits for it before it
            sends into both. The second block's producer passes.

The first block may send before the second block's producer has announced: all warpgroups have released the stage, so
the second block's `full` is in the phase to come, which cannot complete before its one arrival. The second block's
producer announces only after `local`, so after its `full` has completed the phase before. Both blocks run the same
number of steps. Triton ends the kernel with a barrier of the cluster, so no block ends
while the other one still sends to it or arrives at it.

The second kernel shares b's rows: the blocks compute neighbouring tiles of 128 rows. Where these belong to different
groups, each block brings its own rows of b, with the same barriers. If only the first block's rows belong to a group,
the second one computes something, and then stores zeros. Instead of `local` it has

    go      of each block: 1 arrival, the first block's producer's, when `both` says that both blocks' stage is free

since a second block that brings all its operands itself could otherwise run ahead, and its warpgroups arrive at `both`
for two uses of a stage where the first block's have not arrived for one.
"""

import torch
import triton
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

from ds_mxfp8_moe.ops.device import multiprocessors
from ds_mxfp8_moe.ops.mx_format import MXParts
from ds_mxfp8_moe.ops.triton_kernels.format import tile_of
from ds_mxfp8_moe.ops.triton_kernels.gluon_names import async_load, async_store
from ds_mxfp8_moe.ops.triton_kernels.grouped_gemm_hopper import (
    _add,
    _blocks_at,
    _columns_of,
    _power_of_sum,
    _start_product,
    group_of,
)
from ds_mxfp8_moe.ops.triton_kernels.launch import Launched
from ds_mxfp8_moe.ops.triton_kernels.library import cdiv, next_power_of_2

SUPPORTED = not triton.__version__.startswith(("3.6.", "3.7.", "3.8."))


@gluon.jit
def _rank():
    """0 in the cluster's first block, 1 in its second. Triton takes it for the same number in both."""
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, True, 1)


@gluon.jit
def _produce(a_desc, b_desc, b1_desc, s_desc, a_smem, b_smem, b1_smem, s_smem, full, local, both, ends, E, N, K,
             row_tiles, column_tiles, E_PAD: gl.constexpr, STRIP: gl.constexpr, STAGES: gl.constexpr,
             TILE_N: gl.constexpr):
    ends_layout: gl.constexpr = gl.BlockedLayout([E_PAD // 32], [32], [1], [0], cga_layout=[[0]])
    ALL_BYTES: gl.constexpr = (128 + TILE_N + 1) * 128
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, STRIP)
        row = row_tile * 128
        group = group_of(row, ends, E, E_PAD, ends_layout)
        if group < E:
            column = column_tile * TILE_N * 2
            two = column + 256 < N
            for k in range(gl.cdiv(K, 128)):
                stage = step % STAGES
                free = (step // STAGES & 1) ^ 1
                bar = full.index(stage)
                mbarrier.wait(local.index(stage), free)
                mbarrier.wait(both.index(stage), free)
                mbarrier.expect(bar, ALL_BYTES, pred=two)
                mbarrier.expect(bar, ALL_BYTES - (TILE_N - 128) * 128, pred=two == 0)
                async_load(a_desc, [row, k * 128], bar, a_smem.index(stage), multicast=True)
                async_load(s_desc, [k, row], bar, s_smem.index(stage), multicast=True)
                async_load(b_desc, [group * N + column, k * 128], bar, b_smem.index(stage))
                async_load(b1_desc, [group * N + column + 256, k * 128], bar, b1_smem.index(stage), pred=two)
                step += 1


@gluon.jit
def _accumulate(warpgroup: gl.constexpr, acc0, acc1, step, k_blocks, a_smem, b_smem, b1_smem, s_smem, full, local,
                both, b_at, b1_at, STAGES: gl.constexpr, TWO: gl.constexpr, layout: gl.constexpr,
                layout1: gl.constexpr):
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    APART: gl.constexpr = acc1.shape[1] < 256
    for k in range(k_blocks):
        stage = step % STAGES
        b_byte = gl.load(b_at + k)
        b1_byte = gl.load(b1_at + k) if TWO else b_byte
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a = a_smem.index(stage).slice(warpgroup * 64, 64)
        product = _start_product(a, b_smem.index(stage), 256, layout)
        if TWO and APART:
            product1 = _start_product(a, b1_smem.index(stage), 128, layout1)
        a_byte = s_smem.index(stage).reshape([128]).slice(warpgroup * 64, 64).load(rows)
        power = _power_of_sum(a_byte, b_byte)
        power1 = _power_of_sum(a_byte, b1_byte)
        if TWO and APART:
            product, product1 = warpgroup_mma_wait(0, [product, product1])
            power1 = gl.convert_layout(power1, gl.SliceLayout(1, layout1), assert_trivial=True)
        else:
            product = warpgroup_mma_wait(0, [product])
        if TWO and not APART:
            acc0 = _add(acc0, product, power, False)
            product1 = warpgroup_mma_wait(0, [_start_product(a, b1_smem.index(stage), 256, layout1)])
        mbarrier.arrive(local.index(stage))
        mbarrier.arrive(both.index(stage))
        if not (TWO and not APART):
            acc0 = _add(acc0, product, power, False)
        if TWO:
            acc1 = _add(acc1, product1, power1, False)
        step += 1
    return acc0, acc1, step


@gluon.jit
def _consume(warpgroup: gl.constexpr, c_desc, c1_desc, a_smem, b_smem, b1_smem, s_smem, c_smem, c1_smem, full, local,
             both, b_scale, ends, E, N, K, row_tiles, column_tiles, E_PAD: gl.constexpr, STRIP: gl.constexpr,
             STAGES: gl.constexpr, TILE_N: gl.constexpr):
    PIECE1: gl.constexpr = TILE_N - 128
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32],
                                                     cga_layout=[[0, 1]])
    layout1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                      instr_shape=[16, PIECE1, 32], cga_layout=[[0, 1]])
    ends_layout: gl.constexpr = gl.BlockedLayout([E_PAD // 32], [32], [gl.num_warps()], [0], cga_layout=[[0]])
    k_blocks = gl.cdiv(K, 128)
    n_blocks = gl.cdiv(N, 128)
    rank = _rank()
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, STRIP)
        row = row_tile * 128
        column = column_tile * TILE_N * 2
        acc0 = gl.zeros([64, 256], gl.float32, layout)
        acc1 = gl.zeros([64, 2 * PIECE1], gl.float32, layout1)
        group = group_of(row, ends, E, E_PAD, ends_layout)
        if group < E:
            b_at, b1_at = _blocks_at(b_scale, group, column + 128 * rank, column + 256 + PIECE1 * rank, n_blocks,
                                     k_blocks)
            if column + 256 < N:
                acc0, acc1, step = _accumulate(warpgroup, acc0, acc1, step, k_blocks, a_smem, b_smem, b1_smem, s_smem,
                                               full, local, both, b_at, b1_at, STAGES, True, layout, layout1)
            else:
                acc0, acc1, step = _accumulate(warpgroup, acc0, acc1, step, k_blocks, a_smem, b_smem, b1_smem, s_smem,
                                               full, local, both, b_at, b1_at, STAGES, False, layout, layout1)
        tma.store_wait(1)
        c_smem.index(warpgroup).store(acc0.to(c_desc.dtype))
        fence_async_shared()
        async_store(c_desc, [row + warpgroup * 64, column], c_smem.index(warpgroup))
        tma.store_wait(1)
        c1_smem.index(warpgroup).store(acc1.to(c_desc.dtype))
        fence_async_shared()
        async_store(c1_desc, [row + warpgroup * 64, column + 256], c1_smem.index(warpgroup))
    tma.store_wait(0)


@Launched
@gluon.jit
def multicast_kernel(a_desc, b_desc, b1_desc, c_desc, c1_desc, s_desc, b_scale, ends, E, P, N, K, E_PAD: gl.constexpr,
                     STRIP: gl.constexpr, STAGES: gl.constexpr, TILE_N: gl.constexpr):
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 256, 128], b_desc.layout)
    b1_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 2 * TILE_N - 256, 128], b1_desc.layout)
    s_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, 128], s_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2, 64, 256], c_desc.layout)
    c1_smem = gl.allocate_shared_memory(c_desc.dtype, [2, 64, 2 * TILE_N - 256], c1_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    local = mbarrier.allocate_mbarrier(batch=STAGES)
    both = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(local.index(i), count=2)
        mbarrier.init(both.index(i), count=2)  # for each of the two blocks
    row_tiles = P // 128
    column_tiles = gl.cdiv(N, 2 * TILE_N)
    gl.warp_specialize([
        (_consume, (0, c_desc, c1_desc, a_smem, b_smem, b1_smem, s_smem, c_smem, c1_smem, full, local, both, b_scale,
                    ends, E, N, K, row_tiles, column_tiles, E_PAD, STRIP, STAGES, TILE_N)),
        (_consume, (1, c_desc, c1_desc, a_smem, b_smem, b1_smem, s_smem, c_smem, c1_smem, full, local, both, b_scale,
                    ends, E, N, K, row_tiles, column_tiles, E_PAD, STRIP, STAGES, TILE_N)),
        (_produce, (a_desc, b_desc, b1_desc, s_desc, a_smem, b_smem, b1_smem, s_smem, full, local, both, ends, E, N, K,
                    row_tiles, column_tiles, E_PAD, STRIP, STAGES, TILE_N)),
    ], [4, 1], [216, 72])


# ---- both blocks share b's rows -------------------------------------------------------------------------------------


@gluon.jit
def _groups(row_pair, ends, E, E_PAD: gl.constexpr, layout: gl.constexpr):
    """The groups of this block's row tile and of the other block's."""
    rank = _rank()
    return (group_of(row_pair * 256 + 128 * rank, ends, E, E_PAD, layout),
            group_of(row_pair * 256 + 128 - 128 * rank, ends, E, E_PAD, layout))


@gluon.jit
def _produce_b(a_desc, b_desc, b1_desc, a_smem, b_smem, b1_smem, full, both, go, ends, E, N, K, row_pairs,
               column_tiles, E_PAD: gl.constexpr, STRIP: gl.constexpr, STAGES: gl.constexpr, TILE_N: gl.constexpr):
    ends_layout: gl.constexpr = gl.BlockedLayout([E_PAD // 32], [32], [1], [0], cga_layout=[[0]])
    ALL_BYTES: gl.constexpr = (128 + TILE_N) * 128
    rank = _rank()
    step = 0
    for index in range(gl.program_id(0), row_pairs * column_tiles, gl.num_programs(0)):
        row_pair, column_tile = tile_of(index, row_pairs, column_tiles, STRIP)
        mine, other = _groups(row_pair, ends, E, E_PAD, ends_layout)
        if gl.minimum(mine, other) < E:
            shared = mine == other
            c0, c1 = _columns_of(column_tile, TILE_N)
            two = c1 < N
            at = gl.minimum(mine, E - 1) * N
            # A box brings 64 rows into each block, those of the second block behind those of the first.
            row = row_pair * 256 + 64 * rank
            for k in range(gl.cdiv(K, 128)):
                stage = step % STAGES
                bar = full.index(stage)
                mbarrier.wait(both.index(stage), (step // STAGES & 1) ^ 1)
                mbarrier.arrive(go.index(stage), from_cta=0)
                mbarrier.wait(go.index(stage), step // STAGES & 1)
                mbarrier.expect(bar, ALL_BYTES, pred=two)
                mbarrier.expect(bar, ALL_BYTES - (TILE_N - 128) * 128, pred=two == 0)
                for warpgroup in gl.static_range(2):
                    async_load(a_desc, [row + 64 * warpgroup, k * 128], bar, a_smem.index(stage * 2 + warpgroup))
                async_load(b_desc, [at + c0, k * 128], bar, b_smem.index(stage), pred=shared, multicast=True)
                async_load(b_desc, [at + c0, k * 128], bar, b_smem.index(stage), pred=shared == 0)
                async_load(b1_desc, [at + c1, k * 128], bar, b1_smem.index(stage), pred=shared & two, multicast=True)
                async_load(b1_desc, [at + c1, k * 128], bar, b1_smem.index(stage), pred=(shared == 0) & two)
                step += 1


@gluon.jit
def _accumulate_b(warpgroup: gl.constexpr, acc0, acc1, step, k_blocks, a_smem, b_smem, b1_smem, full, both,
                  a_at, a_step, b_at, b1_at, STAGES: gl.constexpr, TWO: gl.constexpr, layout: gl.constexpr,
                  layout1: gl.constexpr):
    APART: gl.constexpr = acc1.shape[1] < 128
    for k in range(k_blocks):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a = a_smem.index(stage * 2 + warpgroup)
        product = _start_product_of_both(a, b_smem.index(stage), 128, layout)
        if TWO and APART:
            product1 = _start_product_of_both(a, b1_smem.index(stage), 64, layout1)
        a_byte = gl.load(a_at)
        b_byte = gl.load(b_at + k)
        b1_byte = gl.load(b1_at + k) if TWO else b_byte
        power = _power_of_sum(a_byte, b_byte)
        power1 = _power_of_sum(a_byte, b1_byte)
        if TWO and APART:
            product, product1 = warpgroup_mma_wait(0, [product, product1])
            power1 = gl.convert_layout(power1, gl.SliceLayout(1, layout1), assert_trivial=True)
        else:
            product = warpgroup_mma_wait(0, [product])
        if TWO and not APART:
            acc0 = _add(acc0, product, power, False)
            product1 = warpgroup_mma_wait(0, [_start_product_of_both(a, b1_smem.index(stage), 128, layout1)])
        mbarrier.arrive(both.index(stage))
        if not (TWO and not APART):
            acc0 = _add(acc0, product, power, False)
        if TWO:
            acc1 = _add(acc1, product1, power1, False)
        a_at += a_step
        step += 1
    return acc0, acc1, step


@gluon.jit
def _start_product_of_both(a, b, N: gl.constexpr, layout: gl.constexpr):
    zeros = gl.zeros([128, N], gl.float32, layout)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _consume_b(warpgroup: gl.constexpr, c_desc, c1_desc, a_smem, b_smem, b1_smem, c_smem, c1_smem, full, both,
               a_scale, b_scale, ends, E, P, N, K, row_pairs, column_tiles, E_PAD: gl.constexpr, STRIP: gl.constexpr,
               STAGES: gl.constexpr, TILE_N: gl.constexpr):
    PIECE1: gl.constexpr = TILE_N - 128
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32],
                                                     cga_layout=[[1, 0]])
    layout1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                      instr_shape=[16, PIECE1, 32], cga_layout=[[1, 0]])
    ends_layout: gl.constexpr = gl.BlockedLayout([E_PAD // 32], [32], [gl.num_warps()], [0], cga_layout=[[0]])
    row_128 = gl.arange(0, 128, gl.SliceLayout(1, layout))
    k_blocks = gl.cdiv(K, 128)
    n_blocks = gl.cdiv(N, 128)
    rank = _rank()
    step = 0
    for index in range(gl.program_id(0), row_pairs * column_tiles, gl.num_programs(0)):
        row_pair, column_tile = tile_of(index, row_pairs, column_tiles, STRIP)
        c0, c1 = _columns_of(column_tile, TILE_N)
        row = row_pair * 256 + 64 * rank + 64 * warpgroup
        acc0 = gl.zeros([128, 128], gl.float32, layout)
        acc1 = gl.zeros([128, PIECE1], gl.float32, layout1)
        mine, other = _groups(row_pair, ends, E, E_PAD, ends_layout)
        if gl.minimum(mine, other) < E:
            b_at, b1_at = _blocks_at(b_scale, gl.minimum(mine, E - 1), c0, c1, n_blocks, k_blocks)
            a_at = a_scale + gl.minimum(row + row_128, P - 1)
            if c1 < N:
                acc0, acc1, step = _accumulate_b(warpgroup, acc0, acc1, step, k_blocks, a_smem, b_smem, b1_smem, full,
                                                 both, a_at, P, b_at, b1_at, STAGES, True, layout, layout1)
            else:
                acc0, acc1, step = _accumulate_b(warpgroup, acc0, acc1, step, k_blocks, a_smem, b_smem, b1_smem, full,
                                                 both, a_at, P, b_at, b1_at, STAGES, False, layout, layout1)
            if mine >= E:  # rows past the last group, which only kept the other block company
                acc0 = gl.zeros([128, 128], gl.float32, layout)
                acc1 = gl.zeros([128, PIECE1], gl.float32, layout1)
        tma.store_wait(1)
        c_smem.index(warpgroup).store(acc0.to(c_desc.dtype))
        fence_async_shared()
        async_store(c_desc, [row, c0], c_smem.index(warpgroup))
        tma.store_wait(1)
        c1_smem.index(warpgroup).store(acc1.to(c_desc.dtype))
        fence_async_shared()
        async_store(c1_desc, [row, c1], c1_smem.index(warpgroup))
    tma.store_wait(0)


@Launched
@gluon.jit
def multicast_b_kernel(a_desc, b_desc, b1_desc, c_desc, c1_desc, a_scale, b_scale, ends, E, P, N, K,
                       E_PAD: gl.constexpr, STRIP: gl.constexpr, STAGES: gl.constexpr, TILE_N: gl.constexpr):
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, 128, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 128, 128], b_desc.layout)
    b1_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, TILE_N - 128, 128], b1_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2, 128, 128], c_desc.layout)
    c1_smem = gl.allocate_shared_memory(c_desc.dtype, [2, 128, TILE_N - 128], c1_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    both = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    go = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(go.index(i), count=1)
        mbarrier.init(both.index(i), count=2)  # for each of the two blocks
    row_pairs = gl.cdiv(P, 256)
    column_tiles = gl.cdiv(N, TILE_N)
    gl.warp_specialize([
        (_consume_b, (0, c_desc, c1_desc, a_smem, b_smem, b1_smem, c_smem, c1_smem, full, both, a_scale,
                      b_scale, ends, E, P, N, K, row_pairs, column_tiles, E_PAD, STRIP, STAGES, TILE_N)),
        (_consume_b, (1, c_desc, c1_desc, a_smem, b_smem, b1_smem, c_smem, c1_smem, full, both, a_scale,
                      b_scale, ends, E, P, N, K, row_pairs, column_tiles, E_PAD, STRIP, STAGES, TILE_N)),
        (_produce_b, (a_desc, b_desc, b1_desc, a_smem, b_smem, b1_smem, full, both, go, ends, E, N, K, row_pairs,
                      column_tiles, E_PAD, STRIP, STAGES, TILE_N)),
    ], [4, 1], [216, 72])


def _descriptor(x: torch.Tensor, box: list[int], split: list[int]) -> TensorDescriptor:
    """`split`: [1, 0] and [0, 1] give each block one half of the box's rows or columns. [0, 0]: all to both."""
    names = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.uint8: gl.uint8}
    layout = gl.NVMMASharedLayout.get_default_for(box, names[x.dtype], cga_layout=[split])
    found = TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)
    found.specialization = (x.dtype, *box, *split)
    return found


def grouped_mm_multicast(share: str, tile_n: int, a_PK: MXParts, b_ENK: MXParts, ends_E: torch.Tensor,
                         out_PN: torch.Tensor) -> None:
    """grouped_mm_mxfp8 into out_PN [P, N], bf16. `share`: "a" or "b". tile_n: 192 or 256."""
    (P, K), (E, N, _) = a_PK.qdata.shape, b_ENK.qdata.shape
    b_EN, rest = b_ENK.qdata.view(E * N, K), 2 * tile_n - 256
    if share == "b":
        tiles = cdiv(P, 256) * cdiv(N, tile_n)
        multicast_b_kernel[(min(multiprocessors(out_PN.device) // 2, tiles), )](
            _descriptor(a_PK.qdata, [128, 128], [1, 0]), _descriptor(b_EN, [128, 128], [0, 0]),
            _descriptor(b_EN, [tile_n - 128, 128], [0, 0]), _descriptor(out_PN, [128, 128], [1, 0]),
            _descriptor(out_PN, [128, tile_n - 128], [1, 0]), a_PK.scale_bytes.t().contiguous(),
            b_ENK.scale_bytes.contiguous(), ends_E, E, P, N, K, E_PAD=max(32, next_power_of_2(E)), STRIP=8,
            STAGES=4 if tile_n == 192 else 3, TILE_N=tile_n, num_warps=4, num_ctas=2)
        return
    tiles = P // 128 * cdiv(N, 2 * tile_n)
    multicast_kernel[(min(multiprocessors(out_PN.device) // 2, tiles), )](
        _descriptor(a_PK.qdata, [128, 128], [0, 0]), _descriptor(b_EN, [256, 128], [1, 0]),
        _descriptor(b_EN, [rest, 128], [1, 0]), _descriptor(out_PN, [64, 256], [0, 1]),
        _descriptor(out_PN, [64, rest], [0, 1]), _descriptor(a_PK.scale_bytes.t().contiguous(), [1, 128], [0, 0]),
        b_ENK.scale_bytes.contiguous(), ends_E, E, P, N, K, E_PAD=max(32, next_power_of_2(E)), STRIP=16,
        STAGES=4 if tile_n == 192 else 3, TILE_N=tile_n, num_warps=4, num_ctas=2)
