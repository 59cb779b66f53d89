# SPDX-License-Identifier: Apache-2.0
"""What experts compute: each accepted shape, each reason to refuse, and that looking leaves no trace."""

import copy
import random
import time
from collections import deque

import numpy
import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.experts import Experts
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from ds_mxfp8_moe import proof
from ds_mxfp8_moe import recognise as recognise_file
from ds_mxfp8_moe.experts import ROLES, NotRecognised, evaluate, expert_weights
from ds_mxfp8_moe.recognise import recognise, register_expert

H, FFN = 64, 96


def local_experts(template, num=2):
    return Experts(template, num).deepspeed_experts


def refused(template, *, num=2, hidden_size=H):
    """The reason, as text."""
    experts = template if isinstance(template, nn.ModuleList) else local_experts(template, num)
    with pytest.raises(NotRecognised) as caught:
        recognise(experts, hidden_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def mlp(act=None, hidden=H, ffn=FFN, **keys):
    return nn.Sequential(nn.Linear(hidden, ffn, **keys), act or nn.ReLU(), nn.Linear(ffn, hidden, **keys))


class Gated(nn.Module):
    """Names and their order say nothing about the roles."""

    def __init__(self, hidden=H, ffn=FFN, act=F.silu, bias=False):
        super().__init__()
        self.a = nn.Linear(ffn, hidden, bias=bias)
        self.b = nn.Linear(hidden, ffn, bias=bias)
        self.c = nn.Linear(hidden, ffn, bias=bias)
        self.hidden_size, self.act = hidden, act

    def forward(self, x):
        return self.a(self.b(x) * self.act(self.c(x)))


class Packed(nn.Module):
    def __init__(self, gate_first, act=F.silu, bias=True):
        super().__init__()
        self.gate_up = nn.Linear(H, 2 * FFN, bias=bias)
        self.down = nn.Linear(FFN, H, bias=bias)
        self.gate_first, self.act = gate_first, act

    def forward(self, x):
        first, second = self.gate_up(x).chunk(2, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.down(self.act(gate) * up), None


class Mlp(nn.Module):
    """Two Linears with `change` between them, or around them: a function (module, x) -> y."""

    def __init__(self, compute, hidden=H, ffn=FFN):
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


# ---- accepted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias):
    formula = recognise(local_experts(nn.Linear(H, H, bias=bias)), H)
    assert (formula.kind, formula.activation, formula.ffn_size) == ("linear", None, H)
    assert formula.names() == {"up": "weight", **({"up_bias": "bias"} if bias else {})}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name, act", [("relu", nn.ReLU()), ("relu", nn.ReLU(inplace=True)), ("gelu", nn.GELU()),
                                       ("gelu_tanh", nn.GELU(approximate="tanh")), ("silu", nn.SiLU())])
def test_mlp(name, act, bias):
    formula = recognise(local_experts(mlp(act, bias=bias)), H)
    assert (formula.kind, formula.activation, formula.ffn_size, formula.packed) == ("mlp", name, FFN, "none")
    assert (formula.gate, formula.up, formula.down) == (None, "0.weight", "2.weight")
    assert (formula.up_bias, formula.down_bias) == (("0.bias", "2.bias") if bias else (None, None))


@pytest.mark.parametrize("name, act", [
    ("relu", lambda x: x.clamp(min=0)), ("silu", lambda x: x * torch.sigmoid(x)),
    ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
    ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi)**0.5 * (x + 0.044715 * x**3)))),
])
def test_activations_written_out_by_hand(name, act):
    compute = lambda m, x: (act(x @ m.up.weight.t() + m.up.bias) @ m.down.weight.t()).add_(m.down.bias)  # noqa: E731
    assert recognise(local_experts(Mlp(compute).bfloat16()), H).activation == name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name, act", [("relu", torch.relu), ("gelu", F.gelu), ("silu", nn.SiLU()),
                                       ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))])
def test_gated(name, act, bias):
    formula = recognise(local_experts(Gated(act=act, bias=bias)), H)
    assert (formula.kind, formula.activation, formula.hidden_size, formula.ffn_size) == ("gated", name, H, FFN)
    assert (formula.gate, formula.up, formula.down) == ("c.weight", "b.weight", "a.weight")
    assert (formula.gate_bias, formula.up_bias, formula.down_bias) == (("c.bias", "b.bias", "a.bias") if bias
                                                                       else (None, None, None))


@pytest.mark.parametrize("gate_first", [True, False])
def test_packed(gate_first):
    formula = recognise(local_experts(Packed(gate_first)), H)
    assert (formula.kind, formula.activation, formula.ffn_size) == ("gated", "silu", FFN)
    assert formula.packed == ("gate_up" if gate_first else "up_gate")
    assert formula.names() == {"up": "gate_up.weight", "down": "down.weight", "up_bias": "gate_up.bias",
                               "down_bias": "down.bias"}


