# SPDX-License-Identifier: Apache-2.0
"""`metrics`: in one step of N, figures of each layer reach DeepSpeed's monitor. They are those of all ranks."""

import contextlib
import io
import time
from dataclasses import replace
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

import ds_mxfp8_moe
from ds_mxfp8_moe.engine import metrics
from ds_mxfp8_moe.layers import settings
from ds_mxfp8_moe.layers.experts import converted_layers
from ds_mxfp8_moe.transport.timed import Timed
from tests.support.autoep_models import autoep_layers, engine, train_engine, watch_choices
from tests.support.engine_cases import Block
from tests.support.metrics_cases import monitor, written
from tests.support.models import Layout, batch, make_engine, train_steps
from tests.support.slow import slow_except

FIGURES = {"load_most", "load_fewest", "load_entropy", "rank_most", "dropped", "amax", "zero_blocks",
           "saturated_blocks", "sqnr_db", "wait_ms", "wait_ms_most", "exchange_ms"}


def section(every: int) -> dict:
    return {"enabled": True, "metrics": {"every": every}}


def train_autoep(folder: str) -> tuple[list, list]:
    """The losses; the counts of all ranks in the last step's first micro-batch, by layer."""
    net = engine(section(2), 1, gradient_accumulation_steps=2, **monitor(folder))
    seen = [[] for _ in autoep_layers(net.module)]
    for moe, counts in zip(autoep_layers(net.module), seen, strict=True):
        watch_choices(moe, lambda expert_TK, counts=counts: counts.append(
            expert_TK.flatten().bincount(minlength=8).float()))
    losses = train_engine(net, range(8))
    first = [counts[6] for counts in seen]  # micro-batch 6 is the first of step 4
    for counts in first:
        dist.all_reduce(counts)
    return losses, [counts.tolist() for counts in first]


def test_figures_of_autoep_layers_are_those_of_all_ranks(ranks2, tmp_path):
    start = time.monotonic()
    (_, counts), _ = ranks2.run(train_autoep, str(tmp_path))
    found = written(tmp_path)
    (sample, micro_batch_ms), = found.pop("micro_batch_ms")
    assert sample == 32 and 0 < 4 * micro_batch_ms < 1e3 * (time.monotonic() - start)  # from step 2 to step 4
    assert set(found) == {f"model.layers.{i}.mlp_{name}" for i in range(2) for name in FIGURES} | {"exchange_wait_ms"}
    assert {tuple(step for step, _ in rows) for rows in found.values()} == {(16, 32)}  # samples after steps 2 and 4
    for i, of_layer in enumerate(counts):
        by_rank = [sum(of_layer[:4]), sum(of_layer[4:])]
        for name, loads in (("rank", by_rank), ("expert", of_layer)):
            text = (tmp_path / f"job/Train_MoE_model.layers.{i}.mlp_{name}_loads.csv").read_text()
            assert text.splitlines()[2] == f"4,{' '.join(f'{load:.0f}' for load in loads)}"
        for name, value in metrics.load_figures(by_rank, of_layer).items():
            assert found[f"model.layers.{i}.mlp_{name}"][-1][1] == pytest.approx(value)
        assert 25 < found[f"model.layers.{i}.mlp_sqnr_db"][-1][1] < 40
        assert found[f"model.layers.{i}.mlp_dropped"][-1][1] == 0


def train_classic(folder: str, every: int | None) -> tuple[list[float], int]:
    """The losses of four steps; how many samples each layer took."""
    layout = Layout(zero=1, config=monitor(folder), moe={"capacity_factor": 0.5})
    net = make_engine(layout, section(every) if every else {"enabled": True})
    losses, plain = [], settings.watch

    def watch(of_layer, *args):
        assert of_layer.training
        return plain(of_layer, *args)

    with mock.patch.object(settings, "watch", side_effect=watch) as sampled:
        for step in range(4):
            net.eval()  # an evaluation between steps is not sampled
            with torch.no_grad():
                net(*batch(99, layout, dist.get_rank()))
            net.train()
            losses += [record["loss"] for record in train_steps(net, replace(layout, steps=1), step)]
    return losses, sampled.call_count / len(converted_layers(net.module))


def test_classic_layers_train_the_same_with_and_without(ranks2, tmp_path):
    plain, sampled = (ranks2.run(train_classic, str(tmp_path / str(every)), every) for every in (None, 4))
    assert [losses for losses, _ in plain] == [losses for losses, _ in sampled]
    assert [count for _, count in plain] == [0, 0] and [count for _, count in sampled] == [1, 1]
    dropped = [rows[-1][1] for name, rows in written(tmp_path / "4").items() if name.endswith("_dropped")]
    assert dropped and all(0.1 < value < 0.9 for value in dropped)
    assert not written(tmp_path / "None")


def late(folder: str) -> None:
    """Rank 1 comes to each forward 0.2 s later than rank 0, and 0.4 s later to each combine."""
    net = engine(section(1), 0, **monitor(folder))
    first = autoep_layers(net.module)[0]
    if dist.get_rank() == 1:
        first.register_forward_pre_hook(lambda *_: time.sleep(0.2))
        plain = Timed.combine

        def combine(*args, **kwargs):
            time.sleep(0.4)
            return plain(*args, **kwargs)

        with mock.patch.object(Timed, "combine", combine):
            train_engine(net, range(2))
    else:
        train_engine(net, range(2))


