# SPDX-License-Identifier: Apache-2.0
"""Two warps beside a Hopper GEMM's own that bring MXFP8 rows into the form its product takes, in Gluon.

A weight gradient contracts over rows: bf16 wgmma takes rows as they lie, dequantised; FP8 wgmma takes columns, with
scales for blocks along them. A pass of its own, bound by memory, costs a fifth to a quarter of the GEMM's time, which
leaves memory idle; here that pass runs below the GEMM. The form is written to global memory as by the pass, once: to
convert where the tensor cores read would do it again for every tile, and shared memory has no bandwidth left for it.

All programs' warps draw tiles of 128 x 128 values from one counter, in the order of the rows, bring them by TMA two
ahead, and count in `done` how many tiles of a block of 128 rows are written. The GEMM's producer waits for the rows
that it brings next. No program waits for one that has not started: a tile that is drawn gets written.

Measured on an H200, 8 groups of 16384 rows, N x K 1408 x 2048, 2048 x 7168, 5120 x 8192. In bf16, over
torch._grouped_mm of bf16: 0.91, 0.97, 0.98 (a pass before the GEMM: 0.79, 0.85, 0.87); with one operand bf16 0.97,
0.98, 1.00. In MXFP8, over that: 1.33, 1.45, 1.58; with g in column form 1.50, 1.43, 1.54. Loading to registers instead
of by TMA was slower, with however many loads ahead; so were more registers for these warps and fewer for the others.

An operand is a tuple (scale uint8, its strides along rows and columns, output int32, its scales uint8, tiles in a row:
0 if there is nothing to convert; words in a row). Beside it goes the TMA descriptor of its words [P, K / 4], which
Triton does not take inside tuples.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BUFFERS = gl.constexpr(2)


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
    return g[5] + a[5]


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
    of_g = tile < g[5]
    scale, step_p, step_k, out, out_scale, words = g[0], g[1], g[2], g[3], g[4], g[6]
    if not of_g:
        tile -= g[5]
        scale, step_p, step_k, out, out_scale, words = a[0], a[1], a[2], a[3], a[4], a[6]
    return index // tiles_of(g, a), of_g, tile, scale, step_p, step_k, out, out_scale, words


@gluon.jit
def _bring(index, total, slot, g_desc, g, a_desc, a, smem, landed, B: gl.constexpr):
    """Has a tile brought into a slot; returns the bytes of its scales [128, 128 / B]."""
    BLOCKS: gl.constexpr = 128 // B
    layout: gl.constexpr = gl.BlockedLayout([2, BLOCKS], [32, 1], [2, 1], [1, 0])
    block, of_g, tile, scale, step_p, step_k, out, out_scale, words = _tile(index, g, a)
    there = index < total
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
def _dequantise(smem, scale_smem, slot, byte, out, words, block, tile, B: gl.constexpr):
    """Writes bf16 [128, 128]."""
    BLOCKS: gl.constexpr = 128 // B
    read: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [2, 1], [1, 0])
    by_block: gl.constexpr = gl.BlockedLayout([1, 1, 2], [2, BLOCKS, B // 8], [2, 1, 1], [2, 1, 0])
    written: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [2, 1], [1, 0])
    scale_smem.store(power_of_two(byte).to(gl.int32, bitcast=True))
    gl.thread_barrier()
    row = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, written)), 1)
    pair = tile * 64 + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, written)), 0)
    out += (block * 128).to(gl.int64) * (words * 2) + (row * (words * 2) + pair)
    for i in gl.static_range(4):
        word = smem.index(slot * 4 + i).load(read)
        power = scale_smem.slice(i * 32, 32).load(gl.SliceLayout(2, by_block)).to(gl.float32, bitcast=True)
        power = gl.expand_dims(power, 2).broadcast_to([32, BLOCKS, B // 4]).reshape([32, 32])
        pairs = gl.join(*_dequantised(word, gl.convert_layout(power, read, assert_trivial=True))).reshape([32, 64])
        gl.store(out + i * 32 * words * 2, gl.convert_layout(pairs, written, assert_trivial=True), pair < words * 2)


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
def _transpose(smem, scale_smem, slot, byte, out, out_scale, words, P, block, tile):
    """Writes e4m3 [128 columns, 128 rows] with one scale, the largest of the rows'.

    Casting the tile anew could find half of that: where the largest value was rounded to 224. Factors are float16,
    exact down to where every e4m3 times them rounds to 0.
    """
    read: gl.constexpr = gl.BlockedLayout([4, 4], [8, 4], [1, 2], [1, 0])
    written: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 2], [1, 0])
    byte = byte.to(gl.int32)
    largest = gl.max(gl.max(byte, 1), 0)
    gl.store(out_scale + block * gl.cdiv(words, 32) + tile, largest.to(gl.uint8))
    factor = ((127 - gl.minimum(largest - byte, 126)) << 23).to(gl.float32, bitcast=True).to(gl.float16)
    scale_smem.store(factor.to(gl.int16, bitcast=True).to(gl.int32) * 0x10001)
    gl.thread_barrier()
    row = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, written)), 1)
    word = tile * 32 + gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, written)), 0)
    step = P // 4
    out += (word * 4).to(gl.int64) * step + (block * 32 + row)
    for i in gl.static_range(4):
        rows = _rows_of_four(smem.index(slot * 4 + i).load(read), written)
        factors = _rows_of_four(scale_smem.slice(i * 32, 32).load(gl.BlockedLayout([4, 1], [8, 4], [1, 2], [1, 0])),
                                written)
        columns = _transposed(*rows, *factors)
        for j in gl.static_range(4):
            gl.store(out + (i * 8 + j * step), columns[j], word < words)


@gluon.jit
def convert(g_desc, g, a_desc, a, ends, E, P, smem, scale_smem, landed, tickets, done, B: gl.constexpr,
            TRANSPOSE: gl.constexpr):
    """The two warps: dequantise rows up to the last group's end to bf16, or TRANSPOSE them with a scale a tile."""
    total = gl.load(ends + E - 1) // 128 * tiles_of(g, a)
    index = gl.atomic_add(tickets, 1, sem="relaxed")
    following = gl.atomic_add(tickets, 1, sem="relaxed")
    byte = _bring(index, total, 0, g_desc, g, a_desc, a, smem, landed, B)
    next_byte = _bring(following, total, 1, g_desc, g, a_desc, a, smem, landed, B)
    step = 0
    while index < total:
        after = gl.atomic_add(tickets, 1, sem="relaxed")
        slot = step % BUFFERS
        block, of_g, tile, scale, step_p, step_k, out, out_scale, words = _tile(index, g, a)
        mbarrier.wait(landed.index(slot), step // BUFFERS & 1)
        if TRANSPOSE:
            _transpose(smem, scale_smem, slot, byte, out, out_scale, words, P, block, tile)
        else:
            _dequantise(smem, scale_smem, slot, byte, out, words, block, tile, B)
        _fence()
        gl.thread_barrier()
        gl.atomic_add(done + block, 1, sem="release")
        byte = next_byte
        next_byte = _bring(after, total, slot, g_desc, g, a_desc, a, smem, landed, B)
        index = following
        following = after
        step += 1


@gluon.jit
def allocate(B: gl.constexpr):
    """Shared memory and barriers of the two warps."""
    smem = gl.allocate_shared_memory(gl.int32, [BUFFERS * 4, 32, 32], gl.NVMMASharedLayout(128, 32))
    scale_smem = gl.allocate_shared_memory(gl.int32, [128, 128 // B], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    landed = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(landed.index(i), count=1)
    return smem, scale_smem, landed


def counters(P: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The counters `tickets` and `done`."""
    both = torch.zeros(1 + P // 128, dtype=torch.int32, device=device)
    return both, both[1:]


def convertible(data_PK: torch.Tensor, scale: torch.Tensor, out: torch.Tensor,
                out_scale: torch.Tensor | None = None) -> tuple[TensorDescriptor, tuple]:
    """What `convert` takes, to bring MXFP8 rows with scales [P, K / block size] into `out`."""
    words = data_PK.view(torch.int32)
    return TensorDescriptor.from_tensor(words, [32, 32], gl.NVMMASharedLayout(128, 32)), (
        scale, *scale.stride(), out.view(torch.int32), scale if out_scale is None else out_scale,
        -(-data_PK.shape[1] // 128), words.shape[1])


def not_converted(other: tuple[TensorDescriptor, tuple]) -> tuple[TensorDescriptor, tuple]:
    """What stands for an operand that is taken as it is, beside one that is not."""
    desc, values = other
    return desc, (*values[:5], 0, values[6])
