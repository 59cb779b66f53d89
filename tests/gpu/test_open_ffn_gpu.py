# SPDX-License-Identifier: Apache-2.0
"""OpenFFN with the kernels, over NCCL and on one rank, beside plain float32 torch on the CPU."""

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.open_ffn import OpenFFN
from ds_mxfp8_moe.transport.collective import Collective
from tests.support import open_ffn_cases
from tests.support.expert_ffn_cases import RECIPES, problem, transport
from tests.support.open_ffn_cases import LEAST, Model, flat
from tests.support.slow import WIDE, slow_unless


def check(ranks, recipe_name, case, least, **kwargs):
    return open_ffn_cases.assert_near_plain_torch(ranks, RECIPES[recipe_name], case, least, device="cuda", **kwargs)


@pytest.mark.parametrize("case, recipe_name", slow_unless(
    lambda case, recipe_name: case == "normed" or recipe_name == "hp-128",
    ((case, recipe_name) for case in ("in_turn", "mlp", "normed", "softplus")
     for recipe_name in ("bf16", "hp-32", "hp-128", "mxfp8-32", "mxfp8-128", "all-wires-mxfp8"))))
def test_beside_plain_torch(gpu_ranks, case, recipe_name):
    least = 35 if recipe_name == "bf16" else LEAST
    check(gpu_ranks, recipe_name, case, least, bias=True, adapted=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("recipe_name", ["bf16", "hp-128"])
def test_other_dtypes(gpu_ranks, recipe_name, dtype):
    check(gpu_ranks, recipe_name, "normed", 40 if recipe_name == "bf16" else LEAST, dtype=dtype)


@pytest.mark.parametrize("recipe_name", [
    pytest.param("bf16", marks=WIDE), pytest.param("hp-32", marks=WIDE), "hp-128"])
@pytest.mark.parametrize("keys", [{"routing": "dropped"}, {"routing": "one-expert"}, {"routing": "nowhere"},
                                  {"tokens": (0, 20, 3, 7)}, {"tokens": (0, 0, 0, 0)}], ids=str)
def test_padding_and_hard_routings(gpu_ranks, keys, recipe_name):
    """The hostile formula computes NaN in rows of zeros, and memory behind the last group holds anything."""
    least = 60 if recipe_name == "bf16" else LEAST - 2
    for result in check(gpu_ranks, recipe_name, "hostile", least, **keys):
        assert all(one.isfinite().all() for one in flat(result))


@pytest.mark.parametrize("recipe_name", ["hp-128", "mxfp8-32"])
def test_every_way_to_run_gives_the_same_bits(gpu_ranks, recipe_name):
    keys = dict(bias=True, dtype=torch.bfloat16, device="cuda")
    wanted = open_ffn_cases.run(gpu_ranks, RECIPES[recipe_name], "normed", **keys)
    for how in (None, "reentrant", "not reentrant"):
        results = open_ffn_cases.run(gpu_ranks, RECIPES[recipe_name], "normed", how=how, **keys)
        for one, other in zip(wanted, results, strict=True):
            assert all(map(torch.equal, flat(one), flat(other)))


def run_without_waiting(recipe):
    """Forward and backward with CUDA's sync-debug mode on, but in the one read of counts that is named."""
    read_counts, world, rank = Collective._read_counts, dist.get_world_size(), dist.get_rank()
    experts, xs, grads, routes = problem(world, "swiglu", dtype=torch.bfloat16, bias=True)
    local, model = len(experts) // world, Model("normed").cuda()
    weights = {role: torch.stack([e[role] for e in experts[:local]]).cuda().requires_grad_() for role in experts[0]}
    x, weight = xs[rank].cuda().requires_grad_(), routes[rank][1].cuda().requires_grad_()
    expert_TK, grad = routes[rank][0].cuda(), grads[rank].cuda()
    ffn = OpenFFN(model.formula(), recipe, transport(world), local)

    def named(self, counts, meanwhile):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read_counts(self, counts, meanwhile)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    Collective._read_counts = named
    try:
        for mode in ("default", "error"):  # the first time, kernels are compiled
            torch.cuda.set_sync_debug_mode(mode)
            y = ffn(x, Routes(expert_TK=expert_TK, weight_TK=weight, num_experts=len(experts)), weights)
            y.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        Collective._read_counts = read_counts
    return bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize("recipe_name", ["hp-128", "mxfp8-32", "bf16"])
def test_the_host_waits_for_the_device_in_one_place_only(gpu_ranks, recipe_name):
    assert all(gpu_ranks.run(run_without_waiting, RECIPES[recipe_name]))
