# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM of bf16 and fp16 on Hopper's tensor cores, in Gluon. It reads weights where they lie.

    out[rows of e] = a[rows of e] w[e]^T      forward: w[e] is [N, K]
    out[rows of e] = a[rows of e] w[e]        `transposed`, for input gradients: contracts over N

Weights come as one stack or two (gate and up). Two stacks lie one above the other: they add up to one N. No pass
copies them together.

The design is that of grouped_gemm_hopper.py. A persistent program on each multiprocessor computes tiles of 128 rows by
TILE_BLOCKS (1 or 2) blocks of 128 columns. One warp, the producer, brings operands by TMA, 64 values of the
contraction at a time. Two warpgroups multiply, 64 rows each. A block of columns belongs to one stack, but a tile may
hold the last block of one stack and the first of the next. A GEMM of N columns takes 2 N K FLOP a row.

A matrix may lie anywhere in memory, since each expert's weights are parameters of their own. For TMA all matrices
together are one tensor [places, N, K], whose first axis steps by a number that divides all distances between them.
The places overlap, which TMA allows.

Rows at and past the last group's end come back as zeros. Groups are multiples of 128 rows, so each tile lies in
one group.

grouped_mm_bf16 chooses the tile. examples/guides/measurements.md has the measurements behind the choice.
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
from .format import tile_of
from .gluon_names import async_load, async_store, reinterpret
from .grouped_gemm_hopper import barriers, descriptor, group_of, load_ends
from .launch import Launched
from .library import cdiv, even_distance, next_power_of_2, weights_of

MOST_MATRICES = 64  # matrices whose places one launch takes, unless they are evenly spaced
MOST_PLACES = 2**29 - 2  # so that `_odd` of a place fits into int32


def _odd(values: tuple[int, ...]) -> tuple[int, ...]:
    """4 value + 3 for each value, which `_even` undoes.

    Triton compiles anew for each pattern of arguments that are 1 or multiples of 16. These never are.
    """
    return tuple(4 * value + 3 for value in values)


@gluon.jit
def _even(value):
    """Undoes `_odd`."""
    return (value - 3) >> 2