def test_square_weights_need_the_proof_to_tell_roles_apart():
    formula = recognise(local_experts(Gated(ffn=H)), H)
    assert (formula.gate, formula.up, formula.down) == ("c.weight", "b.weight", "a.weight")
    backwards = Mlp(lambda m, x: m.up(F.relu(m.down(x))), ffn=H)
    assert recognise(local_experts(backwards), H).names()["up"] == "down.weight"


def test_half_width():
    for ffn in (H // 2, 2 * H):
        assert recognise(local_experts(Gated(ffn=ffn)), H).ffn_size == ffn


def test_some_biases():
    template = Gated()
    template.b = nn.Linear(H, FFN, bias=True)
    assert recognise(local_experts(template), H).names().keys() == {"gate", "up", "down", "up_bias"}


@pytest.mark.parametrize("extra", [nn.Dropout(0.0), nn.Identity()])
def test_modules_that_do_nothing(extra):
    template = nn.Sequential(nn.Linear(H, FFN), nn.GELU(), extra, nn.Linear(FFN, H))
    assert recognise(local_experts(template), H).down == "3.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    assert recognise(local_experts(Gated().to(dtype)), H).kind == "gated"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_expert(reentrant):
    def compute(m, x):
        return m.down(checkpoint(lambda x: F.relu(m.up(x)), x, use_reentrant=reentrant))

    assert recognise(local_experts(Mlp(compute)), H).kind == "mlp"


def test_expert_that_only_takes_deepspeeds_shape():
    def compute(m, x):
        g, one, c, h = x.shape
        assert one == 1
        return m.down(F.relu(m.up(x.reshape(g * c, h)))).view(g, 1, c, h)

    assert recognise(local_experts(Mlp(compute)), H).kind == "mlp"


def test_frozen_parameters():
    template = mlp()
    template[0].requires_grad_(False)
    assert recognise(local_experts(template), H).kind == "mlp"


def test_activation_in_float32():
    compute = lambda m, x: m.down(F.silu(m.up(x).float()).to(x.dtype))  # noqa: E731
    assert recognise(local_experts(Mlp(compute).bfloat16()), H).activation == "silu"


def test_evaluate_is_what_the_expert_computes():
    torch.manual_seed(0)
    x = torch.randn(5, H)
    for template in (nn.Linear(H, H), mlp(nn.GELU()), Gated(bias=True), Packed(True), Packed(False)):
        y = template(x)
        formula = recognise(local_experts(template), H)
        torch.testing.assert_close(evaluate(formula, x, dict(template.named_parameters())),
                                   y[0] if isinstance(y, tuple) else y)
        shapes = {name: tuple(p.shape) for name, p in template.named_parameters()}
        assert {formula.names()[role]: shape for role, shape in formula.shapes().items()} == shapes


def test_expert_weights_are_the_live_parameters_by_role():
    experts = local_experts(Gated(), 3)
    weights = expert_weights(experts, recognise(experts, H))
    assert tuple(weights) == ROLES
    for role, module in (("gate", "c"), ("up", "b"), ("down", "a")):
        assert all(w is e.get_submodule(module).weight for w, e in zip(weights[role], experts, strict=True))
    assert weights["gate_bias"] is weights["up_bias"] is weights["down_bias"] is None


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


@pytest.mark.parametrize("hidden", [4, 84])
def test_hidden_size_no_multiple_of_32(hidden):
    assert refused(mlp(hidden=hidden), hidden_size=hidden) == f"hidden size {hidden} is no multiple of 32"


def test_ffn_size_no_multiple_of_32():
    assert refused(mlp(ffn=100)) == "FFN size 100 is no multiple of 32"


def test_no_experts():
    assert "no local experts" in refused(nn.ModuleList())


class SubclassedLinear(nn.Linear):
    pass


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norm = mlp(), nn.LayerNorm(H)

    def forward(self, x):
        return self.net(self.norm(x))


class TensorSubclass(torch.Tensor):
    pass


def with_weight(data):
    linear = nn.Linear(H, H)
    linear.weight = nn.Parameter(data)
    return linear


class WithBuffer(nn.Linear):
    def __init__(self):
        super().__init__(H, H)
        self.register_buffer("scale", torch.ones(()))


@pytest.mark.parametrize("make, reason", [
    (lambda: nn.Identity(), "has 0 nn.Linear modules"),
    (lambda: nn.Sequential(*[nn.Linear(H, H) for _ in range(4)]), "has 4 nn.Linear modules (0, 1, 2, 3)"),
    (lambda: nn.Linear(H, FFN), "fit no recognised formula"),
    (lambda: nn.Sequential(nn.Linear(H, FFN), nn.Linear(FFN, FFN), nn.Linear(FFN, H)), "fit no recognised formula"),
    (lambda: Normed(), "norm is a LayerNorm with parameters"),
    (lambda: nn.Sequential(SubclassedLinear(H, FFN), nn.ReLU(), nn.Linear(FFN, H)), "0 is a SubclassedLinear"),
    (lambda: nn.Sequential(nn.Linear(H, FFN), nn.PReLU(), nn.Linear(FFN, H)), "1 is a PReLU with parameters"),
    (lambda: nn.Sequential(nn.Linear(H, FFN), nn.BatchNorm1d(FFN), nn.Linear(FFN, H)), "has a buffer"),
    (lambda: WithBuffer(), "has a buffer, scale"),
    (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(H, FFN)), nn.ReLU(), nn.Linear(FFN, H)),
     "0 is a ParametrizedLinear"),
    (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(H, H, bias=False))), "ParametrizationList"),
    (lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(H, H))), "has a buffer"),
    (lambda: mlp().double(), "is torch.float64"),
    (lambda: nn.Sequential(nn.Linear(H, FFN).bfloat16(), nn.ReLU(), nn.Linear(FFN, H)), "different dtypes"),
    (lambda: nn.LazyLinear(H), "has a forward pre hook"),
    (lambda: with_weight(torch.ones(H, H).as_subclass(TensorSubclass)), "is a TensorSubclass, not a plain"),
    (lambda: with_weight(torch.ones(0)), "is empty here"),
])
def test_structures_refused(make, reason):
    assert reason in refused(nn.ModuleList([make()]))  # not all can be deep-copied


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_old_weight_norm_and_pruning():
    experts = nn.ModuleList([nn.utils.weight_norm(nn.Linear(H, H)) for _ in range(2)])
    assert "forward pre hook" in refused(experts)
    for expert in experts:
        expert._forward_pre_hooks.clear()
    assert "weight_g" in refused(experts)
    pruned = prune.l1_unstructured(nn.Linear(H, H), "weight", 0.5)
    assert "forward pre hook" in refused(nn.ModuleList([pruned]))


