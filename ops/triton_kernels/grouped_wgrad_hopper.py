# SPDX-License-Identifier: Apache-2.0
"""Weight gradients in 16 bits on Hopper's tensor cores, in Gluon: out[e] = g[rows of e]^T a[rows of e].

The tensor cores read rows [P, N] and [P, K] as they lie and accumulate in float32. Three more warps dequantize
MXFP8 operands while the others multiply (convert_rows_hopper.py).

The design is that of grouped_gemm_hopper.py. A persistent program on each multiprocessor computes tiles of 128 by 256
values of one expert's gradient. One warp, the producer, brings operands by TMA. Two warpgroups multiply, 64 rows of
the tile each. A row of the operands takes 2 N K FLOP. An empty group's gradient is zero.

16-bit results go through shared memory and TMA, which leaves out what lies beyond N and K. float32 results go from
registers to memory, since shared memory has no room for them.

`splits` cuts N into pieces of split_n rows, each with a gradient of its own: out is [splits * E, split_n, K].

With a `Goal`, results go to memory of the caller, and ADD adds them to what is there. TMA brings the sum so far into
the buffer through which the result leaves: for the first half of a tile before its products, for the second half when
the first half has left.
"""

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

from ..device import multiprocessors
from ..mx_format import MXParts
from .convert_rows_hopper import (
    allocate,
    conversion_of,
    convert,
    counters,
    move,
    no_conversion,
    rows_of,
    tiles_in_block,
    wait_for_rows,
)
from .format import tile_of
from .gluon_names import async_load, async_store, barrier
from .grouped_gemm_hopper import barriers, descriptor
from .launch import Launched
from .library import cdiv


class Goal(NamedTuple):
    """Where the gradients of experts go.

    Attributes:
        out_ENK: exactly [jump * (splits - 1) + E, N / splits, K], so that a tile's rows beyond N lie past its end and
            TMA leaves them out. 16 bits a value, contiguous, at a multiple of 16 bytes. The gradient of expert e in
            split s is out_ENK[jump * s + e]. Nothing else is written.
        jump: None stands for E.
        add: whether gradients are added to what is there. A gradient is rounded to out's dtype, multiplied by `factor`
            and rounded again, added in float32, and the sum is rounded.
        factor: a power of two, which `add` needs. None stands for 1.
    """

    out_ENK: torch.Tensor
    jump: int | None = None
    add: bool = False
    factor: float | None = None


@gluon.jit
def expert_and_tile(index, n_tiles, k_tiles, STRIP: gl.constexpr):
    """The expert of an index, and the tile of its gradient. Experts come one after the other."""
    n_tile, k_tile = tile_of(index % (n_tiles * k_tiles), n_tiles, k_tiles, STRIP)
    return index // (n_tiles * k_tiles), n_tile, k_tile


@gluon.jit
def landings():
    """A barrier for each warpgroup, on which the sum so far lands."""
    landed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(landed.index(i), count=1)
    return landed


@gluon.jit
def bring(warpgroup: gl.constexpr, out_desc, out_smem, expert, n, k, E, split_n, jump, landed):
    """Starts to load [64, 128] of the sum so far, to which `write` adds. Arguments as there."""
    tma.store_wait(0)
    barrier()
    expert += n // split_n * (E if jump is None else jump)
    bar = landed.index(warpgroup)
    mbarrier.expect(bar, 64 * 128 * 2)
    async_load(out_desc, [expert, n % split_n, k], bar, out_smem.index(warpgroup))


