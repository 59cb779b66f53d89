# SPDX-License-Identifier: Apache-2.0
"""Checks of the NVLink transport against the collective transport's plain path, on any device.

Every function here runs on a rank, makes the whole exchange by both transports and compares their bits.
"""

import dataclasses
import time
from collections.abc import Callable

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from permute_cases import Problem, poisoned
from permute_cases import bits as bits_of_rows
from test_expert_ffn import formula
from test_expert_ffn import problem as ffn_problem
from torch.utils.checkpoint import checkpoint

from ds_mxfp8_moe.expert_ffn import ExpertFFN
from ds_mxfp8_moe.kept_weights import KeptWeights
from ds_mxfp8_moe.mx import MXTensor
from ds_mxfp8_moe.routing import Routes
from ds_mxfp8_moe.transport import ROW_ALIGNMENT, Wire
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.deadline import PeerFailure
from ds_mxfp8_moe.transport.nvlink import NVLink

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, MX32, MX128 = Wire(False), Wire(True), Wire(True, 128)
FLOOR32, FLOOR128 = Wire(True, 32, "floor"), Wire(True, 128, "floor")
TOKENS = (37, 13, 0, 50, 5, 64, 1, 70)  # of up to eight ranks
NAME = "block.3.moe"


@dataclasses.dataclass(frozen=True)
class Case(Problem):
    """An exchange of rows of all magnitudes. Some values are zero, subnormal or not finite."""

    tokens: tuple = TOKENS
    not_finite: bool = True
    weights: bool = True
    every_value: bool = False  # the experts of each rank answer every number of 16 bits


CASES = {
    "random": Case(),
    "mxfp8": Case(wire=MX32, top_k=3),
    "blocks of 128": Case(wire=MX128, top_k=3),
    "floor": Case(wire=FLOOR32, hidden=64, dtype=FP16),
    "floor, blocks of 128": Case(wire=FLOOR128, hidden=544, dtype=FP32, y_dtype=BF16),
    "skewed": Case(routing="skewed", wire=MX128, top_k=3, hidden=160),
    "dropped": Case(routing="dropped", wire=MX32, top_k=5, hidden=512),
    "dropped, plain": Case(routing="dropped", top_k=4, hidden=1056),
    "one expert": Case(routing="one expert", wire=MX128, hidden=32),
    "one rank": Case(routing="one rank", wire=MX32),
    "nowhere": Case(routing="nowhere", wire=MX128),
    "nobody has tokens": Case(tokens=(0, ) * 8, wire=MX128),
    "one rank has tokens": Case(tokens=(0, 77, 0, 0, 0, 0, 0, 0), top_k=2),
    "one token each": Case(tokens=(1, ) * 8, top_k=1, local_experts=1, wire=MX32),
    "one choice a token": Case(top_k=1, hidden=2336),
    "one choice a token, mxfp8": Case(top_k=1, hidden=1568, wire=MX32, tokens=(9, 4, 3, 2, 0, 1, 5, 7)),
    "one choice a token, blocks of 128": Case(top_k=1, hidden=4640, wire=MX128, tokens=(3, 4, 1, 0, 2, 0, 5, 6)),
    "one choice a token, float32 answers": Case(top_k=1, hidden=1056, wire=MX128, y_dtype=FP32),
    "more choices than experts": Case(top_k=8, local_experts=1, wire=MX128, hidden=64),
    "more rows than a tile": Case(tokens=(150, 1, 2, 140, 0, 0, 9, 150), local_experts=1, wire=MX128, hidden=32,
                                  top_k=2),
    "many experts": Case(local_experts=40, top_k=8, hidden=64),
    "many scales": Case(wire=MX32, hidden=1056, tokens=(9, 4, 3, 2, 0, 1, 5, 7), top_k=6, dtype=FP16),
    "many scales, blocks of 128": Case(wire=MX128, hidden=4640, tokens=(3, 4, 1, 0, 2, 0, 5, 6), top_k=7),
    "float32": Case(dtype=FP32, hidden=544),
    "float16": Case(dtype=FP16, top_k=1),
    "float32 answers": Case(y_dtype=FP32, top_k=4, weights=False),
    "float32 answers, mxfp8": Case(y_dtype=FP32, top_k=4, wire=MX128, weights=False),
    "not contiguous": Case(contiguous=False, wire=MX128, tokens=(9, 5, 0, 3, 0, 1, 2, 4)),
    "not contiguous, plain": Case(contiguous=False, tokens=(9, 5, 0, 3, 0, 1, 2, 4)),
    "one choice a token, float32 answers, plain": Case(top_k=1, hidden=1056, y_dtype=FP32),
}
# One choice a token: kernels copy rows of 15 pieces of 256 values, and some more. Rounded to FP16, some sums are -0.
CASES |= {f"every {y_dtype} as {dtype}, hidden {hidden}":
          Case(tokens=(24, ) * 8, routing="one after the other", top_k=1, hidden=hidden, dtype=dtype, y_dtype=y_dtype,
               every_value=True)
          for y_dtype, dtype, hidden in ((BF16, BF16, 3840), (BF16, BF16, 3872), (FP16, FP16, 3840),
                                         (FP16, FP16, 3872), (BF16, FP16, 3872), (FP16, BF16, 3840))}


