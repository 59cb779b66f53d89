# SPDX-License-Identifier: Apache-2.0
"""The training benchmarks on two gloo ranks: a tiny size from engines to rows, what is noticed, how rows are added to;
and parity's comparison."""

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from rank_pool import RankPool

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from lib import results_file, show
from training import parity, train, train_models
from training.train import AUTOEP, CLASSIC, HP, HP_CLASSIC, MXFP8, OURS_BF16

pytestmark = pytest.mark.slow
NO_END = float("inf")


def _args(*more):
    with mock.patch("sys.argv", ["train.py", "--layers", "2", "--out", "unused", *map(str, more)]):
        return train.parse_args()


def _run(size, contenders, zero=1):
    engines = train.cases_of(_args("--sizes", size, "--zero", zero, "--steps", 1, "--accumulation", 2, 1))
    rows: dict = {}
    runs = train.wanted(engines, contenders, rows, False)
    with mock.patch.object(train, "WARM_UP", 1), mock.patch.object(train_models, "LEARNING_RATE", 1.3e-3):
        written = [json.dumps(list(rows.values())) for _ in train.fill(runs, rows, NO_END, "abc")]
    assert not train.wanted(engines, contenders, rows, False)  # nothing is lacking
    return list(rows.values()), written


def _no_case(*more):
    with pytest.raises(SystemExit) as ended:
        train.train(_args("--sizes", "tiny", *more))
    return str(ended.value.code)


def test_cases_that_there_are_not_are_named_as_the_reason(ranks2):
    for more in (("--ep", 3), ("--cases", "short", "--zero", 2)):
        assert all("no such case on 2 ranks" in told for told in ranks2.run(_no_case, *more))


def test_contenders_train_alike(ranks2):
    (rows, written), (others, _) = ranks2.run(_run, "tiny", [AUTOEP, HP, CLASSIC])
    assert [(row["contender"], row["case"]["routing"], row["case"]["accumulation"]) for row in rows] == [
        (name, routing, count) for name in (AUTOEP, HP, CLASSIC) for count in (1, 2) for routing in ("even", "router")]
    assert all(row["correct"] for row in rows)
    assert [row["losses"] for row in others] == [row["losses"] for row in rows]  # the mean over ranks
    for row in rows:
        count = row["case"]["accumulation"]
        # Whole tokens a second, of which a slow machine has few.
        assert row["tokens_per_s"] == pytest.approx(2 * 128 * count / row["median_ms"] * 1e3, rel=1e-3, abs=0.5)
        # Each stage's and the step's are the slowest rank's.
        assert row["forward_ms"] + row["backward_ms"] + row["optimizer_ms"] > 0.999 * row["median_ms"]
        assert row["case"]["tokens_per_expert"] == 64 and len(row["losses"]) == 1 + 1
        assert row["commit"] == "abc"
        assert row.get("experts_in") == ("MXFP8" if row["contender"] == HP else None)
    pairs = [(rows[i], rows[i + 2]) for i in range(len(rows)) if rows[i]["case"]["accumulation"] == 1]
    for row, later in pairs:
        assert later["losses"][-1] < sum(row["losses"][:2]) / 2  # of the same two batches
    for quantised, classic in zip(rows[4:8:2], rows[8:12:2], strict=True):  # even routing
        assert 0 < classic["loss_off"] < 1e-3 and 1e-4 < quantised["loss_off"]
    # Before a contender trains, its rows say that it did not end.
    assert [row.get("failure") for row in json.loads(written[0])] == [train.UNFINISHED] * 4


def _updates(zero):
    """Master weights and gradient norms after steps of one and of two micro-batches: ours, and DeepSpeed's own."""
    size = train_models.SIZES["tiny"]
    found = []
    for by_deepspeed in (False, True):
        engine = train.CONTENDERS[AUTOEP](size, 1, 2, zero)
        training = train.Training(engine, size)
        training.step()
        training.noted()
        if by_deepspeed:
            engine.set_gradient_accumulation_boundary(None)
            engine.micro_steps = 0
            engine.set_train_batch_size(2 * 2 * size.batch)
            for batch in reversed(training.batches):
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()
        else:
            training.accumulation = 2
            training.step()
        training.noted()
        flat = torch.cat([part.detach().flatten() for part in engine.optimizer.single_partition_of_fp32_groups])
        found.append((flat.clone(), training.norms))
        train_models.free(engine)
    return found


@pytest.mark.parametrize("zero", (1, 2))
def test_gradients_are_accumulated_as_deepspeed_does(ranks2, zero):
    for (ours, norms), (expected, expected_norms) in ranks2.run(_updates, zero):
        assert torch.equal(ours, expected) and norms == expected_norms