@pytest.mark.parametrize("rank", [8, H])
def test_peft_lora(rank):
    from peft import LoraConfig, inject_adapter_in_model

    def adapted(experts, *names):
        return inject_adapter_in_model(LoraConfig(r=rank, target_modules=list(names)), experts)

    assert "has 4 nn.Linear modules (up.base_layer, up.lora_A.default," in refused(
        adapted(local_experts(Mlp(lambda m, x: m.down(F.relu(m.up(x))))), "up"))
    alone = adapted(nn.ModuleDict({"up": nn.Linear(H, H)}), "up")["up"]
    assert ("differs from the nearest" if rank == H else "fit no recognised formula") in refused(
        nn.ModuleList([alone]))  # of rank H it has the shapes of a gated expert


def hook_registrations():
    return [("forward hook", lambda m: m.register_forward_hook(lambda *a: None)),
            ("forward hook", lambda m: m.register_forward_hook(lambda *a, **k: None, with_kwargs=True)),
            ("forward pre hook", lambda m: m.register_forward_pre_hook(lambda *a: None)),
            ("backward hook", lambda m: m.register_full_backward_hook(lambda *a: None)),
            ("backward pre hook", lambda m: m.register_full_backward_pre_hook(lambda *a: None))]


@pytest.mark.parametrize("kind, register", hook_registrations())
def test_hooks(kind, register):
    experts = local_experts(mlp(), 4)
    handle = register(experts[3][1])
    assert refused(experts) == f"expert 3, module 1, has a {kind}"
    handle.remove()
    register(experts[2])
    assert refused(experts) == f"expert 2 has a {kind}"


def test_forward_replaced_on_an_instance():
    experts = local_experts(mlp())
    experts[1][0].forward = lambda x: x
    assert refused(experts) == "expert 1, module 0, has its forward method replaced on the instance"


def test_tied_weights():
    template = Gated()
    template.c = template.b
    assert refused(template) == "parameter c.weight of expert 0 is shared with b.weight of expert 0"
    experts = local_experts(mlp(), 3)
    experts[2][0].weight = experts[0][0].weight
    assert refused(experts) == "parameter 0.weight of expert 2 is shared with 0.weight of expert 0"
    assert "shared with" in refused(nn.ModuleList([mlp()] * 2))


