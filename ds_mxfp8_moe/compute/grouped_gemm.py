# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs over rows sorted by expert, for operands that are plain or MXFP8, and which kernel multiplies them.

    operands                  kernel                                              else
    MXFP8, blocks of 128      sm_90: FP8 tensor cores, Gluon; sm_100: as below    dequantized, torch's grouped_mm
    MXFP8, blocks of 32       sm_100: scaled tensor cores, Triton                 dequantized, torch's grouped_mm
    bf16, fp16                sm_90: Gluon                                        torch's grouped_mm

The reference dequantizes, exactly in bfloat16, and multiplies by torch's grouped_mm in the operands' dtype with
accumulation in float32. Where a CPU would emulate that dtype, it multiplies in float32 and rounds the result once.
sm_90 dequantizes blocks of 32 once, outside the GEMM, since its tensor cores cannot apply a scale every 32 values. The
kernels' own files choose their tiles, from shapes alone.

P: rows, E: groups. `ends_E`: the int32 end of each group's rows, on the device. P and all groups are multiples of 128
rows, unless `aligned` is False. Experts' weights come as `stacks`, which casts.py explains.
"""

from collections.abc import Callable, Sequence

import torch

from ..ops.device import capability, runs_triton
from . import casts
from .casts import Stack
from .mx import TILE, MXTensor, parts_of
from .sums import Sum, goal_of

HOPPER = (9, 0)


def multiplies_mxfp8(device: torch.device, block_size: int) -> bool:
    """Whether the device has kernels that multiply MXFP8 of this block size without dequantizing it."""
    return capability(device)[0] == 10 or (capability(device) == HOPPER and block_size == TILE)


def rescales_rows(device: torch.device, block_size: int) -> bool:
    """Whether a kernel for weight gradients takes MXFP8 rows and re-scales them along the contraction on the way."""
    return capability(device) == HOPPER and block_size == TILE


def emulated(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch emulates products of this dtype, which takes tens of times as long as float32.

    That is so for float16 on every CPU, and for bfloat16 on CPUs where oneDNN does not support it (x86 without AVX-512
    or AMX).
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return (dtype == torch.float16 or not torch.backends.mkldnn.is_available()
            or torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"))


def grouped_mm(a_PK: torch.Tensor, b_ENK: torch.Tensor, ends_E: torch.Tensor, out_dtype: torch.dtype | None = None,
               aligned: bool = True) -> torch.Tensor:
    """Multiplies the rows of group e with b_ENK[e]^T: [P, N] in `out_dtype` (default: the dtype that a_PK shows).

    Rows at and past ends_E[-1] come back as zeros.

    Args:
        aligned: promises that P and the groups are multiples of 128 rows. MXFP8 operands must be aligned.
    """
    out_dtype = out_dtype or a_PK.dtype
    # With blocks of 128, Hopper's kernel takes tiled weights only.
    if _both_mxfp8(a_PK, b_ENK) and b_ENK.tiled == (b_ENK.block_size == TILE):
        if capability(a_PK.device) == HOPPER:
            from ..ops.triton_kernels.grouped_gemm_hopper import grouped_mm_mxfp8
        else:
            from ..ops.triton_kernels.grouped_gemm_blackwell import grouped_mm_mxfp8
        return grouped_mm_mxfp8(a_PK.parts, b_ENK.parts, ends_E, out_dtype)
    a, b = _operands(a_PK, b_ENK)
    if a.shape[0] == 0:
        return a.new_zeros((0, b.shape[1]), dtype=out_dtype)
    transposed = b.stride(-1) != 1
    stacks = [b.transpose(1, 2) if transposed else b]
    kernel = _kernel_of_rows(a, stacks) if aligned else None
    if kernel is not None:
        return kernel(a, stacks, ends_E, out_dtype, transposed)
    out = torch.nn.functional.grouped_mm(_strided(a), _strided(b).transpose(1, 2), offs=ends_E)
    beyond = torch.arange(a.shape[0], device=a.device) >= ends_E[-1]
    return out.masked_fill_(beyond.unsqueeze(-1), 0).to(out_dtype)


def grouped_mm_weights(a_PK: torch.Tensor, stacks: Sequence[Stack], ends_E: torch.Tensor,
                       transposed: bool = False) -> torch.Tensor:
    """`grouped_mm` of plain rows, in a's dtype, with experts' weights in high precision.

    A kernel reads the weights where they lie. Without one, the weights are stacked first.

    Args:
        transposed: contracts over the weights' axis N instead of K.
    """
    if casts.sample(stacks[0]).dtype != a_PK.dtype:
        stacks = [casts.joined([stack]).to(a_PK.dtype) for stack in stacks]
    kernel = _kernel_of_rows(a_PK, stacks)
    if kernel is not None:
        return kernel(a_PK, stacks, ends_E, a_PK.dtype, transposed)
    b_ENK = casts.joined(stacks)
    return grouped_mm(a_PK, b_ENK.transpose(1, 2) if transposed else b_ENK, ends_E)


def grouped_mm_wgrad(g: torch.Tensor, a: torch.Tensor, ends_E: torch.Tensor, out_dtype: torch.dtype | None = None,
                     aligned: bool = True) -> torch.Tensor:
    """Contracts over each group's rows: out[e] = g[rows of e]^T a[rows of e], [E, N, K]; zeros for an empty group.

    Args:
        g, a: plain [P, N] and [P, K]; or both MXFP8 in column form, [N, P] and [K, P] with blocks along the rows.
        aligned: as in grouped_mm.
    """
    out_dtype = out_dtype or g.dtype
    if _both_mxfp8(g, a) and capability(g.device) != HOPPER:  # Hopper's kernel takes rows
        from ..ops.triton_kernels.grouped_gemm_blackwell import grouped_mm_wgrad_mxfp8
        return grouped_mm_wgrad_mxfp8(g.parts, a.parts, ends_E, out_dtype)
    if isinstance(g, MXTensor):
        g, a = plain(g).t(), plain(a).t()
    g, a = _operands(g, a)
    if a.shape[0] == 0:
        return a.new_zeros((ends_E.shape[0], g.shape[1], a.shape[1]), dtype=out_dtype)
    kernel = _kernel_of_wgrad_rows(g, a, rescaled=False) if aligned else None
    if kernel is not None:
        return kernel(g, a, ends_E, out_dtype)
    out = torch.nn.functional.grouped_mm(_strided(g).t(), _strided(a), offs=ends_E)
    empty = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
    return out.masked_fill_(empty.view(-1, 1, 1), 0).to(out_dtype)


def grouped_mm_wgrad_rows(g: torch.Tensor, a_PK: torch.Tensor, ends_E: torch.Tensor,
                          out_dtype: torch.dtype | None = None, scaling_mode: str | None = None,
                          g_columns: bool = False, splits: int = 1,
                          sums: Sequence[Sum] = ()) -> torch.Tensor | None:
    """`grouped_mm_wgrad` of rows [P, N] and [P, K].

    Args:
        scaling_mode: re-scales both operands, which are MXFP8, along the rows in this mode and multiplies them as
            MXFP8. Hopper's kernel, in any mode, gives each tile of 128 x 128 values the largest of its rows' scales.
            With None, MXFP8 operands are dequantized exactly.
        g_columns: g is in column form [N, P] already.
        splits: pieces into which N is cut. It divides N.
        sums: where the result goes, one for each split. () returns it.

    Returns:
        None with `sums`. Else [E, N, K], or with several splits [splits, E, N / splits, K]. That is contiguous if one
        of Hopper's kernels wrote it and N / splits is a multiple of 64.
    """
    N = g.shape[0 if g_columns else 1]
    # Two warpgroups write 64 rows each.
    cut = splits if N // splits % 64 == 0 else 1
    out = _wgrad_rows(g, a_PK, ends_E, out_dtype or g.dtype, scaling_mode, g_columns, cut,
                      sums if cut == splits else ())
    if out is None:
        return None
    if splits > 1:
        whole = out.shape[1] == N
        out = out.unflatten(1, (splits, -1)).transpose(0, 1) if whole else out.unflatten(0, (splits, -1))
    for one, gradient in zip(sums, out if splits > 1 else [out], strict=False):
        one.take(gradient)
    return None if sums else out


def _wgrad_rows(g, a_PK, ends_E, out_dtype, scaling_mode, g_columns, splits, sums) -> torch.Tensor | None:
    """[splits * E, N / splits, K] by Hopper's kernels, else [E, N, K]. None: a kernel has written it to `sums`."""
    rescaled = scaling_mode is not None
    kernel = _kernel_of_wgrad_rows(g, a_PK, rescaled)
    if rescaled and (kernel is None or g_columns):
        g = g if g_columns else casts.rescale_columns(g, scaling_mode)
        return grouped_mm_wgrad(g, casts.rescale_columns(a_PK, scaling_mode), ends_E, out_dtype)
    if not rescaled and (kernel is None or a_PK.shape[0] == 0):
        return grouped_mm_wgrad(plain(g), plain(a_PK), ends_E, out_dtype)
    goal = goal_of(sums) if sums and a_PK.shape[0] else None
    out = kernel(parts_of(g), parts_of(a_PK), ends_E, out_dtype, splits=splits, goal=goal)
    return out if goal is None else None


