# SPDX-License-Identifier: Apache-2.0
"""The paired study: runs on two gloo ranks, what makes them pairs, the order of runs, verdicts and tables."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import safe_get_full_fp32_param
from rounding_cases import DEFAULT, OF_WGRAD

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from ds_mxfp8_moe import mx
from lib import paired, results_file, show
from training import convergence, convergence_results, convergence_run
from training.convergence import STUDY
from training.convergence_run import BF16, RECIPES, YARDSTICK, Recipe, Run

pytestmark = pytest.mark.slow
CONFIGS = convergence.ROOT / "configs"


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A folder with two tiny models and the tokens of some texts."""
    folder = tmp_path_factory.mktemp("convergence")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
             "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 4, "max_position_embeddings": 32}
    model = yaml.safe_load((CONFIGS / "models/qwen3_moe_tiny.yaml").read_text()) | sizes
    (folder / "autoep.yaml").write_text(yaml.safe_dump(model))
    (folder / "classic.yaml").write_text(
        "{hidden_size: 32, ffn_size: 64, num_layers: 2, num_heads: 2, seq_len: 32, moe: {num_experts: 4, k: 2}}")
    texts(folder)
    convergence_run.store_tokens(str(folder / "texts"), folder)
    return folder


def texts(folder):
    (folder / "texts").mkdir()
    for i in range(200):
        (folder / f"texts/{i}.txt").write_text(f"{i} green bottles hanging on the wall\n" * 4)


def _train(state, recipe, seed, *arguments):
    args = convergence.parse_args(["--out", "unused", "--state", str(state), "--steps", "6", "--log_every", "2",
                                   "--heldout_every", "4", "--heldout_windows", "16", "--ranks", "2", *arguments])
    size = convergence_run.Size(str(state / "autoep.yaml"), str(state / "classic.yaml"), 1e-2, 8, 32)
    with mock.patch.dict(convergence_run.SIZES, {"tiny": size}):
        convergence_run.train_run(Run("tiny", recipe, seed), args)


def trained(ranks2, state, recipe, seed, *arguments):
    """The log and the summary of a run of six steps on two ranks."""
    ranks2.run(_train, state, recipe, seed, *arguments)
    folder = state / f"tiny-{recipe}-{seed}"
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return log, json.loads((folder / "summary.json").read_text())


def curve(log, name):
    return {row["step"]: row[name] for row in log if name in row}


def test_runs_of_a_seed_are_pairs(ranks2, state):
    runs = {name: trained(ranks2, state, name, 0) for name in (BF16, YARDSTICK, "mxfp8_128")}
    logs = {name: log for name, (log, _) in runs.items()}
    # The same weights before the first step, and the same batches.
    start = logs[BF16][0]["heldout_loss"]
    assert logs[YARDSTICK][0]["heldout_loss"] == logs["mxfp8_128"][0]["heldout_loss_bf16"] == start
    assert logs["mxfp8_128"][0]["heldout_loss"] != start
    losses = {name: curve(log, "loss") for name, log in logs.items()}
    for name in (YARDSTICK, "mxfp8_128"):
        assert losses[name] != losses[BF16] and losses[name] == pytest.approx(losses[BF16], rel=0.01)
    other, _ = trained(ranks2, state, BF16, 1)
    assert abs(curve(other, "loss")[2] - losses[BF16][2]) > 10 * abs(losses[YARDSTICK][2] - losses[BF16][2])
    # A run repeats itself, whatever is measured on the way.
    again, _ = trained(ranks2, state, "mxfp8_128", 0, "--heldout_every", "2")
    assert curve(again, "loss") == losses["mxfp8_128"]
    assert curve(again, "grad_norm") == curve(logs["mxfp8_128"], "grad_norm")
    # What is logged.
    assert [row["step"] for row in logs[BF16]] == [0, 2, 4, 6]
    assert list(curve(logs[BF16], "heldout_loss")) == list(curve(logs["mxfp8_128"], "sqnr_db")) == [0, 4, 6]
    for log, summary in runs.values():
        assert log[-1]["loss"] < log[1]["loss"] and log[-1]["heldout_loss"] < log[0]["heldout_loss"]
        assert all(row["grad_norm"] > 0 and 1 / 4 <= row["busiest_expert"] < 1 for row in log[1:])
        assert summary["case"]["expert_parallel"] == summary["case"]["ranks"] == 2
        assert summary["case"]["tokens_per_step"] == 8 * 32 and summary["case"]["lr"] == 1e-2
    assert [set(runs[name][1]["roundings"]) for name in runs] == [set(), set(), DEFAULT | OF_WGRAD]