def _alone() -> list[dict]:
    engines = train.cases_of(_args("--sizes", "tiny", "--steps", 1))
    assert [[(case.routing, case.accumulation, case.overflow_check) for case in cases] for cases in engines] == [
        [("even", 1, True)], [("even", 1, False)]]
    rows: dict = {}
    checks = []

    def engine_of(*args):
        engine = train_models.engine_of(*args, classic=True, section={})
        checks.append(engine.optimizer.check_grad_overflow)
        return engine

    with (mock.patch.dict(train.CONTENDERS, {HP_CLASSIC: engine_of}), mock.patch.object(train, "WARM_UP", 1),
          mock.patch.object(train.timing, "profiled", lambda step: step() or {"kernels_ms": 7.0})):
        runs = train.wanted(engines, [HP_CLASSIC], rows, False)
        list(train.fill(runs, rows, NO_END, "abc"))
        assert [row["correct"] for row in rows.values()] == [True] * 2
        list(train.fill_kernels(runs, rows, NO_END))
        assert list(train.fill_kernels(runs, rows, NO_END)) == []  # nothing is lacking
    assert checks == [True, False] * 2
    return list(rows.values())


def test_one_rank_trains_evenly_with_and_without_the_check_for_overflow():
    pool = RankPool(1)
    rows = pool.run(_alone)[0]
    pool.close()
    assert len(rows) == 2 and all(row["correct"] and row["kernels_ms"] == 7 and row["host_ms"] > 0 for row in rows)
    assert all(row["parameters"] == 3 + 2 * (2 + 4 + 2 + 1 + 3 * 8) for row in rows)


def _wrong(size):
    """Layers of our bf16 recipe whose tokens get each other's results."""

    def engine_of(*args):
        engine = train.models.engine_of(*args, classic=False, section={"recipe": "bf16"})
        for layer in train_models.moe_layers(engine):
            layer.register_forward_hook(lambda _layer, _inputs, output: output.roll(1, 1))
        return engine

    def none(*args):
        raise ValueError("no such engine")

    def failing(*args):
        engine = train.models.engine_of(*args, classic=False, section=None)

        def fail(*_args):
            if not engine.is_gradient_accumulation_boundary():
                raise ValueError("no memory")

        engine.module.register_forward_hook(fail)
        return engine

    with mock.patch.dict(train.CONTENDERS, {OURS_BF16: engine_of, MXFP8: none, HP: failing}):
        return _run(size, [AUTOEP, OURS_BF16, MXFP8, HP, CLASSIC], zero=2)[0]


def test_wrong_results_and_failures_are_noticed_and_both_families_are_what_the_classic_layer_computes(ranks2):
    rows = ranks2.run(_wrong, "tiny-mixtral")[0]
    assert [row["correct"] for row in rows] == [True] * 4 + [False] * 8 + [True] * 2 + [False] * 2 + [True] * 4
    assert "gradient norm" in rows[4]["error"] and "no such engine" in rows[8]["failure"]
    assert ["no memory" in row["failure"] for row in rows[14:16]] == [True] * 2  # after a failure nothing is measured
    assert rows[16]["loss_off"] < 1e-3 and "error" not in rows[16]


# ---- rows ---------------------------------------------------------------------------------------------------------


def test_rows_are_added_to_what_is_there(tmp_path):
    once, more = (train.Case("tiny", 2, 1, 2, 2, 6, "even", count) for count in (1, 4))
    wanted = train.wanted([(once, more)], [AUTOEP, HP], {}, False)
    assert wanted == [((once, more), AUTOEP), ((once, more), HP)]
    row = {"case": once.described(), "contender": AUTOEP, "correct": True, "losses": [1.0]}
    rows = {train.key(r): r for r in (row, {**row, "case": more.described()}, {
        "case": once.described(), "contender": HP, "correct": False, "failure": train.UNFINISHED},
        {"case": more.described(), "contender": HP, "correct": False, "failure": train.UNFINISHED})}
    assert train.wanted([(once, more)], [AUTOEP, HP], rows, False) == []
    assert train.wanted([(once, more)], [AUTOEP, HP], rows, True) == [((once, more), HP)]

    path = tmp_path / "train.json"
    assert train.stored(path) == []
    results_file.write("train", [row], path, of_commit="abc")
    assert train.stored(path) == [json.loads(json.dumps(row))]
    results_file.write("moe_layer", [row], path, of_commit="abc")
    with pytest.raises(SystemExit, match="has results of moe_layer, expected train"):
        train.stored(path)


def _losses(name, losses, norm=1.0, routing="even"):
    return {"case": {"routing": routing}, "contender": name, "losses": losses, "gradient_norm": norm, "correct": True}


def test_losses_are_compared_within_their_case():
    rows = [_losses(HP, [5.0, 4.01]), _losses(AUTOEP, [5.0, 4.0]), _losses(CLASSIC, [5.0, 4.01]),
            _losses(MXFP8, [5.0, 4.0], norm=1.2), _losses(OURS_BF16, [5.0, float("nan")]),
            _losses(HP, [9.0, 9.0], routing="router"),
            {"case": {"routing": "even"}, "contender": "x", "correct": False, "failure": "so"}]
    train.settle(rows)
    assert [row["correct"] for row in rows] == [True, True, False, False, False, True, False]
    assert rows[0]["loss_off"] == pytest.approx(0.0025) and "20.00%" in rows[3]["error"]


