# SPDX-License-Identifier: Apache-2.0
"""The benchmark of two hops inside one host, without GPUs: over gloo and the emulator of CUDA."""


import deepspeed.comm as dist
import emulator
import pytest
from benchmark_runs import run_script
from peer_wires import peer_hops

from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from exchange import two_hops
from exchange.dispatch_combine import Case
from exchange.two_hops import FLAT, TWO_HOPS

pytestmark = pytest.mark.slow
CASE = Case(tokens=400, hidden=256, top_k=8, experts=64, routing="random")


def measured(over_peer_memory: bool = False) -> list[dict]:
    made = two_hops.transports(2)
    if over_peer_memory:
        made[TWO_HOPS] = Hierarchical(peer_hops(dist.get_world_group(), 2))
    return two_hops.measure(CASE, 2, 0.001, made)


def test_bytes_are_those_of_the_routing(ranks4):
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


@pytest.mark.skipif(emulator.obstacle() is not None, reason=f"the emulator needs nvcc: {emulator.obstacle()}")
def test_over_peer_memory_the_same_bytes_travel(ranks4):
    emulator.build()
    rows, over_gloo = ranks4.run(measured, True)[0], ranks4.run(measured)[0]
    assert all(row["correct"] for row in rows)
    assert [row["bytes"] for row in rows] == [row["bytes"] for row in over_gloo]


def test_the_script(ranks4, tmp_path):
    rows = ranks4.run(run_script, "exchange.two_hops", tmp_path / "x.json", "--budget", "0.01")[0]
    assert {row["case"]["nodes"] for row in rows} == {"2 x 2"}