def answers(case: Case, plan) -> tuple:
    """What this rank's experts answer, given the collective transport's plan: rows, and a number for each row. Some
    values are -0, which a sum turns into 0. Padding is NaN."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    y_PH = torch.randn(plan.num_rows, case.hidden, generator=generator)
    y_PH *= torch.exp2(torch.randint(-9, 9, (plan.num_rows, 1), generator=generator))
    y_PH[::2, ::5] = -0.0
    number_P = torch.randn(plan.num_rows, generator=generator)
    padding = plan.source_P == plan.slot_RK.numel()
    y_PH[padding], number_P[padding] = float("nan"), float("nan")
    y_PH = y_PH.to(case.y_dtype or case.dtype)
    if case.every_value:
        values = torch.arange(-2**15, 2**15, dtype=torch.int16).view(y_PH.dtype)
        count = int((~padding).sum()) * case.hidden
        assert count >= len(values)
        y_PH[~padding] = values.repeat(-(-count // len(values)))[:count].view(-1, case.hidden)
    return y_PH, number_P


def expected(case: Case, group, experts: list | None = None) -> dict:
    """This rank's inputs, and what the collective transport makes of them. experts: other ids, of every rank."""
    exchange = Collective(group, "the oracle")
    expert_TK, x_TH, weight_TK = case.inputs(dist.get_world_size(group))[dist.get_rank(group)]
    expert_TK = expert_TK if experts is None else experts[dist.get_rank(group)]
    plan = exchange.plan(expert_TK, case.local_experts)
    x_PH, weight_P = exchange.dispatch(plan, x_TH, case.wire, weight_TK)
    y_PH, number_P = answers(case, plan)
    y_TH, number_TK = exchange.combine(plan, y_PH, case.wire, case.dtype, number_P)
    return {"inputs": (expert_TK, x_TH, weight_TK), "answers": (y_PH, number_P), "plan": plan,
            "x": x_PH, "weight": weight_P, "y": y_TH, "number": number_TK}


def bits(x) -> torch.Tensor:
    """As permute_cases.bits, also for empty tensors, whose strides view(dtype) may refuse."""
    return bits_of_rows(x) if x.numel() else torch.empty(0, dtype=torch.uint8)


def same(name: str, want, got) -> None:
    assert (type(want), want.shape, want.dtype) == (type(got), got.shape, got.dtype), name
    a, b = bits(want), bits(got).cpu()
    if not torch.equal(a, b):
        wrong = (a != b).nonzero()
        raise AssertionError(f"{name}: {len(wrong)} of {a.numel()} bytes differ, first at {wrong[:4].tolist()}")


def until(x_PH: torch.Tensor, end: int) -> torch.Tensor:
    """The rows of all groups. Those behind them are not written."""
    return x_PH.with_parts(x_PH.qdata[:end], x_PH.scale[:end]) if isinstance(x_PH, MXTensor) else x_PH[:end]


def same_plan(want, got) -> None:
    for key in ("num_tokens", "top_k", "num_rows"):
        assert getattr(got, key) == getattr(want, key), key
    assert got.tokens_per_expert == pytest.approx(want.tokens_per_expert)
    assert got.group_ends_E.dtype == torch.int32
    assert torch.equal(got.group_ends_E.cpu(), want.group_ends_E.cpu())


def on_device(tensors: tuple, device: torch.device) -> tuple:
    """Copies with the same strides."""
    return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for t in tensors)


