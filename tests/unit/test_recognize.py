# SPDX-License-Identifier: Apache-2.0
"""Experts by their structure: what is recognized, each reason to refuse, and what a converted layer notices."""

import copy

import peft
import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ds_mxfp8_moe import convert
from ds_mxfp8_moe.compute.formula import Activation, ExpertWeights
from ds_mxfp8_moe.recognition.recognize import recognize
from tests.support.expert_modules import FFN, Gated, H, Mlp, Packed, local_experts, mlp, refused


def nothing(*args):
    return None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name, act", [("relu", nn.ReLU()), ("relu", nn.ReLU(inplace=True)), ("gelu", nn.GELU()),
                                       ("gelu_tanh", nn.GELU(approximate="tanh")), ("silu", nn.SiLU())])
def test_mlp(name, act, bias):
    formula = recognize(local_experts(mlp(act, bias=bias)), H)
    assert (formula.kind, formula.activation, formula.ffn_size, formula.packed) == ("mlp", name, FFN, "none")
    assert (formula.gate, formula.up, formula.down) == (None, "0.weight", "2.weight")
    assert (formula.up_bias, formula.down_bias) == (("0.bias", "2.bias") if bias else (None, None))


@pytest.mark.parametrize("name, act", [
    ("relu_squared", lambda x: x.clamp(min=0)**2), ("silu", lambda x: x * torch.sigmoid(x)),
    ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi)**0.5 * (x + 0.044715 * x**3)))),
])
def test_activations_written_out_by_hand(name, act):
    compute = lambda m, x: (act(x @ m.up.weight.t() + m.up.bias) @ m.down.weight.t()).add_(m.down.bias)  # noqa: E731
    assert recognize(local_experts(Mlp(compute).bfloat16()), H).activation == name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name, act", [("relu", torch.relu), ("gelu", F.gelu), ("silu", nn.SiLU()),
                                       ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))])
def test_gated(name, act, bias):
    formula = recognize(local_experts(Gated(act=act, bias=bias)), H)
    assert (formula.kind, formula.activation, formula.hidden_size, formula.ffn_size) == ("gated", name, H, FFN)
    assert (formula.gate, formula.up, formula.down) == ("c.weight", "b.weight", "a.weight")
    assert (formula.gate_bias, formula.up_bias, formula.down_bias) == (("c.bias", "b.bias", "a.bias") if bias
                                                                       else (None, None, None))


class Oai(Gated):
    """gpt-oss: both sides clamped, and one added to up."""

    def __init__(self, alpha=1.702, limit=7.0, **kwargs):
        super().__init__(**kwargs)
        self.alpha, self.limit = alpha, limit

    def forward(self, x):
        gate, up = self.c(x).clamp(max=self.limit), self.b(x).clamp(-self.limit, self.limit)
        return self.a((up + 1) * gate * torch.sigmoid(self.alpha * gate))


@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_oai(bias):
    formula = recognize(local_experts(Oai(bias=bias)), H)
    assert (formula.kind, formula.activation, formula.gate, formula.up) == ("gated", "swiglu_oai", "c.weight",
                                                                            "b.weight")


@pytest.mark.parametrize("constants", [dict(alpha=1.75), dict(limit=10.0), dict(alpha=1.0, limit=2.5)])
def test_constants_are_attributes_of_the_expert(constants):
    assert recognize(local_experts(Oai(**constants)), H).act == Activation("swiglu_oai", **{
        "alpha": 1.702, "limit": 7.0, **constants})


@pytest.mark.parametrize("gate_first", [True, False])
def test_packed(gate_first):
    formula = recognize(local_experts(Packed(gate_first)), H)
    assert (formula.kind, formula.activation, formula.ffn_size) == ("gated", "silu", FFN)
    assert formula.packed == ("gate_up" if gate_first else "up_gate")
    assert formula.names() == {"up": "gate_up.weight", "down": "down.weight", "up_bias": "gate_up.bias",
                               "down_bias": "down.bias"}


def test_square_weights_need_the_proof_to_tell_roles_apart():
    formula = recognize(local_experts(Gated(ffn=H)), H)
    assert (formula.gate, formula.up, formula.down) == ("c.weight", "b.weight", "a.weight")
    backwards = Mlp(lambda m, x: m.up(F.relu(m.down(x))), ffn=H)
    assert recognize(local_experts(backwards), H).names()["up"] == "down.weight"


class TakesDeepSpeedsShape(Mlp):
    def forward(self, x):
        g, one, c, h = x.shape
        assert one == 1
        return self.compute(self, x.reshape(g * c, h)).view(g, 1, c, h)


