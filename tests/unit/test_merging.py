# SPDX-License-Identifier: Apache-2.0
"""Adapters that are merged keep their whole update in the mean, however small it is, and change nothing else."""

import pytest
import torch

from ds_mxfp8_moe.compute import merging
from ds_mxfp8_moe.compute.formula import LowRank
from ds_mxfp8_moe.compute.merging import (
    KeptShare,
    merge,
    merge_as_held,
    merge_as_tiles,
    merge_update,
    product,
    random_bits,
    seeds_of,
)
from ds_mxfp8_moe.compute.mx import MXTensor, dequantize, quantize_tiles
from ds_mxfp8_moe.compute.mxfp4 import quantize as quantize_mxfp4

EXPERTS, ROWS, COLUMNS = 2, 1024, 768
NAMES = ["experts.0.up_proj.weight", "experts.1.up_proj.weight"]
SIZES = (0.002, 0.01, 0.1)  # norm of the update over the norm of the weights


def seeds(step: int = 0) -> torch.Tensor:
    return seeds_of(NAMES, step, "cpu")


def weights_and_adapter(size: float) -> tuple[torch.Tensor, LowRank]:
    w_ENK = torch.randn(EXPERTS, ROWS, COLUMNS) / COLUMNS**0.5
    low = LowRank(torch.randn(EXPERTS, 8, COLUMNS), torch.randn(EXPERTS, ROWS, 8))
    return w_ENK, LowRank(low.a_ERK, low.b_ENR * (size * w_ENK.norm() / product(low).norm()))


def share(before: torch.Tensor, after: torch.Tensor, low: LowRank) -> float:
    kept = KeptShare()
    kept.add(before.float(), after.float(), product(low))
    return kept.percent / 100


def nearest(w_ENK: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize_tiles(w_ENK), torch.float32)


@pytest.mark.parametrize("size", SIZES)
def test_tiles_keep_the_update_that_rounding_to_nearest_loses(size):
    w_ENK, low = weights_and_adapter(size)
    tiles = quantize_tiles(w_ENK)
    before = tiles.dequantize(torch.float32)
    merged = merge(tiles, low, seeds())
    assert share(before, merged.dequantize(torch.float32), low) == pytest.approx(1, abs=0.03)
    lost = share(before, nearest(before + product(low)), low)
    assert lost < 0.85 if size <= 0.03 else lost > 0.97


@pytest.mark.parametrize("size", SIZES)
def test_weights_in_bf16_keep_the_update_in_either_format(size):
    w_ENK, low = weights_and_adapter(size)
    w_ENK = w_ENK.bfloat16()
    merged = merge(w_ENK, low, seeds())
    assert share(w_ENK, merged, low) == pytest.approx(1, abs=0.01)
    tiles = merge_as_tiles(w_ENK, low, seeds(), "rceil")
    assert torch.equal(tiles.dequantize(), quantize_tiles(merged).dequantize())  # no noise of another rounding
    assert share(nearest(w_ENK), tiles.dequantize(torch.float32), low) == pytest.approx(1, abs=0.05)
    lost = share(w_ENK, (w_ENK.float() + product(low)).bfloat16(), low)
    assert lost < 0.9 if size == 0.002 else lost > 0.97


def test_weights_in_bf16_that_come_from_fp8_are_merged_in_tiles():
    """A model that transformers has dequantized: its weights are e4m3 numbers, and a cast would lose the update."""
    w_ENK, low = weights_and_adapter(0.005)
    tiles = quantize_tiles(w_ENK)
    mixed = torch.stack([tiles.dequantize(torch.bfloat16)[0], w_ENK[1].bfloat16()])
    found = merge_as_tiles(mixed, low, seeds(), "rceil")
    for e, expected in enumerate((merge(tiles, low, seeds()), quantize_tiles(merge(mixed, low, seeds())))):
        assert torch.equal(found.qdata[e].view(torch.uint8), expected.qdata[e].view(torch.uint8))
        assert torch.equal(found.scale_bytes[e], expected.scale_bytes[e])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("in_mxfp4", [False, True])
def test_frozen_weights_keep_the_update_by_the_same_bits_in_every_step(in_mxfp4, size):
    w_ENK, low = weights_and_adapter(size)
    held = quantize_mxfp4(w_ENK) if in_mxfp4 else quantize_tiles(w_ENK)
    before = held.values() if in_mxfp4 else held.dequantize(torch.float32)
    merged = merge_as_held(held, low)
    after = merged.dequantize(torch.float32)
    # A block's largest value in MXFP4 is cut if it grows a little.
    assert share(before, after, low) == pytest.approx(0.98 if in_mxfp4 else 1, abs=0.05)
    assert not in_mxfp4 or torch.equal(quantize_mxfp4(after).values(), after)
    again = merge_as_held(held, low)
    assert torch.equal(again.qdata.view(torch.uint8), merged.qdata.view(torch.uint8))
    nothing = merge_as_held(held, LowRank(low.a_ERK, torch.zeros_like(low.b_ENR)))
    assert torch.equal(nothing.dequantize(torch.float32), before)


def hard_tiles() -> MXTensor:
    """All 256 bytes under several scales, with zeros of both signs; a tile that is zero, and one that is NaN."""
    data = torch.randint(0, 256, (EXPERTS, 256, 256), dtype=torch.uint8)
    data[data & 0x7F == 0x7F] &= 0xFE
    data[0, :128, :128], data[1, 128:, 128:] = 0, 0x7F
    scale = torch.randint(110, 130, (EXPERTS, 2, 2)).byte()
    scale[1, 1, 1] = 255
    return MXTensor(data.view(torch.float8_e4m3fn), scale, 128, torch.bfloat16, tiled=True)


