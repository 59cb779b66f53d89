# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs: the one place that decides, from the device, the block size and the recipe.

    what                              kernel                                            else
    casts, activations, exchanges     Triton, NVIDIA from sm_89 on (e4m3 casts)         plain torch, the reference
    GEMMs of MXFP8, blocks of 128     sm_90: FP8 tensor cores, Gluon; sm_100: below     dequantised, torch._grouped_mm
    GEMMs of MXFP8, blocks of 32      sm_100: scaled tensor cores, Triton               dequantised, torch._grouped_mm
    GEMMs of bf16, fp16               sm_90: Gluon                                      torch._grouped_mm

Blocks of 32 are dequantised on sm_90, once and outside the GEMM: its tensor cores cannot scale so often. The kernels'
own files choose their tiles, from shapes alone: measured once on an H200, a timing on the user's machine would cost
more than it finds.

The casts below take any shape and run on any device; their results are those of mx.py, to the byte.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch

from . import mx
from .mx import TILE, MXTensor


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability; (0, 0) off NVIDIA."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def memory_slowness(device: torch.device) -> float:
    """How many times as long as an H200's memory this GPU's takes for a byte, by clock and width: an H100's 1.44."""
    of = torch.cuda.get_device_properties(device)
    # Virtual GPUs, and some builds of torch, do not tell.
    bytes_per_s = 2 * getattr(of, "memory_clock_rate", 0) * 1e3 * getattr(of, "memory_bus_width", 0) / 8
    return 4.82e12 / bytes_per_s if bytes_per_s else 1.0


def fused(x: torch.Tensor) -> bool:
    """Whether the Triton kernels of casts, activations and exchanges run for x."""
    return capability(x.device) >= (8, 9) and x.shape[-1] % 32 == 0


