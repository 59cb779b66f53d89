# SPDX-License-Identifier: Apache-2.0
"""Checks of the NVLink transport beyond conformance.py, on any device: capacities, peers that fail, whole layers."""

import dataclasses
import time

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.checkpoint import checkpoint

from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.transport import ROW_ALIGNMENT
from ds_mxfp8_moe.transport.deadline import PeerError
from ds_mxfp8_moe.transport.nvlink import NVLink
from tests.support.conformance import BF16, MX32, PLAIN, TOKENS, Problem, expected, on_device, poisoned, same, until
from tests.support.expert_ffn_cases import formula
from tests.support.expert_ffn_cases import problem as ffn_problem

NAME = "block.3.moe"


def check_static(problem: Problem, exchange: NVLink, kept: list | None = None) -> None:
    """With a capacity, the same rows come first, all others have weights of 0, and the host does not wait.

    kept: the ids of every rank, with -1 for choices that the transport should drop.
    """
    memory, reports = exchange.memory, exchange.memory.reports
    want, waits = expected(problem, memory.rank, memory.world_size, experts=kept), reports.host_waits
    (_, x_TH, weight_TK), (y_PH, number_P) = (on_device(want[key]) for key in ("inputs", "answers"))
    (expert_TK, ) = on_device(problem.inputs(memory.world_size)[memory.rank][:1])
    P = want["end"]
    with poisoned():
        plan = exchange.plan(expert_TK, problem.local_experts)
        assert plan.num_rows >= P
        x_PH, weight_P = exchange.dispatch(plan, x_TH, problem.row_format, weight_TK)
        more = plan.num_rows - P
        y_PH = torch.cat([y_PH[:P], y_PH.new_full((more, problem.hidden), float("nan"))])
        number_P = torch.cat([number_P[:P], number_P.new_full((more, ), float("nan"))])
        y_TH, number_TK = exchange.combine(plan, y_PH, problem.row_format, problem.dtype, number_P)
    reports.check()
    assert reports.host_waits == waits
    assert plan.group_ends_E.tolist() == want["ends"]
    same("x", want["x"][:P], until(x_PH, P)), same("weight", want["weight"][:P], weight_P[:P])
    assert not weight_P[P:].any()
    same("y", want["y"], y_TH), same("number", want["number"], number_TK)


def those_that_fit(experts: list, local_experts: int, room: int) -> list:
    """The ids of every rank, with -1 for the choices that NVLink drops if each rank has room for `room` rows."""
    kept = [expert_TK.clone() for expert_TK in experts]

    def padded(rows):
        return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT

    for first in range(0, local_experts * len(experts), local_experts):
        sizes = {e: sum(int((expert_TK == e).sum()) for expert_TK in experts)
                 for e in range(first, first + local_experts)}
        if sum(map(padded, sizes.values())) <= room:
            continue
        limit = max(limit for limit in range(0, room + 1, ROW_ALIGNMENT)
                    if sum(min(padded(size), limit) for size in sizes.values()) <= room)
        left = room - sum(min(padded(size), limit) for size in sizes.values())
        for e, size in sizes.items():
            if size <= limit:
                continue
            most = limit
            if left >= ROW_ALIGNMENT:
                most, left = limit + ROW_ALIGNMENT, left - ROW_ALIGNMENT
            most, before = min(size, most), 0
            for ids in kept:
                mine = (ids.reshape(-1) == e).nonzero().squeeze(1)
                stays = (before + len(mine)) * most // size - before * most // size
                before += len(mine)
                ids.view(-1)[mine[stays:]] = -1
    return kept


