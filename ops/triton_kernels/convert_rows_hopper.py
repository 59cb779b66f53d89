# SPDX-License-Identifier: Apache-2.0
"""Two more warps in a Hopper GEMM, which convert MXFP8 rows while the others multiply. In Gluon.

A weight gradient contracts over rows. bf16 tensor cores take rows as they lie, but dequantised. FP8 tensor cores take
columns, with scales for blocks along them. A pass before the GEMM could convert rows, but it is bound by memory, which
idles during the GEMM. So these warps do the work of that pass during the GEMM. They write the converted values to
global memory, once. Converting where the tensor cores read would convert a value again for every tile that uses it,
and shared memory has no bandwidth left for it.

The warps draw tiles of 128 x 128 values from a counter, a few at a time, until none is left. They load by TMA, two
tiles ahead, and store by TMA. `done` counts the converted tiles of each block of 128 rows. A tile is counted only
after the next one is converted, so that the warps do not wait for its stores. The GEMM's producer waits until the rows
that it brings next are converted. No program waits for one that has not started, since a program that draws a tile
also writes it.

Tiles are drawn in the order of the rows. To dequantise, a program first draws rows of the expert whose gradient it
computes, then rows of the experts that it computes next.

An operand is a tuple `g` or `a`:

    0  scale        uint8
    1  step_p       the scale's stride along rows
    2  step_k       the scale's stride along columns
    3  out_scale    uint8, scales of the converted form. Used only when transposing
    4  tiles        tiles in a block of 128 rows. 0 if the operand needs no conversion
    5  words        4-byte words in a row

Two TMA descriptors belong to each operand, which Triton does not take inside tuples: one of its words [P, K / 4], and
one of the converted words, [P, K / 2] if dequantised and [K, P / 4] if transposed.

examples/guides/measurements.md has what this gains.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .format import power_of_two
from .gluon_names import async_load, async_store, barrier
from .grouped_gemm_hopper import descriptor
from .library import cdiv


@gluon.jit
def _count_tile(done, block, pending: gl.constexpr):
    """Adds 1 to `done[block]` once all stores but the last `pending` boxes are in memory. Nothing if block is -1."""
    gl.inline_asm_elementwise(f"cp.async.bulk.wait_group {pending}; fence.proxy.async.global; mov.u32 $0, 0;", "=r",
                              [], gl.int32, False, 1)
    barrier()
    gl.atomic_add(done + block, 1, block >= 0, sem="release")


@gluon.jit
def rows_of(expert, ends):
    """The first row of an expert's group, and its end."""
    first = gl.load(ends + gl.maximum(expert - 1, 0))
    return gl.where(expert == 0, 0, first), gl.load(ends + expert)


@gluon.jit
def _fence():
    """Orders this program's plain and TMA reads after the stores that other programs announced by `done`."""
    gl.inline_asm_elementwise("fence.acq_rel.gpu; fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], gl.int32, False,
                              1)


@gluon.jit
def tiles_in_block(g, a):
    """Tiles of both operands in a block of 128 rows."""
    return g[4] + a[4]


@gluon.jit
def wait_for_rows(row, ready, done, blocks, tiles):
    """Waits until the block of 128 rows that holds `row` is converted.

    Args:
        ready: what the previous call returned. 0 at first.
        blocks: blocks of 128 rows.
        tiles: tiles in a block, see `tiles_in_block`.

    Returns:
        A block. Those from row's block up to it, itself excluded, are converted.
    """
    block = row // 128
    if ready <= block:
        b_32 = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        while ready <= block:
            count = gl.load(done + block + b_32, block + b_32 < blocks, other=0, volatile=True)
            ready = block + gl.min(gl.where(count == tiles, 32, b_32), 0)
        _fence()
    return ready


