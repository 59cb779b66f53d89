# SPDX-License-Identifier: Apache-2.0
"""The training benchmark on two gloo ranks: a tiny size from engines to rows, what is noticed, how rows are added to,
where time goes, tables and plot."""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from lib import results_file, show, show_train
from lib.show_train import AUTOEP, CLASSIC, HP, MXFP8, OURS_BF16
from training import breakdown, train, train_models

pytestmark = pytest.mark.slow
NO_END = float("inf")


def _args(*more):
    with mock.patch("sys.argv", ["train.py", "--layers", "2", "--out", "unused", *map(str, more)]):
        return train.parse_args()


def _run(size, contenders, profiled=True, zero=1):
    engines = train.cases_of(_args("--sizes", size, "--zero", zero, "--steps", 1, "--accumulation", 2, 1))
    rows: dict = {}
    runs = [one for one in train.wanted(engines, contenders, rows, False) if profiled or not one.profiled]
    with mock.patch.object(train, "WARM_UP", 1), mock.patch.object(train_models, "LEARNING_RATE", 1.3e-3):
        written = [json.dumps(list(rows.values())) for _ in train.run(runs, rows, NO_END, "abc")]
    assert not profiled or not train.wanted(engines, contenders, rows, True)  # nothing is lacking
    return list(rows.values()), written


def _no_case(*more):
    with pytest.raises(SystemExit) as ended:
        train.train(_args("--sizes", "tiny", *more))
    return str(ended.value.code)


def test_cases_that_there_are_not_are_named_as_the_reason(ranks2):
    for more in (("--ep", 3), ("--cases", "short", "--zero", 2)):
        assert all("no such case on 2 ranks" in told for told in ranks2.run(_no_case, *more))


def test_contenders_train_alike_and_their_time_is_broken_down(ranks2):
    (rows, written), (others, _) = ranks2.run(_run, "tiny", [AUTOEP, HP, CLASSIC])
    assert [(row["contender"], row["case"]["routing"], row["case"]["accumulation"]) for row in rows] == [
        (name, routing, count) for name in (AUTOEP, HP, CLASSIC) for count in (1, 2) for routing in ("even", "router")]
    assert all(row["correct"] for row in rows)
    assert [row["losses"] for row in others] == [row["losses"] for row in rows]  # the mean over ranks
    for row in rows:
        even, count = row["case"]["routing"] == "even", row["case"]["accumulation"]
        assert row["tokens_per_s"] == pytest.approx(2 * 128 * count / row["median_ms"] * 1e3, rel=1e-3)
        # Each stage's and the step's are the slowest rank's.
        assert row["forward_ms"] + row["backward_ms"] + row["optimizer_ms"] > 0.999 * row["median_ms"]
        assert row["case"]["tokens_per_expert"] == 64 and len(row["losses"]) == 1 + 1 + 1
        assert (row["fewest_tokens"], row["most_tokens"]) == (64, 64) if even else (
            row["fewest_tokens"] < 64 < row["most_tokens"])
        assert row["commit"] == "abc" and ("breakdown" in row) == (count == 1)
        assert row.get("experts_in") == ("MXFP8" if row["contender"] == HP else None)
    pairs = [(rows[i], rows[i + 2]) for i in range(len(rows)) if rows[i]["case"]["accumulation"] == 1]
    for row, later in pairs:
        assert later["losses"][-1] < sum(row["losses"][:2]) / 2  # of the same two batches
        assert list(row["breakdown"]) == list(breakdown.PARTS) and min(row["breakdown"].values()) > 0
        assert row["breakdown"]["rest"] < 0.5 * sum(row["breakdown"].values())
    for quantised, classic in zip(rows[4:8:2], rows[8:12:2], strict=True):  # even routing
        assert 0 < classic["loss_off"] < 1e-3 and 1e-4 < quantised["loss_off"]
    # Before a contender trains, its rows say that it did not end.
    assert [row.get("failure") for row in json.loads(written[0])] == [train.UNFINISHED] * 4


def _cases():
    return [[(case.routing, case.accumulation, case.steps) for case in cases] for cases in train.cases_of(_args())]


