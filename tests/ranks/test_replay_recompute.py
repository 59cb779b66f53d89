# SPDX-License-Identifier: Apache-2.0
"""Layers that activation checkpointing calls again choose what their forward chose; and compiled ones."""

import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe import record_routes, replay_routes
from ds_mxfp8_moe.routing.routes import routes_of
from small_models import small_model
from tests.support.autoep_models import autoep_layers, batch, ds_config, gate_weight, watch_choices
from tests.support.replay_cases import MXFP8, different, other_routes, outcome, set_way
from tests.support.replay_recompute_cases import recomputed


@pytest.mark.slow
def test_recomputations_choose_what_their_forward_chose(ranks2):
    assert ranks2.run(recomputed, "qwen3_moe") == [[], []]


def compiled() -> list[str]:
    """What differs between gradients of a compiled model and of the same one before, with other routes and at once."""
    net = small_model("qwen3_moe", torch.float32, attn_implementation="eager")
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config(MXFP8, 0, 2))[0]
    routes = other_routes(autoep_layers(net))
    with replay_routes(engine, routes):
        plain = outcome(net, batch(0))
    set_way(net, "non-reentrant")
    net.compile(backend="aot_eager")
    with replay_routes(engine, routes):
        replayed = outcome(net, batch(0))
    with record_routes(engine) as recorded:
        live = outcome(net, batch(0))
    with replay_routes(engine, recorded):
        again = outcome(net, batch(0))
    return [*different(live, again),
            *(name for name in plain if not torch.allclose(plain[name], replayed[name], atol=1e-6))]


@pytest.mark.slow
def test_compiled_models(ranks2):
    assert ranks2.run(compiled, seconds=240) == [[], []]


def changed_between() -> list[bool]:
    """Whether layers choose the same again, although their routers have changed since the forward."""
    engine = ds_mxfp8_moe.initialize(model=small_model("qwen3_moe", torch.float32), config=ds_config(MXFP8, 0, 2))[0]
    set_way(engine.module, "reentrant")
    layers, chosen = autoep_layers(engine.module), []
    for layer in layers:
        watch_choices(layer, chosen.append)
    with record_routes(engine):
        loss = engine.module(input_ids=batch(0), labels=batch(0)).loss
    for layer in layers:
        gate_weight(layer).data.neg_()
    loss.backward()
    return [torch.equal(chosen[0], chosen[3]), torch.equal(chosen[1], chosen[2])]


def test_a_recomputation_does_not_choose_anew(ranks2):
    assert ranks2.run(changed_between) == [[True, True]] * 2


def never_hooked() -> int:
    """How many forwards are remembered where nothing tells when a step ends. Recomputations that are late fail."""
    engine = ds_mxfp8_moe.initialize(model=small_model("qwen3_moe", torch.float32), config=ds_config(MXFP8, 0, 2))[0]
    set_way(engine.module, "reentrant")
    part = engine.module.model

    def loss() -> torch.Tensor:
        return engine.module(input_ids=batch(0), labels=batch(0)).loss

    losses = [loss()]
    for _ in range(4):
        with record_routes(part):
            losses.append(loss())
    losses.append(loss())
    for n in (0, 4, 5):
        losses[n].backward()
    for n in (1, 3):
        with pytest.raises(RuntimeError, match="is recomputed after the routes of its forward were forgotten"):
            losses[n].backward()
    return len(routes_of(part)._remembered)


def test_a_part_of_a_model_which_nothing_tells_of_steps(ranks2):
    assert ranks2.run(never_hooked) == [5, 5]  # forgotten, live, live, the last forward, live
