# SPDX-License-Identifier: Apache-2.0
"""The benchmark of two hops inside one host, without GPUs: over gloo and the emulator of CUDA, and a played MPS."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import deepspeed.comm as dist
import emulator
import pytest
from peer_wires import peer_hops
from test_two_nodes import Late, Nudged

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from exchange import two_hops
from exchange.dispatch_combine import Case
from exchange.two_hops import FLAT, TWO_HOPS, Nodes

pytestmark = pytest.mark.slow
CASE = Case(tokens=400, hidden=256, top_k=8, experts=64, routing="random")
NODES = Nodes(2, 2)


def measured(kind=Hierarchical, hops=None) -> list[dict]:
    flat, plain = two_hops.transports(NODES.size).values()
    found = two_hops.measure(CASE, NODES, 0.001, {FLAT: flat, TWO_HOPS: kind(hops or plain.hops)})
    assert type(flat) is Collective
    return found


def test_both_are_correct_and_their_bytes_are_those_of_the_routing(ranks4):
    rows = ranks4.run(measured)[0]
    assert all(row["correct"] for row in rows) and len(rows) == 8
    sent = {(row["case"]["operation"], row["case"]["dtype"], row["contender"]): row["bytes"] for row in rows}
    # Of 64 experts, 16 on each rank, a token chooses 8. It goes to a rank and to a node by these chances.
    rank, node = 1 - 0.9 * 0.1, 0.997
    for dtype, row in (("bf16", 512), ("mxfp8", 256 + 8)):
        predicted = {("dispatch", FLAT): 3 * rank * (row + 32), ("dispatch", TWO_HOPS): (node + 2 * rank) * (row + 32),
                     ("combine", FLAT): 3 * rank * row, ("combine", TWO_HOPS): node * row + 2 * rank * 1024}
        for (operation, name), of_a_token in predicted.items():
            assert sent[operation, dtype, name] == pytest.approx(CASE.tokens * of_a_token, rel=0.05)


@pytest.mark.parametrize("wrong", [Nudged, Late])
def test_two_hops_with_other_bits_are_noticed(ranks4, wrong):
    rows = ranks4.run(measured, wrong)[0]
    assert {row["contender"] for row in rows if row["correct"]} == {FLAT}


def over_peer_memory() -> list[dict]:
    return measured(hops=peer_hops(dist.get_world_group(), NODES.size))


@pytest.mark.skipif(emulator.obstacle() is not None, reason=f"the emulator needs nvcc: {emulator.obstacle()}")
def test_over_peer_memory_the_same_bytes_travel(ranks4):
    emulator.build()
    rows, over_gloo = ranks4.run(over_peer_memory)[0], ranks4.run(measured)[0]
    assert all(row["correct"] for row in rows)
    assert [row["bytes"] for row in rows] == [row["bytes"] for row in over_gloo]


# ---- the host of the ranks ------------------------------------------------------------------------------------------


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_script_writes_a_result_file(tmp_path):
    out = tmp_path / "two_hops.json"
    without_ranks = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, two_hops.__file__, "--out", out, "--budget", "0.01"], text=True,
                          env=without_ranks | {"DS_ACCELERATOR": "cpu"}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280)
    assert done.returncode == 0, done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert all(row["correct"] and row["median_ms"] > 0 for row in rows)
    assert {row["case"]["nodes"] for row in rows} == {"2 x 2"} and out.with_suffix(".png").exists()
    assert "dispatch: bytes of two hops, of the flat exchange's" in done.stdout


def test_a_rank_that_fails_ends_the_run(tmp_path, monkeypatch):
    python = program(tmp_path / "python", '[ "$RANK" = 2 ] && exit 3\nexec sleep 60')
    monkeypatch.setattr(sys, "executable", str(python))
    start = time.monotonic()
    with pytest.raises(SystemExit, match="rank 2 ended with status 3"):
        two_hops.launched(NODES, Namespace(cases="tiny", budget=0.1), tmp_path, {})
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("gpus, ranks, devices, percentage", [
    (1, 4, "0000", "25"), (1, 8, "00000000", "12"), (2, 4, "0101", "50"), (8, 4, "0123", "100")])
def test_ranks_share_the_gpus_evenly(gpus, ranks, devices, percentage):
    accelerator = mock.Mock(**{"device_count.return_value": gpus})
    with mock.patch.object(two_hops.world, "on_gpu", lambda: True), \
            mock.patch.object(two_hops, "get_accelerator", lambda: accelerator):
        found = [two_hops.environment(rank, ranks, 1234) for rank in range(ranks)]
    assert "".join(one["LOCAL_RANK"] for one in found) == devices
    assert {one["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for one in found} == {percentage}
    assert len({one["NCCL_HOSTID"] for one in found}) == ranks


def test_the_daemon_is_stopped_whatever_happens(tmp_path, monkeypatch):
    said = tmp_path / "said"
    program(tmp_path / two_hops.MPS, f'echo "$CUDA_MPS_PIPE_DIRECTORY $*" >> {said}\n[ "$1" ] || cat >> {said}')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ZeroDivisionError), two_hops.mps(tmp_path) as clients:
        assert said.read_text() == f"{tmp_path / 'pipe'} -d\n"
        assert clients["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "pipe")
        1 / 0  # noqa: B018
    assert said.read_text() == f"{tmp_path / 'pipe'} -d\n{tmp_path / 'pipe'} \nquit\n"


def test_what_keeps_the_daemon_from_running_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="nvidia-cuda-mps-control is not on PATH"), two_hops.mps(tmp_path):
        pass
    program(tmp_path / two_hops.MPS, "echo another daemon is running\nexit 1")
    with pytest.raises(SystemExit, match="-d failed: another daemon is running"), two_hops.mps(tmp_path):
        pass
