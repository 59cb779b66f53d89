# SPDX-License-Identifier: Apache-2.0
"""Rows between tokens, messages and experts: what the collective transport does besides exchanging bytes.

    pack_rows       a token's data, scales and routing weights, once for each rank that wants it    T tokens -> S rows
    expand_rows     received rows to expert-sorted, padded ones, and their scales K-block-major     R rows -> P rows
    combine_rows    sums of the experts' answers to a row, rounded to the wire                      P rows -> R rows
    sum_rows        sums of the rows that come back to a token                                      S rows -> T tokens
    combine_local   the last two in one, where one rank holds all experts and nothing travels       P rows -> T tokens

The oracle is the plain path of ds_mxfp8_moe.transport.collective, bit for bit; the letters and the tables (sent_slot,
slot, source) are those of ds_mxfp8_moe.transport. All kernels are memory-bound, with one program for each row of
their origin, so that each byte is read once, even of a row that goes to several places, and written once. Hidden
sizes are multiples of 32.

A message row is [data | scale bytes | zeros to a multiple of 4 | float32 weights | zeros to a multiple of 32].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .format import from_e4m3, power_of_two, quantized_rows
from .library import cdiv, next_power_of_2, operator

ROW_BYTES = 32  # a sector of L2: rows that share none cost no second access
TILE_ROWS = 128  # expert-sorted rows whose scales one program writes,
TILE_WORDS = 256  # and the columns that it covers


class Shape(NamedTuple):
    """What a program takes at a time along its row, and its warps."""

    block: int
    warps: int


class Layout(NamedTuple):
    """Where the parts of a message row begin, in bytes; its data begin at 0."""

    scales_at: int
    weights_at: int
    width: int


def layout(data_bytes: int, scales: int, weights: int) -> Layout:
    """Of message rows with so many bytes of data, scale bytes and float32 weights."""
    end = data_bytes + scales
    if not weights:
        width = cdiv(end, ROW_BYTES) * ROW_BYTES
        return Layout(data_bytes, width, width)
    weights_at = cdiv(end, 4) * 4
    return Layout(data_bytes, weights_at, cdiv(weights_at + 4 * weights, ROW_BYTES) * ROW_BYTES)


def copy_shape(words: int) -> Shape:
    """For rows of 8-byte words that are only moved."""
    block = min(next_power_of_2(words), 1024)
    return Shape(block, max(1, min(4, block // 256)))


def combine_shape(H: int, block_size: int) -> Shape:
    """For sums at the expert's rank. MXFP8: one warp, so that no value of a block changes warps."""
    if block_size:
        return Shape(512, 1)
    block = min(next_power_of_2(H), 2048)
    return Shape(block, max(1, block // 512))


def sum_shape(H: int, block_size: int) -> Shape:
    """For sums at the owner, which have up to top_k rows in flight."""
    if block_size:
        return Shape(512, 1)
    block = min(next_power_of_2(H), 1024)
    return Shape(block, max(1, block // 256))


@triton.jit
def _rounded(x, B: tl.constexpr, FLOOR: tl.constexpr):
    """float32 [N] in blocks of B as MXFP8: e4m3 bytes [N / B, B] and scale bytes [N / B]."""
    data, byte = quantized_rows(tl.reshape(x, [x.shape[0] // B, B]), B, FLOOR)
    return data, tl.reshape(byte, [x.shape[0] // B])


@triton.jit
def _values(data, byte):
    """float32 [N, B] of e4m3 bytes [N, B] and scale bytes [N]."""
    return from_e4m3(data) * power_of_two(byte)[:, None]


@triton.jit
def _those_below(x, none, COUNT: tl.constexpr):
    """The elements of x (int32) below `none`, in their order; COUNT scalars, `none` for those too few."""
    place = tl.where(x < none, tl.cumsum((x < none).to(tl.int32), axis=0), 0)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + ((none - tl.sum(tl.where(place == i + 1, none - x, 0), axis=0)).to(tl.int64), )
    return found


@triton.jit
def _rows_sent(sent_slot_ptr, t, T, S, W: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """The rows in which token t travels, ascending by rank; S for those short of ROWS."""
    rank = tl.arange(0, LANES)
    row = tl.load(sent_slot_ptr + rank.to(tl.int64) * T + t, mask=rank < W, other=S)
    return _those_below(row.to(tl.int32), S, ROWS)


@triton.jit
def _slots(slot_ptr, r, inside, P, K: tl.constexpr, LANES: tl.constexpr):
    """Where the choices of row r that are served here stand among the P, in their order; P for those short of K."""
    k = tl.arange(0, LANES)
    slot = tl.load(slot_ptr + r * K + k, mask=(k < K) & inside, other=P)
    return _those_below(slot.to(tl.int32), P, K)


@triton.jit
def _fill_gap(scale_ptr, SCALES: tl.constexpr, ROOM: tl.constexpr, inside):
    """Zeros behind a row's scales."""
    if ROOM > SCALES:
        gap = SCALES + tl.arange(0, 32)
        tl.store(scale_ptr + gap, tl.zeros([32], tl.uint8), mask=(gap < ROOM) & inside)


@triton.jit(do_not_specialize=["T", "S"])
def _pack_kernel(
        data_ptr,  # [T, STRIDE] int64
        scale_ptr,  # [T, SCALES] uint8
        weight_ptr,  # [T, K] float32
        sent_slot_ptr,  # [W, T] int64
        out_ptr,  # [S, WIDTH / 8] int64
        out_scale_ptr,  # [S, WIDTH] uint8, at its scales
        out_weight_ptr,  # [S, WIDTH / 4] float32, at its weights
        T, S, STRIDE: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
        SCALE_ROOM: tl.constexpr, SCALE_LANES: tl.constexpr, K: tl.constexpr, WEIGHT_ROOM: tl.constexpr,
        WEIGHT_LANES: tl.constexpr, W: tl.constexpr, RANK_LANES: tl.constexpr, ROWS: tl.constexpr,
        BLOCK: tl.constexpr):
    """Grid (T, )."""
    t = tl.program_id(0).to(tl.int64)
    rows = _rows_sent(sent_slot_ptr, t, T, S, W, RANK_LANES, ROWS)
    for first in range(0, WORDS, BLOCK):
        word = first + tl.arange(0, BLOCK)
        data = tl.load(data_ptr + t * STRIDE + word, mask=word < WORDS)
        for i in tl.static_range(ROWS):
            tl.store(out_ptr + rows[i] * (WIDTH // 8) + word, data, mask=(word < WORDS) & (rows[i] < S))
    if SCALES:
        block = tl.arange(0, SCALE_LANES)
        scale = tl.load(scale_ptr + t * SCALES + block, mask=block < SCALES)
        for i in tl.static_range(ROWS):
            tl.store(out_scale_ptr + rows[i] * WIDTH + block, scale, mask=(block < SCALES) & (rows[i] < S))
    for i in tl.static_range(ROWS):
        _fill_gap(out_scale_ptr + rows[i] * WIDTH, SCALES, SCALE_ROOM, rows[i] < S)
    if K:
        k = tl.arange(0, WEIGHT_LANES)
        weight = tl.load(weight_ptr + t * K + k, mask=k < K, other=0.0)
        for i in tl.static_range(ROWS):
            tl.store(out_weight_ptr + rows[i] * (WIDTH // 4) + k, weight, mask=(k < WEIGHT_ROOM) & (rows[i] < S))


@triton.jit(do_not_specialize=["P"])
def _expand_kernel(
        data_ptr,  # [*, STRIDE] int64
        row_ptr,  # [R] int64: where row r stands in data, if INDIRECT
        slot_ptr,  # [R, K] int64
        out_ptr,  # [P, WORDS] int64
        P, STRIDE: tl.constexpr, WORDS: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, INDIRECT: tl.constexpr,
        BLOCK: tl.constexpr):
    """Grid (R, )."""
    r = tl.program_id(0).to(tl.int64)
    slots = _slots(slot_ptr, r, True, P, K, LANES)
    row = r
    if INDIRECT:
        row = tl.load(row_ptr + r)
    for first in range(0, WORDS, BLOCK):
        word = first + tl.arange(0, BLOCK)
        data = tl.load(data_ptr + row * STRIDE + word, mask=word < WORDS)
        for k in tl.static_range(K):
            tl.store(out_ptr + slots[k] * WORDS + word, data, mask=(word < WORDS) & (slots[k] < P))


@triton.jit(do_not_specialize=["choices"])
def _expand_tiles_kernel(
        scale_ptr,  # [*, SCALE_STRIDE] uint8
        weight_ptr,  # [*, WEIGHT_STRIDE] float32
        row_ptr,  # [R] int64: where row r stands in both, if INDIRECT
        source_ptr,  # [P] int64
        out_ptr,  # [P, WORDS] int64
        out_scale_ptr,  # [SCALES, P] uint8
        out_weight_ptr,  # [P] float32
        choices,  # R * K
        P, SCALE_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
        WEIGHTS: tl.constexpr, K: tl.constexpr, INDIRECT: tl.constexpr, ROWS: tl.constexpr, SPAN_WORDS: tl.constexpr,
        SPAN_SCALES: tl.constexpr):
    """Grid (P / ROWS, spans of columns): scales and weights of ROWS rows, and zeros in those that are padding."""
    p = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    span = tl.program_id(1)
    source = tl.load(source_ptr + p)
    real = source < choices
    row = source // K
    choice = source - row * K
    if INDIRECT:
        row = tl.load(row_ptr + row, mask=real, other=0)
    if SCALES:
        block = span * SPAN_SCALES + tl.arange(0, SPAN_SCALES)
        scale = tl.load(scale_ptr + row[:, None] * SCALE_STRIDE + block[None, :],
                        mask=real[:, None] & (block < SCALES)[None, :], other=0)
        tl.store(out_scale_ptr + block.to(tl.int64)[None, :] * P + p[:, None], scale, mask=(block < SCALES)[None, :])
    if WEIGHTS:
        if span == 0:
            weight = tl.load(weight_ptr + row * WEIGHT_STRIDE + choice, mask=real, other=0.0)
            tl.store(out_weight_ptr + p, weight)
    if tl.max(source, axis=0) >= choices:
        for first in range(0, SPAN_WORDS, 32):
            word = span * SPAN_WORDS + first + tl.arange(0, 32)
            tl.store(out_ptr + p[:, None] * WORDS + word[None, :], tl.zeros([ROWS, 32], tl.int64),
                     mask=(source >= choices)[:, None] & (word < WORDS)[None, :])


@triton.jit
def _partial(y_ptr, slots, column, P, H: tl.constexpr, K: tl.constexpr, AT_ONCE: tl.constexpr):
    """float32 sums of the rows at `slots`, in their order. AT_ONCE rows are in flight together; no more are read
    after one that is missing."""
    total = tl.zeros(column.shape, tl.float32)
    for first in tl.static_range(0, K, AT_ONCE):
        if slots[first] < P:
            for k in tl.static_range(first, min(first + AT_ONCE, K)):
                y = tl.load(y_ptr + slots[k] * H + column, mask=(column < H) & (slots[k] < P), other=0.0)
                total += y.to(tl.float32)
    return total


@triton.jit
def _weights(weight_ptr, slot_ptr, r, inside, P, K: tl.constexpr, LANES: tl.constexpr):
    """float32 [LANES]: what stands in weight_P for the choices of row r; 0 for those served elsewhere."""
    k = tl.arange(0, LANES)
    slot = tl.load(slot_ptr + r * K + k, mask=(k < K) & inside, other=P)
    return tl.load(weight_ptr + slot, mask=slot < P, other=0.0)


@triton.jit(do_not_specialize=["P"])
def _combine_kernel(
        y_ptr,  # [P, H]
        weight_ptr,  # [P] float32
        slot_ptr,  # [R, K] int64
        out_ptr,  # [R, STRIDE] of the wire's dtype; MXFP8: uint8, with the scales at H
        out_weight_ptr,  # [R, WEIGHT_STRIDE] float32, at its weights
        P, STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, H: tl.constexpr, SCALES: tl.constexpr,
        SCALE_ROOM: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, WEIGHT_ROOM: tl.constexpr,
        WEIGHT_LANES: tl.constexpr, B: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (R, )."""
    r = tl.program_id(0).to(tl.int64)
    slots = _slots(slot_ptr, r, True, P, K, LANES)
    for first in range(0, H, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total = _partial(y_ptr, slots, column, P, H, K, 2)
        if B:
            data, byte = _rounded(total, B, FLOOR)
            tl.store(out_ptr + r * STRIDE + column, tl.reshape(data, [BLOCK]), mask=column < H)
            block = first // B + tl.arange(0, BLOCK // B)
            tl.store(out_ptr + (r * STRIDE + H) + block, byte, mask=block < SCALES)
        else:
            tl.store(out_ptr + r * STRIDE + column, total.to(out_ptr.dtype.element_ty), mask=column < H)
    if B:
        _fill_gap(out_ptr + (r * STRIDE + H), SCALES, SCALE_ROOM, True)
    if WEIGHT_ROOM:
        k = tl.arange(0, WEIGHT_LANES)
        weight = _weights(weight_ptr, slot_ptr, r, True, P, K, WEIGHT_LANES)
        tl.store(out_weight_ptr + r * WEIGHT_STRIDE + k, weight, mask=k < WEIGHT_ROOM)


@triton.jit(do_not_specialize=["T", "S"])
def _sum_kernel(
        data_ptr,  # [S, STRIDE] of the wire's dtype; MXFP8: uint8, with the scales at H
        weight_ptr,  # [S, WEIGHT_STRIDE] float32, at its weights
        sent_slot_ptr,  # [W, T] int64
        y_ptr,  # [T, H]
        out_weight_ptr,  # [T, K] float32
        T, S, STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, H: tl.constexpr, SCALES: tl.constexpr,
        K: tl.constexpr, WEIGHT_LANES: tl.constexpr, W: tl.constexpr, RANK_LANES: tl.constexpr, ROWS: tl.constexpr,
        B: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, )."""
    t = tl.program_id(0).to(tl.int64)
    rows = _rows_sent(sent_slot_ptr, t, T, S, W, RANK_LANES, ROWS)
    for first in range(0, H, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(ROWS):
            data = tl.load(data_ptr + rows[i] * STRIDE + column, mask=(column < H) & (rows[i] < S), other=0)
            if B:
                block = first // B + tl.arange(0, BLOCK // B)
                inside = (block < SCALES) & (rows[i] < S)
                byte = tl.load(data_ptr + (rows[i] * STRIDE + H) + block, mask=inside, other=0)
                total += tl.reshape(_values(tl.reshape(data, [BLOCK // B, B]), byte), [BLOCK])
            else:
                total += data.to(tl.float32)
        tl.store(y_ptr + t * H + column, total.to(y_ptr.dtype.element_ty), mask=column < H)
    if K:
        k = tl.arange(0, WEIGHT_LANES)
        weight = tl.zeros([WEIGHT_LANES], tl.float32)
        for i in tl.static_range(ROWS):
            weight += tl.load(weight_ptr + rows[i] * WEIGHT_STRIDE + k, mask=(k < K) & (rows[i] < S), other=0.0)
        tl.store(out_weight_ptr + t * K + k, weight, mask=k < K)


@triton.jit(do_not_specialize=["P", "R"])
def _combine_local_kernel(
        y_ptr,  # [P, H]
        weight_ptr,  # [P] float32
        slot_ptr,  # [R, K] int64
        sent_slot_ptr,  # [T] int64
        out_ptr,  # [T, H]
        out_weight_ptr,  # [T, K] float32
        P, R, H: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, WEIGHTS: tl.constexpr, B: tl.constexpr,
        FLOOR: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, ). With B, rounded to MXFP8 in between, as if it had travelled."""
    t = tl.program_id(0).to(tl.int64)
    r = tl.load(sent_slot_ptr + t)
    slots = _slots(slot_ptr, r, r < R, P, K, LANES)
    for first in range(0, H, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total = _partial(y_ptr, slots, column, P, H, K, K)
        if B:
            data, byte = _rounded(total, B, FLOOR)
            total = 0.0 + tl.reshape(_values(data, byte), [BLOCK])  # the owner's sum, whose zeros have no sign
        tl.store(out_ptr + t * H + column, total.to(out_ptr.dtype.element_ty), mask=column < H)
    if WEIGHTS:
        k = tl.arange(0, LANES)
        weight = 0.0 + _weights(weight_ptr, slot_ptr, r, r < R, P, K, LANES)
        tl.store(out_weight_ptr + t * K + k, weight, mask=k < K)


def _words(x: torch.Tensor) -> torch.Tensor:
    """Rows of int64, at any stride; a copy of those that 16-byte accesses cannot read where they lie."""
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int64)


def _lanes(count: int) -> int:
    return next_power_of_2(max(count, 1))


def _width(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.shape[1]


def _contiguous(x: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    return unused if x is None else x.contiguous()


def _rows(x: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    """Rows at any stride, without gaps in them."""
    return unused if x is None else x if x.stride(1) == 1 else x.contiguous()


def _parts(message: torch.Tensor, where: Layout, dtype: torch.dtype) -> tuple:
    """Views of message rows: data in `dtype`; scale bytes and weights with the zeros behind them."""
    data, scale, weight = message.split([where.scales_at, where.weights_at - where.scales_at,
                                         where.width - where.weights_at], dim=1)
    return data.view(dtype), scale, weight.view(torch.float32)


def _wire(H: int, dtype: torch.dtype, block_size: int) -> tuple:
    """dtype and bytes of a row's data, and the number of its scales; block_size 0: not quantised."""
    wire = torch.uint8 if block_size else dtype
    return wire, H * wire.itemsize, cdiv(H, block_size) if block_size else 0


def split_rows(message: torch.Tensor, data_bytes: int, scales: int, weights: int) -> tuple:
    """Views of message rows: data and scales (uint8), weights (float32); None for parts of size 0."""
    data, scale, weight = _parts(message, layout(data_bytes, scales, weights), torch.uint8)
    return data, scale[:, :scales] if scales else None, weight[:, :weights] if weights else None


def _pack_rows_fake(data_TD, scale_TB, weight_TK, sent_slot_WT, num_rows, top_k):
    where = layout(data_TD.shape[1] * data_TD.element_size(), _width(scale_TB), _width(weight_TK))
    return data_TD.new_empty((num_rows, where.width), dtype=torch.uint8)


def _expanded(data_RD, scale_RB, weight_RK, row_R, slot_RK, source_P):
    P = source_P.shape[0]
    return (data_RD.new_empty((P, data_RD.shape[1])), source_P.new_empty((_width(scale_RB), P), dtype=torch.uint8),
            source_P.new_empty(0 if weight_RK is None else P, dtype=torch.float32))


def _combine_rows_fake(y_PH, weight_P, slot_RK, dtype, block_size, scaling_mode):
    _, data_bytes, scales = _wire(y_PH.shape[1], dtype, block_size)
    width = layout(data_bytes, scales, 0 if weight_P is None else slot_RK.shape[1]).width
    return y_PH.new_empty((slot_RK.shape[0], width), dtype=torch.uint8)


def _summed(message, sent_slot_WT, hidden, weights, top_k, dtype, block_size):
    T = sent_slot_WT.shape[1]
    return message.new_empty((T, hidden), dtype=dtype), message.new_empty((T, weights), dtype=torch.float32)


def _combined(y_PH, weight_P, slot_RK, sent_slot_T, dtype, block_size, scaling_mode):
    T = sent_slot_T.shape[0]
    weights = 0 if weight_P is None else slot_RK.shape[1]
    return y_PH.new_empty((T, y_PH.shape[1]), dtype=dtype), y_PH.new_empty((T, weights), dtype=torch.float32)


@operator(_pack_rows_fake)
def pack_rows(data_TD: torch.Tensor, scale_TB: torch.Tensor | None, weight_TK: torch.Tensor | None,
              sent_slot_WT: torch.Tensor, num_rows: int, top_k: int) -> torch.Tensor:
    """Message rows, uint8 [S, width]: each token's parts in every row in which it travels.

    Args:
        data_TD: of any dtype; a row takes a multiple of 32 bytes.
        scale_TB, weight_TK: uint8 and float32.
        num_rows, top_k: the plan's S and K.
    """
    data, T, ranks = _words(data_TD), data_TD.shape[0], sent_slot_WT.shape[0]
    words, scales, weights = data.shape[1], _width(scale_TB), _width(weight_TK)
    where = layout(words * 8, scales, weights)
    out = data.new_empty((num_rows, where.width), dtype=torch.uint8)
    if num_rows == 0:
        return out
    out_data, out_scale, out_weight = _parts(out, where, torch.int64)
    shape, weight_room = copy_shape(words), out_weight.shape[1]
    with torch.cuda.device_of(data):
        _pack_kernel[(T, )](data, _contiguous(scale_TB, out), _contiguous(weight_TK, out), sent_slot_WT, out_data,
                            out_scale, out_weight, T, num_rows, data.stride(0), where.width, words, scales,
                            out_scale.shape[1], _lanes(scales), weights, weight_room, _lanes(weight_room), ranks,
                            _lanes(ranks), min(ranks, top_k), shape.block, num_warps=shape.warps)
    return out


@operator(_expanded)
def expand_rows(data_RD: torch.Tensor, scale_RB: torch.Tensor | None, weight_RK: torch.Tensor | None,
                row_R: torch.Tensor | None, slot_RK: torch.Tensor,
                source_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Received rows, expert-sorted, with zeros in the padding.

    Args:
        data_RD, scale_RB, weight_RK: of any dtype (a row takes a multiple of 32 bytes), uint8 and float32; rows at
            any stride.
        row_R: int64, where row r stands in these three, if it is not at r.

    Returns:
        data [P, D] in data_RD's dtype; scales as K-block-major memory, uint8 [B, P]; weights, float32 [P]. The latter
        two are empty without scale_RB or weight_RK.
    """
    (R, K), P, data = slot_RK.shape, source_P.shape[0], _words(data_RD)
    words, scales = data.shape[1], _width(scale_RB)
    out, out_scale, out_weight = outs = _expanded(data_RD, scale_RB, weight_RK, row_R, slot_RK, source_P)
    if P == 0:
        return outs
    shape, spans, row = copy_shape(words), cdiv(words, TILE_WORDS), slot_RK if row_R is None else row_R
    scale, weight = _rows(scale_RB, data), _rows(weight_RK, data)
    out_words, indirect = out.view(torch.int64), row_R is not None
    with torch.cuda.device_of(data):
        _expand_kernel[(R, )](data, row, slot_RK, out_words, P, data.stride(0), words, K, _lanes(K), indirect,
                              shape.block, num_warps=shape.warps)
        _expand_tiles_kernel[(P // TILE_ROWS, spans)](scale, weight, row, source_P, out_words, out_scale, out_weight,
                                                      R * K, P, scale.stride(0), weight.stride(0), words, scales,
                                                      weight_RK is not None, K, indirect, TILE_ROWS, TILE_WORDS,
                                                      _lanes(cdiv(scales, spans)))
    return outs


@operator(_combine_rows_fake)
def combine_rows(y_PH: torch.Tensor, weight_P: torch.Tensor | None, slot_RK: torch.Tensor, dtype: torch.dtype,
                 block_size: int, scaling_mode: str) -> torch.Tensor:
    """Message rows, uint8 [R, width]: float32 sums of a row's choices, rounded once, and K numbers beside them.

    Args:
        y_PH: bf16, fp16 or fp32; padding rows are not read.
        weight_P: float32.
        dtype, block_size, scaling_mode: of the wire; block_size 0: rows of `dtype`, else MXFP8.
    """
    (P, H), (R, K) = y_PH.shape, slot_RK.shape
    wire, data_bytes, scales = _wire(H, dtype, block_size)
    where = layout(data_bytes, scales, 0 if weight_P is None else K)
    out = y_PH.new_empty((R, where.width), dtype=torch.uint8)
    if R == 0:
        return out
    out_data, out_scale, out_weight = _parts(out, where, wire)
    shape, weight_room = combine_shape(H, block_size), out_weight.shape[1]
    with torch.cuda.device_of(y_PH):
        _combine_kernel[(R, )](y_PH.contiguous(), _contiguous(weight_P, out), slot_RK, out_data, out_weight, P,
                               where.width // wire.itemsize, where.width // 4, H, scales, out_scale.shape[1], K,
                               _lanes(K), weight_room, _lanes(weight_room), block_size, scaling_mode == "floor",
                               shape.block, num_warps=shape.warps)
    return out


@operator(_summed)
def sum_rows(message: torch.Tensor, sent_slot_WT: torch.Tensor, hidden: int, weights: int, top_k: int,
             dtype: torch.dtype, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """y_TH in `dtype`: float32 sums of the rows that came back for each token, in ascending rank; and weights [T, K].

    Args:
        message: rows of `combine_rows`, uint8 [S, width], in the order in which their tokens were sent.
        weights: floats beside each row, top_k or 0; with 0, the second result has no columns.
        dtype, block_size: of the wire, as for `combine_rows`.
    """
    (S, _), (ranks, T) = message.shape, sent_slot_WT.shape
    wire, data_bytes, scales = _wire(hidden, dtype, block_size)
    y_TH, weight_TK = outs = _summed(message, sent_slot_WT, hidden, weights, top_k, dtype, block_size)
    if T == 0:
        return outs
    where = layout(data_bytes, scales, weights)
    data, _, weight = _parts(message, where, wire)
    shape = sum_shape(hidden, block_size)
    with torch.cuda.device_of(message):
        # Unfused: a product beyond float32's range is Inf before it is added.
        _sum_kernel[(T, )](data, weight, sent_slot_WT, y_TH, weight_TK, T, S, where.width // wire.itemsize,
                           where.width // 4, hidden, scales, weights, _lanes(weights), ranks, _lanes(ranks),
                           min(ranks, top_k), block_size, shape.block, num_warps=shape.warps, enable_fp_fusion=False)
    return outs


@operator(_combined)
def combine_local(y_PH: torch.Tensor, weight_P: torch.Tensor | None, slot_RK: torch.Tensor, sent_slot_T: torch.Tensor,
                  dtype: torch.dtype, block_size: int, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What `sum_rows` returns for the rows of `combine_rows` in a group of one rank; rounded in between all the same.

    Args:
        sent_slot_T: int64, the row r of each token; R for a token without experts.
    """
    (P, H), (R, K), T = y_PH.shape, slot_RK.shape, sent_slot_T.shape[0]
    y_TH, weight_TK = outs = _combined(y_PH, weight_P, slot_RK, sent_slot_T, dtype, block_size, scaling_mode)
    if T == 0:
        return outs
    shape = combine_shape(H, block_size)
    with torch.cuda.device_of(y_PH):
        _combine_local_kernel[(T, )](y_PH.contiguous(), _contiguous(weight_P, y_TH), slot_RK, sent_slot_T, y_TH,
                                     weight_TK, P, R, H, K, _lanes(K), weight_P is not None, block_size,
                                     scaling_mode == "floor", shape.block, num_warps=shape.warps)
    return outs


