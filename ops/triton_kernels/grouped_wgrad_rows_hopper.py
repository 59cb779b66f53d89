# SPDX-License-Identifier: Apache-2.0
"""Weight gradients in MXFP8 from rows, on Hopper in Gluon: out[e] = g[rows of e]^T a[rows of e].

FP8 tensor cores read along the contraction only, so rows have to be transposed and re-scaled along it. Three warps do
that while the others multiply (convert_rows_hopper.py). A tile of 128 x 128 values gets one scale. A product of two
tiles then has one scale, too. The warps that multiply load the two bytes themselves while the tensor cores work. With
a scale for each column of g and of a, scaling would take twice the instructions.

Tiles, programs, stores and `splits` are those of grouped_wgrad_hopper.py.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..device import multiprocessors
from ..mx_format import MXParts
from .convert_rows_hopper import (
    allocate,
    conversion_of,
    convert,
    counters,
    move,
    rows_of,
    tiles_in_block,
    wait_for_rows,
)
from .gluon_names import async_load, barrier
from .grouped_gemm_hopper import add_products, barriers, descriptor, start_product
from .grouped_wgrad_hopper import Goal, bring, empty_gradient, expert_and_tile, landings, out_descriptor, write
from .launch import Launched
from .library import cdiv


@gluon.jit
def _power_of_sum(a, b):
    """The float32 2^(a - 127) * 2^(b - 127): 0 if it is 2^-127 or less, and at most 2^127. NaN if a byte is 255."""
    bits = gl.minimum(gl.maximum(a.to(gl.int32) + b.to(gl.int32) - 127, 0), 254) << 23
    return gl.where((a == 255) | (b == 255), 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _produce(g_desc, a_desc, g_smem, a_smem, full, empty, ends, E, P, K, n_tiles, k_tiles, done, tiles,
             STRIP: gl.constexpr, STAGES: gl.constexpr):
    """The producer warp: brings operands by TMA.

    `tiles`: converted tiles in a block of 128 rows, see wait_for_rows.
    """
    k_blocks = gl.cdiv(K, 128)
    step = 0
    ready = 0
    for index in range(gl.program_id(0), E * n_tiles * k_tiles, gl.num_programs(0)):
        expert, n_tile, k_tile = expert_and_tile(index, n_tiles, k_tiles, STRIP)
        first, end = rows_of(expert, ends)
        n = n_tile * 128
        k_block = k_tile * 2
        inside = gl.minimum(k_blocks - k_block, 2)
        for row in range(first, end, 128):
            ready = wait_for_rows(row, ready, done, P // 128, tiles)
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 3 * 128 * 128, pred=inside == 2)
            mbarrier.expect(bar, 2 * 128 * 128, pred=inside < 2)
            for half in gl.static_range(2):
                async_load(g_desc, [n + 64 * half, row], bar, g_smem.index(stage * 2 + half))
            for half in gl.static_range(2):
                async_load(a_desc, [(k_block + half) * 128, row], bar, a_smem.index(half * STAGES + stage),
                           pred=half < inside)
            step += 1


@gluon.jit
def _accumulate(warpgroup: gl.constexpr, step, steps, g_smem, a_smem, full, empty, g_at, g_step, a_at, a_step,
                STAGES: gl.constexpr, TWO: gl.constexpr, layout: gl.constexpr):
    """Adds up the scaled products of an expert's rows, 128 of them a step. There may be no steps.

    Args:
        g_at, a_at: addresses of the first step's scale bytes: that of g's tile, and that of the first of a's two.
        g_step, a_step: from a step's bytes to those of the next.

    Returns:
        The sums of the tile's two blocks of columns, and the next step. Without TWO the second sum is 0.
    """
    acc0 = gl.zeros([64, 128], gl.float32, layout)
    acc1 = gl.zeros([64, 128], gl.float32, layout)
    for _ in range(steps):
        stage = step % STAGES
        barrier()  # as in grouped_gemm_hopper.py
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        g = g_smem.index(stage * 2 + warpgroup)
        product = start_product(g, a_smem.index(stage), layout)
        # The product hides most of these loads' time. They bypass L1, since other programs write the bytes while this
        # one runs.
        g_byte = gl.load(g_at, cache_modifier=".cg")
        a_byte = gl.load(a_at, cache_modifier=".cg")
        a1_byte = gl.load(a_at + 1, cache_modifier=".cg") if TWO else a_byte
        acc0, acc1 = add_products(acc0, acc1, product, _power_of_sum(g_byte, a_byte), _power_of_sum(g_byte, a1_byte),
                                  g, a_smem, empty, stage, STAGES, TWO, layout)
        step += 1
        g_at += g_step
        a_at += a_step
    return acc0, acc1, step


@gluon.jit
def _consume(warpgroup: gl.constexpr, out_desc, g_smem, a_smem, out_smem, full, empty, out, g_scale, g_step, a_scale,
             ends, E, N, K, split_n, n_tiles, k_tiles, jump, factor, landed, ADD: gl.constexpr, STRIP: gl.constexpr,
             STAGES: gl.constexpr, BY_TMA: gl.constexpr):
    """A warpgroup: computes its 64 rows of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    k_blocks = gl.cdiv(K, 128)
    step = 0
    for index in range(gl.program_id(0), E * n_tiles * k_tiles, gl.num_programs(0)):
        expert, n_tile, k_tile = expert_and_tile(index, n_tiles, k_tiles, STRIP)
        first, end = rows_of(expert, ends)
        steps = (end - first) // 128
        if ADD:
            bring(warpgroup, out_desc, out_smem, expert, n_tile * 128 + warpgroup * 64, k_tile * 256, E, split_n, jump,
                  landed)
        g_at = g_scale + (first // 128).to(gl.int64) * g_step + n_tile
        a_at = a_scale + (first // 128).to(gl.int64) * k_blocks + k_tile * 2
        if k_tile * 2 + 2 > k_blocks:
            acc0, acc1, step = _accumulate(warpgroup, step, steps, g_smem, a_smem, full, empty, g_at, g_step, a_at,
                                           k_blocks, STAGES, False, layout)
        else:
            acc0, acc1, step = _accumulate(warpgroup, step, steps, g_smem, a_smem, full, empty, g_at, g_step, a_at,
                                           k_blocks, STAGES, True, layout)
        n = n_tile * 128 + warpgroup * 64
        k = k_tile * 256
        write(warpgroup, acc0, out_desc, out_smem, out, expert, n, k, E, N, K, split_n, BY_TMA, layout, 0, jump,
              factor, landed, ADD)
        write(warpgroup, acc1, out_desc, out_smem, out, expert, n, k + 128, E, N, K, split_n, BY_TMA, layout, 1, jump,
              factor, landed, ADD)
    tma.store_wait(0)


@Launched
@gluon.jit
def wgrad_rows_kernel(g_desc, a_desc, out_desc, out, g_scale, g_step, a_scale, ends, E, P, N, K, split_n, jump, factor,
                      mx_g_desc, mx_g, mx_a_desc, mx_a, tickets, done, ADD: gl.constexpr,
                      STRIP: gl.constexpr, STAGES: gl.constexpr, BY_TMA: gl.constexpr):
    """All tiles of out. Grid: programs that run at the same time.

    g_desc and a_desc describe the column forms, which `convert` writes. The arguments from mx_g_desc to mx_a are what
    `conversion_of` returned, and tickets and done what `counters` returned. jump, factor, ADD: see Goal.
    """
    g_smem = gl.allocate_shared_memory(g_desc.dtype, [STAGES * 2, 64, 128], g_desc.layout)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, 128, 128], a_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2 if BY_TMA else 1, 1, 64, 128], out_desc.layout)
    full, empty = barriers(STAGES, 1)
    n_tiles = gl.cdiv(N, 128)
    k_tiles = gl.cdiv(K, 256)
    landed = full
    if ADD:
        landed = landings()
    room = allocate(mx_a_desc, 128, True)
    gl.warp_specialize([
        (_consume, (0, out_desc, g_smem, a_smem, out_smem, full, empty, out, g_scale, g_step, a_scale, ends, E, N, K,
                    split_n, n_tiles, k_tiles, jump, factor, landed, ADD, STRIP, STAGES, BY_TMA)),
        (_consume, (1, out_desc, g_smem, a_smem, out_smem, full, empty, out, g_scale, g_step, a_scale, ends, E, N, K,
                    split_n, n_tiles, k_tiles, jump, factor, landed, ADD, STRIP, STAGES, BY_TMA)),
        (convert, (mx_g, mx_a, room, 128, True)),
        (_produce, (g_desc, a_desc, g_smem, a_smem, full, empty, ends, E, P, K, n_tiles, k_tiles, done,
                    tiles_in_block(mx_g, mx_a), STRIP, STAGES)),
        (move, (mx_g_desc, mx_g, mx_a_desc, mx_a, ends, E, n_tiles * k_tiles, room, tickets, done, 128, True)),
    ], [4, 2, 1, 1], [208, 88, 88, 88])