def count_dropped(experts: list, kept: list, rank: int, local_experts: int) -> int:
    """How many choices for this rank's experts were dropped."""
    return sum(int(((a != b) & (a // local_experts == rank)).sum()) for a, b in zip(experts, kept, strict=True))


def check_dropped(case: Problem, exchange: NVLink) -> None:
    """Where more rows come than fit, the bits are those of the routing without the dropped choices. They are counted.

    Dispatch and combine over one plan, with and without weights, are what forward and backward consist of.
    """
    memory, local = exchange.memory, case.local_experts
    experts, before = [inputs[0] for inputs in case.inputs(memory.world_size)], exchange.dropped
    (ids, ) = on_device((experts[memory.rank], ))
    kept = those_that_fit(experts, local, exchange.plan(ids, local).num_rows)
    counts = [count_dropped(experts, kept, rank, local) for rank in range(memory.world_size)]
    assert max(counts) > 0
    check_static(case, exchange, kept)
    check_static(dataclasses.replace(case, row_format=PLAIN if case.row_format.mxfp8 else MX32), exchange, kept)
    get_accelerator().synchronize()
    assert exchange.dropped - before == 3 * counts[memory.rank]


LATE = 1


def failing(phase: str, case: Problem, exchange: NVLink) -> tuple | None:
    """All ranks but LATE come to `phase`. Returns what they miss and raise, after how long, and in which epoch."""
    rank, memory, told = dist.get_rank(), exchange.memory, None
    expert_TK, x_TH, _ = on_device(case.inputs(dist.get_world_size())[rank])
    plan = None if phase == "counts" else exchange.plan(expert_TK, case.local_experts)
    y_PH = None if phase != "combine" else exchange.dispatch(plan, x_TH, case.row_format)[0]
    get_accelerator().synchronize()
    if rank != LATE:
        start, epoch = time.monotonic(), memory.epoch
        with pytest.raises(PeerError) as caught:
            if phase == "counts":
                exchange.plan(expert_TK, case.local_experts)
            elif phase == "dispatch":
                exchange.dispatch(plan, x_TH, case.row_format)
            else:
                exchange.combine(plan, y_PH, case.row_format, case.dtype)
            get_accelerator().synchronize()
            memory.reports.check()
        told = (caught.value.missing, str(caught.value), time.monotonic() - start, epoch)
        with pytest.raises(PeerError):  # the group stays failed, at once
            exchange.plan(expert_TK, case.local_experts)
    get_accelerator().synchronize()
    dist.barrier()
    return told


def named_in_time(results: list, phase: str, least: float, most: float) -> None:
    """results: what `failing` returned on every rank."""
    for rank, told in enumerate(results):
        if rank == LATE:
            assert told is None
            continue
        missing, text, seconds, epoch = told
        assert missing == (LATE, ), text
        for part in (f"rank {rank} ", f"rank {LATE}", f"exchange {epoch},", f"'{phase}' of {NAME} until the deadline"):
            assert part in text, text
        assert least < seconds < most


CONFUSIONS = ("order", "width", "dtype", "dtype as wide", "weights", "another plan")


def confused(how: str, case: Problem, exchange: NVLink) -> str | None:
    """Returns what this rank raises if rank 0 makes another call than the others."""
    rank, memory = dist.get_rank(), exchange.memory
    expert_TK, x_TH, weight_TK = on_device(case.inputs(dist.get_world_size())[rank])
    plan = exchange.plan(expert_TK, case.local_experts)
    y_PH = torch.zeros(plan.num_rows, case.hidden, dtype=case.dtype, device=memory.device)
    get_accelerator().synchronize()
    try:
        if rank != 0:
            exchange.dispatch(plan, x_TH, PLAIN)
        elif how == "order":
            exchange.combine(plan, y_PH, PLAIN, case.dtype)
        elif how == "width":
            exchange.dispatch(plan, x_TH[:, :64].contiguous(), PLAIN)
        elif how == "dtype":
            exchange.dispatch(plan, x_TH.float(), PLAIN)
        elif how == "dtype as wide":
            exchange.dispatch(plan, x_TH.half(), PLAIN)
        elif how == "weights":
            exchange.dispatch(plan, x_TH, PLAIN, weight_TK)
        else:
            exchange.plan(expert_TK, case.local_experts)
        get_accelerator().synchronize()
        memory.reports.check()
    except PeerError as failure:
        return str(failure)
    return None


def all_noticed(texts: list) -> None:
    """texts: what `confused` returned on every rank."""
    for rank, text in enumerate(texts):
        assert text is not None, f"rank {rank} noticed nothing: {texts}"
        assert f"rank {rank}" in text and NAME in text
    assert any("the same calls in the same order" in text for text in texts), texts


def layer_of_this_rank(transport, recipe, name: str = "swiglu", expert_ids: list | None = None,
                       **kwargs) -> tuple:
    """Two experts a rank: (the layer as a function of x and the routing weights, its leaves by name, y's gradient).

    expert_ids: of every rank, instead of those of the routing.
    """
    world, rank, device = dist.get_world_size(), dist.get_rank(), get_accelerator().current_device_name()
    experts, xs, grads, routes = ffn_problem(world, name, num_experts=2 * world, dtype=BF16,
                                             **{"tokens": TOKENS} | kwargs)
    weights = {role: [torch.nn.Parameter(e[role].to(device)) for e in experts[2 * rank:2 * rank + 2]]
               for role in experts[0]}
    expert_TK, weight_TK = (t.to(device) for t in routes[rank])
    if expert_ids is not None:
        expert_TK = expert_ids[rank].to(device)
    ffn = ExpertFFN(formula(name), recipe, transport, 2)

    def forward(x, weight):
        return ffn(x, Routes(expert_TK=expert_TK, weight_TK=weight, num_experts=2 * world), weights)

    leaves = {"x": xs[rank].to(device).requires_grad_(), "weight": weight_TK.requires_grad_(),
              **{f"{role} {e}": value for role, values in weights.items() for e, value in enumerate(values)}}
    return forward, leaves, grads[rank].to(device)


def layer(transport, recipe, name: str = "swiglu", calls: int = 1, recompute: bool = False, **kwargs) -> dict:
    """A layer's output and every gradient of this rank. Runs `calls` forwards and differentiates the last one.
    recompute: whether backward runs the forward once more."""
    forward, leaves, grad = layer_of_this_rank(transport, recipe, name, **kwargs)
    for _ in range(calls):
        if recompute:
            y = checkpoint(forward, leaves["x"], leaves["weight"], use_reentrant=False)
        else:
            y = forward(leaves["x"], leaves["weight"])
    y.backward(grad)
    return {"y": y.detach(), **{leaf: value.grad for leaf, value in leaves.items()}}


def check_layer_dropped(recipe, oracle, exchange) -> None:
    """A layer whose last rank gets more rows than fit computes what `oracle` does without the dropped choices."""
    world, rank, device = dist.get_world_size(), dist.get_rank(), get_accelerator().current_device_name()
    tokens, generator, ids = 300, torch.Generator().manual_seed(3), []
    for _ in range(world):
        random, either = (torch.rand(tokens, n, generator=generator).argsort(dim=1)[:, :2] for n in (2 * world, 2))
        hot = torch.rand(tokens, 1, generator=generator) < 0.8
        ids.append(torch.where(hot, either + 2 * world - 2, random))
    kept = those_that_fit(ids, 2, exchange.plan(ids[rank].to(device), 2).num_rows)
    assert count_dropped(ids, kept, world - 1, 2) > 0
    want, got = (layer(transport, recipe, expert_ids=experts, tokens=(tokens, ) * world)
                 for transport, experts in ((oracle, kept), (exchange, ids)))
    for key, value in want.items():
        same(key, value, got[key])
    assert not got["weight"][(kept[rank] < 0).to(device)].any()
