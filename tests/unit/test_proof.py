# SPDX-License-Identifier: Apache-2.0
"""What experts compute: proven at any size, each reason to refuse, and that looking leaves no trace."""

import copy
import random
import time
from collections import deque

import numpy
import pytest
import torch
import torch.nn.functional as F
from expert_modules import FFN, Gated, H, Mlp, local_experts, mlp, refused
from torch import nn

from ds_mxfp8_moe import proof
from ds_mxfp8_moe.experts import NotRecognised
from ds_mxfp8_moe.recognise import recognise

# ---- big experts --------------------------------------------------------------------------------------------------


class FixedView(Gated):
    def forward(self, x):
        return super().forward(x.reshape(-1, self.hidden_size)).view(x.shape)


class NeedsData(Gated):
    def forward(self, x):
        x.sum().item()  # not on the meta device
        return super().forward(x)


class OtherwiseWhenBig(Gated):
    def forward(self, x):
        y = super().forward(x)
        return y if x.shape[-1] < 512 else y * 1.01


class TruncatesWhenBig(Gated):
    def forward(self, x):
        return super().forward(torch.cat([x[..., :500], x[..., 500:] * 0], -1))


class GradientWhenBig(Gated):
    def forward(self, x):
        y = super().forward(x)
        return y if x.shape[-1] < 512 else y.detach() + 0 * y


@pytest.mark.parametrize("cls, small", [(Gated, True), (FixedView, True), (NeedsData, False)])
@pytest.mark.parametrize("ffn", [256, 512, 1024])
def test_big_experts(cls, small, ffn, monkeypatch):
    """Proven at small sizes where the program is the same there, else at their own; never by their own weights."""
    seen = []
    compare = proof._compare
    monkeypatch.setattr(proof, "_compare", lambda c, f, p, b: (seen.append(b.x.shape[-1]), compare(c, f, p, b)))
    with torch.device("meta"):
        experts = local_experts(cls(512, ffn).bfloat16())
    formula = recognise(experts, 512)
    assert (formula.kind, formula.ffn_size, formula.gate, formula.up) == ("gated", ffn, "c.weight", "b.weight")
    assert set(seen) == {96 if small else 512}


@pytest.mark.parametrize("cls", [OtherwiseWhenBig, TruncatesWhenBig, GradientWhenBig])
def test_code_that_branches_on_the_size(cls):
    assert recognise(local_experts(Gated(256, 512)), 256)
    assert "differs from" in refused(cls(512, 512), hidden_size=512)


def test_real_sizes_cost_neither_time_nor_memory():
    with torch.device("meta"):
        experts = local_experts(Gated(7168, 2048).bfloat16(), 16)
    recognise(experts, 7168)  # imports
    start = time.process_time()
    assert recognise(experts, 7168).ffn_size == 2048
    assert time.process_time() - start < 1  # 0.05 s where nothing else runs; drawing the weights alone takes longer


# ---- refused ------------------------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """Identity, with twice the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def clipped_gradient(x):
    if x.requires_grad:
        x.register_hook(lambda g: g.clamp(-1e3, 1e3))
    return x


