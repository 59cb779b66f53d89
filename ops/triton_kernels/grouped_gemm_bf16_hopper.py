# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM of bf16 and fp16 on Hopper's tensor cores, in Gluon, with weights read where they lie.

    out[rows of e] = a[rows of e] w[e]^T      forward: w [N, K], N made of one or two parts (gate and up)
    out[rows of e] = a[rows of e] w[e]        transposed, for input gradients: contracts over N, both parts in one sum

The design is that of grouped_gemm_hopper.py: a persistent program on each SM, tiles of 128 rows by 128 HALVES columns,
one warp that brings operands by TMA, 64 values of the contraction at a time, two warpgroups that multiply 64 rows
each. Columns are counted in blocks of 128 of one part, so that a tile may end one part and begin the next.

Weights are matrices anywhere in memory, each a parameter of its own. To TMA they are one tensor [places, N, K] whose
first axis steps by what divides all distances between them: it does not mind that places overlap.

Rows at and past the last group's end come back as zeros. Groups are multiples of 128 rows: a tile never straddles two.

Measured on an H200, TFLOP/s beside torch._grouped_mm's (which needs gate and up in one tensor):

    K x N, experts, rows each     up         down       dgrad up   dgrad down
    7168x2048, 8, 16384         717  709   717  693   703  704   716  708
    7168x2048, 8, 256           718  694   575  539   629  613   662  660
    2048x1408, 8, 2048          757  709   699  641   760  719   678  618
    2048x768, 32, 128           385  349   367  273   419  340   327  289

Strips of 8 row tiles are as fast as 16 for many rows and up to 6% faster for few; 3 stages and whole tiles in shared
memory on their way out 2% faster than 4 stages and halves for many rows, 6% slower for 256.

