# SPDX-License-Identifier: Apache-2.0
"""Route replay under activation checkpointing, in each order of forwards and backwards."""

import torch

import ds_mxfp8_moe
from ds_mxfp8_moe import record_routes, replay_routes
from small_models import small_model
from tests.support.autoep_models import autoep_layers, batch, ds_config
from tests.support.replay_cases import MXFP8, WAYS, different, other_routes, set_way


def inside(engine, loss_of, routes):
    for n in range(2):
        with replay_routes(engine, routes[n]):
            loss_of(n).backward()


def afterwards(engine, loss_of, routes):
    """Each backward after its `with`, and after a forward with live routing."""
    for n in range(2):
        with replay_routes(engine, routes[n]):
            loss = loss_of(n)
        loss_of(2)
        loss.backward()


def together(engine, loss_of, routes):
    """One backward of both, after an evaluation."""
    with replay_routes(engine, [*routes, routes[0]]):
        loss = loss_of(0) + loss_of(1)
        with torch.no_grad():
            loss_of(2)
        loss.backward()


def in_order(engine, loss_of, routes):
    """Two forwards before two backwards. The inner module is called, as TRL does."""
    with replay_routes(engine, routes):
        losses = [loss_of(0), loss_of(1)]
    for loss in losses:
        loss.backward()


def live(engine, loss_of, routes):
    """Recorded, and mixed with a forward that is not."""
    with record_routes(engine) as found:
        losses = [loss_of(0), loss_of(1)]
        losses[1].backward()
    losses.append(loss_of(2))
    losses[0].backward()
    losses[2].backward()
    assert len(found) == 2
    routes[:] = [one.view(-1, *one.shape[2:]) for one in found]


ORDERS = [inside, afterwards, together, in_order]


def recomputed(family: str, ep_size: int = 2) -> list[str]:
    """What differs between the gradients of one way of recomputation and another, in each order."""
    net = small_model(family, torch.float32, attn_implementation="eager")
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config(MXFP8, 0, ep_size))[0]
    model = engine.module
    layers = autoep_layers(model)
    first = other_routes(layers)
    routes, found = [first, first.flip(0)], []

    def loss_of(n: int) -> torch.Tensor:
        ids = batch(n).to(engine.device)
        hidden = model.model(input_ids=ids)[0]
        return torch.nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), ids.flatten())

    def run(order, way: str) -> dict[str, torch.Tensor]:
        set_way(model, way)
        torch.manual_seed(3)
        model.zero_grad()
        order(engine, loss_of, routes)
        return {name: p.grad for name, p in model.named_parameters()}

    stored = {order: run(order, "stored") for order in ORDERS}
    for way in ("reentrant", "non-reentrant"):
        found += [f"{order.__name__}, {way}: {name}" for order in ORDERS
                  for name in different(run(order, way), stored[order])]
    lives = [run(live, way) for way in WAYS]
    found += [f"live: {name}" for one in lives[1:] for name in different(one, lives[0])]
    replayed = run(in_order, "reentrant")
    alive = run(lambda *_: (loss_of(0) + loss_of(1)).backward(), "stored")
    found += [f"at once: {name}" for name in replayed if not torch.allclose(replayed[name], alive[name], atol=1e-6)]
    engine.destroy()
    return found
