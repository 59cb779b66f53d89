# SPDX-License-Identifier: Apache-2.0
"""AllToAll against plain torch: ranks that share one GPU, and one rank to a GPU."""


import deepspeed.comm as dist
import pytest
import torch
import torch.distributed

from ds_mxfp8_moe.all_to_all import AllToAll
from tests.support import all_to_all_cases as cases
from tests.support.all_to_all_cases import CASES, Call, Case
from tests.support.all_to_all_gpu_cases import BIG_CASES, REPLAYED, TURNS, make, none_wrong, repeated, replayed


def run(case: Case) -> list[str]:
    a2a, call = make(case)
    return [wrong for turn in range(TURNS) for wrong in cases.check(call, a2a, turn)]


@pytest.mark.parametrize("name", [*CASES, *BIG_CASES])
def test_rows_reach_their_experts_and_come_back(pool, name):
    none_wrong(pool, run, (CASES | BIG_CASES)[name])


@pytest.mark.parametrize("name", ["quantize, float scales, bound", "ranks without tokens", "DeepSeek-V2-Lite"])
def test_the_same_bits_again_and_again(pool, name, request):
    none_wrong(pool, repeated, (CASES | BIG_CASES)[name], 5 * request.config.getoption("--stress"))


@pytest.mark.parametrize("name", REPLAYED)
def test_graphs_replay_with_other_tokens_and_routes(pool, name):
    none_wrong(pool, replayed, REPLAYED[name])


def intranode() -> list[str]:
    """As users make it."""
    case, world = CASES["quantize"], dist.get_world_size()
    sizes = {"max_num_tokens": case.max_tokens, "num_experts": world * case.local_experts,
             "experts_per_token": case.top_k, "rank": dist.get_rank(), "world_size": world, "dp_size": 1,
             "hidden_dim": case.hidden, "hidden_dim_bytes": case.hidden, "hidden_dim_scale_bytes": case.scale_bytes}
    with pytest.raises(ValueError, match="dp_size is 2"):
        AllToAll.intranode(**sizes | {"dp_size": 2})
    call = Call(case, torch.device("cuda", torch.cuda.current_device()))
    return cases.check(call, AllToAll.intranode(**sizes), 0)


def test_made_as_by_users(pool):
    none_wrong(pool, intranode)
