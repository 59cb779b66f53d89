# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of classic MoE models: plain DeepSpeed and ours read what the other has written, and train on.

Weights, float32 masters and moments are compared bit for bit after loading. What follows is compared with the run that
wrote the checkpoint and simply went on: bit for bit where the same code goes on, else to the noise of the recipe.
"""

import math
import os
import re
from dataclasses import replace

import pytest
import torch
from deepspeed.moe.layer import MoE
from models import (
    BF16,
    DEFAULT,
    EXPERTS,
    FFN,
    HIDDEN,
    PLAIN,
    Layout,
    Net,
    SwiGLU,
    make_engine,
    owners,
    parameters,
    train_steps,
)
from rank_pool import reset_deepspeed_groups
from slow import slow_except

from ds_mxfp8_moe.layers.found import converted_layers

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-4, "torch_adam": True}}}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}

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
FOUR_RANKS = {
    "half-zero1": Layout(zero=1, config=ADAM),
    "half-zero2-bf16": Layout(zero=2, dtype="bf16", config=ADAM),
}
OTHER_WEIGHTS = 99  # the seed of an engine that is to load a checkpoint


def state(engine) -> dict[str, torch.Tensor]:
    """Weights, and all tensors and numbers of this rank's optimizer: masters, moments, step counts."""
    found = {f"weight {name}": p for name, p in parameters(engine).items()}

    def walk(place, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{place}.{key}", inner)
        elif isinstance(value, (list, tuple)):
            for i, inner in enumerate(value):
                walk(f"{place}.{i}", inner)
        elif isinstance(value, (torch.Tensor, int, float)):
            found[f"optimizer{place}"] = torch.as_tensor(value).detach().clone()

    walk("", engine.optimizer.state_dict())
    return found


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


def assert_equal(got: dict, expected: dict):
    assert got.keys() == expected.keys()
    different = [name for name in got if not torch.equal(got[name], expected[name])]
    assert not different


def files_of(directory) -> dict[str, dict]:
    """Path inside a checkpoint -> its content."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            content = torch.load(path, weights_only=False) if name.endswith(".pt") else open(path).read()
            found[os.path.relpath(path, directory)] = content
    return found


def shape_of(content):
    """A checkpoint file's keys, dtypes and shapes, without its values, and without the config that it quotes."""
    if isinstance(content, dict):
        return {key: shape_of(value) for key, value in content.items() if key != "ds_config"}
    if isinstance(content, (list, tuple)):
        return [shape_of(value) for value in content]
    if isinstance(content, torch.Tensor):
        return content.dtype, content.shape
    return type(content)


def check(results, layout, directory):
    for run in results:
        base, tuned = run["base"], run["tuned"]
        assert_equal(tuned["loaded"], base["saved"])
        for name in ("ours from tuned", "plain from tuned"):
            assert_equal(run[name]["loaded"], tuned["saved"])
        assert any(name.startswith("optimizer") and v.numel() > 1 and v.any() for name, v in base["saved"].items())
        # The same code goes on to the bit.
        assert run["ours from tuned"]["steps"] == tuned["next"]
        assert_equal(run["ours from tuned"]["end"], tuned["end"])
        # Other code goes on as near as its arithmetic is.
        tolerance = 1e-5 if layout.dtype == "fp32" else 3e-2
        assert losses(tuned["steps"]) == pytest.approx(losses(base["next"]), rel=tolerance)
        assert losses(run["plain from tuned"]["steps"]) == pytest.approx(losses(tuned["next"]), rel=tolerance)
        assert [session_["converted"] for session_ in run.values()] == [0, 2, 2, 0]
        for name, session_ in run.items():
            for parameter, ranks in session_["owners"].items():
                key = f"weight {parameter}"
                assert all(torch.equal(session_["end"][key], results[r][name]["end"][key]) for r in ranks)
    plain, ours = (files_of(os.path.join(directory, name)) for name in ("base", "tuned"))
    assert plain.keys() == ours.keys()
    assert any("expert" in name for name in plain)
    for name in plain:
        assert shape_of(ours[name]) == shape_of(plain[name]), name


def losses(steps):
    return [record["loss"] for record in steps]


@pytest.mark.parametrize("name", slow_except(LAYOUTS, "zero0", "zero2-bf16", "offload", "two-ep-sizes"))
def test_plain_and_ours_read_each_other(ranks2, tmp_path, name):
    layout = replace(LAYOUTS[name], steps=2)
    check(ranks2.run(chain, layout, str(tmp_path)), layout, tmp_path)


@pytest.mark.parametrize("name", slow_except(FOUR_RANKS, "half-zero1"))
def test_plain_and_ours_read_each_other_on_four_ranks(ranks4, tmp_path, name):
    layout = replace(FOUR_RANKS[name], steps=2)
    check(ranks4.run(chain, layout, str(tmp_path)), layout, tmp_path)


def reshape(layout, directory):
    """A checkpoint written with experts over two ranks, its weights read with all experts on each rank."""
    written = session(layout, PLAIN, save=directory)
    reset_deepspeed_groups()
    engine = make_engine(replace(layout, ep_size=1, seed=OTHER_WEIGHTS), DEFAULT)
    engine.load_checkpoint(directory, load_module_only=True)
    return {"written": written["saved"], "read": parameters(engine), "steps": train_steps(engine, layout)}


def test_weights_are_read_at_another_ep_size(ranks2, tmp_path):
    results = ranks2.run(reshape, replace(LAYOUTS["zero1"], steps=1), str(tmp_path))
    for run in results:
        assert math.isfinite(run["steps"][0]["loss"])
        for name, p in run["read"].items():
            owner, key = 0, name
            if found := re.fullmatch(r"(.*deepspeed_experts\.)(\d)(\..*)", name):
                owner, local = divmod(int(found[2]), EXPERTS // 2)
                key = f"{found[1]}{local}{found[3]}"
            assert torch.equal(p, results[owner]["written"][f"weight {key}"]), name


OTHER_SHAPES = {
    "wider-experts": lambda: MoE(HIDDEN, SwiGLU(HIDDEN, 2 * FFN), EXPERTS, 2, k=2),
    "more-experts": lambda: MoE(HIDDEN, SwiGLU(), 2 * EXPERTS, 2, k=2),
}


def load_into(shape, layout, section, directory):
    """Rank by rank, the error that loading raises in a model whose first MoE layer has another shape."""
    model = Net(layout.ep_size)
    model.blocks[0].moe = OTHER_SHAPES[shape]()
    engine = make_engine(layout, section, model)
    try:
        engine.load_checkpoint(directory)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_checkpoint_of_another_shape_is_refused_on_every_rank(ranks2, tmp_path):
    layout = replace(LAYOUTS["zero1"], steps=1)
    ranks2.run(session, layout, PLAIN, save=str(tmp_path))
    for shape in OTHER_SHAPES:
        # A rank that hangs in a collective has no answer within these seconds, which fails the case.
        for error in ranks2.run(load_into, shape, layout, DEFAULT, str(tmp_path), seconds=30):
            assert re.search("size mismatch|Missing key|Unexpected key|No such file", error), error
