# SPDX-License-Identifier: Apache-2.0
"""The work on rows before and after an all-to-all: which rows go where, and what a message holds.

The transports over deepspeed.comm share it. Messages are uint8 [S, width]: each row is a token's data, its scales and
its routing weights. What `pack` and `partial_sums` join, `expand` and `sums` take apart. Both sides are in plain torch
and in Triton kernels, with the same bits. The kernels align each row, so a message's width differs between the two.

Letters in tensor names: those of this package, and N rows from which the rows to send are chosen.
"""

from typing import NamedTuple

import torch

from ..compute import casts
from ..compute.mx import MXTensor
from ..ops.device import has_kernels
from ..ops.mx_format import MXParts
from . import RowFormat, padded, room_for, with_zero_row

PLAIN = RowFormat(mxfp8=False)


class Numbered(NamedTuple):
    """Pairs of (rank, row), in this order: whether the row goes there, and how many pairs before it do."""

    wanted: torch.Tensor
    place: torch.Tensor
    pair: torch.Tensor


class Sends(NamedTuple):
    """The rows that a rank sends in one all-to-all.

    Attributes:
        row_S: int64 [S], the row of N in each row sent, ascending by (rank, row).
        rank_S: int64 [S], the rank that it goes to.
        slot_WN: int64 [W, N], contiguous: the row sent in which row n goes to rank w. S where it does not.
    """

    row_S: torch.Tensor
    rank_S: torch.Tensor
    slot_WN: torch.Tensor


def runs_kernels(device: torch.device, hidden: int) -> bool:
    """Whether the Triton kernels take rows of this size. Else plain torch does the same."""
    return has_kernels(device) and hidden % 32 == 0


def wanted_by(expert_NK: torch.Tensor, experts_per_rank: int, ranks: int) -> torch.Tensor:
    """bool [N, W]: whether rank w serves a choice of row n. A choice below 0 is served by none."""
    rank_NK = torch.where(expert_NK >= 0, expert_NK.div(experts_per_rank, rounding_mode="floor"), ranks)
    wanted = torch.zeros((expert_NK.shape[0], ranks + 1), dtype=torch.bool, device=expert_NK.device)
    return wanted.scatter_(1, rank_NK, True)[:, :ranks]


def numbered(wanted_NW: torch.Tensor) -> Numbered:
    """Numbers the pairs that are wanted. This needs nothing that the host has to know."""
    wanted = wanted_NW.t().reshape(-1)
    return Numbered(wanted, wanted.cumsum(0) - 1, torch.arange(wanted.shape[0], device=wanted.device))


def sends(pairs: Numbered, num_rows: int, ranks: int) -> Sends:
    """The rows to send. `num_rows`: S, how many pairs are wanted."""
    S, N = num_rows, pairs.wanted.shape[0] // ranks
    slot = torch.where(pairs.wanted, pairs.place, S)
    pair_S = slot.new_empty(S + 1).scatter_(0, slot, pairs.pair)[:S]
    return Sends(pair_S % max(N, 1), pair_S.div(max(N, 1), rounding_mode="floor"), slot.view(ranks, N))


def experts_there(expert_NK: torch.Tensor, experts_per_rank: int, to: Sends) -> torch.Tensor:
    """The choices beside each row sent, int16 or int32 [S, K]: local experts of its rank. -1: others serve it."""
    E = experts_per_rank
    local_SK = expert_NK.index_select(0, to.row_S) - to.rank_S.unsqueeze(1) * E
    dtype = torch.int16 if E <= torch.iinfo(torch.int16).max else torch.int32
    return torch.where((local_SK >= 0) & (local_SK < E), local_SK, -1).to(dtype)


