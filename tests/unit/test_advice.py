# SPDX-License-Identifier: Apache-2.0
"""Configs that run, but probably not as their author meant, are answered by one line that says what to do."""

from types import SimpleNamespace

import pytest
import torch

from ds_mxfp8_moe import MXFP8MoEConfig
from ds_mxfp8_moe.engine.advice import about_expert_parallel, about_keys


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
