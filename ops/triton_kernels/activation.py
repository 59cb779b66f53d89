# SPDX-License-Identifier: Apache-2.0
"""The kernels between the two grouped GEMMs of an expert FFN: activation, routing weight, MXFP8 casts and biases.

Letters: P rows (a multiple of 128, as is every group), F FFN size (a multiple of 32), G width of the first GEMM, E
experts. `layout` says what the G columns of pre_PG are: "mlp" (G = F), "gate_up" or "up_gate" (G = 2F).

    forward    h_PF = w_P * act(pre_PG). Also keeps pre_PG in MXFP8 for backward
    backward   dw_P = <t_PF, act(pre_PG)>, and dpre_PG = t_PF w_P act'(pre_PG) in up to three forms

The oracle is ds_mxfp8_moe/compute/activation.py, with the same roundings. exp and erf differ from torch's in the last
bits of float32, so a byte may differ by one step of rounding.

A program has a tile of rows and of columns of F, with the gate and up of each. Every byte is read and written once.
Scales of rows are stored as [F / block, P]. A program's scales then lie together, and the GEMMs read that order.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from ..mx_format import MXParts
from .act import up_slope, up_value, value_and_slope
from .format import expert_of, from_e4m3, power_of_two, quantized_rows
from .launch import Launched
from .library import cdiv, next_power_of_2
from .quantize import Tile
from .transpose import in_order, loaded_row, store_columns

FORWARD = Tile(32, 128, 4)
BACKWARD = Tile(32, 128, 8)
BACKWARD_COLUMNS = {32: Tile(64, 64, 4, vector=8, registers=128), 128: Tile(128, 128, 8, vector=8)}  # by block size
BACKWARD_COLUMNS_CLAMPED = BACKWARD_COLUMNS | {128: Tile(128, 128, 16, vector=8)}  # clamps take more registers

# A tile has the rows `row + r` and the columns `first + c` of a half. A half is gate or up: WIDTH columns of a matrix
# [P, N], from column AT on. Only the tile's origin needs int64.


@triton.jit
def _origin(row, first, N: tl.constexpr, AT: tl.constexpr):
    """The offset of the tile's first value, int64."""
    return row.to(tl.int64) * N + (AT + first)


@triton.jit
def _offset(r, c, N: tl.constexpr):
    """The offsets [R, C] of the tile's values from its origin."""
    return r[:, None] * N + c[None, :]


@triton.jit
def _load(ptr, bias_ptr, expert, row, first, r, c, N: tl.constexpr, AT: tl.constexpr, WIDTH: tl.constexpr):
    """Loads the tile as float32, with zeros outside. With a bias, the sum is rounded to the matrix's dtype."""
    inside = c < WIDTH - first
    x = tl.load(ptr + _origin(row, first, N, AT) + _offset(r, c, N), inside[None, :], other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + (expert * N + AT + first) + c, inside, other=0.0)
        x = (x.to(tl.float32) + bias.to(tl.float32)[None, :]).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _store(x, ptr, row, first, r, c, N: tl.constexpr, AT: tl.constexpr, WIDTH: tl.constexpr):
    at = ptr + _origin(row, first, N, AT) + _offset(r, c, N)
    tl.store(at, x.to(ptr.dtype.element_ty), (c < WIDTH - first)[None, :])


