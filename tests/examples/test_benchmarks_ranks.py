# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of several GPUs on two gloo ranks: tiny sizes, and checks that notice wrong results.

NVLink is played by the collective transport under its name, and for few tokens by the emulator of CUDA.
"""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import deepspeed.comm as dist
import emulator
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.mx import MXTensor
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from exchange import dispatch_combine, ep_pipeline, latency, moe_layer
from exchange.dispatch_combine import Today
from lib import run, timing, world
from lib.timing import Contender

BF16 = torch.bfloat16
pytestmark = pytest.mark.slow


class NVLink(Collective):
    """The collective transport under the name of NVLink's."""


def nvlink_played(spoilt=None):
    """While it lasts, the machine has NVLink: the one above, or `spoilt` under its name."""
    nvlink = type("NVLink", (spoilt or NVLink, ), {})

    def choose(group, name, requested):
        return (Collective if requested == "collective" else nvlink)(group, name)

    return mock.patch.object(world, "choose", choose)


def flat(batches) -> list[dict]:
    return [row for rows in batches for row in rows]


def correct(results) -> list[dict]:
    """Rank 0's rows, all of them correct."""
    assert all(row["correct"] for row in results[0]), [row for row in results[0] if not row["correct"]]
    assert [[row["contender"] for row in rows] for rows in results] == [[row["contender"] for row in results[0]]] * 2
    return results[0]


# ---- world --------------------------------------------------------------------------------------------------------


def _agree():
    def fails():
        if world.rank() == 1:
            raise ValueError("no such size")
        return {"correct": True}

    stages = {"first": lambda: 3, "second": lambda value: value + 1}
    assert timing.run(stages) == 4
    contenders = {"good": Contender(stages, lambda: {"correct": True}, {"bytes": 7}),
                  "bad": Contender(stages, lambda: {"correct": world.rank() == 0}),
                  "failing": Contender({"only": lambda: None}, fails)}
    return timing.rows({"n": 1}, contenders, 0.001)


def test_a_row_for_each_stage_and_what_one_rank_finds_wrong_is_wrong(ranks2):
    rows = ranks2.run(_agree)[0]
    assert [(row["contender"], row["case"]["operation"], row["correct"]) for row in rows] == [
        *(("good", name, True) for name in ("first", "second", "total")),
        *(("bad", name, False) for name in ("first", "second", "total")), ("failing", "only", False)]
    assert all(row["bytes"] == 7 and row["repeats"] >= 5 for row in rows[:3])
    assert rows[0]["case"] == {"operation": "first", "ranks": 2, "n": 1}
    assert rows[2]["p10_ms"] <= rows[2]["median_ms"] <= rows[2]["p90_ms"]
    assert "rank 1: ValueError: no such size" in rows[-1]["failure"] and "median_ms" not in rows[-1]


def _alone():
    def call():
        if world.rank() == 0:
            raise MemoryError("too much")
        time.sleep(1.5)  # as in an exchange to which rank 0 does not come
        return {}

    with mock.patch.object(world, "ALONE_S", 0.5):
        try:
            return world.everywhere(call)
        except SystemExit as end:
            torch.distributed.all_gather_object([None, None], {})  # for this test's rank 1
            return str(end)


def test_a_rank_that_fails_alone_ends_the_run(ranks2):
    assert ranks2.run(_alone)[0].startswith("rank 0: MemoryError: too much; 1 of 2 ranks have not come")


def _slowest():
    time.sleep(0.01)
    times = timing.times_ms({"one": {"a": lambda: time.sleep(0.01 * (1 + world.rank())),
                                     "b": lambda _: time.sleep(0.01 * (2 - world.rank()))}}, 0.001)["one"]
    return [times[name]["median_ms"] for name in ("a", "b", "total")]


def test_times_are_the_slowest_rank_s(ranks2):
    found, other = ranks2.run(_slowest)
    assert found == other and min(found[:2]) > 20 and found[2] > 30