def _transposed(data_PK: torch.Tensor, scale: torch.Tensor) -> tuple:
    """Memory for the column form [K, P] and its scales [P / 128, ceil(K / 128)], and what `conversion_of` returns."""
    P, K = data_PK.shape
    data_KP = torch.empty(K, P, dtype=data_PK.dtype, device=data_PK.device)
    tile_scale = torch.empty(P // 128, cdiv(K, 128), dtype=torch.uint8, device=data_PK.device)
    return data_KP, tile_scale, conversion_of(data_PK, scale, data_KP, tile_scale)


def grouped_mm_wgrad_mxfp8_rows(g_PN: MXParts, a_PK: MXParts, ends_E: torch.Tensor, out_dtype: torch.dtype,
                                splits: int = 1, goal: Goal | None = None) -> torch.Tensor:
    """Contracts over each group's rows: [E, N, K] in `out_dtype`.

    Args:
        g_PN, a_PK: rows. Blocks of 128, contiguous data.
        ends_E: int32 ends of the groups on the device, multiples of 128.
        splits: pieces into which N is cut, each a multiple of 64. The result is [splits * E, N / splits, K], with each
            piece contiguous.
        goal: where the result goes, in `out_dtype`. P is not 0. Returns its out_ENK.

    Rows are re-scaled along the contraction: each tile of 128 x 128 values gets the largest of its rows' scales. That
    changes only values that become subnormal in e4m3. A product of two scales counts as 0 if it is 2^-127 or less.
    Above 2^127 it is clamped. A scale byte of 255 gives NaN.
    """
    (P, K), N, E = a_PK.qdata.shape, g_PN.qdata.shape[1], ends_E.shape[0]
    goal = goal or Goal(empty_gradient(N, K, ends_E, out_dtype, splits))
    out_ENK = goal.out_ENK
    if P == 0:
        return out_ENK.zero_()
    by_tma = out_dtype != torch.float32
    tiles = E * cdiv(N, 128) * cdiv(K, 256)
    a_KP, a_scale, mx_a = _transposed(a_PK.qdata, a_PK.scale_bytes)
    g_NP, g_scale, mx_g = _transposed(g_PN.qdata, g_PN.scale_bytes)
    wgrad_rows_kernel[(min(multiprocessors(a_KP.device), tiles), )](
        descriptor(g_NP, [64, 128]), descriptor(a_KP, [128, 128]), out_descriptor(out_ENK, by_tma), out_ENK, g_scale,
        g_scale.shape[1], a_scale, ends_E, E, P, N, K, N // splits, goal.jump, goal.factor, *mx_g, *mx_a,
        *counters(E, P, a_KP.device), ADD=goal.add, STRIP=8, STAGES=3, BY_TMA=by_tma, num_warps=4)
    return out_ENK
