# SPDX-License-Identifier: Apache-2.0
"""What is done to experts after conversion raises where it would be ignored, and nothing else does."""

import copy
import pickle

import peft
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import nn

from ds_mxfp8_moe import convert

HIDDEN = 64
pytestmark = pytest.mark.usefixtures("one_rank")


class Expert(nn.Module):

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 96, bias=False), nn.Linear(96, HIDDEN)
        self.act, self.scale, self.ones = nn.GELU(), 1.0, torch.ones(2)

    def forward(self, x):
        return self.down(self.act(self.up(x))) * self.scale


class Doubled(nn.Linear):

    def forward(self, x):
        return 2 * super().forward(x)


class Model(nn.Module):

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, Expert(), num_experts=4, k=2)

    def forward(self, x):
        return self.moe(self.first(x))[0]

    @property
    def container(self):
        return self.moe.deepspeed_moe.experts

    @property
    def experts(self):
        return self.container.deepspeed_experts


def converted() -> Model:
    model = Model()
    assert convert(model).converted == 1
    return model


def step(model):
    y = model(torch.randn(2, 8, HIDDEN))
    y.sum().backward()
    return y


def nothing(*args):
    return None


CHANGES = {
    "forward hook": (lambda m: m.experts[2].register_forward_hook(nothing),
                     r"experts\.deepspeed_experts\.2 \(Expert\) was given a forward hook"),
    "forward pre-hook": (lambda m: m.experts[3].act.register_forward_pre_hook(nothing), r"3\.act .*forward pre hook"),
    "backward hook": (lambda m: m.experts[0].up.register_full_backward_hook(nothing), r"0\.up .*a backward hook"),
    "backward pre-hook": (lambda m: m.experts[0].register_full_backward_pre_hook(nothing), "backward pre hook"),
    "hook on all experts": (lambda m: m.container.register_forward_hook(nothing), r"experts \(Experts\) was given"),
    "activation module": (lambda m: setattr(m.experts[1], "act", nn.ReLU()),
                          r"act of experts\.deepspeed_experts\.1 \(Expert\) was changed"),
    "attribute": (lambda m: setattr(m.experts[1], "scale", 2.0), "scale of .* was changed"),
    "attribute of a submodule": (lambda m: setattr(m.experts[1].act, "approximate", "tanh"),
                                 r"approximate of .*1\.act"),
    "tensor": (lambda m: setattr(m.experts[1], "ones", torch.ones(2)), "ones of .* was changed"),
    "attribute gone": (lambda m: delattr(m.experts[1], "scale"), "scale of .* was changed"),
    "forward": (lambda m: setattr(m.experts[1], "forward", nothing), "the forward method of .*1 .* was replaced"),
    "bias": (lambda m: setattr(m.experts[1].up, "bias", nn.Parameter(torch.ones(96))), r"bias of .*1\.up"),
    "expert": (lambda m: m.experts.__setitem__(1, Expert()), r"1 of experts\.deepspeed_experts \(ModuleList\)"),
    "all experts": (lambda m: setattr(m.moe.deepspeed_moe, "experts", copy.deepcopy(m.container)),
                    "its experts were replaced"),
    "another module": (lambda m: m.experts[1].add_module("more", nn.ReLU()),
                       r"experts\.deepspeed_experts\.1 \(Expert\) was given a module, more,"),
    "class": (lambda m: setattr(m.experts[1].up, "__class__", Doubled),
              r"class of .*1\.up was changed from Linear to Doubled"),
    "adapter": (lambda m: peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["up"]), m),
                "up of .* was changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_raises_and_converting_anew_takes_it(change):
    model = converted()
    step(model)
    do, message = CHANGES[change]
    do(model)
    with pytest.raises(RuntimeError, match=rf"^moe: .*{message}.* after conversion.*'exclude'"):
        model(torch.randn(2, 8, HIDDEN))
    convert(model)
    if change not in ("forward", "attribute gone"):  # experts that run: on DeepSpeed's path, or by another formula
        model(torch.randn(2, 8, HIDDEN))


def test_another_forward_of_an_expert_s_class_raises(monkeypatch):
    model = converted()
    with torch.no_grad():
        model(torch.randn(2, 8, HIDDEN))
    twin = copy.deepcopy(model)
    step(model), step(twin)
    monkeypatch.setattr(Expert, "forward", lambda self, x: x)
    for one in (model, twin):
        with pytest.raises(RuntimeError, match="^moe: the forward method of Expert was replaced after conversion"):
            one(torch.randn(2, 8, HIDDEN))
    monkeypatch.undo()
    model.zero_grad(), step(model)


def test_a_change_that_is_taken_back_is_none():
    model = converted()
    hook = model.experts[0].register_forward_hook(nothing)
    hook.remove()
    model.experts[0].scale = 2.0
    model.experts[0].scale = 1.0
    step(model)


def test_weights_devices_modes_and_other_modules_may_change():
    model = converted()
    model.first.register_forward_hook(nothing)
    model.moe.deepspeed_moe.register_forward_hook(nothing)
    model.eval().requires_grad_(False)
    model.train().requires_grad_(True)
    model.experts[0].up.weight = nn.Parameter(torch.zeros(96, HIDDEN))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model.bfloat16().float()
    model.experts[0].added = 1
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["first"]), model)
    step(model)


def test_deepspeeds_own_hooks_are_none_of_it():
    model = converted()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    assert model.experts[0]._forward_hooks
    step(model)
    profiler.end_profile()
    step(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
                         ids=["deepcopy", "pickle"])
def test_a_copy_is_watched_apart(copied):
    model = converted()
    with torch.no_grad():  # an auxiliary loss with a graph cannot be copied
        model(torch.randn(2, 8, HIDDEN))
    twin = copied(model)
    step(twin)
    twin.experts[0].register_forward_hook(nothing)
    step(model)
    with pytest.raises(RuntimeError, match="forward hook"):
        twin(torch.randn(2, 8, HIDDEN))


def test_a_compiled_model_is_watched_too():
    model = converted()
    compiled = torch.compile(model, backend="eager")
    step(compiled)
    model.experts[0].register_forward_hook(nothing)
    with pytest.raises(RuntimeError, match="forward hook"):
        compiled(torch.randn(2, 8, HIDDEN))
