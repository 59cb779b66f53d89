# SPDX-License-Identifier: Apache-2.0
"""Two warps beside a Hopper GEMM's own that bring MXFP8 rows into the form its product takes, in Gluon.

A weight gradient contracts over rows: bf16 wgmma takes rows as they lie, dequantised; FP8 wgmma takes columns, with
scales for blocks along them. A pass of its own, bound by memory, costs a fifth to a quarter of the GEMM's time, which
leaves memory idle; here that pass runs below the GEMM. The form is written to global memory as by the pass, once: to
convert where the tensor cores read would do it again for every tile, and shared memory has no bandwidth left for it.

The warps draw tiles of 128 x 128 values, some at a time, bring them by TMA two ahead, have them written by TMA, and
count in `done` how many tiles of a block of 128 rows are there: a tile after the next one's conversion, so that none
waits for memory. The GEMM's producer waits for the rows that it brings next. No program waits for one that has not
started: a tile that is drawn gets written. The order is that of the rows; dequantising, first those of the expert
whose gradient the program computes, then those of its next ones.

Measured on an H200, 8 groups of 16384 rows, N x K 1408 x 2048, 2048 x 7168, 5120 x 8192. In bf16, over
torch._grouped_mm of bf16: 0.91, 0.97, 0.99 (a pass before the GEMM: 0.79, 0.85, 0.87). In MXFP8, over that: 1.35,
1.50, 1.55. Loading to registers instead of by TMA was slower, with however many loads ahead; so were more registers
for these warps and fewer for the others. What is left of the difference is traffic: where products are small, 1536 x
2048 and 2048 x 768, bf16 takes 1007 and 513 us, dequantising one operand 1069 and 540, both 1185 and 719. Counting a
tile after the next one's conversion, and the order by experts, took 2 to 9 % off the latter.

An operand is a tuple (scale uint8, its strides along rows and columns, the output's scales uint8, tiles in a row: 0 if
there is nothing to convert; words in a row). Beside it go the TMA descriptors of its words [P, K / 4] and of the
output's, [P, K / 2] or transposed [K, P / 4], which Triton does not take inside tuples.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .grouped_gemm_hopper import descriptor
from .library import cdiv


@gluon.jit
def count_up(done, block, amount, pending: gl.constexpr):
    """Adds to `done[block]`, if there is a block, once all but the last `pending` boxes are in memory."""
    gl.inline_asm_elementwise(f"cp.async.bulk.wait_group {pending}; fence.proxy.async.global; mov.u32 $0, 0;", "=r",
                              [], gl.int32, False, 1)
    gl.thread_barrier()
    gl.atomic_add(done + block, amount, block >= 0, sem="release")


@gluon.jit
def rows_of(expert, ends):
    """First row and end of an expert's group."""
    first = gl.load(ends + gl.maximum(expert - 1, 0))
    return gl.where(expert == 0, 0, first), gl.load(ends + expert)


@gluon.jit
def power_of_two(byte):
    """float32 2^(byte - 127); NaN for 255."""
    bits = gl.maximum(byte.to(gl.int32) << 23, 0x00400000)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _fence():
    """Orders plain accesses of global memory with those by TMA, and with other programs' around `done`."""
    gl.inline_asm_elementwise("fence.acq_rel.gpu; fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], gl.int32, False,
                              1)


@gluon.jit
def tiles_of(g, a):
    """Tiles in a block of 128 rows."""
    return g[4] + a[4]


