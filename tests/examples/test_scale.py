# SPDX-License-Identifier: Apache-2.0
"""The model of copies between nodes: counted as one counts by hand, and the known figures of several layouts."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from exchange import scale


@pytest.mark.parametrize("layout, flat, hops", [
    ((4, 1, 1), 5.44, 2.72),
    ((4, 8, 4), 4.94, 2.19),
    ((4, 4, 2), 4.95, 1.50),
    ((8, 8, 2), 5.91, 1.75),
], ids=str)
def test_copies_of_a_token_of_8_of_256_experts_on_nodes_of_8(layout, flat, hops):
    (rows, ) = scale.rows(16384, (layout, ))
    assert all(row["correct"] for row in rows)
    copies = {row["contender"]: row["copies"] for row in rows}
    assert copies[scale.FLAT] == pytest.approx(flat, rel=0.01)
    assert copies[scale.TWO_HOPS] == pytest.approx(hops, rel=0.01)


def test_copies_are_those_that_one_counts_by_hand():
    nodes, ranks, local = 3, 2, 2
    expert_TK = scale.routed(40, nodes * ranks * local, 4, 3, 2)
    assert all(len({e // 4 for e in choices}) <= 2 and len(set(choices)) == 4 for choices in expert_TK.tolist())
    to_ranks, to_nodes = 0, 0
    for home in range(nodes):  # each token once on each node
        for choices in expert_TK.tolist():
            to_ranks += len({e // local for e in choices if e // (local * ranks) != home})
            to_nodes += len({e // (local * ranks) for e in choices if e // (local * ranks) != home})
    counted = scale.copies(expert_TK, local, nodes, ranks)
    assert counted == {scale.FLAT: pytest.approx(to_ranks / 40 / nodes),
                       scale.TWO_HOPS: pytest.approx(to_nodes / 40 / nodes)}


def test_a_count_beside_probability_is_marked_wrong(monkeypatch):
    monkeypatch.setattr(scale, "routed", lambda tokens, *_: torch.zeros(tokens, 8, dtype=torch.int64))
    (rows, ) = scale.rows(64, ((4, 1, 1), ))
    assert not any(row["correct"] for row in rows)


@pytest.mark.slow  # the plot
def test_the_script_writes_a_result_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "scale.json"
    monkeypatch.setattr(sys, "argv", ["scale.py", "--out", str(path)])
    scale.main()
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * len(scale.LAYOUTS) and all(row["correct"] for row in rows)
    assert "A model: counted on random routings" in capsys.readouterr().out and path.with_suffix(".png").exists()