@gluon.jit
def write(warpgroup: gl.constexpr, acc, out_desc, out_smem, out, expert, n, k, E, N, K, split_n, BY_TMA: gl.constexpr,
          layout: gl.constexpr, half: gl.constexpr, jump, factor, landed, ADD: gl.constexpr):
    """Stores [64, 128] of an expert's gradient [N, K], or with ADD adds it to what is there.

    n, k: the first row and column. n counts across the splits.
    half: of the tile. Its halves come in turn, and the caller has called `bring` for the first one.
    jump, factor: see Goal.
    """
    if ADD:
        if half == 1:
            bring(warpgroup, out_desc, out_smem, expert, n, k, E, split_n, jump, landed)
    expert += n // split_n * (E if jump is None else jump)
    n %= split_n
    if BY_TMA:
        buffer = out_smem.index(warpgroup)
        if ADD:
            mbarrier.wait(landed.index(warpgroup), half)
            values = acc.to(out_desc.dtype).to(gl.float32)
            if factor is not None:
                values = (values * factor).to(out_desc.dtype).to(gl.float32)
            values += buffer.reshape([64, 128]).load(layout).to(gl.float32)
            buffer.reshape([64, 128]).store(values.to(out_desc.dtype))
        else:
            tma.store_wait(0)
            buffer.reshape([64, 128]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        async_store(out_desc, [expert, n, k], buffer)
    else:
        n_64 = n + gl.arange(0, 64, gl.SliceLayout(1, layout))
        k_128 = k + gl.arange(0, 128, gl.SliceLayout(0, layout))
        at = out + expert.to(gl.int64) * split_n * K
        at += gl.expand_dims(n_64.to(gl.int64) * K, 1) + gl.expand_dims(k_128, 0)
        inside = gl.expand_dims((n_64 < split_n) & (expert < N // split_n * E), 1) & gl.expand_dims(k_128 < K, 0)
        gl.store(at, acc, inside)


@gluon.jit
def _produce_bf16(g_desc, a_desc, g_smem, a_smem, full, empty, ends, E, P, n_tiles, k_tiles, done, tiles,
                  STRIP: gl.constexpr, STAGES: gl.constexpr, B: gl.constexpr):
    """The producer warp: brings operands by TMA. With B it first waits until the rows are dequantized."""
    step = 0
    ready = 0
    for index in range(gl.program_id(0), E * n_tiles * k_tiles, gl.num_programs(0)):
        expert, n_tile, k_tile = expert_and_tile(index, n_tiles, k_tiles, STRIP)
        first, end = rows_of(expert, ends)
        for row in range(first, end, 64):
            if B:
                ready = wait_for_rows(row, ready, done, P // 128, tiles)
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, (128 + 256) * 64 * 2)
            for half in gl.static_range(2):
                async_load(g_desc, [row, n_tile * 128 + 64 * half], bar, g_smem.index(stage * 2 + half))
            async_load(a_desc, [row, k_tile * 256], bar, a_smem.index(stage))
            step += 1


@gluon.jit
def _consume_bf16(warpgroup: gl.constexpr, out_desc, g_smem, a_smem, out_smem, full, empty, out, ends, E, N, K,
                  split_n, n_tiles, k_tiles, jump, factor, landed, ADD: gl.constexpr, STRIP: gl.constexpr,
                  STAGES: gl.constexpr, BY_TMA: gl.constexpr):
    """A warpgroup: computes its 64 rows of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                          instr_shape=[16, 128, 16])
    step = 0
    for index in range(gl.program_id(0), E * n_tiles * k_tiles, gl.num_programs(0)):
        expert, n_tile, k_tile = expert_and_tile(index, n_tiles, k_tiles, STRIP)
        first, end = rows_of(expert, ends)
        if ADD:
            bring(warpgroup, out_desc, out_smem, expert, n_tile * 128 + warpgroup * 64, k_tile * 256, E, split_n, jump,
                  landed)
        acc = gl.zeros([64, 256], gl.float32, layout)
        for row in range(first, end, 64):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            acc = warpgroup_mma(g_smem.index(stage * 2 + warpgroup).permute((1, 0)), a_smem.index(stage), acc,
                                is_async=True)
            # The product before this one is done, so its operands may be overwritten.
            acc = warpgroup_mma_wait(1, [acc])
            if row > first:
                mbarrier.arrive(empty.index((step - 1) % STAGES))
            step += 1
        acc = warpgroup_mma_wait(0, [acc])
        if first < end:
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        n = n_tile * 128 + warpgroup * 64
        k = k_tile * 256
        acc0, acc1 = gl.split(acc.reshape([64, 2, 128]).permute((0, 2, 1)))
        acc0 = gl.convert_layout(acc0, half_layout, assert_trivial=True)
        acc1 = gl.convert_layout(acc1, half_layout, assert_trivial=True)
        write(warpgroup, acc0, out_desc, out_smem, out, expert, n, k, E, N, K, split_n, BY_TMA, half_layout, 0,
              jump, factor, landed, ADD)
        write(warpgroup, acc1, out_desc, out_smem, out, expert, n, k + 128, E, N, K, split_n, BY_TMA, half_layout, 1,
              jump, factor, landed, ADD)
    tma.store_wait(0)


@Launched
@gluon.jit
def wgrad_bf16_kernel(g_desc, a_desc, out_desc, out, ends, E, P, N, K, split_n, jump, factor, mx_g_desc, mx_g,
                      mx_a_desc, mx_a, tickets, done, ADD: gl.constexpr, B: gl.constexpr,
                      STRIP: gl.constexpr, STAGES: gl.constexpr, BY_TMA: gl.constexpr):
    """All tiles of out. Grid: programs that run at the same time.

    B: block size of the MXFP8 operands. g_desc and a_desc then describe the memory that gets their bf16 values. With 0
    no operand is MXFP8, and the six arguments after `factor` are None. jump, factor, ADD: see Goal.
    """
    g_smem = gl.allocate_shared_memory(g_desc.dtype, [STAGES * 2, 64, 64], g_desc.layout)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 64, 256], a_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2 if BY_TMA else 1, 1, 64, 128], out_desc.layout)
    full, empty = barriers(STAGES, 1)
    n_tiles = gl.cdiv(N, 128)
    k_tiles = gl.cdiv(K, 256)
    landed = full
    if ADD:
        landed = landings()
    if B:
        room = allocate(mx_a_desc, B, False)
        gl.warp_specialize([
            (_consume_bf16, (0, out_desc, g_smem, a_smem, out_smem, full, empty, out, ends, E, N, K, split_n, n_tiles,
                             k_tiles, jump, factor, landed, ADD, STRIP, STAGES, BY_TMA)),
            (_consume_bf16, (1, out_desc, g_smem, a_smem, out_smem, full, empty, out, ends, E, N, K, split_n, n_tiles,
                             k_tiles, jump, factor, landed, ADD, STRIP, STAGES, BY_TMA)),
            (convert, (mx_g, mx_a, room, B, False)),
            (_produce_bf16, (g_desc, a_desc, g_smem, a_smem, full, empty, ends, E, P, n_tiles, k_tiles, done,
                             tiles_in_block(mx_g, mx_a), STRIP, STAGES, B)),
            (move, (mx_g_desc, mx_g, mx_a_desc, mx_a, ends, E, n_tiles * k_tiles, room, tickets, done, B, False)),
        ], [4, 2, 1, 1], [208, 88, 88, 88])
    else:
        gl.warp_specialize([
            (_consume_bf16, (0, out_desc, g_smem, a_smem, out_smem, full, empty, out, ends, E, N, K, split_n, n_tiles,
                             k_tiles, jump, factor, landed, ADD, STRIP, STAGES, BY_TMA)),
            (_consume_bf16, (1, out_desc, g_smem, a_smem, out_smem, full, empty, out, ends, E, N, K, split_n, n_tiles,
                             k_tiles, jump, factor, landed, ADD, STRIP, STAGES, BY_TMA)),
            (_produce_bf16, (g_desc, a_desc, g_smem, a_smem, full, empty, ends, E, P, n_tiles, k_tiles, done, 0, STRIP,
                             STAGES, B)),
        ], [4, 1], [232, 40])


def _launch_bf16(g_PN, g_scale, a_PK, a_scale, block_size, ends_E, out_ENK, goal) -> None:
    (P, N), K, E = g_PN.shape, a_PK.shape[1], ends_E.shape[0]
    by_tma = out_ENK.dtype != torch.float32
    tiles = E * cdiv(N, 128) * cdiv(K, 256)
    plain, mx = [], []
    for data, scale in ((g_PN, g_scale), (a_PK, a_scale)):
        plain.append(data if scale is None else torch.empty(data.shape, dtype=torch.bfloat16, device=data.device))
        mx.append(None if scale is None else conversion_of(data, scale, plain[-1]))
    if block_size:
        mx = [one or no_conversion(other) for one, other in zip(mx, reversed(mx), strict=True)]
        conversion = (*mx[0], *mx[1], *counters(E, P, g_PN.device))
    else:
        conversion = (None, ) * 6
    wgrad_bf16_kernel[(min(multiprocessors(out_ENK.device), tiles), )](
        descriptor(plain[0], [64, 64]), descriptor(plain[1], [64, 256]), out_descriptor(out_ENK, by_tma), out_ENK,
        ends_E, E, P, N, K, out_ENK.shape[1], goal.jump, goal.factor, *conversion, ADD=goal.add, B=block_size,
        STRIP=16, STAGES=3 if by_tma or block_size else 4, BY_TMA=by_tma, num_warps=4)


def empty_gradient(N: int, K: int, ends_E: torch.Tensor, out_dtype: torch.dtype, splits: int = 1) -> torch.Tensor:
    """[splits * E, N / splits, K], not written yet."""
    return torch.empty(splits * ends_E.shape[0], N // splits, K, dtype=out_dtype, device=ends_E.device)


def out_descriptor(out_ENK: torch.Tensor, by_tma: bool):
    """The result's TMA descriptor. Without `by_tma` nothing uses it, and its box is small to save shared memory."""
    return descriptor(out_ENK, [1, 64, 128 if by_tma else 32])


def grouped_mm_wgrad_bf16(g_PN: torch.Tensor | MXParts, a_PK: torch.Tensor | MXParts, ends_E: torch.Tensor,
                          out_dtype: torch.dtype, splits: int = 1, goal: Goal | None = None) -> torch.Tensor:
    """Contracts over each group's rows: [E, N, K] in `out_dtype`.

    Args:
        g_PN, a_PK: rows, contiguous, both bf16 or both fp16. One or both may be MXFP8, with one block size; the other
            is then bf16. MXFP8 rows are dequantized to bf16.
        ends_E: int32 ends of the groups on the device, multiples of 64. With an MXFP8 operand, multiples of 128.
        splits: pieces into which N is cut, each a multiple of 64. The result is [splits * E, N / splits, K], with each
            piece contiguous.
        goal: where the result goes, in `out_dtype`. P is not 0. Returns its out_ENK.
    """
    (g, g_scale, g_block), (a, a_scale, a_block) = (
        (x.qdata, x.scale_bytes, x.block_size) if isinstance(x, MXParts) else (x, None, 0) for x in (g_PN, a_PK))
    (P, K), N, block_size = a.shape, g.shape[1], g_block or a_block
    goal = goal or Goal(empty_gradient(N, K, ends_E, out_dtype, splits))
    out_ENK = goal.out_ENK
    if P == 0:
        return out_ENK.zero_()
    if g_block or not a_block or out_dtype == torch.float32 or ends_E.shape[0] * N < 4 * P or K < N:
        _launch_bf16(g, g_scale, a, a_scale, block_size, ends_E, out_ENK, goal)
        return out_ENK
    # Few, wide rows: their bf16 copy decides the peak of memory. Handle one half of their columns after the other. The
    # price is that g, which is narrower, is read twice.
    columns = 256 * cdiv(K, 512)
    for k in range(0, K, columns):
        scale = a_scale[:, k // block_size:(k + columns) // block_size]
        part = out_ENK[..., k:k + columns]
        _launch_bf16(g, g_scale, a[:, k:k + columns], scale, block_size, ends_E, part, goal)
    return out_ENK
