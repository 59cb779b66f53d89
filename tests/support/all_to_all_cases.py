# SPDX-License-Identifier: Apache-2.0
"""AllToAll against what it should do, in plain torch on the CPU; on whatever device the ranks run."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.compute import mx
from ds_mxfp8_moe.transport.deadline import PeerError
from tests.support.rank_pool import set_timeout

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
POISON = 77
DEADLINE = timedelta(seconds=4)  # kernels wait for nine sixteenths of it


@dataclass(frozen=True)
class Case:
    """`rows`: "plain"; "e4m3", that come quantized; "quantize": that become MXFP8 in blocks of `block`."""

    max_tokens: int = 7
    local_experts: int = 2
    top_k: int = 2
    hidden: int = 64
    rows: str = "plain"
    dtype: torch.dtype = BF16
    block: int = 128
    float_scales: bool = False
    routing: str = "random"
    index_dtype: torch.dtype = torch.int64
    y_dtype: torch.dtype = BF16
    out_dtype: torch.dtype = BF16
    bound: bool = False
    beyond: int | None = None  # what bound_m holds, in place of the number of all rows
    split: bool = False
    nan: bool = False  # some values of x are NaN or infinite

    @property
    def scale_bytes(self) -> int:
        """Of a row."""
        return 0 if self.rows == "plain" else -(-self.hidden // self.block) * (4 if self.float_scales else 1)


CASES = {
    "plain": Case(),
    "e4m3, float scales": Case(rows="e4m3", float_scales=True, hidden=128),
    "e4m3, byte scales": Case(rows="e4m3", hidden=128, block=32),
    "quantize": Case(rows="quantize", hidden=544),
    "quantize, blocks of 32, dropped": Case(rows="quantize", hidden=160, block=32, routing="dropped"),
    "quantize, float scales, bound": Case(rows="quantize", hidden=256, float_scales=True, bound=True,
                                          index_dtype=torch.uint32),
    "quantize float16": Case(rows="quantize", dtype=FP16, block=32, max_tokens=2),
    "one expert": Case(routing="one expert", top_k=1),
    "one rank": Case(routing="one rank", local_experts=4, top_k=3),
    "nowhere": Case(routing="nowhere"),
    "ranks without tokens": Case(routing="ranks without tokens", top_k=4, local_experts=4, max_tokens=19,
                                 y_dtype=FP32),
    "send apart from receive": Case(split=True, hidden=1056, dtype=FP16, out_dtype=FP16, y_dtype=FP16,
                                    index_dtype=torch.int32),
    "many experts": Case(max_tokens=1, top_k=8, local_experts=8),
    "a bound of 2^31": Case(beyond=2**31),
    "a bound of 2^32 - 1": Case(beyond=2**32 - 1, routing="dropped"),
    "NaN": Case(nan=True, hidden=256),
    "NaN, quantize": Case(nan=True, rows="quantize", hidden=256),
    "more tokens than blocks": Case(max_tokens=40, top_k=6, local_experts=3, hidden=32, bound=True),
}


def _routing(case: Case, tokens: int, world: int, generator: torch.Generator) -> torch.Tensor:
    experts = case.local_experts * world
    pool = {"one rank": case.local_experts, "one expert": 1}.get(case.routing, experts)
    ids = torch.rand(tokens, pool, generator=generator).argsort(1)[:, :case.top_k].contiguous()
    if case.routing == "nowhere":
        return torch.full_like(ids, -1)
    if case.routing == "dropped":
        chance = torch.rand(ids.shape, generator=generator)
        ids = torch.where(chance < 0.3, experts, torch.where(chance < 0.5, -1, ids))
    return ids


class Inputs:
    """What one rank brings to one turn, on the CPU, and how its rows should arrive: bytes, scales, float32 values."""

    def __init__(self, case: Case, turn: int, rank: int, world: int):
        generator = torch.Generator().manual_seed(1000 * turn + rank)
        idle = case.routing == "ranks without tokens" and rank % 2 == turn % 2
        self.tokens = 0 if idle else max(case.max_tokens - rank - turn, 1)
        rows = case.max_tokens if case.bound else self.tokens  # behind the bound: anything
        x = torch.randn(rows, case.hidden, generator=generator).to(case.dtype)
        if case.nan:
            chance = torch.rand(x.shape, generator=generator)
            x[chance < 0.004], x[chance < 0.002] = float("inf"), float("nan")
        self.x, self.scale, self.bound = x, None, None
        self.arriving, self.arriving_scale, self.values = x.view(torch.uint8), None, x.float()
        if case.rows != "plain":
            quantized = mx.quantize(x, case.block, "rceil")
            scale = quantized.scale.float() if case.float_scales else quantized.scale_bytes
            self.arriving, self.arriving_scale = quantized.qdata.view(torch.uint8), scale
            self.values = quantized.dequantize(FP32)
            if case.rows == "e4m3":
                self.x, self.scale = quantized.qdata, scale
        self.ids = _routing(case, rows, world, generator)
        self.weights = torch.rand(self.ids.shape, generator=generator)
        if case.bound or case.beyond is not None:
            self.bound = torch.tensor([self.tokens if case.bound else case.beyond], dtype=torch.uint32)

    def choices_of(self, expert: int) -> torch.Tensor:
        """Tokens with a choice of this expert, in the order of (token, choice)."""
        return (self.ids[:self.tokens] == expert).nonzero()[:, 0]


class Call:
    """One rank's buffers for a case, and what they should hold."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        E, H, room = case.local_experts, case.hidden, case.max_tokens * self.world
        dtype = case.dtype if case.rows == "plain" else E4M3
        self.counts = torch.empty(E, dtype=torch.int32, device=device)
        self.out = torch.empty(E, room, H, dtype=dtype, device=device)
        self.scales = None
        if case.scale_bytes:
            blocks, dtype = -(-H // case.block), FP32 if case.float_scales else torch.uint8
            self.scales = torch.empty(E, blocks, room, dtype=dtype, device=device).transpose(1, 2)
        self.y = torch.empty(E, room, H, dtype=case.y_dtype, device=device)
        self.given: dict = {}

    def bring(self, turn: int) -> None:
        """New inputs, in the same memory where they are as many as before; outputs are poisoned."""
        self.ranks = [Inputs(self.case, turn, rank, self.world) for rank in range(self.world)]
        mine = self.ranks[self.rank]
        new = {"x": mine.x, "scale": mine.scale, "ids": mine.ids.to(self.case.index_dtype), "weights": mine.weights,
               "bound": mine.bound, "out_tokens": torch.empty_like(mine.values, dtype=self.case.out_dtype)}
        for name, x in new.items():
            old = self.given.get(name)
            if x is not None and old is not None and old.shape == x.shape:
                old.copy_(x)
            else:
                self.given[name] = None if x is None else x.to(self.device)
        for out in (self.counts, self.out.view(torch.uint8), self.scales, self.given["out_tokens"]):
            if out is not None:
                out.fill_(POISON)

    def dispatch(self, a2a: AllToAll, **part: bool) -> None:
        given = self.given
        a2a.dispatch(self.counts, self.out, self.scales, given["x"], given["scale"], given["ids"], given["bound"],
                     **part)

    def combine(self, a2a: AllToAll, **part: bool) -> None:
        given = self.given
        a2a.combine(given["out_tokens"], given["ids"], given["weights"], self.y, given["bound"], **part)

    def puts(self) -> int:
        """How often this rank puts something into another rank's memory in a dispatch and a combine over NVSHMEM.

        In a dispatch: each token and the counts to every other rank. In a combine: the rows of each token of another
        rank that has experts here.
        """
        first, E = self.rank * self.case.local_experts, self.case.local_experts
        others = [inputs.ids[:inputs.tokens] for rank, inputs in enumerate(self.ranks) if rank != self.rank]
        answers = sum(int(((ids >= first) & (ids < first + E)).any(1).sum()) for ids in others)
        return (self.world - 1) * (self.ranks[self.rank].tokens + 1) + answers

    def wrong_rows(self) -> list[str]:
        """What is not as it should be after a dispatch."""
        wrong = []
        for e in range(self.case.local_experts):
            arriving, scale = (self._rows(e, part) for part in ("arriving", "arriving_scale"))
            count, got = len(arriving), self.out[e].view(torch.uint8).cpu()
            if int(self.counts[e]) != count:
                wrong.append(f"expert {e} has {int(self.counts[e])} rows, expected {count}")
            if not torch.equal(got[:count], arriving):
                wrong.append(f"rows of expert {e} differ")
            if not bool((got[count:] == POISON).all()):
                wrong.append(f"rows past those of expert {e} are written")
            if scale is not None:
                got = self.scales[e].cpu()
                if not torch.equal(got[:count], scale) or not bool((got[count:] == POISON).all()):
                    wrong.append(f"scales of expert {e} differ")
        return wrong

    def answer(self) -> None:
        """Each expert answers with its rows' values times a number of its own, so that every route is told apart."""
        self.y.fill_(float("nan"))
        for e in range(self.case.local_experts):
            values = self._rows(e, "values")
            self.y[e, :len(values)] = (values * self._factor(self.rank * self.case.local_experts + e)).to(
                self.case.y_dtype).to(self.device)

    def wrong_tokens(self) -> list[str]:
        """What is not as it should be after the combine of these answers."""
        mine, case = self.ranks[self.rank], self.case
        total = torch.zeros(mine.tokens, case.hidden)
        for k in range(case.top_k):
            expert = mine.ids[:mine.tokens, k:k + 1]
            row = (mine.values[:mine.tokens] * self._factor(expert)).to(case.y_dtype).to(case.out_dtype).float()
            there = (expert >= 0) & (expert < case.local_experts * self.world)
            total = torch.where(there, total + mine.weights[:mine.tokens, k:k + 1] * row, total)
        got, total = self.given["out_tokens"].cpu(), total.to(case.out_dtype)
        same = (got[:mine.tokens] == total) | (got[:mine.tokens].isnan() & total.isnan())
        wrong = (~same).any(1).nonzero().flatten().tolist()
        behind = bool((got[mine.tokens:] == POISON).all())
        return ([f"tokens {wrong} differ"] if wrong else []) + ([] if behind else ["tokens behind the bound differ"])

    def _rows(self, local_expert: int, part: str) -> torch.Tensor | None:
        """Those of one expert, in the order of (rank, token, choice)."""
        expert = self.rank * self.case.local_experts + local_expert
        rows = [getattr(inputs, part) for inputs in self.ranks]
        if rows[0] is None:
            return None
        return torch.cat([x[inputs.choices_of(expert)] for x, inputs in zip(rows, self.ranks, strict=True)])

    @staticmethod
    def _factor(expert):
        return 1 + expert / 4


def check(call: Call, a2a: AllToAll, turn: int) -> list[str]:
    """One dispatch and one combine; what was wrong."""
    parts = ({"do_recv": False}, {"do_send": False}) if call.case.split else ({}, )
    call.bring(turn)
    for part in parts:
        call.dispatch(a2a, **part)
    wrong = call.wrong_rows()
    call.answer()
    for part in parts:
        call.combine(a2a, **part)
    return wrong + call.wrong_tokens()


def make(case: Case, memory) -> AllToAll:
    return AllToAll(memory, case.max_tokens, case.local_experts * dist.get_world_size(), case.top_k, case.hidden,
                    case.hidden * (case.dtype.itemsize if case.rows == "plain" else 1), case.scale_bytes)


def impatient_group():
    """All ranks, with a short deadline."""
    group = torch.distributed.new_group()
    set_timeout(DEADLINE, group)
    return group


def failing(which: str, make_a2a: Callable, device: torch.device) -> str | None:
    """What this rank raises where rank 1 does not come ("late") or is of other sizes ("sizes").

    make_a2a: makes the exchange of a case over a group.
    """
    rank, text = dist.get_rank(), None
    case = Case(max_tokens=7 + rank) if which == "sizes" else Case()
    a2a, call = make_a2a(case, impatient_group()), Call(case, device)
    call.bring(0)
    if which == "sizes" or rank != 1:
        with pytest.raises(PeerError) as caught:
            call.dispatch(a2a)
            a2a.check()
        text = str(caught.value)
    dist.barrier()
    return text


def check_other_sizes(texts: list[str]) -> None:
    """texts: of `failing("sizes")`, of two ranks. The one that notices first stops sending, so the other may wait for
    it until the deadline."""
    assert any("the same calls in the same order" in text for text in texts), texts
    for rank, text in enumerate(texts):
        assert "AllToAll.dispatch" in text and f"rank {1 - rank}" in text, text


def bad_calls(a2a: AllToAll, device: torch.device) -> tuple[Callable, ...]:
    """Each must raise a ValueError of its own; `a2a` is of Case()."""
    case, world = Case(), dist.get_world_size()
    E, H, K, T, room = case.local_experts, case.hidden, case.top_k, 3, case.max_tokens * world

    def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    x, ids, counts, out = zeros(T, H), zeros(T, K, dtype=torch.int64), zeros(E, dtype=torch.int32), zeros(E, room, H)
    many, more_ids = zeros(case.max_tokens + 1, H), zeros(case.max_tokens + 1, K, dtype=torch.int64)
    return (
        lambda: a2a.dispatch(counts, out, None, many, None, more_ids, None),
        lambda: a2a.dispatch(counts, out[:, 1:], None, x, None, ids, None),
        lambda: a2a.dispatch(counts, out, None, x.float(), None, ids, None),
        lambda: a2a.dispatch(counts, out.float(), None, x.float(), None, ids, None),
        lambda: a2a.dispatch(counts, out, None, zeros(T * H + 1)[1:].view(T, H), None, ids, None),
        lambda: a2a.dispatch(counts, out, None, x, None, ids[:2], None),
        lambda: a2a.dispatch(counts, out, None, x, None, ids.short(), None),
        lambda: a2a.dispatch(counts.long(), out, None, x, None, ids, None),
        lambda: a2a.dispatch(counts, out, zeros(E, room, 1), x, None, ids, None),
        lambda: a2a.dispatch(counts, out, None, x, None, ids, zeros(2, dtype=torch.int32)),
        lambda: a2a.dispatch(counts, out, None, x, None, ids, None, do_send=False),
        lambda: a2a.combine(x, ids, zeros(T, K + 1, dtype=FP32), out, None),
        lambda: a2a.combine(x, ids, zeros(T, K, dtype=FP32), out[:1], None),
        lambda: a2a.combine(x.float(), ids, zeros(T, K, dtype=FP32), out, None),
    )