def _kernel_of_wgrad_rows(g: torch.Tensor, a_PK: torch.Tensor, rescaled: bool) -> Callable | None:
    """Hopper's kernel for weight gradients of rows. None if it does not take these operands.

    With `rescaled` it is the kernel that multiplies MXFP8 rows as MXFP8. Otherwise it is the kernel that takes two
    operands in bf16, two in fp16, or MXFP8 rows, which it dequantizes, together with bf16 or MXFP8 of the same block
    size.
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
        from ..ops.triton_kernels.grouped_wgrad_rows_hopper import grouped_mm_wgrad_mxfp8_rows
        return grouped_mm_wgrad_mxfp8_rows
    dtypes = {torch.bfloat16 if isinstance(x, MXTensor) else x.dtype for x in operands}
    if dtypes not in ({torch.bfloat16}, {torch.float16}) or not all(map(runs_triton, data)):
        return None
    from ..ops.triton_kernels.grouped_wgrad_hopper import grouped_mm_wgrad_bf16
    return grouped_mm_wgrad_bf16


def _kernel_of_rows(x_PN: torch.Tensor, stacks: Sequence[Stack]) -> Callable | None:
    """Hopper's kernel for plain rows, which reads 16-bit weights where they lie. None if it does not take these."""
    w = casts.sample(stacks[0])
    if capability(x_PN.device) != HOPPER or x_PN.dtype not in (torch.bfloat16, torch.float16) or w.dtype != x_PN.dtype:
        return None
    if not (x_PN.is_contiguous() and runs_triton(x_PN) and runs_triton(w)) or w.shape[-2] % 32:
        return None
    if any(casts.sample(stack).shape != w.shape for stack in stacks):
        return None
    from ..ops.triton_kernels.grouped_gemm_bf16_hopper import grouped_mm_bf16
    return grouped_mm_bf16


