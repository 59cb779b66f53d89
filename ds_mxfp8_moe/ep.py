# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism as four differentiable functions, with torchao's names and semantics.

    forward    a2a_dispatch (MXFP8) -> permute (MXFP8) -> grouped GEMMs -> unpermute (hp) -> a2a_combine (hp)
    backward   a2a_dispatch (hp)    <- permute (hp)    <- grouped GEMMs <- unpermute (MXFP8) <- a2a_combine (MXFP8)

"hp" is high precision, the dtype of the input. A name says what each direction carries: `mxfp8_fwd_hp_bwd` is MXFP8 in
forward and hp in backward. Between the MXFP8 steps, tokens (forward) and gradients (backward) are MXTensors. Put no
arithmetic between the last GEMM, unpermute and a2a_combine: in backward it would dequantize the gradient.

Data and scales travel as one uint8 message. The caller passes the splits as lists of ints. Ranks compare splits,
widths and formats before they exchange rows, since a backend would fill rows that nobody sent with what lay in memory.
On CPUs they compare every exchange. On GPUs, where the host has to wait for the comparison, they compare the first
CHECKED exchanges of a group, and after those the host never waits. Under torch.compile each function breaks the graph
and runs eagerly, with the same bits.

T: rows of this rank, R: rows that arrive, D: columns, E: local experts, P: rows sorted by expert with their padding.
"""

import zlib
from collections.abc import Sequence
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group

from .compute.arguments import check_int, check_tensor, described
from .compute.casts import quantize
from .compute.mx import MXTensor, ScaleCalculationMode, check_quantizable
from .transport.deadline import (
    PeerError,
    all_gather,
    all_to_all,
    check_same_calls,
    ranks_of,
    tell_peers_on_error,
)

__all__ = ["a2a_combine_hp_fwd_mxfp8_bwd", "a2a_dispatch_mxfp8_fwd_hp_bwd", "generate_permute_indices",
           "permute_mxfp8_fwd_hp_bwd", "unpermute_hp_fwd_mxfp8_bwd"]

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
GRAPH_BREAK = "collectives with data-dependent sizes run eagerly"
CHECKED = 8  # exchanges of a group on GPUs that ranks compare: the first forwards and backwards

# How many exchanges of each group on GPUs were compared. Keyed weakly, so that an entry goes with its process group.
_COMPARED: WeakKeyDictionary = WeakKeyDictionary()


def _hp(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize() if isinstance(x, MXTensor) else x


def _group(name: str, group_name: Any) -> dist.ProcessGroup:
    """The process group with this name. None means all ranks. A group is returned as it is."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call torch.distributed.init_process_group first")
    if group_name is None:
        return dist.group.WORLD
    if isinstance(group_name, dist.ProcessGroup):
        return group_name
    if not isinstance(group_name, str):
        raise TypeError(f"{name}: group_name is {described(group_name)}; expected the name of a process group with "
                        "this rank, the group itself, or None")
    try:
        return _resolve_process_group(group_name)
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name}: group_name is {group_name!r}, and no process group has this name") from error


def check_rows(name: str, x: torch.Tensor) -> None:
    """Raises a TypeError or ValueError unless x is a plain 2-D tensor that an exchange can send."""
    expected = "a plain 2-D tensor of bfloat16, float16 or float32"
    check_tensor(name, x, expected, ndim=2)
    if isinstance(x, MXTensor) or x.is_meta:
        raise TypeError(f"{name} is {described(x)}; expected {expected}")


def check_counts(name: str, counts: torch.Tensor, size: int, meaning: str, rows: torch.Tensor) -> None:
    """Raises a TypeError or ValueError unless num_tokens_per_expert are integers [size] for these rows.

    Their values are checked only on the CPU: on a GPU the host would have to wait for them.
    """
    name = f"{name}: num_tokens_per_expert"
    expected = f"a tensor of integers [{size}], {meaning}"
    check_tensor(name, counts, expected, INTEGERS, ndim=1)
    if counts.shape[0] != size or counts.device != rows.device:
        raise ValueError(f"{name} is {described(counts)}; expected {expected}, on {rows.device}")
    if counts.device.type == "cpu" and ((counts < 0) | (counts > rows.shape[0])).any():
        raise ValueError(f"{name} is {counts.tolist()}; expected 0 or more rows each, of {rows.shape[0]} rows")


