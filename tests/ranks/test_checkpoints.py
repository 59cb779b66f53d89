# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of classic MoE models: plain DeepSpeed and ours read what the other has written, and train on.

Weights, float32 masters and moments are compared bit for bit after loading. What follows is compared with the run that
wrote the checkpoint and simply went on: bit for bit where the same code goes on, else to the noise of the recipe.
"""

import os
import re
from dataclasses import replace

import pytest
import torch

from ds_mxfp8_moe.layers.experts import converted_layers
from tests.support.models import (
    ADAM,
    BF16,
    DEFAULT,
    OFFLOAD,
    PLAIN,
    Layout,
    assert_same_bits,
    make_engine,
    owners,
    state,
    train_steps,
)
from tests.support.rank_pool import reset_deepspeed_groups
from tests.support.slow import slow_except

LAYOUTS = {
    "zero0": Layout(config=ADAM),
    "zero0-bf16": Layout(dtype="bf16", config=ADAM),
    "zero1": Layout(zero=1, config=ADAM),
    "zero2-bf16": Layout(zero=2, dtype="bf16", config=ADAM),
    "zero1-bf16-fp32-accumulation": Layout(zero=1, dtype="bf16", config={**ADAM, "data_types":
                                                                         {"grad_accum_dtype": "fp32"}}),
    "offload": Layout(zero=2, dtype="bf16", config={**ADAM, **OFFLOAD}),
    "residual": Layout(zero=2, dtype="bf16", moe={"use_residual": True}, config=ADAM),
    "two-ep-sizes": Layout(ep_size=(1, 2), zero=1, config=ADAM),
}
OTHER_WEIGHTS = 99  # the seed of an engine that is to load a checkpoint


def session(layout, section, load=None, save=None, first=0):
    """Perhaps loads a checkpoint, trains from batch number `first` on, perhaps writes one and goes on."""
    reset_deepspeed_groups()
    result = {}
    engine = make_engine(replace(layout, seed=OTHER_WEIGHTS) if load else layout, section)
    if load:
        path, _ = engine.load_checkpoint(load)
        assert path is not None
        result["loaded"] = state(engine)
    result["steps"] = train_steps(engine, layout, first)
    if save:
        engine.save_checkpoint(save, tag="t")
        result["saved"] = state(engine)
        result["next"] = train_steps(engine, layout, first + layout.steps)
    result["owners"] = owners(engine)
    result["end"] = state(engine)
    result["converted"] = len(converted_layers(engine.module))
    engine.destroy()
    return result


def recipe_of(layout) -> dict:
    """In float32 the recipe that leaves nothing but float32 roundings, in bf16 the default one."""
    return BF16 if layout.dtype == "fp32" else DEFAULT


def chain(layout, directory):
    """Base by plain DeepSpeed, finetuned by ours, and reloaded by both."""
    base, tuned = os.path.join(directory, "base"), os.path.join(directory, "tuned")
    n, ours = layout.steps, recipe_of(layout)
    return {"base": session(layout, PLAIN, save=base),
            "tuned": session(layout, ours, load=base, save=tuned, first=n),
            "ours from tuned": session(layout, ours, load=tuned, first=2 * n),
            "plain from tuned": session(layout, PLAIN, load=tuned, first=2 * n)}


def assert_each_reads_the_other(results, layout):
    for run in results:
        base, tuned = run["base"], run["tuned"]
        assert_same_bits(tuned["loaded"], base["saved"])
        for name in ("ours from tuned", "plain from tuned"):
            assert_same_bits(run[name]["loaded"], tuned["saved"])
        assert any(name.startswith("optimizer") and v.numel() > 1 and v.any() for name, v in base["saved"].items())
        # The same code goes on to the bit.
        assert run["ours from tuned"]["steps"] == tuned["next"]
        assert_same_bits(run["ours from tuned"]["end"], tuned["end"])
        # Other code goes on as near as its arithmetic is.
        tolerance = 1e-5 if layout.dtype == "fp32" else 3e-2
        assert losses(tuned["steps"]) == pytest.approx(losses(base["next"]), rel=tolerance)
        assert losses(run["plain from tuned"]["steps"]) == pytest.approx(losses(tuned["next"]), rel=tolerance)
        assert [session_["converted"] for session_ in run.values()] == [0, 2, 2, 0]
        for name, session_ in run.items():
            for parameter, ranks in session_["owners"].items():
                key = f"weight {parameter}"
                assert all(torch.equal(session_["end"][key], results[r][name]["end"][key]) for r in ranks)


def losses(steps):
    return [record["loss"] for record in steps]


@pytest.mark.parametrize("ranks, name", slow_except(
    [*(("ranks2", name) for name in LAYOUTS), ("ranks4", "zero2-bf16"), ("ranks4", "zero1")],
    ("ranks2", "two-ep-sizes")))
def test_plain_and_ours_read_each_other(request, tmp_path, ranks, name):
    results = request.getfixturevalue(ranks).run(chain, LAYOUTS[name], str(tmp_path))
    assert_each_reads_the_other(results, LAYOUTS[name])


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


@pytest.mark.parametrize("stage", slow_except([0, 1, 2], 0, 2))
def test_experts_may_be_frozen_when_a_run_goes_on(ranks2, tmp_path, stage):
    assert ranks2.run(frozen_later, str(tmp_path), stage) == [([], [], True)] * 2
