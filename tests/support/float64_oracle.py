# SPDX-License-Identifier: Apache-2.0
"""The casts to MXFP8 in float64, written from the format alone: the oracle of mx.py, of casts.py and of kernels.

Everything here is exact but the one rounding that the format asks for. A value of any supported dtype, divided by a
power of two, is a float64 without rounding.
"""

from typing import NamedTuple

import torch

# The values of the data bytes 0x00 to 0x7E, by the definition of e4m3: 3 bits of mantissa, bias 7.
E4M3 = torch.tensor([m / 512 if e == 0 else (1 + m / 8) * 2.0**(e - 7) for e in range(16) for m in range(8)][:-1],
                    dtype=torch.float64)


class Bytes(NamedTuple):
    """data: uint8, the shape of the values. scale: uint8, one for each block."""

    data: torch.Tensor
    scale: torch.Tensor


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The bytes of float64 values, rounded to nearest, ties to even. Values beyond 448 saturate."""
    size = x.abs().clamp_max(448.0)
    exponent = torch.frexp(size).exponent - 1  # size = m * 2^exponent, 1 <= m < 2; 0 has the exponent -1
    step = torch.exp2((exponent.clamp_min(-6) - 3).double())
    rounded = torch.round(size / step) * step  # torch.round takes ties to even; both products are exact
    byte = torch.searchsorted(E4M3, rounded.contiguous())
    assert torch.equal(E4M3[byte], rounded)
    return (byte + 0x80 * torch.signbit(x)).to(torch.uint8)


def scale_bytes(amax: torch.Tensor, mode: str) -> torch.Tensor:
    """rceil: the smallest power of two with amax / scale <= 448. floor: 2^(exponent of amax - 8)."""
    exponent = torch.frexp(amax).exponent - 1
    byte = exponent - 8 + 127
    if mode == "rceil":
        byte = byte + (amax > 448 * torch.exp2((byte - 127).double()))
    return torch.where(amax == 0, 0, byte.clamp_min(0)).to(torch.uint8)


def cast(x: torch.Tensor, block: tuple[int, int], mode: str) -> Bytes:
    """Casts finite x [R, K]. `block`: rows and columns that share a scale. Last blocks may be smaller."""
    x = x.double()
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scale = scale_bytes(blocks.abs().amax((1, 3)), mode)
    data = to_e4m3(blocks / torch.exp2(scale.double() - 127)[:, None, :, None])
    return Bytes(data.flatten(2).flatten(0, 1)[:rows, :columns], scale)


def values(cast_bytes: Bytes, block: tuple[int, int]) -> torch.Tensor:
    """The float64 values that the bytes stand for."""
    data, scale = cast_bytes
    sign = 1.0 - 2.0 * (data >> 7).double()
    scales = torch.exp2(scale.double() - 127).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return sign * E4M3[(data & 0x7F).long()] * scales[:data.shape[0], :data.shape[1]]
