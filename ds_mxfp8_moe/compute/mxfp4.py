# SPDX-License-Identifier: Apache-2.0
"""Weights in MXFP4 in plain PyTorch: made from values, and unpacked into tiles of MXFP8, which GEMMs multiply.

MXFP4 (OCP Microscaling Formats v1.0) stores e2m1 values, two in a byte, and one E8M0 byte for 32 values of a row. An
e2m1 value times a power of two is an e4m3 value, so a tile of 128x128 values is exact in MXFP8 while the scale bytes
in it differ by 14 or less. What lies below is rounded as `mx.quantize_tiles` does.
"""

from typing import NamedTuple

import torch

from .mx import NAN_SCALE_BYTE, TILE, MXTensor, _pad_to, _power_of_two, _scale_bytes, quantize_tiles, transpose_tiles


class MXFP4Weights(NamedTuple):
    """Weights [..., N, K], where K is a multiple of 32.

    Attributes:
        codes: uint8 [..., N, K / 2]. The lower half of a byte is the earlier value.
        scale_bytes: uint8 [..., N, K / 32], E8M0.
        tile_bytes: uint8 [..., ceil(N / 128), ceil(K / 128)], E8M0, the scales of the weights as tiles of MXFP8.
        dtype: what they look like.
    """

    codes: torch.Tensor
    scale_bytes: torch.Tensor
    tile_bytes: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, codes: torch.Tensor, scale_bytes: torch.Tensor, dtype: torch.dtype) -> "MXFP4Weights":
        sizes = _e2m1(_largest_codes(codes).int()) * _power_of_two(scale_bytes.int())
        blocks = _pad_to(sizes, (TILE, TILE // 32)).unflatten(-1, (-1, TILE // 32)).unflatten(-3, (-1, TILE))
        tile_bytes = _scale_bytes(blocks.amax((-3, -1)), "rceil").to(torch.uint8)
        return cls(codes.contiguous(), scale_bytes.contiguous(), tile_bytes, dtype)

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes, self.scale_bytes, self.tile_bytes

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))

    def values(self) -> torch.Tensor:
        """Float32 [..., N, K], exactly."""
        values = e2m1_values(self.codes).unflatten(-1, (-1, 32))
        return (values * _power_of_two(self.scale_bytes.int()).unsqueeze(-1)).flatten(-2)

    def part(self, experts: int | slice) -> "MXFP4Weights":
        """Of some experts of a stack."""
        return MXFP4Weights(self.codes[experts], self.scale_bytes[experts], self.tile_bytes[experts], self.dtype)

    def may_round(self) -> torch.Tensor:
        """Bool [...]: True if converting to tiles of MXFP8 may change a value. If False, all values stay exact.

        Values are multiples of half their block's scale. A tile holds multiples of 2^-9 of its own scale.
        """
        N, blocks = self.scale_bytes.shape[-2:]
        tile = self.tile_bytes.repeat_interleave(TILE, -2)[..., :N, :].repeat_interleave(TILE // 32, -1)[..., :blocks]
        apart = tile.int() - self.scale_bytes.int() > 8
        return (apart & (_largest_codes(self.codes) > 0)).flatten(-2).any(-1)


def quantize(w_NK: torch.Tensor, dtype: torch.dtype = torch.bfloat16,
             random_NK: torch.Tensor | None = None) -> MXFP4Weights:
    """Rounds weights to MXFP4. Each block takes the better of two scales, by the squared error of its values.

    The first is the power of two with which the largest value is in [4, 8); the largest e2m1 value is 6. The second is
    twice that. Smaller ones would cut the largest value. A block with NaN or Inf gets scale byte 255 and is NaN.

    Args:
        w_NK: [..., N, K] in bf16, fp16 or fp32. K is a multiple of 32.
        dtype: what the result looks like.
        random_NK: float32 in [0, 1), with 16 bits. If it is given, values are rounded up where it is at least 1 minus
            the distance from the number below, in units of the distance between both. The scales are the same.
    """
    if w_NK.shape[-1] % 32:
        raise ValueError(f"a weight of shape {tuple(w_NK.shape)} has no form in MXFP4, whose blocks have 32 values: "
                         "its last axis must be a multiple of 32")
    blocks = w_NK.detach().float().unflatten(-1, (-1, 32))
    exponent = (blocks.abs().amax(-1).view(torch.int32) & 0x7FFFFFFF) >> 23
    lower = (exponent - 2).clamp(0, 252)

    def rounded(byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """e2m1 values with this scale byte, and each block's squared error."""
        scale = _power_of_two(byte).unsqueeze(-1)
        values = _nearest(blocks / scale)
        return values, _sum_of_pairs((values * scale).sub_(blocks).square_())

    (values, error), (upper_values, upper_error) = rounded(lower), rounded(lower + 1)
    takes_upper = upper_error < error
    byte = lower + takes_upper
    values = torch.where(takes_upper.unsqueeze(-1), upper_values, values)
    if random_NK is not None:
        x = blocks / _power_of_two(byte).unsqueeze(-1)
        size = x.abs().clamp_(max=6)
        step = _step(size)
        values = (size / step).add_(random_NK.unflatten(-1, (-1, 32))).floor_().mul_(step).copysign_(x)
    bits = (values * 2.0**-126).view(torch.int32)
    codes = (bits >> 28 & 8 | bits >> 22 & 7).to(torch.uint8).flatten(-2)
    byte = byte.masked_fill_(exponent == 255, NAN_SCALE_BYTE).to(torch.uint8)
    return MXFP4Weights.of(codes[..., 0::2] | codes[..., 1::2] << 4, byte, dtype)


def _sum_of_pairs(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis, whose size is a power of two. It adds neighbors, so every device gets the same bits.
    """
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(-1)


def _nearest(x: torch.Tensor) -> torch.Tensor:
    """e2m1 values: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with both signs. Ties go to even codes, and larger values to 6."""
    step = _step(x.abs())
    return (x.clamp(-6, 6) / step).round_().mul_(step)


def _step(size: torch.Tensor) -> torch.Tensor:
    """The distance between the e2m1 values around a magnitude."""
    return torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Float32 [..., K] of uint8 [..., K / 2]. The lower half of a byte is the earlier value."""
    return _e2m1(torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int())


def _e2m1(code: torch.Tensor) -> torch.Tensor:
    """Float32 of int32 codes of four bits."""
    size = code & 7
    # From 1 on, the bits beside the sign are a float32's exponent, with another bias, and its first mantissa bit.
    values = torch.where(size < 2, size * 0.5, ((size << 22) + (126 << 23)).view(torch.float32))
    return (values.view(torch.int32) | (code & 8) << 28).view(torch.float32)


def _largest_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 32]: in each block, the code of the largest magnitude."""
    return torch.maximum(codes & 7, codes >> 4 & 7).unflatten(-1, (-1, 16)).amax(-1)


def unpack_tiles(weights: MXFP4Weights, transposed: bool = False) -> MXTensor:
    """The weights [..., N, K] as tiles of MXFP8. `transposed`: their transpose [..., K, N]."""
    tiles = MXTensor.of(quantize_tiles(weights.values()).parts, weights.dtype)
    return transpose_tiles(tiles) if transposed else tiles