def check(case: Case, exchange: NVLink, times: int = 1) -> None:
    """`exchange` gives the collective transport's bits, `times` times, and does not change its inputs."""
    device, want = exchange.memory.device, expected(case, exchange.memory.group)
    inputs, (y_PH, number_P) = on_device(want["inputs"], device), on_device(want["answers"], device)
    before = [t.clone() for t in (*inputs, y_PH, number_P)]
    expert_TK, x_TH, weight_TK = inputs
    end = int(want["plan"].group_ends_E[-1])
    with poisoned():
        for _ in range(times):
            plan = exchange.plan(expert_TK, case.local_experts)
            same_plan(want["plan"], plan)
            x_PH, weight_P = exchange.dispatch(plan, x_TH, case.wire, weight_TK if case.weights else None)
            y_TH, number_TK = exchange.combine(plan, y_PH, case.wire, case.dtype, number_P if case.weights else None)
            assert x_PH.shape == want["x"].shape
            same("x", until(want["x"], end), until(x_PH, end)), same("y", want["y"], y_TH)
            if case.weights:
                same("weight", want["weight"], weight_P), same("number", want["number"], number_TK)
            else:
                assert weight_P is None and number_TK is None
    exchange.memory.reports.check()
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, (*inputs, y_PH, number_P), strict=True))


def check_static(case: Case, exchange: NVLink, kept: list | None = None) -> None:
    """With a capacity, the same rows come first, all others have weights of 0, and the host does not wait.

    kept: the ids of every rank, with -1 for choices that the transport should drop.
    """
    memory = exchange.memory
    device, want, waits = memory.device, expected(case, memory.group, kept), memory.reports.host_waits
    (_, x_TH, weight_TK), (y_PH, number_P) = (on_device(want[key], device) for key in ("inputs", "answers"))
    (expert_TK, ) = on_device(case.inputs(memory.world_size)[memory.rank][:1], device)
    P = int(want["plan"].group_ends_E[-1])
    with poisoned():
        plan = exchange.plan(expert_TK, case.local_experts)
        assert plan.num_rows >= P
        x_PH, weight_P = exchange.dispatch(plan, x_TH, case.wire, weight_TK)
        more = plan.num_rows - P
        y_PH = torch.cat([y_PH[:P], y_PH.new_full((more, case.hidden), float("nan"))])
        number_P = torch.cat([number_P[:P], number_P.new_full((more, ), float("nan"))])
        y_TH, number_TK = exchange.combine(plan, y_PH, case.wire, case.dtype, number_P)
    exchange.memory.reports.check()
    assert exchange.memory.reports.host_waits == waits
    assert torch.equal(plan.group_ends_E.cpu(), want["plan"].group_ends_E.cpu())
    same("x", until(want["x"], P), until(x_PH, P))
    same("weight", want["weight"][:P], weight_P[:P])
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


def check_dropped(case: Case, exchange: NVLink) -> None:
    """Where more rows come than fit, the bits are those of the routing without the dropped choices. They are counted.

    Dispatch and combine over one plan, with and without weights, are what forward and backward consist of.
    """
    memory, local = exchange.memory, case.local_experts
    experts, before = [inputs[0] for inputs in case.inputs(memory.world_size)], exchange.dropped
    (ids, ) = on_device((experts[memory.rank], ), memory.device)
    kept = those_that_fit(experts, local, exchange.plan(ids, local).num_rows)
    counts = [count_dropped(experts, kept, rank, local) for rank in range(memory.world_size)]
    assert max(counts) > 0
    check_static(case, exchange, kept)
    check_static(dataclasses.replace(case, wire=PLAIN if case.wire.mxfp8 else MX32), exchange, kept)
    get_accelerator().synchronize()
    assert exchange.dropped - before == 3 * counts[memory.rank]


