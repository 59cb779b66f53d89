# SPDX-License-Identifier: Apache-2.0
"""Which layers convert, what is said of the others, and that conversion changes nothing but classes."""

import peft
import pytest
import torch
from deepspeed.moe.layer import MoE as PlainMoE
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from torch import nn

from ds_mxfp8_moe import ConfigError, MXFP8MoEConfig, convert
from ds_mxfp8_moe.compute import crossover
from ds_mxfp8_moe.engine.attach import build_executor
from ds_mxfp8_moe.engine.convert import alike
from ds_mxfp8_moe.layers.experts import converted_layers
from ds_mxfp8_moe.ops.op_builder import replay
from tests.support.models import HIDDEN
from tests.support.small_model import Block, Model

pytestmark = pytest.mark.usefixtures("one_rank")


def reason(model, **section):
    report = convert(model, section)
    assert report.converted == 0
    return report.layers[0].detail


def test_an_executor_that_cannot_be_built_is_announced(capsys, monkeypatch):
    model = Model()
    built = []
    monkeypatch.setattr(replay, "try_load", lambda: built.append(1) or (None, "there is no nvcc"))
    build_executor(model)
    convert(model, {})
    build_executor(model)  # a CPU has no use for it
    assert not built
    monkeypatch.setitem(build_executor.__globals__, "has_kernels", lambda device: True)
    build_executor(model)
    told = capsys.readouterr().out
    assert built and "WARNING" in told and "which is slower: there is no nvcc" in told


def test_says_what_finds_no_layer(capsys, tmp_path):
    assert convert(nn.Linear(2, 2)).layers == () and "no MoE layers found" in capsys.readouterr().out
    report = convert(Model(), {"exclude": ["model.layers.0", "blocks.1.moe"]})
    assert report.converted == 1 and report.idle_patterns == ("model.layers.0", )
    model = Model()
    model.module = nn.Linear(2, 2)  # an attribute that engines have, too
    assert convert(model).converted == 2
    assert "'model.layers.0' in 'include' or 'exclude' matches no MoE layer" in capsys.readouterr().out
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1}')
    with pytest.raises(ConfigError, match='has no section "mxfp8_moe"'):
        convert(Model(), str(path))


@pytest.mark.parametrize("section, line", [
    ({"exclude": [".*"]}, "mxfp8_moe: WARNING: 0 of 2 MoE layers converted; 'include' and 'exclude' leave no layer"),
    ({"enabled": False}, "mxfp8_moe: 0 of 2 MoE layers converted")])
def test_a_section_that_leaves_no_layer_is_a_warning(capsys, section, line):
    convert(Model(), section)
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_says_below_how_many_tokens_a_layer_runs_bf16(monkeypatch):
    assert "bf16 below" not in convert(Model()).layers[0].detail  # CPUs have no threshold
    model, given = Model(), {"min_tokens_per_expert": 7}
    assert ", bf16 below 7 tokens per expert," in convert(model, given).layers[0].detail
    convert(model, given | {"recipe": "bf16"})  # which has nothing to leave out
    assert [layer.mxfp8_settings.min_tokens_per_expert for layer in converted_layers(model)] == [0, 0]
    monkeypatch.setattr(crossover, "capability", lambda device: (9, 0))
    monkeypatch.setattr(crossover, "_memory_slowness", lambda device: 1)
    section = {"scale_block_size": 128}
    assert ", bf16 for batches of any size," in convert(Model(), section).layers[0].detail  # such narrow experts
    assert "bf16" not in convert(Model(), section | {"min_tokens_per_expert": 0}).layers[0].detail


def test_swaps_classes_and_keeps_every_object(capsys):
    model = Model()
    parameters = {name: p for name, p in model.named_parameters()}
    calls = []
    model.blocks[0].moe.register_forward_hook(lambda *_: calls.append("layer"))
    model.blocks[0].moe.deepspeed_moe.register_forward_hook(lambda *_: calls.append("inner"))
    model.blocks[0].moe.deepspeed_moe.gate.register_forward_hook(lambda *_: calls.append("gate"))
    model.blocks[0].moe.deepspeed_moe.gate.wg.weight.register_hook(lambda g: calls.append("gradient"))
    report = convert(model)
    assert report.converted == 2 and [layer.name for layer in report.layers] == ["blocks.0.moe", "blocks.1.moe"]
    printed = capsys.readouterr().out
    assert ("mxfp8_moe: blocks.0-1.moe (classic) converted: 4 experts on every rank, recipe mxfp8_wgrad_with_hp, "
            "blocks of 32") in printed
    assert "mxfp8_moe: 2 of 2 MoE layers converted" in printed
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert all(isinstance(m.moe, PlainMoE) and isinstance(m.moe.deepspeed_moe, MOELayer) for m in model.blocks)
    model(torch.randn(2, 8, HIDDEN)).sum().backward()
    assert calls == ["gate", "inner", "layer", "gradient"]


