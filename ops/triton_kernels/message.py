# SPDX-License-Identifier: Apache-2.0
"""What the kernels of permute.py and unpermute.py share: the packed message in which rows travel, and reading of the
tables that say where rows stand.

A message row is [data | scale bytes | zeros to a multiple of 4 | float32 weights | zeros to a multiple of 32].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .library import cdiv, next_power_of_2

ROW_BYTES = 32  # a sector of L2: rows that share none cost no second access


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


@triton.jit
def _those_below(x, none, COUNT: tl.constexpr):
    """The elements of x (int32) below `none`, in their order; COUNT scalars, `none` for those too few."""
    place = tl.where(x < none, tl.cumsum((x < none).to(tl.int32), axis=0), 0)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + ((none - tl.sum(tl.where(place == i + 1, none - x, 0), axis=0)).to(tl.int64), )
    return found


@triton.jit
def rows_of_token(sent_slot_ptr, t, T, S, W: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """The rows in which token t travels, ascending by rank; S for those short of ROWS."""
    rank = tl.arange(0, LANES)
    row = tl.load(sent_slot_ptr + rank.to(tl.int64) * T + t, mask=rank < W, other=S)
    return _those_below(row.to(tl.int32), S, ROWS)


@triton.jit
def places_of_row(slot_ptr, r, inside, P, K: tl.constexpr, LANES: tl.constexpr):
    """Where the choices of row r that are served here stand among the P, in their order; P for those short of K."""
    k = tl.arange(0, LANES)
    slot = tl.load(slot_ptr + r * K + k, mask=(k < K) & inside, other=P)
    return _those_below(slot.to(tl.int32), P, K)


@triton.jit
def fill_gap(scale_ptr, SCALES: tl.constexpr, ROOM: tl.constexpr, inside):
    """Zeros behind a row's scales."""
    if ROOM > SCALES:
        gap = SCALES + tl.arange(0, 32)
        tl.store(scale_ptr + gap, tl.zeros([32], tl.uint8), mask=(gap < ROOM) & inside)


def lanes_for(count: int) -> int:
    """Of the vector that holds so many."""
    return next_power_of_2(max(count, 1))


def contiguous_or(x: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    """What a kernel takes for x; `unused`, which it does not read, where there is none."""
    return unused if x is None else x.contiguous()


def parts_of(message: torch.Tensor, where: Layout, dtype: torch.dtype) -> tuple:
    """Views of message rows: data in `dtype`; scale bytes and weights with the zeros behind them."""
    data, scale, weight = message.split([where.scales_at, where.weights_at - where.scales_at,
                                         where.width - where.weights_at], dim=1)
    return data.view(dtype), scale, weight.view(torch.float32)


def split_rows(message: torch.Tensor, data_bytes: int, scales: int, weights: int) -> tuple:
    """Views of message rows: data and scales (uint8), weights (float32); None for parts of size 0."""
    data, scale, weight = parts_of(message, layout(data_bytes, scales, weights), torch.uint8)
    return data, scale[:, :scales] if scales else None, weight[:, :weights] if weights else None