def _splits(name: str, splits: Any, group: dist.ProcessGroup) -> tuple[int, ...]:
    """A list of splits as ints. Raises a TypeError or ValueError unless it fits the group."""
    expected = f"a list of ints: a count of rows, 0 or more, for each of the {group.size()} ranks of the group"
    if not isinstance(splits, Sequence) or not all(isinstance(rows, Integral) for rows in splits):
        raise TypeError(f"{name} is {described(splits)}; expected {expected}")
    if len(splits) != group.size() or min(splits) < 0:
        raise ValueError(f"{name} is {list(splits)}; expected {expected}")
    return tuple(map(int, splits))


def _checked_splits(name: str, x: torch.Tensor, output_splits: Any, input_splits: Any,
                    group: dist.ProcessGroup) -> tuple:
    """Both lists of splits. Raises an error unless they fit the group and the rows."""
    check_rows(f"{name}: input", x)
    output_splits = _splits(f"{name}: output_splits", output_splits, group)
    input_splits = _splits(f"{name}: input_splits", input_splits, group)
    if sum(input_splits) != x.shape[0]:
        raise ValueError(f"{name}: input_splits {list(input_splits)} sum to {sum(input_splits)}, but the input has "
                         f"{x.shape[0]} rows")
    return output_splits, input_splits


def _check_same_exchange(x: torch.Tensor, output_splits: tuple, input_splits: tuple, group: dist.ProcessGroup,
                         phase: str, formats: str) -> None:
    """Raises a PeerError on every rank of the group if their exchanges do not fit together.

    Args:
        formats: a text, not data. It describes how rows travel in both directions.
    """
    if x.device.type != "cpu":
        compared = _COMPARED.get(group, 0)
        if compared == CHECKED:
            return
        _COMPARED[group] = compared + 1
    W, where = group.size(), f"{phase} of rows [., {x.shape[1]}] of {x.dtype}, {formats}"
    mine = torch.tensor([zlib.crc32(where.encode()), *output_splits, *input_splits], device=x.device)
    of_all = all_gather(mine, group, phase).cpu()
    check_same_calls(group, of_all[:, 0].tolist(), where)
    expected_WW, sent_WW = of_all[:, 1:1 + W], of_all[:, 1 + W:]
    wrong = (expected_WW.t() != sent_WW).nonzero().tolist()
    if wrong:
        sender, receiver = wrong[0]
        one, other = (f"rank {ranks_of(group)[place]}" for place in wrong[0])
        sent, expected = sent_WW[sender].tolist(), expected_WW[receiver].tolist()
        raise PeerError(f"{one} sends {sent[receiver]} rows to {other} in {phase}, and {other} expects "
                          f"{expected[sender]}: the input_splits of {one} are {sent}, the output_splits of {other} "
                          f"are {expected}")


def _exchange(x: torch.Tensor, output_splits: tuple, input_splits: tuple, group: dist.ProcessGroup, phase: str,
              cast: tuple | None, cast_back: tuple | None) -> torch.Tensor:
    """Sends rows to each rank and returns the rows that arrive.

    `cast`: the block size and scaling mode in which rows are quantized. Data and scales then travel as one uint8
    message, since gloo has no float8, and one collective is faster than two. None sends rows as they are. `cast_back`:
    the same for the exchange of gradients in the opposite direction. The ranks compare both.
    """
    formats = f"{_format(cast)}, and {_format(cast_back)} on the way back"
    _check_same_exchange(x, output_splits, input_splits, group, phase, formats)
    message, mx = x.contiguous(), None
    if cast is not None:
        mx = quantize(x, *cast)
        message = torch.cat([mx.qdata.view(torch.uint8), mx.scale.view(torch.uint8)], dim=1)
    arrived = message.new_empty((sum(output_splits), message.shape[1]))
    all_to_all(arrived, message, output_splits, input_splits, group, phase)
    if mx is None:
        return arrived
    data, scale = arrived.split([mx.shape[1], mx.scale.shape[1]], dim=1)
    return mx.with_parts(data.contiguous().view(torch.float8_e4m3fn), scale.contiguous().view(torch.float8_e8m0fnu))


def _format(cast: tuple | None) -> str:
    return "unquantized" if cast is None else f"MXFP8 in blocks of {cast[0]} ({cast[1]})"