def count_calls(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    return m.down(F.relu(m.up(x)))


def only_training(m, x, change):
    h = F.relu(m.up(x))
    return m.down(change(h) if m.training else h)


def swallow(m, x):
    try:
        x = x + torch.rand_like(x)
    except Exception:
        pass
    return m.down(F.relu(m.up(x)))


def fail(m, x):
    raise KeyError("no such thing")


class Unwilling:
    def __deepcopy__(self, memo):
        raise TypeError("I stay")


@pytest.mark.parametrize("reason, compute", [
    ("differs from the nearest", lambda m, x: m.down(torch.tanh(m.up(x)))),
    ("differs from the nearest", lambda m, x: m.down(F.leaky_relu(m.up(x)))),
    ("differs from the nearest", lambda m, x: m.down(m.up(x) * torch.sigmoid(1.702 * m.up(x)))),
    ("differs from the nearest", lambda m, x: m.down(m.up(x))),
    ("differs from the nearest", lambda m, x: x + m.down(F.relu(m.up(x)))),
    ("differs from the nearest", lambda m, x: 1.001 * m.down(F.relu(m.up(x)))),
    ("differs from the nearest", lambda m, x: F.linear(F.relu(m.up(x)), m.down.weight)),
    ("differs from the nearest", lambda m, x: m.down(F.relu(m.up(x)).bfloat16().to(x.dtype))),
    ("very small and very large", lambda m, x: m.down(F.relu6(m.up(x) / 64) * 64)),
    ("very small and very large", lambda m, x: m.down(F.relu(m.up(x).clamp(-1e4, 1e4)))),
    ("very small and very large", lambda m, x: m.down(F.relu(m.up(x))) * (x != 0).any(-1, keepdim=True)),
    ("depends on the other rows", lambda m, x: m.down(F.softmax(m.up(x), dim=-2))),
    ("depends on the other rows", lambda m, x: m.down(F.relu(m.up(x - x.mean((0, 1, 2)))))),
    ("draws random numbers", lambda m, x: m.down(F.dropout(F.relu(m.up(x)), 0.1, m.training))),
    ("draws random numbers", lambda m, x: m.down(F.dropout(F.relu(m.up(x)), 0.1, True))),
    ("draws random numbers", lambda m, x: m.down(F.relu(m.up(x + 1e-9 * torch.randn_like(x))))),
    ("draws random numbers", lambda m, x: x if torch.rand(()) < 0 else m.down(F.relu(m.up(x)))),
    ("draws random numbers", swallow),
    ("in training mode the output differs", lambda m, x: only_training(m, x, lambda h: 1.1 * h)),
    ("carries no gradient", lambda m, x: m.down(F.relu(m.up(x))).detach()),
    ("gradient of its input differs", lambda m, x: m.down(F.relu(m.up(x).detach()))),
    ("gradient of up.weight differs", lambda m, x: m.down(F.relu(F.linear(x, m.up.weight.detach(), m.up.bias)))),
    ("gradient of its input differs", lambda m, x: m.down(F.relu(m.up(x.detach())))),
    ("gradient of its input differs", lambda m, x: m.down(F.relu(m.up(Scaled.apply(x))))),
    ("gradient of its input differs", lambda m, x: m.down(F.relu(m.up(clipped_gradient(x))))),
    ("KeyError: 'no such thing'", fail),
    ("returns a dict", lambda m, x: {"y": m.down(F.relu(m.up(x)))}),
    ("returns a list", lambda m, x: [m.down(F.relu(m.up(x)))]),
    ("returns a tuple", lambda m, x: ()),
    ("expert returns [12, 64]", lambda m, x: m.down(F.relu(m.up(x))).flatten(0, 2)),
    ("torch.float64", lambda m, x: m.down(F.relu(m.up(x))).double()),
    ("changes the attribute calls of its Mlp", count_calls),
])
def test_computations_refused(reason, compute):
    assert reason in refused(Mlp(compute))


def guarded(dtype, guard):
    """HF's guards against overflow: in one dtype alone, on the result."""

    def compute(m, x):
        y = m.down(F.gelu(m.up(x)))
        return guard(y) if y.dtype == dtype else y

    return compute


@pytest.mark.parametrize("kind", [Mlp, Gated])
@pytest.mark.parametrize("guard", [lambda y: y.clamp(-64000, 64000), torch.nan_to_num,
                                   lambda y: torch.nan_to_num(y, 0, torch.inf, -torch.inf)],
                         ids=["clamp", "nan_to_num", "NaN alone"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_guards_against_overflow_refused(dtype, guard, kind):
    class Guarded(Gated):
        def forward(self, x):
            y = super().forward(x)
            return guard(y) if y.dtype == dtype else y

    expert = Mlp(guarded(dtype, guard)) if kind is Mlp else Guarded(H, FFN)
    reason = refused(expert.to(dtype))
    assert "what overflows" in reason or dtype == torch.float32 and "very small and very large" in reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("compute", [lambda m, x: m.down(F.relu(m.up(x))), lambda m, x: m.down(F.silu(m.up(x))),
                                     lambda m, x: m.down(F.gelu(m.up(x), approximate="tanh")),
                                     lambda m, x: m.down(F.relu(m.up(x).float()).to(x.dtype))])
def test_what_overflows_by_itself_is_recognised(dtype, compute):
    assert recognise(nn.ModuleList([Mlp(compute).to(dtype)]), H)


class Counter:
    def __init__(self):
        self.count = 0

    def up(self):
        self.count += 1


def keeps_track(memory, note):
    """An expert that notes something in `memory` at each call, and computes a recognised formula."""

    def compute(m, x):
        note(m.memory, x)
        return m.down(F.relu(m.up(x)))

    expert = Mlp(compute)
    expert.memory = memory
    return expert


@pytest.mark.parametrize("memory, note", [
    ([], lambda memory, x: memory.append(len(x))),
    ({"calls": 300}, lambda memory, x: memory.update(calls=memory["calls"] + 1)),
    ({"of": {"calls": [0]}}, lambda memory, x: memory["of"]["calls"].append(1)),
    (set(), lambda memory, x: memory.add(len(x))),
    (deque([1, 2], maxlen=2), lambda memory, x: memory.append(3)),
    (torch.zeros(()), lambda memory, x: memory.mul_(0.9).add_(x.detach().mean())),
    (torch.zeros(H), lambda memory, x: memory.data.add_(1)),
    ([torch.zeros(2, dtype=torch.bfloat16)], lambda memory, x: memory[0].data.add_(1)),
    (numpy.zeros(2), lambda memory, x: memory.__iadd__(1)),
    (Counter(), lambda memory, x: memory.up()),
], ids=["list", "dict", "nested", "set", "deque", "running mean", "tensor's data", "tensors", "array", "object"])
@pytest.mark.parametrize("ffn", [FFN, 4096])
def test_experts_that_keep_state(memory, note, ffn):
    small = keeps_track(copy.deepcopy(memory), note)
    small.up, small.down = nn.Linear(H, ffn), nn.Linear(ffn, H)
    assert "changes the attribute memory of its Mlp: it keeps state" in refused(small)


@pytest.mark.parametrize("memory", [[1, torch.full((2, ), torch.nan)], {"a": {2.5}}, torch.ones(3, dtype=torch.bool),
                                    numpy.ones(2), Counter(), range(10**12), torch.zeros(0)], ids=type)
def test_attributes_that_forward_leaves_alone(memory):
    if isinstance(memory, list):
        memory.append(memory)  # in a circle
    assert recognise(nn.ModuleList([keeps_track(memory, lambda memory, x: None)]), H)


@pytest.mark.parametrize("compute", [lambda m, x: m.down(F.relu(m.up(x))).float(),
                                     lambda m, x: m.down(F.relu(m.up(x)) * (2 if x.dtype == torch.bfloat16 else 1))])
def test_other_result_in_bfloat16(compute):
    assert recognise(local_experts(Mlp(compute)), H)
    assert "bfloat16" in refused(Mlp(compute).bfloat16())


def test_expert_that_cannot_be_copied():
    experts = local_experts(mlp())
    experts[0].extra = Unwilling()
    assert "TypeError: I stay" in refused(experts)


def test_zero_weights_prove_nothing():
    template = Mlp(lambda m, x: x + m.down(torch.tanh(m.up(x))))
    nn.init.zeros_(template.down.weight)
    assert "differs from the nearest" in refused(template)


def test_expert_that_communicates(monkeypatch):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        def compute(m, x):
            y = m.down(F.relu(m.up(x)))
            torch.distributed.all_reduce(y)
            return y

        assert "communicates between ranks" in refused(Mlp(compute))
    finally:
        torch.distributed.destroy_process_group()


# ---- no trace -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", [
    lambda m, x: m.down(F.relu(m.up(x))),
    lambda m, x: m.down(F.dropout(F.relu(m.up(x)), 0.5)),
    lambda m, x: m.down(F.relu(m.up(x)) * random.random() * numpy.random.rand()),
    lambda m, x: (torch.manual_seed(5), count_calls(m, x))[1],
    fail,
])
def test_modules_and_random_states_stay_as_they_were(compute):
    experts = local_experts(Mlp(compute))
    experts[0].down.eval()
    for p in experts.parameters():
        p.grad = torch.ones_like(p)
    params = dict(experts.named_parameters())
    values = {name: (p.clone(), p._version, p.data_ptr()) for name, p in params.items()}
    attributes = [{k: v for k, v in vars(m).items()} for m in experts.modules()]
    states = torch.get_rng_state(), random.getstate(), copy.deepcopy(numpy.random.get_state()[1:3])
    try:
        recognise(experts, H)
    except NotRecognised:
        pass
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    numpy.testing.assert_equal(numpy.random.get_state()[1:3], states[2])
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
            assert recognise(experts, H).kind == "mlp"
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        assert recognise(experts, H).kind == "mlp"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


def test_compiled_experts_are_not_compiled_for_this(monkeypatch):
    def backend(*args):
        raise AssertionError("compiled")

    experts = local_experts(Mlp(lambda m, x: m.down(torch.compile(F.relu, backend=backend)(m.up(x)))))
    for expert in experts:
        expert.compile(backend=backend)
    assert recognise(experts, H).activation == "relu"
