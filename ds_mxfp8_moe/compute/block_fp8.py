# SPDX-License-Identifier: Apache-2.0
"""Weights of other 8-bit and 4-bit formats as tiles of MXFP8, and back.

Block FP8 (DeepSeek-V3 and its followers) stores e4m3 data [N, K] and a factor for each tile of 128x128 values, named
`weight_scale_inv`: a value is data * factor. Where the factors are powers of two, this is a tiled MXTensor, byte for
byte. MXFP4 (gpt-oss) is read as it is (mxfp4.py), and becomes tiles of MXFP8 in every GEMM.

What is no tile of MXFP8 is computed in float32 and quantized again, with mx.py's rule:

    factors that are powers of two     data and scales stay
    other factors                      each value is rounded a second time, to 4 significant bits
    MXFP4                              exact while the scale bytes in a tile differ by 14 or less
    tiles with another border          only values that become subnormal in e4m3 change
    factor 0                           the tile is zero
    NaN or Inf as factor, NaN as data  the tile is NaN: scale byte 255, data 0x7F

A weight is quantized again as a whole if one of its tiles has to be. That changes no value of the other tiles, since
their new scale is at most their old one. `Rounding` counts what changed.
"""

import math
from collections.abc import Sequence

import torch

from . import casts
from .mx import NAN_SCALE_BYTE, TILE, MXTensor, _power_of_two, dequantize
from .mxfp4 import MXFP4Weights

FACTOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)


class Rounding:
    """What a conversion changed, summed over tensors.

    Attributes:
        values: how many values were compared.
        changed: how many of them differ after the conversion.
    """

    def __init__(self):
        self.values = self.changed = 0
        self._signal = self._noise = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Compares values with what became of them, in float32 or an MXTensor. Reads from the device."""
        difference = (dequantize(after, torch.float32) if isinstance(after, MXTensor) else after) - before
        self.values += before.numel()
        self.changed += int(difference.count_nonzero())
        signal, noise = (torch.linalg.vector_norm(x, dtype=torch.float64) for x in (before, difference))
        self._signal += float(signal)**2
        self._noise += float(noise)**2

    def include(self, other: "Rounding") -> None:
        """Adds what another one has counted."""
        for key, value in vars(other).items():
            setattr(self, key, getattr(self, key) + value)

    @property
    def sqnr_db(self) -> float:
        """Signal to noise ratio of the values after against those before. inf: no value changed."""
        if self._noise == 0:
            return math.inf
        return 10 * math.log10(self._signal / self._noise) if self._signal else -math.inf


def from_block_fp8(name: str, weight: torch.Tensor, factors: torch.Tensor, rounding: Rounding | None = None,
                   dtype: torch.dtype = torch.bfloat16) -> MXTensor:
    """Block FP8 as tiles of MXFP8.

    Args:
        name: of the weight, for errors.
        weight: float8_e4m3fn [N, K] or [E, N, K]. K is a multiple of 32.
        factors: `weight_scale_inv`, [ceil(N / 128), ceil(K / 128)] or the same for each expert: float32, bfloat16,
            float16, float8_e8m0fnu, or E8M0 bytes in uint8.
        rounding: counts what a second rounding changes, of the experts that need it.
        dtype: what the result looks like.

    Raises:
        TypeError: weight or factors have another dtype.
        ValueError: a shape does not fit.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name} has dtype {weight.dtype}; block FP8 has torch.float8_e4m3fn")
    if factors.dtype not in FACTOR_DTYPES:
        raise TypeError(f"the scales of {name} have dtype {factors.dtype}; expected one of "
                        f"{', '.join(map(str, FACTOR_DTYPES))}")
    if weight.dim() not in (2, 3) or weight.shape[-1] % 32:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}; expected [N, K] or [E, N, K] with K a multiple of "
                         "32")
    expected = tile_grid(weight.shape)
    if tuple(factors.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(weight.shape[-2:])} and scales of shape "
                         f"{tuple(factors.shape[-2:])}; tiles of {TILE}x{TILE} have scales of shape {expected[-2:]}. "
                         "Only this block size is supported")
    factors, exponents = _as_float32_and_e8m0(factors)
    # A NaN factor equals nothing. A NaN in the data needs a scale byte that says so.
    keeps_bytes = (_power_of_two(exponents) == factors).flatten(-2).all(-1) & ~_has_nan(weight)
    data, scales = weight, exponents.to(torch.uint8)
    # The only host sync here: tolist() waits for the device, once for all experts of this call.
    if inexact := [i for i, keeps in enumerate(keeps_bytes.view(-1).tolist()) if not keeps]:
        data = weight.clone(memory_format=torch.contiguous_format)
        data_ENK, scales_E, factors_E = (one if weight.dim() == 3 else one[None] for one in (data, scales, factors))
        for i in inexact:  # one expert at a time, since float32 takes four times the memory
            values_NK = data_ENK[i].float() * _to_each_value(factors_E[i], data_ENK.shape[1:])
            tiles = quantize_again(values_NK, rounding, dtype)
            data_ENK[i].copy_(tiles.qdata)
            scales_E[i].copy_(tiles.scale_bytes)
    return MXTensor(data, scales, TILE, dtype, tiled=True)


