# SPDX-License-Identifier: Apache-2.0
"""The kernels of ops/triton_kernels/route.py against DeepSpeed's router, on the CPU by Triton's interpreter or on a
GPU."""

from dataclasses import dataclass
from unittest import mock

import torch
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from permute_cases import poisoned

from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.layers import router as router_module
from ds_mxfp8_moe.layers.routes import Turn

HIDDEN = 32


@dataclass(frozen=True)
class Case:
    tokens: int = 70
    experts: int = 8
    top_k: int = 2
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    bias: bool = False
    correction: bool = False
    gate_bias: bool = False
    hook: bool = False
    captured: bool = False  # by transformers, whose auxiliary loss has a gradient of the logits

    def router(self, device: str) -> TokenChoiceTopKRouter:
        torch.manual_seed(3)
        router = TokenChoiceTopKRouter(HIDDEN, self.experts, None, None, self.top_k, self.score, self.normalize,
                                       self.scale, gate_bias=self.gate_bias)
        if self.hook:
            router.gate.register_forward_hook(lambda gate, inputs, out: out * 2)
        if self.captured:
            router.captured = []

            def output_capturing_hook(gate, inputs, out):
                router.captured.append(out)
            router.gate.register_forward_hook(output_capturing_hook)
        if self.correction:
            router.e_score_correction_bias = torch.randn(self.experts, device=device)
        return router.to(device, self.dtype)


CASES = {
    "softmax": Case(),
    "not normalised": Case(normalize=False, top_k=6),
    "sigmoid": Case(score="sigmoid", scale=2.5, top_k=3),
    "biases": Case(score="sigmoid", bias=True, correction=True, experts=24, top_k=4),
    "biased softmax": Case(bias=True, experts=5),
    "all experts": Case(experts=8, top_k=8),
    "one choice": Case(top_k=1, normalize=False),
    "one expert": Case(experts=1, top_k=1),
    "one token": Case(tokens=1, experts=60, top_k=8),
    "many experts": Case(tokens=37, experts=300, top_k=8),
    "bf16": Case(dtype=torch.bfloat16, experts=64, top_k=6),
    "fp16": Case(dtype=torch.float16),
    "linear layer with a bias": Case(gate_bias=True),
    "linear layer with a hook": Case(hook=True),
    "logits captured": Case(captured=True, dtype=torch.bfloat16, experts=64, top_k=6),
}


def routed(case: Case, router: TokenChoiceTopKRouter, x_TH: torch.Tensor, bias_E: torch.Tensor | None,
           kernels: bool, chosen_TK: torch.Tensor | None = None) -> dict:
    turn = None if chosen_TK is None else Turn(chosen_TK.to(torch.int16), bool((chosen_TK >= 0).all()))
    x_TH = x_TH.detach().requires_grad_()
    with mock.patch.object(router_module, "has_kernels", lambda device: kernels), poisoned():
        weight_TK, expert_TK, count_E = router_module.route(router, x_TH, bias_E, turn)
        assert (weight_TK.dtype, expert_TK.dtype, count_E.dtype) == (torch.float32, torch.int64, torch.int32)
        assert weight_TK.grad_fn is not None and expert_TK.grad_fn is None
        # A gradient that depends on the expert, not on the order of choices.
        g_TE = torch.arange(x_TH.shape[0] * router.num_experts, device=x_TH.device).sin().view(-1, router.num_experts)
        outputs, grads = [weight_TK], [g_TE.gather(1, expert_TK)]
        if case.captured:
            outputs, grads = [weight_TK, router.captured.pop()], [*grads, g_TE.cos().to(x_TH.dtype)]
            assert not router.captured
        dx, dgate = torch.autograd.grad(outputs, (x_TH, router.gate.weight), grads)
    dense_TE = torch.zeros(x_TH.shape[0], router.num_experts, device=x_TH.device)
    return {"weight": dense_TE.scatter(1, expert_TK, weight_TK.detach()), "x": dx, "gate": dgate,
            "expert": expert_TK, "count": count_E, "in order": weight_TK.detach()}


def check_route(device: str, case: Case) -> None:
    router = case.router(device)
    torch.manual_seed(4)
    x_TH = torch.randn(case.tokens, HIDDEN, device=device).to(case.dtype)
    bias_E = torch.randn(case.experts, device=device) if case.bias else None
    plain, kernels = (routed(case, router, x_TH, bias_E, kernels) for kernels in (False, True))
    compare(case, plain, kernels)
    if bias_E is None and not case.correction:  # then the order of choices is that of weights
        assert bool((kernels["in order"].diff(dim=1) <= 0).all())
    again = routed(case, router, x_TH, bias_E, True)
    replayed = [routed(case, router, x_TH, bias_E, one is kernels, one["expert"]) for one in (plain, kernels)]
    for first, second in (kernels, again), (kernels, replayed[1]), (plain, replayed[0]):
        assert all(torch.equal(first[name], second[name]) for name in first)
    # Other experts, in any order. Some tokens choose by themselves.
    chosen_TK = torch.rand(case.tokens, case.experts, device=device).argsort(1)[:, :case.top_k]
    chosen_TK[::3] = -1
    plain, kernels = (routed(case, router, x_TH, bias_E, kernels, chosen_TK) for kernels in (False, True))
    compare(case, plain, kernels)
    assert torch.equal(kernels["expert"][1::3], chosen_TK[1::3])


def compare(case: Case, plain: dict, kernels: dict) -> None:
    assert torch.equal(plain["expert"].sort(1)[0], kernels["expert"].sort(1)[0])
    assert torch.equal(plain["count"], kernels["count"])
    torch.testing.assert_close(kernels["weight"], plain["weight"], rtol=3e-6, atol=0)
    # Gradients of the logits are rounded to the tokens' dtype, here and there a neighbour of DeepSpeed's.
    bar = {torch.float32: 100, torch.float16: 60, torch.bfloat16: 45}[case.dtype]
    for name in ("x", "gate"):
        if plain[name].abs().max() > 1e-6:  # a softmax of one score has no gradient
            assert sqnr_db(plain[name], kernels[name]) > bar, name


def check_odd_scores(device: str) -> None:
    """Equal scores go to the first experts. NaN and infinities reach only their own token, and choose K experts."""
    case = Case(experts=6, top_k=3)
    router = case.router(device)
    x_TH = torch.zeros(9, HIDDEN, device=device)
    x_TH[1], x_TH[2] = float("nan"), float("inf")
    found = routed(case, router, x_TH, None, True)
    assert torch.equal(found["expert"][3:], torch.arange(3, device=device).expand(6, 3))
    assert torch.equal(found["in order"][3:], torch.full((6, 3), 1 / 3, device=device))
    assert bool(found["in order"][1:3].isnan().all()) and bool(found["x"][1].isnan().all())
    assert bool(found["x"][3:].isfinite().all())
    ids = found["expert"].sort(1)[0]
    assert bool((ids.diff(dim=1) > 0).all()) and 0 <= int(ids.min()) and int(ids.max()) < 6
    assert int(found["count"].sum()) == found["expert"].numel()
