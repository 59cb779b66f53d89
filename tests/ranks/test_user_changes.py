# SPDX-License-Identifier: Apache-2.0
"""What users changed in MoE blocks before the engine is made has the effect that it has in plain transformers."""

import contextlib
import io
from collections.abc import Callable
from functools import cache, partial

import deepspeed.comm as dist
import pytest
import torch

from tests.support.autoep_models import engine_of, model
from tests.support.autoep_trainings import BF16, PLAIN, assert_trains_like_transformers, near, trained


def overridden(module: torch.nn.Module, function: Callable, name: str = "forward") -> None:
    """Gives the module a subclass of its class, with function(plain, *args) in the place of a method."""
    kind = type(module)
    plain = getattr(kind, name)
    module.__class__ = type("Mine", (kind, ), {name: lambda self, *args: function(partial(plain, self), *args)})


def replaced(module: torch.nn.Module, function: Callable) -> None:
    """The same of `forward` in the instance."""
    plain = module.forward
    module.forward = lambda *args: function(plain, *args)


def colder(plain: Callable, x_TH: torch.Tensor):
    return plain(x_TH / 5)


def halved(plain: Callable, *args):
    return 0.5 * plain(*args)


def half_of_scores(module, args, out):
    logits, weight_TK, expert_TK = out
    return logits, 0.5 * weight_TK, expert_TK


def without_gradient(grad: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(grad)


CHANGES = {
    "a forward hook of the router": lambda block: block.gate.register_forward_hook(half_of_scores),
    "a forward hook of the block": lambda block: block.register_forward_hook(lambda module, args, out: 0.5 * out),
    "a forward pre-hook of the experts": lambda block: block.experts.register_forward_pre_hook(
        lambda module, args: (0.5 * args[0], *args[1:])),
    "a gradient hook of the router": lambda block: block.gate.weight.register_hook(without_gradient),
    "a subclass of the router": lambda block: overridden(block.gate, colder),
    "another forward of the router": lambda block: replaced(block.gate, colder),
    "a subclass of the block": lambda block: overridden(block, halved),
    "another forward of the block": lambda block: replaced(block, halved),
    "more choices": lambda block: setattr(block.gate, "top_k", 4),
    "noise in the router": lambda block: setattr(block, "jitter_noise", 0.1),
    "another activation": lambda block: setattr(block.experts, "act_fn", torch.nn.GELU()),
    "another function between the GEMMs": lambda block: overridden(block.experts, halved, "_apply_gate"),
}
# Experts that stay whole, and the reason that a line gives.
WHOLE = {
    "a gradient hook of the experts": ("a weight has gradient hooks",
                                       lambda block: block.experts.down_proj.register_hook(without_gradient)),
    "another forward of the experts": ("replaces the forward of MixtralExperts",
                                       lambda block: replaced(block.experts, halved)),
    "a subclass of the experts": ("replaces the forward of Mine", lambda block: overridden(block.experts, halved)),
}


@cache
def unchanged() -> tuple:
    """What the changes are compared with, trained once by each rank."""
    torch.manual_seed(dist.get_rank())
    return trained(engine_of(model("mixtral"), PLAIN, 0), steps=1)


def beside_transformers(change: str) -> tuple:
    """What `check` takes, of a change in the first of two blocks; whether it has an effect in transformers; and what
    was said."""
    results, said = [unchanged()], io.StringIO()
    for section in (PLAIN, BF16):
        net = model("mixtral")
        (CHANGES.get(change) or WHOLE[change][1])(net.model.layers[0].mlp)
        with contextlib.redirect_stdout(said):
            engine = engine_of(net, section, 0)
        torch.manual_seed(dist.get_rank())
        results.append(trained(engine, steps=1))
    (_, moved, _), own, ours = results
    return near(own, ours), any(not torch.equal(own[1][name], moved[name]) for name in moved), said.getvalue()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_has_its_effect(ranks2, change):
    for result, effect, said in ranks2.run(beside_transformers, change):
        assert_trains_like_transformers([result])
        assert effect and result[-1] == 2 and "WARNING" not in said


@pytest.mark.parametrize("change", WHOLE)
def test_experts_stay_whole_where_nothing_else_would_keep_a_change(ranks2, change):
    results = ranks2.run(beside_transformers, change)
    for result, effect, _ in results:
        assert_trains_like_transformers([result])
        assert effect and result[-1] == 1
    line = "experts of model.layers.0.mlp stay whole on every rank, as transformers computes them: "
    assert line in results[0][2] and WHOLE[change][0] in results[0][2]
