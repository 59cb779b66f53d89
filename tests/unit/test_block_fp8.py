# SPDX-License-Identifier: Apache-2.0
"""Block FP8 and MXFP4 as tiles of MXFP8, and back: which bytes stay, which values change, and how much."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ds_mxfp8_moe.compute.block_fp8 import (
    Rounding,
    from_block_fp8,
    from_mxfp4,
    quantize_again,
    slice_rows,
    stack_rows,
    tile_grid,
    to_block_fp8,
)
from ds_mxfp8_moe.compute.mx import dequantize, quantize, quantize_tiles
from ds_mxfp8_moe.compute.mxfp4 import unpack_tiles
from tests.support.mxfp4_cases import E2M1

F32, E4M3, E8M0, UINT8 = torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8
SHAPES = [(256, 128), (3, 128, 384), (2, 200, 160), (1, 32)]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def block_fp8(values, power_of_two=True):
    """As transformers quantizes, with tiles at the edges that are shorter."""
    tiles = quantize_tiles(values)
    if power_of_two:
        return to_block_fp8(tiles)
    rows, columns = -values.shape[-2] % 128, -values.shape[-1] % 128
    padded = torch.nn.functional.pad(values, (0, columns, 0, rows))
    amax = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).abs().amax((-3, -1))
    factors = amax / 448
    return (values / spread(factors, values.shape)).to(E4M3), factors


def spread(factors, shape):
    return factors.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :shape[-2], :shape[-1]]


def same_bytes(a, b):
    return torch.equal(a.qdata.view(UINT8), b.qdata.view(UINT8)) and torch.equal(a.scale_bytes, b.scale_bytes)


@pytest.mark.parametrize("dtype", [F32, E8M0])
@pytest.mark.parametrize("shape", SHAPES)
def test_powers_of_two_keep_every_byte_in_both_directions(shape, dtype):
    tiles = quantize_tiles(random(*shape))
    tiles.scale_bytes.view(-1)[0] = 0  # 2^-127, subnormal in float32
    weight, factors = to_block_fp8(tiles)
    assert factors.dtype == F32 and factors.shape == tile_grid(shape)
    factors = factors.to(dtype)
    assert torch.equal(weight.float() * spread(factors.float(), shape), dequantize(tiles, F32))
    rounding = Rounding()
    assert same_bytes(from_block_fp8("w", weight, factors, rounding), tiles)
    assert rounding.changed == 0 and rounding.sqnr_db == float("inf")


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_factors_cost_one_more_rounding(shape, dtype):
    weight, factors = block_fp8(random(*shape), power_of_two=False)
    factors = factors.to(dtype)
    values = weight.float() * spread(factors.float(), shape)
    rounding = Rounding()
    tiles = from_block_fp8("w", weight, factors, rounding)
    assert same_bytes(tiles, quantize_tiles(values))
    assert rounding.values == values.numel() and rounding.changed == (dequantize(tiles, F32) != values).sum()
    # Rounding to 4 significant bits costs 31.5 dB for values of any scale.
    assert shape == (1, 32) or 31 < rounding.sqnr_db < 32.5


def test_experts_of_a_stack_are_converted_apart():
    """One with other factors, one with a NaN, and two whose bytes stay."""
    weight, factors = block_fp8(random(4, 192, 160))
    weight[1], factors[1] = block_fp8(random(192, 160, seed=1), power_of_two=False)
    weight.view(UINT8)[3, 5, 7] = 0xFF
    before, rounding, alone = weight.clone(), Rounding(), Rounding()
    found = from_block_fp8("w", weight, factors, rounding)
    for i in range(4):
        assert same_bytes(found[i], from_block_fp8("w", weight[i], factors[i], alone))
    assert torch.equal(weight.view(UINT8), before.view(UINT8)) and rounding.values == alone.values == 2 * 192 * 160


def test_factors_that_are_no_number():
    weight, factors = block_fp8(random(256, 384))
    weight.view(UINT8)[0, 300] = 0x7F
    factors[0] = torch.tensor([0, float("nan"), 0.5])
    factors[1] = torch.tensor([float("inf"), -0.5, 0.75])
    values = dequantize(from_block_fp8("w", weight, factors), F32)
    assert (values[:128, :128] == 0).all()
    assert values[:128, 128:].isnan().all() and values[128:, :128].isnan().all()  # a NaN makes its tile NaN
    assert torch.equal(values[128:, 128:256], weight[128:, 128:256].float() * -0.5)


@pytest.mark.parametrize("where", ["factor", "data"])
def test_a_nan_makes_its_tile_nan_and_changes_no_other(where):
    weight, factors = block_fp8(random(256, 384))
    values = weight.float() * spread(factors, weight.shape)
    (factors if where == "factor" else weight.view(UINT8))[0, -1] = float("nan") if where == "factor" else 0xFF
    rounding = Rounding()
    tiles = from_block_fp8("w", weight, factors, rounding)
    again = dequantize(tiles, F32)
    assert tiles.scale_bytes[0, 2] == 255 and (tiles.qdata.view(UINT8)[:128, 256:] == 0x7F).all()
    again[:128, 256:] = values[:128, 256:]
    assert torch.equal(again, values)


@pytest.mark.parametrize("error, words, weight, factors", [
    (TypeError, "layers.3.w1 has dtype torch.bfloat16", torch.zeros(128, 128, dtype=torch.bfloat16), torch.ones(1, 1)),
    (TypeError, "scales of layers.3.w1 have dtype torch.int32", torch.zeros(128, 128, dtype=E4M3),
     torch.ones(1, 1, dtype=torch.int32)),
    (ValueError, r"layers.3.w1 has shape \(128, 40\)", torch.zeros(128, 40, dtype=E4M3), torch.ones(1, 1)),
    (ValueError, r"scales of shape \(2, 2\); tiles of 128x128 have scales of shape \(1, 1\)",
     torch.zeros(128, 128, dtype=E4M3), torch.ones(2, 2)),
])
def test_what_is_no_block_fp8_is_named(error, words, weight, factors):
    with pytest.raises(error, match=words):
        from_block_fp8("layers.3.w1", weight, factors)


def mxfp4(shape, lowest, highest, seed=0):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), generator=generator, dtype=UINT8)
    return blocks, torch.randint(lowest, highest + 1, blocks.shape[:-1], generator=generator, dtype=UINT8)


@pytest.mark.parametrize("shape", [(256, 128), (2, 192, 160)])
def test_mxfp4_is_exact_while_scales_in_a_tile_are_near(shape):
    blocks, scales = mxfp4(shape, 100, 114)
    rounding = Rounding()
    weights = from_mxfp4("w", blocks, scales, rounding)
    tiles = unpack_tiles(weights)
    reference = convert_moe_packed_tensors(blocks.view(-1, *blocks.shape[-3:]), scales.view(-1, *scales.shape[-2:]),
                                           dtype=F32).transpose(1, 2).view(shape)
    assert torch.equal(dequantize(tiles, F32), reference)
    assert rounding.changed == 0 and tiles.scale_bytes.shape == tile_grid(shape)
    assert torch.equal(weights.values(), reference) and torch.equal(weights.tile_bytes, tiles.scale_bytes)


def test_mxfp4_values_that_a_tile_cannot_hold_are_counted():
    blocks, scales = mxfp4((128, 128), 100, 100)
    blocks[0], blocks[1] = 0x77, 0x91  # 6 and 6; 0.5 and -0.5
    scales[0] += 15
    exact_blocks, exact_scales = mxfp4((128, 128), 100, 100, seed=1)
    rounding = Rounding()
    both = from_mxfp4("w", torch.stack([exact_blocks, blocks]), torch.stack([exact_scales, scales]), rounding)
    tiles = unpack_tiles(from_mxfp4("w", blocks, scales))
    assert torch.equal(unpack_tiles(both).scale_bytes[1], tiles.scale_bytes)
    lookup = torch.tensor([*E2M1, *(-value for value in E2M1)])
    values = torch.stack([lookup[(blocks & 15).int()], lookup[(blocks >> 4).int()]], -1).flatten(-3)
    # The tile's step is now 2^0 of the other blocks: 0.5 and 1.5 lie between two steps.
    assert rounding.changed == (values[1:].abs().remainder(1) == 0.5).sum() > 0
    assert rounding.values == values.numel()  # of the expert that is not exact
    assert torch.equal(dequantize(tiles, F32)[1:] * 2.0**27, values[1:].round())


def test_mxfp4_of_another_form_is_named():
    blocks, scales = mxfp4((128, 128), 100, 100)
    with pytest.raises(ValueError, match=r"experts.down_proj: its blocks have shape \(128, 4, 16\)"):
        from_mxfp4("experts.down_proj", blocks, scales[:64])
    with pytest.raises(TypeError, match="experts.down_proj"):
        from_mxfp4("experts.down_proj", blocks, scales.int())
    scales[5, 1] = 255
    with pytest.raises(ValueError, match="experts.down_proj: one of its scales is NaN"):
        from_mxfp4("experts.down_proj", blocks, scales)


@pytest.mark.parametrize("rows", [128, 192])
def test_gate_above_up_and_apart_again(rows):
    gate, up = (quantize_tiles(random(2, rows, 96, seed=seed)) for seed in (1, 2))
    both = stack_rows([gate, up])
    again = [slice_rows(both, 0, rows), slice_rows(both, rows, 2 * rows)]
    values = torch.cat([dequantize(gate, F32), dequantize(up, F32)], dim=1)
    if rows % 128 == 0:  # bytes stay
        assert same_bytes(again[0], gate) and same_bytes(again[1], up)
        assert torch.equal(dequantize(both, F32), values)
    else:  # tiles cross the border: quantized as one matrix, which changes few values
        assert same_bytes(both, quantize_tiles(values))
        assert (dequantize(both, F32) != values).float().mean() < 0.01
        assert torch.equal(dequantize(both, F32)[:, rows:], dequantize(again[1], F32))


def test_blocks_of_32_are_quantized_again_for_export():
    blocks = quantize(random(256, 128).bfloat16())
    rounding = Rounding()
    tiles = quantize_again(blocks, rounding)
    assert same_bytes(tiles, quantize_tiles(dequantize(blocks, F32))) and 0 < rounding.changed < 0.02 * blocks.numel()
    with pytest.raises(ValueError, match="given were blocks of 32"):
        to_block_fp8(blocks)


def test_transformers_reads_what_is_written():
    tiles = quantize_tiles(random(256, 128))
    values = Fp8Dequantize(None)._dequantize_one(*to_block_fp8(tiles), output_dtype=F32)
    assert torch.equal(values, dequantize(tiles, F32))
