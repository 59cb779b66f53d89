# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM of MXFP8 training, under torchao's name: quantise, multiply each group of rows by its own weight.

    pass      product                 A, or the gradient         weights
    forward   out = A W^T             MXFP8 along K              MXFP8 along K
    dgrad     gA  = g W               MXFP8 along N              MXFP8 along N
    wgrad     gW  = g^T A, with_hp    g as it is, A as it came   -
              gW  = g^T A, MXFP8      both MXFP8 along the rows  -

An operand that comes as an MXTensor (A from dispatch, g from combine's backward) is used as it is where its blocks
lie along the contraction, dequantised for wgrad_with_hp, and re-scaled along the rows (near-lossless: powers of two)
for MXFP8 wgrad. Weights are quantised anew in forward and in backward; with block_size 128 per 128x128 tile, so that
both see the same rounding. Every product is the exact MXFP8 one: dequantised operands, accumulation in float32.

M: rows, K: columns of A, N: output columns, E: groups.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch.autograd.function import once_differentiable

from .grouped_gemm import grouped_mm, grouped_mm_wgrad
from .mx import BLOCK_SIZES, SCALING_MODES, MXTensor, ScaleCalculationMode, quantize, quantize_tiles


class KernelPreference(str, Enum):
    """torchao's names. AUTO takes the fastest exact kernel of the device, EMULATED dequantises and multiplies."""

    AUTO = "auto"
    EMULATED = "emulated"


@dataclass(frozen=True)
class _Recipe:
    out_dtype: torch.dtype
    block_size: int
    scaling_mode: str
    wgrad_with_hp: bool

    @property
    def exact_dtype(self) -> torch.dtype:
        """A dtype that holds dequantised values exactly and the result as well."""
        return torch.bfloat16 if self.out_dtype == torch.bfloat16 else torch.float32

    def rows(self, x: torch.Tensor) -> MXTensor:
        """Rows quantised along their last axis, unless they came so."""
        return x if isinstance(x, MXTensor) else quantize(x, self.block_size, self.scaling_mode)

    def weights_ENK(self, w_ENK: torch.Tensor, contract: int) -> torch.Tensor:
        """Weights rounded to MXFP8 with blocks along axis `contract` (-1: K, -2: N), dequantised."""
        if self.block_size == 128:
            return quantize_tiles(w_ENK, self.scaling_mode).dequantize(self.exact_dtype)
        along = quantize(w_ENK.transpose(-1, contract), self.block_size, self.scaling_mode)
        return along.dequantize(self.exact_dtype).transpose(-1, contract)

    def columns(self, x_PN: torch.Tensor) -> torch.Tensor:
        """Rounds [P, N], P whole blocks, to MXFP8 with blocks along P."""
        return quantize(x_PN.t(), self.block_size, self.scaling_mode).dequantize(self.exact_dtype).t()


def _exact(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.dequantize(dtype) if isinstance(x, MXTensor) else x


def _block_aligned(ends_E: torch.Tensor, num_rows: int, block: int) -> tuple:
    """Where rows stand when every group starts at a whole block; no host sync, so P is a static upper bound.

    Returns:
        int64 [P], the row that stands at each place or `num_rows` for padding, and int32 [E], the groups' new ends.
    """
    num_groups = ends_E.shape[0]
    ends = ends_E.long()
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = (sizes + block - 1) // block * block
    new_ends = padded.cumsum(0)
    bound = num_rows + num_groups * (block - 1)
    place = torch.arange(bound + -bound % block, device=ends.device)
    group = torch.searchsorted(new_ends, place, right=True).clamp_max(num_groups - 1)
    within = place - (new_ends - padded)[group]
    return torch.where(within < sizes[group], (ends - sizes)[group] + within, num_rows), new_ends.to(torch.int32)


def _place_rows(x: torch.Tensor, row_P: torch.Tensor) -> torch.Tensor:
    """Plain x[row_P] in float32, zeros where row_P is len(x)."""
    x = x.dequantize(torch.float32) if isinstance(x, MXTensor) else x.float()
    return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, row_P)


class _ScaledGroupedMM(torch.autograd.Function):

    @staticmethod
    def forward(ctx, a_MK, b_EKN, ends_E, recipe):
        mx = recipe.rows(a_MK)
        ctx.recipe, ctx.a_dtype, ctx.mx = recipe, a_MK.dtype, None
        if recipe.wgrad_with_hp and not isinstance(a_MK, MXTensor):
            ctx.save_for_backward(a_MK, b_EKN, ends_E)
        else:  # one byte a value; as plain parts, which every hook on saved tensors can handle
            ctx.mx = (mx.block_size, mx.orig_dtype)
            ctx.save_for_backward(mx.qdata, b_EKN, ends_E, mx.scale)
        weights = recipe.weights_ENK(b_EKN.transpose(-1, -2), -1).transpose(-1, -2)
        return grouped_mm(mx.dequantize(recipe.exact_dtype), weights, ends_E, recipe.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MN):
        recipe = ctx.recipe
        a, b_EKN, ends_E, *scale = ctx.saved_tensors
        if ctx.mx is not None:
            a = MXTensor(a, scale[0], *ctx.mx)
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            weights_ENK = recipe.weights_ENK(b_EKN.transpose(-1, -2), -2)
            grad_a = grouped_mm(recipe.rows(grad_MN).dequantize(recipe.exact_dtype), weights_ENK, ends_E, ctx.a_dtype)
        if ctx.needs_input_grad[1]:
            if recipe.wgrad_with_hp:
                g, a = _exact(grad_MN, recipe.exact_dtype), _exact(a, recipe.exact_dtype)
            else:
                row_P, ends_E = _block_aligned(ends_E, a.shape[0], recipe.block_size)
                g, a = (recipe.columns(_place_rows(x, row_P)) for x in (grad_MN, a))
            grad_b = grouped_mm_wgrad(g, a, ends_E, b_EKN.dtype).transpose(-1, -2)
        return grad_a, grad_b, None, None


def _check(A, B_t, offs, bias, out_dtype, block_size, scaling_mode) -> None:
    if block_size not in BLOCK_SIZES or scaling_mode not in SCALING_MODES:
        raise ValueError(f"block_size {block_size!r} and scale_calculation_mode {scaling_mode!r} were given; expected "
                         f"one of {BLOCK_SIZES} and one of {SCALING_MODES}")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if A.dim() != 2 or B_t.dim() != 3 or A.shape[1] != B_t.shape[1]:
        raise ValueError(f"expected A [M, K] and B_t [E, K, N], got {tuple(A.shape)} and {tuple(B_t.shape)}")
    if not (A.dtype.is_floating_point and B_t.dtype.is_floating_point) or isinstance(B_t, MXTensor):
        raise TypeError(f"expected floating-point A and plain floating-point B_t, got {A.dtype} and "
                        f"{type(B_t).__name__} of {B_t.dtype}")
    if B_t.shape[1] % 32 or B_t.shape[2] % 32:
        raise ValueError(f"K and N must be multiples of 32, got {B_t.shape[1]} and {B_t.shape[2]}")
    if isinstance(A, MXTensor) and (A.tiled or A.block_size != block_size):
        raise ValueError(f"A has blocks of {A.block_size}{' in tiles' if A.tiled else ''}, but block_size is "
                         f"{block_size}: leave block_size out to take A's")
    if offs is None or offs.dtype != torch.int32 or offs.shape != B_t.shape[:1]:
        given = "None" if offs is None else f"{offs.dtype} {tuple(offs.shape)}"
        raise ValueError(f"offs must be int32 [{B_t.shape[0]}], the end of each group's rows, got {given}")
    if offs.device.type == "cpu" and offs.numel():  # elsewhere looking would stop the device
        if offs[0] < 0 or offs[-1] > A.shape[0] or (offs.diff() < 0).any():
            raise ValueError(f"offs {offs.tolist()} must ascend within 0..{A.shape[0]}, the rows of A")
    if bias is not None and bias.shape not in (B_t.shape[2:], B_t.shape[::2]):
        raise ValueError(f"bias must be [N] or [E, N], here [{B_t.shape[2]}] or {list(B_t.shape[::2])}; got "
                         f"{list(bias.shape)}")


@torch.compiler.disable(reason="grouped GEMMs over MXTensors run eagerly")
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
        B_t: [E, K, N], plain, any strides; K and N multiples of 32.
        offs: int32 [E] on A's device: where each group's rows end. Groups of any size, empty ones too. Rows at and
            past the last end give zero rows and zero gradients.
        bias: [N], or [E, N] with one row for each group; added in out_dtype.
        out_dtype: bf16, fp16 or fp32.
        kernel_preference: AUTO or EMULATED; today both dequantise and multiply.
        wgrad_with_hp: the weight gradient from A as it came and the unquantised gradient; False rounds both to
            MXFP8 along the rows.
        scale_calculation_mode: RCEIL or FLOOR, the rounding of scales.
        pad_token_groups_for_grouped_mm: accepted for torchao's sake; groups need no padding here.
        block_size: 32, or 128 (weights in 128x128 tiles); default: that of an MXTensor A, else 32.

    Returns:
        [M, N] in out_dtype. The gradients have the dtypes of their tensors; that of an MXTensor A is plain.

    Raises:
        TypeError, ValueError: operands that do not fit together.
    """
    if block_size is None:
        block_size = A.block_size if isinstance(A, MXTensor) else 32
    _check(A, B_t, offs, bias, out_dtype, block_size, scale_calculation_mode)
    KernelPreference(kernel_preference)
    recipe = _Recipe(out_dtype, block_size, scale_calculation_mode, wgrad_with_hp)
    out = _ScaledGroupedMM.apply(A, B_t, offs, recipe)
    if bias is not None:
        if bias.dim() == 2:
            row_M = torch.arange(A.shape[0], device=A.device)
            bias = bias[torch.searchsorted(offs, row_M, right=True).clamp_max(offs.shape[0] - 1)]
        beyond = torch.arange(A.shape[0], device=A.device) >= offs[-1]
        out = out + bias.to(out_dtype).masked_fill(beyond.unsqueeze(1), 0)
    return out