@gluon.jit
def _locate(index, g, a):
    """Where a tile belongs: its block of rows, whether it is g's, its number in the block, and its operand's tuple."""
    tile = index % tiles_in_block(g, a)
    of_g = tile < g[4]
    scale, step_p, step_k, out_scale, words = g[0], g[1], g[2], g[3], g[5]
    if not of_g:
        tile -= g[4]
        scale, step_p, step_k, out_scale, words = a[0], a[1], a[2], a[3], a[5]
    return index // tiles_in_block(g, a), of_g, tile, scale, step_p, step_k, out_scale, words


@gluon.jit
def _load_tile(index, there, slot, g_desc, g, a_desc, a, smem, landed, B: gl.constexpr):
    """Starts to load a tile into a slot, and returns the bytes of its scales [128, 128 / B].

    Nothing is loaded if not `there`.
    """
    BLOCKS: gl.constexpr = 128 // B
    layout: gl.constexpr = gl.BlockedLayout([2, BLOCKS], [32, 1], [2, 1], [1, 0])
    block, of_g, tile, scale, step_p, step_k, out_scale, words = _locate(index, g, a)
    bar = landed.index(slot)
    mbarrier.expect(bar, 128 * 128, pred=there)
    for i in gl.static_range(4):
        at = [block * 128 + 32 * i, tile * 32]
        async_load(g_desc, at, bar, smem.index(slot * 4 + i), pred=there & of_g)
        async_load(a_desc, at, bar, smem.index(slot * 4 + i), pred=there & (not of_g))
    p = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, layout)), 1)
    k = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, layout)), 0)
    scale += (block * 128).to(gl.int64) * step_p + (tile * BLOCKS).to(gl.int64) * step_k
    return gl.load(scale + (p * step_p + k * step_k), (k * (B // 4) < words - tile * 32) & there, other=0)


@gluon.jit
def _dequantised(word, power):
    """Multiplies four e4m3 values (in an int32) with a float32. Returns four bf16 values in two int32."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b, h<4>;
        .reg .b32 lo, hi;
        .reg .f32 x<4>;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 lo, a;
        cvt.rn.f16x2.e4m3x2 hi, b;
        mov.b32 {h0, h1}, lo;
        mov.b32 {h2, h3}, hi;
        cvt.f32.f16 x0, h0;
        cvt.f32.f16 x1, h1;
        cvt.f32.f16 x2, h2;
        cvt.f32.f16 x3, h3;
        mul.f32 x0, x0, $3;
        mul.f32 x1, x1, $3;
        mul.f32 x2, x2, $3;
        mul.f32 x3, x3, $3;
        cvt.rn.bf16x2.f32 $0, x1, x0;
        cvt.rn.bf16x2.f32 $1, x3, x2;
        }""", "=r,=r,r,f", [word, power], (gl.int32, gl.int32), True, 1)


@gluon.jit
def _wait_for_boxes(pending: gl.constexpr):
    """Waits until all stores but the last `pending` boxes have read their shared memory."""
    tma.store_wait(pending)
    barrier()


@gluon.jit
def _write(out_smem, first: gl.constexpr, boxes: gl.constexpr, g_out, a_out, of_g, row, column, width: gl.constexpr):
    """Starts to store boxes by TMA, side by side along the columns."""
    fence_async_shared()
    for i in gl.static_range(boxes):
        if of_g:
            async_store(g_out, [row, column + i * width], out_smem.index(first + i))
        else:
            async_store(a_out, [row, column + i * width], out_smem.index(first + i))


@gluon.jit
def _dequantise(smem, out_smem, scale_smem, slot, byte, g_out, a_out, of_g, block, tile, B: gl.constexpr):
    """Dequantises a tile and starts to store it: bf16 [128, 128]."""
    BLOCKS: gl.constexpr = 128 // B
    SIDE: gl.constexpr = max(BLOCKS // 2, 1)
    # A thread holds words of both halves of a row, since a box of TMA takes at most 128 bytes of a row.
    read: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [2, 1], [1, 0])
    by_block: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, SIDE, 8 // SIDE], [2, 1, 1], [2, 1, 0])
    written: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [2, 1], [1, 0])
    scale_smem.store(power_of_two(byte).to(gl.int32, bitcast=True))
    barrier()
    for i in gl.static_range(4):
        word = smem.index(slot * 4 + i).load(read)
        power = scale_smem.slice(i * 32, 32).load(gl.SliceLayout(2, by_block)).to(gl.float32, bitcast=True)
        power = gl.expand_dims(power, 2).broadcast_to([32, BLOCKS, B // 4]).reshape([32, 32])
        pairs = gl.join(*_dequantised(word, gl.convert_layout(power, read, assert_trivial=True))).reshape([32, 64])
        left, right = gl.split(pairs.reshape([32, 2, 32]).permute((0, 2, 1)))
        halves = (gl.convert_layout(left, written, assert_trivial=True),
                  gl.convert_layout(right, written, assert_trivial=True))
        _wait_for_boxes(2)
        for half in gl.static_range(2):
            out_smem.index(i % 2 * 2 + half).store(halves[half])
        _write(out_smem, i % 2 * 2, 2, g_out, a_out, of_g, block * 128 + 32 * i, tile * 64, 32)


@gluon.jit
def _rows_of_four(x, layout: gl.constexpr):
    """The rows 4i, 4i + 1, 4i + 2 and 4i + 3 of x, each in `layout`. One thread holds the four."""
    x = x.reshape([x.shape[0] // 4, 2, 2, x.shape[1]]).permute((0, 3, 1, 2))
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (gl.convert_layout(x0, layout, assert_trivial=True), gl.convert_layout(x1, layout, assert_trivial=True),
            gl.convert_layout(x2, layout, assert_trivial=True), gl.convert_layout(x3, layout, assert_trivial=True))


@gluon.jit
def _transposed(w0, w1, w2, w3, f0, f1, f2, f3):
    """Multiplies four e4m3 values of each of four rows with the row's factor, and transposes them.

    w0 to w3: the rows' values. f0 to f3: their factors, each twice as float16. Returns four e4m3 values of each of the
    four columns.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b;
        .reg .b32 lo<4>, hi<4>, x, y;
        mov.b32 {a, b}, $4;
        cvt.rn.f16x2.e4m3x2 lo0, a;
        cvt.rn.f16x2.e4m3x2 hi0, b;
        mov.b32 {a, b}, $5;
        cvt.rn.f16x2.e4m3x2 lo1, a;
        cvt.rn.f16x2.e4m3x2 hi1, b;
        mov.b32 {a, b}, $6;
        cvt.rn.f16x2.e4m3x2 lo2, a;
        cvt.rn.f16x2.e4m3x2 hi2, b;
        mov.b32 {a, b}, $7;
        cvt.rn.f16x2.e4m3x2 lo3, a;
        cvt.rn.f16x2.e4m3x2 hi3, b;
        mul.rn.f16x2 lo0, lo0, $8;
        mul.rn.f16x2 hi0, hi0, $8;
        mul.rn.f16x2 lo1, lo1, $9;
        mul.rn.f16x2 hi1, hi1, $9;
        mul.rn.f16x2 lo2, lo2, $10;
        mul.rn.f16x2 hi2, hi2, $10;
        mul.rn.f16x2 lo3, lo3, $11;
        mul.rn.f16x2 hi3, hi3, $11;
        prmt.b32 x, lo0, lo1, 0x5410;
        prmt.b32 y, lo2, lo3, 0x5410;
        cvt.rn.satfinite.e4m3x2.f16x2 a, x;
        cvt.rn.satfinite.e4m3x2.f16x2 b, y;
        mov.b32 $0, {a, b};
        prmt.b32 x, lo0, lo1, 0x7632;
        prmt.b32 y, lo2, lo3, 0x7632;
        cvt.rn.satfinite.e4m3x2.f16x2 a, x;
        cvt.rn.satfinite.e4m3x2.f16x2 b, y;
        mov.b32 $1, {a, b};
        prmt.b32 x, hi0, hi1, 0x5410;
        prmt.b32 y, hi2, hi3, 0x5410;
        cvt.rn.satfinite.e4m3x2.f16x2 a, x;
        cvt.rn.satfinite.e4m3x2.f16x2 b, y;
        mov.b32 $2, {a, b};
        prmt.b32 x, hi0, hi1, 0x7632;
        prmt.b32 y, hi2, hi3, 0x7632;
        cvt.rn.satfinite.e4m3x2.f16x2 a, x;
        cvt.rn.satfinite.e4m3x2.f16x2 b, y;
        mov.b32 $3, {a, b};
        }""", "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [w0, w1, w2, w3, f0, f1, f2, f3],
        (gl.int32, gl.int32, gl.int32, gl.int32), True, 1)


@gluon.jit
def _transpose(smem, out_smem, scale_smem, slot, byte, g_out, a_out, of_g, out_scale, words, block, tile):
    """Transposes a tile and starts to store it: e4m3 [128 columns, 128 rows] with one scale.

    The scale is the largest of the rows' scales. A new cast could choose half of it, if the largest value had been
    rounded to 224. Factors are float16. They are exact, down to a factor with which every e4m3 value rounds to 0.
    """
    read: gl.constexpr = gl.BlockedLayout([4, 4], [8, 4], [1, 2], [1, 0])
    four: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 2], [1, 0])
    byte = byte.to(gl.int32)
    largest = gl.max(gl.max(byte, 1), 0)
    gl.store(out_scale + block * gl.cdiv(words, 32) + tile, largest.to(gl.uint8))
    factor = ((127 - gl.minimum(largest - byte, 126)) << 23).to(gl.float32, bitcast=True).to(gl.float16)
    scale_smem.store(factor.to(gl.int16, bitcast=True).to(gl.int32) * 0x10001)
    barrier()
    for i in gl.static_range(4):
        rows = _rows_of_four(smem.index(slot * 4 + i).load(read), four)
        factors = _rows_of_four(scale_smem.slice(i * 32, 32).load(gl.BlockedLayout([4, 1], [8, 4], [1, 2], [1, 0])),
                                four)
        c0, c1, c2, c3 = _transposed(*rows, *factors)
        columns = gl.join(gl.join(c0, c2), gl.join(c1, c3)).permute((1, 2, 3, 0)).reshape([128, 8])
        _wait_for_boxes(3)
        out_smem.index(i).store(columns)
        _write(out_smem, i, 1, g_out, a_out, of_g, tile * 128, block * 32 + 8 * i, 0)


@gluon.jit
def _draw_tile(out_tile, index, left, ends, tickets, E, tiles_per_expert, tiles, BY_EXPERT: gl.constexpr):
    """Draws the next tile to convert.

    Args:
        out_tile: one of the gradient's tiles, which the GEMM computes. BY_EXPERT draws rows of its expert.
        index: the tile that was taken last.
        left: tiles behind `index` that are drawn and not yet taken.
        tiles_per_expert: tiles of one expert's gradient.
        tiles: tiles to convert in a block of 128 rows.

    Returns:
        out_tile, at least E * tiles_per_expert if nothing is left to convert; the tile to convert; and left.
    """
    DRAWN: gl.constexpr = 4  # tiles at a time, since a draw is a round trip to L2
    index += 1
    while (left == 0) & (out_tile < E * tiles_per_expert):
        if BY_EXPERT:
            expert = out_tile // tiles_per_expert
            first, end = rows_of(expert, ends)
            index = first // 128 * tiles + gl.atomic_add(tickets + expert, DRAWN, sem="relaxed")
            next_out_tile = out_tile + gl.num_programs(0)
        else:
            end = gl.load(ends + E - 1)
            index = gl.atomic_add(tickets, DRAWN, sem="relaxed")
            next_out_tile = E * tiles_per_expert
        left = gl.minimum(gl.maximum(end // 128 * tiles - index, 0), DRAWN)
        if left == 0:
            out_tile = next_out_tile
    return out_tile, index, left - 1


@gluon.jit
def convert(g_desc, g_out, g, a_desc, a_out, a, ends, E, tiles_per_expert, smem, out_smem, scale_smem, landed,
            tickets, done, B: gl.constexpr, TRANSPOSE: gl.constexpr):
    """The two warps: convert the rows up to the last group's end.

    TRANSPOSE re-scales and transposes them, with one scale for each tile. Without it they are dequantised to bf16.
    """
    BOXES: gl.constexpr = 4 if TRANSPOSE else 8
    BUFFERS: gl.constexpr = landed.shape[0]
    tiles = tiles_in_block(g, a)
    none = gl.to_tensor(0)
    out_tile, index, left = _draw_tile(gl.program_id(0), none, none, ends, tickets, E, tiles_per_expert, tiles,
                                       not TRANSPOSE)
    there = out_tile < E * tiles_per_expert
    byte = _load_tile(index, there, 0, g_desc, g, a_desc, a, smem, landed, B)
    out_tile, following, left = _draw_tile(out_tile, index, left, ends, tickets, E, tiles_per_expert, tiles,
                                           not TRANSPOSE)
    next_there = out_tile < E * tiles_per_expert
    next_byte = _load_tile(following, next_there, 1, g_desc, g, a_desc, a, smem, landed, B)
    step = 0
    before = -1
    while there:
        out_tile, after, left = _draw_tile(out_tile, following, left, ends, tickets, E, tiles_per_expert, tiles,
                                           not TRANSPOSE)
        slot = step % BUFFERS
        block, of_g, tile, scale, step_p, step_k, out_scale, words = _locate(index, g, a)
        mbarrier.wait(landed.index(slot), step // BUFFERS & 1)
        if TRANSPOSE:
            _transpose(smem, out_smem, scale_smem, slot, byte, g_out, a_out, of_g, out_scale, words, block, tile)
        else:
            _dequantise(smem, out_smem, scale_smem, slot, byte, g_out, a_out, of_g, block, tile, B)
        _count_tile(done, before, BOXES)  # its barrier also ensures that every thread has read the slot
        byte = next_byte
        there = next_there
        next_there = out_tile < E * tiles_per_expert
        next_byte = _load_tile(after, next_there, slot, g_desc, g, a_desc, a, smem, landed, B)
        before = block
        index = following
        following = after
        step += 1
    _count_tile(done, before, 0)


@gluon.jit
def allocate(desc, out, B: gl.constexpr):
    """Allocates the shared memory and the barriers of the two warps."""
    BUFFERS: gl.constexpr = 2
    box: gl.constexpr = out.block_shape
    smem = gl.allocate_shared_memory(gl.int32, [BUFFERS * 4, 32, 32], desc.layout)
    out_smem = gl.allocate_shared_memory(gl.int32, [4, box[0], box[1]], out.layout)
    scale_smem = gl.allocate_shared_memory(gl.int32, [128, 128 // B], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    landed = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(landed.index(i), count=1)
    return smem, out_smem, scale_smem, landed


def counters(E: int, P: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The counters, at 0: `tickets` for drawn tiles of each expert, and `done` for converted tiles of each block."""
    both = torch.zeros(E + P // 128, dtype=torch.int32, device=device)
    return both[:E], both[E:]


def conversion_of(data_PK: torch.Tensor, scale: torch.Tensor, out: torch.Tensor,
                out_scale: torch.Tensor | None = None) -> tuple[TensorDescriptor, TensorDescriptor, tuple]:
    """The descriptors and the tuple with which `convert` converts MXFP8 rows into `out`.

    Args:
        scale: [P, K / block size].
        out_scale: scales of the transposed form. With None the rows are dequantised.
    """
    words = data_PK.view(torch.int32)
    out_box = [32, 32] if out_scale is None else [128, 8]
    return descriptor(words, [32, 32]), descriptor(out.view(torch.int32), out_box), (
        scale, *scale.stride(), scale if out_scale is None else out_scale, cdiv(data_PK.shape[1], 128),
        words.shape[1])


def no_conversion(other: tuple) -> tuple:
    """What `convert` takes for an operand that needs no conversion. `other`: what it takes for the other operand."""
    desc, out, values = other
    return desc, out, (*values[:4], 0, values[5])
