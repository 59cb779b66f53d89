# SPDX-License-Identifier: Apache-2.0
"""The paired study of quality: runs of a seed are pairs, and what their differences say."""

import statistics

import numpy as np
import pytest
import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import safe_get_full_fp32_param

from ds_mxfp8_moe.compute import mx
from lib import paired
from tests.support.green_bottles import green_bottles, tiny
from training import convergence, convergence_results
from training.convergence import BF16, NUDGED, RECIPES, YARDSTICK, Run

pytestmark = pytest.mark.slow


def _pairs(folder):
    """Runs of recipes and seeds, and whether a nudge rounds the experts' weights and the optimizer's."""
    args = convergence.parse_args(["--out", "unused", "--tokens", str(folder), "--heldout_windows", "16", "--steps",
                                   "6"])
    with tiny(folder):
        found = {(recipe, seed): convergence.train_run(Run("tiny", recipe, seed), args)
                 for recipe, seed in ((BF16, 0), (YARDSTICK, 0), ("mxfp8_128", 0), (NUDGED, 0), (BF16, 1))}
        again = convergence.train_run(Run("tiny", "mxfp8_128", 0), args)
        assert again["curves"] == found["mxfp8_128", 0]["curves"]  # a run repeats itself
        engine, *_ = convergence.build(Run("tiny", NUDGED, 0), args)
    for p in engine.module.parameters():
        if is_moe_param(p) and p.dim() > 1:
            rounded = mx.quantize_tiles(p.detach().clone()).dequantize(torch.float32)
            convergence.nudge(engine)
            assert torch.equal(p.float(), rounded) and torch.equal(safe_get_full_fp32_param(p).float(), rounded)
            break
    engine.destroy()
    return found


@pytest.mark.wide
def test_runs_of_a_seed_are_pairs(ranks2, tmp_path):
    green_bottles(tmp_path)
    convergence.store_tokens(str(tmp_path / "texts"), tmp_path)
    rows = ranks2.run(_pairs, tmp_path)[0]
    assert all(row["correct"] for row in rows.values()), rows
    curves = {of: row["curves"] for of, row in rows.items()}
    losses = {of: list(found["loss"].values()) for of, found in curves.items()}
    base = losses[BF16, 0]
    # The same weights before the first step, and the same batches.
    start = curves[BF16, 0]["heldout_loss"]["0"]
    assert curves[YARDSTICK, 0]["heldout_loss"]["0"] == curves["mxfp8_128", 0]["heldout_loss_bf16"]["0"] == start
    assert curves["mxfp8_128", 0]["heldout_loss"] != curves["mxfp8_128", 0]["heldout_loss_bf16"]
    for name in (YARDSTICK, "mxfp8_128", NUDGED):
        # In float32, another order of sums may not show in six digits.
        assert name == YARDSTICK or losses[name, 0] != base
        assert losses[name, 0] == pytest.approx(base, rel=0.01)
    assert abs(losses[BF16, 1][0] - base[0]) > 10 * abs(losses[YARDSTICK, 0][0] - base[0])
    for (name, _), row in rows.items():
        assert row["heldout_loss"] == row["curves"]["heldout_loss"]["6"] < row["curves"]["heldout_loss"]["0"]
        assert row["layers_quantized"] == (2 if name == "mxfp8_128" else 0)
        assert row["case"]["expert_parallel"] == row["case"]["ranks"] == 2


def test_a_run_that_is_not_what_it_should_be_says_so():
    right = {"curves": {"loss": {"1": 2.0}, "heldout_loss": {"0": 3.0, "1": 2.0}}, "moe_layers": 2,
             "layers_converted": 2, "layers_quantized": 2, "section": RECIPES["default_128"]}
    assert convergence.failure_of(right) is None
    for changed, told in (({"curves": right["curves"] | {"loss": {"1": float("nan")}}}, "the loss is not finite"),
                          ({"curves": right["curves"] | {"heldout_loss": {"0": 2.0, "1": 2.0}}}, "did not fall"),
                          ({"layers_converted": 1}, "1 layers were converted, expected 2 of 2"),
                          ({"section": RECIPES[BF16]}, "2 layers were quantized, expected 0 of 2")):
        assert told in convergence.failure_of(right | changed)


