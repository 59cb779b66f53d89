# SPDX-License-Identifier: Apache-2.0
"""What experts compute: proven at any size, each reason to refuse, and that the proof leaves no trace."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_mxfp8_moe.compute.formula import NotRecognized
from ds_mxfp8_moe.recognition import proof
from ds_mxfp8_moe.recognition.recognize import recognize
from tests.support.expert_modules import Gated, H, Mlp, local_experts, mlp, refused

# ---- big experts --------------------------------------------------------------------------------------------------


class FixedView(Gated):
    def forward(self, x):
        return super().forward(x.reshape(-1, self.hidden_size)).view(x.shape)


class SizeInTheCode(Gated):
    def forward(self, x):
        return super().forward(x.reshape(-1, 512)).view(x.shape)


@pytest.mark.parametrize("cls, runs", [(Gated, [96]), (FixedView, [96]), (SizeInTheCode, [96, 512])])
@pytest.mark.parametrize("ffn", [256, 512, 1024])
def test_big_experts(cls, runs, ffn, monkeypatch):
    """They run at small sizes, or at their own if the code raises an error there; never with their own weights."""
    seen, run = [], proof._run
    monkeypatch.setattr(proof, "_run", lambda fn, x: (seen.append(x.shape[-1]), run(fn, x))[1])
    with torch.device("meta"):
        experts = local_experts(cls(512, ffn).bfloat16())
    formula = recognize(experts, 512)
    assert (formula.kind, formula.ffn_size, formula.gate, formula.up) == ("gated", ffn, "c.weight", "b.weight")
    assert list(dict.fromkeys(seen)) == runs


def test_real_sizes_cost_neither_time_nor_memory():
    with torch.device("meta"):
        experts = local_experts(Gated(7168, 2048).bfloat16(), 16)
    recognize(experts, 7168)  # imports
    start = time.process_time()
    assert recognize(experts, 7168).ffn_size == 2048
    assert time.process_time() - start < 1  # 0.01 s where nothing else runs; drawing the weights alone takes longer


# ---- refused ------------------------------------------------------------------------------------------------------


def count_calls(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    return m.down(F.relu(m.up(x)))


def fail(m, x):
    raise KeyError("no such thing")


@pytest.mark.parametrize("reason, compute", [
    ("differs from the nearest", lambda m, x: m.down(torch.tanh(m.up(x)))),
    ("differs from the nearest", lambda m, x: x + m.down(F.relu(m.up(x)))),
    ("differs from the nearest", lambda m, x: 1.001 * m.down(F.relu(m.up(x)))),
    ("differs from the nearest", lambda m, x: F.linear(F.relu(m.up(x)), m.down.weight)),
    ("differs from the nearest", lambda m, x: m.down(F.softmax(m.up(x), dim=-2))),
    ("differs from the nearest", lambda m, x: m.down(F.dropout(F.relu(m.up(x)), 0.1, True))),
    ("in training mode the output differs", lambda m, x: m.down(F.dropout(F.relu(m.up(x)), 0.1, m.training))),
    ("carries no gradient", lambda m, x: m.down(F.relu(m.up(x))).detach()),
    ("gradient of its input differs", lambda m, x: m.down(F.relu(m.up(x).detach()))),
    ("gradient of up.weight differs", lambda m, x: m.down(F.relu(F.linear(x, m.up.weight.detach(), m.up.bias)))),
    ("KeyError: 'no such thing'", fail),
    ("returns a dict", lambda m, x: {"y": m.down(F.relu(m.up(x)))}),
    ("torch.float64", lambda m, x: m.down(F.relu(m.up(x))).double()),
])
def test_computations_refused(reason, compute):
    assert reason in refused(Mlp(compute))


def test_zero_weights_prove_nothing():
    template = Mlp(lambda m, x: x + m.down(torch.tanh(m.up(x))))
    nn.init.zeros_(template.down.weight)
    assert "differs from the nearest" in refused(template)


# ---- no trace -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", [lambda m, x: (torch.manual_seed(5), count_calls(m, x))[1], fail])
def test_modules_and_random_states_stay_as_they_were(compute):
    experts = local_experts(Mlp(compute))
    experts[0].down.eval()
    for p in experts.parameters():
        p.grad = torch.ones_like(p)
    params = dict(experts.named_parameters())
    values = {name: (p.clone(), p._version, p.data_ptr()) for name, p in params.items()}
    attributes = [{k: v for k, v in vars(m).items()} for m in experts.modules()]
    state = torch.get_rng_state()
    try:
        recognize(experts, H)
    except NotRecognized:
        pass
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(experts.named_parameters()).keys() == params.keys()
    for name, p in experts.named_parameters():
        value, version, pointer = values[name]
        assert p is params[name] and torch.equal(p, value) and (p._version, p.data_ptr()) == (version, pointer)
        assert torch.equal(p.grad, torch.ones_like(p))
    assert [{k: v for k, v in vars(m).items()} for m in experts.modules()] == attributes
    assert torch.backends.mkldnn.enabled == torch.backends.mkldnn.is_available()


def test_whatever_modes_the_caller_is_in():
    experts = local_experts(mlp().bfloat16())
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16),
                 torch.device("meta")):
        with mode:
            assert recognize(experts, H).kind == "mlp"
    torch.set_float32_matmul_precision("medium")
    try:
        assert recognize(experts, H).kind == "mlp"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
