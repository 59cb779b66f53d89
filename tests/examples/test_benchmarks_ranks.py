# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of several GPUs share, on two gloo ranks: rows, times, failures and ends of ranks."""

import json
import sys
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from exchange import ep_pipeline
from lib import run, timing, world
from lib.timing import Contender

pytestmark = pytest.mark.slow


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


def test_without_a_launcher_it_says_how_to_start(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["latency.py", "--cases", "tiny"])
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2 latency.py --cases tiny"):
        world.start()


def test_ranks_that_share_gpus_are_machines_of_their_own_for_nccl(monkeypatch):
    accelerator = mock.Mock(**{"device_count.return_value": 2})
    monkeypatch.setattr(world, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(world, "on_gpu", lambda: True)
    monkeypatch.setattr(world.deepspeed, "init_distributed", mock.Mock())
    for ranks, hosts in ((2, [None] * 2), (4, ["of-rank-0", "of-rank-1", "of-rank-2", "of-rank-3"])):
        found = []
        for rank in range(ranks):
            with mock.patch.dict(world.os.environ, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks)):
                world.start()
                found.append(world.os.environ.get("NCCL_HOSTID"))
        assert found == hosts
    assert [call.args[0] for call in accelerator.set_device.mock_calls] == [0, 1, 0, 1, 0, 1]


def _in_time():
    shown = []
    age = world.largest(torch.tensor([time.time() - world.STARTED])).item()  # the ranks began at different times
    for item in world.in_time(range(5), age + 1):
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
