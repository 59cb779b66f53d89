# SPDX-License-Identifier: Apache-2.0
"""`expert_turns` on a GPU: the bits of one turn, in less memory."""

import pytest
import torch

from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.transport.local import Local
from tests.support.expert_ffn_cases import RECIPES, formula

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 16384, 2048, 768, 16, 8


def call(turns: int, recipe: str = "hp-128", tokens: int = TOKENS) -> tuple[list[torch.Tensor], int]:
    """The output with the gradients of tokens and routing weights, and the most bytes beside all that was there."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = torch.randn(tokens, HIDDEN, generator=generator, device="cuda", dtype=torch.bfloat16)
    expert_TK = torch.rand(tokens, EXPERTS, generator=generator, device="cuda").topk(TOP_K).indices
    weight_TK = torch.rand(tokens, TOP_K, generator=generator, device="cuda").requires_grad_()
    shapes = {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
    weights = {role: torch.randn(EXPERTS, *shape, generator=generator, device="cuda", dtype=torch.bfloat16).div_(
        shape[1]**0.5).requires_grad_() for role, shape in shapes.items()}
    x = draw.clone().requires_grad_()
    ffn = ExpertFFN(formula("swiglu"), RECIPES[recipe], Local(), EXPERTS, turns=turns)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = ffn(x, Routes(expert_TK=expert_TK, weight_TK=weight_TK, num_experts=EXPERTS), weights)
    grads = torch.autograd.grad(y, [x, weight_TK, *weights.values()], draw)
    return [y.detach(), *grads[:2]], torch.cuda.max_memory_allocated() - before


def test_the_bits_of_one_turn_in_less_memory():
    call(1)  # the workspaces of libraries
    whole, most = call(1)
    parts, less = call(8)
    assert all(map(torch.equal, parts, whole))
    assert less < 0.6 * most, (less, most)


@pytest.mark.parametrize("recipe", ["hp-128", "mxfp8-128", "bf16"])
def test_rows_of_more_than_2_31_values(recipe):
    """A sequence of 128K tokens has them. Each turn has fewer."""
    tokens = 2**31 // HIDDEN // TOP_K + 1000
    torch.cuda.empty_cache()
    whole, _ = call(1, recipe, tokens)
    parts, _ = call(4, recipe, tokens)
    assert all(map(torch.equal, parts, whole))