@pytest.mark.parametrize("recipe, expected", [
    ("wires_128", DEFAULT | {"combine_fwd", "dispatch_bwd"}), ("classic_default_128", DEFAULT), ("plain", set()),
    ("default_128-pre", DEFAULT - {"pre"}), ("default_128-x", DEFAULT - {"dispatch_fwd"}),
    ("mxfp8_128-g", (DEFAULT | OF_WGRAD) - {"combine_bwd", "g_wgrad"}),
    ("default_128-fp8_sums", DEFAULT)])
def test_each_row_says_which_roundings_acted(ranks2, state, recipe, expected):
    log, summary = trained(ranks2, state, recipe, 0)
    assert set(summary["roundings"]) == expected and log[-1]["loss"] < log[1]["loss"]
    assert summary["section"] == RECIPES[recipe].section
    assert summary["layers_converted"] == (0 if recipe == "plain" else 2) and summary["moe_layers"] == 2
    for row in log:
        for name, db in row.get("sqnr_db", {}).items():
            assert db > 25 and abs(row["shrinkage"][name]) < 0.01
    done = convergence_results.row(state / f"tiny-{recipe}-0")
    assert done["correct"] and done["step_ms"] > 0
    assert done["heldout_loss"] == pytest.approx(log[-1]["heldout_loss"], rel=1e-5)
    summary_path = state / f"tiny-{recipe}-0/summary.json"
    summary_path.write_text(json.dumps(summary | {"roundings": [] if expected else ["h"]}))
    assert convergence_results.row(state / f"tiny-{recipe}-0")["failure"] == (
        "no rounding acted" if expected else "a rounding acted")


def _nudged(state):
    args = convergence.parse_args(["--out", "unused", "--state", str(state), "--ranks", "2"])
    size = convergence_run.Size(str(state / "autoep.yaml"), str(state / "classic.yaml"), 1e-2, 8, 32)
    found = []
    with mock.patch.dict(convergence_run.SIZES, {"tiny": size}):
        for recipe in ("nudged", "classic_bf16"):
            engine, *_ = convergence_run.build(Run("tiny", recipe, 0), args)
            experts = {name: p for name, p in engine.module.named_parameters() if is_moe_param(p) and p.dim() > 1}
            before = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
            convergence_run.nudge(engine)
            for name, p in engine.module.named_parameters():
                wanted = mx.quantize_tiles(before[name]).dequantize() if name in experts else before[name]
                found.append(torch.equal(p.detach().float(), wanted)
                             and torch.equal(safe_get_full_fp32_param(p).float(), wanted))
            found.append(len(experts) > 0 and any(not torch.equal(before[name], p.detach().float())
                                                  for name, p in experts.items()))
            engine.destroy()
    return found


def test_a_nudge_rounds_the_weights_of_experts_and_of_their_optimizer(ranks2, state):
    for found in ranks2.run(_nudged, state):
        assert all(found) and len(found) > 10


def test_a_run_that_is_stopped_is_the_beginning_of_a_whole_one(ranks2, state):
    whole, _ = trained(ranks2, state, "default_128", 0)
    begun, summary = trained(ranks2, state, "default_128", 0, "--stop_after", "4")
    assert [row["step"] for row in begun] == [0, 2, 4] and summary["case"]["stopped_after"] == 4
    assert summary["case"]["steps"] == 6 and curve(begun, "loss") == {
        step: loss for step, loss in curve(whole, "loss").items() if step <= 4}


def test_more_than_two_epochs_are_refused(ranks2, state):
    with pytest.raises(AssertionError, match="epochs of --data"):
        ranks2.run(_train, state, BF16, 0, "--steps", "10000")


def test_a_yardstick_without_another_order_is_refused(ranks2, state):
    with pytest.raises(AssertionError, match="a rank has one sequence in a step, so no sum has another order"):
        ranks2.run(_one_sequence, state)


