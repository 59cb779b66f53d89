# SPDX-License-Identifier: Apache-2.0
"""The table of exchanges over the collective transport, and in a group of one. What the former sends."""

import deepspeed.comm as dist
import pytest

from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.local import Local
from tests.support.conformance import HARD, MX32, MX128, PLAIN, PROBLEMS, Problem, check, check_in_flight
from tests.support.recorded_collectives import steps


def transport() -> Collective:
    return Collective(dist.get_world_group())


def check_collective(name: str) -> None:
    check(PROBLEMS[name], transport(), times=2 if name == "random" else 1)


@pytest.mark.parametrize("ranks, name", [*((2, name) for name in PROBLEMS), *((4, name) for name in HARD)])
def test_same_bits(request, ranks, name):
    request.getfixturevalue(f"ranks{ranks}").run(check_collective, name)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_group_of_one(name):
    check(PROBLEMS[name], Local())


@pytest.mark.parametrize("row_format", [PLAIN, MX32, MX128])
def test_one_message_a_direction_and_one_row_a_token_and_rank(ranks4, row_format):
    problem = Problem(row_format=row_format, top_k=6, local_experts=2, routing="dropped")
    hidden = problem.hidden
    row_bytes = hidden + -(-hidden // row_format.block_size) if row_format.mxfp8 else hidden * 2
    inputs = problem.inputs(4)
    for rank, messages in enumerate(ranks4.run(messages_sent, problem)):
        wanted = [[len(set((expert_TK[t][expert_TK[t] >= 0] // 2).tolist())) for t in range(len(expert_TK))]
                  for expert_TK, _, _ in inputs]
        sent = sum(wanted[rank])
        served = sum((((expert_TK >= 0) & (expert_TK // 2 == rank)).any(1)).sum().item() for expert_TK, _, _ in inputs)
        assert messages == {"plan": [4 * 5 * 8, sent * 6 * 2], "dispatch": [sent * (row_bytes + 6 * 4)],
                            "combine": [served * (row_bytes + 6 * 4)], "dispatch bare": [sent * row_bytes]}


def messages_sent(problem: Problem) -> dict:
    """Bytes of every all-to-all that each step makes on this rank."""
    sent, now, original = {}, [], dist.all_to_all_single

    def counted(output, tensor, *args, **kwargs):
        now.append(tensor.numel() * tensor.element_size())
        return original(output, tensor, *args, **kwargs)

    def told(name: str) -> None:
        sent[name] = list(now)
        now.clear()

    dist.all_to_all_single = counted
    try:
        steps(problem, transport(), told)
    finally:
        dist.all_to_all_single = original
    return sent


def in_flight() -> None:
    check_in_flight(transport())


def test_two_plans_in_flight(ranks4):
    ranks4.run(in_flight)
