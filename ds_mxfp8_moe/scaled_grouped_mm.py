# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM of MXFP8 training, under torchao's name: quantize, multiply each group of rows by its own weight.

    pass      product                 A, or the gradient             weights
    forward   out = A W^T             MXFP8 along K                  MXFP8 along K
    dgrad     gA  = g W               MXFP8 along N                  MXFP8 along N
    wgrad     gW  = g^T A, with_hp    both operands unquantized      not used
              gW  = g^T A, MXFP8      both operands MXFP8 along the rows

An operand may be an MXTensor: A from dispatch, the gradient from combine's backward. The first two passes use it as it
is, since its blocks lie along their contraction. The weight gradient contracts over the rows. With wgrad_with_hp it
dequantizes the MXTensor. Without, it re-scales the MXTensor along the rows, near-losslessly. On Hopper, with blocks of
128, it quantizes plain operands as the first two passes do, and then re-scales them too.

Weights are quantized in forward and again in backward. With block_size 128 they have one scale for each tile of
128x128 values, so both passes round them alike. Groups may have any size. If a kernel needs whole tiles of 128 rows,
groups are padded on the device.

M: rows, K: columns of A, N: output columns, E: groups.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.autograd.function import once_differentiable

from .compute import casts
from .compute.arguments import HP_DTYPES, check_one_of, check_tensor
from .compute.grouped_gemm import (
    grouped_mm,
    grouped_mm_wgrad,
    grouped_mm_wgrad_rows,
    multiplies_mxfp8,
    rescales_rows,
)
from .compute.mx import SCALING_MODES, MXTensor, ScaleCalculationMode, check_quantizable
from .ep import gather_rows
from .ops.mx_format import MXParts
from .transport import ROW_ALIGNMENT

__all__ = ["KernelPreference", "ScaleCalculationMode", "_to_mxfp8_then_scaled_grouped_mm",
           "to_mxfp8_then_scaled_grouped_mm"]


class KernelPreference(StrEnum):
    """torchao's names. AUTO takes the device's MXFP8 kernel. EMULATED dequantizes, then multiplies."""

    AUTO = "auto"
    EMULATED = "emulated"


PREFERENCES = tuple(preference.value for preference in KernelPreference)


def _exact_dtype(result_dtype: torch.dtype) -> torch.dtype:
    """The dtype for dequantized operands. It holds them exactly, and is at least as wide as the product's result."""
    return torch.bfloat16 if result_dtype == torch.bfloat16 else torch.float32


@dataclass(frozen=True)
class _Options:
    """The options of one call, and the products that they determine."""

    out_dtype: torch.dtype
    block_size: int
    scaling_mode: str
    wgrad_with_hp: bool
    emulated: bool

    def native(self, device: torch.device) -> bool:
        """Whether a kernel of the device multiplies MXFP8 of this block size without dequantizing it."""
        return not self.emulated and multiplies_mxfp8(device, self.block_size)

    def rows(self, x: torch.Tensor) -> MXTensor:
        """Quantizes rows along their last axis. Returns an MXTensor as it is."""
        return x if isinstance(x, MXTensor) else casts.quantize(x, self.block_size, self.scaling_mode)

    def multiply(self, x_MK: MXTensor, w_ENK: torch.Tensor, ends_E: torch.Tensor, transposed: bool,
                 result_dtype: torch.dtype) -> torch.Tensor:
        """x w^T, or x w with `transposed`. Quantizes the weights along the contraction."""
        weights = casts.quantize_weights([w_ENK], self.block_size, self.scaling_mode, transposed)
        if not self.native(x_MK.device):
            x, w = (casts.dequantize(one, _exact_dtype(result_dtype)) for one in (x_MK, weights))
            return grouped_mm(x, w, ends_E, result_dtype, aligned=False)
        num_rows = x_MK.shape[0]
        row_P, padded_ends_E = _pad_groups(ends_E, num_rows, ROW_ALIGNMENT)
        out_PN = grouped_mm(gather_rows(x_MK, row_P), weights, padded_ends_E, result_dtype)
        # The last place is padding, where the result is zero. Rows of no group read it.
        place_M = torch.full((num_rows + 1, ), row_P.shape[0] - 1, device=row_P.device)
        place_M.scatter_(0, row_P, torch.arange(row_P.shape[0], device=row_P.device))
        return out_PN.index_select(0, place_M[:num_rows])

    def wgrad(self, g_MN: torch.Tensor, a_MK: torch.Tensor, ends_E: torch.Tensor,
              result_dtype: torch.dtype) -> torch.Tensor:
        """g^T a of each group: [E, N, K]."""
        exact = _exact_dtype(result_dtype)
        if self.wgrad_with_hp:
            g, a = (casts.dequantize(x, exact) if isinstance(x, MXTensor) else x for x in (g_MN, a_MK))
            return grouped_mm_wgrad(g, a, ends_E, result_dtype, aligned=False)
        native = self.native(a_MK.device)
        row_P, ends_E = _pad_groups(ends_E, a_MK.shape[0], ROW_ALIGNMENT if native else self.block_size)
        if not self.emulated and rescales_rows(a_MK.device, self.block_size):
            g, a = (gather_rows(self.rows(x), row_P) for x in (g_MN, a_MK))
            return grouped_mm_wgrad_rows(g, a, ends_E, result_dtype, self.scaling_mode)
        g, a = (self._columns(x, row_P) for x in (g_MN, a_MK))
        if not native:
            g, a = (casts.dequantize(x, exact).t() for x in (g, a))
        return grouped_mm_wgrad(g, a, ends_E, result_dtype, aligned=False)

    def _columns(self, x_MN: torch.Tensor, row_P: torch.Tensor) -> MXTensor:
        """The rows at their P padded places, quantized along the rows: [N, P]."""
        if isinstance(x_MN, MXTensor) and x_MN.block_size == self.block_size:
            return casts.rescale_columns(gather_rows(x_MN, row_P), self.scaling_mode)
        plain = casts.dequantize(x_MN, torch.float32) if isinstance(x_MN, MXTensor) else x_MN
        return casts.quantize_columns(gather_rows(plain, row_P), self.block_size, self.scaling_mode)


