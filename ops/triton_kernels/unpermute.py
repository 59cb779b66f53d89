# SPDX-License-Identifier: Apache-2.0
"""Moves rows from experts back to tokens: what the transports do in combine before, between and after exchanges.

    combine_rows    sums the experts' outputs of a row and rounds the sum to the wire format     P rows -> R rows
    pass_on_rows    sums the rows that come back for a token and rounds to the wire format       S rows -> T rows
    sum_rows        sums the rows that come back for a token                                     S rows -> T tokens

Oracle, letters, tables and sizes are those of permute.py. Here too each byte is read once and written once.
"""

import torch
import triton
import triton.language as tl

from .format import from_e4m3, power_of_two, quantized_rows
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


def combine_tile(H: int, block_size: int) -> RowTile:
    """The tile for sums at the experts' rank. MXFP8 takes one warp, so that a block's maximum needs no other warp."""
    if block_size:
        return RowTile(512, 1)
    block = min(next_power_of_2(H), 2048)
    return RowTile(block, max(1, block // 512))


def sum_tile(H: int, block_size: int) -> RowTile:
    """The tile for sums at the tokens' rank, which load up to top_k rows at a time."""
    if block_size:
        return RowTile(512, 1)
    block = min(next_power_of_2(H), 1024)
    return RowTile(block, max(1, block // 256))


@triton.jit
def rounded(x, B: tl.constexpr, FLOOR: tl.constexpr):
    """Quantizes float32 [N] in blocks of B: e4m3 bytes [N / B, B] and scale bytes [N / B]."""
    data, byte = quantized_rows(tl.reshape(x, [x.shape[0] // B, B]), B, FLOOR)
    return data, tl.reshape(byte, [x.shape[0] // B])


@triton.jit
def values(data, byte):
    """Dequantizes e4m3 bytes [N, B] with scale bytes [N] to float32 [N, B]."""
    return from_e4m3(data) * power_of_two(byte)[:, None]


@triton.jit
def partial_sum(y_ptr, slots, column, P, H: tl.constexpr, K: tl.constexpr, AT_ONCE: tl.constexpr):
    """The float32 sum of the rows at `slots`, in their order.

    AT_ONCE rows are loaded together. P in `slots` stands for no row, and only P follows it: loading stops there.
    """
    total = tl.zeros(column.shape, tl.float32)
    for first in tl.static_range(0, K, AT_ONCE):
        if slots[first] < P:
            for k in tl.static_range(first, min(first + AT_ONCE, K)):
                y = tl.load(y_ptr + slots[k] * H + column, mask=(column < H) & (slots[k] < P), other=0.0)
                total += y.to(tl.float32)
    return total


@triton.jit
def routing_weights(weight_ptr, slot_ptr, r, P, K: tl.constexpr, LANES: tl.constexpr):
    """The values of weight_P for the choices of row r, float32 [LANES]. 0 for a choice that another rank serves."""
    k = tl.arange(0, LANES)
    slot = tl.load(slot_ptr + r * K + k, mask=k < K, other=P)
    return tl.load(weight_ptr + slot, mask=slot < P, other=0.0)


@Launched
@triton.jit(do_not_specialize=["P"])
def _combine_kernel(
        y_ptr,  # [P, H]
        weight_ptr,  # [P] float32
        slot_ptr,  # [R, K] int64
        out_ptr,  # [R, STRIDE] in the wire's dtype. For MXFP8 uint8, with the scales from H on
        out_weight_ptr,  # [R, WEIGHT_STRIDE] float32, at its weights
        P, STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, H: tl.constexpr, SCALES: tl.constexpr, K: tl.constexpr,
        LANES: tl.constexpr, WEIGHTS: tl.constexpr, B: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the outputs of each row's choices. Grid (R, )."""
    r = tl.program_id(0).to(tl.int64)
    slots = places_of_row(slot_ptr, r, P, K, LANES)
    for first in range(0, H, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total = partial_sum(y_ptr, slots, column, P, H, K, 2)
        if B:
            data, byte = rounded(total, B, FLOOR)
            tl.store(out_ptr + r * STRIDE + column, tl.reshape(data, [BLOCK]), mask=column < H)
            block = first // B + tl.arange(0, BLOCK // B)
            tl.store(out_ptr + (r * STRIDE + H) + block, byte, mask=block < SCALES)
        else:
            tl.store(out_ptr + r * STRIDE + column, total.to(out_ptr.dtype.element_ty), mask=column < H)
    if WEIGHTS:
        k = tl.arange(0, LANES)
        weight = routing_weights(weight_ptr, slot_ptr, r, P, K, LANES)
        tl.store(out_weight_ptr + r * WEIGHT_STRIDE + k, weight, mask=k < K)


@Launched
@triton.jit(do_not_specialize=["T", "S"])
def _sum_kernel(
        data_ptr,  # [S, STRIDE] in the wire's dtype. For MXFP8 uint8, with the scales from H on
        weight_ptr,  # [S, WEIGHT_STRIDE] float32, at its weights
        sent_slot_ptr,  # [W, T] int64
        out_ptr,  # [T, OUT_STRIDE]. For MXFP8 uint8, with the scales from H on
        out_weight_ptr,  # [T, OUT_WEIGHT_STRIDE] float32
        T, S, STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, H: tl.constexpr, SCALES: tl.constexpr,
        OUT_STRIDE: tl.constexpr, OUT_WEIGHT_STRIDE: tl.constexpr, OUT_SCALES: tl.constexpr, K: tl.constexpr,
        WEIGHT_LANES: tl.constexpr, W: tl.constexpr, RANK_LANES: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr,
        OUT_B: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the rows that came back for each token. Grid (T, )."""
    t = tl.program_id(0).to(tl.int64)
    rows = rows_of_token(sent_slot_ptr, t, T, S, W, RANK_LANES, ROWS)
    for first in range(0, H, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(ROWS):
            data = tl.load(data_ptr + rows[i] * STRIDE + column, mask=(column < H) & (rows[i] < S), other=0)
            if B:
                block = first // B + tl.arange(0, BLOCK // B)
                inside = (block < SCALES) & (rows[i] < S)
                byte = tl.load(data_ptr + (rows[i] * STRIDE + H) + block, mask=inside, other=0)
                total += tl.reshape(values(tl.reshape(data, [BLOCK // B, B]), byte), [BLOCK])
            else:
                total += data.to(tl.float32)
        if OUT_B:
            data, byte = rounded(total, OUT_B, FLOOR)
            tl.store(out_ptr + t * OUT_STRIDE + column, tl.reshape(data, [BLOCK]), mask=column < H)
            block = first // OUT_B + tl.arange(0, BLOCK // OUT_B)
            tl.store(out_ptr + (t * OUT_STRIDE + H) + block, byte, mask=block < OUT_SCALES)
        else:
            tl.store(out_ptr + t * OUT_STRIDE + column, total.to(out_ptr.dtype.element_ty), mask=column < H)
    if K:
        k = tl.arange(0, WEIGHT_LANES)
        weight = tl.zeros([WEIGHT_LANES], tl.float32)
        for i in tl.static_range(ROWS):
            weight += tl.load(weight_ptr + rows[i] * WEIGHT_STRIDE + k, mask=(k < K) & (rows[i] < S), other=0.0)
        tl.store(out_weight_ptr + t * OUT_WEIGHT_STRIDE + k, weight, mask=k < K)


def _wire(H: int, dtype: torch.dtype, block_size: int) -> tuple:
    """The dtype and the bytes of a row's data on the wire, and the number of its scales.

    block_size 0 stands for rows in `dtype`, without scales.
    """
    wire = torch.uint8 if block_size else dtype
    return wire, H * wire.itemsize, cdiv(H, block_size) if block_size else 0


def _new_message(like: torch.Tensor, rows: int, H: int, weights: int, dtype: torch.dtype, block_size: int) -> tuple:
    """Message rows without values, the views of their data and of their weights, and the number of scales."""
    wire, data_bytes, scales = _wire(H, dtype, block_size)
    where = layout(data_bytes, scales, weights)
    message = like.new_empty((rows, where.width), dtype=torch.uint8)
    data, _, weight = fields_of(message, where, wire)
    return message, data, weight, scales


def combine_rows(y_PH: torch.Tensor, weight_P: torch.Tensor | None, slot_RK: torch.Tensor, dtype: torch.dtype,
                 block_size: int, scaling_mode: str) -> torch.Tensor:
    """Message rows, uint8 [R, width]: the float32 sum of a row's choices, rounded once, and K weights beside it.

    Args:
        y_PH: bf16, fp16 or fp32. Padding rows are not read.
        weight_P: float32. With None, message rows carry no weights.
        block_size, scaling_mode: the sums travel as MXFP8 with these. With block_size 0 they travel in `dtype`.
    """
    (P, H), (R, K) = y_PH.shape, slot_RK.shape
    weights = 0 if weight_P is None else K
    out, out_data, out_weight, scales = _new_message(y_PH, R, H, weights, dtype, block_size)
    if R == 0:
        return out
    tile = combine_tile(H, block_size)
    _combine_kernel[(R, )](y_PH.contiguous(), contiguous_or(weight_P, out), slot_RK, out_data, out_weight, P,
                           out_data.stride(0), out_weight.stride(0), H, scales, K, lanes_for(K),
                           weight_P is not None, block_size, scaling_mode == "floor", tile.block,
                           num_warps=tile.warps)
    return out


def sum_rows(message: torch.Tensor, sent_slot_WT: torch.Tensor, hidden: int, weights: int, top_k: int,
             dtype: torch.dtype, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums the rows that came back for each token in float32, in the order of ranks.

    Args:
        message: rows of `combine_rows`, uint8 [S, width], in the order in which their tokens were sent.
        weights: number of weights beside each row: top_k or 0.
        dtype, block_size: the wire format, as for `combine_rows`.

    Returns:
        The sums [T, hidden] in `dtype`, and the sums of the weights [T, weights] in float32.
    """
    T = sent_slot_WT.shape[1]
    y_TH = message.new_empty((T, hidden), dtype=dtype)
    weight_TK = message.new_empty((T, weights), dtype=torch.float32)
    _sum(message, sent_slot_WT, hidden, weights, top_k, (dtype, block_size), y_TH, weight_TK)
    return y_TH, weight_TK


def pass_on_rows(message: torch.Tensor, sent_slot_WT: torch.Tensor, hidden: int, weights: int, top_k: int,
                 dtype: torch.dtype, block_size: int, scaling_mode: str) -> torch.Tensor:
    """As `sum_rows` of float32 rows, but the sums and their weights become message rows, uint8 [T, width].

    Args:
        dtype, block_size, scaling_mode: the wire format of the result, as for `combine_rows`.
    """
    out, data, weight, scales = _new_message(message, sent_slot_WT.shape[1], hidden, weights, dtype, block_size)
    _sum(message, sent_slot_WT, hidden, weights, top_k, (torch.float32, 0), data, weight, (block_size, scales),
         scaling_mode)
    return out


def _sum(message: torch.Tensor, sent_slot_WT: torch.Tensor, hidden: int, weights: int, top_k: int, wire: tuple,
         out: torch.Tensor, out_weight: torch.Tensor, out_blocks: tuple = (0, 0), scaling_mode: str = "rceil") -> None:
    """Writes the sums into `out` and `out_weight`. `wire`: (dtype, block_size) of the message. `out_blocks`:
    (block_size, number of scales) of the result."""
    (S, _), (ranks, T), (out_block, out_scales) = message.shape, sent_slot_WT.shape, out_blocks
    if T == 0:
        return
    dtype, data_bytes, scales = _wire(hidden, *wire)
    where = layout(data_bytes, scales, weights)
    data, _, weight = fields_of(message, where, dtype)
    tile = sum_tile(hidden, wire[1] or out_block)
    # No fused multiply-add: a product beyond float32's range has to become Inf before it is added.
    _sum_kernel[(T, )](data, weight, sent_slot_WT, out, out_weight, T, S, where.width // dtype.itemsize,
                       where.width // 4, hidden, scales, out.stride(0), out_weight.stride(0), out_scales, weights,
                       lanes_for(weights), ranks, lanes_for(ranks), min(ranks, top_k), wire[1], out_block,
                       scaling_mode == "floor", tile.block, num_warps=tile.warps, enable_fp_fusion=False)
