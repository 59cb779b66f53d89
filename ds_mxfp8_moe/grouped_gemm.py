# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs over rows sorted by expert, for operands that are plain or MXFP8, and which kernel multiplies them.

    operands                  kernel                                              else
    MXFP8, blocks of 128      sm_90: FP8 tensor cores, Gluon; sm_100: as below    dequantised, torch._grouped_mm
    MXFP8, blocks of 32       sm_100: scaled tensor cores, Triton                 dequantised, torch._grouped_mm
    bf16, fp16                sm_90: Gluon                                        torch._grouped_mm

The reference dequantises, exactly in bfloat16, and multiplies by torch._grouped_mm in the operands' dtype with
accumulation in float32. Where a CPU would emulate that dtype, it multiplies in float32 and rounds the result once.
sm_90 dequantises blocks of 32 once and outside the GEMM: its tensor cores cannot scale so often. The kernels' own
files choose their tiles, from shapes alone.

P: rows, E: groups, `ends_E`: int32 end of each group's rows, on the device. Groups are multiples of 128 rows, and P is
too, unless `aligned` is False. Experts' weights come as `stacks`: see casts.py.
"""

from collections.abc import Callable, Sequence

import torch

from . import casts
from .casts import Stack
from .mx import TILE, MXTensor
from .ops.device import capability, runs_triton

HOPPER = (9, 0)


def multiplies_mxfp8(device: torch.device, block_size: int) -> bool:
    """Whether the device has kernels that multiply MXFP8 of this block size without dequantising it."""
    return capability(device)[0] == 10 or (capability(device) == HOPPER and block_size == TILE)


def rescales_rows(device: torch.device, block_size: int) -> bool:
    """Whether a kernel for weight gradients takes MXFP8 rows and re-scales them along the contraction on the way."""
    return capability(device) == HOPPER and block_size == TILE


def emulated(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype without the processor's help, tens of times slower than float32:
    float16 on every CPU, bfloat16 on those that oneDNN does not multiply it on (x86 without AVX-512 or AMX)."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    mkldnn = torch.backends.mkldnn.is_available()
    return dtype == torch.float16 or not mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def grouped_mm(a_PK: torch.Tensor, b_ENK: torch.Tensor, ends_E: torch.Tensor, out_dtype: torch.dtype | None = None,
               covered: bool = False, aligned: bool = True) -> torch.Tensor:
    """Multiplies the rows of group e with b_ENK[e]^T; returns [P, N] in `out_dtype` (default: a's outward dtype).

    Rows at and past ends_E[-1] come back as zeros.

    Args:
        covered: the caller knows that there are no rows past the last group, which saves a pass.
        aligned: groups and P are multiples of 128 rows. False, for plain operands alone: of any size.
    """
    out_dtype = out_dtype or a_PK.dtype
    # Blocks of 128 come in tiles: Hopper's kernel knows no other scales of weights.
    if _both_mxfp8(a_PK, b_ENK) and b_ENK.tiled == (b_ENK.block_size == TILE):
        if capability(a_PK.device) == HOPPER:
            from .ops.triton_kernels.grouped_gemm_hopper import grouped_mm_mxfp8
        else:
            from .ops.triton_kernels.grouped_gemm_blackwell import grouped_mm_mxfp8
        return grouped_mm_mxfp8(a_PK.parts, b_ENK.parts, ends_E, out_dtype)
    a, b = _operands(a_PK, b_ENK)
    if a.shape[0] == 0:
        return a.new_zeros((0, b.shape[1]), dtype=out_dtype)
    transposed = b.stride(-1) != 1
    stacks = [b.transpose(1, 2) if transposed else b]
    if aligned and _bf16_kernel_takes(a, stacks):
        return _bf16_kernel()(a, stacks, ends_E, out_dtype, transposed)
    out = torch._grouped_mm(_strided(a), _strided(b).transpose(1, 2), offs=ends_E)
    if covered:
        return out.to(out_dtype)
    beyond = torch.arange(a.shape[0], device=a.device) >= ends_E[-1]
    return out.masked_fill_(beyond.unsqueeze(-1), 0).to(out_dtype)


def grouped_mm_weights(a_PK: torch.Tensor, stacks: Sequence[Stack], ends_E: torch.Tensor, transposed: bool = False,
                       covered: bool = False) -> torch.Tensor:
    """`grouped_mm` of plain rows, in a's dtype, with experts' weights in high precision.

    The weights are read where they lie if the device has a kernel for that, else stacked first.

    Args:
        transposed: contracts over the weights' axis N instead of K.
        covered: see grouped_mm.
    """
    if casts.sample(stacks[0]).dtype != a_PK.dtype:
        stacks = [casts.joined([stack]).to(a_PK.dtype) for stack in stacks]
    if _bf16_kernel_takes(a_PK, stacks):
        return _bf16_kernel()(a_PK, stacks, ends_E, a_PK.dtype, transposed)
    b_ENK = casts.joined(stacks)
    return grouped_mm(a_PK, b_ENK.transpose(1, 2) if transposed else b_ENK, ends_E, covered=covered)


def grouped_mm_wgrad(g: torch.Tensor, a: torch.Tensor, ends_E: torch.Tensor, out_dtype: torch.dtype | None = None,
                     aligned: bool = True) -> torch.Tensor:
    """Contracts over each group's rows: out[e] = g[rows of e]^T a[rows of e], [E, N, K]; zeros for an empty group.

    Args:
        g, a: plain [P, N] and [P, K]; or both MXFP8 in column form, [N, P] and [K, P] with blocks along the rows.
        aligned: groups are multiples of 128 rows. False, for plain operands alone: of any size.
    """
    out_dtype = out_dtype or g.dtype
    if _both_mxfp8(g, a):
        if capability(g.device) == HOPPER:
            from .ops.triton_kernels.grouped_wgrad_hopper import grouped_mm_wgrad_mxfp8
        else:
            from .ops.triton_kernels.grouped_gemm_blackwell import grouped_mm_wgrad_mxfp8
        return grouped_mm_wgrad_mxfp8(g.parts, a.parts, ends_E, out_dtype)
    if isinstance(g, MXTensor):
        g, a = plain(g).t(), plain(a).t()
    g, a = _operands(g, a)
    if a.shape[0] == 0:
        return a.new_zeros((ends_E.shape[0], g.shape[1], a.shape[1]), dtype=out_dtype)
    kernel = _kernel_of_wgrad_rows(g, a, rescaled=False) if aligned else None
    if kernel is not None:
        return kernel(g, a, ends_E, out_dtype)
    out = torch._grouped_mm(_strided(g).t(), _strided(a), offs=ends_E)
    empty = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
    return out.masked_fill_(empty.view(-1, 1, 1), 0).to(out_dtype)


def grouped_mm_wgrad_rows(g: torch.Tensor, a_PK: torch.Tensor, ends_E: torch.Tensor,
                          out_dtype: torch.dtype | None = None, scaling_mode: str | None = None,
                          g_columns: bool = False, sms: int = 0, splits: int = 1) -> torch.Tensor:
    """`grouped_mm_wgrad` of rows [P, N] and [P, K].

    Args:
        scaling_mode: both operands are MXFP8 and are multiplied as MXFP8, re-scaled along the rows: in blocks in this
            mode or, by Hopper's kernel, in tiles of 128 x 128 to the largest of the rows' scales, which is as near.
            None: MXFP8 operands are dequantised, exactly.
        g_columns: g is in column form [N, P] already.
        sms: multiprocessors that Hopper's kernels take at most, for what runs beside them. 0 is all of them.
        splits: pieces into which N is cut; it divides N.

    Returns:
        [E, N, K]. With several splits [splits, E, N / splits, K], contiguous where Hopper's kernels wrote it and
        N / splits is a multiple of 64.
    """
    N = g.shape[0 if g_columns else 1]
    # Two warpgroups write 64 rows each.
    cut = splits if N // splits % 64 == 0 else 1
    out = _wgrad_rows(g, a_PK, ends_E, out_dtype or g.dtype, scaling_mode, g_columns, sms, cut)
    if splits == 1:
        return out
    if out.shape[1] != N:
        return out.unflatten(0, (splits, -1))
    return out.unflatten(1, (splits, -1)).transpose(0, 1)


def _wgrad_rows(g, a_PK, ends_E, out_dtype, scaling_mode, g_columns, sms, splits) -> torch.Tensor:
    """[splits * E, N / splits, K] by Hopper's kernels, else [E, N, K]."""
    rescaled = scaling_mode is not None
    kernel = _kernel_of_wgrad_rows(g, a_PK, rescaled)
    if rescaled and kernel is not None:
        return kernel(_parts(g), _parts(a_PK), ends_E, out_dtype, g_columns=g_columns, sms=sms, splits=splits)
    if rescaled:
        g = g if g_columns else casts.rescale_columns(g, scaling_mode)
        return grouped_mm_wgrad(g, casts.rescale_columns(a_PK, scaling_mode), ends_E, out_dtype)
    if kernel is None or a_PK.shape[0] == 0:
        return grouped_mm_wgrad(plain(g), plain(a_PK), ends_E, out_dtype)
    return kernel(_parts(g), _parts(a_PK), ends_E, out_dtype, sms=sms, splits=splits)


def wgrad_cost(g: torch.Tensor, a_PK: torch.Tensor, experts: int, rescaled: bool) -> tuple[float, int]:
    """Estimates `grouped_mm_wgrad_rows` for what could run beside it.

    Args:
        rescaled: it is called with a scaling_mode.

    Returns:
        Seconds at the rates of an H200, and the number of tiles. 0 seconds: its kernel cannot leave multiprocessors to
        others.
    """
    (P, K), N = a_PK.shape, g.shape[1]
    seconds = 2 * P * K * N / (1.05e15 if rescaled else 0.71e15)
    tiles = experts * -(-N // 128) * -(-K // 256)
    return 0.0 if _kernel_of_wgrad_rows(g, a_PK, rescaled) is None else seconds, tiles


def _kernel_of_wgrad_rows(g: torch.Tensor, a_PK: torch.Tensor, rescaled: bool) -> Callable | None:
    """Hopper's kernel for weight gradients of rows, which beats torch._grouped_mm, where it takes these operands.

    With `rescaled` it is the one that multiplies MXFP8 rows as MXFP8. Else it takes bf16 or fp16, or MXFP8, which it
    dequantises on the way, with MXFP8 of the same block size or bf16.
    """
    if capability(g.device) != HOPPER:
        return None
    operands = g, a_PK
    blocks = {x.block_size for x in operands if isinstance(x, MXTensor)}
    data = [x.qdata if isinstance(x, MXTensor) else x for x in operands]
    if len(blocks) > 1 or not all(one.is_contiguous() for one in data):
        return None
    if rescaled:
        if blocks != {TILE}:
            return None
        from .ops.triton_kernels.grouped_wgrad_rows_hopper import grouped_mm_wgrad_mxfp8_rows
        return grouped_mm_wgrad_mxfp8_rows
    dtypes = {torch.bfloat16 if isinstance(x, MXTensor) else x.dtype for x in operands}
    if dtypes not in ({torch.bfloat16}, {torch.float16}) or not all(map(runs_triton, data)):
        return None
    from .ops.triton_kernels.grouped_wgrad_hopper import grouped_mm_wgrad_bf16
    return grouped_mm_wgrad_bf16


def _bf16_kernel_takes(x_PN: torch.Tensor, stacks: Sequence[Stack]) -> bool:
    """Whether Hopper's kernel, which reads 16-bit weights where they lie and beats torch._grouped_mm, takes these."""
    w = casts.sample(stacks[0])
    if capability(x_PN.device) != HOPPER or x_PN.dtype not in (torch.bfloat16, torch.float16) or w.dtype != x_PN.dtype:
        return False
    if not (x_PN.is_contiguous() and runs_triton(x_PN) and runs_triton(w)) or w.shape[-2] % 32:
        return False
    return all(casts.sample(stack).shape == w.shape for stack in stacks)


def _bf16_kernel() -> Callable:
    from .ops.triton_kernels.grouped_gemm_bf16_hopper import grouped_mm_bf16
    return grouped_mm_bf16


def _both_mxfp8(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a kernel multiplies these two as MXFP8."""
    return isinstance(a, MXTensor) and isinstance(b, MXTensor) and a.block_size == b.block_size and (
        multiplies_mxfp8(a.device, a.block_size))


def _parts(x: torch.Tensor):
    return x.parts if isinstance(x, MXTensor) else x


def plain(x: torch.Tensor) -> torch.Tensor:
    """x without MXFP8: dequantised to its outward dtype, or bfloat16 for float16."""
    if isinstance(x, MXTensor):
        # float16 cannot hold what e4m3 times a power of two reaches; bfloat16 can.
        return casts.dequantize(x, torch.bfloat16 if x.orig_dtype == torch.float16 else x.orig_dtype)
    return x


def _operands(a: torch.Tensor, b: torch.Tensor) -> tuple:
    a, b = plain(a), plain(b)
    if a.dtype != b.dtype:  # a dequantised half of a float16 pair is bfloat16
        a, b = a.float(), b.float()
    if emulated(a.device, a.dtype):  # float32 holds the products exactly, and is what they are summed in
        a, b = a.float(), b.float()
    return a, b


def _strided(x: torch.Tensor) -> torch.Tensor:
    """x itself if torch._grouped_mm can read it (rows or columns dense, 16-byte steps between them), else a copy."""
    (rows, columns), (row_step, column_step), unit = x.shape[-2:], x.stride()[-2:], 16 // x.element_size()
    row_major = column_step == 1 and row_step >= max(columns, 1) and row_step % unit == 0
    column_major = row_step == 1 and column_step >= max(rows, 1) and column_step % unit == 0
    return x if row_major or column_major else x.contiguous()