def _pad_groups(ends_E: torch.Tensor, num_rows: int, block: int) -> tuple:
    """Places for the rows when every group is padded to whole blocks.

    P is an upper bound that depends on shapes alone, so the host never waits.

    Returns:
        The row at each place, int64 [P]. `num_rows` marks padding. The last place is always padding.
        The groups' new ends, int32 [E].
    """
    num_groups = ends_E.shape[0]
    ends = ends_E.long()
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = (sizes + block - 1) // block * block
    new_ends = padded.cumsum(0)
    bound = num_rows + num_groups * (block - 1) + 1
    place = torch.arange(bound + -bound % block, device=ends.device)
    group = torch.searchsorted(new_ends, place, right=True).clamp_max(num_groups - 1)
    within = place - (new_ends - padded)[group]
    return torch.where(within < sizes[group], (ends - sizes)[group] + within, num_rows), new_ends.to(torch.int32)


def _gradients(options: _Options, grad_MN, a_MK, b_EKN, ends_E, a_dtype, needs_a: bool, needs_b: bool) -> tuple:
    grad_a = grad_b = None
    if needs_a:
        grad_a = options.multiply(options.rows(grad_MN), b_EKN.transpose(-1, -2), ends_E, True, a_dtype)
    if needs_b:
        grad_b = options.wgrad(grad_MN, a_MK, ends_E, b_EKN.dtype).transpose(-1, -2)
    return grad_a, grad_b


class _ScaledGroupedMM(torch.autograd.Function):

    @staticmethod
    def forward(ctx, a_MK, b_EKN, ends_E, options):
        mx = options.rows(a_MK)
        ctx.options, ctx.a_dtype, ctx.mx = options, a_MK.dtype, None
        if options.wgrad_with_hp and not isinstance(a_MK, MXTensor):
            ctx.save_for_backward(a_MK, b_EKN, ends_E)
        else:  # saves one byte a value, as plain tensors, which every hook on saved tensors supports
            ctx.mx = (mx.block_size, mx.orig_dtype)
            ctx.save_for_backward(mx.qdata, b_EKN, ends_E, mx.scale_bytes)
        return options.multiply(mx, b_EKN.transpose(-1, -2), ends_E, False, options.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MN):
        a, b_EKN, ends_E, *scale = ctx.saved_tensors
        if ctx.mx is not None:
            block_size, dtype = ctx.mx
            a = MXTensor.of(MXParts(a, scale[0], block_size), dtype)
        return *_gradients(ctx.options, grad_MN, a, b_EKN, ends_E, ctx.a_dtype, *ctx.needs_input_grad[:2]), None, None


# The same function for torch.compile, which cannot trace an autograd.Function that makes an MXTensor. It gets two ops
# instead. They take and return plain tensors, and are not traced.