class Event:
    """A device's event, of a device that is the host; sleeping, it says how long."""

    def __init__(self, enable_timing):
        self.at = None

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def _on_device(warm):
    slept, first = [], mock.Mock(side_effect=lambda: time.sleep(2e-3))
    stages = {"first": first, "second": lambda _: time.sleep(4e-3)}
    with mock.patch.object(world, "on_gpu", lambda: True), mock.patch.object(timing, "FLUSHED_BYTES", 64), \
            mock.patch.object(torch.cuda, "Event", Event), mock.patch.object(torch.cuda, "_sleep", slept.append):
        times = timing.times_ms({"one": stages, "other": {"only": stages["first"]}}, 0.1, warm=warm)
    return times, slept, first.call_count


@pytest.mark.parametrize("warm", [False, True])
def test_times_on_a_device_begin_behind_a_pause_in_which_the_host_gets_ahead(ranks2, warm):
    (times, slept, runs), _ = ranks2.run(_on_device, warm)
    assert list(times["one"]) == ["first", "second", "total"] and list(times["other"]) == ["only"]
    first, second, total = (times["one"][stage]["median_ms"] for stage in times["one"])
    assert 2 <= first < second < total < 60 and total >= 6
    assert runs == 2 * (1 + times["one"]["first"]["repeats"] * (1 + warm))
    assert len(slept) == 2 * times["one"]["first"]["repeats"] and min(slept) >= 2e9 * 1.5 * 2e-3


def test_without_a_launcher_it_says_how_to_start(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["latency.py", "--cases", "tiny"])
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2 latency.py --cases tiny"):
        world.start()


def _in_time():
    shown = []
    for item in world.in_time(range(5), time.time() - world.STARTED + 1):
        shown.append(item)
        time.sleep(0.4 * world.rank())
    return shown


def test_what_the_slowest_rank_has_no_time_for_is_left_out(ranks2):
    assert ranks2.run(_in_time) == [[0, 1]] * 2


def _main(path):
    args = run.timed_parser("", 0.001, 9).parse_args(["--out", str(path), "--commit", "abc", "--local_rank=0"])
    contenders = {name: Contender({"total": lambda: None}, lambda: {"correct": True})
                  for name in ("NCCL bf16", "ours, mxfp8")}

    def batches():
        for dim in (7168, 2048):
            yield timing.rows({"dim": dim, "hidden": 2048}, contenders, 0.001)
            if world.rank() == 0:
                seen.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)

    seen = []
    with (mock.patch.object(world, "start"), mock.patch.object(world, "FAILURES", []),  # other tests' ranks met some
          mock.patch.object(torch.distributed, "destroy_process_group")):
        run.main(ep_pipeline.SHOWN, args, batches, ranks=True)
    return seen


def test_every_batch_is_written_by_rank_0(ranks2, tmp_path):
    path = tmp_path / "results.json"
    assert ranks2.run(_main, path) == [[2, 4], []]
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 4 and result["commit"] == "abc" and path.with_suffix(".png").exists()


@pytest.mark.parametrize("failures, error, code", [
    ([], "", None), ([], "some results were wrong", "some results were wrong"),
    (["rank 0: out of memory"], "wrong", 1), (["rank 1: a run"], "", 0)])
def test_what_failed_keeps_no_rank_from_its_end(failures, error, code, monkeypatch, capsys):
    left, gone = mock.Mock(), mock.Mock()
    monkeypatch.setattr(world, "FAILURES", failures)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", left)
    monkeypatch.setattr(world.os, "_exit", gone)
    with pytest.raises(SystemExit, match=code) if isinstance(code, str) else nullcontext():
        world.leave(error)
    assert left.called != bool(failures) and gone.mock_calls == [mock.call(code)] * bool(failures)
    assert (error in capsys.readouterr().err) or not failures


# ---- ep_pipeline --------------------------------------------------------------------------------------------------


def _pipeline(spoilt=None):
    with nvlink_played(spoilt), mock.patch.object(ep_pipeline, "EXPERTS", 2):
        return flat(ep_pipeline.measured_rows([(128, 64)], 1024, 0.001))