@triton.jit
def _scale_places(row, first, r, P, AT: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """The offsets [R, C / B] of a tile's scales in [halves * ceil(WIDTH / B), P], and which of them exist."""
    block = first // B + tl.arange(0, C // B)
    first_block: tl.constexpr = AT // WIDTH * ((WIDTH + B - 1) // B)
    return (first_block + block)[None, :].to(tl.int64) * P + (row + r)[:, None], (block * B < WIDTH)[None, :]


@triton.jit
def _load_rows(ptr, scale_ptr, row, first, r, c, P, N: tl.constexpr, AT: tl.constexpr, WIDTH: tl.constexpr,
               B: tl.constexpr):
    """Loads what `_store_rows` stored as float32, with zeros outside."""
    R: tl.constexpr = r.shape[0]
    C: tl.constexpr = c.shape[0]
    data = tl.load(ptr + _origin(row, first, N, AT) + _offset(r, c, N), (c < WIDTH - first)[None, :], other=0)
    at, exists = _scale_places(row, first, r, P, AT, WIDTH, B, C)
    byte = tl.load(scale_ptr + at, exists, other=0)
    x = tl.reshape(from_e4m3(data), [R, C // B, B]) * power_of_two(byte)[:, :, None]
    return tl.reshape(x, [R, C])


@triton.jit
def _store_rows(x, ptr, scale_ptr, row, first, r, c, P, N: tl.constexpr, AT: tl.constexpr, WIDTH: tl.constexpr,
                B: tl.constexpr, FLOOR: tl.constexpr):
    """Stores the tile as MXFP8 in blocks along its rows: data [P, N], scales [halves * ceil(WIDTH / B), P]."""
    data, byte = quantized_rows(x, B, FLOOR)
    _store(data, ptr, row, first, r, c, N, AT, WIDTH)
    at, exists = _scale_places(row, first, r, P, AT, WIDTH, B, c.shape[0])
    tl.store(scale_ptr + at, byte, exists)


@Launched
@triton.jit
def _forward_kernel(pre_ptr, bias_ptr, ends_ptr, weight_ptr, h_ptr, h_scale_ptr, kept_ptr, kept_scale_ptr, P, E,
                    F: tl.constexpr, GATE_AT: tl.constexpr, UP_AT: tl.constexpr, ACT: tl.constexpr,
                    ALPHA: tl.constexpr, LIMIT: tl.constexpr, B: tl.constexpr, FLOOR: tl.constexpr,
                    E_PAD: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Computes h, and keeps pre. Grid [P / R * ceil(F / C)].

    A pointer is None if its input does not exist or its output is not asked for. UP_AT is None without gating, ALPHA
    and LIMIT are None if the activation has none.
    """
    G: tl.constexpr = F if UP_AT is None else 2 * F
    tiles: tl.constexpr = (F + C - 1) // C
    row, first = tl.program_id(0) // tiles * R, tl.program_id(0) % tiles * C
    r, c = tl.arange(0, R), tl.arange(0, C)
    expert = None
    if bias_ptr is not None:
        expert = expert_of(row, ends_ptr, E, E_PAD)
    x = _load(pre_ptr, bias_ptr, expert, row, first, r, c, G, GATE_AT, F)
    if UP_AT is not None:
        up = _load(pre_ptr, bias_ptr, expert, row, first, r, c, G, UP_AT, F)
    weight = tl.load(weight_ptr + row + r)[:, None]
    if kept_ptr is not None:
        _store_rows(x, kept_ptr, kept_scale_ptr, row, first, r, c, P, G, GATE_AT, F, B, FLOOR)
        if UP_AT is not None:
            _store_rows(up, kept_ptr, kept_scale_ptr, row, first, r, c, P, G, UP_AT, F, B, FLOOR)
    h, _ = value_and_slope(x, ACT, ALPHA, LIMIT)
    if UP_AT is not None:
        h *= up_value(up, ACT, LIMIT)
    h *= weight
    if h_scale_ptr is not None:
        _store_rows(h, h_ptr, h_scale_ptr, row, first, r, c, P, F, 0, F, B, FLOOR)
    else:
        _store(h, h_ptr, row, first, r, c, F, 0, F)


@triton.jit
def _store_gradient(d, plain_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, row, first, r, c, P,
                    N: tl.constexpr, AT: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, FLOOR: tl.constexpr,
                    LANES: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr):
    """Stores a tile of dpre in the forms that are asked for."""
    if rows_ptr is not None:
        _store_rows(d, rows_ptr, rows_scale_ptr, row, first, r, c, P, N, AT, WIDTH, B, FLOOR)
    if plain_ptr is not None:
        _store(d, plain_ptr, row, first, r, c, N, AT, WIDTH)
    if columns_ptr is not None:
        columns_ptr += (AT + first).to(tl.int64) * P + row
        columns_scale_ptr += (row // B).to(tl.int64) * N + (AT + first)
        store_columns(in_order(d, LANES, WARPS), columns_ptr, columns_scale_ptr, c, d.shape[0], WIDTH - first, P, N,
                      B, FLOOR, VECTOR, WHOLE)


@Launched
@triton.jit
def _backward_kernel(t_ptr, pre_ptr, pre_scale_ptr, bias_ptr, ends_ptr, weight_ptr, dweight_ptr, plain_ptr, rows_ptr,
                     rows_scale_ptr, columns_ptr, columns_scale_ptr, P, E, F: tl.constexpr, GATE_AT: tl.constexpr,
                     UP_AT: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
                     B: tl.constexpr, FLOOR: tl.constexpr, E_PAD: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                     VECTOR: tl.constexpr, WARPS: tl.constexpr):
    """Computes dpre, and each column tile's share of dweight: [ceil(F / C), P]. Grid [P / R * ceil(F / C)].

    `_forward_kernel` says which arguments may be None.
    """
    G: tl.constexpr = F if UP_AT is None else 2 * F
    tiles: tl.constexpr = (F + C - 1) // C
    row, tile = tl.program_id(0) // tiles * R, tl.program_id(0) % tiles
    first = tile * C
    r, c = tl.arange(0, R), tl.max_contiguous(tl.arange(0, C), VECTOR)
    LANES: tl.constexpr = 32 * VECTOR // C
    WHOLE: tl.constexpr = F % C == 0
    if columns_ptr is not None:
        r = loaded_row(R, LANES, WARPS)
    expert = None
    if bias_ptr is not None:
        expert = expert_of(row, ends_ptr, E, E_PAD)
    t = _load(t_ptr, None, None, row, first, r, c, F, 0, F)
    if pre_scale_ptr is not None:
        x = _load_rows(pre_ptr, pre_scale_ptr, row, first, r, c, P, G, GATE_AT, F, B)
    else:
        x = _load(pre_ptr, bias_ptr, expert, row, first, r, c, G, GATE_AT, F)
    value, slope = value_and_slope(x, ACT, ALPHA, LIMIT)
    weighted = t * tl.load(weight_ptr + row + r)[:, None]
    dweight_at = dweight_ptr + tile.to(tl.int64) * P + (row + r)
    if UP_AT is not None:
        if pre_scale_ptr is not None:
            up = _load_rows(pre_ptr, pre_scale_ptr, row, first, r, c, P, G, UP_AT, F, B)
        else:
            up = _load(pre_ptr, bias_ptr, expert, row, first, r, c, G, UP_AT, F)
        factor = up_value(up, ACT, LIMIT)
        tl.store(dweight_at, tl.sum(t * (value * factor), 1))
        value = up_slope(value, up, LIMIT)  # here, so that up takes no registers below
        _store_gradient(weighted * factor * slope, plain_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr,
                        row, first, r, c, P, G, GATE_AT, F, B, FLOOR, LANES, WARPS, VECTOR, WHOLE)
        _store_gradient(weighted * value, plain_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr,
                        row, first, r, c, P, G, UP_AT, F, B, FLOOR, LANES, WARPS, VECTOR, WHOLE)
    else:
        tl.store(dweight_at, tl.sum(t * value, 1))
        _store_gradient(weighted * slope, plain_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr,
                        row, first, r, c, P, G, GATE_AT, F, B, FLOOR, LANES, WARPS, VECTOR, WHOLE)


@triton.jit
def _load_part(ptr, scale_ptr, bias_ptr, expert, row, first, r, c, P, N: tl.constexpr, AT: tl.constexpr,
               WIDTH: tl.constexpr, B: tl.constexpr):
    """Loads the columns first + c of a half as float32, with zeros outside: plain ones, or what `_store_rows` stored.

    `first` need not be a multiple of B, and may be negative.
    """
    f = first + c
    inside = (f >= 0) & (f < WIDTH)
    x = tl.load(ptr + _origin(row, first, N, AT) + _offset(r, c, N), inside[None, :], other=0)
    if scale_ptr is not None:
        # B columns lie in two blocks at most.
        block = tl.maximum(first, 0) // B
        at = scale_ptr + (AT // WIDTH * ((WIDTH + B - 1) // B) + block).to(tl.int64) * P + (row + r)
        byte = tl.load(at, mask=(block * B < WIDTH) & (r >= 0), other=0)
        next_byte = tl.load(at + P, mask=((block + 1) * B < WIDTH) & (r >= 0), other=0)
        scale = tl.where((f // B == block)[None, :], power_of_two(byte)[:, None], power_of_two(next_byte)[:, None])
        return tl.where(inside[None, :], from_e4m3(x) * scale, 0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + (expert * N + AT + first) + c, inside, other=0.0)
        x = (x.to(tl.float32) + bias.to(tl.float32)[None, :]).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _load_both(ptr, scale_ptr, bias_ptr, expert, row, first, r, c, P, N: tl.constexpr, AT: tl.constexpr,
               WIDTH: tl.constexpr, B: tl.constexpr):
    """Loads, for the columns first + c of two halves that follow each other, those of one half at AT."""
    x = _load_part(ptr, scale_ptr, bias_ptr, expert, row, first, r, c, P, N, AT, WIDTH, B)
    y = _load_part(ptr, scale_ptr, bias_ptr, expert, row, first - WIDTH, r, c, P, N, AT, WIDTH, B)
    return tl.where((first + c < WIDTH)[None, :], x, y)


@Launched
@triton.jit
def _backward_across_kernel(t_ptr, pre_ptr, pre_scale_ptr, bias_ptr, ends_ptr, weight_ptr, dweight_ptr, plain_ptr,
                            rows_ptr, rows_scale_ptr, P, E, F: tl.constexpr, GATE_AT: tl.constexpr,
                            UP_AT: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
                            B: tl.constexpr, FLOOR: tl.constexpr, E_PAD: tl.constexpr, R: tl.constexpr,
                            C: tl.constexpr):
    """`_backward_kernel` where a block of dpre lies across gate and up. Grid [P / R * ceil(2F / C)].

    A program has C columns of dpre, in one tile of both halves. It reads t, gate and up at each of its columns, so
    they are read twice in all.
    """
    G: tl.constexpr = 2 * F
    tiles: tl.constexpr = (G + C - 1) // C
    row, tile = tl.program_id(0) // tiles * R, tl.program_id(0) % tiles
    first = tile * C
    r, c = tl.arange(0, R), tl.arange(0, C)
    second = first + c >= F  # the half of a column in memory
    expert = None
    if bias_ptr is not None:
        expert = expert_of(row, ends_ptr, E, E_PAD)
    t = _load_both(t_ptr, None, None, None, row, first, r, c, P, F, 0, F, B)
    value, slope = value_and_slope(
        _load_both(pre_ptr, pre_scale_ptr, bias_ptr, expert, row, first, r, c, P, G, GATE_AT, F, B), ACT, ALPHA, LIMIT)
    up = _load_both(pre_ptr, pre_scale_ptr, bias_ptr, expert, row, first, r, c, P, G, UP_AT, F, B)
    factor = up_value(up, ACT, LIMIT)
    weighted = t * tl.load(weight_ptr + row + r)[:, None]
    if first < F:  # each column of F once
        share = tl.sum(tl.where(second[None, :], 0.0, t * (value * factor)), 1)
        tl.store(dweight_ptr + tile.to(tl.int64) * P + (row + r), share)
    gate = second if GATE_AT > 0 else first + c < F
    d = tl.where(gate[None, :], weighted * factor * slope, weighted * up_slope(value, up, LIMIT))
    if plain_ptr is not None:
        _store(d, plain_ptr, row, first, r, c, G, 0, G)
    _store_rows(d, rows_ptr, rows_scale_ptr, row, first, r, c, P, G, 0, G, B, FLOOR)


@Launched
@triton.jit
def _sum_shares_kernel(shares_ptr, out_ptr, P, N: tl.constexpr, R: tl.constexpr):
    """Sums shares [N, P] over N, in order, to out [P]. Grid [P / R]."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    total = tl.zeros([R], tl.float32)
    for i in tl.range(N, loop_unroll_factor=8):
        total += tl.load(shares_ptr + tl.cast(i, tl.int64) * P + rows)
    tl.store(out_ptr + rows, total)


@Launched
@triton.jit
def _block_sums_kernel(x_ptr, weight_ptr, out_ptr, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Sums each R rows of x, times their weights if given, to out [P / R, N]. Grid [P / R * ceil(N / C)]."""
    tiles: tl.constexpr = (N + C - 1) // C
    block, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C
    r, c = tl.arange(0, R), tl.arange(0, C)
    x = _load(x_ptr, None, None, block * R, first, r, c, N, 0, N)
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + block * R + r)[:, None]
    tl.store(out_ptr + _origin(block, first, N, 0) + c, tl.sum(x, 0), c < N - first)


@Launched
@triton.jit
def _group_sums_kernel(sums_ptr, ends_ptr, out_ptr, N: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr,
                       C: tl.constexpr):
    """Sums the results of `_block_sums_kernel` over each group, to out [E, N]. Grid [E * ceil(N / C)]."""
    tiles: tl.constexpr = (N + C - 1) // C
    expert, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C
    b, c = tl.arange(0, BLOCKS), tl.arange(0, C)
    block = tl.load(ends_ptr + expert - 1, expert > 0, other=0) // R
    end = tl.load(ends_ptr + expert) // R
    total = tl.zeros([BLOCKS, C], tl.float32)
    while block < end:
        total += tl.load(sums_ptr + _origin(block, first, N, 0) + _offset(b, c, N),
                         (b < end - block)[:, None] & (c < N - first)[None, :], other=0.0)
        block += BLOCKS
    tl.store(out_ptr + _origin(expert, first, N, 0) + c, tl.sum(total, 0), c < N - first)


@Launched
@triton.jit
def _weighted_bias_kernel(y_ptr, bias_ptr, weight_ptr, ends_ptr, out_ptr, E, N: tl.constexpr, E_PAD: tl.constexpr,
                          R: tl.constexpr, C: tl.constexpr):
    """out = y + weight * bias of the row's expert. Grid [P / R * ceil(N / C)]."""
    tiles: tl.constexpr = (N + C - 1) // C
    row, first = tl.program_id(0) // tiles * R, tl.program_id(0) % tiles * C
    r, c = tl.arange(0, R), tl.arange(0, C)
    y = _load(y_ptr, None, None, row, first, r, c, N, 0, N)
    expert = expert_of(row, ends_ptr, E, E_PAD)
    bias = tl.load(bias_ptr + (expert * N + first) + c, c < N - first, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row + r)
    _store(y + bias[None, :] * weight[:, None], out_ptr, row, first, r, c, N, 0, N)


def _places(layout: str, G: int) -> tuple:
    """F, and the columns at which gate and up begin. The activation applies to gate. An MLP has no up: None."""
    return {"mlp": (G, 0, None), "gate_up": (G // 2, 0, G // 2), "up_gate": (G // 2, G // 2, 0)}[layout]


def _bytes(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.uint8)


def _num_experts(bias_EN: torch.Tensor | None) -> int:
    return 1 if bias_EN is None else bias_EN.shape[0]


def _mx(data: torch.Tensor, scale: torch.Tensor, block: int) -> MXParts:
    return MXParts(data.view(torch.float8_e4m3fn), scale, block)


def activate(pre_PG: torch.Tensor, weight_P: torch.Tensor, activation: str, layout: str, block_size: int = 32,
             scaling_mode: str = "rceil", *, quantize: bool = True, keep: bool = False, alpha: float | None = None,
             limit: float | None = None, bias_EG: torch.Tensor | None = None, ends_E: torch.Tensor | None = None
             ) -> tuple:
    """`activate` of ds_mxfp8_moe/compute/activation.py, which explains the arguments. pre_PG is contiguous.

    Returns:
        h [P, F], a tensor in pre's dtype, or with `quantize` MXParts whose scales lie in memory as [F / block, P]. And
        what is kept: MXParts [P, G / F, F], or None.
    """
    P, G = pre_PG.shape
    F, gate_at, up_at = _places(layout, G)
    blocks = cdiv(F, block_size)
    h_PF = _bytes(pre_PG, P, F) if quantize else pre_PG.new_empty(P, F)
    h_scale = _bytes(pre_PG, blocks, P) if quantize else None
    kept_PG = _bytes(pre_PG, P, G) if keep else None
    kept_scale = _bytes(pre_PG, G // F * blocks, P) if keep else None
    tile, E = FORWARD, _num_experts(bias_EG)
    if P:
        _forward_kernel[(tile.programs(P, F), )](
            pre_PG, bias_EG, ends_E, weight_P, h_PF, h_scale, kept_PG, kept_scale, P, E, F=F, GATE_AT=gate_at,
            UP_AT=up_at, ACT=activation, ALPHA=alpha, LIMIT=limit, B=block_size, FLOOR=scaling_mode == "floor",
            E_PAD=next_power_of_2(E), R=tile.rows, C=tile.columns, num_warps=tile.warps)
    h = _mx(h_PF, h_scale.t(), block_size) if quantize else h_PF
    if not keep:
        return h, None
    halves = (G // F, -1)
    return h, _mx(kept_PG.unflatten(1, halves), kept_scale.unflatten(0, halves).permute(2, 0, 1), block_size)


def activate_backward(t_PF: torch.Tensor, kept: torch.Tensor | MXParts, weight_P: torch.Tensor, activation: str,
                      layout: str, block_size: int = 32, scaling_mode: str = "rceil", *, plain: bool = False,
                      rows: bool = False, columns: bool = False, alpha: float | None = None,
                      limit: float | None = None, bias_EG: torch.Tensor | None = None,
                      ends_E: torch.Tensor | None = None) -> tuple:
    """`activate_backward` of ds_mxfp8_moe/compute/activation.py, which explains the arguments. t_PF is contiguous.

    Returns:
        The fields of its `Gradients`, with MXParts in place of MXTensors.
    """
    pre_PG: Any = kept
    pre_scale = None
    if isinstance(kept, MXParts):
        pre_PG = kept.qdata.view(torch.uint8).flatten(1)
        pre_scale = kept.scale_bytes.permute(1, 2, 0).contiguous()
        bias_EG = ends_E = None  # what was kept includes the bias
    (P, F), G = t_PF.shape, pre_PG.shape[1]
    _, gate_at, up_at = _places(layout, G)
    across = rows and F != G and F % block_size != 0
    if across and columns:  # no kernel writes both
        backward = partial(activate_backward, t_PF, kept, weight_P, activation, layout, block_size, scaling_mode,
                           alpha=alpha, limit=limit, bias_EG=bias_EG, ends_E=ends_E)
        return *backward(plain=plain, rows=True)[:3], backward(columns=True)[3]
    dweight_P = t_PF.new_empty(P, dtype=torch.float32)
    dpre = rows_PG = rows_scale = columns_GP = columns_scale = None
    if plain:
        dpre = t_PF.new_empty(P, G)
    if rows:
        rows_PG, rows_scale = _bytes(t_PF, P, G), _bytes(t_PF, cdiv(G, block_size), P)
    if columns:
        columns_GP, columns_scale = _bytes(t_PF, G, P), _bytes(t_PF, cdiv(P, block_size), G)
    if P:
        with_columns = BACKWARD_COLUMNS if limit is None else BACKWARD_COLUMNS_CLAMPED
        tile = with_columns[block_size] if columns else BACKWARD
        tiles, E = cdiv(F, tile.columns), _num_experts(bias_EG)
        shares = dweight_P if tiles == 1 else dweight_P.new_empty(tiles, P)
        constants = dict(F=F, GATE_AT=gate_at, UP_AT=up_at, ACT=activation, ALPHA=alpha, LIMIT=limit, B=block_size,
                         FLOOR=scaling_mode == "floor", E_PAD=next_power_of_2(E), R=tile.rows, C=tile.columns,
                         num_warps=tile.warps)
        if across:
            _backward_across_kernel[(tile.programs(P, G), )](
                t_PF, pre_PG, pre_scale, bias_EG, ends_E, weight_P, shares, dpre, rows_PG, rows_scale, P, E,
                **constants)
        else:
            _backward_kernel[(tile.programs(P, F), )](
                t_PF, pre_PG, pre_scale, bias_EG, ends_E, weight_P, shares, dpre, rows_PG, rows_scale, columns_GP,
                columns_scale, P, E, **constants, VECTOR=tile.vector, WARPS=tile.warps, maxnreg=tile.registers)
        if tiles > 1:
            _sum_shares_kernel[(P // 128, )](shares, dweight_P, P, tiles, 128, num_warps=4)
    dpre_rows = _mx(rows_PG, rows_scale.t(), block_size) if rows else None
    dpre_columns = _mx(columns_GP, columns_scale.t(), block_size) if columns else None
    return dweight_P, dpre, dpre_rows, dpre_columns


def group_sums(x_PN: torch.Tensor, ends_E: torch.Tensor, weight_P: torch.Tensor | None = None) -> torch.Tensor:
    """Sums the rows of each group, times weight_P if given: [E, N] float32.

    x_PN: bf16, fp16 or fp32, contiguous. The order of additions is fixed. An empty group gives 0.
    """
    (P, N), E = x_PN.shape, ends_E.shape[0]
    R, C = 128, 128
    sums = x_PN.new_empty(P // R, N, dtype=torch.float32)
    out = x_PN.new_empty(E, N, dtype=torch.float32)
    if P:
        _block_sums_kernel[(P // R * cdiv(N, C), )](x_PN, weight_P, sums, N, R, C, num_warps=8)
    _group_sums_kernel[(E * cdiv(N, 64), )](sums, ends_E, out, N, R, 32, 64, num_warps=4)
    return out


def add_weighted_bias(y_PN: torch.Tensor, bias_EN: torch.Tensor, weight_P: torch.Tensor,
                      ends_E: torch.Tensor) -> torch.Tensor:
    """y + weight * bias of each row's expert, in float32. y_PN is contiguous."""
    (P, N), E = y_PN.shape, bias_EN.shape[0]
    out = torch.empty_like(y_PN, dtype=torch.float32)
    if P:
        _weighted_bias_kernel[(P // 32 * cdiv(N, 128), )](
            y_PN, bias_EN, weight_P, ends_E, out, E, N=N, E_PAD=next_power_of_2(E), R=32, C=128, num_warps=4,
            enable_fp_fusion=False)
    return out
