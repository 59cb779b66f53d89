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
both see the same rounding. Groups of any size: where a kernel wants whole tiles of 128 rows, they are padded on the
device.

M: rows, K: columns of A, N: output columns, E: groups.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch.autograd.function import once_differentiable

from . import kernels
from .grouped_gemm import grouped_mm, grouped_mm_wgrad
from .mx import BLOCK_SIZES, SCALING_MODES, MXTensor, ScaleCalculationMode
from .transport import ROW_ALIGNMENT


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
    emulated: bool

    @property
    def exact_dtype(self) -> torch.dtype:
        """A dtype that holds dequantised values exactly and the result as well."""
        return torch.bfloat16 if self.out_dtype == torch.bfloat16 else torch.float32

    def native(self, device: torch.device) -> bool:
        """Whether the device multiplies this MXFP8 without dequantising it."""
        return not self.emulated and kernels.mxfp8_gemms(device, self.block_size) is not None

    def rows(self, x: torch.Tensor) -> MXTensor:
        """Rows quantised along their last axis, unless they came so."""
        return x if isinstance(x, MXTensor) else kernels.quantize(x, self.block_size, self.scaling_mode)

    def multiply(self, x_MK: MXTensor, w_ENK: torch.Tensor, ends_E: torch.Tensor, transposed: bool,
                 out_dtype: torch.dtype) -> torch.Tensor:
        """x w^T, or x w with `transposed`, where the weights' blocks lie along the contraction."""
        weights = kernels.quantize_weights([w_ENK], self.block_size, self.scaling_mode, transposed)
        if not self.native(x_MK.device):
            return grouped_mm(*(kernels.dequantize(x, self.exact_dtype) for x in (x_MK, weights)), ends_E, out_dtype,
                              aligned=False)
        num_rows = x_MK.shape[0]
        row_P, aligned_ends_E = _aligned(ends_E, num_rows, ROW_ALIGNMENT)
        out_PN = grouped_mm(_place_rows(x_MK, row_P), weights, aligned_ends_E, out_dtype)
        # The last place is padding, and zero: rows of no group read it.
        place_M = torch.full((num_rows + 1, ), row_P.shape[0] - 1, device=row_P.device)
        place_M.scatter_(0, row_P, torch.arange(row_P.shape[0], device=row_P.device))
        return out_PN.index_select(0, place_M[:num_rows])

    def wgrad(self, g_MN: torch.Tensor, a_MK: torch.Tensor, ends_E: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[E, N, K]."""
        if self.wgrad_with_hp:
            g, a = (kernels.dequantize(x, self.exact_dtype) if isinstance(x, MXTensor) else x for x in (g_MN, a_MK))
            return grouped_mm_wgrad(g, a, ends_E, dtype, aligned=False)
        native = self.native(a_MK.device)
        row_P, ends_E = _aligned(ends_E, a_MK.shape[0], ROW_ALIGNMENT if native else self.block_size)
        g, a = (self._columns(x, row_P) for x in (g_MN, a_MK))
        if not native:
            g, a = (kernels.dequantize(x, self.exact_dtype).t() for x in (g, a))
        return grouped_mm_wgrad(g, a, ends_E, dtype, aligned=False)

    def _columns(self, x_MN: torch.Tensor, row_P: torch.Tensor) -> MXTensor:
        """The column form [N, P] of the rows that stand at P places."""
        if isinstance(x_MN, MXTensor) and x_MN.block_size == self.block_size:
            return kernels.rescale_columns(_place_rows(x_MN, row_P), self.scaling_mode)
        plain = kernels.dequantize(x_MN, torch.float32) if isinstance(x_MN, MXTensor) else x_MN
        return kernels.quantize_columns(_place_rows(plain, row_P), self.block_size, self.scaling_mode)


def _aligned(ends_E: torch.Tensor, num_rows: int, block: int) -> tuple:
    """Where rows stand when every group starts at a whole block; no host sync, so P is a static upper bound.

    Returns:
        int64 [P], the row that stands at each place or `num_rows` for padding, which the last place is; and int32 [E],
        the groups' new ends.
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


def _place_rows(x: torch.Tensor, row_P: torch.Tensor) -> torch.Tensor:
    """x[row_P], zeros where row_P is len(x)."""
    if isinstance(x, MXTensor):
        data, scale = (_place_rows(part, row_P) for part in (x.qdata.view(torch.uint8), x.scale_bytes))
        return x.with_parts(data.view(torch.float8_e4m3fn), scale)
    return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, row_P)