def emulated(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype without the processor's help, tens of times slower than float32:
    float16 on every CPU, bfloat16 on those that oneDNN does not multiply it on (x86 without AVX-512 or AMX)."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    mkldnn = torch.backends.mkldnn.is_available()
    return dtype == torch.float16 or not mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


# CUDA's limit for the second axis of a grid.
MOST_MATRICES = 65535


class Gemms(NamedTuple):
    """Native grouped GEMMs of one device: `forward` is grouped_gemm.grouped_mm, `wgrad` grouped_mm_wgrad."""

    forward: Callable
    wgrad: Callable


def mxfp8_gemms(device: torch.device, block_size: int) -> Gemms | None:
    """Those that multiply MXFP8 of this block size without dequantising it, or None. Groups: multiples of 128 rows."""
    major_minor = capability(device)
    if major_minor == (9, 0) and block_size == 128:
        from .ops.triton_kernels import grouped_gemm_hopper, grouped_wgrad_hopper
        return Gemms(grouped_gemm_hopper.grouped_mm_mxfp8, grouped_wgrad_hopper.grouped_mm_wgrad_mxfp8)
    if major_minor[0] == 10:
        from .ops.triton_kernels import grouped_gemm_blackwell
        return Gemms(grouped_gemm_blackwell.grouped_mm_mxfp8, grouped_gemm_blackwell.grouped_mm_wgrad_mxfp8)
    return None


def fewest_tokens(hidden_size: int, ffn_size: int, weights: int, experts: int, block_size: int, mxfp8_wgrad: bool,
                  device: torch.device) -> float:
    """Tokens of an expert from which on a layer's MXFP8 recipe is as fast as its bf16 one, forward and backward.

    Fitted to times of an H100 (examples/benchmarks/expert_ffn.py --min-tokens-per-expert 0; 5 shapes, 4 to 32 experts,
    1024 to 16384 tokens, even splits), and of an H200 where an earlier fit to its times ran MXFP8: what it selects is
    as fast as the bf16 recipe there or faster, and what it leaves out would gain 1.02 at most. 0 where nothing was
    measured.

    Args:
        hidden_size, ffn_size: of the experts.
        weights: values in all matrices of one expert.
        experts: of this rank.
        mxfp8_wgrad: weight gradients are multiplied in MXFP8 too.
    """
    if capability(device) != (9, 0) or block_size != TILE:
        return 0
    # Seconds: that faster GEMMs save for a token; to cast its rows, and an expert's weights; of all launches.
    if mxfp8_wgrad:
        gemms, rows, cast, launches = 2.40e-15 * weights, 2.30e-12 * hidden_size, 1.165e-12 * weights, 43e-6
    else:
        rows = 2.74e-12 * hidden_size + 1.84e-12 * ffn_size
        gemms, cast, launches = 2.29e-15 * weights, 1.645e-12 * weights, 40.5e-6
    slowness = memory_slowness(device)  # casts are bound by memory
    saved, spent = gemms - slowness * rows, slowness * cast + launches / experts
    return spent / saved if saved > 0 else math.inf


def plain_gemm(x_PN: torch.Tensor, parts: Sequence[torch.Tensor | Sequence[torch.Tensor]]) -> Callable | None:
    """grouped_mm_bf16, which reads 16-bit weights where they lie and beats torch._grouped_mm, or None.

    Args:
        parts: as for `quantize_weights`.
    """
    w = first(parts[0])
    if capability(x_PN.device) != (9, 0) or x_PN.dtype not in (torch.bfloat16, torch.float16) or w.dtype != x_PN.dtype:
        return None
    if not (x_PN.is_contiguous() and fused(x_PN) and fused(w)) or w.shape[-2] % 32 or any(
            first(part).shape != w.shape for part in parts):
        return None
    from .ops.triton_kernels.grouped_gemm_bf16_hopper import grouped_mm_bf16
    return grouped_mm_bf16


def plain_wgrad(g_PN: torch.Tensor, a_PK: torch.Tensor) -> Callable | None:
    """The kernel for weight gradients of rows that beats torch._grouped_mm, or None: of bf16 or fp16, or of MXFP8,
    which it dequantises on the way, with MXFP8 of the same block size or bf16."""
    operands = g_PN, a_PK
    blocks = {x.block_size for x in operands if isinstance(x, MXTensor)}
    dtypes = {torch.bfloat16 if isinstance(x, MXTensor) else x.dtype for x in operands}
    parts = [x.qdata if isinstance(x, MXTensor) else x for x in operands]
    if capability(g_PN.device) != (9, 0) or dtypes not in ({torch.bfloat16}, {torch.float16}) or len(blocks) > 1:
        return None
    if not all(part.is_contiguous() and fused(part) for part in parts):
        return None
    from .ops.triton_kernels.grouped_wgrad_hopper import grouped_mm_wgrad_bf16
    return grouped_mm_wgrad_bf16


def rescales_rows(device: torch.device, block_size: int) -> bool:
    """Whether a kernel for weight gradients takes MXFP8 rows and re-scales them along the contraction on the way."""
    return capability(device) == (9, 0) and block_size == TILE


def mxfp8_wgrad_of_rows(g: MXTensor, a_PK: MXTensor) -> Callable | None:
    """The kernel that `rescales_rows` speaks of, or None."""
    if g.block_size != a_PK.block_size or not rescales_rows(g.device, g.block_size) or not (
            g.qdata.is_contiguous() and a_PK.qdata.is_contiguous()):
        return None
    from .ops.triton_kernels.grouped_wgrad_rows_hopper import grouped_mm_wgrad_mxfp8_rows
    return grouped_mm_wgrad_mxfp8_rows


def wgrad_cost(g: torch.Tensor, a_PK: torch.Tensor, experts: int, mxfp8: bool) -> tuple[float, int]:
    """About how many seconds a weight gradient of rows takes, at the rates measured on an H200, and in how many tiles,
    if its kernel can leave multiprocessors to others; 0 s: it cannot."""
    own = mxfp8_wgrad_of_rows(g, a_PK) if mxfp8 else plain_wgrad(g, a_PK)
    (P, K), N = a_PK.shape, g.shape[1]
    seconds = 0.0 if own is None else 2 * P * K * N / (1.05e15 if mxfp8 else 0.71e15)
    return seconds, experts * -(-N // 128) * -(-K // 256)


def fed_gemm_cost(x_PK: torch.Tensor, N: int) -> tuple[float, int]:
    """About how many seconds a GEMM of rows into N columns takes on an H200, and in how many tiles, if its kernel can
    feed a combine that runs beside; 0 s: it cannot."""
    (P, K), block_size = x_PK.shape, x_PK.block_size if isinstance(x_PK, MXTensor) else 0
    return gemm_beside_seconds(P, K, N, block_size, x_PK.device), P // 128 * -(-N // 256)


def gemm_beside_seconds(P: int, K: int, N: int, block_size: int, device: torch.device) -> float:
    """About how long a GEMM of P MXFP8 rows takes on an H200; 0: its kernel knows no exchanges that run beside."""
    return 2 * P * K * N / 1.1e15 if capability(device) == (9, 0) and block_size == TILE else 0.0


def _casts() -> ModuleType:
    from .ops.triton_kernels import quantize as casts  # Triton is there on Linux alone
    return casts


def quantize(x: torch.Tensor, block_size: int, scaling_mode: str, scale_k_major: bool = False) -> MXTensor:
    """mx.quantize of x [..., K]. `scale_k_major`: scales of a 2-D x lie as GEMMs read them, a view of [K/block, R]."""
    mx.check_quantizable(x, block_size, scaling_mode)
    if not fused(x) or x.dim() != 2:
        return mx.quantize(x, block_size, scaling_mode)
    return _casts().quantize_rows(x.detach(), block_size, scaling_mode, scale_k_major)


def quantize_columns(x_PN: torch.Tensor, block_size: int, scaling_mode: str) -> MXTensor:
    """mx.quantize(x^T): [N, P], blocks along the rows of x. P must be a multiple of 32."""
    mx.check_quantizable(x_PN.t(), block_size, scaling_mode)
    if not fused(x_PN):
        return mx.quantize(x_PN.t(), block_size, scaling_mode)
    return _casts().quantize_columns(x_PN.detach(), block_size, scaling_mode)


def quantize_both(x_PN: torch.Tensor, block_size: int, scaling_mode: str) -> tuple[MXTensor, MXTensor]:
    """`quantize` and `quantize_columns` out of one read."""
    if not fused(x_PN):
        return quantize(x_PN, block_size, scaling_mode), quantize_columns(x_PN, block_size, scaling_mode)
    mx.check_quantizable(x_PN.t(), block_size, scaling_mode)
    return _casts().quantize_rows_and_columns(x_PN.detach(), block_size, scaling_mode, True)


def rescale_columns(mx_PN: MXTensor, scaling_mode: str) -> MXTensor:
    """mx.transpose_rescale: the column form [N, P] of rows [P, N], in blocks of the same size."""
    if not fused(mx_PN):
        return mx.transpose_rescale(mx_PN, scaling_mode=scaling_mode)
    return _casts().rescale_transposed(mx_PN, mx_PN.block_size, scaling_mode)


def dequantize(x: MXTensor, dtype: torch.dtype) -> torch.Tensor:
    """mx.dequantize."""
    if not fused(x) or x.dim() not in (2, 3) or (x.dim() == 3 and x.shape[0] > MOST_MATRICES):
        return mx.dequantize(x, dtype)
    return _casts().dequantize(x, dtype)


def quantize_weights(parts: Sequence[torch.Tensor | Sequence[torch.Tensor]], block_size: int, scaling_mode: str,
                     transposed: bool = False) -> MXTensor:
    """Experts' weights as a GEMM's right operand, [E, N, K], contraction along K.

    Args:
        parts: one or two, stacked along N: each E matrices [N_i, K], or one tensor [E, N_i, K].
        transposed: the GEMM contracts over N instead: returns [E, K, N].

    With blocks of 128 one scale serves a 128x128 tile, so both orders round alike; with 32 each rounds for itself.
    """
    mx.check_quantizable(first(parts[0]), block_size, scaling_mode)
    if fused(first(parts[0])):
        rows, columns = _casts().quantize_weights(parts, block_size, scaling_mode, not transposed, transposed)
        return columns if transposed else rows
    w_ENK = stacked(parts)
    if block_size != TILE:
        return mx.quantize(w_ENK.transpose(1, 2) if transposed else w_ENK, block_size, scaling_mode)
    tiles = mx.quantize_tiles(w_ENK, scaling_mode)
    if not transposed:
        return tiles
    return tiles.with_parts(tiles.qdata.view(torch.uint8).transpose(1, 2).contiguous().view(torch.float8_e4m3fn),
                            tiles.scale_bytes.transpose(1, 2))


def first(part: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor that tells dtype and device of a part."""
    return part if isinstance(part, torch.Tensor) else part[0]


def stacked(parts: Sequence[torch.Tensor | Sequence[torch.Tensor]]) -> torch.Tensor:
    """[E, N, K] in high precision; without a copy where one part lies at equal distances in one storage."""
    whole = [part.detach() if isinstance(part, torch.Tensor) else _evenly_spaced(part) for part in parts]
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
