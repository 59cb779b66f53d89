# SPDX-License-Identifier: Apache-2.0
"""The MXFP8 format in plain PyTorch: casts, which are the oracle of the kernels, and a tensor of data and scales.

MXFP8 (OCP Microscaling Formats v1.0) stores values as e4m3 data. Each block of 32 neighbors along the last axis has
one E8M0 scale: a power of two, stored as a byte with bias 127. With `block_size` 128, four neighboring blocks share
one scale. A `tiled` weight has one scale for each tile of 128x128 values. If an axis is a multiple of 32 but not of
128, its last block of 128 is shorter.

    scale, rceil   the smallest power of two with amax / scale <= 448
    scale, floor   2^(exponent of amax - 8). Data beyond +-448 saturates
    data           x / scale, computed exactly in float32, rounded to nearest even
    zero block     scale byte 0, data 0 with its signs
    NaN, Inf       anywhere in a block give scale byte 255 and data bytes 0x7F, so data or scale alone reads as NaN

Dequantized values are exact in bfloat16, since they are 4 significant bits times a power of two. Exceptions are values
below 2^-133, bfloat16's smallest, and values that rounding lifts to 2^128, which is Inf in bfloat16 and in float32.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

from ..ops.mx_format import BLOCK_SIZES, E4M3_MAX, NAN_DATA_BYTE, NAN_SCALE_BYTE, TILE, MXParts
from .arguments import HP_DTYPES, check_one_of, check_tensor, described

aten = torch.ops.aten


class ScaleCalculationMode(StrEnum):
    """torchao's names for the rounding of scales. A member equals its string, and callers may give either."""

    RCEIL = "rceil"
    FLOOR = "floor"


SCALING_MODES = tuple(mode.value for mode in ScaleCalculationMode)