def _gradients(recipe: _Recipe, grad_MN, a_MK, b_EKN, ends_E, a_dtype, needs_a: bool, needs_b: bool) -> tuple:
    grad_a = grad_b = None
    if needs_a:
        grad_a = recipe.multiply(recipe.rows(grad_MN), b_EKN.transpose(-1, -2), ends_E, True, a_dtype)
    if needs_b:
        grad_b = recipe.wgrad(grad_MN, a_MK, ends_E, b_EKN.dtype).transpose(-1, -2)
    return grad_a, grad_b


class _ScaledGroupedMM(torch.autograd.Function):

    @staticmethod
    def forward(ctx, a_MK, b_EKN, ends_E, recipe):
        mx = recipe.rows(a_MK)
        ctx.recipe, ctx.a_dtype, ctx.mx = recipe, a_MK.dtype, None
        if recipe.wgrad_with_hp and not isinstance(a_MK, MXTensor):
            ctx.save_for_backward(a_MK, b_EKN, ends_E)
        else:  # one byte a value; as plain parts, which every hook on saved tensors can handle
            ctx.mx = (mx.block_size, mx.orig_dtype)
            ctx.save_for_backward(mx.qdata, b_EKN, ends_E, mx.scale_bytes)
        return recipe.multiply(mx, b_EKN.transpose(-1, -2), ends_E, False, recipe.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MN):
        a, b_EKN, ends_E, *scale = ctx.saved_tensors
        if ctx.mx is not None:
            a = MXTensor(a, scale[0], *ctx.mx)
        return *_gradients(ctx.recipe, grad_MN, a, b_EKN, ends_E, ctx.a_dtype, *ctx.needs_input_grad[:2]), None, None


# The same for torch.compile, whose tracer knows no MXTensor that comes to be inside an autograd.Function: two ops of
# plain tensors, which it does not look into.