def to_block_fp8(tiles: MXTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of MXFP8 as block FP8, byte for byte.

    Args:
        tiles: [N, K] or [E, N, K], with `tiled`. `quantize_again` makes them from other MXTensors.

    Returns:
        The weight, float8_e4m3fn, and its `weight_scale_inv`, float32.
    """
    if not tiles.tiled:
        raise ValueError(f"block FP8 has one scale for {TILE}x{TILE} values; given were blocks of {tiles.block_size}")
    return tiles.qdata, tiles.scale.float()


def from_mxfp4(name: str, blocks: torch.Tensor, scales: torch.Tensor, rounding: Rounding | None = None,
               dtype: torch.dtype = torch.bfloat16) -> MXFP4Weights:
    """MXFP4 as checkpoints have it.

    Args:
        name: of the weight, for errors.
        blocks: uint8 [N, K / 32, 16] or the same for each expert. The lower half of a byte is the earlier value.
        scales: uint8 [N, K / 32] or the same for each expert.
        rounding: counts the values that do not fit into their tile, of the experts that have any.
        dtype: what the result looks like.

    Raises:
        TypeError: blocks or scales are not uint8.
        ValueError: a shape does not fit, or a scale is NaN. Reads from the device.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise TypeError(f"{name}: its blocks have dtype {blocks.dtype} and its scales {scales.dtype}; MXFP4 has "
                        "torch.uint8 for both")
    if blocks.dim() not in (3, 4) or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ValueError(f"{name}: its blocks have shape {tuple(blocks.shape[-3:])} and its scales "
                         f"{tuple(scales.shape[-2:])}; MXFP4 has [N, K / 32, 16] and [N, K / 32]")
    weights = MXFP4Weights.of(blocks.flatten(-2), scales, dtype)
    is_nan, *may_round = torch.cat([(scales == NAN_SCALE_BYTE).any().view(1), weights.may_round().view(-1)]).tolist()
    if is_nan:
        raise ValueError(f"{name}: one of its scales is NaN (byte 0xFF)")
    if rounding is not None:
        for i in (i for i, rounds in enumerate(may_round) if rounds):
            one = weights.part(i) if blocks.dim() == 4 else weights
            rounding.add(one.values(), casts.unpack_tiles(one))
    return weights


def quantize_again(values: torch.Tensor | MXTensor, rounding: Rounding | None = None,
                   dtype: torch.dtype = torch.bfloat16) -> MXTensor:
    """Values [N, K] or [E, N, K] as tiles.

    Args:
        values: float32, or an MXTensor of any block size.
        rounding: counts what changes.
        dtype: what the result looks like.
    """
    values = dequantize(values, torch.float32) if isinstance(values, MXTensor) else values
    stack = values if values.dim() == 3 else values.unsqueeze(0)
    tiles = casts.quantize_weights([stack], TILE, "rceil")
    tiles = MXTensor(tiles.qdata.view(values.shape), tiles.scale_bytes.view(tile_grid(values.shape)), TILE, dtype,
                     tiled=True)
    if rounding is not None:
        rounding.add(values, tiles)
    return tiles


def stack_rows(parts: Sequence[MXTensor], rounding: Rounding | None = None) -> MXTensor:
    """Tiled matrices [..., N, K], one above the other: gate above up. Bytes stay if all but the last have a multiple
    of 128 rows. Else tiles cross the borders, and all are quantized again."""
    first, uint8 = parts[0], torch.uint8
    if any(part.shape[-2] % TILE for part in parts[:-1]):
        return quantize_again(torch.cat([dequantize(part, torch.float32) for part in parts], dim=-2), rounding,
                              first.orig_dtype)
    qdata = torch.cat([part.qdata.view(uint8) for part in parts], dim=-2).view(torch.float8_e4m3fn)
    return first.with_parts(qdata, torch.cat([part.scale_bytes for part in parts], dim=-2))


def slice_rows(tiles: MXTensor, start: int, stop: int) -> MXTensor:
    """Rows `start` to `stop` of a tiled matrix [..., N, K]: gate or up. Bytes stay if `start` is a multiple of 128.
    Else the rows are quantized again, in tiles that begin at `start`."""
    if start % TILE == 0:
        return tiles.with_parts(tiles.qdata[..., start:stop, :],
                                tiles.scale_bytes[..., start // TILE:-(-stop // TILE), :])
    return quantize_again(dequantize(tiles, torch.float32)[..., start:stop, :].contiguous(), dtype=tiles.orig_dtype)


def tile_grid(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a weight [..., N, K] in tiles."""
    return *shape[:-2], -(-shape[-2] // TILE), -(-shape[-1] // TILE)


def _as_float32_and_e8m0(factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors in float32, and the E8M0 bytes (int32) of those that are powers of two."""
    if factors.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = factors.view(torch.uint8).int()
        return _power_of_two(exponents), exponents
    factors = factors.float().contiguous()
    # 2^-127, byte 0, is subnormal in float32: its exponent bits are 0. NaN and Inf have 255.
    return factors, (factors.view(torch.int32) >> 23) & NAN_SCALE_BYTE


def _has_nan(weight: torch.Tensor) -> torch.Tensor:
    """Bool [...] of weights [..., N, K]. Not every device compares float8, and isnan takes four bytes for each value.
    """
    return ((weight.view(torch.uint8) & 0x7F) == 0x7F).flatten(-2).any(-1)


def _to_each_value(per_tile: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Repeats what each tile has: [..., ceil(N / 128), ceil(K / 128)] -> [..., N, K]."""
    rows = per_tile.repeat_interleave(TILE, dim=-2)[..., :shape[-2], :]
    return rows.repeat_interleave(TILE, dim=-1)[..., :shape[-1]]