@gluon.jit
def _place_of(stack, group, places, spacings):
    """The place of a group's matrix in a stack.

    `places` has one place for each stack, whose matrices are `spacings` apart; or one for each matrix, stack by stack.
    The numbers are those that `_odd` returned.
    """
    EACH: gl.constexpr = len(places) // len(spacings)
    place = _even(places[0]) + group * _even(spacings[0])
    for i in gl.static_range(1, len(places)):
        if EACH == 1:
            place = gl.where(stack == i, _even(places[i]) + group * _even(spacings[i]), place)
        else:
            place = gl.where((stack == i // EACH) & (group == i % EACH), _even(places[i]), place)
    return place


@gluon.jit
def _produce(a_desc, w_desc, a_smem, w_smem, full, empty, ends, places, spacings, E, row_tiles, column_tiles,
             stack_blocks, stack_steps, E_PAD: gl.constexpr, STRIP: gl.constexpr, STAGES: gl.constexpr,
             TILE_BLOCKS: gl.constexpr, TRANSPOSED: gl.constexpr, AT_ONCE: gl.constexpr):
    """The producer warp: brings operands by TMA. It starts the weights of AT_ONCE steps together, then their rows."""
    STACKS: gl.constexpr = len(spacings)
    layout: gl.constexpr = gl.BlockedLayout([E_PAD // 32], [32], [1], [0])
    blocks = stack_blocks if TRANSPOSED else stack_blocks * STACKS
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, STRIP)
        row = row_tile * 128
        group = group_of(row, load_ends(ends, E, E_PAD, layout))
        if group < E:
            block = column_tile * TILE_BLOCKS
            inside = gl.minimum(blocks - block, TILE_BLOCKS)
            first = _place_of(block // stack_blocks, group, places, spacings)
            second = _place_of((block + 1) // stack_blocks, group, places, spacings)
            last = _place_of(STACKS - 1, group, places, spacings)
            for k in range(0, stack_steps * STACKS if TRANSPOSED else stack_steps, AT_ONCE):
                for i in gl.static_range(AT_ONCE):
                    bar = full.index((step + i) % STAGES)
                    mbarrier.wait(empty.index((step + i) % STAGES), ((step + i) // STAGES & 1) ^ 1)
                    mbarrier.expect(bar, (128 + TILE_BLOCKS * 128) * 128, pred=inside == TILE_BLOCKS)
                    mbarrier.expect(bar, (128 + 128) * 128, pred=inside < TILE_BLOCKS)
                for j in gl.static_range(TILE_BLOCKS):
                    for i in gl.static_range(AT_ONCE):
                        stage = (step + i) % STAGES
                        w = w_smem.index(stage * TILE_BLOCKS + j)
                        at = (k + i) % stack_steps * 64
                        if TRANSPOSED:
                            place = gl.where(k + i < stack_steps, first, last)
                            async_load(w_desc, [place, at, (block + j) * 128], full.index(stage), w, pred=j < inside)
                        else:
                            column = (block + j) % stack_blocks * 128
                            async_load(w_desc, [first if j == 0 else second, column, at],
                                       full.index(stage), w, pred=j < inside)
                for i in gl.static_range(AT_ONCE):
                    stage = (step + i) % STAGES
                    at = (k + i) % stack_steps * 64
                    for warpgroup in gl.static_range(2):
                        async_load(a_desc, [row + 64 * warpgroup, (k + i) // stack_steps, at],
                                   full.index(stage), a_smem.index(stage * 2 + warpgroup))
                step += AT_ONCE


@gluon.jit
def _matrix(buffers, number, COUNT: gl.constexpr, shape: gl.constexpr):
    """Matrix `number` if each COUNT neighboring buffers of the ring are one matrix of `shape`.

    Neighbors lie one after the other, in columns of 128 bytes each.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, buffers.dtype)
    rings: gl.constexpr = [buffers.shape[0] // COUNT, shape[0], shape[1]]
    return reinterpret(buffers, buffers.dtype, rings, layout).index(number)


@gluon.jit
def _store(warpgroup: gl.constexpr, x, c_desc, c_smem, row, block, stack_blocks, BUFFERS: gl.constexpr):
    """Stores one or two blocks of columns of a warpgroup's 64 rows."""
    BLOCKS: gl.constexpr = x.shape[1] // 128
    tma.store_wait(0)
    _matrix(c_smem, warpgroup * (BUFFERS // BLOCKS), BLOCKS, x.shape).store(x.to(c_desc.dtype))
    fence_async_shared()
    for j in gl.static_range(BLOCKS):
        async_store(c_desc, [row + warpgroup * 64, (block + j) // stack_blocks, (block + j) % stack_blocks * 128],
            c_smem.index(warpgroup * BUFFERS + j))


@gluon.jit
def _multiply(warpgroup: gl.constexpr, c_desc, a_smem, w_smem, c_smem, full, empty, step, steps, row, block,
              stack_blocks, STAGES: gl.constexpr, TILE_BLOCKS: gl.constexpr, BUFFERS: gl.constexpr,
              WIDTH: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Computes and stores a warpgroup's 64 rows of one tile. WIDTH: columns of the tile inside the matrix, 128 or 256.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    shape: gl.constexpr = [64, WIDTH] if TRANSPOSED else [WIDTH, 64]
    BLOCKS: gl.constexpr = WIDTH // 128
    acc = gl.zeros([64, WIDTH], gl.float32, layout)
    for k in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a = a_smem.index(stage * 2 + warpgroup).reshape([64, 64])
        w = _matrix(w_smem, stage * (TILE_BLOCKS // BLOCKS), BLOCKS, shape)
        acc = warpgroup_mma(a, w if TRANSPOSED else w.permute((1, 0)), acc, is_async=True)
        # The product before this one is done, so its operands may be overwritten.
        acc = warpgroup_mma_wait(1, [acc])
        if k > 0:
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        step += 1
    acc = warpgroup_mma_wait(0, [acc])
    if steps > 0:
        mbarrier.arrive(empty.index((step - 1) % STAGES))
    if WIDTH == 256 and BUFFERS == 1:
        one, other = acc.reshape([64, 2, 128]).permute((0, 2, 1)).split()
        _store(warpgroup, one, c_desc, c_smem, row, block, stack_blocks, BUFFERS)
        _store(warpgroup, other, c_desc, c_smem, row, block + 1, stack_blocks, BUFFERS)
    else:
        _store(warpgroup, acc, c_desc, c_smem, row, block, stack_blocks, BUFFERS)
    return step


@gluon.jit
def _consume(warpgroup: gl.constexpr, c_desc, a_smem, w_smem, c_smem, full, empty, ends, E, row_tiles, column_tiles,
             stack_blocks, blocks, steps, STRIP: gl.constexpr, STAGES: gl.constexpr, TILE_BLOCKS: gl.constexpr,
             BUFFERS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """A warpgroup: computes its 64 rows of each tile."""
    end = gl.load(ends + E - 1)
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(index, row_tiles, column_tiles, STRIP)
        row = row_tile * 128
        block = column_tile * TILE_BLOCKS
        todo = gl.where(row < end, steps, 0)
        if TILE_BLOCKS == 1 or block + TILE_BLOCKS > blocks:
            step = _multiply(warpgroup, c_desc, a_smem, w_smem, c_smem, full, empty, step, todo, row, block,
                             stack_blocks, STAGES, TILE_BLOCKS, BUFFERS, 128, TRANSPOSED)
        else:
            step = _multiply(warpgroup, c_desc, a_smem, w_smem, c_smem, full, empty, step, todo, row, block,
                             stack_blocks, STAGES, TILE_BLOCKS, BUFFERS, 256, TRANSPOSED)
    tma.store_wait(0)


@Launched
@gluon.jit
def grouped_mm_bf16_kernel(a_desc, w_desc, c_desc, ends, places, spacings, E, row_tiles, stack_blocks, stack_steps,
                           E_PAD: gl.constexpr, STRIP: gl.constexpr, STAGES: gl.constexpr, TILE_BLOCKS: gl.constexpr,
                           BUFFERS: gl.constexpr, TRANSPOSED: gl.constexpr, AT_ONCE: gl.constexpr):
    """All tiles of out. Grid: programs that run at the same time.

    Args:
        stack_blocks: blocks of 128 columns of the result that one stack gives.
        stack_steps: steps of 64 values of the contraction within one stack.
        STRIP: row tiles of a strip, see tile_of.
        STAGES: steps whose operands fit into shared memory.
        BUFFERS: blocks of columns that a warpgroup has room for in shared memory before they are stored.
        AT_ONCE: steps whose weights the producer starts together. It divides the steps of a tile.
    """
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, 64, 1, 64], a_desc.layout)
    w_block: gl.constexpr = w_desc.block_shape
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * TILE_BLOCKS, w_block[0], w_block[1], w_block[2]],
                                       w_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 1, 128], c_desc.layout)
    full, empty = barriers(STAGES, 1)
    STACKS: gl.constexpr = len(spacings)
    blocks = stack_blocks if TRANSPOSED else stack_blocks * STACKS
    steps = stack_steps * STACKS if TRANSPOSED else stack_steps
    column_tiles = gl.cdiv(blocks, TILE_BLOCKS)
    gl.warp_specialize([
        (_consume, (0, c_desc, a_smem, w_smem, c_smem, full, empty, ends, E, row_tiles, column_tiles, stack_blocks,
                    blocks, steps, STRIP, STAGES, TILE_BLOCKS, BUFFERS, TRANSPOSED)),
        (_consume, (1, c_desc, a_smem, w_smem, c_smem, full, empty, ends, E, row_tiles, column_tiles, stack_blocks,
                    blocks, steps, STRIP, STAGES, TILE_BLOCKS, BUFFERS, TRANSPOSED)),
        (_produce, (a_desc, w_desc, a_smem, w_smem, full, empty, ends, places, spacings, E, row_tiles, column_tiles,
                    stack_blocks, stack_steps, E_PAD, STRIP, STAGES, TILE_BLOCKS, TRANSPOSED, AT_ONCE)),
    ], [4, 1], [232, 40])


class _Placed(NamedTuple):
    """One TMA tensor that covers all matrices.

    Attributes:
        places, spacings: what `_place_of` finds a matrix by.
        count: places along the tensor's first axis.
        unit: bytes from one place to the next.
    """

    places: tuple[int, ...]
    spacings: tuple[int, ...]
    count: int
    unit: int


def _placed(weights: Sequence[torch.Tensor], experts: int) -> _Placed | None:
    """How TMA reads the weights where they lie. None if it cannot, or if a launch would need too many places."""
    like, step = weights[0], weights[0].stride(-2)
    if step % 8 != 0 or any(w.stride()[-2:] != (step, 1) or w.shape != like.shape for w in weights):
        return None
    places = [w.data_ptr() for w in weights]
    if like.dim() == 3:
        spacings = [w.stride(0) * w.element_size() if experts > 1 else 0 for w in weights]
    else:
        stacks = [places[i:i + experts] for i in range(0, len(places), experts)]
        spacings = [even_distance(stack) for stack in stacks]
        if None in spacings:
            spacings = [0] * len(stacks)
        else:
            places = [stack[0] for stack in stacks]
    ends = [place + (experts - 1) * spacing for place, spacing in zip(places, spacings, strict=False)]
    origin, last = min(places + ends), max(places + ends)
    unit = math.gcd(*(place - origin for place in places), *spacings) or 16
    count = (last - origin) // unit + 1
    if (origin | unit) % 16 or count > MOST_PLACES or len(places) > MOST_MATRICES:
        return None
    return _Placed(tuple((place - origin) // unit for place in places),
                   tuple(spacing // unit for spacing in spacings), count, unit)


def grouped_mm_bf16(a_PK: torch.Tensor, stacks: Sequence[torch.Tensor | Sequence[torch.Tensor]], ends_E: torch.Tensor,
                    out_dtype: torch.dtype, transposed: bool = False) -> torch.Tensor:
    """Multiplies each group's rows with its own weights.

    Args:
        a_PK: bf16 or fp16, contiguous, P a multiple of 128. With `transposed` it is [P, stacks * N].
        stacks: one stack of weights or two, of one shape and a_PK's dtype. A stack is one tensor [E, N, K] or E
            matrices [N, K]. N and K are multiples of 32. Weights are read where they lie if their rows are dense and
            start at multiples of 16 bytes, else they are copied together first.
        ends_E: int32 ends of the groups on the device, multiples of 128.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        [P, stacks * N], or [P, K] with `transposed`.
    """
    weights = weights_of(stacks)
    P, E = a_PK.shape[0], ends_E.shape[0]
    N, K = weights[0].shape[-2:]
    out = a_PK.new_empty(P, K if transposed else N * len(stacks), dtype=out_dtype)
    if out.numel() == 0:
        return out
    placed = _placed(weights, E)
    if placed is None:
        weights = torch.stack(weights).view(-1, E, N, K).unbind(0)
        placed = _placed(weights, E)
    a_stacks, out_stacks = (len(stacks), 1) if transposed else (1, len(stacks))
    depth, width = (N, K) if transposed else (K, N)  # of one stack
    first = min(weights, key=torch.Tensor.data_ptr)
    block = [1, 64, 128] if transposed else [1, 128, 64]
    stack_blocks, stack_steps = cdiv(width, 128), cdiv(depth, 64)
    blocks = stack_blocks * out_stacks
    row_tiles, sms = P // 128, multiprocessors(a_PK.device)
    strip, at_once = 8, 1
    if out_dtype.itemsize == 2 and P <= 128 * E:
        # An expert has one tile of rows, so each weight is read once, and only the speed of reading them counts. Tiles
        # walk along one expert's weights, in the order in which they lie.
        tile_blocks, buffers, stages, strip, at_once = 1, 1, 6, 1, 2 - stack_steps * a_stacks % 2
    elif out_dtype.itemsize == 2 and row_tiles * cdiv(blocks, 2) >= sms:
        # The wide tile moves a quarter fewer bytes for a product. If an expert has few rows, reading weights further
        # ahead (4 stages) gains more than a second buffer, with which a tile's end need not wait for its stores.
        buffers = 1 if P <= 256 * E else 2
        tile_blocks, stages = 2, 5 - buffers
    else:  # narrow tiles are more, so that they occupy all multiprocessors when there is little to do
        tile_blocks, buffers, stages = 1, 1, 5
    grouped_mm_bf16_kernel[(min(sms, row_tiles * cdiv(blocks, tile_blocks)), )](
        descriptor(a_PK, [64, 1, 64], [P, a_stacks, depth], [a_stacks * depth, depth, 1]),
        descriptor(first, block, [placed.count, N, K], [placed.unit // 2, first.stride(-2), 1]),
        descriptor(out, [64, 1, 128], [P, out_stacks, width], [out_stacks * width, width, 1]),
        ends_E, _odd(placed.places), _odd(placed.spacings), E, row_tiles, stack_blocks, stack_steps,
        E_PAD=max(32, next_power_of_2(E)), STRIP=strip, STAGES=stages, TILE_BLOCKS=tile_blocks, BUFFERS=buffers,
        TRANSPOSED=transposed, AT_ONCE=at_once, num_warps=4)
    return out
