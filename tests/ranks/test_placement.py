# SPDX-License-Identifier: Apache-2.0
"""Experts that move between ranks while a model trains. All that users see is as if they had not moved."""

import contextlib
import io
import json
import operator
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import mean
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.engine import moving, placement, skew
from ds_mxfp8_moe.engine.placement import rank_loads
from ds_mxfp8_moe.layers.experts import converted_layers
from ds_mxfp8_moe.layers.placement import experts_of
from ds_mxfp8_moe.transport import deadline
from tests.support import models
from tests.support.adapted_models import adapted, build
from tests.support.autoep_models import autoep_layers, engine, gate_weight, train_engine
from tests.support.metrics_cases import monitor, written
from tests.support.placement_cases import assert_alike, exported, move
from tests.support.rank_pool import RankFailure
from tests.support.slow import WIDE, slow_except

MXFP8 = {"enabled": True}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
BF16 = {"bf16": {"enabled": True}}


def two_steps(net, first: int) -> list[float]:
    return train_engine(net, range(first, first + 2))


def of_autoep(family: str, stage: int, **changes) -> list[float]:
    return assert_alike(partial(engine, MXFP8, stage, family=family, **changes), two_steps)


KEPT_WHOLE = {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}}


# Sums of two choices are the same in any order, so that even bits are.
@pytest.mark.parametrize("family, stage, changes", [
    *(pytest.param("qwen3_moe", *more, marks=WIDE) for more in ((1, {}), (3, ADAM))),  # as with copies, below
    ("deepseek_v3", 2, ADAM | BF16), ("gpt_oss", 1, ADAM), ("qwen3_moe", 3, KEPT_WHOLE), ("qwen3_moe", 0, ADAM),
    ("qwen3_moe", 2, {"frozen": r".*\.experts\..*"}),
    ("qwen3_moe", 1, {**ADAM, **BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    ("qwen3_moe", 2, {**ADAM, **models.OFFLOAD})], ids=str)
def test_training_is_that_of_fixed_experts(ranks2, family, stage, changes):
    for losses in ranks2.run(of_autoep, family, stage, **changes):
        assert len({*losses}) == 6


@pytest.mark.parametrize("stage, changes", [
    (1, {"ep_size": 4}), (2, {**ADAM, **BF16, "zero_optimization": {"round_robin_gradients": True}}), (3, ADAM),
    pytest.param(3, KEPT_WHOLE, marks=WIDE)], ids=str)
def test_copies_of_experts_move_alike(ranks4, stage, changes):
    for losses in ranks4.run(of_autoep, "qwen3_moe", stage, **changes):
        assert len({*losses}) == 6


def of_lora(form: str, stage: int, merge_aware: bool = False, **changes) -> list[float]:
    section = {**MXFP8, "frozen_experts": form, "merge_aware": merge_aware}
    return assert_alike(lambda: build(adapted(**changes), section, stage), two_steps)


@pytest.mark.parametrize("form, stage, changes", [
    pytest.param("mxfp8", 1, {}, marks=WIDE), ("mxfp4", 2, {}), ("mxfp8", 2, {"merge_aware": True}),
    ("keep", 1, {"family": "gpt_oss"}), ("mxfp8", 3, {"family": "gpt_oss"})])
def test_adapters_follow_experts(ranks2, form, stage, changes):
    for losses in ranks2.run(of_lora, form, stage, **changes):
        assert len({*losses}) == 6


def of_classic(layout: models.Layout) -> list[dict]:
    return assert_alike(partial(models.make_engine, layout, MXFP8),
                        lambda net, first: models.train_steps(net, layout, first))


@pytest.mark.parametrize("layout", [
    *(pytest.param(layout, marks=WIDE) for layout in (models.Layout(zero=1), models.Layout(config=ADAM))),
    models.Layout(zero=2, dtype="bf16", client=True)], ids=str)
def test_classic_experts_move(ranks2, layout):
    for records in ranks2.run(of_classic, layout):
        assert len({record["loss"] for record in records}) == 6


# ---------------------------------------------------------------- checkpoints


def resumed(make: Callable, train: Callable, folder: str) -> tuple:
    """The files that a run with moved experts and one with fixed ones save, and losses after each of them and after
    these files are loaded by an engine with moved experts."""
    moved, fixed, other = make(), make(), make()
    for net, name in ((moved, "moved"), (fixed, "fixed")):
        train(net, 0)
        if net is moved:
            move(net, 1)
        train(net, 2)
        net.save_checkpoint(f"{folder}/{name}", tag="t", client_state={"of": "mine"})
    move(other, 2)
    train(other, 6)
    other.load_checkpoint(f"{folder}/moved", tag="t")
    losses = [train(net, 4) for net in (moved, fixed, other)]
    return losses, exported(moved), exported(other)


def of_autoep_saves(stage: int, folder: str) -> tuple:
    return resumed(partial(engine, MXFP8, stage, **ADAM), two_steps, folder)


def of_lora_saves(form: str, folder: str) -> tuple:
    return resumed(lambda: build(adapted(), {**MXFP8, "frozen_experts": form}, 1), two_steps, folder)


def of_classic_saves(folder: str) -> tuple:
    layout = models.Layout(zero=1, config=ADAM)
    return resumed(partial(models.make_engine, layout, MXFP8),
                   lambda net, first: models.train_steps(net, layout, first), folder)


@pytest.mark.parametrize("saves, args", [
    (of_autoep_saves, (1, )), pytest.param(of_autoep_saves, (2, ), marks=WIDE), (of_autoep_saves, (3, )),
    (of_lora_saves, ("mxfp8", )), pytest.param(of_lora_saves, ("keep", ), marks=WIDE), (of_classic_saves, ())])
def test_checkpoints_do_not_show_placements(ranks2, tmp_path, saves, args):
    for (moved, fixed, other), state, loaded in ranks2.run(saves, *args, str(tmp_path)):
        assert moved == fixed == other
        models.assert_same_bits(state, loaded)
    listed = [json.loads((tmp_path / name / "t" / "manifest.json").read_text()) for name in ("moved", "fixed")]
    assert listed[0] == listed[1] or args == (3, )  # in ZeRO-3, the pickles of equal tensors differ


def killed(folder: str) -> None:
    """Rank 1 dies between two layers of a move."""
    net = engine(MXFP8, 1, **ADAM)
    two_steps(net, 0)
    net.save_checkpoint(folder, tag="a")
    plain, layers = moving._values, []

    def values(*args):
        layers.append(args)
        if dist.get_rank() == 1 and len(layers) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args)

    with mock.patch.object(moving, "_values", values), mock.patch.object(deadline, "GRACE_SECONDS", 0.3):
        move(net, 1)


def after_a_death(folder: str) -> bool:
    net, fixed = engine(MXFP8, 1, model_changes={"initializer_range": 0.5}, **ADAM), engine(MXFP8, 1, **ADAM)
    net.load_checkpoint(folder)
    two_steps(fixed, 0)
    return two_steps(net, 2) == two_steps(fixed, 2)


@pytest.mark.slow
def test_a_rank_that_dies_in_a_move_leaves_the_checkpoint_whole(ranks2, tmp_path):
    with pytest.raises(RankFailure) as caught:
        ranks2.run(killed, str(tmp_path))
    assert "the move of experts of model.layers.1.mlp" in caught.value.errors[0]
    assert "PeerError" in caught.value.errors[0] and "ended" in caught.value.errors[1]
    assert ranks2.run(after_a_death, str(tmp_path)) == [True, True]


# ---------------------------------------------------------------- what users see


def seen(folder: str, moves: bool) -> tuple:
    """The routes of two forwards, recorded and replayed, and the loads of each layer by rank."""
    net = engine({**MXFP8, "metrics": {"every": 1}, "load_balance_coeff": 0.01}, 1, **ADAM, **monitor(folder))
    if moves:
        move(net, 1)
    with ds_mxfp8_moe.record_routes(net) as routes:
        losses = two_steps(net, 0)
    with ds_mxfp8_moe.replay_routes(net, [*routes]):
        losses += two_steps(net, 0)
    biases = [layer.expert_bias.clone() for layer in converted_layers(net.module)]
    loads = []
    for i, layer in enumerate(converted_layers(net.module)):
        counts_E = routes[1][..., i, :].flatten().long().bincount(minlength=8)
        dist.all_reduce(counts_E)
        loads.append([float(counts_E[[*experts_of(layer, rank)]].sum()) for rank in range(2)])
    return losses, [*routes], biases, loads


def test_routes_biases_and_metrics_have_the_models_numbers(ranks2, tmp_path):
    figures = {}
    for moves in (True, False):
        results = ranks2.run(seen, str(tmp_path / str(moves)), moves)
        found = written(tmp_path / str(moves))
        for i, loads in enumerate(results[0][3]):
            rank_most = found.pop(f"model.layers.{i}.mlp_rank_most")[1][1]
            assert rank_most == pytest.approx(max(loads) / sum(loads) * 2)
        figures[moves] = {name: value for name, value in found.items() if not name.endswith(("_ms", "_ms_most"))}
        if moves:
            moved = results
    assert figures[True] == figures[False] and len(figures[True]) == 16
    for (losses, routes, biases, loads), (own_losses, own_routes, own_biases, own_loads) in zip(
            moved, results, strict=True):
        assert losses == own_losses and loads != own_loads
        assert all(map(torch.equal, routes + biases, own_routes + own_biases)) and all(map(torch.any, biases))


# ---------------------------------------------------------------- the key


def prefer_rank_0(net) -> None:
    """Most tokens choose experts of rank 0."""
    for block in autoep_layers(net.module):
        with torch.no_grad():
            gate_weight(block)[:4] *= 30


def placements_of(net) -> list[list[tuple]]:
    return [[tuple(experts_of(layer, rank)) for rank in range(layer.ep_size)]
            for layer in converted_layers(net.module)]


def by_the_key(folder: str, kind: str, ep_size: int, stage: int) -> tuple:
    """Losses; the placements after each step; the fullest rank's share of the loads, by layer and step."""
    section = {**MXFP8, "expert_placement": kind, "metrics": {"every": 1}}
    net = engine(section, stage, ep_size=ep_size, optimizer={"type": "SGD", "params": {"lr": 1e-3}},
                 **monitor(f"{folder}/{kind}"))
    prefer_rank_0(net)
    losses, placements, counted, shares = [], [], [], []
    layers = converted_layers(net.module)
    with mock.patch.multiple(placement, WINDOW=2, EVERY=4):
        for step in range(7):
            with ds_mxfp8_moe.record_routes(net) as routes:
                losses += train_engine(net, range(step, step + 1))
            counted.append(layers[0].mxfp8_loads is not None)
            placements.append(placements_of(net))
            for i, layer in enumerate(layers):
                counts_E = routes[0][..., i, :].flatten().long().bincount(minlength=8)
                dist.all_reduce(counts_E)
                loads = rank_loads(counts_E.tolist(), [experts_of(layer, rank) for rank in range(ep_size)])
                shares.append(max(loads) / sum(loads))
    return losses, placements, counted, shares


@pytest.mark.parametrize("ranks, ep_size, stage", slow_except([("ranks2", 2, 1), ("ranks4", 2, 2)], ("ranks4", 2, 2)))
def test_balanced_placement_follows_the_loads(request, tmp_path, ranks, ep_size, stage):
    """As the metrics of the run with fixed experts predict it."""
    ranks = request.getfixturevalue(ranks)
    fixed = ranks.run(by_the_key, str(tmp_path), "fixed", ep_size, stage)
    found = ranks.run(by_the_key, str(tmp_path), "balanced", ep_size, stage)
    for (losses, placements, counted, shares), (own_losses, none, never, own_shares) in zip(found, fixed, strict=True):
        assert losses == own_losses
        assert placements == found[0][1] and not any(map(operator.eq, placements[0], placements[1]))
        assert placements[1] == placements[4] and none == placements[:1] * 7
        assert counted == [True, False, False, True, True, False, False] and not any(never)
        assert shares[:2] == own_shares[:2] and mean(own_shares[4:]) > 0.75 and mean(shares[4:]) < 0.57
    with mock.patch.multiple(placement, WINDOW=2, EVERY=4), mock.patch.object(skew, "WINDOW", 2):
        by_fixed, by_balanced = (skew.read(tmp_path / kind / "job") for kind in ("fixed", "balanced"))
    assert len(by_fixed) == 2 and all(loads.recorded == loads.fixed != loads.balanced for loads in by_fixed.values())
    assert [(loads.recorded, loads.fixed) for loads in by_balanced.values()] == [
        (loads.balanced, loads.fixed) for loads in by_fixed.values()]


def of_layouts(layout: models.Layout, kind: str) -> tuple:
    with mock.patch.multiple(placement, WINDOW=2, EVERY=4, SMALLEST_GAIN=0, SMALLEST_SWAP=0):
        net = models.make_engine(layout, {**MXFP8, "expert_placement": kind})
        records = models.train_steps(net, layout)
    return [record["loss"] for record in records], placements_of(net)


@pytest.mark.parametrize("how", slow_except(["stages", "sizes", "tensors", "more tensors"], "stages"))
def test_stages_groups_and_tensor_parallel_ranks_agree(ranks4, how):
    """On where experts go, and on losses: classic layers with any loads, which some placement improves."""
    layout = replace(models.Layout(zero=1, steps=4), **{
        "stages": {"stages": 2}, "sizes": {"ep_size": (2, 4)}, "tensors": {"tensor_parallel": 2},
        "more tensors": {"tensor_parallel": 2, "ep_size": 4, "zero": 2}}[how])
    fixed, found = ranks4.run(of_layouts, layout, "fixed"), ranks4.run(of_layouts, layout, "balanced")
    assert [losses for losses, _ in found] == [losses for losses, _ in fixed]
    for i in range(2 if layout.stages > 1 else 1):
        of_stage = [placements for _, placements in found[2 * i:2 * i + 2 if layout.stages > 1 else None]]
        assert of_stage[0] != fixed[2 * i][1] and all(placements == of_stage[0] for placements in of_stage)


def without_effect(stage: int, section: dict, **changes) -> tuple:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        net = engine({**MXFP8, "expert_placement": "balanced", **section}, stage, **changes)
        train_engine(net, range(5))
    return "placement" in net._mxfp8.after_step, [line for line in said.getvalue().splitlines() if "placement" in line]


@pytest.mark.parametrize("stage, changes, reason", [
    (0, BF16, "the masters of FP16_UnfusedOptimizer are not moved: use ZeRO"),
    (1, {"ep_size": 1}, "every rank holds all experts of its layers, so no tokens travel")], ids=str)
def test_a_line_says_where_placement_has_no_effect(ranks2, stage, changes, reason):
    (places, (line, )), (also, _) = ranks2.run(without_effect, stage, {}, **changes)
    assert not places and not also and line.endswith(f'"expert_placement" has no effect: {reason}')


def switched_off() -> tuple[list[dict], list[dict]]:
    """Losses of a classic layer that is converted back, by DeepSpeed's own path, with experts moved before and not."""
    layout, losses = models.Layout(zero=1, config=ADAM), []
    for moves in (True, False):
        net = models.make_engine(layout, MXFP8)
        models.train_steps(net, layout)
        if moves:
            move(net, 1)
        ds_mxfp8_moe.convert(net, {"enabled": False})
        losses.append(models.train_steps(net, layout, 2))
    return losses


def test_deepspeeds_own_path_gets_experts_at_home(ranks2):
    for moved, fixed in ranks2.run(switched_off):
        assert moved == fixed
