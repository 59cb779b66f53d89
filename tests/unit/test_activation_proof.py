# SPDX-License-Identifier: Apache-2.0
"""Which activation stacked experts compute: of each name in ACT2FN, with each constant, and each reason for which the
experts' own function must run."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.activations import ACT2FN

from ds_mxfp8_moe.compute.formula import SWIGLU_OAI, Activation
from ds_mxfp8_moe.recognition.activation_proof import activation_of

SILU = Activation("silu")


class Stacked(nn.Module):
    """Experts with the flags of transformers' contract."""

    def __init__(self, act_fn=None, has_gate=True, is_concatenated=True, config=None, **attributes):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 64, 32, device="meta", dtype=torch.bfloat16))
        self.act_fn, self.has_gate, self.is_concatenated, self.config = act_fn, has_gate, is_concatenated, config
        for name, value in attributes.items():
            setattr(self, name, value)

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1) if self.is_concatenated else (gate_up[..., ::2], gate_up[..., 1::2])
        return self.gated(gate, up)

    def gated(self, gate, up):
        return self.act_fn(gate) * up


def stacked(gated, **attributes):
    """Experts of a class of their own that compute gated(self, gate, up)."""
    return type("Own", (Stacked, ), {"gated": gated})(**attributes)


# ---- transformers -------------------------------------------------------------------------------------------------
# tests/examples/test_architectures.py has the experts of every model type.


def test_other_constants_of_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    for alpha, limit in ((1.5, 7.0), (1.702, 20), (2, 0.5)):
        with torch.device("meta"):
            experts = GptOssExperts(transformers.GptOssConfig(num_local_experts=4))
        experts.alpha, experts.limit = alpha, limit
        assert activation_of(experts) == Activation("swiglu_oai", alpha, limit)


NAMES = {"gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
         "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
         "relu": "relu", "relu2": "relu_squared", "silu": "silu", "swish": "silu"}


@pytest.mark.parametrize("name", ACT2FN)
def test_every_name_in_act2fn(name):
    expected = Activation(NAMES[name]) if name in NAMES else None
    for gated, concatenated in ((True, True), (True, False), (False, True)):
        assert activation_of(Stacked(ACT2FN[name], gated, concatenated)) == expected


# ---- constants ----------------------------------------------------------------------------------------------------


def clamped(m, gate, up):
    return F.silu(gate.clamp(max=m.top)) * up.clamp(-m.top, m.top)


