# SPDX-License-Identifier: Apache-2.0
"""The kernels of a router on a GPU."""

import pytest
import torch
from route_cases import CASES, Case, check_odd_scores, check_route


@pytest.mark.parametrize("name", CASES)
def test_routes_as_deepspeed(name):
    check_route("cuda", CASES[name])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("tokens, experts, top_k", [(16384, 128, 8), (5001, 64, 6), (33, 8, 2), (100, 1024, 32)])
def test_real_sizes(tokens, experts, top_k, score):
    check_route("cuda", Case(tokens, experts, top_k, score))
    check_route("cuda", Case(tokens, experts, top_k, score, normalize=False, bias=True))


def test_odd_scores():
    check_odd_scores("cuda")


def test_half_precision_takes_one_launch_each_way():
    case = Case(4096, 64, 6, dtype=torch.bfloat16)
    router, x = case.router("cuda"), torch.randn(4096, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    from ds_mxfp8_moe.layers.router import route
    route(router, x, None)[0].sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        route(router, x, None)[0].backward(torch.ones(4096, 6, device="cuda"))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert sum("_route" in name for name in names) == 2
    assert not any("softmax" in name.lower() or "topk" in name.lower() for name in names), names
