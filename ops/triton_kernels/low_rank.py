# SPDX-License-Identifier: Apache-2.0
"""The products of LoRA adapters with rows sorted by expert, in bf16 with sums in float32.

Letters: P rows (groups are multiples of 128), W the width of rows, R the adapters' rank, E experts. A factor is
[E, R, W] as a tensor; in memory, either R or W comes first.

    kernel                 result                                        bytes read + written for each value of a row
    _low_rank_rows_kernel  low_PR = x_PW factor^T                        1 or 2
    _add_low_rank_kernel   y_PW += low_PR factor                         2 + 2
    _low_rank_wgrad_kernel gradient_ERW = low^T x over the group's rows  1 or 2

The oracle is ds_mxfp8_moe/compute/low_rank.py, which adds up in another order. MXFP8 rows are dequantized on the way,
exactly in bf16. All kernels are bound by memory, since a rank is small: the tensor cores do what they do in passing.
"""

import torch
import triton
import triton.language as tl

from ..mx_format import MXParts
from .format import expert_of, from_e4m3, power_of_two
from .launch import Launched
from .library import cdiv, next_power_of_2

MOST_RANKS = 128  # more would not fit into the shared memory of every GPU


@triton.jit
def _loaded_rows(x_ptr, scale_ptr, scale_stride_p, scale_stride_w, row, first, p, w, W: tl.constexpr, B: tl.constexpr):
    """Rows from `row` on and columns from `first` on, in bf16. Columns past W are 0. B: the block size, 0 for bf16."""
    row = row.to(tl.int64)
    x = tl.load(x_ptr + (row * W + first) + (p[:, None] * W + w[None, :]), (w < W - first)[None, :], other=0)
    if B:
        block = tl.arange(0, w.shape[0] // B)
        scale_ptr += row * scale_stride_p + first // B * scale_stride_w
        scale = tl.load(scale_ptr + (p[:, None] * scale_stride_p + block[None, :] * scale_stride_w),
                        (block * B < W - first)[None, :], other=0)
        blocks = tl.reshape(from_e4m3(x), [p.shape[0], w.shape[0] // B, B]) * power_of_two(scale)[:, :, None]
        x = tl.reshape(blocks, [p.shape[0], w.shape[0]]).to(tl.bfloat16)
    return x


@triton.jit
def _factor_at(ptr, expert, first, r, w, R: tl.constexpr, W: tl.constexpr, RANK_FIRST: tl.constexpr):
    """The addresses [R, W] of the values of an expert's factor, and which of them are there."""
    ptr += expert.to(tl.int64) * (R * W)
    inside = (r < R)[:, None] & (w < W - first)[None, :]
    if RANK_FIRST:
        return ptr + (r[:, None] * W + (first + w)[None, :]), inside
    return ptr + (r[:, None] + (first + w)[None, :] * R), inside


@triton.jit
def _low_at(ptr, row, p, r, R: tl.constexpr):
    """The same of low's rows from `row` on."""
    return ptr + row.to(tl.int64) * R + (p[:, None] * R + r[None, :]), (r < R)[None, :]


@Launched
@triton.jit
def _low_rank_rows_kernel(x_ptr, scale_ptr, scale_stride_p, scale_stride_w, factor_ptr, ends_ptr, low_ptr, E,
                          W: tl.constexpr, R: tl.constexpr, B: tl.constexpr, RANK_FIRST: tl.constexpr,
                          E_PAD: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr):
    """Grid [P / BP]."""
    row = tl.program_id(0) * BP
    expert = expert_of(row, ends_ptr, E, E_PAD)
    p, w, r = tl.arange(0, BP), tl.arange(0, BW), tl.arange(0, BR)
    low = tl.zeros([BP, BR], tl.float32)
    for first in range(0, W, BW):
        x = _loaded_rows(x_ptr, scale_ptr, scale_stride_p, scale_stride_w, row, first, p, w, W, B)
        at, inside = _factor_at(factor_ptr, expert, first, r, w, R, W, RANK_FIRST)
        low = tl.dot(x, tl.trans(tl.load(at, inside, other=0.0)), low)
    at, inside = _low_at(low_ptr, row, p, r, R)
    low = tl.where(row >= tl.load(ends_ptr + E - 1), 0.0, low)
    tl.store(at, low.to(low_ptr.dtype.element_ty), inside)


@Launched
@triton.jit
def _add_low_rank_kernel(y_ptr, low_ptr, factor_ptr, ends_ptr, E, W: tl.constexpr, R: tl.constexpr,
                         RANK_FIRST: tl.constexpr, E_PAD: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr,
                         BR: tl.constexpr):
    """Grid [P / BP * ceil(W / BW)]."""
    tiles: tl.constexpr = (W + BW - 1) // BW
    row, first = tl.program_id(0) // tiles * BP, tl.program_id(0) % tiles * BW
    if row < tl.load(ends_ptr + E - 1):
        expert = expert_of(row, ends_ptr, E, E_PAD)
        p, w, r = tl.arange(0, BP), tl.arange(0, BW), tl.arange(0, BR)
        places = y_ptr + (row.to(tl.int64) * W + first) + (p[:, None] * W + w[None, :])
        y = tl.load(places, (w < W - first)[None, :], other=0.0)  # while the other two are on their way
        at, inside = _factor_at(factor_ptr, expert, first, r, w, R, W, RANK_FIRST)
        factor = tl.load(at, inside, other=0.0)
        at, inside = _low_at(low_ptr, row, p, r, R)
        y = y.to(tl.float32) + tl.dot(tl.load(at, inside, other=0.0), factor)
        tl.store(places, y.to(tl.bfloat16), (w < W - first)[None, :])


@Launched
@triton.jit
def _low_rank_wgrad_kernel(low_ptr, x_ptr, scale_ptr, scale_stride_p, scale_stride_w, ends_ptr, grad_ptr,
                           W: tl.constexpr, R: tl.constexpr, B: tl.constexpr, RANK_FIRST: tl.constexpr,
                           BP: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr):
    """Grid [E * ceil(W / BW)]."""
    tiles: tl.constexpr = (W + BW - 1) // BW
    expert, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BW
    begin, end = tl.load(ends_ptr + expert - 1, expert > 0, other=0), tl.load(ends_ptr + expert)
    p, w, r = tl.arange(0, BP), tl.arange(0, BW), tl.arange(0, BR)
    grad = tl.zeros([BR, BW], tl.float32)
    for i in range((end - begin) // BP):
        row = tl.multiple_of(begin + i * BP, BP)
        x = _loaded_rows(x_ptr, scale_ptr, scale_stride_p, scale_stride_w, row, first, p, w, W, B)
        at, inside = _low_at(low_ptr, row, p, r, R)
        grad = tl.dot(tl.trans(tl.load(at, inside, other=0.0)), x, grad)
    at, inside = _factor_at(grad_ptr, expert, first, r, w, R, W, RANK_FIRST)
    tl.store(at, grad.to(tl.bfloat16), inside)


def _of_rows(x_PW: torch.Tensor | MXParts) -> tuple:
    """What kernels get of rows, their width, and the block size."""
    if isinstance(x_PW, torch.Tensor):
        return (x_PW.contiguous(), None, 0, 0), x_PW.shape[1], 0
    data, scale = x_PW.qdata.contiguous(), x_PW.scale_bytes
    return (data.view(torch.uint8), scale, *scale.stride()), data.shape[1], x_PW.block_size


def _of_factor(factor_ERW: torch.Tensor) -> tuple[int, bool, int]:
    """The rank, whether it comes before the width in memory, and the rank of a tile, which tl.dot wants to be 16."""
    R = factor_ERW.shape[1]
    return R, factor_ERW.is_contiguous(), max(16, next_power_of_2(R))


def low_rank_rows(x_PW: torch.Tensor | MXParts, factor_ERW: torch.Tensor, ends_E: torch.Tensor,
                  dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """x factor[e]^T of the rows of each expert e: [P, R] bf16 or fp32, zeros at and past ends_E[-1].

    Args:
        x_PW: bf16 or MXFP8. P and all groups are multiples of 128.
        factor_ERW: bf16. It is contiguous, or so is its transpose [E, W, R]. R is at most MOST_RANKS.
    """
    rows, W, B = _of_rows(x_PW)
    R, rank_first, BR = _of_factor(factor_ERW)
    P, E = rows[0].shape[0], ends_E.shape[0]
    low_PR = factor_ERW.new_empty(P, R, dtype=dtype)
    if P:
        _low_rank_rows_kernel[(P // 64, )](*rows, factor_ERW, ends_E, low_PR, E, W, R, B, rank_first,
                                           next_power_of_2(E), 64, 128, BR, num_warps=4)
    return low_PR


def add_low_rank(y_PW: torch.Tensor, low_PR: torch.Tensor, factor_ERW: torch.Tensor, ends_E: torch.Tensor) -> None:
    """Adds low factor[e] to the rows of each expert e, in place, rounded once. y is bf16 and contiguous.

    `factor_ERW`: as in low_rank_rows.
    """
    (P, W), E = y_PW.shape, ends_E.shape[0]
    R, rank_first, BR = _of_factor(factor_ERW)
    if P:
        _add_low_rank_kernel[(P // 128 * cdiv(W, 128), )](y_PW, low_PR, factor_ERW, ends_E, E, W, R, rank_first,
                                                          next_power_of_2(E), 128, 128, BR, num_warps=8)


def low_rank_wgrad(low_PR: torch.Tensor, x_PW: torch.Tensor | MXParts, factor_ERW: torch.Tensor,
                   ends_E: torch.Tensor) -> torch.Tensor:
    """low^T x over the rows of each expert: [E, R, W] bf16, laid out as the factor. Zeros for an empty group.

    `x_PW`, `factor_ERW`: as in low_rank_rows. Of the factor only the layout counts.
    """
    rows, W, B = _of_rows(x_PW)
    R, rank_first, BR = _of_factor(factor_ERW)
    E = ends_E.shape[0]
    grad_ERW = torch.empty_like(factor_ERW)  # with its strides
    _low_rank_wgrad_kernel[(E * cdiv(W, 128), )](low_PR, *rows, ends_E, grad_ERW, W, R, B, rank_first, 64, 128, BR,
                                                 num_warps=8 if BR > 64 else 4)
    return grad_ERW
