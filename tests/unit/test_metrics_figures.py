# SPDX-License-Identifier: Apache-2.0
"""What metrics.py computes from a layer's tokens and routes."""

import math
from types import SimpleNamespace

import pytest
import torch

from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.engine.metrics import figures_of, load_figures
from ds_mxfp8_moe.routing.watch import sample


def recipe(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"quantize_gemm": True, "block_size": 32, "scaling_mode": "rceil", **changes})


def routes(experts: list, num_experts: int) -> Routes:
    expert_TK = torch.tensor(experts)
    return Routes(expert_TK=expert_TK, weight_TK=torch.ones(expert_TK.shape), num_experts=num_experts)


def figures(x_TH: torch.Tensor, some_routes: Routes, some_recipe, chosen_E: torch.Tensor | None = None) -> dict:
    sums, amax = sample(x_TH, some_routes, some_routes.counts_E() if chosen_E is None else chosen_E, some_recipe)
    return figures_of([sums[:-7].sum().item(), *sums.tolist(), 0, 0, 0], [amax.item(), 0], 1)


def test_load_of_experts_and_ranks():
    found = load_figures([4, 4], [4, 0, 2, 2])
    assert found == {"load_most": 2.0, "load_fewest": 0.0, "rank_most": 1.0,
                     "load_entropy": pytest.approx(1.5 * math.log(2) / math.log(4))}
    assert load_figures([8, 0], [8, 0, 0, 0]) == {"load_most": 4.0, "load_fewest": 0.0, "load_entropy": 0.0,
                                             "rank_most": 2.0}
    assert load_figures([5], [5])["load_entropy"] == 1 and load_figures([0], [0, 0]) == {}


def test_dropped_choices_and_tokens():
    found = figures(torch.tensor([[3.0] * 32, [-7.0] * 32]), routes([[0, -1], [1, -1]], 2), recipe(),
                    chosen_E=torch.tensor([3, 1]))
    assert found["dropped"] == 0.5 and found["amax"] == 7
    assert found["load_most"] == 1.5  # dropped choices count


def test_blocks_of_zeros_and_saturated_ones():
    x = torch.zeros(2, 96)
    x[0, :32] = 1.0
    x[0, 32:64] = 500.0  # in mode floor its scale is 1, which holds 448 at most
    assert figures(x, routes([[0], [0]], 1), recipe())["zero_blocks"] == pytest.approx(4 / 6)
    assert figures(x, routes([[0], [0]], 1), recipe())["saturated_blocks"] == 0
    found = figures(x, routes([[0], [0]], 1), recipe(scaling_mode="floor"))
    assert found["saturated_blocks"] == pytest.approx(1 / 6)
    wide = figures(x, routes([[0], [0]], 1), recipe(block_size=128))  # a last block of 96
    assert wide["zero_blocks"] == 0.5


def test_quality_of_the_cast():
    torch.manual_seed(0)
    found = figures(torch.randn(64, 256), routes([[0]] * 64, 1), recipe())
    assert 30 < found["sqnr_db"] < 33
    assert "sqnr_db" not in figures(torch.ones(4, 32), routes([[0]] * 4, 1), recipe())  # exact
    nan = torch.randn(4, 32)
    nan[1, 1] = math.nan
    assert math.isnan(figures(nan, routes([[0]] * 4, 1), recipe())["sqnr_db"])
    assert {"sqnr_db", "zero_blocks"}.isdisjoint(figures(nan, routes([[0]] * 4, 1), recipe(quantize_gemm=False)))


def test_no_tokens():
    assert figures(torch.zeros(0, 64), routes(torch.zeros(0, 2).long().tolist() or [[]], 2), recipe()) == {}


def test_times_are_means_over_the_ranks_that_have_them():
    found = figures_of([4, 4, 4, 4, *[0] * 7, 6.0, 10.0, 2], [0, 5.0], 2)
    assert {name: value for name, value in found.items() if name.endswith("ms") or name.endswith("ms_most")} == {
        "wait_ms": 3, "wait_ms_most": 5, "exchange_ms": 5}
