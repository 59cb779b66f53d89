# SPDX-License-Identifier: Apache-2.0
"""Moves rows from tokens to experts: what the collective transport does in dispatch before and after the exchange.

    pack_rows       copies a token's data, scales and routing weights into a message row for each rank that serves one
                    of its choices: T tokens -> S rows
    expand_rows     copies received rows to their places in the expert-sorted, padded order, and their scales to
                    K-block-major memory: R rows -> P rows

The oracle is the plain path of ds_mxfp8_moe/transport/collective.py, bit for bit. Letters and tables (sent_slot, slot,
source) are those of ds_mxfp8_moe/transport. Hidden sizes are multiples of 32.

All kernels are bound by memory. There is one program for each source row, which reads each byte once, even if the row
goes to several places. Each byte of the output is written once.
"""

import torch
import triton
import triton.language as tl

from .launch import Launched
from .library import cdiv, next_power_of_2
from .message import (
    RowTile,
    contiguous_or,
    fields_of,
    lanes_for,
    layout,
    places_of_row,
    rows_of_token,
)

# What one program of _expand_tiles_kernel covers: expert-sorted rows, and 8-byte words of each.
TILE_ROWS = 128
TILE_WORDS = 256


def copy_tile(words: int) -> RowTile:
    """The tile for rows of 8-byte words that are only copied."""
    block = min(next_power_of_2(words), 1024)
    return RowTile(block, max(1, min(4, block // 256)))


@Launched
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
        SCALE_LANES: tl.constexpr, K: tl.constexpr, WEIGHT_LANES: tl.constexpr, W: tl.constexpr,
        RANK_LANES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies each token into its message rows. Grid (T, )."""
    t = tl.program_id(0).to(tl.int64)
    rows = rows_of_token(sent_slot_ptr, t, T, S, W, RANK_LANES, ROWS)
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
    if K:
        k = tl.arange(0, WEIGHT_LANES)
        weight = tl.load(weight_ptr + t * K + k, mask=k < K)
        for i in tl.static_range(ROWS):
            tl.store(out_weight_ptr + rows[i] * (WIDTH // 4) + k, weight, mask=(k < K) & (rows[i] < S))


@Launched
@triton.jit(do_not_specialize=["P"])
def _expand_kernel(
        data_ptr,  # [*, STRIDE] int64
        slot_ptr,  # [R, K] int64
        out_ptr,  # [P, WORDS] int64
        P, STRIDE: tl.constexpr, WORDS: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the data of each received row to its places. Grid (R, )."""
    r = tl.program_id(0).to(tl.int64)
    slots = places_of_row(slot_ptr, r, P, K, LANES)
    for first in range(0, WORDS, BLOCK):
        word = first + tl.arange(0, BLOCK)
        data = tl.load(data_ptr + r * STRIDE + word, mask=word < WORDS)
        for k in tl.static_range(K):
            tl.store(out_ptr + slots[k] * WORDS + word, data, mask=(word < WORDS) & (slots[k] < P))


@Launched
@triton.jit(do_not_specialize=["choices"])
def _expand_tiles_kernel(
        scale_ptr,  # [*, SCALE_STRIDE] uint8
        weight_ptr,  # [*, WEIGHT_STRIDE] float32
        source_ptr,  # [P] int64
        out_ptr,  # [P, WORDS] int64
        out_scale_ptr,  # [SCALES, P] uint8
        out_weight_ptr,  # [P] float32
        choices,  # R * K
        P, SCALE_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
        WEIGHTS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, SPAN_WORDS: tl.constexpr,
        SPAN_SCALES: tl.constexpr):
    """Writes the scales and weights of ROWS expert-sorted rows, and zeros for the data of padding rows.

    Grid (P / ROWS, spans), where a span is SPAN_WORDS words of data and SPAN_SCALES scales.
    """
    p = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    span = tl.program_id(1)
    source = tl.load(source_ptr + p)
    real = source < choices
    row = source // K
    choice = source - row * K
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


def _words(x: torch.Tensor) -> torch.Tensor:
    """x as rows of int64, at any stride. Copies x if its rows do not allow accesses of 16 bytes."""
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int64)


def _width(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.shape[1]


def _rows(x: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    """x with dense rows, at any stride. `unused` where x is None: an address that the kernel does not read."""
    return unused if x is None else x if x.stride(1) == 1 else x.contiguous()


def pack_rows(data_TD: torch.Tensor, scale_TB: torch.Tensor | None, weight_TK: torch.Tensor | None,
              sent_slot_WT: torch.Tensor, num_rows: int, top_k: int) -> torch.Tensor:
    """Packs tokens into message rows, uint8 [S, width].

    Args:
        data_TD: any dtype. A row takes a multiple of 32 bytes.
        scale_TB: uint8. With None, rows carry no scales.
        weight_TK: float32. With None, rows carry no weights.
        num_rows, top_k: the plan's S and K.
    """
    data, T, ranks = _words(data_TD), data_TD.shape[0], sent_slot_WT.shape[0]
    words, scales, weights = data.shape[1], _width(scale_TB), _width(weight_TK)
    where = layout(words * 8, scales, weights)
    out = data.new_empty((num_rows, where.width), dtype=torch.uint8)
    if num_rows == 0:
        return out
    out_data, out_scale, out_weight = fields_of(out, where, torch.int64)
    tile = copy_tile(words)
    _pack_kernel[(T, )](data, contiguous_or(scale_TB, out), contiguous_or(weight_TK, out), sent_slot_WT, out_data,
                        out_scale, out_weight, T, num_rows, data.stride(0), where.width, words, scales,
                        lanes_for(scales), weights, lanes_for(weights), ranks, lanes_for(ranks), min(ranks, top_k),
                        tile.block, num_warps=tile.warps)
    return out


def expand_rows(data_RD: torch.Tensor, scale_RB: torch.Tensor | None, weight_RK: torch.Tensor | None,
                slot_RK: torch.Tensor, source_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies received rows to their places in the expert-sorted order. Padding rows are zeros.

    Args:
        data_RD: any dtype, any stride between rows. A row takes a multiple of 32 bytes.
        scale_RB, weight_RK: uint8 and float32, any stride between rows. None if rows have none.

    Returns:
        data [P, D] in data_RD's dtype; scales in K-block-major memory, uint8 [B, P]; weights, float32 [P]. Without
        scale_RB the scales are empty, and without weight_RK the weights.
    """
    (R, K), P, data = slot_RK.shape, source_P.shape[0], _words(data_RD)
    words, scales = data.shape[1], _width(scale_RB)
    out = data_RD.new_empty((P, data_RD.shape[1]))
    out_scale = source_P.new_empty((scales, P), dtype=torch.uint8)
    out_weight = source_P.new_empty(0 if weight_RK is None else P, dtype=torch.float32)
    if P == 0:
        return out, out_scale, out_weight
    tile, spans, out_words = copy_tile(words), cdiv(words, TILE_WORDS), out.view(torch.int64)
    scale, weight = _rows(scale_RB, data), _rows(weight_RK, data)
    _expand_kernel[(R, )](data, slot_RK, out_words, P, data.stride(0), words, K, lanes_for(K), tile.block,
                          num_warps=tile.warps)
    _expand_tiles_kernel[(P // TILE_ROWS, spans)](scale, weight, source_P, out_words, out_scale, out_weight, R * K, P,
                                                  scale.stride(0), weight.stride(0), words, scales,
                                                  weight_RK is not None, K, TILE_ROWS, TILE_WORDS,
                                                  lanes_for(cdiv(scales, spans)))
    return out, out_scale, out_weight