With 64 rows for each of 32 experts of 8192x5120 and 7168x2048, narrow tiles that walk along one expert's weights, two
steps' side by side, read them at 0.88 to 0.98 of a device copy's bandwidth (on an H100, 0.88 to 0.95), where wide ones
in strips of 8 experts reached 0.81 to 0.90 (0.81 to 0.89), torch._grouped_mm 0.68 to 0.73 (0.86 to 0.92).
"""

import math
from collections.abc import Sequence
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
from .grouped_gemm_hopper import descriptor, group_of, tile_of
from .launch import Launched
from .library import cdiv, check_alike, next_power_of_2, operator, rows_flops

MOST_MATRICES = 64  # whose places one launch takes, unless they are evenly spaced
MOST_PLACES = 2**29 - 2  # `_odd` of them are int32


def _odd(values: tuple[int, ...]) -> tuple[int, ...]:
    """What `_even` takes back. Triton compiles anew for each pattern of numbers that are 1 or multiples of 16."""
    return tuple(4 * value + 3 for value in values)


@gluon.jit
def _even(value):
    return (value - 3) >> 2


@gluon.jit
def _place_of(part, group, places, spacings):
    """Where a group's matrix of a part lies: `places` has one for each part, or one for each group of each; both as
    `_odd` left them."""
    EACH: gl.constexpr = len(places) // len(spacings)
    place = _even(places[0]) + group * _even(spacings[0])
    for i in gl.static_range(1, len(places)):
        if EACH == 1:
            place = gl.where(part == i, _even(places[i]) + group * _even(spacings[i]), place)
        else:
            place = gl.where((part == i // EACH) & (group == i % EACH), _even(places[i]), place)
    return place


@gluon.jit
def _feed(a_desc, w_desc, a_smem, w_smem, full, empty, ends, places, spacings, E, row_tiles, column_tiles, part_blocks,
          part_steps, E_PAD: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
          TRANSPOSED: gl.constexpr, AT_ONCE: gl.constexpr):
    """The producer: operands by TMA, the weights of AT_ONCE steps side by side."""
    PARTS: gl.constexpr = len(spacings)
    layout: gl.constexpr = gl.BlockedLayout([E_PAD // 32], [32], [1], [0])
    blocks = part_blocks if TRANSPOSED else part_blocks * PARTS
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, GROUP)
        row = row_tile * 128
        group = group_of(row, ends, E, E_PAD, layout)
        if group < E:
            block = column_tile * HALVES
            halves = gl.minimum(blocks - block, HALVES)
            first = _place_of(block // part_blocks, group, places, spacings)
            second = _place_of((block + 1) // part_blocks, group, places, spacings)
            last = _place_of(PARTS - 1, group, places, spacings)
            for k in range(0, part_steps * PARTS if TRANSPOSED else part_steps, AT_ONCE):
                for i in gl.static_range(AT_ONCE):
                    bar = full.index((step + i) % STAGES)
                    mbarrier.wait(empty.index((step + i) % STAGES), ((step + i) // STAGES & 1) ^ 1)
                    mbarrier.expect(bar, (128 + HALVES * 128) * 128, pred=halves == HALVES)
                    mbarrier.expect(bar, (128 + 128) * 128, pred=halves < HALVES)
                for half in gl.static_range(HALVES):
                    for i in gl.static_range(AT_ONCE):
                        stage = (step + i) % STAGES
                        w = w_smem.index(stage * HALVES + half)
                        at = (k + i) % part_steps * 64
                        if TRANSPOSED:
                            place = gl.where(k + i < part_steps, first, last)
                            tma.async_copy_global_to_shared(w_desc, [place, at, (block + half) * 128],
                                                            full.index(stage), w, pred=half < halves)
                        else:
                            column = (block + half) % part_blocks * 128
                            tma.async_copy_global_to_shared(w_desc, [first if half == 0 else second, column, at],
                                                            full.index(stage), w, pred=half < halves)
                for i in gl.static_range(AT_ONCE):
                    stage = (step + i) % STAGES
                    at = (k + i) % part_steps * 64
                    for half in gl.static_range(2):
                        tma.async_copy_global_to_shared(a_desc, [row + 64 * half, (k + i) // part_steps, at],
                                                        full.index(stage), a_smem.index(stage * 2 + half))
                step += AT_ONCE


@gluon.jit
def _store(part: gl.constexpr, x, c_desc, c_smem, row, block, part_blocks, BUFFERS: gl.constexpr):
    """One or two blocks of columns of rows [64 part, 64 part + 64) of a tile."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(x.shape, c_desc.dtype)
    tma.store_wait(0)
    c_smem.index(part * BUFFERS)._reinterpret(c_desc.dtype, x.shape, layout).store(x.to(c_desc.dtype))
    fence_async_shared()
    for half in gl.static_range(x.shape[1] // 128):
        tma.async_copy_shared_to_global(
            c_desc, [row + part * 64, (block + half) // part_blocks, (block + half) % part_blocks * 128],
            c_smem.index(part * BUFFERS + half))


@gluon.jit
def _multiply(part: gl.constexpr, c_desc, a_smem, w_smem, c_smem, full, empty, step, steps, row, block, part_blocks,
              STAGES: gl.constexpr, HALVES: gl.constexpr, BUFFERS: gl.constexpr, WIDTH: gl.constexpr,
              TRANSPOSED: gl.constexpr):
    """Rows [64 part, 64 part + 64) of one tile, of which WIDTH columns are there."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    shape: gl.constexpr = [64, WIDTH] if TRANSPOSED else [WIDTH, 64]
    dtype: gl.constexpr = w_smem.dtype
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    acc = gl.zeros([64, WIDTH], gl.float32, layout)
    for k in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a = a_smem.index(stage * 2 + part).reshape([64, 64])
        # Both halves as one: they lie one after the other, each in columns of 128 bytes.
        w = w_smem.index(stage * HALVES)._reinterpret(dtype, shape, w_layout)
        acc = warpgroup_mma(a, w if TRANSPOSED else w.permute((1, 0)), acc, is_async=True)
        # The product before this one is done: its operands may be overwritten.
        acc = warpgroup_mma_wait(1, [acc])
        if k > 0:
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        step += 1
    acc = warpgroup_mma_wait(0, [acc])
    if steps > 0:
        mbarrier.arrive(empty.index((step - 1) % STAGES))
    if WIDTH == 256 and BUFFERS == 1:
        one, other = acc.reshape([64, 2, 128]).permute((0, 2, 1)).split()
        _store(part, one, c_desc, c_smem, row, block, part_blocks, BUFFERS)
        _store(part, other, c_desc, c_smem, row, block + 1, part_blocks, BUFFERS)
    else:
        _store(part, acc, c_desc, c_smem, row, block, part_blocks, BUFFERS)
    return step


@gluon.jit
def _consume(part: gl.constexpr, c_desc, a_smem, w_smem, c_smem, full, empty, ends, E, row_tiles, column_tiles,
             part_blocks, blocks, steps, GROUP: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
             BUFFERS: gl.constexpr, TRANSPOSED: gl.constexpr):
    end = gl.load(ends + E - 1)
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, GROUP)
        row = row_tile * 128
        block = column_tile * HALVES
        todo = gl.where(row < end, steps, 0)
        if HALVES == 1 or block + HALVES > blocks:
            step = _multiply(part, c_desc, a_smem, w_smem, c_smem, full, empty, step, todo, row, block, part_blocks,
                             STAGES, HALVES, BUFFERS, 128, TRANSPOSED)
        else:
            step = _multiply(part, c_desc, a_smem, w_smem, c_smem, full, empty, step, todo, row, block, part_blocks,
                             STAGES, HALVES, BUFFERS, 256, TRANSPOSED)
    tma.store_wait(0)


@Launched
@gluon.jit
def grouped_mm_bf16_kernel(a_desc, w_desc, c_desc, ends, places, spacings, E, row_tiles, part_blocks, part_steps,
                           E_PAD: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
                           BUFFERS: gl.constexpr, TRANSPOSED: gl.constexpr, AT_ONCE: gl.constexpr):
    """AT_ONCE must divide the steps of a tile."""
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, 64, 1, 64], a_desc.layout)
    w_block: gl.constexpr = w_desc.block_shape
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * HALVES, w_block[0], w_block[1], w_block[2]],
                                       w_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 1, 128], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    PARTS: gl.constexpr = len(spacings)
    blocks = part_blocks if TRANSPOSED else part_blocks * PARTS
    steps = part_steps * PARTS if TRANSPOSED else part_steps
    column_tiles = gl.cdiv(blocks, HALVES)
    gl.warp_specialize([
        (_consume, (0, c_desc, a_smem, w_smem, c_smem, full, empty, ends, E, row_tiles, column_tiles, part_blocks,
                    blocks, steps, GROUP, STAGES, HALVES, BUFFERS, TRANSPOSED)),
        (_consume, (1, c_desc, a_smem, w_smem, c_smem, full, empty, ends, E, row_tiles, column_tiles, part_blocks,
                    blocks, steps, GROUP, STAGES, HALVES, BUFFERS, TRANSPOSED)),
        (_feed, (a_desc, w_desc, a_smem, w_smem, full, empty, ends, places, spacings, E, row_tiles, column_tiles,
                 part_blocks, part_steps, E_PAD, GROUP, STAGES, HALVES, TRANSPOSED, AT_ONCE)),
    ], [4, 1], [232, 40])


class _Placed(NamedTuple):
    """How one TMA tensor covers all matrices: its first axis has `count` places, `unit` bytes apart; `_place_of` finds
    a matrix by `places` and `spacings`."""

    places: tuple[int, ...]
    spacings: tuple[int, ...]
    count: int
    unit: int


def _placed(weights: Sequence[torch.Tensor], experts: int) -> _Placed | None:
    """None where TMA cannot read them as they lie, or a launch would need too many places."""
    like, step = weights[0], weights[0].stride(-2)
    if step % 8 != 0 or any(w.stride()[-2:] != (step, 1) or w.shape != like.shape for w in weights):
        return None
    places = [w.data_ptr() for w in weights]
    if like.dim() == 3:
        spacings = [w.stride(0) * w.element_size() if experts > 1 else 0 for w in weights]
    else:
        parts = [places[i:i + experts] for i in range(0, len(places), experts)]
        distances = [{b - a for a, b in zip(part, part[1:], strict=False)} or {0} for part in parts]
        even = max(map(len, distances)) == 1
        spacings = [distance.pop() if even else 0 for distance in distances]
        places = [part[0] for part in parts] if even else places
    ends = [place + (experts - 1) * spacing for place, spacing in zip(places, spacings, strict=False)]
    origin, last = min(places + ends), max(places + ends)
    unit = math.gcd(*(place - origin for place in places), *spacings) or 16
    count = (last - origin) // unit + 1
    if (origin | unit) % 16 or count > MOST_PLACES or len(places) > MOST_MATRICES:
        return None
    return _Placed(tuple((place - origin) // unit for place in places),
                   tuple(spacing // unit for spacing in spacings), count, unit)


def _result(a_PK, weights, ends_E, out_dtype, transposed):
    N, K = weights[0].shape[-2:]
    parts = len(weights) if weights[0].dim() == 3 else len(weights) // ends_E.shape[0]
    return a_PK.new_empty(a_PK.shape[0], K if transposed else N * parts, dtype=out_dtype)


@operator(_result, flops=rows_flops)
def _grouped_mm_bf16_hopper(a_PK: torch.Tensor, weights: Sequence[torch.Tensor], ends_E: torch.Tensor,
                            out_dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    """`weights`: the parts' stacks [E, N, K], or all matrices [N, K] of one part after the other."""
    out = _result(a_PK, weights, ends_E, out_dtype, transposed)
    if out.numel() == 0:
        return out
    P, E = a_PK.shape[0], ends_E.shape[0]
    N, K = weights[0].shape[-2:]
    placed = _placed(weights, E)
    if placed is None:
        weights = torch.stack(list(weights)).view(-1, E, N, K).unbind(0)
        placed = _placed(weights, E)
    parts = len(placed.spacings)
    a_parts, out_parts = (parts, 1) if transposed else (1, parts)
    depth, width = (N, K) if transposed else (K, N)  # of one part
    first = min(weights, key=torch.Tensor.data_ptr)
    block = [1, 64, 128] if transposed else [1, 128, 64]
    part_blocks, part_steps = cdiv(width, 128), cdiv(depth, 64)
    blocks = part_blocks * out_parts
    row_tiles, sms = P // 128, multiprocessors(a_PK.device)
    group, at_once = 8, 1
    if out_dtype.itemsize == 2 and P <= 128 * E:
        # A tile of rows for an expert: weights are read once, in the order in which they lie, and that alone counts.
        halves, buffers, stages, group, at_once = 1, 1, 6, 1, 2 - part_steps * a_parts % 2
    elif out_dtype.itemsize == 2 and row_tiles * cdiv(blocks, 2) >= sms:
        # The wide tile moves a quarter fewer bytes for a product. Few rows for an expert: what counts is reading
        # weights ahead, not whether a tile's end waits for its stores.
        buffers = 1 if P <= 256 * E else 2
        halves, stages = 2, 5 - buffers
    else:  # the narrow one fills the GPU when there is little to do
        halves, buffers, stages = 1, 1, 5
    grouped_mm_bf16_kernel[(min(sms, row_tiles * cdiv(blocks, halves)), )](
        descriptor(a_PK, [64, 1, 64], [P, a_parts, depth], [a_parts * depth, depth, 1]),
        descriptor(first, block, [placed.count, N, K], [placed.unit // 2, first.stride(-2), 1]),
        descriptor(out, [64, 1, 128], [P, out_parts, width], [out_parts * width, width, 1]),
        ends_E, _odd(placed.places), _odd(placed.spacings), E, row_tiles, part_blocks, part_steps,
        E_PAD=max(32, next_power_of_2(E)), GROUP=group, STAGES=stages, HALVES=halves, BUFFERS=buffers,
        TRANSPOSED=transposed, AT_ONCE=at_once, num_warps=4)
    return out


def grouped_mm_bf16(a_PK: torch.Tensor, parts: Sequence[torch.Tensor | Sequence[torch.Tensor]], ends_E: torch.Tensor,
                    out_dtype: torch.dtype, transposed: bool = False) -> torch.Tensor:
    """Multiplies each group's rows with its own weights: [P, parts * N], or [P, K] with `transposed`.

    Args:
        a_PK: bf16 or fp16, contiguous; [P, parts * N] with `transposed`. P a multiple of 128.
        parts: one or two, of equal shape and a_PK's dtype: each E matrices [N, K], or one tensor [E, N, K]; read where
            they lie if rows are dense and at 16-byte steps, else copied together first. N and K multiples of 32.
        ends_E: int32 ends of the groups on the device, multiples of 128.
        out_dtype: bf16, fp16 or fp32.
    """
    if not all(isinstance(part, torch.Tensor) for part in parts):
        parts = [matrix for part in parts for matrix in part]
    check_alike(parts, a_PK.dtype)
    return _grouped_mm_bf16_hopper(a_PK, list(parts), ends_E, out_dtype, transposed)
