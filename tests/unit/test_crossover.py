# SPDX-License-Identifier: Apache-2.0
"""From how many tokens an expert MXFP8 is chosen, against where it was measured to win."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ds_mxfp8_moe.compute import crossover
from ds_mxfp8_moe.compute.formula import ExpertFormula
from ds_mxfp8_moe.config import MXFP8MoEConfig, resolve

CPU, GPU = torch.device("cpu"), torch.device("cuda")

# By recipe and how slow memory is (1: H200's; 1.44: H100's): hidden size, FFN size, experts of the rank -> what was
# measured, tokens per expert: there the recipe loses to bf16, and there it wins.
MEASURED = {
    ("mxfp8_wgrad_with_hp", 1): {
        (7168, 2048, 4): (1024, 2048), (7168, 2048, 32): (256, 1024), (4096, 1024, 8): (1024, 2048),
        (2048, 1408, 8): (1024, 2048), (2048, 768, 32): (1024, 4096), (2048, 768, 4): (4096, 16384)},
    ("mxfp8_wgrad_with_hp", 1.44): {
        (8192, 5120, 8): (1024, 2048), (7168, 2048, 4): (1024, 2048), (4096, 1024, 32): (2048, 4096),
        (2048, 1408, 4): (2048, 4096), (2048, 768, 32): (16384, math.inf)},
    ("mxfp8", 1): {
        (7168, 2048, 4): (256, 1024), (4096, 1024, 4): (1024, 2048), (2048, 1408, 8): (256, 1024),
        (2048, 768, 32): (1024, 2048), (2048, 768, 4): (2048, 4096)},
    ("mxfp8", 1.44): {
        (8192, 5120, 4): (256, 1024), (7168, 2048, 32): (256, 1024), (4096, 1024, 8): (1024, 2048),
        (2048, 1408, 4): (1024, 2048), (2048, 768, 8): (2048, 4096)},
}


@pytest.mark.parametrize("recipe_name, slowness, shape", [(*of, shape) for of in MEASURED for shape in MEASURED[of]],
                         ids=str)
def test_lies_where_it_was_measured(recipe_name, slowness, shape, monkeypatch):
    hidden, ffn, experts = shape
    formula = ExpertFormula(kind="gated", activation="silu", hidden_size=hidden, ffn_size=ffn, up="up", gate="gate",
                            down="down")
    recipe = resolve(MXFP8MoEConfig(recipe=recipe_name, scale_block_size=128), "cpu")

    def fewest(formula=formula, recipe=recipe, device=GPU, casts=1):
        return crossover.break_even_tokens(formula, recipe, experts, device, casts)

    assert fewest(device=CPU) == 0
    monkeypatch.setattr(crossover, "capability", lambda device: (9, 0))
    monkeypatch.setattr(crossover, "_memory_slowness", lambda device: slowness)
    loses, wins = MEASURED[recipe_name, slowness][shape]
    assert loses < fewest() <= wins
    assert fewest(casts=0) < fewest(casts=1 / 8) < fewest() or math.isinf(fewest(casts=0))
    assert fewest(recipe=replace(recipe, block_size=32)) == 0
    assert fewest(formula=replace(formula, hidden_size=512, ffn_size=256)) == math.inf


def test_memory_is_compared_with_an_h200_s(monkeypatch):
    def slowness(megahertz, bits):
        properties = SimpleNamespace(memory_clock_rate=1000 * megahertz, memory_bus_width=bits)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return crossover._memory_slowness.__wrapped__(GPU)  # past its cache

    assert slowness(3201, 6016) == pytest.approx(1, abs=0.01)
    assert slowness(2619, 5120) == pytest.approx(1.44, abs=0.01)
    assert slowness(0, 0) == 1
