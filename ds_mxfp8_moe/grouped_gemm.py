# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs over rows sorted by expert, for operands that are plain or MXFP8.

MXFP8 is multiplied by the device's own kernel (kernels.py says which); where there is none it is dequantised, exactly
in bfloat16, and multiplied by torch._grouped_mm in the operands' dtype with accumulation in float32: the reference.
Where a CPU would emulate that dtype, it multiplies in float32 and rounds the result once.
P: rows, E: groups, `ends_E`: int32 end of each group's rows, on the device.
"""

from collections.abc import Sequence

import torch

from . import kernels
from .mx import TILE, MXTensor
from .transport import Arrival, Feed


def plain(x: torch.Tensor) -> torch.Tensor:
    """x without MXFP8: dequantised to its outward dtype, or bfloat16 for float16."""
    if isinstance(x, MXTensor):
        # float16 cannot hold what e4m3 times a power of two reaches; bfloat16 can.
        return kernels.dequantize(x, torch.bfloat16 if x.orig_dtype == torch.float16 else x.orig_dtype)
    return x


def _strided(x: torch.Tensor) -> torch.Tensor:
    """x itself if torch._grouped_mm can read it (rows or columns dense, 16-byte steps between them), else a copy."""
    (rows, columns), (row_step, column_step), unit = x.shape[-2:], x.stride()[-2:], 16 // x.element_size()
    row_major = column_step == 1 and row_step >= max(columns, 1) and row_step % unit == 0
    column_major = row_step == 1 and column_step >= max(rows, 1) and column_step % unit == 0
    return x if row_major or column_major else x.contiguous()


def _operands(a: torch.Tensor, b: torch.Tensor) -> tuple:
    a, b = plain(a), plain(b)
    if a.dtype != b.dtype:  # a dequantised half of a float16 pair is bfloat16
        a, b = a.float(), b.float()
    if kernels.emulated(a.device, a.dtype):  # float32 holds the products exactly, and is what they are summed in
        a, b = a.float(), b.float()
    return a, b


def _native(a: torch.Tensor, b: torch.Tensor) -> kernels.Gemms | None:
    if not isinstance(a, MXTensor) or not isinstance(b, MXTensor) or a.block_size != b.block_size:
        return None
    return kernels.mxfp8_gemms(a.device, a.block_size)


def grouped_mm(a_PK: torch.Tensor, b_ENK: torch.Tensor, ends_E: torch.Tensor, out_dtype: torch.dtype | None = None,
               covered: bool = False, aligned: bool = True, feed: Feed | None = None,
               arrival: Arrival | None = None) -> torch.Tensor:
    """Multiplies the rows of group e with b_ENK[e]^T; returns [P, N] in `out_dtype` (default: a's outward dtype).

    Rows at and past ends_E[-1] come back as zeros.

    Args:
        covered: the caller knows that there are no rows past the last group, which saves a pass.
        aligned: groups and P are multiples of 128 rows. False, for plain operands alone: of any size.
        feed: a combine that runs beside takes the result's rows as they come; arrival: a dispatch that runs beside
            brings a's. Where kernels.gemm_beside_seconds is not 0.
    """
    out_dtype = out_dtype or a_PK.dtype
    native = _native(a_PK, b_ENK)
    if native is not None and b_ENK.block_size == TILE and not b_ENK.tiled:  # which Hopper's kernel does not know
        native = None
    beside = {name: value for name, value in (("feed", feed), ("arrival", arrival)) if value is not None}
    if native is not None:
        return native.forward(a_PK, b_ENK, ends_E, out_dtype, **beside)
    assert not beside, "this GEMM knows no exchange that runs beside: see kernels.gemm_beside_seconds"
    a, b = _operands(a_PK, b_ENK)
    if a.shape[0] == 0:
        return a.new_zeros((0, b.shape[1]), dtype=out_dtype)
    transposed = b.stride(-1) != 1
    parts = [b.transpose(1, 2) if transposed else b]
    own = kernels.plain_gemm(a, parts) if aligned else None
    if own is not None:
        return own(a, parts, ends_E, out_dtype, transposed)
    out = torch._grouped_mm(_strided(a), _strided(b).transpose(1, 2), offs=ends_E)
    if covered:
        return out.to(out_dtype)
    beyond = torch.arange(a.shape[0], device=a.device) >= ends_E[-1]
    return out.masked_fill_(beyond.unsqueeze(-1), 0).to(out_dtype)


def grouped_mm_parts(a_PK: torch.Tensor, parts: Sequence[torch.Tensor | Sequence[torch.Tensor]], ends_E: torch.Tensor,
                     transposed: bool = False, covered: bool = False) -> torch.Tensor:
    """`grouped_mm` of plain operands, in a's dtype, with the weights that `kernels.quantize_weights` describes.

    They are read where they lie if the device has a kernel for it, else stacked first.
    """
    if kernels.first(parts[0]).dtype != a_PK.dtype:
        parts = [kernels.stacked([part]).to(a_PK.dtype) for part in parts]
    own = kernels.plain_gemm(a_PK, parts)
    if own is not None:
        return own(a_PK, parts, ends_E, a_PK.dtype, transposed)
    b_ENK = kernels.stacked(parts)
    return grouped_mm(a_PK, b_ENK.transpose(1, 2) if transposed else b_ENK, ends_E, covered=covered)


def grouped_mm_wgrad(g: torch.Tensor, a: torch.Tensor, ends_E: torch.Tensor, out_dtype: torch.dtype | None = None,
                     aligned: bool = True) -> torch.Tensor:
    """Contracts over each group's rows: out[e] = g[rows of e]^T a[rows of e], [E, N, K]; zeros for an empty group.

    Args:
        g, a: plain [P, N] and [P, K]; or both MXFP8 in column form, [N, P] and [K, P] with blocks along the rows.
        aligned: groups are multiples of 128 rows. False, for plain operands alone: of any size.
    """
    out_dtype = out_dtype or g.dtype
    native = _native(g, a)
    if native is not None:
        return native.wgrad(g, a, ends_E, out_dtype)
    if isinstance(g, MXTensor):
        g, a = plain(g).t(), plain(a).t()
    g, a = _operands(g, a)
    if a.shape[0] == 0:
        return a.new_zeros((ends_E.shape[0], g.shape[1], a.shape[1]), dtype=out_dtype)
    own = kernels.plain_wgrad(g, a) if aligned else None
    if own is not None:
        return own(g, a, ends_E, out_dtype)
    out = torch._grouped_mm(_strided(g).t(), _strided(a), offs=ends_E)
    empty = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
    return out.masked_fill_(empty.view(-1, 1, 1), 0).to(out_dtype)


def grouped_mm_wgrad_rows(g: torch.Tensor, a_PK: torch.Tensor, ends_E: torch.Tensor,
                          out_dtype: torch.dtype | None = None, scaling_mode: str | None = None,
                          g_columns: bool = False, sms: int = 0, parts: int = 1) -> torch.Tensor:
    """`grouped_mm_wgrad` of rows [P, N] and [P, K], groups multiples of 128 rows, P too.

    Args:
        scaling_mode: None: MXFP8 operands are dequantised, exactly. Else both are MXFP8 and multiplied as such,
            re-scaled along the rows: in blocks in this mode or, by Hopper's kernel, in tiles of 128 x 128 to the
            largest of the rows' scales, which is as near.
        g_columns: g is in column form [N, P] already.
        sms: multiprocessors that Hopper's kernels take at most, for what runs beside them; 0: all.
        parts: of N, which they divide, each wanted by itself.

    Returns:
        [E, N, K]; of several parts [parts, E, N / parts, K], contiguous where Hopper's kernels wrote it and N / parts
        is a multiple of 64.
    """
    # Two warpgroups write 64 rows each.
    N = g.shape[0 if g_columns else 1]
    apart = parts if N // parts % 64 == 0 else 1
    out = _wgrad_rows(g, a_PK, ends_E, out_dtype or g.dtype, scaling_mode, g_columns, sms, apart)
    if parts == 1:
        return out
    if out.shape[1] != N:
        return out.unflatten(0, (parts, -1))
    return out.unflatten(1, (parts, -1)).transpose(0, 1)


def _wgrad_rows(g, a_PK, ends_E, out_dtype, scaling_mode, g_columns, sms, parts) -> torch.Tensor:
    """[parts * E, N / parts, K] by Hopper's kernels, else [E, N, K]."""
    if scaling_mode is None:
        own = kernels.plain_wgrad(g, a_PK)
        if own is None or a_PK.shape[0] == 0:
            return grouped_mm_wgrad(plain(g), plain(a_PK), ends_E, out_dtype)
        return own(g, a_PK, ends_E, out_dtype, sms=sms, parts=parts)
    own = kernels.mxfp8_wgrad_of_rows(g, a_PK)
    if own is not None:
        return own(g, a_PK, ends_E, out_dtype, g_columns=g_columns, sms=sms, parts=parts)
    g = g if g_columns else kernels.rescale_columns(g, scaling_mode)
    return grouped_mm_wgrad(g, kernels.rescale_columns(a_PK, scaling_mode), ends_E, out_dtype)