def with_one_bias():
    template = Gated()
    template.b = nn.Linear(H, FFN, bias=True)
    return template


@pytest.mark.parametrize("template", [
    Gated(ffn=H // 2), Gated(ffn=2 * H), Gated().bfloat16(), Gated().half(), with_one_bias(),
    mlp().requires_grad_(False),
    nn.Sequential(nn.Linear(H, FFN), nn.GELU(), nn.Dropout(0.0), nn.Identity(), nn.Linear(FFN, H)),
    Mlp(lambda m, x: m.down(F.silu(m.up(x).float()).to(x.dtype))).bfloat16(),
    TakesDeepSpeedsShape(lambda m, x: m.down(F.relu(m.up(x)))),
    Mlp(lambda m, x: m.down(checkpoint(lambda x: F.relu(m.up(x)), x, use_reentrant=False))),
], ids=["F = H / 2", "F = 2 H", "bfloat16", "float16", "one bias", "frozen", "no-ops", "activation in float32",
        "DeepSpeed's shape", "checkpoint"])
def test_other_experts_that_are_recognized(template):
    formula = recognize(local_experts(template), H)
    assert set(formula.names().values()) == {name for name, _ in template.named_parameters()}


class Raw(nn.Module):
    """Weights in plain parameters."""

    def __init__(self, act=F.gelu):
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(2 * FFN, H))
        self.w2 = nn.Parameter(torch.randn(H, FFN))
        self.b2 = nn.Parameter(torch.randn(H))
        self.act = act

    def forward(self, x):
        gate, up = F.linear(x, self.w13).chunk(2, -1)
        return F.linear(self.act(gate) * up, self.w2, self.b2)


class SubclassedLinear(nn.Linear):
    pass


def test_weights_in_plain_parameters_and_in_classes_of_a_user():
    experts = local_experts(Raw())
    formula = recognize(experts, H)
    assert (formula.kind, formula.activation, formula.packed, formula.ffn_size) == ("gated", "gelu", "gate_up", FFN)
    assert (formula.up, formula.down, formula.up_bias, formula.down_bias) == ("w13", "w2", None, "b2")
    assert ExpertWeights(experts, formula).current()["up"][1] is experts[1].w13
    own = nn.Sequential(SubclassedLinear(H, FFN), nn.ReLU(), nn.Linear(FFN, H))
    assert recognize(local_experts(own), H).activation == "relu"


# ---- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [4, 84])
def test_hidden_size_no_multiple_of_32(hidden):
    assert refused(mlp(hidden=hidden), hidden_size=hidden) == f"hidden size {hidden} is no multiple of 32"


def test_rows_of_gate_and_up_that_take_turns():
    reason = refused(Packed(True, in_turn=True))
    assert "nearest recognized formula" in reason and "another order of rows" in reason


def test_no_experts():
    assert "no local experts" in refused(nn.ModuleList())


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norm = mlp(), nn.LayerNorm(H)

    def forward(self, x):
        return self.net(self.norm(x))


def with_unused_parameter():
    expert = mlp()
    expert[0].extra = nn.Parameter(torch.ones(3))
    return expert


@pytest.mark.parametrize("make, reason", [
    (lambda: nn.Identity(), "the parameters of Identity (none) fit no recognized formula"),
    (lambda: nn.Linear(H, H), f"the parameters of Linear (weight [{H}, {H}], bias [{H}]) fit no recognized formula"),
    (lambda: nn.Sequential(nn.Linear(H, FFN), nn.Linear(FFN, FFN), nn.Linear(FFN, H)), "fit no recognized formula"),
    (lambda: Normed(), f"norm.weight [{H}], norm.bias [{H}]) fit no recognized formula"),
    (lambda: nn.Sequential(nn.Linear(H, FFN), nn.PReLU(), nn.Linear(FFN, H)), "1.weight [1]"),
    (lambda: nn.Sequential(nn.Linear(H, FFN), nn.BatchNorm1d(FFN), nn.Linear(FFN, H)), "has a buffer"),
    (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(H, FFN)), nn.ReLU(), nn.Linear(FFN, H)),
     "fit no recognized formula"),
    (lambda: mlp().double(), "is torch.float64"),
    (lambda: nn.Sequential(nn.Linear(H, FFN).bfloat16(), nn.ReLU(), nn.Linear(FFN, H)), "different dtypes"),
    (with_unused_parameter, "0.extra [3]"),
])
def test_structures_refused(make, reason):
    assert reason in refused(nn.ModuleList([make()]))  # not all can be deep-copied


