# SPDX-License-Identifier: Apache-2.0
"""Three more warps in a Hopper GEMM, which convert MXFP8 rows while the others multiply. In Gluon.

A weight gradient contracts over rows. bf16 tensor cores take rows as they lie, but dequantized. FP8 tensor cores take
columns, with scales for blocks along them. A pass before the GEMM could convert rows, but it is bound by memory, which
idles during the GEMM. So these warps do the work of that pass during the GEMM. They write the converted values to
global memory, once. Converting where the tensor cores read would convert a value again for every tile that uses it,
and shared memory has no bandwidth left for it.

Two warps convert tiles of 128 x 128 values. They write whole lines to memory, past shared memory, whose bandwidth the
GEMM needs. The third one, the mover, draws tiles from a counter, a few at a time, until none is left. It brings them
by TMA, two tiles ahead, and their scales. `done` counts the converted tiles of each block of 128 rows. The GEMM's
producer waits until the rows that it brings next are converted. No program waits for one that has not started, since a
program that draws a tile also writes it.

Tiles are drawn in the order of the rows. To dequantize, a program first draws rows of the expert whose gradient it
computes, then rows of the experts that it computes next.

An operand is a tuple `g` or `a`:

    0  scale        uint8
    1  step_p       the scale's stride along rows
    2  step_k       the scale's stride along columns
    3  out_scale    uint8, scales of the converted form. Used only when transposing
    4  tiles        tiles in a block of 128 rows. 0 if the operand needs no conversion
    5  words        4-byte words in a row
    6  out          int32, the converted words: [P, K / 2] if dequantized, [K, P / 4] if transposed
    7  out_step     the stride along out's rows

A TMA descriptor of its words [P, K / 4] belongs to each operand, which Triton does not take inside tuples.

The warps share a tuple `room`, which `allocate` makes. A tile is brought and converted in two halves.

    0  smem         words of four halves
    1  index_smem   which tile it is, for four tiles. -1 if none is left
    2  scale_smem   for four tiles, the scales to dequantize them, or int32 factors to transpose them
    3  full         barriers: a half has come, and what is known of its tile
    4  empty        barriers: a half was read
    5  stored       barriers, for four tiles: the tile is written

examples/guides/measurements.md has what this gains.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .format import power_of_two
from .gluon_names import async_load, barrier
from .grouped_gemm_hopper import descriptor
from .library import cdiv


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
    scale, step_p, step_k, out_scale, words, out, out_step = g[0], g[1], g[2], g[3], g[5], g[6], g[7]
    if not of_g:
        tile -= g[4]
        scale, step_p, step_k, out_scale, words, out, out_step = a[0], a[1], a[2], a[3], a[5], a[6], a[7]
    return index // tiles_in_block(g, a), of_g, tile, scale, step_p, step_k, out_scale, words, out, out_step


@gluon.jit
def _scale_bytes(index, there, g, a, B: gl.constexpr):
    """A tile's scales [128, 128 / B], or zeros if not `there`."""
    BLOCKS: gl.constexpr = 128 // B
    layout: gl.constexpr = gl.BlockedLayout([4, BLOCKS], [32, 1], [1, 1], [1, 0])
    block, of_g, tile, scale, step_p, step_k, out_scale, words, out, out_step = _locate(index, g, a)
    p = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, layout)), 1)
    k = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, layout)), 0)
    scale += (block * 128).to(gl.int64) * step_p + (tile * BLOCKS).to(gl.int64) * step_k
    return gl.load(scale + (p * step_p + k * step_k), (k * (B // 4) < words - tile * 32) & there, other=0)


@gluon.jit
def _factors(byte, largest):
    """What transposing multiplies the rows of a tile with, for `largest` as the new scale: int32, twice a float16.

    They are exact, down to a factor with which every e4m3 value rounds to 0.
    """
    factor = ((127 - gl.minimum(largest - byte, 126)) << 23).to(gl.float32, bitcast=True).to(gl.float16)
    return factor.to(gl.int16, bitcast=True).to(gl.int32) * 0x10001


@gluon.jit
def _tell(index_smem, step, index):
    """Tells `convert` which tile a step has. -1 if none is left."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    index_smem.index(step % 4).store(gl.full([1], index, gl.int32, layout))
    barrier()


@gluon.jit
def _half(step, i: gl.constexpr):
    """Where half i of a step's tile lies, and the parity of its turn there."""
    return step % 2 * 2 + i, step // 2 & 1


@gluon.jit
def _wait_for_half(empty, step, i: gl.constexpr):
    """Waits until the tile before the last one leaves its half i to the tile of this step."""
    half, turn = _half(step, i)
    mbarrier.wait(empty.index(half), turn ^ 1)


@gluon.jit
def _bring(step, index, byte, g_desc, g, a_desc, a, room, TRANSPOSE: gl.constexpr):
    """Brings the tile of a step.

    byte: its scales. Transposing gives the tile one scale, the largest of them. A new cast could choose half of it, if
    the largest value had been rounded to 224.
    """
    smem, index_smem, scale_smem, full, empty, stored = room
    block, of_g, tile, scale, step_p, step_k, out_scale, words, out, out_step = _locate(index, g, a)
    if TRANSPOSE:
        byte = byte.to(gl.int32)
        largest = gl.max(gl.max(byte, 1), 0)
        scale_smem.index(step % 4).store(_factors(byte, largest))
        gl.store(out_scale + block * gl.cdiv(words, 32) + tile, largest.to(gl.uint8))
    else:
        scale_smem.index(step % 4).store(byte)
    _tell(index_smem, step, index)
    for i in gl.static_range(2):
        half, turn = _half(step, i)
        bar = full.index(half)
        if TRANSPOSE:
            at = [0, block * 8, tile * 32 + 16 * i]
        else:
            at = [block * 128 + 64 * i, tile * 32]
        _wait_for_half(empty, step, i)
        mbarrier.expect(bar, 128 * 64)
        async_load(g_desc, at, bar, smem.index(half), pred=of_g)
        async_load(a_desc, at, bar, smem.index(half), pred=not of_g)


@gluon.jit
def _dequantized(word, power):
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
def _free(empty, half):
    """Tells the mover that both warps have read a half.

    The mover then brings other rows there by TMA, which does not wait for reads that are under way. The fence does.
    """
    fence_async_shared()
    barrier()
    mbarrier.arrive(empty.index(half))


@gluon.jit
def _dequantize(room, step, block, tile, words, out, out_step, B: gl.constexpr):
    """Dequantizes a tile: bf16 [128, 128], in four rounds of 32 rows. Its first half has come. A half is 64 rows."""
    smem, index_smem, scale_smem, full, empty, stored = room
    BLOCKS: gl.constexpr = 128 // B
    read: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [2, 1], [1, 0])
    by_block: gl.constexpr = gl.BlockedLayout([1, 1, 2], [2, BLOCKS, 16 // BLOCKS], [2, 1, 1], [2, 1, 0])
    written: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [2, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, written)), 1)
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, written)), 0)
    out += (block * 128).to(gl.int64) * out_step + tile * 64
    at = row * out_step + column
    inside = column < words * 2 - tile * 64
    scales = scale_smem.index(step % 4)
    for i in gl.static_range(4):
        half, turn = _half(step, i // 2)
        if i == 2:
            mbarrier.wait(full.index(half), turn)
        word = smem.index(half).slice(i % 2 * 32, 32).load(read)
        power = power_of_two(scales.slice(i * 32, 32).load(gl.SliceLayout(2, by_block)))
        power = gl.expand_dims(power, 2).broadcast_to([32, BLOCKS, B // 4]).reshape([32, 32])
        pairs = gl.join(*_dequantized(word, gl.convert_layout(power, read, assert_trivial=True))).reshape([32, 64])
        if i % 2 == 1:
            _free(empty, half)
        gl.store(out + (at + i * 32 * out_step), gl.convert_layout(pairs, written, assert_trivial=True), inside)


@gluon.jit
def _rows_of_four(x):
    """The rows 4i, 4i + 1, 4i + 2 and 4i + 3 along x's first axis. One thread holds the four."""
    x = x.reshape([x.shape[0] // 4, 2, 2, x.shape[1], x.shape[2]]).permute((0, 3, 4, 1, 2))
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3


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
def _transpose(room, step, block, tile, words, out, out_step):
    """Transposes a tile: e4m3 [128 columns, 128 rows] with one scale. Its first half has come. A half is 64 columns.

    A half lies in shared memory as [16, 8, 16] words: first those of the rows 0, 16, 32 and so on. A thread takes 16
    neighboring rows, so that it writes 16 neighboring bytes of a column, and eight threads write a whole line. The
    swizzle keeps them off each other's banks when they read.
    """
    smem, index_smem, scale_smem, full, empty, stored = room
    read: gl.constexpr = gl.BlockedLayout([16, 1, 2], [1, 8, 4], [1, 1, 2], [1, 2, 0])
    written: gl.constexpr = gl.BlockedLayout([8, 4], [4, 8], [2, 1], [1, 0])
    factor = scale_smem.index(step % 4).reshape([8, 16, 1]).permute((1, 0, 2))
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, written)), 1)
    row = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, written)), 0)
    out += (tile * 128).to(gl.int64) * out_step + block * 32
    at = column * out_step + row
    for i in gl.static_range(2):
        half, turn = _half(step, i)
        if i == 1:
            mbarrier.wait(full.index(half), turn)
        fours = _rows_of_four(smem.index(half).load(read))
        factors = _rows_of_four(factor.load(read).broadcast_to([16, 8, 16]))
        c0, c1, c2, c3 = _transposed(*fours, *factors)
        columns = gl.join(gl.join(c0, c2), gl.join(c1, c3)).permute((2, 3, 4, 1, 0)).reshape([64, 32])
        _free(empty, half)
        gl.store(out + (at + i * 64 * out_step), gl.convert_layout(columns, written, assert_trivial=True),
                 column < words * 4 - tile * 128 - i * 64)


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
    # Tiles at a time. Fewer come in the order in which the GEMM needs them, more save round trips to L2.
    DRAWN: gl.constexpr = 1 if BY_EXPERT else 2
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
def _tile_of(index_smem, step):
    """Which tile a step has. -1 if none is left."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(index_smem.index(step % 4).load(layout), 0)


@gluon.jit
def _count_tile(index_smem, stored, step, done, tiles):
    """Adds 1 to `done` for the tile of a step once it is written. Nothing if step is negative."""
    block = _tile_of(index_smem, step + 4) // tiles
    mbarrier.wait(stored.index(step % 4), step // 4 & 1, pred=step >= 0)
    gl.atomic_add(done + block, 1, step >= 0, sem="release")


@gluon.jit
def move(g_desc, g, a_desc, a, ends, E, tiles_per_expert, room, tickets, done, B: gl.constexpr,
         TRANSPOSE: gl.constexpr):
    """The mover: brings the rows up to the last group's end to `convert`, and counts what is converted."""
    smem, index_smem, scale_smem, full, empty, stored = room
    tiles = tiles_in_block(g, a)
    none = gl.to_tensor(0)
    out_tile, index, left = _draw_tile(gl.program_id(0), none, none, ends, tickets, E, tiles_per_expert, tiles,
                                       not TRANSPOSE)
    there = out_tile < E * tiles_per_expert
    byte = _scale_bytes(index, there, g, a, B)
    step = 0
    while there:
        # The next tile's scales come while this one waits for its halves.
        out_tile, following, left = _draw_tile(out_tile, index, left, ends, tickets, E, tiles_per_expert, tiles,
                                               not TRANSPOSE)
        there = out_tile < E * tiles_per_expert
        next_byte = _scale_bytes(following, there, g, a, B)
        _bring(step, index, byte, g_desc, g, a_desc, a, room, TRANSPOSE)
        _count_tile(index_smem, stored, step - 2, done, tiles)
        index = following
        byte = next_byte
        step += 1
    _wait_for_half(empty, step, 0)
    _tell(index_smem, step, -1)
    half, turn = _half(step, 0)
    mbarrier.arrive(full.index(half))
    _count_tile(index_smem, stored, step - 2, done, tiles)
    _count_tile(index_smem, stored, step - 1, done, tiles)


