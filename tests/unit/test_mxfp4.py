# SPDX-License-Identifier: Apache-2.0
"""MXFP4 in plain PyTorch: which scale and which value each number gets, and what becomes of it as tiles of MXFP8."""

import pytest
import torch

from ds_mxfp8_moe.compute.mx import dequantize, quantize_tiles, sqnr_db
from ds_mxfp8_moe.compute.mxfp4 import MXFP4Weights, quantize, unpack_tiles
from tests.support.mxfp4_cases import E2M1, hard

F32 = torch.float32
GRID = torch.tensor([*(-value for value in E2M1), *E2M1])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def least_squares(w):
    """For each block of 32, the smallest squared error over many scales, each value at its nearest of all."""
    blocks = w.double().unflatten(-1, (-1, 32))
    errors = [((blocks.unsqueeze(-1) - GRID * 2.0**exponent).abs().amin(-1)**2).sum(-1) for exponent in range(-16, 4)]
    return torch.stack(errors).amin(0)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_no_scale_is_better(dtype):
    w = random(96, 256).to(dtype)
    found = quantize(w)
    error = (found.values() - w.float()).double().unflatten(-1, (-1, 32)).square().sum(-1)
    assert torch.allclose(error, least_squares(w), rtol=1e-5)
    largest_alone = quantize_by_the_largest(w)
    assert sqnr_db(w, found.values()) > sqnr_db(w, largest_alone) + 0.2 and 18.9 < sqnr_db(w, found.values()) < 19.3


def quantize_by_the_largest(w):
    """With the smallest scale that cuts nothing."""
    blocks = w.float().unflatten(-1, (-1, 32))
    scale = torch.exp2((blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil())
    nearest = GRID[(blocks.unsqueeze(-1) / scale.unsqueeze(-1) - GRID).abs().argmin(-1)]
    return (nearest * scale).flatten(-2)


def test_values_of_the_format_stay():
    for weights in (quantize(random(160, 96)), quantize(random(2, 64, 128))):
        again = quantize(weights.values())
        assert torch.equal(again.values(), weights.values())
        assert torch.equal(torch.signbit(again.values()), torch.signbit(weights.values()))


def test_ties_are_rounded_to_even_and_zeros_keep_their_signs():
    w = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.0, -5.0, 0.0, *[6.0] * 20])[None]
    values = quantize(w).values()[0, :12]
    assert values.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -0.0, -4.0, 0.0]
    assert torch.signbit(values).tolist() == torch.signbit(w[0, :12]).tolist()


def test_extreme_blocks():
    w = torch.zeros(4, 32)
    w[1], w[2, 3], w[3] = 2.0**-140, float("nan"), 3e38
    found = quantize(w)
    assert torch.equal(found.values()[0], w[0]) and (found.values()[1] - w[1]).abs().max() < 2.0**-130
    assert found.scale_bytes[2, 0] == 255 and found.values()[2].isnan().all()
    assert (found.values()[3] / 3e38).sub(1).abs().max() < 0.25
    w[2, 3] = -float("inf")
    assert quantize(w).scale_bytes[2, 0] == 255
    with pytest.raises(ValueError, match=r"shape \(4, 48\) .*multiple of 32"):
        quantize(torch.zeros(4, 48))


def test_tiles_are_those_of_the_values():
    weights = hard(5, 256, 256)
    tiles = unpack_tiles(weights)
    expected = quantize_tiles(weights.values())
    assert torch.equal(weights.tile_bytes, tiles.scale_bytes) and torch.equal(tiles.scale_bytes, expected.scale_bytes)
    assert torch.equal(tiles.qdata.view(torch.uint8), expected.qdata.view(torch.uint8))
    same = dequantize(tiles, F32) == weights.values()
    assert same[0, :128].all() and not same[1].all()  # scales that are near, and far apart
    transposed = unpack_tiles(weights, transposed=True)
    assert torch.equal(dequantize(transposed, F32).transpose(1, 2).nan_to_num(), dequantize(tiles, F32).nan_to_num())


@pytest.mark.parametrize("apart", range(11, 20))
def test_weights_that_may_round_in_their_tiles_are_told_apart(apart):
    """One of three experts has blocks whose scales are as far apart as this."""
    generator = torch.Generator().manual_seed(apart)
    codes = torch.randint(256, (3, 160, 96), generator=generator, dtype=torch.uint8)
    scales = torch.full((3, 160, 6), 100, dtype=torch.uint8)
    scales[1, 130, 5] -= apart
    codes[1, 130, 80:] = 0x91  # 0.5 and -0.5
    scales[2, 7, 0] = 5
    codes[2, 7, :16] = 0x80  # zeros
    weights = MXFP4Weights.of(codes, scales, torch.bfloat16)
    same = (dequantize(unpack_tiles(weights), F32) == weights.values()).flatten(1).all(1)
    assert torch.equal(weights.may_round(), ~same) and weights.may_round().tolist() == [False, apart > 14, False]