def test_layers_that_share_a_sentence_share_a_line():
    names = [f"model.layers.{i}.mlp" for i in range(48)]
    shared = {name: f"{name}.experts.down_proj is shared with another module" for name in names}
    assert alike(shared) == [("model.layers.0-47.mlp", shared[names[0]])]
    sizes = {name: "a" if i in (0, 1, 2, 5) else "b" for i, name in enumerate(names)}
    assert alike(sizes) == [("model.layers.0-2,5.mlp", "a"), ("model.layers.3-4,6-47.mlp", "b")]
    assert alike(dict.fromkeys(["encoder.0.moe.1", "encoder.1.moe.1", "decoder4.0", "moe2", "7"], "a")) == [
        ("encoder.0-1.moe.1, decoder4.0, moe2, 7", "a")]
    said = str(convert(Model(), {"exclude": ["blocks.1.moe"]})).splitlines()
    assert [line[11:30] for line in said] == ["blocks.0.moe (class", "blocks.1.moe (class", "1 of 2 MoE layers c"]


def test_include_and_exclude():
    model = Model()
    report = convert(model, {"include": [r"blocks\.\d+\.moe"], "exclude": [r".*\.1\..*"]})
    assert [layer.converted for layer in report.layers] == [True, False]
    assert "left out by 'include' and 'exclude'" in report.layers[1].detail
    assert type(model.blocks[1].moe) is PlainMoE
    report = convert(model, {"exclude": [r".*\.0\..*"]})  # settled anew: the first goes back
    assert [layer.converted for layer in report.layers] == [False, True]
    assert type(model.blocks[0].moe.deepspeed_moe) is MOELayer


@pytest.mark.parametrize("config", [{"mxfp8_moe": {"enabled": True, "recipe": "mxfp8"}}, {"recipe": "mxfp8"},
                                    MXFP8MoEConfig(recipe="mxfp8")], ids=type)
def test_takes_a_section_or_a_whole_config(config):
    assert "recipe mxfp8," in convert(Model(), config).layers[0].detail


@pytest.mark.parametrize("section", [{"receipt": "mxfp8"}, {1: "mxfp8"}, {"recipe": {"fwd": "mxfp8"}}], ids=str)
def test_wrong_section_is_an_error_that_changes_nothing(section):
    model = Model()
    with pytest.raises(ConfigError, match='"recipe"|unknown key "1"'):
        convert(model, section)
    assert type(model.blocks[0].moe) is PlainMoE


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_experts_made_float64_after_conversion_raise_and_converting_anew_leaves_them_plain(recipe):
    model = Model()
    convert(model, {"recipe": recipe})
    model.double()
    x = torch.randn(2, 8, HIDDEN, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"^blocks\.0\.moe: .* the experts are torch\.float64; .* must be bfloat16"):
        model(x)
    assert "torch.float64" in reason(model, recipe=recipe)
    assert model(x).dtype == torch.float64


class UsersMoE(PlainMoE):
    pass


class UsersGate(TopKGate):
    pass


def with_adapters(moe):
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=r".*deepspeed_experts\.\d\.[02]", r=4), moe)


@pytest.mark.parametrize("change, said", [
    (lambda moe: setattr(moe, "__class__", UsersMoE), "its MoE is a UsersMoE"),
    (lambda moe: setattr(moe.deepspeed_moe.gate, "__class__", UsersGate), "its TopKGate is a UsersGate"),
    (lambda moe: moe.deepspeed_moe.experts.register_forward_hook(lambda *_: None),
     "Experts has a forward hook, which this path would ignore"),
    (lambda moe: setattr(moe.deepspeed_moe, "forward", print), "replaced on the instance"),
    (with_adapters, "0.lora_A.default.weight")])
def test_layers_that_this_path_would_change_fall_back(change, said):
    model = Model(Block())
    change(model.blocks[0].moe)
    kinds = [type(module) for module in model.modules()]
    assert said in reason(model)
    assert [type(module) for module in model.modules()] == kinds


def test_tied_weights_fall_back():
    model = Model()
    first, second = (b.moe.deepspeed_moe.experts.deepspeed_experts[0] for b in model.blocks)
    second[0].weight = first[0].weight
    report = convert(model)
    assert report.converted == 0 and all("is shared with" in layer.detail for layer in report.layers)
