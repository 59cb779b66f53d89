# SPDX-License-Identifier: Apache-2.0
"""Adapters saved for each matrix of each expert have the products of PEFT's own."""

import json
import re

import peft
import pytest
import torch
from safetensors.torch import load_file

import ds_mxfp8_moe
from tests.support.adapted_models import adapted, build
from tests.support.autoep_models import model, train_engine
from tests.support.slow import slow_except

SECTION = {"enabled": True}


def saved(directory, family, stage, ep_size):
    engine = build(adapted(family), SECTION, stage, ep_size)
    train_engine(engine, [0])
    for adapters in ("peft", "per_expert"):
        ds_mxfp8_moe.save_pretrained(engine, directory / adapters, adapters=adapters)


MLP = {"qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
       "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}


@pytest.mark.parametrize("family, stage, ep_size", slow_except([("qwen3_moe", 2, 2), ("mixtral", 3, 2)],
                                                               ("qwen3_moe", 2, 2)))
def test_products_are_those_of_pefts_files(ranks2, tmp_path, family, stage, ep_size):
    ranks2.run(saved, tmp_path, family, stage, ep_size)
    found = load_file(tmp_path / "per_expert" / "adapter_model.safetensors")
    plain = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    net = peft.PeftModel.from_pretrained(model(family), tmp_path / "peft")
    block, (gate, up, down) = MLP[family]
    for i in range(2):
        wrapper = net.base_model.model.model.layers[i].mlp.experts
        stacks = {one.parameter_name: one.get_delta_weight("default") / one.scaling["default"]
                  for one in (wrapper, wrapper.base_layer)}
        both = stacks["gate_up_proj"].chunk(2, dim=1)
        for name, stack in ((gate, both[0]), (up, both[1]), (down, stacks["down_proj"])):
            for e, expected in enumerate(stack):
                key = f"base_model.model.model.layers.{i}.{block}.experts.{e}.{name}.lora_"
                a, b = found.pop(f"{key}A.weight"), found.pop(f"{key}B.weight")
                torch.testing.assert_close(b @ a, expected)
    rest = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    assert len(rest) == 4 and found.keys() == rest.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in rest.items())
    config, before = (json.loads((tmp_path / name / "adapter_config.json").read_text())
                      for name in ("per_expert", "peft"))
    assert {*config.pop("target_modules")} == {"q_proj", *MLP[family][1]} and config.pop("target_parameters") is None
    del before["target_modules"], before["target_parameters"]
    assert config == before


def other_alpha():
    return peft.get_peft_model(model(), peft.LoraConfig(
        r=4, target_modules=[], target_parameters=["experts.gate_up_proj"], alpha_pattern={"gate_up_proj": 32}))


def refused(directory):
    for net, section, text in (
            (model(), SECTION, "needs a model with adapters of experts"),
            (adapted("gpt_oss"), SECTION, "of gpt_oss hold the experts of a layer in one tensor"),
            (other_alpha(), SECTION, "alpha_pattern gives gate_up_proj a rank or alpha of its own"),
            (adapted(), {**SECTION, "merge_aware": True}, "trained by .merge_aware., and are right only where they")):
        engine = build(net, section, 1, 2)
        with pytest.raises(ValueError, match=re.compile(text)):
            ds_mxfp8_moe.save_pretrained(engine, directory, adapters="per_expert")
    for wrong in ({"adapters": "vllm"}, {"adapters": "per_expert", "weights": "fp8"}):
        with pytest.raises(ValueError, match='supported are "peft", and "per_expert" with weights="model"'):
            ds_mxfp8_moe.save_pretrained(engine, directory, **wrong)


def test_what_is_refused(ranks2, tmp_path):
    ranks2.run(refused, tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())