def test_weights_tied_with_the_rest_of_the_model():
    experts = local_experts(mlp())
    elsewhere = {nn.Parameter(torch.ones(1)): "head.weight"}
    assert recognise(experts, H, elsewhere)
    elsewhere[experts[1][2].weight] = "layers.2.weight"
    with pytest.raises(NotRecognised, match="2.weight of expert 1 is shared with layers.2.weight, outside"):
        recognise(experts, H, elsewhere)


@pytest.mark.parametrize("other, reason", [
    (Gated(), "expert 1 is a Gated, expert 0 a Sequential"),
    (mlp(nn.GELU()), "expert 1 differs from expert 0 in its modules"),
    (mlp(ffn=128), "expert 1 differs from expert 0 in its modules"),
    (mlp(bias=False), "expert 1 differs from expert 0 in its modules"),
    (mlp().bfloat16(), "expert 1 differs from expert 0 in its modules"),
])
def test_experts_unlike_each_other(other, reason):
    assert refused(nn.ModuleList([mlp(), other])).startswith(reason)


def test_experts_of_one_structure_but_unlike_state():
    experts = nn.ModuleList([mlp(nn.GELU()), mlp(nn.GELU()), mlp(nn.GELU(approximate="tanh"))])
    assert refused(experts).startswith("expert 2 differs from expert 0: the output differs")
    experts = nn.ModuleList([Gated(), Gated(act=torch.tanh)])
    assert refused(experts).startswith("expert 1 differs from expert 0: the output differs")
    experts = nn.ModuleList([Gated(), Gated(act=lambda x: F.silu(x))])  # other code, same function
    assert recognise(experts, H).activation == "silu"


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


# ---- register_expert ----------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(recognise_file, "_registered", {})


class Raw(nn.Module):
    def __init__(self, act=F.gelu):
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(2 * FFN, H))
        self.w2 = nn.Parameter(torch.randn(H, FFN))
        self.b2 = nn.Parameter(torch.randn(H))
        self.act = act

    def forward(self, x):
        gate, up = F.linear(x, self.w13).chunk(2, -1)
        return F.linear(self.act(gate) * up, self.w2, self.b2)


RAW = dict(kind="gated", activation="gelu", up="w13", down="w2", down_bias="b2", packed="gate_up")


def test_registered_class(registry):
    assert "is a Raw with parameters of its own" in refused(Raw())
    register_expert(Raw, **RAW)
    experts = local_experts(Raw())
    formula = recognise(experts, H)
    assert (formula.kind, formula.packed, formula.ffn_size, formula.down_bias) == ("gated", "gate_up", FFN, "b2")
    assert expert_weights(experts, formula)["up"][1] is experts[1].w13


def test_registered_subclass_of_linear(registry):
    register_expert(SubclassedLinear, kind="linear", up="weight", up_bias="bias")
    assert recognise(local_experts(SubclassedLinear(H, H)), H).kind == "linear"


def test_registration_holds_for_the_exact_class(registry):
    register_expert(Raw, **RAW)
    assert "parameters of its own" in refused(type("Derived", (Raw,), {})())


@pytest.mark.parametrize("changes, reason", [
    (dict(activation="silu"), "differs from the nearest recognised formula"),
    (dict(packed="up_gate"), "differs from the nearest recognised formula"),
    (dict(kind="mlp", packed="none"), "is registered with down=w2 of shape (64, 192), but has (64, 96)"),
    (dict(down_bias=None), "is registered with parameters ['w13', 'w2'], but has ['b2', 'w13', 'w2']"),
    (dict(up="w1"), "is registered with parameters ['b2', 'w1', 'w2'], but has ['b2', 'w13', 'w2']"),
    (dict(up="w2", down="w13"), "is registered with up=w2 of shape"),
])
def test_lying_registration(registry, changes, reason):
    register_expert(Raw, **(RAW | changes))
    assert reason in refused(Raw())


@pytest.mark.parametrize("error, changes", [
    (ValueError, dict(kind="ffn")), (ValueError, dict(activation="tanh")), (ValueError, dict(activation=None)),
    (ValueError, dict(kind="linear", packed="none")), (ValueError, dict(packed="none")),
    (ValueError, dict(packed="both")), (ValueError, dict(kind="mlp")), (ValueError, dict(gate="w1")),
    (ValueError, dict(gate_bias="b1")), (ValueError, dict(down=None)), (TypeError, dict(cls="Raw")),
    (TypeError, dict(cls=Raw())),
])
def test_registration_that_makes_no_sense(registry, error, changes):
    keys = dict(cls=Raw) | RAW | changes
    with pytest.raises(error, match="register_expert: "):
        register_expert(keys.pop("cls"), **keys)
    assert not recognise_file._registered


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