def test_steps_are_counted_in_micro_batches(ranks2):
    engine = [(routing, *of_it) for of_it in ((1, 10), (4, 3)) for routing in ("even", "router")]
    assert ranks2.run(_cases)[0] == [engine] * 2  # ZeRO-1 and 2


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
        return _run(size, [AUTOEP, OURS_BF16, MXFP8, HP, CLASSIC], profiled=False, zero=2)[0]


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
    assert wanted == [((once, more), AUTOEP, False), ((once, more), HP, False), ((once, ), AUTOEP, True),
                      ((once, ), HP, True)]
    row = {"case": once.described(), "contender": AUTOEP, "correct": True, "losses": [1.0]}
    rows = {train.key(r): r for r in (row, {**row, "case": more.described()}, {
        "case": once.described(), "contender": HP, "correct": False, "failure": train.UNFINISHED},
        {"case": more.described(), "contender": HP, "correct": False, "failure": train.UNFINISHED})}
    lacking = train.wanted([(once, more)], [AUTOEP, HP], rows, False)
    assert lacking == [((once, ), AUTOEP, True)]
    assert ((once, more), HP, False) in train.wanted([(once, more)], [AUTOEP, HP], rows, True)
    assert not train.wanted([(more, )], [AUTOEP, HP], rows, False)  # where their time goes is not asked

    path = tmp_path / "train.json"
    assert train.stored(path) == []
    results_file.write("train", [row], path, of_commit="abc")
    assert train.stored(path) == [json.loads(json.dumps(row))]
    results_file.write("moe_layer", [row], path, of_commit="abc")
    with pytest.raises(SystemExit, match="--out"):
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


# ---- breakdown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, phase, wanted", [
    ("plan", {}, "dispatch"), ("dispatch", {}, "dispatch"), ("combine", {}, "combine"),
    ("start_combine", {}, "combine"), ("dispatch", {"phase": "dispatch of the gradient"}, "combine"),
    ("start_combine", {"phase": "combine of the gradient"}, "dispatch")])
def test_an_exchange_is_timed_with_the_one_that_it_is_the_gradient_of(monkeypatch, name, phase, wanted):
    parts = []
    monkeypatch.setattr(breakdown, "part", lambda part: parts.append(part) or contextlib.nullcontext())

    def method(rows, phase="forward"):
        return rows

    method.__name__ = name
    assert breakdown._exchange(method)(7, **phase) == 7 and parts == [wanted]


def _event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "pid": 1, "tid": tid, "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_kernels_belong_to_the_range_that_launched_them_or_whose_gradient_they_compute():
    forward = [_event("user_annotation", "part: whole step", 0, 100),
               _event("user_annotation", "part: experts", 5, 30),
               _event("user_annotation", "part: dispatch", 10, 10), _event("cpu_op", "aten::copy_", 12, 3),
               _event("cuda_runtime", "cudaLaunchKernel", 13, 1, correlation=1),
               _event("cpu_op", "aten::mm", 25, 5, **{"Sequence number": 7}),
               _event("cuda_driver", "cuLaunchKernelEx", 26, 1, correlation=2),
               _event("cpu_op", "aten::add", 40, 5, **{"External id": 99, "Sequence number": 8})]
    node = {"Sequence number": 7, "Fwd thread id": 1}
    backward = [_event("cpu_op", f"{breakdown.BACKWARD}: MmBackward0", 50, 10, 2, **node),
                _event("cpu_op", "aten::mm", 51, 8, 2, **{"Sequence number": 8}),
                _event("cuda_runtime", "cudaLaunchKernel", 52, 1, 2, correlation=3),
                _event("cpu_op", f"{breakdown.BACKWARD}: _Function", 70, 10, 2, **node),
                _event("user_annotation", "part: combine", 71, 5, 2),
                _event("cuda_runtime", "cudaMemcpyAsync", 72, 1, 2, correlation=4),
                _event("cpu_op", f"{breakdown.BACKWARD}: AccumulateGrad", 82, 3, 2),
                _event("cuda_runtime", "cudaLaunchKernel", 83, 1, 2, correlation=5)]
    device = [_event("kernel", "a", 20, 8, 90, correlation=1), _event("kernel", "b", 30, 16, 90, correlation=2),
              _event("kernel", "c", 60, 4, 90, correlation=3), _event("gpu_memcpy", "d", 61, 2, 91, correlation=4),
              _event("kernel", "e", 90, 1, 90, correlation=5),
              _event("kernel", "f", 92, 3, 90, **{"correlation": 77, "External id": 99})]
    found = breakdown.parts_us([*backward, *device, *forward, {"ph": "i", "name": "no span"}])
    assert found == {"attention": 0, "router": 0, "dispatch": 8, "experts": 16 + 4, "combine": 2, "optimizer": 0,
                     "rest": 1 + 3, "idle": 100 - (8 + 16 + 4 + 1 + 3)}


