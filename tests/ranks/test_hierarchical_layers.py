# SPDX-License-Identifier: Apache-2.0
"""Layers over the transport in two hops, with the keys of the config: four ranks as two nodes of two."""


import deepspeed.comm as dist
import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from tests.support.autoep_models import autoep_layers, batch
from tests.support.autoep_models import engine as autoep_engine
from tests.support.autoep_trainings import trained
from tests.support.conformance import Problem, check
from tests.support.hierarchical_layers_cases import FLAT, TWO_HOPS, classic, sent
from tests.support.models import PLAIN, Layout
from tests.support.replay_cases import outcome
from tests.support.slow import slow_except


def decibels(expected: dict, got: dict) -> float:
    return min(float(sqnr_db(expected[name], got[name])) for name in expected)


# ---------------------------------------------------------------- classic layers


def classic_layers(layout: Layout, keys: dict) -> tuple:
    plain, flat, hops = (classic(section and section | keys, layout) for section in (PLAIN, FLAT, TWO_HOPS))
    return (plain[0], flat[0], hops[0], decibels(plain[1], hops[1]), decibels(flat[1], hops[1]), flat[2], *hops[2:])


@pytest.mark.parametrize("zero, recipe", slow_except(
    [(0, "mxfp8_wgrad_with_hp"), (1, "bf16"), (2, "mxfp8")], (0, "mxfp8_wgrad_with_hp")))
def test_classic_layers_train(ranks4, zero, recipe):
    answers = ranks4.run(classic_layers, Layout(ep_size=4, zero=zero), {"recipe": recipe})
    for rank, (plain, flat, hops, to_plain, to_flat, none, crossed, said) in enumerate(answers):
        assert not any(none) and all(crossed)
        assert said == (["mxfp8_moe: transport hierarchical between ranks [0, 1, 2, 3]: 2 nodes of 2 ranks, wire host"]
                        if rank == 0 else [])
        assert hops == pytest.approx(plain, rel=1e-5 if recipe == "bf16" else 0.05)
        assert hops == pytest.approx(flat, rel=1e-5 if recipe == "bf16" else 0.01)
        assert to_flat >= (90 if recipe == "bf16" else 40) and (to_plain >= 90 or recipe != "bf16"), to_flat


# ---------------------------------------------------------------- spread experts


def spread(keys: dict, stage: int) -> tuple:
    plain, flat, hops = (trained(autoep_engine(section and section | keys, stage, 4)) for section in
                         (PLAIN, FLAT, TWO_HOPS))
    return plain[0], hops[0], decibels(plain[1], hops[1]), decibels(flat[1], hops[1]), hops[2]


@pytest.mark.slow
@pytest.mark.parametrize("stage, recipe", slow_except(
    [(0, "mxfp8_wgrad_with_hp"), (2, "bf16"), (3, "bf16")], (3, "bf16")))
def test_spread_experts_train(ranks4, stage, recipe):
    for plain, hops, to_plain, to_flat, converted in ranks4.run(spread, {"recipe": recipe}, stage):
        assert converted == 2
        assert hops == pytest.approx(plain, rel=1e-5 if recipe == "bf16" else 0.05)
        assert to_flat >= (90 if recipe == "bf16" else 40) and to_plain >= (85 if recipe == "bf16" else 20)


def one_model_each_way() -> tuple:
    """Output and gradients of a model over two hops, over the flat transport, and again; and whether rows crossed."""
    engine = autoep_engine(TWO_HOPS, 0, 4)
    got = []
    for section in (TWO_HOPS, FLAT, TWO_HOPS):
        ds_mxfp8_moe.convert(engine, section)
        got.append(outcome(engine.module, batch(0)))
    hops, flat, again = got
    crossed = [sent(layer.mxfp8_settings.choose_transport(layer.ep_group)) for layer in autoep_layers(engine.module)]
    return decibels(flat, hops), all(torch.equal(hops[name], again[name]) for name in hops), crossed


def test_a_model_gives_the_same_bits_in_every_run(ranks4):
    for db, same, crossed in ranks4.run(one_model_each_way):
        assert db >= 40 and same and crossed[-1] > 0


# ---------------------------------------------------------------- several groups


def two_groups() -> None:
    """Ranks 0 to 3 and 4 to 7 are two groups, each of two nodes; the second one begins later."""
    for first in (0, 4):
        group = dist.new_group(list(range(first, first + 4)))
        if first <= dist.get_rank() < first + 4:
            mine = group
    check(Problem(tokens=(5, 20, 13, 31)), Hierarchical(Hops.of(mine, 2), "moe"), 2, times=3)


@pytest.mark.slow
def test_several_groups_in_one_world(ranks8):
    ranks8.run(two_groups)