def test_the_time_for_which_ranks_wait(ranks2, tmp_path):
    ranks2.run(late, str(tmp_path))
    figures = {name.removeprefix("model.layers."): rows[-1][1] for name, rows in written(tmp_path).items()}
    assert 350 < figures["exchange_wait_ms"] < 600  # rank 0 waits for 0.4 s in each of two layers, rank 1 hardly
    assert 150 < figures["0.mlp_wait_ms_most"] < 2000
    assert figures["0.mlp_wait_ms"] == pytest.approx(figures["0.mlp_wait_ms_most"] / 2, rel=0.3)  # rank 1 hardly waits
    assert 0 < figures["1.mlp_wait_ms_most"] < 100  # the ranks have met in the layer before
    assert 200 < figures["1.mlp_exchange_ms"] < 300


def times_taken(folder: str, turns: int) -> list[tuple[int, int]]:
    """How many waits and exchanges each sample of two steps has times of."""
    samples, plain = [], Timed.__init__

    def init(self, *args):
        samples.append(self)
        plain(self, *args)

    with mock.patch.object(Timed, "__init__", init):
        train_engine(engine({**section(1), "expert_turns": turns}, 1, **monitor(folder)), range(2))
    return [(len(one._plans), len(one._exchanges)) for one in samples]


@pytest.mark.parametrize("turns", [1, 3])
def test_times_are_those_of_forward_alone(ranks2, tmp_path, turns):
    """With "expert_turns", backward computes each turn again."""
    assert ranks2.run(times_taken, str(tmp_path), turns) == [[(turns, 2 * turns)] * 4] * 2


def not_finite(stage: int, where: str) -> tuple[list[str], int]:
    """What is said in four steps with a NaN or an infinity, which none of them gets rid of; our hooks at the end."""
    net = engine({"enabled": True}, stage, bf16={"enabled": True})
    layer = autoep_layers(net.module)[1]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        train_engine(net, range(1))
        if where == "weight" and dist.get_rank() == 1:
            with torch.no_grad():
                getattr(layer.experts.w2, "ds_tensor", layer.experts.w2).view(-1)[5] = torch.nan
        if where == "activation":
            attention = net.module.model.layers[0].self_attn
            attention.o_proj.register_forward_hook(lambda module, args, out: out + torch.inf)
        train_engine(net, range(1, 5))
        assert net.skipped_steps == (4 if where else 0)
    ours = [hook for module in net.module.modules() for hook in module._forward_hooks.values()
            if getattr(hook, "func", hook).__module__ == "ds_mxfp8_moe.engine.not_finite"]
    return [line for line in told.getvalue().splitlines() if "NaN" in line], len(ours)


NAN = {"": None, "weight": "model.layers.1.mlp.experts, on rank 1; there is one in model.layers.1.mlp.experts.w2",
       "activation": "model.layers.0.self_attn.o_proj, on rank 0; its weights are finite"}


@pytest.mark.parametrize("where, stage", slow_except(
    [*((where, 2) for where in NAN), ("activation", 1), ("weight", 3)], *((where, 2) for where in NAN)))
def test_the_first_module_with_a_nan_is_named_once(ranks2, where, stage):
    (told, hooks), (told_by_1, _) = ranks2.run(not_finite, stage, where)
    assert not told_by_1 and not hooks
    start = "mxfp8_moe: WARNING: NaN or infinity in step 3: the first module whose output has one is "
    assert told == ([start + NAN[where]] if where else [])


def of_stages(folder: str, later: bool) -> None:
    """A pipeline. Rank 0 has one layer and rank 1 two others, or rank 0 has none and all are converted later."""
    parts = [LayerSpec(Block, 4 + index) for index in range(3)]
    if later:
        parts[0:1] = [LayerSpec(torch.nn.Linear, 32, 32)] * 2
    net = PipelineModule(parts, num_stages=2, loss_fn=lambda out, target: (out - target).square().mean(),
                         partition_method="uniform")
    config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "mxfp8_moe": section(1),
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **monitor(folder)}
    if later:
        config["mxfp8_moe"] = {"enabled": False}
    pipe = ds_mxfp8_moe.initialize(model=net, config=config)[0]
    if later:
        ds_mxfp8_moe.convert(pipe, {"metrics": {"every": 1}})
    data = torch.randn(2, 8, 32)
    pipe.train_batch(iter([(data, data)] * 2))


@pytest.mark.slow
@pytest.mark.parametrize("later, layers", [(False, 3), (True, 2)])
def test_the_stages_of_a_pipeline_have_different_layers(ranks2, tmp_path, later, layers):
    ranks2.run(of_stages, str(tmp_path), later)
    ranks2.close()  # a stage without MoE layers makes fewer groups, and torch names groups by their number
    found = {name.rsplit("_load_most")[0] for name in written(tmp_path) if name.endswith("_load_most")}
    assert len(found) == layers


def without_monitor() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        engine(section(1), 0)
    return told.getvalue()


def test_it_says_that_there_is_no_monitor(ranks2):
    assert "\"metrics\" has no effect without one of DeepSpeed's monitors" in ranks2.run(without_monitor)[0]