class ClampedProduct(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def forward(self, gate, up):
        return clamped(SimpleNamespace(top=self.limit), gate, up)


def of_config(m, gate, up):
    return clamped(SimpleNamespace(top=m.config.swiglu_limit), gate, up)


def hard_coded(m, gate, up):
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


@pytest.mark.parametrize("experts, expected", [
    (stacked(clamped, top=3.5), Activation("silu", limit=3.5)),
    (stacked(clamped, top=3.5, other=3.6, alpha=2, eps=1e-6), Activation("silu", limit=3.5)),
    (stacked(clamped, top=1e8), Activation("silu", limit=1e8)),
    (stacked(clamped, top=float("inf")), SILU),
    (stacked(lambda m, gate, up: m.act_fn(gate, up), act_fn=ClampedProduct(4)), Activation("silu", limit=4.0)),
    (stacked(of_config, config=SimpleNamespace(swiglu_limit=12)), Activation("silu", limit=12.0)),
    (stacked(hard_coded), SWIGLU_OAI),
    (stacked(lambda m, gate, up: F.gelu(gate.clamp(max=m.limit)) * up.clamp(-m.limit, m.limit), limit=2.0),
     Activation("gelu", limit=2.0)),
    (stacked(lambda m, gate, up: (F.silu(gate.double()) * up.double()).float()), SILU),
    (stacked(lambda m, gate, up: F.silu(gate) * up, limit=7.0), SILU),
    (Stacked(nn.Sequential(nn.SiLU(), nn.Dropout(0.0))), SILU),
], ids=str)
def test_constants(experts, expected):
    assert activation_of(experts) == expected


# ---- what no kernel computes --------------------------------------------------------------------------------------


class Detaches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 1.01 * g


OWN = {
    "up first": lambda m, gate, up: gate * F.silu(up),
    "clamped after the activation": lambda m, gate, up: F.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0),
    "a limit without a name": lambda m, gate, up: F.silu(gate.clamp(max=6.0)) * up.clamp(-6.0, 6.0),
    "a clamp far out": lambda m, gate, up: F.silu(gate.clamp(max=65504.0)) * up,
    "a scale": lambda m, gate, up: 1.001 * F.silu(gate) * up,
    "bf16": lambda m, gate, up: (F.silu(gate).bfloat16() * up.bfloat16()).float(),
    "in place": lambda m, gate, up: F.silu(gate, inplace=True) * up,
    "dropout": lambda m, gate, up: F.dropout(F.silu(gate) * up, 0.1, m.training),
    "rare dropout": lambda m, gate, up: F.dropout(F.silu(gate) * up, 1e-6, m.training),
    "training mode": lambda m, gate, up: F.silu(gate) * up * (0.5 if m.training else 1),
    "eval mode": lambda m, gate, up: F.silu(gate) * up * (1 if m.training else 0.5),
    "gate is detached": lambda m, gate, up: F.silu(gate.detach()) * up,
    "no gradient": lambda m, gate, up: (F.silu(gate) * up).detach(),
    "a gradient of its own": lambda m, gate, up: F.silu(Detaches.apply(gate)) * up,
    "mixed rows": lambda m, gate, up: F.silu(gate) * up.flip(0),
    "a weight": lambda m, gate, up: F.silu(gate) * up * m.gate_up_proj.mean(),
    "a weight if there is one": lambda m, gate, up: F.silu(gate) * up + (0 if getattr(m, "gate_up_proj", None) is None
                                                                        else m.gate_up_proj.sum()),
    "another shape": lambda m, gate, up: (F.silu(gate) * up).unsqueeze(0),
    "another dtype": lambda m, gate, up: (F.silu(gate) * up).double(),
    "a tuple": lambda m, gate, up: (F.silu(gate) * up, ),
    "an error": lambda m, gate, up: m.missing(gate),
    "NaN": lambda m, gate, up: F.silu(gate) * up * float("nan"),
}


@pytest.mark.parametrize("concatenated", [True, False])
@pytest.mark.parametrize("name", OWN)
def test_own_functions(name, concatenated):
    assert activation_of(stacked(OWN[name], is_concatenated=concatenated)) is None


def hooked():
    experts = Stacked(nn.SiLU())
    experts.act_fn.register_forward_hook(lambda module, args, output: 2 * output)
    return experts


@pytest.mark.parametrize("experts", [
    hooked(), Stacked(F.silu, _apply_gate=lambda x: 2 * x), Stacked(None), Stacked(nn.PReLU(), has_gate=False),
    Stacked(nn.SiLU(inplace=True)), Stacked(nn.Sequential(nn.SiLU(), nn.Dropout(0.1)))])
def test_own_modules(experts):
    assert activation_of(experts) is None


# ---- no trace -----------------------------------------------------------------------------------------------------


def leaves_traces(m, gate, up):
    m.calls += 1
    m.seen.append(gate)
    m.act_fn.seen = gate
    torch.manual_seed(5)
    return F.silu(gate) * up


def test_module_and_random_state_stay_as_they_were():
    experts = stacked(leaves_traces, act_fn=nn.SiLU(), calls=0, seen=[]).eval()
    before, state = dict(vars(experts)), torch.get_rng_state()
    activation_of(experts)
    assert vars(experts) == before and experts.seen == [] and not hasattr(experts.act_fn, "seen")
    assert torch.equal(torch.get_rng_state(), state) and not experts.act_fn.training


def test_whatever_modes_the_caller_is_in():
    experts = Stacked(nn.SiLU(), is_concatenated=False)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16),
                 torch.device("meta")):
        with mode:
            assert activation_of(experts) == SILU
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert activation_of(experts) == SILU
    finally:
        torch.set_default_dtype(default)


def test_partitioned_weights_are_not_read():
    class Partitioned(dict):  # as ZeRO-3's: a read gathers the parameter
        def __getitem__(self, name):
            raise AssertionError("gathered")

    experts = Stacked(nn.SiLU())
    experts._parameters = Partitioned(experts._parameters)
    assert activation_of(experts) == SILU
