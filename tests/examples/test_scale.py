# SPDX-License-Identifier: Apache-2.0
"""The model of scale: copies as one counts by hand and as known, times by hand, and how near it is to what was
measured inside one host."""

import json
import sys

import pytest

from exchange import scale
from exchange import scale_model as model


@pytest.mark.parametrize("layout, flat, hops", [
    ((32, 8, 1, 1), 5.44, 2.72),
    ((32, 8, 8, 4), 4.94, 2.19),
    ((32, 8, 4, 2), 4.95, 1.50),
    ((64, 8, 8, 2), 5.91, 1.75),
], ids=str)
def test_copies_of_a_token_of_8_of_256_experts_on_nodes_of_8(layout, flat, hops):
    ranks_met, nodes_met, right = scale.met(*layout, tokens=16384)
    away = 1 - 8 / layout[0]
    assert right and (ranks_met * away, nodes_met * away) == pytest.approx((flat, hops), rel=0.01)


def test_traffic_is_what_one_counts_by_hand(monkeypatch):
    """Each of 40 tokens once on each of 12 ranks, 2 nodes of 6 with 2 experts a rank."""
    nodes, ranks, local = 2, 6, 2
    expert_TK = scale.routed(40, nodes * ranks * local, 4, 4, 2)
    assert all(len({e // 6 for e in choices}) <= 2 and len(set(choices)) == 4 for choices in expert_TK.tolist())
    sent = dict.fromkeys(model.Traffic._fields, 0)
    for home in range(nodes * ranks):
        for choices in expert_TK.tolist():
            to = {e // local for e in choices}
            to_nodes = {rank // ranks for rank in to}
            rails = {node * ranks + home % ranks for node in to_nodes}
            sent["flat_links"] += len({rank for rank in to if rank // ranks == home // ranks} - {home})
            sent["flat_network"] += len({rank for rank in to if rank // ranks != home // ranks})
            sent["hops_links"] += len(to - rails)
            sent["hops_network"] += len(to_nodes - {home // ranks})
    monkeypatch.setattr(model, "GPUS_A_NODE", ranks)
    met = [scale.wanted_by(expert_TK, local * n, nodes * ranks // n).sum(1).double().mean().item() for n in (1, ranks)]
    for operation, inside, row in (("dispatch", 7168 + 224 + 16, 7168 + 224 + 16), ("combine", 4 * 7168, 2 * 7168)):
        got = model.traffic(operation, *met, nodes, 40, 4)
        bytes_of = {"hops_links": inside, "local": 0}
        assert got.local == pytest.approx(40 * 4 * 7168 / 1e6)
        assert got[:4] == pytest.approx([sent[name] / nodes / ranks * bytes_of.get(name, row) / 1e6
                                         for name in model.Traffic._fields[:4]])


def test_times_are_what_one_adds_by_hand():
    fabric = model.Fabric(50, 0.8, 100, 10, 1)
    sent = model.Traffic(flat_links=6, flat_network=40, hops_links=600, hops_network=20, local=200)
    collective, nvlink = model.Rates(0.05, 1 / 100, 1 / 1000), model.Rates(0.02, 1 / 200, 1 / 4000)
    times = model.times_ms(sent, collective, nvlink, 2, fabric)
    assert times == pytest.approx({
        model.FLAT: 0.05 + 0.2 + 40 / 40 + 0.108,
        model.HOST: 0.05 + (20 / 40 + 0.101) + 0.05 + 6 + 0.2,
        model.PEER: 0.05 + (20 / 40 + 0.101) + 0.02 + 3 + 0.05,
        model.NVSHMEM: 0.02 + 0.05 + max(20 / 40 + 0.011, 3),
    })
    assert model.times_ms(sent, collective, nvlink, 1, None) == pytest.approx({
        model.FLAT: 0.05 + 0.06 + 0.2, model.NVLINK: 0.02 + 0.03 + 0.05})


def test_the_model_is_within_20_percent_of_what_was_measured_inside_one_host():
    """At a hidden size that it was not fitted to. Elsewhere it is worse, and says so."""
    rows = scale.checked()
    near = [row["worst_error"] for row in rows if scale.is_near(row["case"])]
    far = [row["worst_error"] for row in rows if scale.is_far(row["case"])]
    assert len(near) == 4 and len(far) == 12 and max(near) <= 0.2 < max(far)
    assert all(rate > 0 for rates in model.rates().values() for rate in rates)


def test_published_figures_stand_beside_the_same_case():
    case = {"operation": "dispatch", "gpus": 32, "fabric": model.INFINIBAND, "routing": "random", "top_k": 8,
            "tokens": 4096}
    assert model.published_ms(case, 3.63) == {model.DEEPEP: pytest.approx(4096 * 3.63 * 7392 / 58e6)}
    assert model.published_ms(case | {"tokens": 128}, 3.63)[model.DEEPEP_FEW] == 0.155
    assert not model.published_ms(case | {"routing": "4 of 8 groups"}, 2.9)
    assert not model.published_ms(case | {"fabric": "RoCE, 200 Gb/s a GPU"}, 3.63)


@pytest.mark.slow  # the routings of all cases, and the plot
def test_the_script_writes_a_result_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "scale.json"
    monkeypatch.setattr(sys, "argv", ["scale.py", "--out", str(path), "--check"])
    scale.main()
    rows = json.loads(path.read_text())["rows"]
    assert {row["case"].get("gpus") for row in rows} == {None, 8, *scale.GPUS} and all(row["correct"] for row in rows)
    assert "no time was measured between nodes" in capsys.readouterr().out and path.with_suffix(".png").exists()