@torch.library.custom_op("ds_mxfp8_moe::scaled_grouped_mm", mutates_args=())
def _traced(a_MK: torch.Tensor, b_EKN: torch.Tensor, ends_E: torch.Tensor, out_dtype: torch.dtype, block_size: int,
            scaling_mode: str, wgrad_with_hp: bool, emulated: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The product, and A in MXFP8 if backward reads that: e4m3 data and row-major scales, else empty."""
    recipe = _Recipe(out_dtype, block_size, scaling_mode, wgrad_with_hp, emulated)
    mx = recipe.rows(a_MK)
    out = recipe.multiply(mx, b_EKN.transpose(-1, -2), ends_E, False, out_dtype)
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
    """The gradients of A and B_t, contiguous; empty where not needed."""
    recipe = _Recipe(out_dtype, block_size, scaling_mode, wgrad_with_hp, emulated)
    a = a_MK if scale is None else MXTensor(a_MK, scale, block_size, a_dtype)
    grads = _gradients(recipe, grad_MN, a, b_EKN, ends_E, a_dtype, needs_a, needs_b)
    return tuple(like.new_empty(0, dtype=dtype) if grad is None else grad.contiguous()
                 for grad, like, dtype in zip(grads, (grad_MN, b_EKN), (a_dtype, b_EKN.dtype), strict=True))


@_traced_backward.register_fake
def _(grad_MN, a_MK, scale, b_EKN, ends_E, a_dtype, out_dtype, block_size, scaling_mode, wgrad_with_hp, emulated,
      needs_a, needs_b):
    return (grad_MN.new_empty(a_MK.shape if needs_a else 0, dtype=a_dtype),
            b_EKN.new_empty(b_EKN.shape if needs_b else 0))


def _keep(ctx, inputs, output):
    a_MK, b_EKN, ends_E, *ctx.recipe = inputs
    ctx.a_dtype, ctx.with_hp = a_MK.dtype, inputs[6]
    ctx.save_for_backward(*((a_MK, ) if ctx.with_hp else output[1:]), b_EKN, ends_E)


def _traced_gradients(ctx, grad_MN, *_):
    a_MK, *scale, b_EKN, ends_E = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    grads = _traced_backward(grad_MN, a_MK, scale[0] if scale else None, b_EKN, ends_E, ctx.a_dtype, *ctx.recipe,
                             *needs)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 6


_traced.register_autograd(_traced_gradients, setup_context=_keep)


@torch.compiler.disable(reason="the gradient of an MXTensor is made eagerly")
def _eager(*args) -> torch.Tensor:
    return _ScaledGroupedMM.apply(*args)


def _check(A, B_t, offs, bias, out_dtype, kernel_preference, block_size, scaling_mode) -> None:
    if block_size not in BLOCK_SIZES or scaling_mode not in SCALING_MODES:
        raise ValueError(f"block_size {block_size!r} and scale_calculation_mode {scaling_mode!r} were given; expected "
                         f"one of {BLOCK_SIZES} and one of {SCALING_MODES}")
    if kernel_preference not in list(KernelPreference):
        raise ValueError(f"kernel_preference is {kernel_preference!r}, expected one of "
                         f"{[preference.value for preference in KernelPreference]}")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if A.dim() != 2 or B_t.dim() != 3 or A.shape[1] != B_t.shape[1]:
        raise ValueError(f"expected A [M, K] and B_t [E, K, N], got {tuple(A.shape)} and {tuple(B_t.shape)}")
    if not (A.dtype.is_floating_point and B_t.dtype.is_floating_point) or isinstance(B_t, MXTensor):
        raise TypeError(f"expected floating-point A and plain floating-point B_t, got {A.dtype} and "
                        f"{type(B_t).__name__} of {B_t.dtype}")
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
    if any(x.device != A.device for x in others.values()):  # kernels would read what they do not reach
        each = ", ".join(f"{name} on {x.device}" for name, x in others.items())
        raise ValueError(f"A is on {A.device}, {each}: expected all on one device")
    # Looking would stop another device, and break torch.compile's graph.
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
        B_t: [E, K, N], plain, any strides; K and N multiples of 32.
        offs: int32 [E] on A's device: where each group's rows end. Groups of any size, empty ones too. Rows at and
            past the last end give zero rows and zero gradients.
        bias: [N], or [E, N] with one row for each group; added in out_dtype.
        out_dtype: bf16, fp16 or fp32.
        kernel_preference: AUTO, the device's own MXFP8 kernel where kernels.py names one; or EMULATED, dequantised
            operands in torch._grouped_mm.
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
    _check(A, B_t, offs, bias, out_dtype, kernel_preference, block_size, scale_calculation_mode)
    how = (out_dtype, block_size, ScaleCalculationMode(scale_calculation_mode).value, wgrad_with_hp,
           KernelPreference(kernel_preference) is KernelPreference.EMULATED)
    if torch.compiler.is_compiling() and not isinstance(A, MXTensor):
        out = _traced(A, B_t, offs, *how)[0]
    else:
        out = _eager(A, B_t, offs, _Recipe(*how))
    if bias is not None:
        if bias.dim() == 2:
            row_M = torch.arange(A.shape[0], device=A.device)
            bias = bias[torch.searchsorted(offs, row_M, right=True).clamp_max(offs.shape[0] - 1)]
        beyond = torch.arange(A.shape[0], device=A.device) >= offs[-1]
        out = out + bias.to(out_dtype).masked_fill(beyond.unsqueeze(1), 0)
    return out
