# SPDX-License-Identifier: Apache-2.0
"""Errors and printed lines while an engine is made: sections, versions, models and ranks that do not fit."""

import io
import re
import subprocess
import sys
import textwrap
from contextlib import nullcontext, redirect_stdout
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine

import ds_mxfp8_moe
from ds_mxfp8_moe import ConfigError
from ds_mxfp8_moe.engine.self_check import Verdict
from ds_mxfp8_moe.engine.start import NO_ENGINE
from ds_mxfp8_moe.transport.releases import own_code
from tests.support.autoep_models import ds_config, model
from tests.support.engine_cases import MXFP8, OTHER, enabled, initializer, made_by
from tests.support.models import SwiGLU


def test_a_wrong_section_raises_before_any_collective():
    config = ds_config({"enabled": True, "recipie": "bf16"})
    with pytest.raises(ConfigError, match='did you mean "recipe"'):
        ds_mxfp8_moe.initialize(model=torch.nn.Linear(2, 2), config=config)
    with enabled(), pytest.raises(ConfigError, match='did you mean "recipe"'):
        DeepSpeedEngine(args=None, model=torch.nn.Linear(2, 2), config=config)
    assert not dist.is_initialized()


def said_at_start(section):
    out, net = io.StringIO(), torch.nn.Linear(32, 32)
    config = ds_config(section, expert_parallel={"enabled": False})
    with redirect_stdout(out):
        ds_mxfp8_moe.initialize(model=net, config=config, model_parameters=net.parameters())
    return [line for line in out.getvalue().splitlines() if line.startswith("mxfp8_moe")]


def said_before_an_error(section):
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(AssertionError, match="requires an optimizer"):
        ds_mxfp8_moe.initialize(model=torch.nn.Linear(8, 8), config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "mxfp8_moe": section})
    return out.getvalue()


def test_a_section_that_is_not_enabled_is_said_before_deepspeed_fails(ranks2):
    first, second = ranks2.run(said_before_an_error, {"recipe": "mxfp8"})
    assert 'lacks "enabled": true' in first and "mxfp8_moe" not in second


@pytest.mark.parametrize("section, message", [
    ({"recipe": "mxfp8"}, 'lacks "enabled": true'),
    ({"enabled": True}, "WARNING: no MoE layers found.*expert_parallel")])
def test_a_section_that_does_nothing_says_so(ranks2, section, message):
    first, second = ranks2.run(said_at_start, section)
    assert len(first) == 1 and re.search(message, first[0]) and not second


def advised(autoep):
    out, config = io.StringIO(), ds_config({"enabled": True, "capacity_factor": 2.0})
    config["expert_parallel"] = {"enabled": True, **autoep}
    with redirect_stdout(out):
        ds_mxfp8_moe.initialize(model=model(), config=config)
    return out.getvalue()


def test_a_size_left_out_and_where_the_experts_lie_are_said(ranks2):
    said, _ = ranks2.run(advised, {})
    assert said.count("layers.0-1.mlp (AutoEP) converted: 8 experts on every rank, recipe") == 1
    assert 'WARNING: "expert_parallel" has no "autoep_size"' in said
    assert 'WARNING: "capacity_factor" has no effect: every rank holds all experts' in said
    said, _ = ranks2.run(advised, {"autoep_size": 2})
    assert said.count("converted: 8 experts, 4 on each of 2 ranks, recipe") == 1 and said.count("WARNING") == 1


@pytest.mark.slow
def test_a_process_that_makes_no_engine_says_so_at_its_exit():
    """Of two processes, the one that ends without an error."""
    program = """
        import os
        import accelerate, torch
        import ds_mxfp8_moe
        ds_mxfp8_moe.enable()
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Linear(2, 2))
        print("trained", flush=True)
        child = os.fork()
        if child == 0:
            raise ValueError("an error")
        print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith(f"trained\nexit 1\n{NO_ENGINE}\n"), run.stderr
    assert "ValueError: an error" in run.stderr


def failing_on_rank_1() -> str:
    """What each rank hears of a conversion that fails on rank 1."""
    failing = mock.patch("ds_mxfp8_moe.engine.attach.convert_layers", side_effect=ValueError("an adapter of its own"))
    with failing if dist.get_rank() else nullcontext(), pytest.raises(Exception) as error:
        ds_mxfp8_moe.initialize(model=model(), config=ds_config(MXFP8))
    return f"{type(error.value).__name__}: {error.value}"


def test_a_rank_that_fails_to_convert_is_named(ranks2):
    assert ranks2.run(failing_on_rank_1) == [
        "RuntimeError: the layers could not be converted on rank 1: ValueError: an adapter of its own",
        "ValueError: an adapter of its own"]


def differing(front, sections) -> str:
    on_a_gpu = mock.patch.multiple("ds_mxfp8_moe.engine.attach", has_kernels=lambda device: True,
                                   check=lambda kind, device: Verdict())
    with on_a_gpu, pytest.raises(ConfigError) as error:
        made_by(front, sections[dist.get_rank()])
    return str(error.value)


@pytest.mark.parametrize("front, other", [
    ("convert", OTHER), ("initialize", OTHER), ("initialize", {"enabled": False}), ("initialize", None),
    ("initialize", {"enabled": True, "self_check": False}),
    ("enable", {"enabled": False}), ("enable", None)])
def test_sections_that_differ_between_ranks_raise_on_every_rank(ranks2, front, other):
    for message in ranks2.run(differing, front, [MXFP8, other]):
        assert message.startswith('the section "mxfp8_moe" on ranks [1] differs from rank 0\'s')


def other_sources() -> str:
    code = own_code()._replace(digest="0" * 64) if dist.get_rank() == 1 else own_code()
    with mock.patch("ds_mxfp8_moe.transport.agreement.own_code", lambda: code), pytest.raises(RuntimeError) as error:
        made_by("initialize", MXFP8)
    return str(error.value)


def test_ranks_with_different_code_raise_at_the_start(ranks2):
    first, second = ranks2.run(other_sources)
    assert first == second and "rank 1: ds_mxfp8_moe" in first and "(sources 00000000 in" in first


def refused(kind, patched) -> None:
    if kind == "meta":
        with torch.device("meta"):
            net, message = model(), r"parameters are on the device meta, .*lm_head.*|.*embed_tokens.*HfDeepSpeedConf"
    else:
        net, message = model(), "is in an engine already.*Make a new model"
        ds_mxfp8_moe.initialize(model=net, config=ds_config(MXFP8, 2))
    with initializer(patched) as initialize, pytest.raises(ConfigError, match=message):
        initialize(model=net, config=ds_config(MXFP8, 2))


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kind", ["meta", "second engine"])
def test_models_of_which_no_engine_can_be_made_are_refused_by_name(ranks2, kind, patched):
    ranks2.run(refused, kind, patched)


def of_other_sizes() -> str:
    net = MoE(32, SwiGLU(32, 48 if dist.get_rank() else 64), 2, ep_size=2)
    with pytest.raises(ConfigError) as error:
        ds_mxfp8_moe.initialize(model=torch.nn.Sequential(net), config={"train_micro_batch_size_per_gpu": 1,
                                                                         "mxfp8_moe": MXFP8})
    return str(error.value)


def test_a_layer_that_one_rank_alone_converts_is_an_error_with_the_reason(ranks2):
    for message in ranks2.run(of_other_sizes):
        assert message.startswith("0 is treated differently on different ranks, which would hang: rank 0: 2 experts")
        assert "; rank 1: not converted: FFN size 48 is no multiple of 32" in message