class _Block(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.self_attn, self.last = torch.nn.Linear(32, 16), torch.nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.self_attn(x)).sum()


def test_backward_is_attributed_in_a_real_trace():
    block, x = _Block(), torch.randn(8, 32, requires_grad=True)
    with breakdown.marked(block):
        events = [event for event in breakdown.trace(lambda: block(x).backward(), 1) if event.get("ph") == "X"]
    found = [(event["name"], part) for event, part, _ in breakdown.parts_of_host(events)]
    assert found.count(("aten::addmm", "attention")) == found.count(("aten::addmm", "rest")) == 1
    assert found.count(("aten::mm", "attention")) == 2  # gradients of its input and of its weight
    assert not block.self_attn._forward_hooks and not block.self_attn._forward_pre_hooks


# ---- tables and plot ----------------------------------------------------------------------------------------------


def _row(name, ms, size, routing, peak, **figures):
    case = {"size": size, "layers": 14, "zero": 1, "ep": 8, "ranks": 8, "steps": 6, "dp": 1, "routing": routing,
            "hidden": 2048, "ffn": 1408, "experts": 64, "top_k": 6, "tokens_per_rank": 8192, "tokens_per_expert": 6144,
            "predicted_bytes": 10**11}
    return {"case": case, "contender": name, "commit": "abc", "median_ms": ms, "p90_ms": ms, "forward_ms": ms / 3,
            "backward_ms": ms / 2, "optimizer_ms": ms / 6, "tokens_per_s": round(65536e3 / ms), "peak_bytes": peak,
            "staging_bytes": 2**28, "fewest_tokens": 1, "most_tokens": 2, "losses": [3.0], "loss_off": 0.001,
            "norm_off": 0.01, "correct": True, **figures}


def test_tables_state_the_bars(tmp_path, capsys):
    parts = dict.fromkeys((*breakdown.PARTS, "idle"), 10.0)
    rows = [_row(name, ms, size, routing, peak, breakdown=parts) for size in ("deepseek", "mixtral")
            for routing in ("even", "router") for name, ms, peak in (
                (AUTOEP, 200, 3 << 30), (HP, 150 if size == "deepseek" else 190, 2 << 30), (CLASSIC, 330, 3 << 30))]
    rows += [{"case": rows[0]["case"], "contender": MXFP8, "correct": False, "failure": train.UNFINISHED}]
    for name, ms in ((AUTOEP, 390), (HP, 300)):  # the rows above are an older file's, which do not say micro-batches
        rows.append(_row(name, ms, "deepseek", "even", 2 << 30))
        rows[-1]["case"]["accumulation"] = 4
    path = tmp_path / "train.json"
    results_file.write("train", rows, path, of_commit="abc")
    assert not show.show(path) and path.with_suffix(".png").stat().st_size > 5000
    out = capsys.readouterr().out
    lines = {line.split("  ")[0].strip(): line.split()[-1] for line in out.splitlines() if line}
    assert lines["deepseek: tokens/s, default recipe over AutoEP bf16, 8 ranks"] == "bar"
    assert lines["mixtral: tokens/s, default recipe over AutoEP bf16, 8 ranks"] == "MISSED"
    assert lines["qwen3: tokens/s, default recipe over AutoEP bf16, 8 ranks"] == "measured"  # not
    assert lines["the same over classic bf16"] == lines["peak memory with staging, of AutoEP's"] == "aim"
    assert "deepseek, ZeRO-1, EP 8 x DP 1, even, 4 micro-batches" in out
    speeds = [line.split() for line in out.splitlines() if AUTOEP in line and "x" in line]
    assert [words[5] for words in speeds if words[4] == "even" and words[5].isdigit()] == ["1", "4", "1"]
    assert f"did not run to their end:\n  {MXFP8}, deepseek, ZeRO-1, EP 8 x DP 1, even: did not end" in out
    assert "6144" in out and out.count("did not run to their end") == 1 and set(show_train.COLORS) == set(parts)


def test_a_model_that_no_contender_can_train_is_in_the_tables():
    failure = "rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 60.00 MiB."
    row = {"case": _row(CLASSIC, 1.0, "deepseek", "router", 1)["case"], "contender": CLASSIC, "correct": False,
           "failure": failure}
    table, _ = show_train.train_tables({"rows": [row]})
    assert table.endswith(f"did not run to their end:\n  {CLASSIC}, deepseek, ZeRO-1, EP 8 x DP 1, own router: "
                          "out of memory")
