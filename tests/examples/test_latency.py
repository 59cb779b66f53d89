# SPDX-License-Identifier: Apache-2.0
"""examples/benchmarks/latency.py on two ranks at tiny sizes, with AllToAll over the emulator of CUDA: every contender
is right, a wrong one is noticed, and tables and plots come of the rows."""

import sys
from pathlib import Path
from unittest import mock

import deepspeed.comm as dist
import emulator
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from exchange import latency
from exchange.latency import Size
from lib import results_file, show
from lib.show_ranks import A2A_BF16, A2A_E4M3, GEMM_ALONE, GEMM_BETWEEN, NCCL_EXACT, NCCL_PADDED

pytestmark = [pytest.mark.slow, pytest.mark.skipif(emulator.obstacle() is not None,
                                                   reason=f"the emulator needs nvcc: {emulator.obstacle()}")]
SIZES = [Size(8, 2, 256, 1), Size(8, 2, 256, 4)]


@pytest.fixture(scope="module", autouse=True)
def built():
    emulator.build()


class Spoilt(AllToAll):

    def combine(self, out_tokens, *args, **kwargs):
        super().combine(out_tokens, *args, **kwargs)
        out_tokens[0] *= 1.25


def measured(kind: type, sizes: list[Size]) -> list[dict]:
    memory = PeerMemory(dist.get_world_group(), emulator.load(dist.get_rank()), provider=emulator.Shared)

    def intranode(rank, world_size, dp_size, group, **sizes):
        return kind(memory, **sizes)

    with mock.patch.object(latency.AllToAll, "intranode", intranode), mock.patch.object(latency, "GEMM", 32), \
            mock.patch.object(latency, "available", lambda: True):
        return [row for rows in latency.run(sizes, 0.001, float("inf")) for row in rows]


def test_every_contender_is_right(ranks2, tmp_path, capsys):
    rows = ranks2.run(measured, AllToAll, SIZES)[0]
    assert all(row["correct"] for row in rows)
    for size in SIZES:
        for operation in ("dispatch", "combine", "total"):
            found = {row["contender"]: row["median_ms"] for row in rows
                     if row["case"] == {"operation": operation, "ranks": 2, **size.case("eager")}}
            assert set(found) == {A2A_E4M3, A2A_BF16, NCCL_EXACT, NCCL_PADDED} and all(ms > 0 for ms in found.values())
    beside = [row["contender"] for row in rows if row["case"]["operation"] == "send, GEMM, receive"]
    assert beside == [A2A_E4M3, GEMM_ALONE, GEMM_BETWEEN]

    path = tmp_path / "latency_2ranks.json"
    results_file.write("latency", rows, path)
    assert show.show(path) and path.with_suffix(".png").exists()
    assert "hidden" in capsys.readouterr().out


def test_a_wrong_result_is_noticed(ranks2):
    rows = ranks2.run(measured, Spoilt, SIZES[:1])[0]
    wrong = {row["contender"] for row in rows if not row["correct"]}
    assert wrong == {A2A_E4M3, A2A_BF16, GEMM_BETWEEN}