@gluon.jit
def wait_for_rows(row, ready, done, blocks, tiles):
    """Waits until the 128 rows that `row` is among are converted.

    Args:
        ready: what this returned before; 0 at first.

    Returns:
        The first block of 128 rows, of those from here on, that may not be.
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
def _tile(index, g, a):
    """Of one of all tiles: its block of rows, whether it is one of g, its place in the row, its operand."""
    tile = index % tiles_of(g, a)
    of_g = tile < g[4]
    scale, step_p, step_k, out_scale, words = g[0], g[1], g[2], g[3], g[5]
    if not of_g:
        tile -= g[4]
        scale, step_p, step_k, out_scale, words = a[0], a[1], a[2], a[3], a[5]
    return index // tiles_of(g, a), of_g, tile, scale, step_p, step_k, out_scale, words


@gluon.jit
def _bring(index, there, slot, g_desc, g, a_desc, a, smem, landed, B: gl.constexpr):
    """Has a tile, if it is there, brought into a slot; returns the bytes of its scales [128, 128 / B]."""
    BLOCKS: gl.constexpr = 128 // B
    layout: gl.constexpr = gl.BlockedLayout([2, BLOCKS], [32, 1], [2, 1], [1, 0])
    block, of_g, tile, scale, step_p, step_k, out_scale, words = _tile(index, g, a)
    bar = landed.index(slot)
    mbarrier.expect(bar, 128 * 128, pred=there)
    for i in gl.static_range(4):
        at = [block * 128 + 32 * i, tile * 32]
        tma.async_copy_global_to_shared(g_desc, at, bar, smem.index(slot * 4 + i), pred=there & of_g)
        tma.async_copy_global_to_shared(a_desc, at, bar, smem.index(slot * 4 + i), pred=there & (not of_g))
    p = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, layout)), 1)
    k = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, layout)), 0)
    scale += (block * 128).to(gl.int64) * step_p + (tile * BLOCKS).to(gl.int64) * step_k
    return gl.load(scale + (p * step_p + k * step_k), (k * (B // 4) < words - tile * 32) & there, other=0)


@gluon.jit
def _dequantised(word, power):
    """Four e4m3 in an int32 times a float32: bf16, two in an int32."""
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
def _free(pending: gl.constexpr):
    """Waits until what was written before the last `pending` boxes has left shared memory."""
    tma.store_wait(pending)
    gl.thread_barrier()


@gluon.jit
def _write(out_smem, first: gl.constexpr, boxes: gl.constexpr, g_out, a_out, of_g, row, column, width: gl.constexpr):
    """Has boxes written by TMA, side by side."""
    fence_async_shared()
    for i in gl.static_range(boxes):
        if of_g:
            tma.async_copy_shared_to_global(g_out, [row, column + i * width], out_smem.index(first + i))
        else:
            tma.async_copy_shared_to_global(a_out, [row, column + i * width], out_smem.index(first + i))


@gluon.jit
def _dequantise(smem, out_smem, scale_smem, slot, byte, g_out, a_out, of_g, block, tile, B: gl.constexpr):
    """Has bf16 [128, 128] written."""
    BLOCKS: gl.constexpr = 128 // B
    SIDE: gl.constexpr = max(BLOCKS // 2, 1)
    # A thread holds words of both halves of a row: TMA takes 128 bytes of a row at most.
    read: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [2, 1], [1, 0])
    by_block: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, SIDE, 8 // SIDE], [2, 1, 1], [2, 1, 0])
    written: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [2, 1], [1, 0])
    scale_smem.store(power_of_two(byte).to(gl.int32, bitcast=True))
    gl.thread_barrier()
    for i in gl.static_range(4):
        word = smem.index(slot * 4 + i).load(read)
        power = scale_smem.slice(i * 32, 32).load(gl.SliceLayout(2, by_block)).to(gl.float32, bitcast=True)
        power = gl.expand_dims(power, 2).broadcast_to([32, BLOCKS, B // 4]).reshape([32, 32])
        pairs = gl.join(*_dequantised(word, gl.convert_layout(power, read, assert_trivial=True))).reshape([32, 64])
        left, right = gl.split(pairs.reshape([32, 2, 32]).permute((0, 2, 1)))
        halves = (gl.convert_layout(left, written, assert_trivial=True),
                  gl.convert_layout(right, written, assert_trivial=True))
        _free(2)
        for half in gl.static_range(2):
            out_smem.index(i % 2 * 2 + half).store(halves[half])
        _write(out_smem, i % 2 * 2, 2, g_out, a_out, of_g, block * 128 + 32 * i, tile * 64, 32)


@gluon.jit
def _rows_of_four(x, layout: gl.constexpr):
    """Rows 4i, 4i + 1, 4i + 2 and 4i + 3 of x, which a thread holds, in a layout of theirs."""
    x = x.reshape([x.shape[0] // 4, 2, 2, x.shape[1]]).permute((0, 3, 1, 2))
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (gl.convert_layout(x0, layout, assert_trivial=True), gl.convert_layout(x1, layout, assert_trivial=True),
            gl.convert_layout(x2, layout, assert_trivial=True), gl.convert_layout(x3, layout, assert_trivial=True))


@gluon.jit
def _transposed(w0, w1, w2, w3, f0, f1, f2, f3):
    """Four e4m3 of each of four rows times the row's factor, float16 twice: four e4m3 of each of four columns."""
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
    """Has e4m3 [128 columns, 128 rows] written, with one scale, the largest of the rows'.

    Casting the tile anew could find half of that: where the largest value was rounded to 224. Factors are float16,
    exact down to where every e4m3 times them rounds to 0.
    """
    read: gl.constexpr = gl.BlockedLayout([4, 4], [8, 4], [1, 2], [1, 0])
    four: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 2], [1, 0])
    byte = byte.to(gl.int32)
    largest = gl.max(gl.max(byte, 1), 0)
    gl.store(out_scale + block * gl.cdiv(words, 32) + tile, largest.to(gl.uint8))
    factor = ((127 - gl.minimum(largest - byte, 126)) << 23).to(gl.float32, bitcast=True).to(gl.float16)
    scale_smem.store(factor.to(gl.int16, bitcast=True).to(gl.int32) * 0x10001)
    gl.thread_barrier()
    for i in gl.static_range(4):
        rows = _rows_of_four(smem.index(slot * 4 + i).load(read), four)
        factors = _rows_of_four(scale_smem.slice(i * 32, 32).load(gl.BlockedLayout([4, 1], [8, 4], [1, 2], [1, 0])),
                                four)
        c0, c1, c2, c3 = _transposed(*rows, *factors)
        columns = gl.join(gl.join(c0, c2), gl.join(c1, c3)).permute((1, 2, 3, 0)).reshape([128, 8])
        _free(3)
        out_smem.index(i).store(columns)
        _write(out_smem, i, 1, g_out, a_out, of_g, tile * 128, block * 32 + 8 * i, 0)