class MXTensor(torch.Tensor):
    """A tensor in MXFP8. It looks like a tensor of `orig_dtype`, and stores e4m3 data and E8M0 scales.

    MXTensor(qdata, scale, ...) and loading one from a file raise a TypeError or ValueError for parts that do not
    belong together: kernels compute addresses from the shape of the data, and would read past the scales.

    Attributes:
        qdata: float8_e4m3fn, the tensor's own shape [..., R, K].
        scale: float8_e8m0fnu, [..., R, ceil(K / block_size)], or [..., ceil(R / 128), ceil(K / 128)] with `tiled`.
        block_size: values along the last axis that share a scale: 32 or 128.
        orig_dtype: the dtype before the cast. The tensor shows it as its dtype, and is dequantized to it.
        tiled: whether each tile of 128x128 values has one scale (weights).

    Ops that move whole rows move data and scales: slices, selects, index, cat, views that keep the last axis, clone,
    detach and to. Every other op dequantizes its operands first. Writing into an MXTensor is an error, except for
    `add_`, which autograd uses to accumulate: it quantizes the sum again, with rceil. Autograd accepts an MXTensor as
    the gradient of a tensor of `orig_dtype`.
    """

    qdata: torch.Tensor
    scale_bytes: torch.Tensor  # `scale` as uint8, since inductor does not support float8_e8m0fnu
    block_size: int
    orig_dtype: torch.dtype
    tiled: bool

    @staticmethod
    def __new__(cls, qdata, scale, block_size: int = 32, orig_dtype: torch.dtype = torch.bfloat16,
                tiled: bool = False):
        _check_parts(qdata, scale, block_size, orig_dtype, tiled)
        return cls.of(MXParts(qdata, _as_bytes(scale), block_size, tiled), orig_dtype)

    @classmethod
    def of(cls, parts: MXParts, dtype: torch.dtype) -> "MXTensor":
        """An MXTensor of what a kernel returned, unchecked. It looks like a tensor of `dtype`."""
        qdata, scale_bytes, block_size, tiled = parts
        self = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, strides=qdata.stride(),
                                                   storage_offset=qdata.storage_offset(), dtype=dtype,
                                                   device=qdata.device, requires_grad=False)
        self.qdata, self.scale_bytes = qdata, scale_bytes
        self.block_size, self.orig_dtype, self.tiled = block_size, dtype, tiled
        return self

    def __setstate__(self, state):
        # torch.load makes a tensor from a file's sizes, and then calls this with the attributes in the file.
        vars(self).update(state)
        _check_parts(self.qdata, self.scale_bytes, self.block_size, self.orig_dtype, self.tiled)
        if (self.shape, self.dtype, self.device) != (self.qdata.shape, self.orig_dtype, self.qdata.device):
            raise ValueError(f"an MXTensor in this file says that it is {tuple(self.shape)} of {self.dtype} on "
                             f"{self.device}, but its qdata is {described(self.qdata)}")

    @property
    def parts(self) -> MXParts:
        """The plain struct that kernels take."""
        return MXParts(self.qdata, self.scale_bytes, self.block_size, self.tiled)

    @property
    def scale(self) -> torch.Tensor:
        return self.scale_bytes.view(torch.float8_e8m0fnu)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of `output_dtype` (default: `orig_dtype`). Differentiable."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Dequantize.apply(self, output_dtype)
        return dequantize(self, output_dtype)

    def with_parts(self, qdata, scale) -> "MXTensor":
        """An MXTensor of other data and scales, unchecked, with this one's block size, dtype and tiling."""
        return MXTensor.of(MXParts(qdata, _as_bytes(scale), self.block_size, self.tiled), self.orig_dtype)

    def __repr__(self):
        return (f"MXTensor(shape={tuple(self.shape)}, dtype={self.orig_dtype}, block_size={self.block_size}, "
                f"tiled={self.tiled}, device={self.device})")

    def __tensor_flatten__(self):
        return ["qdata", "scale_bytes"], (self.block_size, self.orig_dtype, self.tiled)

    @classmethod
    def __tensor_unflatten__(cls, parts, meta, outer_size, outer_stride):
        block_size, dtype, tiled = meta
        return cls.of(MXParts(parts["qdata"], parts["scale_bytes"], block_size, tiled), dtype)

    def __coerce_same_metadata_as_tangent__(self, expected_metadata, expected_type=None):
        # A compiled backward that was traced with plain gradients needs a plain one.
        return self.dequantize() if expected_type is torch.Tensor else None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        handler = _ROW_OPS.get(func)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable and any(
                isinstance(kwargs.get(written.name, args[i] if i < len(args) else None), MXTensor)
                for i, written in enumerate(func._schema.arguments) if written.is_write):
            raise TypeError(f"{func} writes into an MXTensor, which is read-only: call .dequantize() and write into "
                            "the plain tensor that it returns")

        def plain(x):
            return dequantize(x) if isinstance(x, MXTensor) else x  # autograd has already run at this level

        return func(*mapped(args, plain), **mapped(kwargs, plain))