def test_an_update_of_zero_changes_no_byte():
    tiles = hard_tiles()
    low = LowRank(torch.randn(EXPERTS, 8, 256), torch.zeros(EXPERTS, 256, 8))
    merged = merge(tiles, low, seeds())
    assert torch.equal(merged.qdata.view(torch.uint8), tiles.qdata.view(torch.uint8))
    assert torch.equal(merged.scale_bytes, tiles.scale_bytes)
    plain = torch.randn(EXPERTS, 256, 256).bfloat16()
    plain[0, 0, :4] = torch.tensor([-0.0, torch.inf, -torch.inf, torch.finfo(torch.bfloat16).max])
    assert torch.equal(merge(plain, low, seeds()).view(torch.int16), plain.view(torch.int16))
    for mode in ("rceil", "floor"):
        assert torch.equal(merge_as_tiles(plain[1:], LowRank(low.a_ERK[1:], low.b_ENR[1:]), seeds()[1:],
                                          mode).dequantize(), quantize_tiles(plain[1:], mode).dequantize())


def test_a_value_becomes_one_of_its_two_neighbors():
    """Signs, subnormals, the largest values, and tiles whose scale grows or shrinks by the update."""
    tiles = hard_tiles()
    low = LowRank(torch.randn(EXPERTS, 8, 256), torch.randn(EXPERTS, 256, 8))
    low.b_ENR.mul_(torch.exp2(torch.randint(-8, 8, (256, 1)).float()))
    exact = tiles.dequantize(torch.float32) + product(low)
    merged = merge(tiles, low, seeds())
    finite = exact.isfinite()
    assert torch.equal(merged.dequantize(torch.float32).isnan(), ~finite) and (~finite).sum() == 128 * 128
    scale = (merged.scale_bytes.double() - 127).exp2().repeat_interleave(128, 1).repeat_interleave(128, 2)
    x, data = (exact.double() / scale)[finite], merged.qdata.double()[finite]
    assert x.abs().max() <= 448 and torch.equal(merged.scale_bytes[:, :1], quantize_tiles(exact).scale_bytes[:, :1])
    step = torch.exp2(x.abs().log2().floor().clamp_min(-6) - 3)
    assert ((data - x).abs() < step).all() and (data * x >= 0).all()
    assert (x.abs() < 2**-6).any() and (data[x.abs() < 2**-6] != 0).any()


def test_the_mean_over_steps_is_the_exact_sum():
    """Of subnormals, normal numbers and the largest, each between its neighbors."""
    data = torch.tensor([0.0, 2**-9, 2**-6, -1.0, 1.75, -240, 448, 8]).to(torch.float8_e4m3fn)
    tiles = MXTensor(data.repeat(128, 16).unsqueeze(0), torch.full((1, 1, 1), 127, dtype=torch.uint8), 128,
                     torch.bfloat16, tiled=True)
    update = torch.tensor([2**-11, 2**-10, -2**-12, 0.03, -0.1, 3, -9, 0.3]).repeat(1, 1, 16)
    low = LowRank(torch.cat([update] + 7 * [torch.zeros_like(update)], dim=1), torch.ones(1, 128, 8))
    total = sum(merge(tiles, low, seeds(step)[:1]).dequantize(torch.float32).double() for step in range(20))
    mean = total.view(128, 16, 8).mean((0, 1)) / 20 - data.double()
    assert mean.tolist() == pytest.approx(update[0, 0, :8].tolist(), rel=0.05)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_is_seen(value):
    w_ENK, low = weights_and_adapter(0.01)
    low.b_ENR[1, 130, 0] = value
    merged = merge(quantize_tiles(w_ENK), low, seeds())
    assert (merged.scale_bytes == 255).nonzero().tolist() == [[1, 1, k] for k in range(COLUMNS // 128)]
    assert not merge(w_ENK.bfloat16(), low, seeds())[1, 130].isfinite().any()


def test_random_bits_are_a_hash_that_wraps_around():
    """In Python's integers. Names, steps and places get other bits; a part of the experts gets the same."""

    def hashed(x: int, low: int, high: int) -> int:
        x ^= low
        x ^= x >> 16
        x = x * 0x7FEB352D + high & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    bits = random_bits(seeds(5), 40, 70)
    for e, (low, high) in enumerate((seeds(5).long() & 0xFFFFFFFF).tolist()):
        assert (bits[e].flatten().long() & 0xFFFFFFFF).tolist() == [hashed(i, low, high) for i in range(2800)]
    assert torch.equal(random_bits(seeds(5)[1:], 40, 70)[0], bits[1])
    assert not (bits == random_bits(seeds(6), 40, 70)).any()
    of_each_bit = (random_bits(seeds(), 512, 512).unsqueeze(-1) >> torch.arange(32) & 1).float().mean((0, 1, 2))
    assert (of_each_bit - 0.5).abs().max() < 0.004


@pytest.mark.parametrize("shape", [(3000, 40), (64, 8, 3, 3), (4, 100, 64)], ids=str)
def test_weights_of_any_shape(monkeypatch, shape):
    monkeypatch.setattr(merging, "MOST_VALUES", 50_000)
    w = torch.randn(shape)
    update = torch.randn(shape) / 500
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        before = w.to(dtype)
        merged = merge_update(before, update, "name", 3)
        assert merged.dtype == dtype and merged.shape == before.shape
        assert (merged.float() - before.float() - update).abs().max() <= 4 * torch.finfo(dtype).eps
    kept = KeptShare()
    kept.add(w.bfloat16(), merge_update(w.bfloat16(), update, "name", 3), update)
    assert kept.percent == pytest.approx(100, abs=15)