def gather_rows(x: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
    """x[index_P]. An index below 0 or past the last row gives a row of zeros, with scale byte 0."""
    if isinstance(x, MXTensor):
        return x.with_parts(gather_rows(x.qdata.view(torch.uint8), index_P).view(torch.float8_e4m3fn),
                            gather_rows(x.scale_bytes, index_P))
    if x.shape[0] == 0:
        return x.new_zeros((index_P.shape[0], x.shape[1]))
    padding = (index_P < 0) | (index_P >= x.shape[0])
    return x.index_select(0, index_P.clamp(0, x.shape[0] - 1)).masked_fill(padding.unsqueeze(1), 0)


def _scatter_rows(x_PN: torch.Tensor, index_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The inverse of gather_rows: row index_P[i] of the result is x_PN[i]. All other rows are zeros."""
    out = x_PN.new_zeros((num_rows + 1, x_PN.shape[1]))
    # All padding goes to one extra row, which is cut off.
    out.index_copy_(0, torch.where(index_P < 0, num_rows, index_P).long(), x_PN)
    return out[:num_rows]


def generate_permute_indices(tokens_per_expert_group: torch.Tensor, experts_per_rank: int, num_ranks: int,
                             max_len: int, alignment: int) -> tuple:
    """Finds where each row of the expert-sorted, padded layout comes from. Runs on the device; the host never waits.

    Args:
        tokens_per_expert_group: int [num_ranks * experts_per_rank], rank-major: rows that rank r sent to local expert
            e, in the order in which they arrived.
        max_len: P, the rows of the layout. At least the sum of the padded groups.
        alignment: each expert's rows are padded to a multiple of it. An expert without rows gets one multiple.

    Returns:
        permuted_indices, int32 [P]: the arrived row at each place, -1 for padding.
        m_sizes, int32 [E]: padded rows of each expert.
        m_offsets, int32 [E]: where each expert's rows end.

    Raises:
        TypeError, ValueError: for bad arguments. Values of the counts are checked only on the CPU.
    """
    name = "generate_permute_indices"
    for label, value, least in (("experts_per_rank", experts_per_rank, 1), ("num_ranks", num_ranks, 1),
                                ("max_len", max_len, 0), ("alignment", alignment, 1)):
        check_int(f"{name}: {label}", value, least)
    size = experts_per_rank * num_ranks
    expected = f"integers [{size}], 0 or more, for {num_ranks} ranks x {experts_per_rank} experts"
    check_tensor(f"{name}: tokens_per_expert_group", tokens_per_expert_group, expected, INTEGERS, ndim=1)
    on_cpu = tokens_per_expert_group.device.type == "cpu"
    if tokens_per_expert_group.shape[0] != size or on_cpu and (tokens_per_expert_group < 0).any():
        raise ValueError(f"{name}: tokens_per_expert_group is {described(tokens_per_expert_group)}; expected "
                         f"{expected}")
    sizes_RE = tokens_per_expert_group.long().view(num_ranks, experts_per_rank)
    sizes_E = sizes_RE.sum(0)
    padded_E = ((sizes_E + alignment - 1) // alignment * alignment).clamp_min(alignment)
    ends_E = padded_E.cumsum(0)
    if on_cpu and ends_E[-1] > max_len:
        raise ValueError(f"{name}: max_len is {max_len}; the padded groups have {int(ends_E[-1])} rows")

    # The rows of a rank for an expert lie together, where they arrive and in the layout.
    arrived_ends = sizes_RE.reshape(-1).cumsum(0)
    starts_RE = (ends_E - padded_E) + sizes_RE.cumsum(0) - sizes_RE
    shifts = starts_RE.reshape(-1) - (arrived_ends - sizes_RE.reshape(-1))
    row = torch.arange(max_len, device=ends_E.device)
    part = torch.searchsorted(arrived_ends, row, right=True).clamp_max(arrived_ends.shape[0] - 1)
    place = torch.where(row < arrived_ends[-1], row + shifts[part], max_len)  # the last place is cut off
    indices_P = row.new_full((max_len + 1, ), -1).scatter_(0, place, row)[:max_len]
    return indices_P.to(torch.int32), padded_E.to(torch.int32), ends_E.to(torch.int32)


class _AllToAll(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, output_splits, input_splits, group, phase, cast, cast_bwd):
        ctx.back = (input_splits, output_splits, group, f"backward of {phase}", cast_bwd, cast)
        return _exchange(x, output_splits, input_splits, group, phase, cast, cast_bwd)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _exchange(_hp(grad), *ctx.back), None, None, None, None, None, None


class _Permute(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x_RD, indices_P):
        ctx.save_for_backward(indices_P)
        ctx.num_rows = x_RD.shape[0]
        return gather_rows(x_RD, indices_P)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PD):
        return _scatter_rows(_hp(grad_PD), ctx.saved_tensors[0], ctx.num_rows), None


class _Unpermute(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x_PN, indices_P, num_rows):
        ctx.save_for_backward(indices_P)
        return _scatter_rows(x_PN, indices_P, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RN):
        return gather_rows(grad_RN, ctx.saved_tensors[0]), None, None


@torch.compiler.disable(reason=GRAPH_BREAK)
@tell_peers_on_error
def a2a_dispatch_mxfp8_fwd_hp_bwd(input: torch.Tensor, output_splits: list[int], input_splits: list[int],
                                  group_name: str | None = None,
                                  scaling_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
                                  block_size: int = 32) -> MXTensor:
    """Quantizes rows along the last axis and sends them to the ranks of their experts. Backward sends hp rows back.

    Args:
        input: [T, D] bf16, fp16 or fp32, rows sorted by destination rank, any strides. D is a multiple of 32.
        output_splits: how many rows arrive from each rank of the group, in rank order. Their sum is R.
        input_splits: how many rows go to each rank. Their sum is T.
        group_name: name of the process group (`group.group_name`), or a group. None means all ranks.
        scaling_mode: RCEIL or FLOOR, the rounding of scales.
        block_size: how many values share a scale, 32 or 128.

    Returns:
        MXTensor [R, D] that reads as input's dtype. Rows are in the order of the sending ranks.

    Raises:
        TypeError, ValueError: for bad arguments, before any collective.
        PeerError: splits, widths or formats of the ranks do not fit together. Raised on every rank, before any row
            is sent. On GPUs, in the first CHECKED exchanges of the group.
    """
    group = _group("a2a_dispatch", group_name)
    splits = _checked_splits("a2a_dispatch", input, output_splits, input_splits, group)
    check_quantizable(input, block_size, scaling_mode, "a2a_dispatch: input")
    return _AllToAll.apply(input, *splits, group, "a2a_dispatch", (block_size, str(scaling_mode)), None)


@torch.compiler.disable(reason=GRAPH_BREAK)
@tell_peers_on_error
def permute_mxfp8_fwd_hp_bwd(mx_tensor: MXTensor, num_tokens_per_expert: torch.Tensor, ep_degree: int,
                             num_local_experts: int, group_size_multiple_of: int = 32, use_mxfp8: bool = True,
                             use_triton_for_bwd: bool = True) -> tuple:
    """Sorts arrived rows by local expert and pads each group with zero rows, still in MXFP8. Backward is in hp.

    Args:
        mx_tensor: [R, D] rows in the order in which dispatch returned them.
        num_tokens_per_expert: int [ep_degree * num_local_experts], rank-major: rows from rank r for local expert e.
            Their sum is at most R. Rows past the sum are in no group.
        group_size_multiple_of: each group is padded to a multiple of it. An empty group gets one multiple.
        use_mxfp8: False gives plain rows, and takes plain rows too: the same step in high precision, to compare with.
        use_triton_for_bwd: accepted for compatibility with torchao. Backward is the same scatter of rows either way.

    Returns:
        padded_shape: torch.Size (R + 1, D), an argument of unpermute.
        rows: MXTensor [P, D]. P is R + num_local_experts * group_size_multiple_of, rounded up to a multiple: a static
            bound, so that the host need not wait. Rows that no group uses are zeros.
        permuted_indices: int32 [P], the arrived row at each place, -1 for padding.
        num_tokens_per_expert_padded: int32 [num_local_experts].
        group_offsets: int32 [num_local_experts], where each group ends.

    Raises:
        TypeError, ValueError: rows or counts have the wrong type or shape, or counts on the CPU exceed the rows.
    """
    check_tensor("permute: mx_tensor", mx_tensor, "a 2-D MXTensor; plain rows need use_mxfp8=False", ndim=2)
    if use_mxfp8 and not isinstance(mx_tensor, MXTensor):
        raise TypeError(f"permute: mx_tensor is {described(mx_tensor)}; expected a 2-D MXTensor; plain rows need "
                        "use_mxfp8=False")
    if isinstance(mx_tensor, MXTensor) and mx_tensor.tiled:
        raise TypeError(f"permute: mx_tensor is {mx_tensor}, whose rows share scales; expected one of mx.quantize")
    for label, value in (("ep_degree", ep_degree), ("num_local_experts", num_local_experts),
                         ("group_size_multiple_of", group_size_multiple_of)):
        check_int(f"permute: {label}", value, 1)
    check_counts("permute", num_tokens_per_expert, ep_degree * num_local_experts,
                 f"one for each of {ep_degree} ranks x {num_local_experts} local experts, rank-major", mx_tensor)
    num_rows, columns = mx_tensor.shape
    if num_tokens_per_expert.device.type == "cpu" and num_tokens_per_expert.sum() > num_rows:
        raise ValueError(f"permute: num_tokens_per_expert {num_tokens_per_expert.tolist()} sum to "
                         f"{int(num_tokens_per_expert.sum())}, but there are {num_rows} rows")
    max_len = num_rows + num_local_experts * group_size_multiple_of
    max_len += -max_len % group_size_multiple_of
    indices_P, sizes_E, ends_E = generate_permute_indices(num_tokens_per_expert, num_local_experts, ep_degree, max_len,
                                                          group_size_multiple_of)
    rows_PD = _Permute.apply(mx_tensor if use_mxfp8 else _hp(mx_tensor), indices_P)
    return torch.Size((num_rows + 1, columns)), rows_PD, indices_P, sizes_E, ends_E


@torch.compiler.disable(reason=GRAPH_BREAK)
@tell_peers_on_error
def unpermute_hp_fwd_mxfp8_bwd(input: torch.Tensor, permuted_indices: torch.Tensor,
                               padded_shape: torch.Size) -> torch.Tensor:
    """Puts expert-sorted rows back into the order in which they arrived, and drops the padding.

    Backward gathers the gradient's rows: in MXFP8 if the gradient is an MXTensor, as from a2a_combine, else in hp.

    Args:
        input: [P, N] plain. N may differ from the dispatched D.
        permuted_indices: int32 or int64 [P], from permute.
        padded_shape: from permute. Only its number of rows, R + 1, is used.

    Returns:
        [R, N] of input's dtype.

    Raises:
        TypeError, ValueError: rows, indices and shape do not fit together. The values of indices are checked only on
            the CPU.
    """
    check_rows("unpermute: input", input)
    expected = "an int32 or int64 index for each row of the input, on its device"
    check_tensor("unpermute: permuted_indices", permuted_indices, expected, (torch.int32, torch.int64), ndim=1)
    if permuted_indices.shape != input.shape[:1] or permuted_indices.device != input.device:
        raise ValueError(f"unpermute: permuted_indices is {described(permuted_indices)}, and the input "
                         f"{described(input)}; expected {expected}")
    if not isinstance(padded_shape, Sequence) or not padded_shape:
        raise TypeError(f"unpermute: padded_shape is {described(padded_shape)}; expected the torch.Size from permute")
    check_int("unpermute: padded_shape[0]", padded_shape[0], 1)
    num_rows = padded_shape[0] - 1
    if input.device.type == "cpu" and (permuted_indices >= num_rows).any():
        raise ValueError(f"unpermute: permuted_indices go up to {int(permuted_indices.max())}, and by padded_shape "
                         f"{tuple(padded_shape)} there are {num_rows} rows; expected both from the same permute")
    return _Unpermute.apply(input, permuted_indices, num_rows)


@torch.compiler.disable(reason=GRAPH_BREAK)
@tell_peers_on_error
def a2a_combine_hp_fwd_mxfp8_bwd(input: torch.Tensor, output_splits: list[int], input_splits: list[int],
                                 group_name: str | None = None,
                                 scaling_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
                                 block_size: int = 32, mxfp8_bwd: bool = True) -> torch.Tensor:
    """Sends hp rows back to the ranks of their tokens, without weights or sums. Backward sends quantized rows.

    Args:
        input: [R, N] bf16, fp16 or fp32. N is a multiple of 32 unless mxfp8_bwd is False.
        output_splits, input_splits: dispatch's input_splits and output_splits.
        group_name: name of the process group, or a group. None means all ranks.
        scaling_mode, block_size: how the gradient is quantized.
        mxfp8_bwd: True quantizes the gradient, which arrives as an MXTensor. False sends it in hp.

    Returns:
        [T, N] of input's dtype.

    Raises:
        TypeError, ValueError: for bad arguments, before any collective.
        PeerError: as in a2a_dispatch.
    """
    group = _group("a2a_combine", group_name)
    splits = _checked_splits("a2a_combine", input, output_splits, input_splits, group)
    if mxfp8_bwd:
        check_quantizable(input, block_size, scaling_mode, "a2a_combine: input")
    cast_bwd = (block_size, str(scaling_mode)) if mxfp8_bwd else None
    return _AllToAll.apply(input, *splits, group, "a2a_combine", None, cast_bwd)
