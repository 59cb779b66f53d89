# SPDX-License-Identifier: Apache-2.0
"""A next release of DeepSpeed that lacks private names, or does other things in its functions: training goes on."""

import io
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from autoep_models import autoep_layers, ds_config, model
from autoep_models import train_engine as train_autoep
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from models import DEFAULT, Layout, make_engine, train_steps
from rank_pool import reset_deepspeed_groups

import ds_mxfp8_moe
from ds_mxfp8_moe.engine import attach as attach_module
from ds_mxfp8_moe.engine import self_check
from ds_mxfp8_moe.layers import router as router_module
from ds_mxfp8_moe.layers.autoep import MXFP8AutoEPMoELayer
from ds_mxfp8_moe.layers.found import converted_layers
from ds_mxfp8_moe.ops import private_names
from ds_mxfp8_moe.ops.private_names import FEATURES, Row


@contextmanager
def without(feature):
    """A release of DeepSpeed that lacks a name of the feature."""
    names = (*private_names.NAMES, Row(feature, "deepspeed.runtime.engine:DeepSpeedEngine", "gone"))
    private_names._absent.cache_clear()
    try:
        with mock.patch.object(private_names, "NAMES", names):
            yield
    finally:
        private_names._absent.cache_clear()


def classic(changes: list, section: dict):
    """Trains a classic model: (converted layers, whether gradients are batched, losses, what was said)."""
    said = io.StringIO()
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change())
        stack.enter_context(redirect_stdout(said))
        reset_deepspeed_groups()
        layout = Layout(zero=1)
        engine = make_engine(layout, {**DEFAULT, **section})
        losses = [record["loss"] for record in train_steps(engine, layout)]
        found = len(converted_layers(engine.module)), type(engine.optimizer) is not DeepSpeedZeroOptimizer
        engine.destroy()
    return *found, losses, said.getvalue()


def classic_without(feature, section):
    return classic([lambda: without(feature)], section)


def check(result, feature):
    (*_, losses, said), (*_, others) = result
    assert all(abs(loss) < 1e4 for loss in losses)
    assert said.count(FEATURES[feature]) == 1 if feature != "classic layers" else "Engine.gone" in said
    assert FEATURES[feature] not in others  # rank 1


@pytest.mark.parametrize("feature, section", [
    ("steps", {}), ("batch_gradients", {}), ("loading", {}), ("saving", {}), ("recorders", {}), ("added presets", {}),
    ("own optimizer", {}), ("LoRA on experts", {}), ("keep_quantized_weights", {"keep_quantized_weights": True}),
    ("metrics", {"metrics": {"every": 1}})])
def test_training_goes_on_without_a_feature(ranks2, feature, section):
    result = ranks2.run(classic_without, feature, section)
    check(result, feature)
    layers, batched, *_ = result[0]
    assert layers > 0 and batched is (feature != "batch_gradients")


def autoep_without(feature, section):
    """Trains a Mixtral: as `classic`."""
    said = io.StringIO()
    reset_deepspeed_groups()
    with without(feature), redirect_stdout(said):
        engine, *_ = ds_mxfp8_moe.initialize(model=model(), config=ds_config({"enabled": True}))
        losses = train_autoep(engine, range(2))
    layers = [type(layer) is MXFP8AutoEPMoELayer for layer in autoep_layers(engine.module)]
    engine.destroy()
    return sum(layers), False, losses, said.getvalue()


@pytest.mark.parametrize("train, feature", [(classic_without, "classic layers"), (autoep_without, "AutoEP layers")])
def test_layers_run_deepspeeds_own_path_without_their_names(ranks2, train, feature):
    layers, batched, losses, said = ranks2.run(train, feature, {})[0]
    assert layers == 0 and not batched and all(abs(loss) < 1e4 for loss in losses)
    assert "not converted: deepspeed" in said and "DeepSpeedEngine.gone" in said


@contextmanager
def other_source():
    plain = DeepSpeedZeroOptimizer.reduce_ipg_grads

    def reduce_ipg_grads(self, comm_dtype=None):
        return plain(self, comm_dtype)

    with mock.patch.object(DeepSpeedZeroOptimizer, "reduce_ipg_grads", reduce_ipg_grads):
        private_names._absent.cache_clear()
        private_names._source.cache_clear()
        yield
    private_names._absent.cache_clear()
    private_names._source.cache_clear()


def classic_with_other_source():
    return classic([other_source], {})


