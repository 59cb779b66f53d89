# SPDX-License-Identifier: Apache-2.0
"""Classic layers: routes replayed at once give the same bits, and other ones what DeepSpeed's gate does with them."""

import math

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from models import (
    BF16,
    DEFAULT,
    EXPERTS,
    HIDDEN,
    Block,
    Layout,
    SwiGLU,
    make_engine,
    moe_layer,
    parameters,
    train_steps,
)
from rank_pool import reset_deepspeed_groups
from test_recompute import WAYS, model_of

import ds_mxfp8_moe
from ds_mxfp8_moe import record_routes, replay_routes

TOKENS = 40
GATES = {
    "top1, random selection": dict(k=1, capacity_factor=0.5, min_capacity=1),
    "top1, noise": dict(k=1, noisy_gate_policy="RSample", capacity_factor=0.5, min_capacity=1),
    "top1, all tokens": dict(k=1, drop_tokens=False, use_rts=False),
    "top2, sampled": dict(k=2, capacity_factor=0.5, min_capacity=1),
    "top2": dict(k=2, capacity_factor=0.5, min_capacity=1, top2_2nd_expert_sampling=False),
    "top2, all tokens": dict(k=2, drop_tokens=False, top2_2nd_expert_sampling=False),
    "top4": dict(k=4, capacity_factor=0.5, min_capacity=1),
    "top4, all tokens": dict(k=4, drop_tokens=False),
}


def make_block(section: dict, gate: dict) -> Block:
    reset_deepspeed_groups()
    torch.manual_seed(3)
    block = Block(moe_layer(SwiGLU(), dist.get_world_size(), **gate)).to(get_accelerator().current_device_name())
    with torch.no_grad():
        block.moe.deepspeed_moe.gate.wg.weight.mul_(3)
    block.moe.set_deepspeed_parallelism()
    assert ds_mxfp8_moe.convert(block, section).converted == 1
    return block