@gluon.jit
def convert(g, a, room, B: gl.constexpr, TRANSPOSE: gl.constexpr):
    """The two warps that convert what the mover brings.

    TRANSPOSE re-scales and transposes it, with one scale for each tile. Without it, it is dequantized to bf16.
    """
    smem, index_smem, scale_smem, full, empty, stored = room
    step = 0
    mbarrier.wait(full.index(0), 0)
    index = _tile_of(index_smem, 0)
    while index >= 0:
        block, of_g, tile, scale, step_p, step_k, out_scale, words, out, out_step = _locate(index, g, a)
        if TRANSPOSE:
            _transpose(room, step, block, tile, words, out, out_step)
        else:
            _dequantize(room, step, block, tile, words, out, out_step, B)
        barrier()
        mbarrier.arrive(stored.index(step % 4))
        step += 1
        half, turn = _half(step, 0)
        mbarrier.wait(full.index(half), turn)
        index = _tile_of(index_smem, step)


@gluon.jit
def allocate(desc, B: gl.constexpr, TRANSPOSE: gl.constexpr):
    """The `room` of the three warps."""
    smem = gl.allocate_shared_memory(gl.int32, [4] + desc.block_shape, desc.layout)
    index_smem = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scale_smem = gl.allocate_shared_memory(gl.int32 if TRANSPOSE else gl.uint8, [4, 128, 128 // B],
                                           gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(stored.index(i), count=1)
    return smem, index_smem, scale_smem, full, empty, stored


def counters(E: int, P: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The counters, at 0: `tickets` for drawn tiles of each expert, and `done` for converted tiles of each block."""
    both = torch.zeros(E + P // 128, dtype=torch.int32, device=device)
    return both[:E], both[E:]


def conversion_of(data_PK: torch.Tensor, scale: torch.Tensor, out: torch.Tensor,
                out_scale: torch.Tensor | None = None) -> tuple[TensorDescriptor, tuple]:
    """The descriptor and the tuple with which the warps convert MXFP8 rows into `out`.

    Args:
        scale: [P, K / block size].
        out_scale: scales of the transposed form. With None the rows are dequantized.
    """
    words, out = data_PK.view(torch.int32), out.view(torch.int32)
    P, row = words.shape
    if out_scale is None:
        desc = descriptor(words, [64, 32])
    else:
        # 16 neighboring rows apart, see _transpose. The driver takes strides in any order, though its manual asks for
        # growing ones.
        desc = descriptor(words, [16, 8, 16], [16, P // 16, row], [row, 16 * row, 1])
    return desc, (scale, *scale.stride(), scale if out_scale is None else out_scale, cdiv(row, 32), row, out,
                  out.stride(0))


def no_conversion(other: tuple) -> tuple:
    """As `conversion_of`, of an operand that needs no conversion. `other`: that of the other operand."""
    desc, values = other
    return desc, (*values[:4], 0, *values[5:])
