# SPDX-License-Identifier: Apache-2.0
"""Stacked experts that are spread over two ranks compute what transformers' own do, for each form of the contract."""

import copy

import deepspeed.comm as dist
import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.aria.configuration_aria import AriaTextConfig
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.config import parse
from ds_mxfp8_moe.engine.convert import convert_layers
from ds_mxfp8_moe.engine.spreading import share
from ds_mxfp8_moe.layers.experts import spread
from ds_mxfp8_moe.recognition.stacked import Layout
from tests.support.invented_moe import InventedConfig, InventedExperts

E, K, H, F = 8, 2, 64, 96
FORMS = {  # gated; interleaved, transposed and biased; without a gate; of no kernel's formula; transposed
    "mixtral": lambda: MixtralExperts(MixtralConfig(num_local_experts=E, hidden_size=H, intermediate_size=F)),
    "gpt_oss": lambda: GptOssExperts(GptOssConfig(num_local_experts=E, hidden_size=H, intermediate_size=F)),
    "nemotron_h": lambda: NemotronHExperts(NemotronHConfig(n_routed_experts=E, hidden_size=H,
                                                           moe_intermediate_size=F)),
    "own function": lambda: own_experts(False),
    "own function, norm": lambda: own_experts(True),
    "aria": lambda: AriaExperts(AriaTextConfig(moe_num_experts=E, hidden_size=H, intermediate_size=F)),
}
LENGTHS = {"even": (24, 24), "uneven": (5, 19), "none on a rank": (0, 11), "none": (0, 0)}


def own_experts(normed: bool) -> nn.Module:
    """Experts of no release: another function between the GEMMs, and a norm behind them or none."""
    experts = InventedExperts(InventedConfig(hidden_size=H, expert_size=F, experts_in_all=E))
    experts.has_post_expert_norm = normed  # which not every release sets
    if normed:
        experts.post_expert_norm = nn.RMSNorm(H, eps=1e-3)
    return experts


class Block(nn.Module):
    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts = experts

    def forward(self, *args) -> torch.Tensor:
        return self.experts(*args)