@gluon.jit
def _next(at, index, left, ends, tickets, E, tiles_of_one, tiles, BY_EXPERT: gl.constexpr):
    """Draws the next tile to convert.

    Args:
        at: of the gradient's tiles, which the GEMM computes, one of this program's: rows of its expert are drawn.
        left: tiles of values drawn and not yet taken, beginning behind `index`.

    Returns:
        at, from E * tiles_of_one on when nothing is left to convert; the tile of values; left, below 0 then.
    """
    DRAWN: gl.constexpr = 4  # at a time: a draw is a round trip to L2
    index += 1
    while (left == 0) & (at < E * tiles_of_one):
        if BY_EXPERT:
            expert = at // tiles_of_one
            first, end = rows_of(expert, ends)
            index = first // 128 * tiles + gl.atomic_add(tickets + expert, DRAWN, sem="relaxed")
            behind = at + gl.num_programs(0)
        else:
            end = gl.load(ends + E - 1)
            index = gl.atomic_add(tickets, DRAWN, sem="relaxed")
            behind = E * tiles_of_one
        left = gl.minimum(gl.maximum(end // 128 * tiles - index, 0), DRAWN)
        if left == 0:
            at = behind
    return at, index, left - 1


@gluon.jit
def convert(g_desc, g_out, g, a_desc, a_out, a, ends, E, tiles_of_one, smem, out_smem, scale_smem, landed,
            tickets, done, B: gl.constexpr, TRANSPOSE: gl.constexpr):
    """The two warps: dequantise rows up to the last group's end to bf16, or TRANSPOSE them with a scale a tile."""
    BOXES: gl.constexpr = 4 if TRANSPOSE else 8
    BUFFERS: gl.constexpr = landed.shape[0]
    tiles = tiles_of(g, a)
    none = gl.to_tensor(0)
    at, index, left = _next(gl.program_id(0), none, none, ends, tickets, E, tiles_of_one, tiles, not TRANSPOSE)
    there = at < E * tiles_of_one
    byte = _bring(index, there, 0, g_desc, g, a_desc, a, smem, landed, B)
    at, following, left = _next(at, index, left, ends, tickets, E, tiles_of_one, tiles, not TRANSPOSE)
    next_there = at < E * tiles_of_one
    next_byte = _bring(following, next_there, 1, g_desc, g, a_desc, a, smem, landed, B)
    step = 0
    before = -1
    while there:
        at, after, left = _next(at, following, left, ends, tickets, E, tiles_of_one, tiles, not TRANSPOSE)
        slot = step % BUFFERS
        block, of_g, tile, scale, step_p, step_k, out_scale, words = _tile(index, g, a)
        mbarrier.wait(landed.index(slot), step // BUFFERS & 1)
        if TRANSPOSE:
            _transpose(smem, out_smem, scale_smem, slot, byte, g_out, a_out, of_g, out_scale, words, block, tile)
        else:
            _dequantise(smem, out_smem, scale_smem, slot, byte, g_out, a_out, of_g, block, tile, B)
        count_up(done, before, 1, BOXES)  # and every thread has read the slot
        byte = next_byte
        there = next_there
        next_there = at < E * tiles_of_one
        next_byte = _bring(after, next_there, slot, g_desc, g, a_desc, a, smem, landed, B)
        before = block
        index = following
        following = after
        step += 1
    count_up(done, before, 1, 0)


@gluon.jit
def allocate(desc, out, B: gl.constexpr):
    """Shared memory and barriers of the two warps."""
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
    """The counters `tickets` and `done`."""
    both = torch.zeros(E + P // 128, dtype=torch.int32, device=device)
    return both[:E], both[E:]


def convertible(data_PK: torch.Tensor, scale: torch.Tensor, out: torch.Tensor,
                out_scale: torch.Tensor | None = None) -> tuple[TensorDescriptor, TensorDescriptor, tuple]:
    """What `convert` takes, to bring MXFP8 rows with scales [P, K / block size] into `out`: dequantised, or, with
    `out_scale`, transposed."""
    words = data_PK.view(torch.int32)
    out_box = [32, 32] if out_scale is None else [128, 8]
    return descriptor(words, [32, 32]), descriptor(out.view(torch.int32), out_box), (
        scale, *scale.stride(), scale if out_scale is None else out_scale, cdiv(data_PK.shape[1], 128),
        words.shape[1])


def not_converted(other: tuple) -> tuple:
    """What stands for an operand that is taken as it is, beside one that is not."""
    desc, out, values = other
    return desc, out, (*values[:4], 0, values[5])