def _one_sequence(state):
    engine = mock.Mock(**{"train_micro_batch_size_per_gpu.return_value": 1,
                          "gradient_accumulation_steps.return_value": 1})
    windows = convergence_run.stored(state, "training", 32)
    convergence_run.batches_of_step(windows, engine, Run("tiny", BF16, 0), 0, True)


# ---- what needs no ranks ------------------------------------------------------------------------------------------


def test_switches_change_one_thing():
    for name, recipe in RECIPES.items():
        for base in ("default_128", "mxfp8_128"):
            if name.startswith(base) and name != base:
                changed = {key: value for key, value in recipe.section.items() if key not in RECIPES[base].section}
                assert len(changed) + len(recipe.off or ()) > 0 or recipe.off == ()
                assert RECIPES[base].section.items() <= recipe.section.items()
                assert len(changed) <= 1 or name.endswith(tuple(convergence_run.TOGETHER))


def test_copies_of_a_text_are_left_out_and_none_is_on_both_sides(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(400):
        (tmp_path / f"texts/{i}").write_text(f"text {i % 200:05}")
    convergence_run.store_tokens(str(tmp_path / "texts"), tmp_path)
    about = json.loads((tmp_path / "tokens.json").read_text())
    assert about["training_tokens"] + about["heldout_tokens"] == 200 * 11 and about["heldout_tokens"] < 400
    sides = [{bytes(text[1:].astype(np.uint8)) for text in np.load(tmp_path / f"{name}.npy").reshape(-1, 11)}
             for name in ("training", "heldout")]
    assert len(sides[0] | sides[1]) == 200 and not sides[0] & sides[1]
    (tmp_path / "texts/new").write_text("later texts change nothing")
    convergence_run.store_tokens(str(tmp_path / "texts"), tmp_path)
    assert json.loads((tmp_path / "tokens.json").read_text()) == about
    (tmp_path / "one").write_text("a single text")
    with pytest.raises(SystemExit, match="leave none for .*; expected a folder of many files"):
        convergence_run.store_tokens(str(tmp_path / "one"), tmp_path / "other")


def test_a_state_keeps_to_its_data(tmp_path):
    (tmp_path / "tokens.json").write_text('{"source": "stdlib"}')
    convergence_run.store_tokens("stdlib", tmp_path)
    with pytest.raises(SystemExit, match="has the tokens of --data stdlib, not of pydoc"):
        convergence_run.store_tokens("pydoc", tmp_path)


def arguments(state, *more):
    (state / "tokens.json").write_text(json.dumps({"sha256": "ab" * 32}))
    return convergence.parse_args(["--out", "unused", "--state", str(state), *more])


def test_the_most_important_runs_come_first(tmp_path):
    names = [run.name for run in convergence.plan(arguments(tmp_path))]
    assert names[:6] == ["50M-bf16-0", "50M-default_128-0", "50M-reordered-0", "50M-mxfp8_128-0", "50M-bf16-1",
                         "50M-default_128-1"]
    assert len(names) == len(set(names)) == (4 * 16 + 4 * 3) + 5 * 16
    assert names[64:68] == ["50M-default_32-0", "50M-wires_128-0", "50M-classic_bf16-0", "50M-classic_default_128-0"]
    assert names[76:78] == ["300M-bf16-0", "300M-default_128-0"]
    few = convergence.plan(arguments(tmp_path, "--recipes", "bf16", "default_128-h", "--seeds", "2", "--sizes",
                                     "300M"))
    assert [run.name for run in few] == ["300M-bf16-0", "300M-default_128-h-0", "300M-bf16-1", "300M-default_128-h-1"]


@pytest.mark.parametrize("given, told", [
    (["--recipes", "flor"], "unknown flor; expected some of bf16, default_128"),
    (["--stop_after", "1001"], "--stop_after 1001: expected at most the 1000 --steps"),
    (["--heldout_every", "15"], "--heldout_every must be a multiple of --log_every"),
    (["--ranks", "3"], "--ranks 3: expected a divisor of the 16 sequences of a step of 50M"),
    (["--hf_model", "x"], "--hf_model and --model need --ds_config"),
    (["--ds_config", "nowhere.json"], "there is no file nowhere.json"),
    (["--state", str(convergence.ROOT / "runs")], "name a folder outside of the repository")])
def test_wrong_arguments(given, told, capsys, tmp_path):
    with pytest.raises(SystemExit):
        convergence.parse_args(["--out", "unused", *given])
    assert told in capsys.readouterr().err


class Ranks:
    """Stands for the ranks of a run of `seconds`, which fails if `fails`. It leaves a summary if it does not."""

    def __init__(self, folder, case, seconds=0.5, fails=False):
        self.folder, self.case, self.fails, self.ended = folder, case, fails, False
        self.at = time.monotonic() + seconds

    def poll(self):
        if time.monotonic() < self.at:
            return None
        if not self.fails:
            (self.folder / "summary.json").write_text(json.dumps(self.case))
        return int(self.fails)

    def end(self):
        self.ended = True


@pytest.mark.parametrize("codes, expected", [([0, 0], 0), ([0, 7], 7), ([None, 0], None), ([None, 7], 7)])
def test_a_run_ends_with_its_first_rank_that_fails(codes, expected):
    """None: the rank runs on."""
    sleeping = "import sys, time; time.sleep(60)"
    processes = [subprocess.Popen([sys.executable, "-c", sleeping if code is None else f"raise SystemExit({code})"])
                 for code in codes]
    ranks = convergence.Ranks(processes)
    for code, process in zip(codes, processes, strict=True):
        if code is not None:
            process.wait(timeout=30)
    assert ranks.poll() == expected
    ranks.end()
    assert all(process.returncode is not None for process in processes)


def test_a_rank_ends_with_the_study():
    """Although the process that started it is killed."""
    reads, writes = os.pipe()
    study = os.fork()
    if study == 0:
        me = os.getpid()
        if os.fork() == 0:
            convergence_run._end_with(me)
        os.kill(me, 9)
    os.close(writes)
    os.waitpid(study, 0)
    assert os.read(reads, 1) == b""  # the rank, too, has closed its end
    os.close(reads)


def test_as_many_runs_side_by_side_as_there_are_places(tmp_path, monkeypatch, capsys):
    """Seed 2 fails, and seed 4 takes longer than there is time."""
    args = arguments(tmp_path, "--recipes", "bf16", "--sizes", "50M", "--seeds", "5", "--seconds", "1e9")
    started, stored, launched = [], [], []

    def launch(run, place, args):
        started.append((place, run.seed))
        folder = tmp_path / run.name
        folder.mkdir(exist_ok=True)
        (folder / "output.txt").write_text("out of memory")
        done = {"case": convergence.asked(args), "section": RECIPES[BF16].section}
        launched.append(Ranks(folder, done, 60 if run.seed == 4 else 0.5, run.seed == 2))
        return launched[-1]

    monkeypatch.setattr(convergence, "launch", launch)
    monkeypatch.setattr(convergence, "places", lambda _: ["0", "1"])
    monkeypatch.setattr(convergence, "ENDING_S", 0)
    monkeypatch.setattr(convergence, "SHORTEST_S", 0)
    args.seconds = time.time() - convergence.STARTED + 3
    assert not convergence.work(convergence.plan(args), args, lambda: stored.append(1))
    assert [seed for _, seed in started] == [0, 1, 2, 3, 4] and {place for place, _ in started} == {"0", "1"}
    told = capsys.readouterr().err
    assert len(stored) == 3 and "50M-bf16-4: no time to finish it" in told and "out of memory" in told
    assert [ranks.ended for ranks in launched] == [False] * 4 + [True]
    # What is finished is not started again, and nothing is started that would not end in time.
    started.clear()
    args.seconds = 0.0
    assert convergence.work(convergence.plan(args), args, stored.clear) and not started
    assert "no time for 2 runs, beginning with 50M-bf16-2" in capsys.readouterr().err
    # With other arguments, nothing is.
    args.steps = 7
    assert not any(convergence.finished(run, args) for run in convergence.plan(args))


def row(recipe, seed, heldout, steps=200, start=5.6, **case):
    """A result row; training goes the same way in all."""
    losses = {str(step): 2.0 - step / 1000 for step in (100, steps)}
    curves = dict.fromkeys(("loss", "grad_norm", "busiest_expert"), losses) | {
        "heldout_loss": {"0": start, "100": 2.0, str(steps): heldout}, "heldout_loss_bf16": {}, "sqnr_db": {},
        "shrinkage": {}}
    section = RECIPES[recipe].section
    quantizes = RECIPES[recipe].quantizes
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


def test_runs_that_were_stopped_are_compared_with_the_beginning_of_whole_ones():
    rows = [row(BF16, seed, 1.0 + seed) for seed in range(3)]
    for seed, cost in enumerate((0.01, 0.02, 0.03)):
        one = row("default_128-h", seed, 2 * (1 + cost), steps=100)
        one["case"] |= {"steps": 200, "stopped_after": 100}
        one["curves"]["loss"] = {"100": 1.9 * (1 + 2 * cost)}
        rows.append(one)
    found = convergence_results.prepare({"rows": rows})
    stopped = next(one for one in found if one["case"].get("stopped_after"))
    assert stopped["difference"] == pytest.approx(0.02) and stopped["training"] == pytest.approx(0.04)
    assert stopped["pairs"] == 3 and "verdict" not in stopped
    told = convergence_results.sentences({"rows": found})
    assert told == [f"- tiny, stopped after 100 steps, default_128-h: +4.00% [{stopped['training_low']:+.2%}, "
                    f"{stopped['training_high']:+.2%}] of the training loss after a fifth of the steps; seeds: 3."]


def test_runs_that_do_not_start_alike_are_no_pair():
    rows = [row(BF16, 0, 1.0), row(BF16, 1, 1.0), row("mxfp8_128", 0, 1.0), row("mxfp8_128", 1, 1.0, start=5.7)]
    of = prepared(rows)["mxfp8_128", 200]
    assert not of["correct"] and of["failure"] == "seeds [1] do not start with the loss of bf16"
    nudged = prepared([row(BF16, 0, 1.0), row("nudged", 0, 1.0, start=5.7)])["nudged", 200]
    assert nudged["correct"] and nudged["pairs"] == 1  # its weights are others before the first step


@pytest.mark.parametrize("costs, yardstick, said, beyond", [
    ([0.001, 0.0012, 0.0011], [0.0, 0.001, -0.001], "at most 0.135% above bf16.", True),
    ([0.01, 0.0101, 0.0102], [0.0, 0.001, -0.001], "costs quality: at most 1.035% above bf16.", False),
    ([0.01, -0.01, 0.002], [0.011, -0.012, 0.001], "not told apart from reordered bf16, at most 0.446% above that; at "
     "most 2.567% above bf16. If it costs 0.07%, about 239 seeds", True),
    ([0.01, -0.001, 0.004], [0.0, 0.001, -0.001], "open: at most 1.801% above bf16.", False),
    ([0.01], [0.0], "one pair says nothing about the spread.", None)])
def test_verdicts(costs, yardstick, said, beyond, tmp_path, capsys):
    rows = [one for seed, (cost, other) in enumerate(zip(costs, yardstick, strict=True))
            for one in (row(BF16, seed, 1.0), row("default_128", seed, 1 + cost), row(YARDSTICK, seed, 1 + other))]
    of = prepared(rows)["default_128", 200]
    assert of["verdict"].startswith(said)
    assert of.get("beyond") == (None if beyond is None else 0 if beyond else pytest.approx(of["high"] - 0.0025))
    path = tmp_path / "convergence.json"
    results_file.write("convergence", rows, path, of_commit="abc")
    assert show.show(convergence.SHOWN, path, check=True) == ("bars not reached: 1" if beyond is False else "")
    assert said in capsys.readouterr().out and path.with_suffix(".png").stat().st_size > 5000


def test_result_files_of_before_are_shown():
    for path in results_file.RESULTS.glob("convergence*.json"):
        for one in convergence_results.prepare(results_file.read(path)):
            assert one["correct"] and np.isfinite(one["heldout_loss"])


def test_runs_that_a_file_knows_are_taken_from_it(tmp_path, monkeypatch, capsys):
    """All but one of two; that one finishes at once."""
    known, out, state = tmp_path / "known.json", tmp_path / "out.json", tmp_path / "state"
    stopped = row(BF16, 1, 3.5, stopped_after=100)  # stands for no whole run, and stays in the file
    results_file.write("convergence", [row(BF16, 0, 1.5), stopped], known, of_commit="older")
    state.mkdir()
    (state / "tokens.json").write_text(json.dumps({"sha256": "ab" * 32}))
    asked = []

    def work(runs, args, store):
        asked.extend(run.name for run in runs)
        for run in runs:
            (state / run.name).mkdir()
            summary = {"case": convergence.asked(args), "section": RECIPES[run.recipe].section}
            (state / run.name / "summary.json").write_text(json.dumps(summary))
        return True

    monkeypatch.setattr(convergence, "work", work)
    monkeypatch.setattr(convergence_run, "store_tokens", lambda *_: None)
    monkeypatch.setattr(convergence, "row", lambda folder: row(BF16, 1, 2.5))
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--state", str(state), "--sizes", "tiny", "--recipes", "bf16",
                                      "--seeds", "2", "--known", str(known), "--out", str(out), "--steps", "200"])
    with pytest.raises(SystemExit) as ended:
        convergence.main()
    assert not ended.value.code and asked == ["tiny-bf16-1"]
    assert "2 of 2 runs are finished" in capsys.readouterr().err
    result = results_file.read(out)
    assert [one["heldout_loss"] for one in result["rows"]] == [1.5, 2.5, 3.5] and result["commit"] == "older"
    monkeypatch.setitem(RECIPES, BF16, Recipe({"recipe": BF16, "overlap": False}))
    with pytest.raises(SystemExit, match="has tiny-bf16-0 with the section {'recipe': 'bf16'}, and it is .* now"):
        convergence.main()
    sys.argv[-1] = "300"
    with pytest.raises(SystemExit, match="known.json has runs of {'steps': 200, .* and these are of {'steps': 300"):
        convergence.main()