# ---- models -------------------------------------------------------------------------------------------------------


def test_even_routes_are_even_and_lie_apart():
    expert_TK = train_models.even_routes(8192, 6, 64)
    assert (torch.bincount(expert_TK.flatten()) == 768).all()
    assert (expert_TK.sort(1).values.diff(dim=1) > 0).all()
    ranks = torch.zeros(8192, 8).scatter_(1, expert_TK // 8, 1.0).sum(1).mean()
    assert 4 < ranks < 5.1  # 4.5 of 8, were they drawn at random


def test_layers_fit_by_the_formula():
    size, memory = train_models.SIZES["deepseek"], 150e9
    found = {ranks: size.most_layers(ranks, memory) for ranks in (2, 4, 8)}
    assert 4 <= found[2] < found[4] < found[8] <= size.layers
    for ep, zero in ((8, 1), (4, 2)):
        assert size.bytes_of(found[8], 8, ep, zero) <= 0.8 * memory
    assert size.bytes_of(2, 8, 4, 2) < size.bytes_of(2, 8, 4, 1) and size.most_layers(2, 10e9) == 0
    assert train_models.expert_parallel(size, 8) == [8, 4] and train_models.expert_parallel(size, 2) == [2]


# ---- how results are shown ------------------------------------------------------------------------------------------


def _row(name, ms, size, routing, peak, **case):
    case = {"size": size, "layers": 14, "zero": 1, "ep": 8, "ranks": 8, "dp": 1, "routing": routing, "hidden": 2048,
            "tokens_per_expert": 6144} | case
    return {"case": case, "contender": name, "commit": "abc", "median_ms": ms, "p90_ms": ms, "forward_ms": ms / 3,
            "backward_ms": ms / 2, "optimizer_ms": ms / 6, "tokens_per_s": round(65536e3 / ms), "peak_bytes": peak,
            "losses": [3.0], "loss_off": 0.001, "norm_off": 0.01, "correct": True}


def test_trainings_are_compared_within_their_case(tmp_path, capsys):
    rows = [_row(name, ms, size, routing, peak) for size in ("deepseek", "mixtral") for routing in ("even", "router")
            for name, ms, peak in ((AUTOEP, 200, 3 << 30), (HP, 150 if size == "deepseek" else 190, 2 << 30),
                                   (CLASSIC, 330, 3 << 30))]
    rows += [_row(name, ms, "deepseek", "even", 2 << 30, accumulation=4) for name, ms in ((AUTOEP, 390), (HP, 300))]
    rows.append({"case": rows[0]["case"], "contender": MXFP8, "correct": False, "failure": train.UNFINISHED})
    path = tmp_path / "train.json"
    results_file.write("train", rows, path, of_commit="abc")
    assert show.show(train.SHOWN, path, check=True) == "some results were wrong"
    assert path.with_suffix(".png").stat().st_size > 5000
    told = capsys.readouterr()
    assert [line.split(" (")[0] for line in told.err.splitlines() if "the bar is" in line] == [
        f"train: tokens per second: {HP} over {AUTOEP} is 1.053"]
    assert f"| {MXFP8}" in told.out and train.UNFINISHED in told.out and "1.30x" in told.out and "3.00" in told.out


def test_bars_of_one_rank_are_of_its_sizes(tmp_path, capsys):
    rows = [_row(name, ms, size, "even", 1 << 30, zero=1, ep=1, ranks=1, overflow_check=check)
            for size, steps in (("deepseek-8x8", (125, 100, 190, 113)), ("deepseek-6x64", (125, 100, 290, 113)))
            for check in (True, False)
            for name, ms in zip((AUTOEP, HP, CLASSIC, HP_CLASSIC), steps, strict=True)]
    path = tmp_path / "train.json"
    results_file.write("train", rows, path, of_commit="abc")
    assert show.show(train.SHOWN, path, check=True) == "bars not reached: 2"
    missed = [line for line in capsys.readouterr().err.splitlines() if "the bar is" in line]
    assert f"{HP_CLASSIC} over {CLASSIC} is 2.566 (deepseek-6x64, overflow check True); the bar is 3" in missed[0]
    assert f"{HP_CLASSIC}, of {HP} is 1.13 (deepseek-8x8" in missed[1]


def test_parity_compares_means_over_seeds():
    def one(name, seed, loss):
        return {"case": {"model": "classic", "steps": 2, "seed": seed}, "contender": name, "final_loss": loss,
                "heldout_loss": loss, "losses": [5.0, loss], "layers_converted": 0, "correct": True}

    rows = parity.prepare({"rows": [one("bf16", 1, 1.0), one("bf16", 2, 3.0), one("mxfp8", 1, 2.2),
                                    one("mxfp8", 2, 2.0)]})
    assert [row["seeds"] for row in rows] == [2, 2] and rows[1]["losses"] == [5.0, 2.1]
    assert rows[1]["to_bf16"] == rows[1]["distance"] == pytest.approx(0.05) and rows[0]["seeds_range"] == 1
