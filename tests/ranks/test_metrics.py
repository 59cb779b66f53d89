# SPDX-License-Identifier: Apache-2.0
"""`metrics`: in one step of N, figures of each layer reach DeepSpeed's monitor. They are those of all ranks."""

import contextlib
import csv
import io
from pathlib import Path
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from autoep_models import autoep_layers, engine, train_engine
from models import Layout, batch, make_engine

from ds_mxfp8_moe import layer, metrics
from ds_mxfp8_moe.convert import converted_layers

FIGURES = {"load_most", "load_fewest", "load_entropy", "rank_most", "dropped", "amax", "zero_blocks",
           "saturated_blocks", "sqnr_db"}


def section(every: int) -> dict:
    return {"enabled": True, "metrics": {"every": every}}


def monitor(folder: str) -> dict:
    return {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}


def written(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for path in sorted((folder / "job").glob("Train_MoE_*.csv")):
        with path.open() as lines:
            found[path.stem.removeprefix("Train_MoE_")] = [(int(a), float(b)) for a, b in list(csv.reader(lines))[1:]]
    return found


def train_autoep(folder: str) -> tuple[list, list]:
    """The losses; the counts of all ranks in the last step's first micro-batch, by layer."""
    net = engine(section(2), 1, gradient_accumulation_steps=2, **monitor(folder))
    seen = [[] for _ in autoep_layers(net.module)]
    for moe, counts in zip(autoep_layers(net.module), seen, strict=True):
        moe.router.register_forward_hook(lambda module, args, out, counts=counts: counts.append(out[2].float()))
    losses = train_engine(net, range(8))
    first = [counts[6] for counts in seen]  # micro-batch 6 is the first of step 4
    for counts in first:
        dist.all_reduce(counts)
    return losses, [counts.tolist() for counts in first]


def test_figures_of_autoep_layers_are_those_of_all_ranks(ranks2, tmp_path):
    (_, counts), _ = ranks2.run(train_autoep, str(tmp_path))
    found = written(tmp_path)
    assert set(found) == {f"model.layers.{i}.mlp_{name}" for i in range(2) for name in FIGURES}
    assert {tuple(step for step, _ in rows) for rows in found.values()} == {(16, 32)}  # samples after steps 2 and 4
    for i, of_layer in enumerate(counts):
        for name, value in metrics.load_figures(of_layer, 2).items():
            assert found[f"model.layers.{i}.mlp_{name}"][-1][1] == pytest.approx(value)
        assert 25 < found[f"model.layers.{i}.mlp_sqnr_db"][-1][1] < 40
        assert found[f"model.layers.{i}.mlp_dropped"][-1][1] == 0


def train_classic(folder: str, every: int | None) -> tuple[list[float], int]:
    """The losses, and how many samples each layer took."""
    layout = Layout(zero=1, config=monitor(folder), moe={"capacity_factor": 0.5})
    net = make_engine(layout, section(every) if every else {"enabled": True})
    losses = []
    with mock.patch.object(layer, "sample", wraps=layer.sample) as sampled:
        for step in range(4):
            torch.manual_seed(step)
            loss = net(*batch(step, layout, dist.get_rank()))
            net.backward(loss)
            net.step()
            losses.append(loss.item())
    return losses, sampled.call_count / len(converted_layers(net.module))


def test_classic_layers_train_the_same_with_and_without(ranks2, tmp_path):
    plain, sampled = (ranks2.run(train_classic, str(tmp_path / str(every)), every) for every in (None, 4))
    assert [losses for losses, _ in plain] == [losses for losses, _ in sampled]
    assert [count for _, count in plain] == [0, 0] and [count for _, count in sampled] == [1, 1]
    found = written(tmp_path / "4")
    dropped = [rows[-1][1] for name, rows in found.items() if name.endswith("_dropped")]
    assert dropped and all(0.1 < value < 0.9 for value in dropped)
    assert not written(tmp_path / "None")


def without_monitor() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        engine(section(1), 0)
    return told.getvalue()


def test_it_says_that_there_is_no_monitor(ranks2):
    assert "\"metrics\" has no effect without one of DeepSpeed's monitors" in ranks2.run(without_monitor)[0]