def mapped(tree: Any, change: Callable) -> Any:
    """A tree of tuples, lists and dicts, with `change` applied to every tensor in it."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(one, change) for key, one in tree.items()}
    if not isinstance(tree, (tuple, list)):
        return tree
    parts = [mapped(one, change) for one in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)  # of a named tuple


def _as_bytes(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)


def _check_parts(qdata, scale, block_size, orig_dtype, tiled) -> None:
    """Raises a TypeError or ValueError unless these are the parts of an MXTensor."""
    check_tensor("MXTensor: qdata", qdata, "a tensor of float8_e4m3fn", (torch.float8_e4m3fn, ))
    check_tensor("MXTensor: scale", scale, "a tensor of float8_e8m0fnu, or of its bytes in uint8",
                 (torch.float8_e8m0fnu, torch.uint8))
    check_one_of("MXTensor: tiled", tiled, (False, True))
    check_one_of("MXTensor: block_size", block_size, (TILE, ) if tiled else BLOCK_SIZES)
    check_one_of("MXTensor: orig_dtype", orig_dtype, HP_DTYPES)
    shape, least = qdata.shape, 2 if tiled else 1
    if len(shape) < least or shape[-1] % 32 and not tiled:
        raise ValueError(f"MXTensor: qdata has shape {tuple(shape)}; expected {least} axes or more, and a last axis "
                         "that is a multiple of 32")
    expected = (*shape[:-least], *(-(-size // block_size) for size in shape[-least:]))
    if tuple(scale.shape) != expected or scale.device != qdata.device:
        raise ValueError(f"MXTensor: qdata of shape {tuple(shape)} on {qdata.device} in "
                         f"{'tiles' if tiled else 'blocks'} of {block_size} has scales of shape {expected} there; got "
                         f"{described(scale)}")


class _Dequantize(torch.autograd.Function):
    """Dequantizes. Its gradient is that of a change of dtype."""

    @staticmethod
    def forward(ctx, mx, output_dtype):
        ctx.dtype = mx.dtype
        return dequantize(mx, output_dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


def _on_parts(func, args, kwargs):
    """Applies an op that keeps the shape to data and scales."""
    mx = args[0]
    return mx.with_parts(func(mx.qdata, *args[1:], **kwargs), func(mx.scale, *args[1:], **kwargs))


def _on_rows(func, args, kwargs):
    """Applies slice, select, index_select and the like to data and scales, along an axis that blocks do not span."""
    mx, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    whole_axes = mx.dim() - (2 if mx.tiled else 1)
    if not isinstance(dim, int) or dim % mx.dim() >= whole_axes:
        return NotImplemented
    return _on_parts(func, args, kwargs)


def _index(func, args, kwargs):
    mx, indices = args
    if not isinstance(mx, MXTensor):
        return NotImplemented
    whole_axes = mx.dim() - (2 if mx.tiled else 1)
    # A mask indexes as many axes as it has itself.
    if sum(i.dim() if i is not None and i.dtype in (torch.bool, torch.uint8) else 1 for i in indices) > whole_axes:
        return NotImplemented
    # Not every device has float8 kernels for advanced indexing, so this moves bytes.
    qdata = func(mx.qdata.view(torch.uint8), indices).view(torch.float8_e4m3fn)
    return mx.with_parts(qdata, func(mx.scale.view(torch.uint8), indices).view(torch.float8_e8m0fnu))


def _view(func, args, kwargs):
    mx, shape = args[0], list(args[1])
    if mx.tiled or not shape or shape[-1] != mx.shape[-1]:
        return NotImplemented
    return mx.with_parts(func(mx.qdata, shape), func(mx.scale, [*shape[:-1], mx.scale.shape[-1]]))


def _cat(func, args, kwargs):
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = tensors[0]
    if not all(isinstance(t, MXTensor) and (t.block_size, t.orig_dtype, t.tiled, t.dim()) ==
               (first.block_size, first.orig_dtype, first.tiled, first.dim()) for t in tensors) or \
            first.tiled or dim % first.dim() == first.dim() - 1:
        return NotImplemented
    qdata = func([t.qdata.view(torch.uint8) for t in tensors], dim).view(torch.float8_e4m3fn)
    return first.with_parts(qdata, func([t.scale.view(torch.uint8) for t in tensors], dim).view(torch.float8_e8m0fnu))


def _accumulate(func, args, kwargs):
    mx, other = args[:2]
    if not isinstance(mx, MXTensor) or mx.tiled:
        return NotImplemented
    other = other.dequantize(torch.float32) if isinstance(other, MXTensor) else other
    total = quantize(mx.dequantize(torch.float32).add_(other, **kwargs), mx.block_size)
    # In place, since mx may be a view of another MXTensor.
    mx.qdata.view(torch.uint8).copy_(total.qdata.view(torch.uint8))
    mx.scale_bytes.copy_(total.scale_bytes)
    return mx


def _to_copy(func, args, kwargs):
    mx, kwargs = args[0], dict(kwargs)
    dtype = kwargs.pop("dtype", None) or mx.orig_dtype
    if dtype not in HP_DTYPES:
        return NotImplemented
    kwargs.pop("memory_format", None)
    parts = MXParts(func(mx.qdata, **kwargs), func(mx.scale_bytes, **kwargs), mx.block_size, mx.tiled)
    return MXTensor.of(parts, dtype)


_ROW_OPS = {
    aten.detach.default: _on_parts,
    aten.alias.default: _on_parts,
    aten.clone.default: _on_parts,
    aten.slice.Tensor: _on_rows,
    aten.select.int: _on_rows,
    aten.index_select.default: _on_rows,
    aten.index.Tensor: _index,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.cat.default: _cat,
    aten.add_.Tensor: _accumulate,
    aten._to_copy.default: _to_copy,
}


def check_quantizable(x: torch.Tensor, block_size: int, scaling_mode: str, name: str = "x") -> None:
    """Raises the TypeError or ValueError that `quantize` would. `name`: of x, for errors."""
    check_one_of("block_size", block_size, BLOCK_SIZES)
    check_one_of("scaling_mode", scaling_mode, SCALING_MODES)
    if not isinstance(x, torch.Tensor) or x.dtype not in HP_DTYPES or x.layout != torch.strided:
        raise TypeError(f"{name} is {described(x)}; expected a dense tensor of bfloat16, float16 or float32")
    if x.dim() == 0 or x.shape[-1] % 32:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected a last axis that is a multiple of 32: pad it "
                         "with zeros")


def _scale_bytes(amax: torch.Tensor, scaling_mode: str) -> torch.Tensor:
    """E8M0 bytes (int32, 0 to 255) for block maxima in float32. Computed from the bits, so exact for every input."""
    # Clear the sign bit: torch's vectorised maximum sets it for some NaNs.
    bits = amax.contiguous().view(torch.int32) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # 448 = 1.75 * 2^8, so amax / 2^(exponent - 8) exceeds 448 if the mantissa exceeds 1.75.
    scale = exponent - 8 + (mantissa > 0x600000).int() if scaling_mode == "rceil" else exponent - 8
    return torch.where(exponent == 255, NAN_SCALE_BYTE, scale.clamp_min(0))


def _power_of_two(exponent_byte: torch.Tensor) -> torch.Tensor:
    """float32 2^(byte - 127) for int32 bytes 0 to 254, and NaN for 255."""
    bits = exponent_byte << 23
    bits = torch.where(exponent_byte == 0, 0x00400000, bits)  # 2^-127 is subnormal in float32
    return torch.where(exponent_byte == NAN_SCALE_BYTE, 0x7FC00000, bits).view(torch.float32)


def _quantize_blocks(blocks: torch.Tensor, dims: tuple, scaling_mode: str) -> tuple:
    """Casts float32 blocks. The axes `dims` share a scale. Returns data and scale bytes, both uint8."""
    amax = blocks.abs().amax(dim=dims, keepdim=True)
    scale = _scale_bytes(amax, scaling_mode)
    finite = scale != NAN_SCALE_BYTE
    inverse = _power_of_two(torch.where(finite, 254 - scale, 127))
    data = (blocks * inverse).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(finite, data, NAN_DATA_BYTE), scale.to(torch.uint8)


def _pad_to(x: torch.Tensor, multiples: tuple) -> torch.Tensor:
    """Pads the last len(multiples) axes with zeros to multiples of the given sizes."""
    pad = []
    for size, multiple in zip(reversed(x.shape), reversed(multiples), strict=False):
        pad += [0, -size % multiple]
    return torch.nn.functional.pad(x, pad) if any(pad) else x


def quantize(x: torch.Tensor, block_size: int = 32, scaling_mode: str = "rceil") -> MXTensor:
    """Casts `x` to MXFP8 in blocks along the last axis.

    Args:
        x: [..., K], bf16, fp16 or fp32, any strides. K is a multiple of 32.

    Raises:
        TypeError: x has another dtype.
        ValueError: K is not a multiple of 32, or the block size or the scaling mode is not supported.
    """
    check_quantizable(x, block_size, scaling_mode)
    size = x.shape[-1]
    blocks = _pad_to(x.detach().float(), (block_size, )).unflatten(-1, (-1, block_size))
    data, scale = _quantize_blocks(blocks, (-1, ), scaling_mode)
    data = data.flatten(-2)[..., :size].contiguous()
    return MXTensor.of(MXParts(data.view(torch.float8_e4m3fn), scale.squeeze(-1), block_size), x.dtype)


def quantize_tiles(w: torch.Tensor, scaling_mode: str = "rceil") -> MXTensor:
    """Casts weights [..., N, K] with one scale for each tile of 128x128 values, so that W and W^T round alike."""
    check_quantizable(w, TILE, scaling_mode)
    if w.dim() < 2:
        raise ValueError(f"cannot divide shape {tuple(w.shape)} into tiles: expected at least two axes")
    rows, columns = w.shape[-2:]
    tiles = _pad_to(w.detach().float(), (TILE, TILE)).unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))
    data, scale = _quantize_blocks(tiles, (-3, -1), scaling_mode)
    data = data.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous()
    parts = MXParts(data.view(torch.float8_e4m3fn), scale.squeeze(-1).squeeze(-2), TILE, tiled=True)
    return MXTensor.of(parts, w.dtype)


def transpose_tiles(w: MXTensor) -> MXTensor:
    """The exact transpose [..., K, N] of tiled weights [..., N, K]: the same bytes in other places."""
    data = w.qdata.view(torch.uint8).transpose(-1, -2).contiguous().view(torch.float8_e4m3fn)
    return w.with_parts(data, w.scale_bytes.transpose(-1, -2).contiguous())


def dequantize(mx: MXTensor, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """data * scale in float32, cast to `output_dtype` (default: the tensor's own).

    Gradients do not flow through this function, nor through the other casts here. They do through MXTensor.dequantize.
    """
    scale = _power_of_two(mx.scale.contiguous().view(torch.uint8).int())
    if mx.tiled:
        scale = scale.repeat_interleave(TILE, dim=-2)[..., :mx.shape[-2], :]
    values = _pad_to(mx.qdata.float(), (mx.block_size, )).unflatten(-1, (-1, mx.block_size))
    values = (values * scale.unsqueeze(-1)).flatten(-2)[..., :mx.shape[-1]]
    return values.to(output_dtype or mx.orig_dtype).contiguous()


def transpose_rescale(mx: MXTensor, block_size: int | None = None, scaling_mode: str = "rceil") -> MXTensor:
    """quantize(dequantize(mx)^T): turns [..., R, K] into [..., K, R] with blocks along R, a multiple of 32.

    A GEMM that contracts over the rows (a weight gradient) needs this form. Since scales are powers of two, only
    values that become subnormal in e4m3 change.
    """
    values = dequantize(mx, torch.float32).transpose(-1, -2)
    out = quantize(values, block_size or mx.block_size, scaling_mode)
    return MXTensor.of(out.parts, mx.orig_dtype)


def parts_of(x: torch.Tensor) -> torch.Tensor | MXParts:
    """What kernels take of a tensor that is plain or an MXTensor."""
    return x.parts if isinstance(x, MXTensor) else x


def sqnr_db(reference: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal to quantization noise ratio of `actual` against `reference`, in dB. inf if they are equal."""
    reference, actual = reference.detach().float(), actual.detach().float()
    noise = (reference - actual).norm()
    return float("inf") if noise == 0 else (20 * torch.log10(reference.norm() / noise)).item()


torch.serialization.add_safe_globals([MXTensor])  # torch.load(weights_only=True) then accepts one
