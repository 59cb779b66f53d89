# SPDX-License-Identifier: Apache-2.0
"""What permute.py and unpermute.py share: the layout of messages, and the reading of the tables of a routing plan.

A message holds the rows that travel between ranks. Each of its rows has three fields:

    [data | scale bytes | float32 weights, from a multiple of 4 on]

A row takes a multiple of 32 bytes. The bytes that belong to no field are not written.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .library import cdiv, next_power_of_2

ROW_BYTES = 32  # a sector of L2: the width of a row is a multiple, so no two rows share a sector


class RowTile(NamedTuple):
    """The piece of a row that a program handles at a time, and the program's warps. A program loops over its row.

    Attributes:
        block: elements in the piece.
        warps: warps of the program.
    """

    block: int
    warps: int


class Layout(NamedTuple):
    """Where the fields of a message row begin, in bytes. The data begin at 0; `width` is the size of the row."""

    scales_at: int
    weights_at: int
    width: int


def layout(data_bytes: int, scales: int, weights: int) -> Layout:
    """The layout of message rows with `data_bytes` bytes of data, `scales` scale bytes and `weights` float32."""
    end = data_bytes + scales
    if not weights:
        width = cdiv(end, ROW_BYTES) * ROW_BYTES
        return Layout(data_bytes, width, width)
    weights_at = cdiv(end, 4) * 4
    return Layout(data_bytes, weights_at, cdiv(weights_at + 4 * weights, ROW_BYTES) * ROW_BYTES)


@triton.jit
def _those_below(x, none, COUNT: tl.constexpr):
    """The elements of x (int32) below `none`, in their order, as a tuple of COUNT scalars (int64).

    If x has fewer than COUNT such elements, the last scalars are `none`.
    """
    place = tl.where(x < none, tl.cumsum((x < none).to(tl.int32), axis=0), 0)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + ((none - tl.sum(tl.where(place == i + 1, none - x, 0), axis=0)).to(tl.int64), )
    return found


@triton.jit
def rows_of_token(sent_slot_ptr, t, T, S, W: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """The ROWS message rows in which token t travels, ascending by rank. S, which is no row, fills the rest."""
    rank = tl.arange(0, LANES)
    row = tl.load(sent_slot_ptr + rank.to(tl.int64) * T + t, mask=rank < W, other=S)
    return _those_below(row.to(tl.int32), S, ROWS)


@triton.jit
def places_of_row(slot_ptr, r, P, K: tl.constexpr, LANES: tl.constexpr):
    """The places among the P expert-sorted rows of row r's choices, in their order.

    A choice that another rank serves has no place here. P, which is no place, fills the K results.
    """
    k = tl.arange(0, LANES)
    slot = tl.load(slot_ptr + r * K + k, mask=k < K, other=P)
    return _those_below(slot.to(tl.int32), P, K)


def lanes_for(count: int) -> int:
    """Lanes of a Triton vector that holds `count` values: a power of two."""
    return next_power_of_2(max(count, 1))


def contiguous_or(x: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    """x, contiguous. `unused` where x is None: the kernel gets an address there, which it does not read."""
    return unused if x is None else x.contiguous()


def fields_of(message: torch.Tensor, where: Layout, dtype: torch.dtype) -> tuple:
    """Views of the three fields of message rows, up to the next field: data in `dtype`, scale bytes, and weights."""
    data, scale, weight = message.split([where.scales_at, where.weights_at - where.scales_at,
                                         where.width - where.weights_at], dim=1)
    return data.view(dtype), scale, weight.view(torch.float32)


def unpack_rows(message: torch.Tensor, data_bytes: int, scales: int, weights: int) -> tuple:
    """Views of the data and scales (uint8) and the weights (float32) of message rows. An empty field is None."""
    data, scale, weight = fields_of(message, layout(data_bytes, scales, weights), torch.uint8)
    return data, scale[:, :scales] if scales else None, weight[:, :weights] if weights else None