# ---- whole commands -------------------------------------------------------------------------------------------------


def command(*arguments):
    script = convergence.ROOT / "examples/benchmarks/training/convergence.py"
    done = subprocess.run([sys.executable, str(script), *map(str, arguments)], env=os.environ | {
        "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(convergence.ROOT)}, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout, done.stderr


def test_the_study_of_a_tiny_model(tmp_path):
    given = ("--sizes", "tiny", "--steps", "4", "--log_every", "2", "--heldout_every", "2", "--heldout_windows", "8",
             "--data", "pydoc", "--sharing", "2", "--state", tmp_path, "--seconds", "250")
    first = tmp_path / "first.json"
    status, _, told = command(*given, "--recipes", "bf16", "--seeds", "1", "--out", first)
    assert status == 0, told
    status, shown, told = command(*given, "--recipes", "bf16", "default_128", "--seeds", "1", "--known", first,
                                  "--out", tmp_path / "second.json")
    assert status == 0 and "2 of 2 runs are finished" in told and "tiny-bf16" not in told, told
    assert "tiny, default_128:" in shown and "seeds: 1" in shown
    of = {one["contender"]: one["curves"] for one in results_file.read(tmp_path / "second.json")["rows"]}
    assert not of["bf16"]["gradient_sqnr_db"] and min(of["default_128"]["gradient_sqnr_db"].values()) > 20


def test_an_ab_of_ones_own_model(tmp_path):
    config = json.loads((CONFIGS / "ds/autoep_zero2.json").read_text())
    config |= {"expert_parallel": {"enabled": True, "autoep_size": 1}, "train_micro_batch_size_per_gpu": 1,
               "gradient_accumulation_steps": 2}
    path, out = tmp_path / "ds_config.json", tmp_path / "ab.json"
    given = ("--ds_config", path, "--hf_model", CONFIGS / "models/qwen3_moe_tiny.yaml", "--seq_len", "32", "--steps",
             "2", "--log_every", "1", "--heldout_every", "1", "--heldout_windows", "4", "--data", "pydoc", "--state",
             tmp_path, "--seeds", "1", "--out", out, "--seconds", "250", "--sharing", "2")
    path.write_text(json.dumps(config))
    status, _, told = command(*given)
    assert status and 'expected a section "mxfp8_moe" with "enabled": true' in told
    path.write_text(json.dumps(config | {"mxfp8_moe": {"enabled": True, "recipe": "mxfp8", "min_tokens_per_expert": 0,
                                                       "combine_fwd_dtype": "mxfp8"}}))
    status, shown, told = command(*given)
    assert status == 0 and "own, own:" in shown, told
    rows = {one["contender"]: one for one in results_file.read(out)["rows"]}
    assert rows.keys() == {"bf16", "own", "reordered"} and "combine_fwd" in rows["own"]["roundings"]
    assert rows["bf16"]["roundings"] == [] and rows["bf16"]["section"]["recipe"] == "bf16"
    assert str(tmp_path) not in out.read_text() and len(STUDY["own"]) == 3