def check_interleaved(cases: tuple, exchange: NVLink, reverse: bool) -> None:
    """Several plans are in use at once, as with layers whose backward recomputes."""
    device, group = exchange.memory.device, exchange.memory.group
    wanted = [expected(case, group) for case in cases]
    inputs, outputs = ([on_device(want[key], device) for want in wanted] for key in ("inputs", "answers"))
    with poisoned():
        plans = [exchange.plan(i[0], case.local_experts) for i, case in zip(inputs, cases, strict=True)]
        order = range(len(cases))
        for i in order:
            x_PH, weight_P = exchange.dispatch(plans[i], inputs[i][1], cases[i].wire, inputs[i][2])
            end = int(wanted[i]["plan"].group_ends_E[-1])
            same("x", until(wanted[i]["x"], end), until(x_PH, end)), same("weight", wanted[i]["weight"], weight_P)
        for i in reversed(order) if reverse else order:
            y_TH, number_TK = exchange.combine(plans[i], outputs[i][0], cases[i].wire, cases[i].dtype, outputs[i][1])
            same("y", wanted[i]["y"], y_TH), same("number", wanted[i]["number"], number_TK)
    exchange.memory.reports.check()


LATE = 1


def failing(phase: str, case: Case, exchange: NVLink) -> tuple | None:
    """All ranks but LATE come to `phase`. Returns what they miss and raise, after how long, and in which epoch."""
    rank, memory, told = dist.get_rank(), exchange.memory, None
    expert_TK, x_TH, _ = on_device(case.inputs(dist.get_world_size())[rank], memory.device)
    plan = None if phase == "counts" else exchange.plan(expert_TK, case.local_experts)
    y_PH = None if phase != "combine" else exchange.dispatch(plan, x_TH, case.wire)[0]
    get_accelerator().synchronize()
    if rank != LATE:
        start, epoch = time.monotonic(), memory.epoch
        with pytest.raises(PeerFailure) as caught:
            if phase == "counts":
                exchange.plan(expert_TK, case.local_experts)
            elif phase == "dispatch":
                exchange.dispatch(plan, x_TH, case.wire)
            else:
                exchange.combine(plan, y_PH, case.wire, case.dtype)
            get_accelerator().synchronize()
            memory.reports.check()
        told = (caught.value.missing, str(caught.value), time.monotonic() - start, epoch)
        with pytest.raises(PeerFailure):  # the group stays failed, at once
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
        for part in (f"rank {rank} ", f"rank {LATE}", f"exchange {epoch},", f"'{phase}' of {NAME} (phase {phase})"):
            assert part in text, text
        assert least < seconds < most


CONFUSIONS = ("order", "width", "dtype", "dtype as wide", "weights", "another plan")


def confused(how: str, case: Case, exchange: NVLink) -> str | None:
    """Returns what this rank raises if rank 0 makes another call than the others."""
    rank, memory = dist.get_rank(), exchange.memory
    expert_TK, x_TH, weight_TK = on_device(case.inputs(dist.get_world_size())[rank], memory.device)
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
    except PeerFailure as failure:
        return str(failure)
    return None


def all_noticed(texts: list) -> None:
    """texts: what `confused` returned on every rank."""
    for rank, text in enumerate(texts):
        assert text is not None, f"rank {rank} noticed nothing: {texts}"
        assert f"rank {rank}" in text and NAME in text
    assert any("the same calls in the same order" in text for text in texts), texts


def layer_of_this_rank(transport, recipe, name: str = "swiglu", expert_ids: list | None = None,
                       kept: KeptWeights | None = None, **kwargs) -> tuple:
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
    ffn = ExpertFFN(formula(name), recipe, transport, 2, kept=kept)

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


def check_layer_dropped(recipe, oracle, exchange, those_kept: Callable = those_that_fit) -> None:
    """A layer whose last rank gets more rows than fit computes what `oracle` does without the dropped choices.

    `those_kept`: as `those_that_fit`.
    """
    world, rank, device = dist.get_world_size(), dist.get_rank(), get_accelerator().current_device_name()
    tokens, generator, ids = 300, torch.Generator().manual_seed(3), []
    for _ in range(world):
        random, either = (torch.rand(tokens, n, generator=generator).argsort(dim=1)[:, :2] for n in (2 * world, 2))
        hot = torch.rand(tokens, 1, generator=generator) < 0.8
        ids.append(torch.where(hot, either + 2 * world - 2, random))
    kept = those_kept(ids, 2, exchange.plan(ids[rank].to(device), 2).num_rows)
    assert count_dropped(ids, kept, world - 1, 2) > 0
    want, got = (layer(transport, recipe, expert_ids=experts, tokens=(tokens, ) * world)
                 for transport, experts in ((oracle, kept), (exchange, ids)))
    for key, value in want.items():
        same(key, value, got[key])
    assert not got["weight"][(kept[rank] < 0).to(device)].any()
