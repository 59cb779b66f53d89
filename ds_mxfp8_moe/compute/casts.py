# SPDX-License-Identifier: Apache-2.0
"""Casts to and from MXFP8: Triton kernels where the device has them, else plain PyTorch (mx.py, their reference).

The casts take any shape and run on any device. Their results are those of mx.py, to the byte.

Experts' weights come as `stacks`: one, or two that lie one above the other along N (gate and up). A stack is one
tensor [E, N, K] or E matrices [N, K], each a parameter of its own.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import TypeAlias

import torch

from ..ops.device import has_kernels, runs_triton
from . import mx, mxfp4
from .mx import TILE, MXTensor
from .mxfp4 import MXFP4Weights

Stack: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


def _kernels() -> ModuleType:
    from ..ops.triton_kernels import quantize as kernels  # Triton is there on Linux alone
    return kernels


def quantize(x: torch.Tensor, block_size: int, scaling_mode: str, scale_k_major: bool = False) -> MXTensor:
    """mx.quantize of x [..., K]. `scale_k_major` stores the scales of a 2-D x as [K / block, R], as GEMMs read."""
    mx.check_quantizable(x, block_size, scaling_mode)
    if not runs_triton(x) or x.dim() != 2:
        return mx.quantize(x, block_size, scaling_mode)
    return MXTensor.of(_kernels().quantize_rows(x.detach(), block_size, scaling_mode, scale_k_major), x.dtype)


def quantize_columns(x_PN: torch.Tensor, block_size: int, scaling_mode: str) -> MXTensor:
    """mx.quantize(x^T): [N, P], blocks along the rows of x. P must be a multiple of 32."""
    mx.check_quantizable(x_PN.t(), block_size, scaling_mode)
    if not runs_triton(x_PN):
        return mx.quantize(x_PN.t(), block_size, scaling_mode)
    return MXTensor.of(_kernels().quantize_columns(x_PN.detach(), block_size, scaling_mode), x_PN.dtype)


def quantize_both(x_PN: torch.Tensor, block_size: int, scaling_mode: str) -> tuple[MXTensor, MXTensor]:
    """`quantize` and `quantize_columns` out of one read."""
    if not runs_triton(x_PN):
        return quantize(x_PN, block_size, scaling_mode), quantize_columns(x_PN, block_size, scaling_mode)
    mx.check_quantizable(x_PN.t(), block_size, scaling_mode)
    rows, columns = _kernels().quantize_rows_and_columns(x_PN.detach(), block_size, scaling_mode)
    return MXTensor.of(rows, x_PN.dtype), MXTensor.of(columns, x_PN.dtype)


def rescale_columns(mx_PN: MXTensor, scaling_mode: str) -> MXTensor:
    """mx.transpose_rescale: the column form [N, P] of rows [P, N], in blocks of the same size."""
    if not runs_triton(mx_PN):
        return mx.transpose_rescale(mx_PN, scaling_mode=scaling_mode)
    return MXTensor.of(_kernels().rescale_transposed(mx_PN.parts, scaling_mode), mx_PN.orig_dtype)


def dequantize(x: MXTensor, dtype: torch.dtype) -> torch.Tensor:
    """mx.dequantize."""
    if not runs_triton(x) or x.dim() not in (2, 3):
        return mx.dequantize(x, dtype)
    return _kernels().dequantize(x.parts, dtype)


def quantize_weights(stacks: Sequence[Stack], block_size: int, scaling_mode: str,
                     transposed: bool = False) -> MXTensor:
    """Experts' weights as a GEMM's right operand, [E, N, K], contraction along K.

    Args:
        stacks: see the top of this file.
        transposed: the GEMM contracts over N instead: returns [E, K, N].

    With blocks of 128 one scale serves a 128x128 tile, so both orders round alike. With 32 each rounds for itself.
    """
    like = sample(stacks[0])
    mx.check_quantizable(like, block_size, scaling_mode)
    if runs_triton(like):
        return MXTensor.of(_kernels().quantize_weights(stacks, block_size, scaling_mode, transposed), like.dtype)
    w_ENK = joined(stacks)
    if block_size != TILE:
        return mx.quantize(w_ENK.transpose(1, 2) if transposed else w_ENK, block_size, scaling_mode)
    tiles = mx.quantize_tiles(w_ENK, scaling_mode)
    return mx.transpose_tiles(tiles) if transposed else tiles


def transpose_tiles(w_ENK: MXTensor) -> MXTensor:
    """mx.transpose_tiles of experts' weights, whose parts are contiguous."""
    if not runs_triton(w_ENK) or w_ENK.shape[1] % 32:
        return mx.transpose_tiles(w_ENK)
    from ..ops.triton_kernels.transpose_tiles import transpose_tiles as kernel
    return MXTensor.of(kernel(w_ENK.parts), w_ENK.orig_dtype)


def pack(w_NK: torch.Tensor, dtype: torch.dtype) -> MXFP4Weights:
    """mxfp4.quantize of weights [N, K] or [E, N, K]."""
    if not runs_triton(w_NK):
        return mxfp4.quantize(w_NK, dtype)
    from ..ops.triton_kernels.pack import pack as kernel
    return MXFP4Weights(*kernel(w_NK.detach()), dtype)


def unpack_tiles(weights: MXFP4Weights, transposed: bool = False) -> MXTensor:
    """mxfp4.unpack_tiles of weights [N, K] or [E, N, K]: what a GEMM multiplies of weights in MXFP4."""
    if not has_kernels(weights.codes.device):
        return mxfp4.unpack_tiles(weights, transposed)
    from ..ops.triton_kernels.unpack import unpack_tiles as kernel
    return MXTensor.of(kernel(*weights.buffers, transposed), weights.dtype)


def sample(stack: Stack) -> torch.Tensor:
    """A tensor that has the dtype, the device and the last two axes of a stack's matrices."""
    return stack if isinstance(stack, torch.Tensor) else stack[0]


def joined(stacks: Sequence[Stack]) -> torch.Tensor:
    """[E, N, K] in high precision, without a copy where one stack's matrices lie at equal distances in one storage."""
    whole = [stack.detach() if isinstance(stack, torch.Tensor) else _evenly_spaced(stack) for stack in stacks]
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim=1)


def _evenly_spaced(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    matrices = [matrix.detach() for matrix in matrices]
    one = matrices[0]
    offsets = [matrix.storage_offset() for matrix in matrices]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else one.numel()
    # torch._grouped_mm reads 16 bytes at a time.
    aligned = one.data_ptr() % 16 == 0 and step * one.element_size() % 16 == 0
    if aligned and step >= one.numel() and offsets == [offsets[0] + i * step for i in range(len(offsets))] and all(
            matrix.is_contiguous() and matrix.shape == one.shape and matrix.dtype == one.dtype and
            matrix.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for matrix in matrices):
        return one.as_strided((len(matrices), *one.shape), (step, *one.stride()))
    return torch.stack(matrices)