def test_copies_of_a_text_are_left_out_and_none_is_on_both_sides(tmp_path):
    green_bottles(tmp_path, copies=2)
    convergence.store_tokens(str(tmp_path / "texts"), tmp_path)
    size = 1 + 4 * len("00000 green bottles hanging on the wall\n")
    sides = [{bytes(text[1:].astype(np.uint8)) for text in np.load(tmp_path / f"{name}.npy").reshape(-1, size)}
             for name in ("training", "heldout")]
    assert len(sides[0] | sides[1]) == 200 and not sides[0] & sides[1] and len(sides[1]) < 40
    with pytest.raises(SystemExit, match="has those of --data .*texts, not of pydoc"):
        convergence.store_tokens("pydoc", tmp_path)


# 97.5 % quantiles, as tables print them.
@pytest.mark.parametrize("freedom, t", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (15, 2.131), (120, 1.980)])
def test_an_interval_by_hand(freedom, t):
    assert paired.t_quantile(freedom) == pytest.approx(t, abs=5.1e-4)
    values = [1.0, *range(2, freedom + 2)]
    found = paired.interval(values)
    assert (found.mean, found.spread) == (statistics.fmean(values), statistics.stdev(values))
    half = t * found.spread / len(values)**0.5
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), rel=1e-3)
    assert paired.interval([2.0]) == (2.0, None, None, None, 1)


def run_of(recipe, seed, heldout, start=5.6, steps=200):
    """A row of the study."""
    in_bf16 = {"0": start, str(steps): heldout - 0.05} if recipe in convergence_results.JUDGED else {}
    return {"case": {"size": "tiny", "steps": steps, "tokens_per_step": 64, "expert_parallel": 2, "seed": seed},
            "contender": recipe, "heldout_loss": heldout, "correct": True,
            "curves": {"heldout_loss": {"0": start, str(steps): heldout}, "heldout_loss_bf16": in_bf16}}


def prepared(rows):
    return {one["contender"]: one for one in convergence_results.prepare({"rows": rows})}


def test_differences_are_paired_by_seed():
    noise = [0.0, 0.3, -0.2, 0.1]  # of seeds, far larger than the differences
    costs = {BF16: [0] * 4, "mxfp8_128": [0.001, 0.002, 0.003, 0.002], YARDSTICK: [0, 4e-3, 0, -4e-3]}
    rows = [run_of(name, seed, (1 + noise[seed]) * (1 + cost)) for name, of in costs.items()
            for seed, cost in enumerate(of)]
    rows.append(run_of("default_128", 7, 1.0))  # without a partner
    found = prepared(rows)
    of = found["mxfp8_128"]
    assert (of["difference"], of["low"], of["high"]) == pytest.approx(paired.interval(costs["mxfp8_128"])[:3])
    ends = [(1 + n) * (1 + cost) for n, cost in zip(noise, costs["mxfp8_128"], strict=True)]
    assert of["in_use"] == pytest.approx(np.mean([end / (end - 0.05) - 1 for end in ends]))
    assert of["less"] == pytest.approx(0.002) and of["pairs"] == 4
    assert "difference" not in found[BF16] and "difference" not in found["default_128"]
    assert "verdict" not in found[YARDSTICK] and found[YARDSTICK]["difference"] == pytest.approx(0)


def test_runs_that_do_not_start_alike_are_no_pair():
    base = [run_of(BF16, 0, 1.0), run_of(BF16, 1, 1.0)]
    of = prepared([*base, run_of("mxfp8_128", 0, 1.0), run_of("mxfp8_128", 1, 1.0, start=5.7)])["mxfp8_128"]
    assert not of["correct"] and of["failure"] == "seeds [1] do not start with the loss of bf16"
    assert prepared([*base, run_of(NUDGED, 0, 1.0, start=5.7)])[NUDGED]["correct"]  # its weights are others


@pytest.mark.parametrize("costs, yardstick, said, beyond", [
    ([0.001, 0.0012, 0.0011], [0.0, 0.001, -0.001], "at most 0.135% above bf16.", False),
    ([0.01, -0.01, 0.002], [0.011, -0.012, 0.001], "not distinguishable from reordered bf16, at most 0.446% above "
     "that; at most 2.567% above bf16.", False),
    ([0.01, -0.001, 0.004], [0.0, 0.001, -0.001], "open: at most 1.801% above bf16.", True)])
def test_verdicts(costs, yardstick, said, beyond):
    rows = [one for seed, (cost, other) in enumerate(zip(costs, yardstick, strict=True))
            for one in (run_of(BF16, seed, 1.0), run_of("default_128", seed, 1 + cost),
                        run_of(YARDSTICK, seed, 1 + other))]
    of = prepared(rows)["default_128"]
    assert of["verdict"] == said
    assert of["beyond"] == (pytest.approx(of["high"] - 0.0025) if beyond else 0)
