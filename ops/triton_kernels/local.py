# SPDX-License-Identifier: Apache-2.0
"""Plan, dispatch and combine where one rank holds all experts. Nothing travels, and the host learns no counts.

    plan_rows       sorts the choices by expert: where each choice's row lies, and which choice each row serves
    dispatch_rows   copies each token to the rows of its choices, quantized once if asked for
    combine_rows    sums the rows of each token's choices

Letters: T tokens, K choices of a token, N = T * K choices in the order of tokens, E experts, H hidden size, P rows.
Each expert's rows form a group, in the order of choices, padded with zeros to a multiple of 128. P is the most rows
that N choices can need. Rows behind the last group are padding too.

    slot_TK     int32: the row of a choice. P for a choice that was dropped
    source_P    int32: the choice that a row serves. N for padding

The oracle is ds_mxfp8_moe/transport/local.py in plain torch, bit for bit. All kernels are bound by memory: each byte
is read once and written once.
"""

import torch
import triton
import triton.language as tl

from .launch import Launched
from .library import cdiv
from .message import lanes_for, places_of_row
from .unpermute import combine_tile, partial_sum, rounded, routing_weights, values

CHUNK = 128  # choices that one program counts and places
GROUP = 128  # rows to which groups are padded
SPAN = 1024  # chunks that the scan loads together