def outcome(block: Block, used: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(11 + dist.get_rank())  # the gate draws at random
    block.zero_grad()
    x = torch.randn(2, TOKENS // 2, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    inner, x = block.moe.deepspeed_moe, x.to(block.norm.weight.device).requires_grad_()
    y = inner(block.norm(x), used)
    (y * torch.arange(y.numel(), device=y.device).sin().view_as(y)).sum().add(inner.l_aux).backward()
    return {"y": y.detach(), "aux": inner.l_aux.detach(), "counts": inner.exp_counts, "x": x.grad,
            **{name: p.grad for name, p in block.named_parameters()}}


def different(first: dict, second: dict) -> list[str]:
    return [name for name in first if first[name] is not None and not torch.equal(first[name], second[name])]


def at_once(gate: dict) -> list[list[str]]:
    block = make_block(DEFAULT, gate)
    used = (torch.arange(TOKENS, device=block.norm.weight.device) % 3 != 0).long() if gate["k"] == 1 else None
    plain = outcome(block, used)
    # The inner layer is called by itself, so it is the model.
    with record_routes(block.moe.deepspeed_moe) as routes:
        recorded = outcome(block, used)
    assert routes[0].shape == (2, TOKENS // 2, 1, gate["k"]) and int(routes[0].min()) >= 0
    part = routes[0].clone()
    part[0] = -1
    found = [different(plain, recorded)]
    for given in (routes, part):
        with replay_routes(block.moe.deepspeed_moe, given):
            found.append(different(plain, outcome(block, used)))
    return found


@pytest.mark.parametrize("name", GATES)
def test_the_same_bits_at_once(ranks2, name):
    assert ranks2.run(at_once, GATES[name]) == [[[], [], []]] * 2


def by_hand(gate: dict, p_TE: torch.Tensor, expert_TK: torch.Tensor) -> torch.Tensor:
    """The routing weights [T, K] of given experts: 0 where the capacity drops a choice."""
    T, K = expert_TK.shape
    kept_TK = torch.ones(T, K, dtype=torch.bool)
    if gate.get("drop_tokens", True):
        capacity = math.ceil(T / EXPERTS * gate["capacity_factor"] * K)
        for expert in range(EXPERTS):
            rows = [(t, k) for k in range(K) for t in range(T) if expert_TK[t, k] == expert]  # first choices first
            if K > 2:  # then the most probable ones
                rows.sort(key=lambda row: -float(p_TE[row[0], expert]))
            for t, k in rows[capacity:]:
                kept_TK[t, k] = False
    weight_TK = p_TE.gather(1, expert_TK) * kept_TK
    return weight_TK if K == 1 else weight_TK / weight_TK.sum(1, keepdim=True).clamp_min(2**-23)


def elsewhere(gate: dict) -> tuple:
    """Weights and the gate's gradient for random experts, and those of `by_hand`."""
    block = make_block(BF16, gate)
    inner = block.moe.deepspeed_moe
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    expert_TK = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :gate["k"]]
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generator)
    seen, route = [], inner._route
    inner._route = lambda *args: seen.append(route(*args)) or seen[-1]
    with replay_routes(inner, expert_TK[:, None]):
        y_TH = inner(x_TH, None)
    weight_TK = seen[0].weight_TK
    g_TK = torch.arange(weight_TK.numel()).sin().view_as(weight_TK)
    wg = inner.gate.wg.weight
    expected_TK = by_hand(gate, (x_TH @ wg.t()).softmax(1), expert_TK)
    grads = [torch.autograd.grad((one * g_TK).sum(), wg, retain_graph=True)[0] for one in (weight_TK, expected_TK)]
    dropped = torch.equal(seen[0].expert_TK, torch.where(expected_TK > 0, expert_TK, -1))
    assert y_TH.shape == x_TH.shape and float(grads[1].norm()) > 0
    return float((weight_TK - expected_TK).abs().max()), float((grads[0] - grads[1]).norm() / grads[1].norm()), dropped


@pytest.mark.parametrize("name", ["top1, all tokens", "top2", "top2, all tokens", "top4", "top4, all tokens"])
def test_other_experts_get_the_gates_own_weights(ranks2, name):
    for weights, gradient, dropped in ranks2.run(elsewhere, GATES[name]):
        assert weights < 1e-6 and gradient < 1e-5 and dropped


def compiled() -> list[str]:
    """What differs between a compiled layer and the same one before, both with replayed routes."""
    block = make_block(BF16, GATES["top2"])
    inner = block.moe.deepspeed_moe
    given = torch.arange(2 * TOKENS).view(TOKENS, 1, 2) % EXPERTS
    with replay_routes(inner, given):
        plain = outcome(block)
    inner.compile(backend="aot_eager")
    with replay_routes(inner, given):
        found = outcome(block)
    return [name for name, value in plain.items() if value is not None
            and not torch.allclose(value.float(), found[name].float(), atol=1e-5)]


@pytest.mark.slow
def test_compiled_layers(ranks2):
    assert ranks2.run(compiled) == [[], []]


PIPELINE = Layout(stages=2, zero=1, config={"gradient_accumulation_steps": 3}, moe={"drop_tokens": False}, steps=1)
ZERO_2 = Layout(zero=2, dtype="bf16", config={"gradient_accumulation_steps": 2}, steps=1)


def trained(layout: Layout, ways: tuple) -> list[list[str]]:
    """What differs between trainings with other experts, whose layers are recomputed or not."""
    runs = []
    for way in ways:
        reset_deepspeed_groups()
        engine = make_engine(layout, DEFAULT, model_of(layout, way))
        with record_routes(engine) as routes:
            losses = train_steps(engine, layout)
        given = [torch.where(one < 0, -1, (one + 1) % EXPERTS) for one in routes]  # the second layer has top-1
        with replay_routes(engine, given):
            others = train_steps(engine, layout, first=9)
        runs.append({"losses": torch.tensor([step["loss"] for step in losses + others]), **parameters(engine)})
        engine.destroy()
    return [different(runs[0], one) for one in runs[1:]]


def test_recomputations_of_a_pipeline(ranks4):
    assert ranks4.run(trained, PIPELINE, (0, 1)) == [[[]]] * 4


def test_recomputations_in_an_engine(ranks2):
    ways = ("stored", "reentrant", "non-reentrant", "deepspeed", "deepspeed-non-reentrant")
    assert set(ways) < set(WAYS)
    assert ranks2.run(trained, ZERO_2, ways) == [[[]] * 4] * 2
