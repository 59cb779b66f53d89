# SPDX-License-Identifier: Apache-2.0
"""What an engine loads."""

import re
from dataclasses import replace

import pytest
import torch

from tests.support.autoep_models import engine
from tests.support.models import Layout, make_engine, train_steps

FROZEN_LATER = r"blocks\.0\..*experts.*|last\..*"


def frozen_later(directory, stage):
    """Parameters that differ from those that the run before has saved, when some of them are frozen from now on."""
    layout = Layout(zero=stage, dtype="bf16")
    first = make_engine(layout, {"enabled": True})
    train_steps(first, layout)
    first.save_checkpoint(directory)
    layout = replace(layout, frozen=FROZEN_LATER, seed=99)
    second = make_engine(layout, {"enabled": True})
    second.load_checkpoint(directory, load_optimizer_states=False)
    wanted = {name: p.detach().clone() for name, p in first.module.named_parameters()}
    differing = [name for name, p in second.module.named_parameters() if not torch.equal(p, wanted[name])]
    train_steps(second, layout)
    moved = {name for name, p in second.module.named_parameters() if not torch.equal(p, wanted[name])}
    return differing, [name for name in moved if re.fullmatch(FROZEN_LATER, name)], len(moved) > 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts_may_be_frozen_when_a_run_goes_on(ranks2, tmp_path, stage):
    assert ranks2.run(frozen_later, str(tmp_path), stage) == [([], [], True)] * 2


def missing(directory):
    net = engine({"enabled": True}, 2)
    return net.load_checkpoint(str(directory))[0], engine({"enabled": False}, 2).checkpoint_engine.load.__name__


def test_a_missing_checkpoint_is_said_by_deepspeed(ranks2, tmp_path):
    assert ranks2.run(missing, tmp_path) == [(None, "load")] * 2