@torch.library.custom_op("ds_mxfp8_moe::scaled_grouped_mm", mutates_args=())
def _traced(a_MK: torch.Tensor, b_EKN: torch.Tensor, ends_E: torch.Tensor, out_dtype: torch.dtype, block_size: int,
            scaling_mode: str, wgrad_with_hp: bool, emulated: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The product, and A in MXFP8 as e4m3 data and row-major scales. Both are empty with wgrad_with_hp."""
    options = _Options(out_dtype, block_size, scaling_mode, wgrad_with_hp, emulated)
    mx = options.rows(a_MK)
    out = options.multiply(mx, b_EKN.transpose(-1, -2), ends_E, False, out_dtype)
    return out, *(part[:0] if wgrad_with_hp else part.contiguous() for part in (mx.qdata, mx.scale_bytes))


@_traced.register_fake
def _(a_MK, b_EKN, ends_E, out_dtype, block_size, scaling_mode, wgrad_with_hp, emulated):
    (M, K), kept = a_MK.shape, 0 if wgrad_with_hp else a_MK.shape[0]
    return (a_MK.new_empty((M, b_EKN.shape[2]), dtype=out_dtype), a_MK.new_empty((kept, K), dtype=torch.float8_e4m3fn),
            a_MK.new_empty((kept, -(-K // block_size)), dtype=torch.uint8))


@torch.library.custom_op("ds_mxfp8_moe::scaled_grouped_mm_backward", mutates_args=())
def _traced_backward(grad_MN: torch.Tensor, a_MK: torch.Tensor, scale: torch.Tensor | None, b_EKN: torch.Tensor,
                     ends_E: torch.Tensor, a_dtype: torch.dtype, out_dtype: torch.dtype, block_size: int,
                     scaling_mode: str, wgrad_with_hp: bool, emulated: bool, needs_a: bool,
                     needs_b: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of A and B_t, contiguous. One that is not needed is empty."""
    options = _Options(out_dtype, block_size, scaling_mode, wgrad_with_hp, emulated)
    a = a_MK if scale is None else MXTensor.of(MXParts(a_MK, scale, block_size), a_dtype)
    grads = _gradients(options, grad_MN, a, b_EKN, ends_E, a_dtype, needs_a, needs_b)
    return tuple(like.new_empty(0, dtype=dtype) if grad is None else grad.contiguous()
                 for grad, like, dtype in zip(grads, (grad_MN, b_EKN), (a_dtype, b_EKN.dtype), strict=True))


@_traced_backward.register_fake
def _(grad_MN, a_MK, scale, b_EKN, ends_E, a_dtype, out_dtype, block_size, scaling_mode, wgrad_with_hp, emulated,
      needs_a, needs_b):
    return (grad_MN.new_empty(a_MK.shape if needs_a else 0, dtype=a_dtype),
            b_EKN.new_empty(b_EKN.shape if needs_b else 0))


def _save_for_backward(ctx, inputs, output):
    a_MK, b_EKN, ends_E, *ctx.options = inputs
    _, _, _, wgrad_with_hp, _ = ctx.options
    ctx.a_dtype = a_MK.dtype
    ctx.save_for_backward(*((a_MK, ) if wgrad_with_hp else output[1:]), b_EKN, ends_E)


def _traced_gradients(ctx, grad_MN, *_):
    a_MK, *scale, b_EKN, ends_E = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    grads = _traced_backward(grad_MN, a_MK, scale[0] if scale else None, b_EKN, ends_E, ctx.a_dtype, *ctx.options,
                             *needs)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 6


_traced.register_autograd(_traced_gradients, setup_context=_save_for_backward)


@torch.compiler.disable(reason="the gradient of an MXTensor is computed eagerly")
def _eager(*args) -> torch.Tensor:
    return _ScaledGroupedMM.apply(*args)


def _check(A, B_t, offs, bias, out_dtype, block_size, scaling_mode, kernel_preference) -> None:
    dtypes = "bfloat16, float16 or float32"
    check_tensor("A", A, f"a tensor [M, K] of {dtypes}", ndim=2)
    check_tensor("B_t", B_t, f"a plain tensor [E, K, N] of {dtypes}", ndim=3)
    if isinstance(B_t, MXTensor):
        raise TypeError(f"B_t is {B_t}; expected a plain tensor [E, K, N] of {dtypes}")
    if bias is not None:
        check_tensor("bias", bias, f"[N] or [E, N] of {dtypes}")
    check_one_of("kernel_preference", kernel_preference, PREFERENCES)
    check_one_of("scale_calculation_mode", scaling_mode, SCALING_MODES)
    check_quantizable(A, block_size, scaling_mode, "A")
    if out_dtype not in HP_DTYPES:
        raise TypeError(f"out_dtype must be {dtypes}, got {out_dtype}")
    if A.shape[1] != B_t.shape[1]:
        raise ValueError(f"expected A [M, K] and B_t [E, K, N], got {tuple(A.shape)} and {tuple(B_t.shape)}")
    if B_t.numel() == 0 or B_t.shape[1] % 32 or B_t.shape[2] % 32:
        raise ValueError(f"B_t must hold at least one weight [K, N], and K and N must be multiples of 32 above 0; got "
                         f"{tuple(B_t.shape)}")
    if isinstance(A, MXTensor) and (A.tiled or A.block_size != block_size):
        raise ValueError(f"A has blocks of {A.block_size}{' in tiles' if A.tiled else ''}, but block_size is "
                         f"{block_size}: leave block_size out to take A's")
    ends = isinstance(offs, torch.Tensor)
    if not ends or offs.dtype != torch.int32 or offs.shape != B_t.shape[:1]:
        given = f"{offs.dtype} {tuple(offs.shape)}" if ends else offs
        raise ValueError(f"offs must be an int32 tensor [{B_t.shape[0]}], the end of each group's rows, got {given}")
    others = {"B_t": B_t, "offs": offs} | ({} if bias is None else {"bias": bias})
    if any(x.device != A.device for x in others.values()):  # a kernel would read memory that it cannot reach
        each = ", ".join(f"{name} on {x.device}" for name, x in others.items())
        raise ValueError(f"A is on {A.device}, {each}: expected all on one device")
    # On a GPU, reading offs would make the host wait. Under torch.compile, it would break the graph.
    if offs.device.type == "cpu" and offs.numel() and not torch.compiler.is_compiling():
        if offs[0] < 0 or offs[-1] > A.shape[0] or (offs.diff() < 0).any():
            raise ValueError(f"offs {offs.tolist()} must ascend within 0..{A.shape[0]}, the rows of A")
    if bias is not None and bias.shape not in (B_t.shape[2:], B_t.shape[::2]):
        raise ValueError(f"bias must be [N] or [E, N], here [{B_t.shape[2]}] or {list(B_t.shape[::2])}; got "
                         f"{list(bias.shape)}")


def _to_mxfp8_then_scaled_grouped_mm(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor | None = None,
                                     bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
                                     kernel_preference: KernelPreference = KernelPreference.AUTO,
                                     wgrad_with_hp: bool = False,
                                     scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
                                     pad_token_groups_for_grouped_mm: bool = False,
                                     block_size: int | None = None) -> torch.Tensor:
    """Multiplies each group of A's rows with its own weight in MXFP8; differentiable in A, B_t and bias.

    Args:
        A: [M, K], rows sorted by group: plain, or an MXTensor.
        B_t: [E, K, N], plain, any strides. K and N are multiples of 32.
        offs: int32 [E] on A's device: where each group's rows end. Groups may have any size, 0 included. Rows at and
            past the last end give zero rows and zero gradients.
        bias: [N], or [E, N] with one row for each group. It is added in out_dtype.
        out_dtype: bf16, fp16 or fp32.
        kernel_preference: AUTO takes the device's MXFP8 kernel where grouped_gemm.py has one. EMULATED dequantizes the
            operands and calls torch._grouped_mm.
        wgrad_with_hp: True computes the weight gradient from A and the gradient as they came. False quantizes both to
            MXFP8 along the rows.
        scale_calculation_mode: RCEIL or FLOOR, the rounding of scales.
        pad_token_groups_for_grouped_mm: accepted for compatibility with torchao. Groups need no padding here.
        block_size: 32, or 128 with one scale per 128x128 tile of the weights. Default: that of A if A is an MXTensor,
            else 32.

    Returns:
        [M, N] in out_dtype. Each gradient has the dtype of its tensor. The gradient of an MXTensor A is plain.

    Raises:
        TypeError, ValueError: the operands do not fit together.
    """
    if block_size is None:
        block_size = A.block_size if isinstance(A, MXTensor) else 32
    _check(A, B_t, offs, bias, out_dtype, block_size, scale_calculation_mode, kernel_preference)
    how = (out_dtype, block_size, ScaleCalculationMode(scale_calculation_mode).value, wgrad_with_hp,
           KernelPreference(kernel_preference) is KernelPreference.EMULATED)
    if torch.compiler.is_compiling() and not isinstance(A, MXTensor):
        out = _traced(A, B_t, offs, *how)[0]
    else:
        out = _eager(A, B_t, offs, _Options(*how))
    if bias is not None:
        if bias.dim() == 2:
            row_M = torch.arange(A.shape[0], device=A.device)
            bias = bias[torch.searchsorted(offs, row_M, right=True).clamp_max(offs.shape[0] - 1)]
        beyond = torch.arange(A.shape[0], device=A.device) >= offs[-1]
        out = out + bias.to(out_dtype).masked_fill(beyond.unsqueeze(1), 0)
    return out


to_mxfp8_then_scaled_grouped_mm = _to_mxfp8_then_scaled_grouped_mm
