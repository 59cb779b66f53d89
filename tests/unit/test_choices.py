# SPDX-License-Identifier: Apache-2.0
"""The answers to a router's `topk`: replayed and biased choices, in groups and without; which calls are answered."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ds_mxfp8_moe.routing.choices import Choice
from ds_mxfp8_moe.routing.routes import Turn

T, E, K = 40, 8, 3
EXPERTS = SimpleNamespace(num_experts=E)


def inside(call, turn: Turn | None = None, bias_E: torch.Tensor | None = None):
    with Choice(EXPERTS, T, turn, bias_E, lambda: None):
        return call()


FORMS = {
    "torch.topk": lambda scores: torch.topk(scores, K, dim=-1),
    "Tensor.topk": lambda scores: scores.topk(K),
    "by names": lambda scores: torch.topk(input=scores, k=K, dim=1, sorted=False),
    "by place": lambda scores: torch.topk(scores, K, 1, True, False),
    "of a batch": lambda scores: [part.flatten(0, 1) for part in scores.view(4, T // 4, E).topk(K, dim=2)],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_turn_answers_and_rows_of_minus_one_choose(form, share):
    scores = torch.randn(T, E, requires_grad=True)
    chosen_TK = torch.rand(T, E).argsort(1)[:, :K].to(torch.int16)
    live_T = torch.rand(T) < share
    chosen_TK[live_T] = -1
    values, indices = inside(lambda: FORMS[form](scores), Turn(chosen_TK, complete=share == 0))
    expected = torch.where(live_T[:, None], FORMS[form](scores)[1], chosen_TK.long())
    assert torch.equal(indices, expected) and torch.equal(values, scores.gather(1, expected))
    grads = [torch.autograd.grad(one.square().sum(), scores)[0] for one in (values, scores.gather(1, expected))]
    assert torch.equal(*grads)


def test_other_calls_are_not_answered():
    turn = Turn(torch.zeros(T, K, dtype=torch.int16), complete=True)
    for shape, call in (((T, E), lambda x: x.topk(K - 1)), ((T, E + 1), lambda x: x.topk(K)),
                        ((T + 1, E), lambda x: x.topk(K)), ((T, E), lambda x: x.topk(K, dim=0)),
                        ((T, 2, E), lambda x: x.topk(K)), ((T, E), lambda x: x.sort(1))):
        call = partial(call, torch.randn(shape))
        for ours, plain in zip(inside(call, turn), call(), strict=True):
            assert torch.equal(ours, plain)


@pytest.mark.parametrize("fill", [0.0, -torch.inf])
def test_a_bias_acts_inside_the_groups_that_the_router_allows(fill):
    scores_TE, bias_E = torch.rand(T, E), torch.randn(E) * 10
    allowed_TE = torch.rand(T, 2).argsort(1).repeat_interleave(E // 2, dim=1) == 0

    def route():
        return torch.topk(scores_TE.masked_fill(~allowed_TE, fill), K, dim=-1, sorted=False)

    values, indices = inside(route, bias_E=bias_E)
    expected = (scores_TE + bias_E).masked_fill(~allowed_TE, -torch.inf).topk(K, sorted=False).indices
    assert torch.equal(indices, expected) and torch.equal(values, scores_TE.gather(1, expected))


def test_a_given_expert_keeps_its_score_outside_the_groups():
    scores_TE = torch.rand(T, E)
    chosen_TK = torch.rand(T, E).argsort(1)[:, :K].to(torch.int16)
    values, indices = inside(lambda: torch.topk(scores_TE.masked_fill(scores_TE < 2, 0.0), K).values.clone(),
                             Turn(chosen_TK, complete=True)), chosen_TK.long()
    assert torch.equal(values, scores_TE.gather(1, indices))
