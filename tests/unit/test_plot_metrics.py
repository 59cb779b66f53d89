# SPDX-License-Identifier: Apache-2.0
"""The plot of a run's metrics, from files as DeepSpeed's CSV monitor writes them."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from deepspeed.monitor.csv_monitor import csvMonitor
from PIL import Image

from ds_mxfp8_moe import plot_metrics
from ds_mxfp8_moe.engine import metrics


def written(folder, layers: int, figures=("load_most", "load_fewest", "dropped", "sqnr_db", "wait_ms",
                                          "wait_ms_most", "amax")):
    """What a run of 5 sampled steps leaves."""
    monitor = csvMonitor(SimpleNamespace(enabled=True, output_path=str(folder), job_name="job"))
    for step in range(1, 6):
        monitor.write_events([(f"{metrics.PREFIX}/model.layers.{i}.block_sparse_moe/{name}", i + step / 10, 8 * step)
                              for i in range(layers) for name in figures])
    return folder / "job"


@pytest.fixture(autouse=True)
def rank_0():
    with mock.patch("deepspeed.comm.get_rank", return_value=0):
        yield


def test_it_reads_what_the_monitor_writes(tmp_path):
    found = plot_metrics.read(written(tmp_path, 12))
    assert list(found) == [f"model.layers.{i}.block_sparse_moe" for i in range(12)]  # 10 behind 9
    assert set(found["model.layers.3.block_sparse_moe"]) == {name for *_, lines in plot_metrics.PANELS
                                                             for name in lines}
    assert found["model.layers.3.block_sparse_moe"]["wait_ms"] == [(8 * step, 3 + step / 10) for step in range(1, 6)]


def test_one_command_makes_the_plot(tmp_path, capsys):
    folder = written(tmp_path, 2)
    assert plot_metrics.main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "metrics.png")
    assert Image.open(folder / "metrics.png").size[0] > 1000


def test_errors_are_one_line(tmp_path, capsys, monkeypatch):
    assert plot_metrics.main([str(tmp_path)]) == 1
    assert "has no Train_MoE_*.csv: give the folder of DeepSpeed's CSV monitor" in capsys.readouterr().err
    folder = written(tmp_path, 1)
    next(folder.glob("*_dropped.csv")).write_text("step,dropped\n8,none\n")
    assert plot_metrics.main([str(folder)]) == 1
    assert "_dropped.csv: expected rows of a sample and a value" in capsys.readouterr().err
    next(folder.glob("*_dropped.csv")).unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot_metrics.main([str(folder)]) == 1
    assert "the plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err
