# SPDX-License-Identifier: Apache-2.0
"""Configs that run, but probably not as their author meant, are answered by one line that says what to do."""

import functools
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from ds_mxfp8_moe import MXFP8MoEConfig
from ds_mxfp8_moe.engine.advice import about_expert_parallel, about_keys, about_speed
from tests.support.autoep_models import model


@pytest.mark.parametrize("config, ranks, start, end", [
    ({"expert_parallel": {"enabled": True}}, 4, '"expert_parallel" has no "autoep_size"', '"autoep_size": 4'),
    ({"expert_parallel": {"enabled": True, "autoep_size": 2, "preset": "mixtral"}}, 2,
     '"expert_parallel" has "preset", which DeepSpeed ignores', 'did you mean "preset_model"?'),
    ({"expert_parallel": {"enabled": True, "autoep_size": 2, "zzz": 1}}, 2, '"expert_parallel" has "zzz"',
     "expert_activation"),
    ({"expert_paralel": {"enabled": True}}, 2, 'the config has "expert_paralel", which DeepSpeed ignores',
     'did you mean "expert_parallel"?')])
def test_what_deepspeed_ignores_in_silence(config, ranks, start, end):
    [line] = about_expert_parallel(config, ranks)
    assert line.startswith(start) and line.endswith(end)


def test_a_misspelt_size_is_also_a_missing_one():
    misspelt, missing = about_expert_parallel({"expert_parallel": {"enabled": True, "autoep_sise": 2}}, 2)
    assert 'has "autoep_sise"' in misspelt and 'did you mean "autoep_size"?' in misspelt
    assert 'has no "autoep_size"' in missing


@pytest.mark.parametrize("config, ranks", [
    ({}, 2), ({"expert_parallel": {"enabled": False}}, 2), ({"expert_parallel": {"enabled": True}}, 1),
    ({"expert_parallel": {"enabled": True, "autoep_size": 1, "load_balance_coeff": None, "expert_w3": None}}, 2),
    ({"use_data_before_expert_parallelism": True, "tensor_parallel": {}}, 2)])
def test_configs_with_nothing_to_say(config, ranks):
    assert about_expert_parallel(config, ranks) == []


@pytest.mark.parametrize("section, sizes, line", [
    ({"transport": "nvlink"}, [1, 1],
     '"transport" has no effect: every rank holds all experts of its layers, so no tokens travel'),
    ({"recipe": "bf16", "scaling_mode": "floor"}, [2], '"scaling_mode" has no effect: the recipe "bf16" quantizes '
                                                       "nothing"),
    ({"transport": "nvlink"}, [1, 2], None), ({"transport": "collective"}, [1], None), ({"recipe": "bf16"}, [1], None),
    ({"frozen_experts": "mxfp8"}, [2], '"frozen_experts": "mxfp8" has no effect: no layer has spread experts that are '
                                       "all frozen. Classic layers keep theirs in the model's dtype, and so does "
                                       "ZeRO-3 in an engine that exists")])
def test_keys_without_effect(section, sizes, line):
    layers = [SimpleNamespace(ep_size=size, experts=torch.nn.Module()) for size in sizes]
    assert about_keys(MXFP8MoEConfig(**section), layers) == ([line] if line else [])


FUSED = {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}


@pytest.mark.parametrize("config, section, line", [
    ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {}, "AdamW is not fused: .*"),
    ({"gradient_accumulation_steps": 4}, {"keep_quantized_weights": False},
     '"keep_quantized_weights": false quantizes weights in each of the 4 micro-batches.*'),
    ({"wall_clock_breakdown": True}, {}, '"wall_clock_breakdown" makes the host wait.*'),
    ({"optimizer": FUSED, "gradient_accumulation_steps": 4, "wall_clock_breakdown": False}, {}, None),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, {"keep_quantized_weights": True}, None),
    ({"gradient_accumulation_steps": 4}, {"keep_quantized_weights": False, "recipe": "bf16"}, None),
    ({"gradient_accumulation_steps": "auto"}, {"keep_quantized_weights": False}, None)])
def test_what_a_config_lacks_that_would_be_faster(config, section, line):
    lines = about_speed(config, MXFP8MoEConfig(**section))
    assert len(lines) == (line is not None) and all(re.fullmatch(line, one) for one in lines)


@pytest.mark.parametrize("optimizer, said", [
    (torch.optim.AdamW, True), (torch.optim.Adam, True), (torch.optim.SGD, False),
    (functools.partial(torch.optim.AdamW, fused=True), False)])
def test_an_optimizer_that_is_not_fused(optimizer, said):
    made = optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert len(about_speed({"optimizer": FUSED}, MXFP8MoEConfig(), optimizer=made)) == said


@pytest.fixture
def liger(tmp_path, monkeypatch):
    """A package of this name with kernels for qwen3_moe."""
    package = tmp_path / "liger_kernel/transformers"
    package.mkdir(parents=True)
    (tmp_path / "liger_kernel/__init__.py").touch()
    (package / "__init__.py").write_text("def apply_liger_kernel_to_qwen3_moe(): ...\n"
                                         "def forward(self, *args, **kwargs): ...\n"
                                         "def lce_forward(self, *args, **kwargs): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: __import__("liger_kernel.transformers").transformers
    for name in ("liger_kernel.transformers", "liger_kernel"):
        sys.modules.pop(name, None)


EAGER = 'attention is "eager": load the model with attn_implementation='
CACHE = "model.config.use_cache is on"


@pytest.mark.parametrize("family, attention, lines", [
    ("qwen3_moe", "eager", [f'{EAGER}"sdpa"', CACHE, "Liger-Kernel is"]),
    ("qwen3_moe", "sdpa", [CACHE, "Liger-Kernel is"]), ("mixtral", "sdpa", [CACHE]),
    ("gpt_oss", None, [f'{EAGER}"flex_attention"', CACHE])])
def test_what_a_model_lacks_that_would_be_faster(liger, family, attention, lines):
    net = model(family)
    if attention:
        net.set_attn_implementation(attention)
    found = about_speed({}, MXFP8MoEConfig(), net)
    assert len(found) == len(lines) and all(map(str.startswith, found, lines))
    norm = net.model.norm
    norm.forward = liger().forward.__get__(norm)
    assert "Liger" not in "".join(about_speed({}, MXFP8MoEConfig(), net))


def test_chunks_of_ligers_loss_are_small_where_there_are_many_words(liger):
    net = model("qwen3_moe", use_cache=False)
    net.model.norm.forward = liger().forward.__get__(net.model.norm)
    net.forward = liger().lce_forward.__get__(net)
    net.config.vocab_size = 16 * net.config.hidden_size - 1
    assert about_speed({}, MXFP8MoEConfig(), net) == []
    net.config.vocab_size += 1
    line, = about_speed({}, MXFP8MoEConfig(), net)
    assert line.startswith("Liger's loss takes few tokens at a time") and "chunk_mem_const=16" in line
    net.forward = functools.partial(net.forward, chunk_mem_const=16)
    assert about_speed({}, MXFP8MoEConfig(), net) == []


def test_without_liger_nothing_is_said_of_it():
    assert about_speed({}, MXFP8MoEConfig(), model(use_cache=False)) == []