def test_pipelines_are_correct_by_their_own_check(ranks2):
    rows = correct(ranks2.run(_pipeline))
    total = [row for row in rows if row["case"]["operation"] == "total"]
    assert [row["contender"] for row in total] == [ep_pipeline.NCCL_BF16, ep_pipeline.NCCL_MXFP8_GEMM,
                                                   *ep_pipeline.OURS]
    assert [row.get("transport") for row in total] == [None, None, "nvlink", "nvlink", "nvlink"]
    assert {row["case"]["operation"] for row in rows} == {"forward", "backward", "total"}
    # Only what is quantised is far from float32, and each further wire adds its noise.
    noise = {row["contender"]: row["sqnr_db"]["y"] for row in total}
    assert noise["ours, mxfp8"] < noise["ours, mxfp8_wgrad_with_hp"] < 35 < 45 < noise["NCCL bf16"]


class Shifted(NVLink):

    def combine(self, *args, **kwargs):
        y_TH, weight_TK = super().combine(*args, **kwargs)
        return y_TH.roll(world.rank(), 0), weight_TK


def test_a_pipeline_that_mixes_rows_up_is_noticed(ranks2):
    rows = [row for row in ranks2.run(_pipeline, Shifted)[0] if row["case"]["operation"] == "total"]
    assert [row["correct"] for row in rows] == [True, True, False, False, False]


# ---- dispatch_combine ---------------------------------------------------------------------------------------------


def _exchanges(case, spoilt=None):
    with nvlink_played(spoilt):
        return flat(dispatch_combine.measured_rows([case], 0.001))


@pytest.mark.parametrize("routing", dispatch_combine.ROUTINGS)
def test_exchanges_are_correct_by_their_own_check(ranks2, routing):
    case = dispatch_combine.Case(96, 128, 2, 8, routing)
    rows = correct(ranks2.run(_exchanges, case))
    names = [row["contender"] for row in rows if row["case"]["operation"] == "dispatch"]
    plans = [row["contender"] for row in rows if row["case"]["operation"] == "plan"]
    assert plans == [dispatch_combine.TODAY, "collective", "nvlink"]
    assert set(names + plans) == set(dispatch_combine.CONTENDERS)
    moved = {row["contender"]: row["bytes"] for row in rows if row["case"]["operation"] == "combine"}
    assert moved[dispatch_combine.TODAY] > moved["nvlink, bf16"]
    assert moved["nvlink, bf16"] * (128 + 4) == moved["nvlink, mxfp8"] * 256


class Rounded(NVLink):

    def dispatch(self, *args, **kwargs):
        x_PH, weight_P = super().dispatch(*args, **kwargs)
        if isinstance(x_PH, MXTensor):
            x_PH.qdata.view(torch.uint8)[0, 0] ^= 1
        return x_PH, weight_P


def test_an_exchange_that_rounds_otherwise_is_noticed(ranks2):
    rows = ranks2.run(_exchanges, dispatch_combine.Case(96, 128, 2, 8, "random"), Rounded)[0]
    wrong = {row["contender"] for row in rows if not row["correct"]}
    assert wrong == {"nvlink, mxfp8"}


class Unwritten(NVLink):
    """Leaves the rows behind the last group as they are, as the kernels do."""

    def dispatch(self, plan, *args, **kwargs):
        x_PH, weight_P = super().dispatch(plan, *args, **kwargs)
        behind = (x_PH.qdata.view(torch.uint8) if isinstance(x_PH, MXTensor) else x_PH)[plan.group_ends_E[-1]:]
        assert len(behind)  # else this test tests nothing
        behind.fill_(3)
        return x_PH, weight_P


def test_rows_behind_the_last_group_may_hold_anything(ranks2):
    correct(ranks2.run(_exchanges, dispatch_combine.Case(4200, 32, 2, 2, "random"), Unwritten))


