# SPDX-License-Identifier: Apache-2.0
"""AllToAll over NVSHMEM: the bits of AllToAll over peer memory, for PEs that share one GPU and for one PE to a GPU.
NVSHMEM puts over peer memory here.

The cases and the checks are those of test_all_to_all_gpu.py.
"""

import os
from datetime import timedelta
from functools import cache
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.transport import nvshmem
from ds_mxfp8_moe.transport.deadline import GRACE_SECONDS, PeerError
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.support import all_to_all_cases as cases
from tests.support import all_to_all_gpu_cases as peers
from tests.support.all_to_all_cases import CASES, Call, Case
from tests.support.all_to_all_gpu_cases import BIG_CASES, NVSHMEM, REPLAYED, SECONDS, none_wrong
from tests.support.rank_pool import set_timeout

DEADLINE = timedelta(seconds=12)


@cache
def group():
    os.environ.update(NVSHMEM)
    group = torch.distributed.new_group()
    set_timeout(DEADLINE, group)
    return group


@cache
def memory() -> PeerMemory:
    """The staging of all cases in the symmetric heap, as large as they need."""
    memory = nvshmem.memory_of(group(), "the test")
    memory.reserve(80 << 20, "all cases")
    return memory


def over_nvshmem(function, *args) -> list[str]:
    """What `function` of test_all_to_all_gpu.py finds wrong over NVSHMEM."""
    with mock.patch.object(peers, "memory", memory):
        return function(*args)


def same_bits(case: Case) -> list[str]:
    """What is wrong over NVSHMEM, and what differs from peer memory."""
    call, other = (Call(case, torch.device("cuda", torch.cuda.current_device())) for _ in range(2))
    a2a, over_peers = cases.make(case, memory()), cases.make(case, peers.memory())
    wrong = []
    for turn in range(peers.TURNS):
        wrong += cases.check(call, a2a, turn) + cases.check(other, over_peers, turn)
        for one, two in ((call.counts, other.counts), (call.out, other.out), (call.scales, other.scales),
                         (call.given["out_tokens"], other.given["out_tokens"])):
            if one is not None and not torch.equal(bits(one), bits(two)):
                wrong.append("the bits of peer memory differ")
    return wrong


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", [*CASES, *BIG_CASES])
def test_same_bits_as_over_peer_memory(pool, name):
    none_wrong(pool, same_bits, (CASES | BIG_CASES)[name])


@pytest.mark.parametrize("name", ["quantize, float scales, bound", "ranks without tokens", "DeepSeek-V2-Lite"])
def test_the_same_bits_again_and_again(pool, name, request):
    none_wrong(pool, over_nvshmem, peers.repeated, (CASES | BIG_CASES)[name], request.config.getoption("--stress"))


@pytest.mark.parametrize("name", REPLAYED)
def test_graphs_replay_with_other_tokens_and_routes(pool, name):
    none_wrong(pool, over_nvshmem, peers.replayed, REPLAYED[name])


def internode() -> list[str]:
    """As users make it."""
    case, world = CASES["quantize"], dist.get_world_size()
    a2a = AllToAll.internode(case.max_tokens, world * case.local_experts, case.top_k, dist.get_rank(), world, 1,
                             case.hidden, case.hidden, case.scale_bytes, group())
    call = Call(case, torch.device("cuda", torch.cuda.current_device()))
    return cases.check(call, a2a, 0)


def test_made_as_by_users(pool):
    none_wrong(pool, internode)


# ---------------------------------------------------------------- what fails, each in ranks of its own


def stalled(gone: int) -> str | None:
    a2a, call = cases.make(Case(), memory()), Call(Case(), torch.device("cuda", torch.cuda.current_device()))
    wrong = cases.check(call, a2a, 0)
    assert not wrong, wrong
    dist.barrier()
    text = None
    if dist.get_rank() != gone:
        with pytest.raises(PeerError) as caught:
            call.dispatch(a2a)
            torch.cuda.synchronize()
            a2a.check()
        text = str(caught.value)
    dist.barrier()
    return text


def test_a_rank_that_stalls_is_named(four_over_nvshmem_of_a_case):
    answers = four_over_nvshmem_of_a_case.run(stalled, 3, seconds=SECONDS + DEADLINE.total_seconds() + GRACE_SECONDS)
    assert answers[3] is None
    assert all("AllToAll.dispatch" in text and "until the deadline, for rank 3" in text for text in answers[:3])
