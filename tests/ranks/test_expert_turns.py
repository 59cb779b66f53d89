# SPDX-License-Identifier: Apache-2.0
"""`expert_turns`: a rank's tokens pass their experts in several parts, whose activations exist one part at a time."""

from unittest import mock

import deepspeed.comm as dist
import peft
import pytest
import torch

from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn import expert_ffn
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.transport.local import Local
from tests.support.autoep_models import batch, engine_of, model
from tests.support.expert_ffn_cases import RECIPES, formula, problem
from tests.support.slow import slow_except


def call(recipe: str, turns: int, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """The output with the gradients of tokens and routing weights, those of the experts' weights, and the most bytes
    that autograd kept at a time."""
    experts, (x, ), (g, ), (routes, ) = problem(1, "swiglu", dtype=torch.bfloat16, tokens=(tokens, ))
    stacks = {role: torch.stack([e[role] for e in experts]).float().requires_grad_() for role in experts[0]}
    x, weight_TK = x.float().requires_grad_(), routes[1].requires_grad_()
    kept = []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        y = ExpertFFN(formula("swiglu"), RECIPES[recipe], Local(), 8, turns=turns)(
            x, Routes(expert_TK=routes[0], weight_TK=weight_TK, num_experts=8), stacks)
    found = torch.autograd.grad(y, [x, weight_TK, *stacks.values()], g.float())
    inputs = {t.untyped_storage().data_ptr() for t in (x, weight_TK, routes[0], *stacks.values())}
    rows = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return [y.detach(), *found[:2]], list(found[2:]), sum(n for place, n in rows.items() if place not in inputs)


@pytest.mark.parametrize("recipe", ["mxfp8-128", "bf16"])
@pytest.mark.parametrize("turns, tokens", [(3, 50), (4, 2), (2, 0)])
def test_turns_compute_as_one(recipe, turns, tokens):
    whole, of_weights, kept = call(recipe, 1, tokens)
    parts, of_parts, kept_by_parts = call(recipe, turns, tokens)
    assert all(map(torch.equal, parts, whole))
    for found, expected in zip(of_parts, of_weights, strict=True):
        # Blocks of the operands of MXFP8's weight gradients end with a turn.
        assert sqnr_db(expected, found) >= (100 if recipe == "bf16" else 25)
    assert kept_by_parts == 0
    assert kept > 0 or tokens == 0


def losses(turns: int, stage: int, checkpointing: bool, lora: bool) -> tuple[list[float], int]:
    """Of micro-batches whose lengths differ between ranks, and how many turns there were."""
    net = model(use_cache=False)
    if checkpointing:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        net = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False,
                                                       target_parameters=["experts.gate_up_proj"]))
    section = {"enabled": True, "min_tokens_per_expert": 0, "expert_turns": turns}
    found = engine_of(net, section, stage, 2, gradient_accumulation_steps=2)
    said = []
    with mock.patch.object(expert_ffn, "checkpoint", wraps=expert_ffn.checkpoint) as turn:
        for step in range(4):
            ids = batch(step, length=3 + 13 * ((step + dist.get_rank()) % 2))
            loss = found(input_ids=ids, labels=ids).loss
            found.backward(loss)
            found.step()
            said.append(loss.item())
    found.destroy()
    return said, turn.call_count


CASES = {"zero2": (2, False, False), "zero1-checkpointing": (1, True, False), "zero3": (3, False, False),
         "lora": (1, True, True)}


@pytest.mark.parametrize("case", slow_except(CASES, "zero2"))
def test_engines_train_alike(ranks2, case):
    in_one, in_three = (ranks2.run(losses, turns, *CASES[case]) for turns in (1, 3))
    for (whole, none), (parts, turns) in zip(in_one, in_three, strict=True):
        assert none == 0 and turns >= 4 * 2 * 3  # forwards, layers, turns
        assert parts[:2] == whole[:2]  # the first step: the forward has the same bits
        assert parts[2:] == pytest.approx(whole[2:], rel=1e-3)