def _today(tokens, top_k):
    x, expert_TK = world.randn(tokens, 64), torch.rand(tokens, 8).topk(top_k).indices
    today, collective = Today(world.group()), Collective(world.group())
    plan, other = today.plan(expert_TK, 4), collective.plan(expert_TK, 4)
    rows, _ = today.dispatch(plan, x)
    assert plan.group_ends_E.tolist() == other.group_ends_E.tolist()
    assert torch.equal(rows, collective.dispatch(other, x, dispatch_combine.Wire(False))[0])
    y, _ = today.combine(plan, rows)
    return torch.equal(y, (x.float() * top_k).to(BF16))


@pytest.mark.parametrize("tokens, top_k", [(50, 3), (64, 1), (1, 2), (2200, 2)])
def test_todays_exchange_gives_the_collective_transport_s_rows(ranks2, tokens, top_k):
    assert ranks2.run(_today, tokens, top_k) == [True, True]


# ---- moe_layer ----------------------------------------------------------------------------------------------------


def _layers():
    case = moe_layer.Case(tokens=64, dim=64, hidden=96, experts=8, top_k=2)
    return flat(moe_layer.measured_rows(case, 0.001))


def test_layers_are_correct_by_their_own_check(ranks2):
    rows = correct(ranks2.run(_layers))
    totals = {row["contender"]: row for row in rows if row["case"]["operation"] == "total"}
    assert set(totals) == {moe_layer.AUTOEP, moe_layer.CLASSIC, moe_layer.DROPLESS,
                           *(f"collective, {recipe}" for recipe in moe_layer.RECIPES),
                           "collective, mxfp8_wgrad_with_hp, classic"}
    assert all(("counted_waits" in row) == name.startswith("collective") for name, row in totals.items())
    assert totals["collective, bf16"]["sqnr_db"] > 38 > totals["collective, mxfp8"]["sqnr_db"]


# ---- latency ------------------------------------------------------------------------------------------------------


class Spoilt(AllToAll):

    def combine(self, out_tokens, *args, **kwargs):
        super().combine(out_tokens, *args, **kwargs)
        out_tokens[0] *= 1.25


def _latencies(kind, sizes):
    """With AllToAll over the emulator of CUDA."""
    memory = PeerMemory(dist.get_world_group(), emulator.load(dist.get_rank()), provider=emulator.Shared)

    def intranode(rank, world_size, dp_size, group, **sizes):
        return kind(memory, **sizes)

    with mock.patch.object(latency.AllToAll, "intranode", intranode), \
            mock.patch.object(latency, "available", lambda: True):
        return flat(latency.measured_rows(sizes, 0.001))


@pytest.mark.skipif(emulator.obstacle() is not None, reason=f"the emulator needs nvcc: {emulator.obstacle()}")
def test_exchanges_of_few_tokens_are_right_and_a_wrong_one_is_noticed(ranks2):
    emulator.build()
    sizes = [latency.Size(8, 2, 256, 1), latency.Size(8, 2, 256, 4)]
    rows = correct(ranks2.run(_latencies, AllToAll, sizes))
    for size in sizes:
        for operation in ("dispatch", "combine", "total"):
            found = {row["contender"]: row["median_ms"] for row in rows
                     if row["case"] == {"operation": operation, "ranks": 2, **size.case("eager")}}
            assert set(found) == {*latency.OURS, *latency.NCCL} and all(ms > 0 for ms in found.values())
    rows = ranks2.run(_latencies, Spoilt, sizes[:1])[0]
    assert {row["contender"] for row in rows if not row["correct"]} == set(latency.OURS)


# ---- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module, arguments, told", [
    (moe_layer, ["--tokens", "0"], "0 is less than 1"), (ep_pipeline, ["--shapes", "big"], "dims value: 'big'"),
    (ep_pipeline, ["--shapes", "64x0"], "0 is less than 1"), (latency, ["--tokens", "-1"], "-1 is less than 1"),
    (dispatch_combine, ["--cases", "big"], "invalid choice: 'big'")])
def test_odd_arguments_end_in_one_line(monkeypatch, capsys, module, arguments, told):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--out", "x.json", *arguments])
    with pytest.raises(SystemExit):
        module.main()
    assert told in capsys.readouterr().err.splitlines()[-1]