def _both_mxfp8(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a kernel multiplies these two as MXFP8. Blackwell's also takes blocks of 32 beside tiled weights."""
    if not isinstance(a, MXTensor) or not isinstance(b, MXTensor) or not multiplies_mxfp8(a.device, a.block_size):
        return False
    return a.block_size == b.block_size or b.tiled and capability(a.device) != HOPPER


def plain(x: torch.Tensor) -> torch.Tensor:
    """x, dequantized if it is an MXTensor: to the dtype that it shows, or to bfloat16 if that is float16."""
    if isinstance(x, MXTensor):
        # e4m3 times a power of two may lie beyond float16's range, but not beyond bfloat16's.
        return casts.dequantize(x, torch.bfloat16 if x.orig_dtype == torch.float16 else x.orig_dtype)
    return x


def _operands(a: torch.Tensor, b: torch.Tensor) -> tuple:
    a, b = plain(a), plain(b)
    if a.dtype != b.dtype:  # a float16 tensor, and one that `plain` dequantized to bfloat16
        a, b = a.float(), b.float()
    if emulated(a.device, a.dtype):  # float32 holds the products exactly, and sums are float32 anyway
        a, b = a.float(), b.float()
    return a, b


def _strided(x: torch.Tensor) -> torch.Tensor:
    """x itself if torch's grouped_mm can read it (rows or columns dense, 16-byte steps between them), else a copy."""
    (rows, columns), (row_step, column_step), unit = x.shape[-2:], x.stride()[-2:], 16 // x.element_size()
    row_major = column_step == 1 and row_step >= max(columns, 1) and row_step % unit == 0
    column_major = row_step == 1 and column_step >= max(rows, 1) and column_step % unit == 0
    return x if row_major or column_major else x.contiguous()
