# SPDX-License-Identifier: Apache-2.0
"""Weights in MXFP4, and the kernels that unpack and make them, against plain torch."""

import torch

from ds_mxfp8_moe.compute import mxfp4
from ds_mxfp8_moe.compute.mxfp4 import MXFP4Weights

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code


def packed(*shape: int, lowest: int, highest: int, seed: int = 0) -> MXFP4Weights:
    """All codes, under scale bytes from `lowest` to `highest`."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(lowest, highest + 1, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
    return MXFP4Weights.of(codes, scales, torch.bfloat16)


def hard(experts: int, rows: int, columns: int) -> MXFP4Weights:
    """In each expert another range of scales: near, far apart, all. Blocks of zeros below scales of any size, NaN."""
    ranges = ((120, 126), (100, 126), (0, 255), (0, 6), (240, 254))
    experts_w = [packed(rows, columns, lowest=lowest, highest=highest, seed=i)
                 for i, (lowest, highest) in enumerate(ranges[:experts])]
    codes, scales = (torch.stack(parts) for parts in list(zip(*(w.buffers for w in experts_w), strict=True))[:2])
    codes[:, 1, :16], codes[:, 3, 16:32] = 0, 0x88
    scales[:, 1, 0], scales[:, 3, 1] = 254, 0
    codes[0, 128:, 64:], scales[0, 128:, 4:] = 0, 200  # a tile of zeros
    scales[1, -1, -1] = 255
    return MXFP4Weights.of(codes, scales, torch.bfloat16)


def run_unpack(device: str, experts: int, rows: int, columns: int) -> None:
    from ds_mxfp8_moe.ops.triton_kernels.unpack import unpack_tiles
    from tests.support.conformance import poisoned
    from tests.support.quantize_cases import same

    weights = hard(experts, rows, columns)
    with poisoned():
        for transposed in (False, True):
            actual = unpack_tiles(*(buffer.to(device) for buffer in weights.buffers), transposed)
            same(actual, mxfp4.unpack_tiles(weights, transposed))
            assert actual.qdata.is_contiguous() and actual.scale_bytes.is_contiguous()
        one = MXFP4Weights(*(buffer[1] for buffer in weights.buffers), weights.dtype)
        same(unpack_tiles(*(buffer.to(device) for buffer in one.buffers), False), mxfp4.unpack_tiles(one))


def run_pack(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """To the byte, but for the values of blocks that are NaN."""
    from ds_mxfp8_moe.ops.triton_kernels.pack import pack
    from tests.support.conformance import poisoned

    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    w[..., 1, :], w[..., 2, :32] = -0.0, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -5, *[6] * 22])
    w[..., 3, :32] *= 2.0**-130  # subnormal
    w[..., 4, :32] *= 2.0**120
    w[..., 5, 7], w[..., 6, 40] = float("nan"), float("-inf")
    w = w.to(dtype)
    with poisoned():
        codes, scales, tiles = (part.cpu() for part in pack(w.to(device)))
    wanted = mxfp4.quantize(w)
    assert torch.equal(scales, wanted.scale_bytes) and torch.equal(tiles, wanted.tile_bytes)
    assert (scales == 255).sum() == 2 * w[..., 0, 0].numel()
    numbers = (scales < 255).repeat_interleave(16, -1)
    assert torch.equal(codes[numbers], wanted.codes[numbers])
