# SPDX-License-Identifier: Apache-2.0
"""The paired study: runs on two gloo ranks, what makes them pairs, and verdicts."""

import json
from unittest import mock

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
import yaml
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import safe_get_full_fp32_param

from ds_mxfp8_moe.compute import mx
from lib import paired
from tests.support.benchmark_runs import run_script
from training import convergence, convergence_results
from training.convergence import BF16, NUDGED, RECIPES, YARDSTICK, Run

pytestmark = [pytest.mark.slow, pytest.mark.wide]
CONFIGS = convergence.ROOT / "configs"


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A folder with a tiny model and the tokens of some texts."""
    folder = tmp_path_factory.mktemp("convergence")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
             "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 4, "max_position_embeddings": 32}
    model = yaml.safe_load((CONFIGS / "models/qwen3_moe_tiny.yaml").read_text()) | sizes
    (folder / "model.yaml").write_text(yaml.safe_dump(model))
    texts(folder, 200)
    convergence.store_tokens(str(folder / "texts"), folder)
    return folder


def texts(folder, count, copies=1):
    (folder / "texts").mkdir()
    for i in range(count * copies):
        (folder / f"texts/{i}.txt").write_text(f"{i % count:05} green bottles hanging on the wall\n" * 4)


def arguments(folder, *more):
    return convergence.parse_args(["--out", "unused", "--tokens", str(folder), "--heldout_windows", "16", *more])


def tiny(folder):
    """The size of the model in the folder."""
    size = convergence.Size(str(folder / "model.yaml"), 1e-2, 8, 32)
    return mock.patch.dict(convergence.SIZES, {"tiny": size})


def _train(folder, recipes, seed, *more):
    with tiny(folder):
        return [convergence.train_run(Run("tiny", recipe, seed), arguments(folder, "--steps", "6", *more))
                for recipe in recipes]


def test_runs_of_a_seed_are_pairs(ranks2, state):
    names = (BF16, YARDSTICK, "mxfp8_128", NUDGED)
    rows = dict(zip(names, ranks2.run(_train, state, names, 0)[0], strict=True))
    other, = ranks2.run(_train, state, (BF16, ), 1)[0]
    again, = ranks2.run(_train, state, ("mxfp8_128", ), 0)[0]
    assert all(row["correct"] for row in rows.values()), rows
    curves = {name: row["curves"] for name, row in rows.items()}
    # The same weights before the first step, and the same batches.
    start = curves[BF16]["heldout_loss"]["0"]
    assert curves[YARDSTICK]["heldout_loss"]["0"] == curves["mxfp8_128"]["heldout_loss_bf16"]["0"] == start
    assert curves["mxfp8_128"]["heldout_loss"] != curves["mxfp8_128"]["heldout_loss_bf16"]
    losses = {name: list(found["loss"].values()) for name, found in curves.items()}
    for name in names[1:]:
        # In float32, another order of sums may not show in six digits.
        assert name == YARDSTICK or losses[name] != losses[BF16]
        assert losses[name] == pytest.approx(losses[BF16], rel=0.01)
    assert abs(other["curves"]["loss"]["1"] - losses[BF16][0]) > 10 * abs(losses[YARDSTICK][0] - losses[BF16][0])
    assert again["curves"] == curves["mxfp8_128"]  # a run repeats itself
    # What is noted.
    assert list(curves[BF16]["loss"]) == list("123456") and list(curves[BF16]["heldout_loss"]) == list("0123456")
    for name, row in rows.items():
        loss = losses[name]
        assert loss[-1] < loss[0] and row["heldout_loss"] == curves[name]["heldout_loss"]["6"]
        assert all(norm > 0 for norm in curves[name]["grad_norm"].values())
        assert all(1 / 4 <= share < 1 for share in curves[name]["busiest_expert"].values())
        assert row["case"]["expert_parallel"] == row["case"]["ranks"] == 2
        assert row["case"]["tokens_per_step"] == 8 * 32 and row["case"]["lr"] == 1e-2
        assert row["layers_quantized"] == (2 if name == "mxfp8_128" else 0)


def test_a_run_that_is_not_what_it_should_be_says_so():
    right = {"curves": {"loss": {"1": 2.0}, "heldout_loss": {"0": 3.0, "1": 2.0}}, "moe_layers": 2,
             "layers_converted": 2, "layers_quantized": 2, "section": RECIPES["default_128"]}
    assert convergence.failure_of(right) is None
    for changed, told in (({"curves": right["curves"] | {"loss": {"1": float("nan")}}}, "the loss is not finite"),
                          ({"curves": right["curves"] | {"heldout_loss": {"0": 2.0, "1": 2.0}}}, "did not fall"),
                          ({"layers_converted": 1}, "1 layers were converted, expected 2 of 2"),
                          ({"section": RECIPES[BF16]}, "2 layers were quantized, expected 0 of 2")):
        assert told in convergence.failure_of(right | changed)


def _nudged(folder):
    found = []
    with tiny(folder):
        engine, *_ = convergence.build(Run("tiny", NUDGED, 0), arguments(folder))
    experts = {name: p for name, p in engine.module.named_parameters() if is_moe_param(p) and p.dim() > 1}
    before = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
    convergence.nudge(engine)
    for name, p in engine.module.named_parameters():
        wanted = mx.quantize_tiles(before[name]).dequantize() if name in experts else before[name]
        found.append(torch.equal(p.detach().float(), wanted)
                     and torch.equal(safe_get_full_fp32_param(p).float(), wanted))
    engine.destroy()
    return found + [any(not torch.equal(before[name], p.detach().float()) for name, p in experts.items())]


def test_a_nudge_rounds_the_weights_of_experts_and_of_their_optimizer(ranks2, state):
    for found in ranks2.run(_nudged, state):
        assert all(found) and len(found) > 10


# ---- what needs no ranks ------------------------------------------------------------------------------------------


def test_copies_of_a_text_are_left_out_and_none_is_on_both_sides(tmp_path):
    texts(tmp_path, 200, copies=2)
    convergence.store_tokens(str(tmp_path / "texts"), tmp_path)
    about = json.loads((tmp_path / "tokens.json").read_text())
    size = 1 + 4 * len("00000 green bottles hanging on the wall\n")
    assert about["training_tokens"] + about["heldout_tokens"] == 200 * size and about["heldout_tokens"] < 40 * size
    sides = [{bytes(text[1:].astype(np.uint8)) for text in np.load(tmp_path / f"{name}.npy").reshape(-1, size)}
             for name in ("training", "heldout")]
    assert len(sides[0] | sides[1]) == 200 and not sides[0] & sides[1]
    (tmp_path / "texts/new").write_text("later texts change nothing")
    convergence.store_tokens(str(tmp_path / "texts"), tmp_path)
    assert json.loads((tmp_path / "tokens.json").read_text()) == about
    with pytest.raises(SystemExit, match="has those of --data .*texts, not of pydoc"):
        convergence.store_tokens("pydoc", tmp_path)
    (tmp_path / "one").write_text("a single text")
    with pytest.raises(SystemExit, match="leave none for .*; expected a folder of many files"):
        convergence.store_tokens(str(tmp_path / "one"), tmp_path / "other")


def row(recipe, seed, heldout, steps=200, start=5.6, **case):
    """A result row; training goes the same way in all."""
    losses = {str(step): 2.0 - step / 1000 for step in (100, steps)}
    curves = dict.fromkeys(("loss", "grad_norm", "busiest_expert"), losses) | {
        "heldout_loss": {"0": start, "100": 2.0, str(steps): heldout}, "heldout_loss_bf16": {}, "sqnr_db": {},
        "shrinkage": {}}
    section = RECIPES.get(recipe, {"scale_block_size": 128})
    quantizes = convergence.quantizes(section)
    if quantizes:
        curves |= {"heldout_loss_bf16": {"0": start, str(steps): heldout - 0.05},
                   "sqnr_db": {"0": {"h": 31.5, "pre": 31.0}, str(steps): {"h": 31.6, "pre": 31.2}},
                   "shrinkage": {"0": {"h": -7e-4, "pre": -7e-4}, str(steps): {"h": -7e-4, "pre": -7e-4}}}
    return {"case": {"size": "tiny", "parameters": 1e6, "steps": steps, "tokens_per_step": 64, "expert_parallel": 2,
                     "ranks": 1, "heldout_windows": 128, "data_sha256": "ab" * 8, "seed": seed} | case,
            "contender": recipe, "section": section, "heldout_loss": heldout, "correct": True, "curves": curves,
            "roundings": ["h", "pre"] if quantizes else []}


def prepared(rows):
    return {(one["contender"], one["case"]["steps"]): one for one in convergence_results.prepare({"rows": rows})}


def test_differences_are_paired_by_seed():
    noise = [0.0, 0.3, -0.2, 0.1]  # of seeds, far larger than the differences
    rows = [row(BF16, seed, 1 + noise[seed]) for seed in range(4)]
    costs = [0.001, 0.002, 0.003, 0.002]
    rows += [row("mxfp8_128", seed, (1 + noise[seed]) * (1 + costs[seed])) for seed in range(4)]
    rows += [row(YARDSTICK, seed, (1 + noise[seed]) * (1 + cost)) for seed, cost in enumerate((0, 4e-3, 0, -4e-3))]
    rows += [row("default_128", 7, 1.0), row("mxfp8_128", 0, 9.0, steps=100)]  # without a partner; another case
    found = prepared(rows)
    of = found["mxfp8_128", 200]
    expected = paired.interval(costs)
    assert (of["difference"], of["low"], of["high"]) == pytest.approx(expected[:3]) and of["pairs"] == 4
    assert of["over_steps"][100].mean == 0 and of["over_steps"][200].mean == pytest.approx(expected.mean)
    ends = [(1 + n) * (1 + cost) for n, cost in zip(noise, costs, strict=True)]
    assert of["in_use"] == pytest.approx(np.mean([end / (end - 0.05) - 1 for end in ends]))
    assert of["less"] == pytest.approx(0.002) and of["roundings"] == "h, pre" and of["sqnr_db"] == 31.2
    assert "difference" not in found[BF16, 200] and "difference" not in found["default_128", 200]
    assert "verdict" not in found[YARDSTICK, 200] and found[YARDSTICK, 200]["difference"] == pytest.approx(0)


def test_runs_that_do_not_start_alike_are_no_pair():
    rows = [row(BF16, 0, 1.0), row(BF16, 1, 1.0), row("mxfp8_128", 0, 1.0), row("mxfp8_128", 1, 1.0, start=5.7)]
    of = prepared(rows)["mxfp8_128", 200]
    assert not of["correct"] and of["failure"] == "seeds [1] do not start with the loss of bf16"
    nudged = prepared([row(BF16, 0, 1.0), row("nudged", 0, 1.0, start=5.7)])["nudged", 200]
    assert nudged["correct"] and nudged["pairs"] == 1  # its weights are others before the first step


@pytest.mark.parametrize("costs, yardstick, said, beyond", [
    ([0.001, 0.0012, 0.0011], [0.0, 0.001, -0.001], "at most 0.135% above bf16.", False),
    ([0.01, -0.01, 0.002], [0.011, -0.012, 0.001], "not distinguishable from reordered bf16, at most 0.446% above "
     "that; at most 2.567% above bf16. If it costs 0.07%, about 239 seeds", False),
    ([0.01, -0.001, 0.004], [0.0, 0.001, -0.001], "open: at most 1.801% above bf16.", True)])
def test_verdicts(costs, yardstick, said, beyond):
    rows = [one for seed, (cost, other) in enumerate(zip(costs, yardstick, strict=True))
            for one in (row(BF16, seed, 1.0), row("default_128", seed, 1 + cost), row(YARDSTICK, seed, 1 + other))]
    of = prepared(rows)["default_128", 200]
    assert of["verdict"].startswith(said)
    assert of["beyond"] == (pytest.approx(of["high"] - 0.0025) if beyond else 0)


# ---- whole commands -------------------------------------------------------------------------------------------------


def _study(folder, *recipes):
    with tiny(folder):
        return run_script("training.convergence", folder / "study.json", "--sizes", "tiny", "--steps", "2", "--data",
                          folder / "texts", "--tokens", folder, "--heldout_windows", "4", "--seeds", "1", "--recipes",
                          *recipes)


def test_a_study_goes_on_where_it_ended(ranks2, state):
    first = ranks2.run(_study, state, "bf16")[0]
    rows = ranks2.run(_study, state, "bf16", "default_128")[0]
    assert [row["contender"] for row in rows] == ["bf16", "default_128"] and rows[0] == first[0]


def _ab(folder, config):
    """A user's model and config beside the same in bf16. Before, what a section without MXFP8 is told."""
    path = folder / "ds_config.json"
    given = ("--ds_config", path, "--hf_model", folder / "model.yaml", "--seq_len", "32", "--steps", "2", "--data",
             folder / "texts", "--tokens", folder / "ab", "--heldout_windows", "4", "--seeds", "1")
    for written in (config | {"mxfp8_moe": {"enabled": True, "recipe": "bf16"}}, config):
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_text(json.dumps(written))
        dist.barrier()
        if written is not config:
            with pytest.raises(SystemExit, match='expected a section "mxfp8_moe" .* another recipe than "bf16"'):
                convergence.parse_args(["--out", "unused", *map(str, given)])
    return run_script("training.convergence", folder / "ab.json", *given)


def test_an_ab_of_ones_own_model(ranks2, state):
    config = json.loads((CONFIGS / "ds/autoep_zero2.json").read_text())
    config |= {"expert_parallel": {"enabled": True, "autoep_size": 2}, "train_micro_batch_size_per_gpu": 1,
               "gradient_accumulation_steps": 2,
               "mxfp8_moe": {"enabled": True, "recipe": "mxfp8", "min_tokens_per_expert": 0,
                             "combine_fwd_dtype": "mxfp8"}}
    rows = {one["contender"]: one for one in ranks2.run(_ab, state, config)[0]}
    assert rows.keys() == {"bf16", "own", "reordered"} and rows["own"]["section"]["combine_fwd_dtype"] == "mxfp8"
    assert rows["bf16"]["section"]["recipe"] == "bf16" and "combine_fwd_dtype" not in rows["bf16"]["section"]
    assert str(state) not in (state / "ab.json").read_text()