def padding(sizes_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For groups of these sizes: their ends once padded, and by how many rows padding moves each of them."""
    padded_E = padded(sizes_E)
    ends_E = padded_E.cumsum(0)
    return ends_E, (ends_E - padded_E) - (sizes_E.cumsum(0) - sizes_E)


def padded_rows(sizes: list) -> int:
    """P for groups of these sizes."""
    return room_for(sum(map(padded, sizes)))


def sort_by_expert(local_RK: torch.Tensor, choices: int, shift_E: torch.Tensor, num_rows: int,
                   order_R: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts received choices by expert, in a stable order. Each group is padded to whole tiles.

    Args:
        local_RK: local experts of received rows, -1 for none. Others that do not exist, of a failed exchange, do no
            harm.
        choices: how many of them are not -1.
        shift_E: of `padding`.
        num_rows: P.
        order_R: the order in which rows count inside an expert. None: as they arrived.

    Returns:
        slot_RK and source_P, as in Plan.
    """
    (R, K), E, P = local_RK.shape, shift_E.shape[0], num_rows
    flat = (local_RK if order_R is None else local_RK.index_select(0, order_R)).reshape(-1)
    expert, order = (of_all[:choices] for of_all in torch.where(flat < 0, E, flat).sort(stable=True))
    place = torch.arange(choices, device=flat.device) + shift_E.index_select(0, expert.clamp(max=E - 1).int())
    if order_R is not None:
        order = order_R.index_select(0, order.div(K, rounding_mode="floor")) * K + order % K
    slot_RK = order.new_full((R * K, ), P).scatter_(0, order, place).view(R, K)
    return slot_RK, order.new_full((P, ), R * K).scatter_(0, place, order)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A 2-D tensor as rows of uint8."""
    if x.numel() == 0:  # an empty tensor may have any strides, and view(dtype) refuses some
        return x.new_empty((x.shape[0], x.shape[1] * x.element_size()), dtype=torch.uint8)
    # view(-1) comes first, since a single column counts as contiguous at any stride, and view(dtype) refuses some.
    return x.contiguous().view(-1).view(torch.uint8).view(x.shape[0], -1)


def _sizes(hidden: int, row_format: RowFormat, dtype: torch.dtype, weights: int) -> tuple[int, int, int]:
    """Bytes of a row's data and of its scales, and its number of weights."""
    if row_format.mxfp8:
        return hidden, -(-hidden // row_format.block_size), weights
    return hidden * dtype.itemsize, 0, weights


def _split(message: torch.Tensor, sizes: tuple) -> tuple:
    """Data, scales and weights of a plain message. Each gets a row of zeros, and memory of its own, which is aligned
    for any dtype."""
    data, scale, weights = sizes
    return tuple(with_zero_row(part) for part in message.split([data, scale, 4 * weights], dim=1))


def _mx(data: torch.Tensor, scale: torch.Tensor, row_format: RowFormat, dtype: torch.dtype) -> MXTensor:
    return MXTensor.of(MXParts(data.view(torch.float8_e4m3fn), scale, row_format.block_size), dtype)


def pack(x_NH: torch.Tensor, row_format: RowFormat, weight_NK: torch.Tensor | None, row_S: torch.Tensor,
         slot_WN: torch.Tensor, top_k: int) -> torch.Tensor:
    """The message of rows on their way. Each row of x is quantized once, however often it is sent.

    Args:
        weight_NK: travels with the rows, in float32.
        row_S, slot_WN: as in Sends.
        top_k: how often a row is sent at most.
    """
    if runs_kernels(x_NH.device, x_NH.shape[1]):
        from ..ops.triton_kernels import permute
        fields = _fields(x_NH, row_format, weight_NK)
        return permute.pack_rows(*fields, slot_WN, row_S.shape[0], top_k)  # type: ignore[call-arg]
    return _joined(x_NH, row_format, weight_NK).index_select(0, row_S)


def _fields(x_NH: torch.Tensor, row_format: RowFormat, weight_NK: torch.Tensor | None) -> tuple:
    """Data, scales and weights of rows as they travel. None: they have none."""
    weight_NK = None if weight_NK is None else weight_NK.float()
    if not row_format.mxfp8:
        return x_NH, None, weight_NK
    mx_NH = casts.quantize(x_NH, row_format.block_size, row_format.scaling_mode)
    return mx_NH.qdata, mx_NH.scale_bytes, weight_NK


def _joined(x_NH: torch.Tensor, row_format: RowFormat, weight_NK: torch.Tensor | None) -> torch.Tensor:
    """Rows as a plain message."""
    return torch.cat([as_bytes(part) for part in _fields(x_NH, row_format, weight_NK) if part is not None], dim=1)


def expand(message_R: torch.Tensor, hidden: int, row_format: RowFormat, dtype: torch.dtype, weights: bool,
           slot_RK: torch.Tensor, source_P: torch.Tensor) -> tuple:
    """What `Transport.dispatch` returns, out of the message that arrived.

    Kernels give an MXFP8 result's scales as a view of K-block-major memory, as GEMMs read them.

    Args:
        hidden, row_format, dtype, weights: of the rows that were packed.
    """
    K = slot_RK.shape[1]
    sizes = _sizes(hidden, row_format, dtype, K if weights else 0)
    if runs_kernels(message_R.device, hidden):
        from ..ops.triton_kernels import message, permute  # Triton exists on Linux alone
        data, scale, weight = message.unpack_rows(message_R, *sizes)
        x_PH, scale_BP, weight_P = permute.expand_rows(data, scale, weight, slot_RK, source_P)
        x_PH = _mx(x_PH, scale_BP.t(), row_format, dtype) if row_format.mxfp8 else x_PH.view(dtype)
        return x_PH, weight_P if weights else None
    data, scale, weight = _split(message_R, sizes)
    row_P = source_P.div(K, rounding_mode="floor")
    x_PH = data.index_select(0, row_P)
    x_PH = _mx(x_PH, scale.index_select(0, row_P), row_format, dtype) if row_format.mxfp8 else x_PH.view(dtype)
    return x_PH, weight.view(torch.float32).view(-1).index_select(0, source_P) if weights else None


def partial_sums(y_PH: torch.Tensor, row_format: RowFormat, dtype: torch.dtype, weight_P: torch.Tensor | None,
                 slot_RK: torch.Tensor) -> torch.Tensor:
    """The message of sums on their way back: of each received row's outputs, in float32 in ascending choice, rounded
    once. `weight_P` goes back to its choices beside it."""
    if runs_kernels(y_PH.device, y_PH.shape[1]):
        from ..ops.triton_kernels import unpermute
        return unpermute.combine_rows(y_PH, weight_P, slot_RK, dtype, row_format.block_size if row_format.mxfp8 else 0,
                                      row_format.scaling_mode)
    H = y_PH.shape[1]
    y_PH = with_zero_row(y_PH)
    partial_RH = y_PH.new_zeros((slot_RK.shape[0], H), dtype=torch.float32)
    for slot_R in slot_RK.unbind(1):
        partial_RH += y_PH.index_select(0, slot_R)
    weight_RK = None
    if weight_P is not None:
        weight_RK = with_zero_row(weight_P.view(-1, 1)).index_select(0, slot_RK.view(-1)).view(slot_RK.shape)
    return _joined(partial_RH if row_format.mxfp8 else partial_RH.to(dtype), row_format, weight_RK)


def pass_on(message_S: torch.Tensor, hidden: int, row_format: RowFormat, dtype: torch.dtype, weights: int,
            slot_WN: torch.Tensor, top_k: int) -> torch.Tensor:
    """The message of sums that go on: of float32 rows as `sums` adds them, rounded once to the row format.

    Args:
        row_format, dtype: of the result.
    """
    if runs_kernels(message_S.device, hidden):
        from ..ops.triton_kernels import unpermute
        return unpermute.pass_on_rows(message_S, slot_WN, hidden, weights, top_k, dtype,
                                      row_format.block_size if row_format.mxfp8 else 0, row_format.scaling_mode)
    sum_NH, weight_NK = sums(message_S, hidden, PLAIN, torch.float32, weights, slot_WN, top_k)
    return _joined(sum_NH if row_format.mxfp8 else sum_NH.to(dtype), row_format, weight_NK if weights else None)


def sums(message_S: torch.Tensor, hidden: int, row_format: RowFormat, dtype: torch.dtype, weights: int,
         slot_WN: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds up what came back for each of the N rows that were sent: in float32, in ascending rank, rounded once.

    Args:
        hidden, row_format, dtype: of the rows that come back. The result has the same dtype.
        weights: numbers beside each row: K or 0.
        top_k: how often a row was sent at most.

    Returns:
        y_NH, and float32 [N, weights].
    """
    if runs_kernels(message_S.device, hidden):
        from ..ops.triton_kernels import unpermute
        return unpermute.sum_rows(message_S, slot_WN, hidden, weights, top_k, dtype,
                                  row_format.block_size if row_format.mxfp8 else 0)
    data, scale, weight = _split(message_S, _sizes(hidden, row_format, dtype, weights))
    rows_SH = _mx(data, scale, row_format, torch.float32).dequantize() if row_format.mxfp8 else data.view(dtype)
    y_NH = rows_SH.new_zeros((slot_WN.shape[1], hidden), dtype=torch.float32)
    weight_NK = rows_SH.new_zeros((slot_WN.shape[1], weights), dtype=torch.float32)
    for slot_N in slot_WN:
        y_NH += rows_SH.index_select(0, slot_N)
        if weights:
            weight_NK += weight.view(torch.float32).index_select(0, slot_N)
    return y_NH.to(dtype), weight_NK
