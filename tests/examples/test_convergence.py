# SPDX-License-Identifier: Apache-2.0
"""The convergence study on two gloo ranks: what is interrupted ends as if it had not been; order, data and tables."""

import json
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from lib import results_file, show
from training import convergence
from training.convergence import Run

pytestmark = pytest.mark.slow
MODEL = "{hidden_size: 32, ffn_size: 64, num_layers: 2, num_heads: 2, seq_len: 32, moe: {num_experts: 4, k: 2}}"
NEVER = float("inf")


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A folder with a tiny model and the tokens of some texts."""
    folder = tmp_path_factory.mktemp("convergence")
    (folder / "gpt.yaml").write_text(MODEL)
    (folder / "texts").mkdir()
    for i in range(200):
        (folder / f"texts/{i}.txt").write_text(f"{i} green bottles hanging on the wall\n" * 4)
    for name in ("whole", "pieces"):
        convergence.store_tokens(str(folder / "texts"), folder / name)
    return folder


def _train(state, folder, recipe, until, *arguments):
    args = convergence.parse_args(["--out", "unused", "--state", str(state / folder), "--steps", "6",
                                   "--log_every", "2", "--heldout_every", "4",
                                   "--heldout_windows", "16", *arguments])
    args.until = until
    size = convergence.Size(str(state / "gpt.yaml"), 1e-2, sequences=4)
    with mock.patch.dict(convergence.SIZES, {"tiny": size}):
        return convergence.train_piece(Run("tiny", recipe, 0), args)


def files(state, folder, recipe):
    """Names of what there is of a run, with its checkpoints, and its log."""
    folder = state / folder / Run("tiny", recipe, 0).name
    return {path.name for path in (*folder.iterdir(), *folder.glob("checkpoints/step_*"))}, (
        folder / "log.jsonl").read_text()


@pytest.mark.parametrize("recipe", ["bf16", "own_bf16", "default_32"])
def test_an_interrupted_run_ends_with_the_losses_of_an_uninterrupted_one(ranks2, state, recipe):
    assert ranks2.run(_train, state, "whole", recipe, NEVER) == [True] * 2
    assert ranks2.run(_train, state, "pieces", recipe, 0.0) == [False] * 2
    names, log = files(state, "pieces", recipe)
    assert "step_2" in names and "summary.json" not in names
    log_path = state / "pieces" / Run("tiny", recipe, 0).name / "log.jsonl"
    log_path.write_text(log + '{"step": 4, "loss": "of a piece that was killed after its checkpoint"}\n')
    assert ranks2.run(_train, state, "pieces", recipe, 0.0) == [False] * 2
    assert "step_2" not in files(state, "pieces", recipe)[0]
    assert ranks2.run(_train, state, "pieces", recipe, NEVER) == [True] * 2
    assert files(state, "pieces", recipe) == files(state, "whole", recipe)
    names, log = files(state, "whole", recipe)
    assert names == {"log.jsonl", "summary.json"}
    rows = [json.loads(line) for line in log.splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    assert [row["step"] for row in rows if "heldout_loss" in row] == [0, 4, 6]
    assert rows[-1]["loss"] < rows[1]["loss"] and rows[-1]["heldout_loss"] < rows[0]["heldout_loss"]
    assert all(row["grad_norm"] > 0 and 1 / 4 <= row["busiest_expert"] < 1 for row in rows[1:])
    others = [(row["heldout_loss"], row["heldout_loss_bf16"]) for row in rows if "heldout_loss_bf16" in row]
    assert len(others) == (3 if recipe == "default_32" else 0)
    assert all(own != bf16 and own == pytest.approx(bf16, rel=0.01) for own, bf16 in others)


def test_a_checkpoint_of_other_settings_is_refused(ranks2, state):
    assert ranks2.run(_train, state, "pieces", "floor", 0.0) == [False] * 2
    with pytest.raises(AssertionError, match="name another --state"):
        ranks2.run(_train, state, "pieces", "floor", 0.0, "--heldout_windows", "8")


def test_more_than_two_epochs_are_refused(ranks2, state):
    with pytest.raises(AssertionError, match="epochs of --data"):
        ranks2.run(_train, state, "pieces", "mxfp8_128", 0.0, "--steps", "10000")


# ---- what needs no ranks ------------------------------------------------------------------------------------------


def test_copies_of_a_text_are_left_out_and_none_is_on_both_sides(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(400):
        (tmp_path / f"texts/{i}").write_text(f"text {i % 200:05}")
    convergence.store_tokens(str(tmp_path / "texts"), tmp_path)
    about = json.loads((tmp_path / "tokens.json").read_text())
    assert about["training_tokens"] + about["heldout_tokens"] == 200 * 11 and about["heldout_tokens"] < 400
    sides = [{bytes(text[1:].astype(np.uint8)) for text in np.load(tmp_path / f"{name}.npy").reshape(-1, 11)}
             for name in ("training", "heldout")]
    assert len(sides[0] | sides[1]) == 200 and not sides[0] & sides[1]
    (tmp_path / "texts/new").write_text("later texts change nothing")
    convergence.store_tokens(str(tmp_path / "texts"), tmp_path)
    assert json.loads((tmp_path / "tokens.json").read_text()) == about


def arguments(state, *more):
    return convergence.parse_args(["--out", "unused", "--state", str(state), *more])


def test_the_most_important_runs_come_first(tmp_path):
    names = [run.name for run in convergence.plan(arguments(tmp_path))]
    assert names[:9] == ["50M-bf16-0", "50M-default_128-0", "50M-mxfp8_128-0", "50M-default_32-0",
                         *(f"50M-bf16-{seed}" for seed in range(1, 5)), "50M-own_bf16-0"]
    assert len(names) == 20 and names[10:] == [name.replace("50M", "300M") for name in names[:10]]
    with pytest.raises(SystemExit):  # the state lies outside of the repository
        arguments(convergence.ROOT / "runs")
    few = convergence.plan(arguments(tmp_path, "--recipes", "floor", "bf16", "--seeds", "2", "--bf16_seeds", "1",
                                     "--sizes", "50M"))
    assert [run.name for run in few] == ["50M-bf16-0", "50M-floor-0", "50M-floor-1"]


def test_as_many_runs_side_by_side_as_there_are_places(tmp_path, capsys):
    """Each run stands for a process that takes a second; the third of them fails."""
    events = []

    class Process:

        def __init__(self, run):
            self.begin, self.returncode, self.run = time.monotonic(), None, run

        def poll(self):
            if time.monotonic() > self.begin + 1 and self.returncode is None:
                self.returncode = int(self.run.seed == 2)
                events.append(("end", self.run.seed))
                if self.returncode == 0:
                    (tmp_path / self.run.name / "summary.json").touch()
            return self.returncode

    def launch(run, place, until, args):
        events.append((place, run.seed))
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "output.txt").write_text("out of memory")
        return Process(run)

    args = arguments(tmp_path, "--recipes", "bf16", "--sizes", "50M", "--seconds", "1e9")
    with mock.patch.object(convergence, "launch", launch), \
            mock.patch.object(convergence, "places", lambda _: ["0,1", "2,3"]):
        assert not convergence.work(convergence.plan(args), args)
        assert [event for event in events if event[0] != "end"] == [("0,1", 0), ("2,3", 1), ("0,1", 2), ("2,3", 3),
                                                                    ("0,1", 4)]
        assert events[2][0] == "end"
        events.clear()
        args.seconds = 0.0
        assert convergence.work(convergence.plan(args), args) and not events
        assert "--seconds 0 is too short: a run is begun if 100 s are left" in capsys.readouterr().err


def row(recipe, seed, heldout, steps=200, **case):
    """A result row; training goes the same way in all."""
    curve = {str(step): 2.0 - step / 1000 for step in (100, steps)}
    curves = dict.fromkeys(("loss", "grad_norm", "busiest_expert"), curve) | {
        "heldout_loss": {"0": 5.6, "100": 2.0, str(steps): heldout}, "sqnr_db": {"10": {"output": 20.0}},
        "heldout_loss_bf16": {"0": 5.6, str(steps): heldout - 0.05} if recipe == "mxfp8_128" else {}}
    return {"case": {"size": "tiny", "parameters": 1e6, "steps": steps, "tokens_per_step": 64, "expert_parallel": 2,
                     "ranks": 2, "heldout_windows": 128, "data_sha256": "ab" * 8, "seed": seed} | case,
            "contender": recipe, "heldout_loss": heldout, "correct": True, "curves": curves}


def test_runs_that_a_file_knows_are_taken_from_it(tmp_path, monkeypatch, capsys):
    """All but one of two; that one finishes at once."""
    known, out, state = tmp_path / "known.json", tmp_path / "out.json", tmp_path / "state"
    results_file.write("convergence", [row("bf16", 0, 1.5)], known, of_commit="older")
    state.mkdir()
    (state / "tokens.json").write_text(json.dumps({"sha256": "ab" * 32}))
    asked = []

    def work(runs, args):
        asked.extend(run.name for run in runs)
        for run in runs:
            (state / run.name).mkdir()
            (state / run.name / "summary.json").touch()
        return True

    monkeypatch.setattr(convergence, "work", work)
    monkeypatch.setattr(convergence, "store_tokens", lambda *_: None)
    monkeypatch.setattr(convergence, "row", lambda folder: row("bf16", 1, 2.5))
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--state", str(state), "--sizes", "tiny", "--recipes", "bf16",
                                      "--bf16_seeds", "2", "--known", str(known), "--out", str(out), "--steps", "200"])
    with pytest.raises(SystemExit) as ended:
        convergence.main()
    assert not ended.value.code and asked == ["tiny-bf16-1"]
    assert "2 of 2 runs are finished" in capsys.readouterr().err
    result = results_file.read(out)
    assert [one["heldout_loss"] for one in result["rows"]] == [1.5, 2.5] and result["commit"] == "older"
    sys.argv[-1] = "300"
    with pytest.raises(SystemExit, match="known.json has runs of {'steps': 200, .* and these are of {'steps': 300"):
        convergence.main()


def test_a_state_keeps_to_its_data(tmp_path):
    (tmp_path / "tokens.json").write_text('{"source": "stdlib"}')
    convergence.store_tokens("stdlib", tmp_path)
    with pytest.raises(SystemExit, match="has the tokens of --data stdlib, not of pydoc"):
        convergence.store_tokens("pydoc", tmp_path)


def test_recipes_are_compared_with_the_seeds_of_bf16(tmp_path, capsys):
    rows = [row("bf16", seed, 1.5 + seed / 100) for seed in range(5)]
    rows.append(row("bf16", 0, 9.0, steps=100))  # another case: not in the range
    rows += [row("default_128", 0, 1.56), row("default_128", 1, 1.50), row("mxfp8_128", 0, 1.55),
             row("floor", 0, 1.4)]
    found = {(one["contender"], one["case"]["steps"]): one for one in convergence.prepare({"rows": rows})}
    assert found["default_128", 200]["heldout_loss"] == pytest.approx(1.53) and found["default_128", 200]["seeds"] == 2
    assert found["default_128", 200]["to_bf16"] == pytest.approx(1.53 / 1.52 - 1)
    assert found["mxfp8_128", 200]["beyond"] == pytest.approx(1.55 / 1.54 - 1)
    assert found["mxfp8_128", 200]["heldout_bf16"] == pytest.approx(1.5)
    assert found["default_128", 200]["beyond"] == found["floor", 200]["beyond"] == 0
    path = tmp_path / "convergence.json"
    results_file.write("convergence", rows, path, of_commit="abc")
    assert show.show(convergence.SHOWN, path, check=True) == "bars not reached: 1"
    assert path.with_suffix(".png").stat().st_size > 5000
    assert "beyond the highest of bf16's seeds is 0.006494 (mxfp8_128" in capsys.readouterr().err
    results_file.write("convergence", rows[6:7], path, of_commit="abc")  # without bf16
    assert show.show(convergence.SHOWN, path) == ""