@pytest.mark.parametrize("found, change", [
    ("a forward hook", lambda m: m.register_forward_hook(nothing)),
    ("a forward pre hook", lambda m: m.register_forward_pre_hook(nothing)),
    ("a backward hook", lambda m: m.register_full_backward_hook(nothing)),
    ("a replaced forward method", lambda m: setattr(m, "forward", nothing))])
def test_hooks_and_a_replaced_forward(found, change):
    experts = local_experts(mlp(), 4)
    change(experts[3][1])
    assert refused(experts) == f"expert 3, module 1, has {found}"
    change(experts[2])
    assert refused(experts) == f"expert 2 has {found}"


def test_tied_weights():
    template = Gated()
    template.c = template.b
    assert refused(template) == "parameter c.weight of expert 0 is shared with b.weight of expert 0"
    experts = local_experts(mlp(), 3)
    experts[2][0].weight = experts[0][0].weight
    assert refused(experts) == "parameter 0.weight of expert 2 is shared with 0.weight of expert 0"
    assert "shared with" in refused(nn.ModuleList([mlp()] * 2))


@pytest.mark.parametrize("other, reason", [
    (Gated(), "expert 1 is a Gated, expert 0 a Sequential"),
    (mlp(nn.GELU()), "expert 1 differs from expert 0 in its modules"),
    (mlp(ffn=128), "expert 1 differs from expert 0 in its modules"),
    (mlp(bias=False), "expert 1 differs from expert 0 in its modules"),
    (mlp().bfloat16(), "expert 1 differs from expert 0 in its modules"),
])
def test_experts_unlike_each_other(other, reason):
    assert refused(nn.ModuleList([mlp(), other])).startswith(reason)


# ---- after conversion ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(H, H)
        self.moe = MoE(H, mlp(nn.GELU()), num_experts=4, k=2)

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
    model(torch.randn(2, 8, H)).sum().backward()


CHANGES = {
    "forward hook": (lambda m: m.experts[2].register_forward_hook(nothing),
                     r"experts\.deepspeed_experts\.2 \(Sequential\) was given a forward hook"),
    "backward hook": (lambda m: m.experts[0][0].register_full_backward_hook(nothing), r"0\.0 .*a backward hook"),
    "hook on all experts": (lambda m: m.container.register_forward_hook(nothing), r"experts \(Experts\) was given"),
    "forward": (lambda m: setattr(m.experts[1], "forward", nothing), r"\.1 .* was given a replaced forward method"),
    "activation": (lambda m: m.experts[1].__setitem__(1, nn.ReLU()), r"a module in experts\.deepspeed_experts\.1 "),
    "expert": (lambda m: m.experts.__setitem__(1, mlp()), r"a module in experts\.deepspeed_experts \(ModuleList\)"),
    "all experts": (lambda m: setattr(m.moe.deepspeed_moe, "experts", copy.deepcopy(m.container)),
                    "its experts were replaced"),
    "adapter": (lambda m: peft.inject_adapter_in_model(peft.LoraConfig(target_modules=r".*experts\.\d\.2"), m),
                r"a module in .*\.0 "),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_conversion_raises_and_converting_again_takes_it(change):
    model = converted()
    step(model)
    do, message = CHANGES[change]
    do(model)
    with pytest.raises(RuntimeError, match=rf"^moe: .*{message}.* after conversion.*'exclude'"):
        step(model)
    convert(model)
    if change != "forward":  # which does not compute
        step(model)


@pytest.mark.usefixtures("one_rank")
def test_changes_that_a_converted_layer_allows():
    model = converted()
    model.experts[0].register_forward_hook(nothing).remove()
    model.first.register_forward_hook(nothing)
    model.moe.deepspeed_moe.register_forward_hook(nothing)
    model.eval().requires_grad_(False)
    model.train().requires_grad_(True)
    model.experts[0][0].weight = nn.Parameter(torch.zeros(FFN, H))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model.bfloat16().float()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["first"]), model)
    step(model)


@pytest.mark.usefixtures("one_rank")
def test_deepspeed_s_own_hooks_are_allowed():
    model = converted()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    assert model.experts[0]._forward_hooks
    step(model)
    profiler.end_profile()
    step(model)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("of", [copy.deepcopy, lambda model: torch.compile(model, backend="eager")],
                         ids=["a copy", "compiled"])
def test_a_copy_and_a_compiled_model_notice_their_own_changes(of):
    model = converted()
    with torch.no_grad():  # an auxiliary loss with a graph cannot be copied
        model(torch.randn(2, 8, H))
    twin = of(model)
    step(twin)
    twin.experts[0].register_forward_hook(nothing)
    if of is copy.deepcopy:
        step(model)
    with pytest.raises(RuntimeError, match="forward hook"):
        step(twin)