@Launched
@triton.jit(do_not_specialize=["N", "chunks"])
def _count_kernel(
        expert_ptr,  # [N] int64
        count_ptr,  # [E, chunks] int32
        total_ptr,  # [E] int32, zeros
        N, chunks, E: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """Counts each chunk's choices of each expert, and adds them to the totals. Grid (chunks, )."""
    chunk = tl.program_id(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(expert_ptr + i, mask=i < N, other=-1)
    count = tl.histogram(tl.maximum(expert, 0).to(tl.int32), LANES, mask=(expert >= 0) & (expert < E))
    lane = tl.arange(0, LANES)
    tl.store(count_ptr + lane * chunks + chunk, count, mask=lane < E)
    tl.atomic_add(total_ptr + lane, count, mask=(lane < E) & (count > 0), sem="relaxed")  # integers: any order


@Launched
@triton.jit(do_not_specialize=["N", "P", "chunks"])
def _scan_kernel(
        count_ptr,  # [E, chunks] int32. Becomes the row of each chunk's first choice of each expert
        total_ptr,  # [E] int32
        ends_ptr,  # [E] int32
        source_ptr,  # [P] int32
        N, P, chunks, E: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr):
    """Finds where the groups lie, and marks their padding. Grid (E, )."""
    expert = tl.program_id(0)
    lane = tl.arange(0, LANES)
    total = tl.load(total_ptr + lane, mask=lane < E, other=0)
    padded = (total + GROUP - 1) // GROUP * GROUP
    start = tl.sum(tl.where(lane < expert, padded, 0), 0)
    own = tl.sum(tl.where(lane == expert, total, 0), 0)
    end = start + (own + GROUP - 1) // GROUP * GROUP
    tl.store(ends_ptr + expert, end)
    row = start
    for first in range(0, chunks, SPAN):
        chunk = first + tl.arange(0, SPAN)
        at = count_ptr + expert * chunks + chunk
        count = tl.load(at, mask=chunk < chunks, other=0)
        tl.store(at, row + tl.cumsum(count, 0) - count, mask=chunk < chunks)
        row += tl.sum(count, 0)
    r = tl.arange(0, GROUP)
    tl.store(source_ptr + row + r, tl.zeros([GROUP], tl.int32) + N, mask=row + r < end)
    # The rows behind the last group: every program marks its share.
    for first in range(tl.sum(padded, 0) + expert * GROUP, P, E * GROUP):
        tl.store(source_ptr + first + r, tl.zeros([GROUP], tl.int32) + N, mask=first + r < P)


@Launched
@triton.jit(do_not_specialize=["N", "P", "chunks"])
def _place_kernel(
        expert_ptr,  # [N] int64
        first_ptr,  # [E, chunks] int32, from _scan_kernel
        slot_ptr,  # [N] int32
        source_ptr,  # [P] int32
        N, P, chunks, E: tl.constexpr, CHUNK: tl.constexpr):
    """Places each choice behind those of its expert that come before it. Grid (chunks, )."""
    chunk = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    i = chunk * CHUNK + lane
    expert = tl.load(expert_ptr + i, mask=i < N, other=-1).to(tl.int32)
    kept = (expert >= 0) & (expert < E)
    before = (expert[:, None] == expert[None, :]) & (lane[None, :] < lane[:, None])
    row = tl.load(first_ptr + expert * chunks + chunk, mask=kept, other=0) + tl.sum(before.to(tl.int32), 1)
    tl.store(slot_ptr + i, tl.where(kept, row, P), mask=i < N)
    tl.store(source_ptr + row, i, mask=kept)


@Launched
@triton.jit(do_not_specialize=["T", "P"])
def _dispatch_kernel(
        x_ptr,  # [T, X_STRIDE]
        weight_ptr,  # [T, K] float32, or None
        slot_ptr,  # [T, K] int32
        source_ptr,  # [P] int32
        out_ptr,  # [P, H] of x's dtype, or uint8 for e4m3
        out_scale_ptr,  # [ceil(H / B), P] uint8, or None
        out_weight_ptr,  # [P] float32, or None
        T, P, X_STRIDE, H: tl.constexpr, K: tl.constexpr, B: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr,
        GROUP: tl.constexpr, WORD: tl.constexpr):
    """Writes the rows of one token, or the padding of GROUP rows. Grid (T + P / GROUP, )."""
    program = tl.program_id(0)
    if program < T:
        t = program.to(tl.int64)
        slots = ()
        for k in tl.static_range(K):
            slots = slots + (tl.load(slot_ptr + t * K + k).to(tl.int64), )
        for first in range(0, H, BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + t * X_STRIDE + column, mask=column < H, other=0.0)
            if B:
                block = first // B + tl.arange(0, BLOCK // B)
                data, byte = rounded(x.to(tl.float32), B, FLOOR)
                x = tl.reshape(data, [BLOCK])
            for k in tl.static_range(K):
                tl.store(out_ptr + slots[k] * H + column, x, mask=(column < H) & (slots[k] < P))
                if B:
                    tl.store(out_scale_ptr + block.to(tl.int64) * P + slots[k], byte,
                             mask=(block * B < H) & (slots[k] < P))
        if weight_ptr is not None:
            for k in tl.static_range(K):
                tl.store(out_weight_ptr + slots[k], tl.load(weight_ptr + t * K + k), mask=slots[k] < P)
    else:
        p = (program - T).to(tl.int64) * GROUP + tl.arange(0, GROUP)
        padding = tl.load(source_ptr + p) >= T * K
        if tl.max(padding.to(tl.int32), 0):
            for first in range(0, H, WORD):
                column = first + tl.arange(0, WORD)
                tl.store(out_ptr + p[:, None] * H + column[None, :],
                         tl.zeros([GROUP, WORD], out_ptr.dtype.element_ty),
                         mask=padding[:, None] & (column < H)[None, :])
            if B:
                for block in range(0, (H + B - 1) // B):
                    tl.store(out_scale_ptr + tl.cast(block, tl.int64) * P + p, tl.zeros([GROUP], tl.uint8),
                             mask=padding)
            if weight_ptr is not None:
                tl.store(out_weight_ptr + p, tl.zeros([GROUP], tl.float32), mask=padding)


@Launched
@triton.jit(do_not_specialize=["P"])
def _combine_kernel(
        y_ptr,  # [P, H]
        weight_ptr,  # [P] float32, or None
        slot_ptr,  # [T, K] int32
        out_ptr,  # [T, H]
        out_weight_ptr,  # [T, K] float32, or None
        P, H: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr, FLOOR: tl.constexpr,
        BLOCK: tl.constexpr):
    """Sums the rows of one token's choices. Grid (T, ).

    B other than 0 rounds the sum to MXFP8 and back, as if it had traveled.
    """
    t = tl.program_id(0).to(tl.int64)
    slots = places_of_row(slot_ptr, t, P, K, LANES)
    for first in range(0, H, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total = partial_sum(y_ptr, slots, column, P, H, K, K)
        if B:
            data, byte = rounded(total, B, FLOOR)
            total = tl.reshape(values(data, byte), [BLOCK])
        else:
            total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        # The same rounding as other transports, which add what arrives to 0: -0 becomes 0.
        tl.store(out_ptr + t * H + column, (0.0 + total).to(out_ptr.dtype.element_ty), mask=column < H)
    if weight_ptr is not None:
        k = tl.arange(0, LANES)
        weight = 0.0 + routing_weights(weight_ptr, slot_ptr, t, P, K, LANES)
        tl.store(out_weight_ptr + t * K + k, weight, mask=k < K)


def plan_rows(expert_TK: torch.Tensor, experts: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts the choices by expert, stably.

    Args:
        expert_TK: int64, contiguous. A choice whose id is no expert's is dropped.
        num_rows: P, enough for any choices of this number.

    Returns:
        The ends of the groups, int32 [E]; slot_TK; source_P.
    """
    N, P, device = expert_TK.numel(), num_rows, expert_TK.device
    chunks = cdiv(N, CHUNK)
    total_E = torch.zeros(experts, dtype=torch.int32, device=device)
    slot_TK = torch.empty(expert_TK.shape, dtype=torch.int32, device=device)
    source_P = torch.empty(P, dtype=torch.int32, device=device)
    if N == 0:
        return total_E, slot_TK, source_P
    ends_E, count = torch.empty_like(total_E), torch.empty((experts, chunks), dtype=torch.int32, device=device)
    lanes = lanes_for(experts)
    _count_kernel[(chunks, )](expert_TK, count, total_E, N, chunks, experts, lanes, CHUNK, num_warps=4)
    _scan_kernel[(experts, )](count, total_E, ends_E, source_P, N, P, chunks, experts, lanes, GROUP, SPAN, num_warps=4)
    _place_kernel[(chunks, )](expert_TK, count, slot_TK, source_P, N, P, chunks, experts, CHUNK, num_warps=4)
    return ends_E, slot_TK, source_P


def dispatch_rows(x_TH: torch.Tensor, weight_TK: torch.Tensor | None, slot_TK: torch.Tensor, source_P: torch.Tensor,
                  block_size: int, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Copies tokens to the rows of their choices.

    Args:
        x_TH: bf16, fp16 or fp32, any stride between rows.
        weight_TK: float32, contiguous. None: rows have no weights.
        block_size, scaling_mode: the rows are MXFP8 with these. With block_size 0 they are of x_TH's dtype.

    Returns:
        data [P, H]; scales in K-block-major memory, uint8 [ceil(H / block_size), P], or None; weights, float32 [P], or
        None.
    """
    (T, K), P, H, device = slot_TK.shape, source_P.shape[0], x_TH.shape[1], x_TH.device
    dtype = torch.float8_e4m3fn if block_size else x_TH.dtype
    out, scale, weight = torch.empty((P, H), dtype=dtype, device=device), None, None
    if block_size:
        scale = torch.empty((cdiv(H, block_size), P), dtype=torch.uint8, device=device)
    if weight_TK is not None:
        weight = torch.empty(P, dtype=torch.float32, device=device)
    if P == 0:
        return out, scale, weight
    if x_TH.stride(1) != 1:
        x_TH = x_TH.contiguous()
    tile = combine_tile(H, block_size)
    word = 16 // dtype.itemsize * 4
    data = out.view(torch.uint8) if block_size else out
    _dispatch_kernel[(T + P // GROUP, )](x_TH, weight_TK, slot_TK, source_P, data, scale, weight, T, P, x_TH.stride(0),
                                         H, K, block_size, scaling_mode == "floor", tile.block, GROUP, word,
                                         num_warps=tile.warps)
    return out, scale, weight


def combine_rows(y_PH: torch.Tensor, weight_P: torch.Tensor | None, slot_TK: torch.Tensor, dtype: torch.dtype,
                 block_size: int, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums the rows of each token's choices in float32, in the order of choices.

    Args:
        y_PH: bf16, fp16 or fp32. Padding rows are not read.
        weight_P: float32. None: no weights come back.
        block_size, scaling_mode: the sum is rounded to MXFP8 with these. With block_size 0 it is rounded to `dtype`.

    Returns:
        [T, H] in `dtype`, and the weights of the choices, float32 [T, K], 0 for dropped ones; or None.
    """
    (T, K), (P, H), device = slot_TK.shape, y_PH.shape, y_PH.device
    out, weight_TK = torch.empty((T, H), dtype=dtype, device=device), None
    if weight_P is not None:
        weight_TK = torch.empty((T, K), dtype=torch.float32, device=device)
    if T == 0:
        return out, weight_TK
    tile = combine_tile(H, block_size)
    _combine_kernel[(T, )](y_PH.contiguous(), weight_P, slot_TK, out, weight_TK, P, H, K, lanes_for(K), block_size,
                           scaling_mode == "floor", tile.block, num_warps=tile.warps)
    return out, weight_TK
