# SPDX-License-Identifier: Apache-2.0
"""A next release of DeepSpeed that lacks private names, or does other things in its functions: training goes on."""

import io
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, redirect_stdout
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import ds_mxfp8_moe
from ds_mxfp8_moe.compat import private_names
from ds_mxfp8_moe.compat.private_names import FEATURES
from ds_mxfp8_moe.engine import attach as attach_module
from ds_mxfp8_moe.engine import self_check
from ds_mxfp8_moe.layers.experts import converted_layers
from tests.support.autoep_models import ds_config, model
from tests.support.autoep_models import train_engine as train_autoep
from tests.support.missing_names import without
from tests.support.models import DEFAULT, Layout, make_engine, train_steps
from tests.support.rank_pool import reset_deepspeed_groups


def trained(of_transformers: bool, change: Callable = nullcontext, section: dict | None = None):
    """Trains a model, classic or of transformers, after a change: (converted layers, whether gradients are batched,
    losses, what was said)."""
    said = io.StringIO()
    reset_deepspeed_groups()
    with change(), redirect_stdout(said):
        if of_transformers:
            engine, *_ = ds_mxfp8_moe.initialize(model=model(), config=ds_config({"enabled": True}, stage=1))
            losses = train_autoep(engine, range(2))
        else:
            engine = make_engine(layout := Layout(zero=1), {**DEFAULT, **(section or {})})
            losses = [record["loss"] for record in train_steps(engine, layout)]
        found = len(converted_layers(engine.module)), type(engine.optimizer) is not DeepSpeedZeroOptimizer
        engine.destroy()
    return *found, losses, said.getvalue()


def trained_without(feature, of_transformers=False, section=None):
    return trained(of_transformers, lambda: without(feature), section)


def assert_trained_and_said(result, feature):
    (*_, losses, said), (*_, others) = result
    assert all(abs(loss) < 1e4 for loss in losses)
    assert said.count(FEATURES[feature]) == 1 if feature != "classic layers" else "Engine.gone" in said
    assert FEATURES[feature] not in others  # rank 1


@pytest.mark.parametrize("feature, section", [
    ("steps", {}), ("batch_gradients", {}), ("loading", {}), ("saving", {}), ("own optimizer", {}),
    ("keep_quantized_weights", {"keep_quantized_weights": True}), ("metrics", {"metrics": {"every": 1}})])
def test_training_goes_on_without_a_feature(ranks2, feature, section):
    result = ranks2.run(trained_without, feature, False, section)
    assert_trained_and_said(result, feature)
    layers, batched, *_ = result[0]
    assert layers > 0 and batched is (feature != "batch_gradients")


@pytest.mark.parametrize("feature", ["classic layers", "stacked experts"])
def test_layers_run_deepspeeds_own_path_without_their_names(ranks2, feature):
    layers, _, losses, said = ranks2.run(trained_without, feature, feature == "stacked experts")[0]
    assert layers == 0 and all(abs(loss) < 1e4 for loss in losses)
    assert "DeepSpeedEngine.gone" in said


@contextmanager
def other_source():
    """A release whose ZeRO-1 and 2 have other code."""
    digest = private_names._source_digest
    private_names._absent.cache_clear()
    try:
        with mock.patch.object(private_names, "_source_digest",
                               lambda of: "another" if of is DeepSpeedZeroOptimizer else digest(of)):
            yield
    finally:
        private_names._absent.cache_clear()


def test_gradients_are_deepspeeds_own_where_its_functions_are_not_the_known_ones(ranks2):
    result = ranks2.run(trained, False, other_source)
    assert_trained_and_said(result, "batch_gradients")
    layers, batched, _, said = result[0]
    assert layers > 0 and not batched and ".DeepSpeedZeroOptimizer" in said and "has another" in said


@contextmanager
def called_0_20():
    with mock.patch.object(deepspeed, "__version__", "0.20.1"):
        private_names._absent.cache_clear()
        yield


def test_a_deepspeed_called_0_20_is_taken_as_it_is(ranks2):
    """The names and the functions decide, not the number."""
    for layers, batched, _, said in ranks2.run(trained, False, called_0_20):
        assert layers > 0 and batched and "WARNING" not in said


@contextmanager
def as_in_0_20():
    with called_0_20(), other_source():
        yield


def with_and_without_0_20():
    return trained(True, as_in_0_20), trained(True)


def test_spread_experts_train_as_before_with_0_20(ranks2):
    for rank, (new, known) in enumerate(ranks2.run(with_and_without_0_20)):
        assert new[:2] == (2, False) and known[:2] == (2, True) and new[2] == known[2]
        lines = [feature for feature, lost in FEATURES.items() if f"WARNING: {lost}" in new[3]]
        assert lines == ([] if rank else ["batch_gradients"]) and "WARNING" not in known[3]


def classic_with_a_broken_kernel(runs):
    """Rank 1 finds a broken kernel."""
    verdict = self_check.Verdict(runs, "grouped_mm: wrong") if dist.get_rank() == 1 else self_check.Verdict()

    @contextmanager
    def broken():
        with mock.patch.object(attach_module, "has_kernels", lambda device: True), \
                mock.patch.object(attach_module, "build_executor", lambda model: None), \
                mock.patch.object(attach_module, "check", lambda kind, device: verdict), \
                mock.patch.object(self_check, "releases", lambda device: {"triton": "3.99"}):
            yield

    return trained(False, broken)


@pytest.mark.parametrize("runs, said", [("all", None), ("bf16", "MoE layers run in bf16"),
                                        ("deepspeed", "MoE layers run DeepSpeed's own path")])
def test_a_broken_kernel_on_one_rank_is_not_used_on_any(ranks2, runs, said):
    for rank, (layers, _, losses, text) in enumerate(ranks2.run(classic_with_a_broken_kernel, runs)):
        assert all(abs(loss) < 1e4 for loss in losses)
        assert (layers > 0) == (runs != "deepspeed")
        if rank == 0:
            assert text.count("a kernel is broken here: grouped_mm: wrong. Here: triton 3.99") == (said is not None)
            assert said is None or said in text
            assert ("recipe bf16 (no quantization)" in text) == (runs == "bf16")
            assert ("0 of 2 MoE layers converted" in text) == (runs == "deepspeed")


def classic_without_the_check():
    asked = []
    with mock.patch.object(attach_module, "has_kernels", lambda device: True), \
            mock.patch.object(attach_module, "build_executor", lambda model: None), \
            mock.patch.object(attach_module, "check", lambda kind, device: asked.append(kind)):
        trained(False, section={"self_check": False})
    return asked


def test_the_key_leaves_the_check_out(ranks2):
    assert ranks2.run(classic_without_the_check) == [[], []]