def blocks(form: str, section: dict, dtype=torch.float32) -> tuple[nn.Module, nn.Module]:
    """transformers' experts with random weights, and the same spread over all ranks."""
    torch.manual_seed(0)
    experts = FORMS[form]().to(dtype)
    experts.config._experts_implementation = "eager"
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    own, block, size, rank = Block(copy.deepcopy(experts)), Block(experts), dist.get_world_size(), dist.get_rank()
    layout = Layout.of(experts)
    whole = [getattr(experts, name) for name in layout.names]
    spread(block, experts, share(layout, whole, E // size, rank), size, rank)
    experts.ep_group = dist.get_world_group()
    convert_layers(block, parse({"mxfp8_moe": {"enabled": True, **section}}))
    return own, block


def routed(tokens: int, seed: int, dtype=torch.float32, expert: int | None = None) -> tuple:
    """Tokens, choices and weights. `expert`: the first choice of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(tokens, H, generator=generator).to(dtype)
    scores_TE = torch.rand(tokens, E, generator=generator)
    if expert is not None:
        scores_TE[:, expert] += 1
    weight_TK, expert_TK = scores_TE.topk(K)
    return x_TH, expert_TK, weight_TK


def gradients(block: nn.Module, x_TH, expert_TK, weight_TK) -> dict[str, torch.Tensor]:
    """The output and all gradients. Those of parameters are sums over ranks, as an engine's."""
    x_TH, weight_TK = x_TH.clone().requires_grad_(), weight_TK.clone().requires_grad_()
    y_TH = block(x_TH, expert_TK, weight_TK)
    upstream_TH = torch.randn(y_TH.shape, generator=torch.Generator().manual_seed(9)).to(y_TH.dtype)
    named = {"input": x_TH, "weights": weight_TK, **dict(block.experts.named_parameters())}
    if y_TH.requires_grad:
        grads = torch.autograd.grad(y_TH, list(named.values()), upstream_TH)
    else:  # transformers, without tokens
        grads = [torch.zeros_like(value) for value in named.values()]
    return {"output": y_TH.detach(), **dict(zip(named, grads, strict=True))}


def compared(form: str, section: dict, tokens: tuple, **how) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a result of transformers and ours."""
    own, block = blocks(form, section, how.get("dtype", torch.float32))
    rank, layout = dist.get_rank(), block.experts.layout
    given = routed(tokens[rank], rank, **how)
    theirs, ours, again = gradients(own, *given), gradients(block, *given), gradients(block, *given)
    assert all(torch.equal(ours[name], again[name]) for name in ours)  # the same bits
    up, down = layout.names
    for name, value in theirs.items():
        if name not in ("output", "input", "weights"):
            dist.all_reduce(value)
    first, count = block.ep_rank * block.num_local_experts, block.num_local_experts
    parts = layout.split(*(theirs.pop(name).narrow(0, first, count) for name in (up, down)))
    pairs = {name: (part, ours.pop(name)) for name, part in zip(("w1", "w2", "w3"), parts, strict=True)}
    for name, value in ours.items():
        if name.endswith(("_bias", "norm.weight")):
            dist.all_reduce(value)
        pairs[name] = theirs[name], value
    return pairs


def in_float32(form: str, tokens: tuple, **how) -> None:
    for name, (expected, got) in compared(form, {"recipe": "bf16"}, tokens, **how).items():
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", LENGTHS)
def test_computes_what_transformers_does(ranks2, form, length):
    ranks2.run(in_float32, form, LENGTHS[length])


def test_all_tokens_to_one_expert(ranks2):
    ranks2.run(in_float32, "mixtral", (33, 7), expert=5)


def nearness(own: nn.Module, block: nn.Module, given: tuple) -> list[tuple[float, float]]:
    """How near transformers' experts, and ours, are to transformers' in float32: outputs and gradients, in dB."""
    names = "output", "input", "weights"
    theirs, ours = gradients(own, *given), gradients(block, *given)
    exact = gradients(own.float(), given[0].float(), *given[1:])
    assert all(ours[name].dtype == theirs[name].dtype for name in names)
    return [(float(sqnr_db(exact[name], theirs[name])), float(sqnr_db(exact[name], ours[name]))) for name in names]


def in_bfloat16() -> list[tuple[float, float]]:
    rank, dtype = dist.get_rank(), torch.bfloat16
    return nearness(*blocks("mixtral", {"recipe": "bf16"}, dtype), routed(64, rank, dtype))


def test_in_bfloat16_it_is_no_farther_from_the_exact_answer_than_transformers(ranks2):
    for found in ranks2.run(in_bfloat16):
        assert all(ours >= max(45, theirs - 0.5) for theirs, ours in found), found


def dtypes_apart(tokens: torch.dtype, experts: torch.dtype) -> list[tuple[float, float]]:
    own, block = blocks("mixtral", {"recipe": "bf16"}, experts)
    return nearness(own.to(tokens), block, routed(64, dist.get_rank(), tokens))


@pytest.mark.parametrize("tokens, experts, least", [(torch.float32, torch.bfloat16, 100),
                                                    (torch.bfloat16, torch.float32, 40),
                                                    (torch.float16, torch.bfloat16, 40)])
def test_experts_compute_in_the_dtype_of_the_tokens(ranks2, tokens, experts, least):
    for found in ranks2.run(dtypes_apart, tokens, experts):
        assert min(ours for _, ours in found) > least, found


def without_experts() -> None:
    own, block = blocks("mixtral", {"recipe": "bf16"})
    x_TH, expert_TK, weight_TK = routed(12, dist.get_rank())
    expert_TK[::3, 1] = E  # no expert
    expert_TK[4] = E
    torch.testing.assert_close(block(x_TH, expert_TK, weight_TK), own(x_TH, expert_TK, weight_TK))
    assert not block(x_TH, expert_TK, weight_TK)[4].any()


def test_an_id_past_the_last_expert_stands_for_none(ranks2):
    ranks2.run(without_experts)


def odd_inputs() -> None:
    own, block = blocks("mixtral", {"recipe": "bf16"})
    x_TH, expert_TK, weight_TK = routed(16, dist.get_rank())
    x_TH[3] = float("nan")
    x_TH[5] = float("inf")
    x_HT = x_TH.t().contiguous().t()
    y_TH, expected_TH = block(x_HT, expert_TK.int(), weight_TK.t().contiguous().t()), own(x_TH, expert_TK, weight_TK)
    fine = [t for t in range(16) if t not in (3, 5)]
    assert not y_TH[[3, 5]].isfinite().any()
    torch.testing.assert_close(y_TH[fine], expected_TH[fine])


def test_nan_stays_in_its_token_and_strides_do_not_matter(ranks2):
    ranks2.run(odd_inputs)
