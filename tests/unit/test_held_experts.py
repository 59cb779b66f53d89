# SPDX-License-Identifier: Apache-2.0
"""What stands in a Hugging Face model for experts that are held in 8 bits, and the block FP8 of gate above up."""

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ds_mxfp8_moe.compute.block_fp8 import Rounding, to_block_fp8
from ds_mxfp8_moe.compute.mx import dequantize, quantize_tiles
from ds_mxfp8_moe.layers.held_experts import HeldExperts, gate_above_up, say_rounding

STACKS = "gate_up_proj", "down_proj"
SHAPES = torch.Size((8, 128, 96)), torch.Size((8, 96, 64))


def held():
    config = Qwen3MoeConfig(num_experts=8, hidden_size=96, moe_intermediate_size=64)
    with torch.device("meta"):
        source = Qwen3MoeExperts(config)
    return HeldExperts(source, SHAPES, torch.bfloat16, torch.device("cpu"))


def test_parameters_have_shapes_and_no_memory():
    experts = held()
    for change in (lambda: experts, experts.float, lambda: experts.to("cpu"), experts.bfloat16):
        change()
        parameters = [getattr(experts, stack) for stack in STACKS]
        assert [p.shape for p in parameters] == list(SHAPES) and not any(p.requires_grad for p in parameters)
        assert all(p.untyped_storage().nbytes() <= 4 and p[0, 0, 0].isnan() for p in parameters)
    assert parameters[0].dtype == torch.bfloat16 and experts.act_fn(torch.ones(1)) > 0
    assert experts.state_dict() == {} and experts.num_experts == 8
    assert all(p.requires_grad for p in experts.requires_grad_().float().parameters())


@pytest.mark.parametrize("rows", [128, 192, 96])
def test_scales_of_gate_above_up_are_of_the_whole_or_of_both_halves(rows):
    both = torch.randn(2 * rows, 128, generator=torch.Generator().manual_seed(0))
    halves = [to_block_fp8(quantize_tiles(half)) for half in both.split(rows)]
    data = torch.cat([data.view(torch.uint8) for data, _ in halves]).view(torch.float8_e4m3fn)
    values = torch.cat([data.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
                        for data, scale in halves])
    tiles = gate_above_up("w", data, torch.cat([scale for _, scale in halves]), Rounding())
    assert torch.equal(dequantize(tiles, torch.float32), dequantize(quantize_tiles(values), torch.float32))
    if rows == 192:  # with 96 rows, the numbers of tiles are the same
        joined = quantize_tiles(both)
        again = gate_above_up("w", *to_block_fp8(joined), Rounding())
        assert torch.equal(again.scale_bytes, joined.scale_bytes)


def test_rank_0_says_what_was_rounded_again(capsys):
    rounding = Rounding()
    say_rounding(rounding)
    assert capsys.readouterr().out == ""
    data, factors = torch.full((256, 128), 1.375).to(torch.float8_e4m3fn), torch.full((2, 1), 1.3)
    gate_above_up("w", data, factors, rounding)
    say_rounding(rounding)
    assert "tile of 128x128: 100.00% of these experts' weights changed, SQNR" in capsys.readouterr().out