def test_gradients_are_deepspeeds_own_where_its_functions_are_not_the_known_ones(ranks2):
    result = ranks2.run(classic_with_other_source)
    check(result, "batch_gradients")
    layers, batched, _, said = result[0]
    assert layers > 0 and not batched and "another DeepSpeedZeroOptimizer.reduce_ipg_grads" in said


@contextmanager
def called_0_20():
    with mock.patch.object(deepspeed, "__version__", "0.20.1"):
        private_names._absent.cache_clear()
        yield


def classic_called_0_20():
    return classic([called_0_20], {})


def test_a_deepspeed_called_0_20_is_taken_as_it_is(ranks2):
    """The names and the functions decide, not the number."""
    for layers, batched, _, said in ranks2.run(classic_called_0_20):
        assert layers > 0 and batched and "WARNING" not in said


@contextmanager
def as_in_0_20():
    """Other code in ZeRO-1 and 2 (DeepSpeed #8949) and in AutoEP's router, and experts that take one argument more, as
    those whose weight gradients overlap with an exchange may (#8739)."""
    experts, router = GroupedExperts.forward, TokenChoiceTopKRouter.forward

    def experts_forward(self, x, num_tokens_per_expert, overlap=None):
        assert overlap is None
        return experts(self, x, num_tokens_per_expert)

    def router_forward(self, x, expert_bias=None, replay=None):
        assert replay is None
        return router(self, x, expert_bias)

    with called_0_20(), other_source(), mock.patch.object(GroupedExperts, "forward", experts_forward), \
            mock.patch.object(TokenChoiceTopKRouter, "forward", router_forward):
        yield


def autoep(change):
    said = io.StringIO()
    reset_deepspeed_groups()
    with change(), redirect_stdout(said):
        engine, *_ = ds_mxfp8_moe.initialize(model=model(), config=ds_config({"enabled": True}, stage=1))
        losses = train_autoep(engine, range(2))
    found = len(converted_layers(engine.module)), type(engine.optimizer) is not DeepSpeedZeroOptimizer
    engine.destroy()
    return *found, losses, said.getvalue()


def autoep_as_in_0_20():
    return autoep(as_in_0_20), autoep(nullcontext)


def test_autoep_of_0_20_is_converted_and_trains_as_before(ranks2):
    for rank, (new, known) in enumerate(ranks2.run(autoep_as_in_0_20)):
        assert new[:2] == (2, False) and known[:2] == (2, True) and new[2] == known[2]
        lines = [feature for feature, lost in FEATURES.items() if f"WARNING: {lost}" in new[3]]
        assert lines == ([] if rank else ["batch_gradients"]) and "WARNING" not in known[3]


def test_a_router_of_another_release_chooses_by_its_own_code(monkeypatch):
    """Its rule may be another one, which the kernels would not know."""
    monkeypatch.setattr(router_module, "has_kernels", lambda device: True)
    with as_in_0_20():
        router = TokenChoiceTopKRouter(32, 8, None, None, 2, "softmax", True, 1.0, False)
        x = torch.randn(4, 32)
        for found, wanted in zip(router_module.route(router, x, None), router(x, None), strict=True):
            assert torch.equal(found, wanted)


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

    return classic([broken], {})


@pytest.mark.parametrize("runs, said", [("all", None), ("bf16", "MoE layers run in bf16"),
                                        ("deepspeed", "MoE layers run DeepSpeed's own path")])
def test_a_broken_kernel_on_one_rank_is_not_used_on_any(ranks2, runs, said):
    for rank, (layers, _, losses, text) in enumerate(ranks2.run(classic_with_a_broken_kernel, runs)):
        assert all(abs(loss) < 1e4 for loss in losses)
        assert (layers > 0) == (runs != "deepspeed")
        if rank == 0:
            assert text.count("a kernel is broken here: grouped_mm: wrong. Here: triton 3.99") == (said is not None)
            assert said is None or said in text
            assert ("recipe bf16 (no quantisation)" in text) == (runs == "bf16")
            assert ("0 of 2 MoE layers converted" in text) == (runs == "deepspeed")


def classic_without_the_check():
    asked = []
    with mock.patch.object(attach_module, "has_kernels", lambda device: True), \
            mock.patch.object(attach_module, "build_executor", lambda model: None), \
            mock.patch.object(attach_module, "check", lambda kind, device: asked.append(kind)):
        classic([], {"self_check": False})
    return asked


def test_the_key_leaves_the_check_out(ranks2):
    assert ranks2.run(classic_without_the_check) == [[], []]
