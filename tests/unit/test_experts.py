# SPDX-License-Identifier: Apache-2.0
"""What formulas compute, and the weights that they are given."""

import torch
from expert_modules import Gated, H, Packed, local_experts, mlp
from torch import nn

from ds_mxfp8_moe.compute.formula import ROLES, evaluate, expert_weights
from ds_mxfp8_moe.layers.recognise import recognise


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
