# SPDX-License-Identifier: Apache-2.0
"""What every transport must do: one table of exchanges, and a check of their bits against sums in plain loops.

Every rank knows the tokens of all ranks, and works out what it should get. The checks run on a rank, on its device.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from ds_mxfp8_moe.compute.mx import MXTensor, quantize
from ds_mxfp8_moe.transport import ROW_ALIGNMENT, RowFormat, Transport, room_for
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.local import Local, most_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, MX32, MX128 = RowFormat(False), RowFormat(True), RowFormat(True, 128)
FLOOR32, FLOOR128 = RowFormat(True, 32, "floor"), RowFormat(True, 128, "floor")
TOKENS = (37, 13, 0, 50, 5, 64, 1, 70)  # of up to eight ranks


@dataclass(frozen=True)
class Problem:
    """One exchange of rows of all magnitudes: what every rank brings, made alike on every rank.

    Attributes:
        y_dtype: of the experts' answers. None: `dtype`.
        not_finite: some values are NaN, infinite, subnormal or the largest.
        every_value: the experts of each rank answer every number of 16 bits: of BF16 where they answer in FP32.
    """

    tokens: tuple = TOKENS
    top_k: int = 2
    local_experts: int = 4
    routing: str = "random"
    hidden: int = 96
    dtype: torch.dtype = BF16
    row_format: RowFormat = PLAIN
    seed: int = 7
    contiguous: bool = True
    y_dtype: torch.dtype | None = None
    not_finite: bool = True
    every_value: bool = False

    def inputs(self, world: int | None = None) -> list:
        """(expert_TK, x_TH, weight_TK) of each rank. `world`: the number of ranks. Default: all that have tokens."""
        generator = torch.Generator().manual_seed(self.seed)
        return [self._inputs(T, (world or len(self.tokens)) * self.local_experts, generator)
                for T in self.tokens[:world]]

    def _inputs(self, T: int, E: int, generator: torch.Generator) -> tuple:
        K = self.top_k
        if self.routing == "skewed":
            expert = (torch.rand(T, K, generator=generator)**4 * E).long()
        else:  # with K > E a token may choose an expert twice
            expert = torch.randint(E, (T, K), generator=generator)
        if self.routing == "dropped":
            expert = torch.where(torch.rand(T, K, generator=generator) < 0.4, -1, expert)
        elif self.routing == "one expert":
            expert = torch.full_like(expert, E - 1)
        elif self.routing == "one rank":
            expert = expert % self.local_experts
        elif self.routing == "one after the other":
            expert = (torch.arange(T) * E // max(T, 1)).unsqueeze(1).expand(T, K).contiguous()
        elif self.routing == "nowhere":
            expert = torch.full_like(expert, -1)
        x = torch.randn(T, self.hidden, generator=generator)
        x = (x * torch.exp2(torch.randint(-9, 9, x.shape, generator=generator))).to(self.dtype)
        x[1:2, :32] = 0
        if self.not_finite and T > 6:
            x[3, 1], x[5, 0], x[5, -1] = float("nan"), float("inf"), float("-inf")
            x[4] = (torch.randn(self.hidden, generator=generator) * torch.finfo(x.dtype).tiny / 3).to(x.dtype)
            x[6, ::3] = torch.finfo(x.dtype).max
        weight = torch.rand(T, K, generator=generator)
        if not self.contiguous:
            expert, weight = (v.t().contiguous().t() for v in (expert, weight))
            x = torch.stack([x, x], dim=2)[..., 0]
        return expert, x, weight

    def answers(self, rank: int, rows: list) -> tuple:
        """What the experts of a rank answer: y_PH, and a number for each row. Padding is NaN, and must not count. Some
        values are -0, which a sum turns into 0."""
        generator = torch.Generator().manual_seed(100 + rank)
        y = torch.randn(len(rows), self.hidden, generator=generator)
        y *= torch.exp2(torch.randint(-9, 9, (len(rows), 1), generator=generator))
        y[::2, ::5] = -0.0
        if self.not_finite:
            y[5::9, 3], y[7::9, -1] = float("nan"), float("inf")
        number = torch.randn(len(rows), generator=generator)
        y = y.to(self.y_dtype or self.dtype)
        padding = torch.tensor([row is None for row in rows], dtype=torch.bool)
        if self.every_value:
            numbers = torch.arange(-2**15, 2**15, dtype=torch.int16)
            values = numbers.view(BF16 if y.dtype == FP32 else y.dtype).to(y.dtype)
            count = int((~padding).sum()) * self.hidden
            assert count >= len(values)
            y[~padding] = values.repeat(-(-count // len(values)))[:count].view(-1, self.hidden)
        y[padding], number[padding] = float("nan"), float("nan")
        return y, number


PROBLEMS = {
    "random": Problem(),
    "mxfp8": Problem(row_format=MX32, top_k=3),
    "floor": Problem(row_format=FLOOR32, hidden=64, dtype=FP16),
    "floor, blocks of 128": Problem(row_format=FLOOR128, hidden=544, dtype=FP32),
    "skewed": Problem(routing="skewed", row_format=MX128, top_k=3, hidden=160),
    "dropped": Problem(routing="dropped", row_format=MX32, top_k=5, hidden=512),
    "dropped, plain": Problem(routing="dropped", top_k=4, hidden=1056),
    "one expert": Problem(routing="one expert", row_format=MX128, hidden=32),
    "one rank": Problem(routing="one rank", row_format=MX32),
    "nowhere": Problem(routing="nowhere", row_format=MX128),
    "nobody has tokens": Problem(tokens=(0, ) * 8, row_format=MX128),
    "one rank has tokens": Problem(tokens=(0, 77, 0, 0, 0, 0, 0, 0)),
    "one token each": Problem(tokens=(1, ) * 8, top_k=1, local_experts=1, row_format=MX32),
    "more choices than experts": Problem(top_k=8, local_experts=1, row_format=MX128, hidden=64),
    "more rows than a tile": Problem(tokens=(150, 1, 2, 140, 3, 7, 9, 150), local_experts=1, row_format=MX128,
                                     hidden=32),
    "many experts": Problem(local_experts=40, top_k=8, hidden=64),
    "many scales": Problem(row_format=MX32, hidden=1056, tokens=(9, 4, 3, 2, 0, 1, 5, 7), top_k=6, dtype=FP16),
    "float32 answers": Problem(y_dtype=FP32, top_k=4),
    "float32 answers, mxfp8": Problem(y_dtype=FP32, top_k=4, row_format=MX128),
    "not contiguous": Problem(contiguous=False, row_format=MX128, tokens=(9, 5, 0, 3, 0, 1, 2, 4)),
    "not contiguous, plain": Problem(contiguous=False, tokens=(9, 5, 0, 3, 0, 1, 2, 4)),
    "not contiguous, one choice": Problem(contiguous=False, top_k=1),
    "top_k 7": Problem(top_k=7, row_format=MX32, tokens=(20, 13, 0, 31, 1, 2, 3, 4)),
}
PROBLEMS |= {f"{dtype}, {row_format.block_size if row_format.mxfp8 else 'plain'}, {hidden}":
             Problem(dtype=dtype, row_format=row_format, hidden=hidden, tokens=(20, 13, 0, 31, 1, 2, 3, 4))
             for dtype in (FP32, BF16, FP16)
             for row_format, hidden in ((PLAIN, 32), (MX32, 160), (MX128, 256), (MX128, 160))}
HARD = ("random", "skewed", "dropped", "one expert", "one rank", "nowhere", "nobody has tokens", "one rank has tokens",
        "one token each", "more choices than experts", "more rows than a tile", "float32 answers, mxfp8",
        "not contiguous")
# Sizes at which kernels change their ways. One choice a token: they copy rows of 15 pieces of 256 values, and some
# more. Rounded to FP16, some sums are -0.
OF_KERNELS = {
    "one choice a token": Problem(top_k=1, hidden=2336),
    "one choice a token, mxfp8": Problem(top_k=1, hidden=1568, row_format=MX32, tokens=(9, 4, 3, 2, 0, 1, 5, 7)),
    "one choice a token, blocks of 128": Problem(top_k=1, hidden=4640, row_format=MX128,
                                                 tokens=(3, 4, 1, 0, 2, 0, 5, 6)),
    "one choice a token, float32 answers": Problem(top_k=1, hidden=1056, row_format=MX128, y_dtype=FP32),
    "one choice a token, float32 answers, plain": Problem(top_k=1, hidden=1056, y_dtype=FP32),
    "many scales, blocks of 128": Problem(row_format=MX128, hidden=4640, tokens=(3, 4, 1, 0, 2, 0, 5, 6), top_k=7),
    **{f"every {y_dtype} as {dtype}, hidden {hidden}":
       Problem(tokens=(24, ) * 8, routing="one after the other", top_k=1, hidden=hidden, dtype=dtype, y_dtype=y_dtype,
               every_value=True)
       for y_dtype, dtype, hidden in ((BF16, BF16, 3840), (BF16, BF16, 3872), (FP16, FP16, 3840), (FP16, FP16, 3872),
                                      (FP32, FP16, 3872), (FP32, BF16, 3840))}}


def without_an_empty_rank(problem: Problem) -> Problem:
    """The problem with its empty rank first: without the rows of another one, rows may be in order by chance."""
    return replace(problem, tokens=problem.tokens[2:] + problem.tokens[:2])


# ---------------------------------------------------------------- what is expected


def rows_of(rank: int, local_experts: int, experts: list) -> tuple:
    """The expert-sorted rows of a rank as (source, token, choice), None in padding; and the ends of the groups.

    A rank that is alone has as many rows as its choices can need at most.
    """
    rows, ends = [], []
    for expert in range(rank * local_experts, (rank + 1) * local_experts):
        for source, expert_TK in enumerate(experts):
            rows += [(source, token, choice) for token, choice in (expert_TK == expert).nonzero().tolist()]
        rows += [None] * (-len(rows) % ROW_ALIGNMENT)
        ends.append(len(rows))
    most = room_for(len(rows)) if len(experts) > 1 else most_rows(experts[0].numel(), local_experts)
    return rows + [None] * (most - len(rows)), ends


def dispatched(problem: Problem, rows: list, inputs: list) -> tuple:
    """Bytes of x_PH, and weight_P."""
    form = problem.row_format
    sent = [_bytes(quantize(x, form.block_size, form.scaling_mode) if form.mxfp8 else x) for _, x, _ in inputs]
    x_P = torch.zeros(len(rows), sent[0].shape[1], dtype=torch.uint8)
    weight_P = torch.zeros(len(rows))
    for p, row in enumerate(rows):
        if row is not None:
            source, token, choice = row
            x_P[p], weight_P[p] = sent[source][token], inputs[source][2][token, choice]
    return x_P, weight_P


def combined(problem: Problem, owner: int, tokens: int, rows_of_ranks: list, answers: list, node_size: int) -> tuple:
    """The order of sums, word for word: fp32 partial per token and rank in ascending choice; their fp32 sum per node
    in ascending rank; one rounding; fp32 sum in ascending node. A flat transport's nodes are ranks."""
    of_node = [torch.zeros(tokens, problem.hidden) for _ in range(0, len(answers), node_size)]
    weight_TK = torch.zeros(tokens, problem.top_k)
    for rank, (rows, (y_PH, number_P)) in enumerate(zip(rows_of_ranks, answers, strict=True)):
        mine = sorted((*row[1:], p) for p, row in enumerate(rows) if row is not None and row[0] == owner)
        partial = {}
        for token, choice, p in mine:
            partial[token] = partial.get(token, torch.zeros(problem.hidden)) + y_PH[p].float()
            weight_TK[token, choice] = number_P[p]
        for token, sum_H in partial.items():
            of_node[rank // node_size][token] += sum_H
    return sum(_as_sent(sum_TH, problem) for sum_TH in of_node).to(problem.dtype), weight_TK


def _as_sent(x: torch.Tensor, problem: Problem) -> torch.Tensor:
    """float32 rows as they arrive."""
    row_format = problem.row_format
    if row_format.mxfp8:
        return quantize(x, row_format.block_size, row_format.scaling_mode).dequantize(torch.float32)
    return x.to(problem.dtype).float()


def expected(problem: Problem, rank: int, world: int, node_size: int = 1, experts: list | None = None) -> dict:
    """The inputs of a rank, the answers of its experts, and what it should get.

    Args:
        node_size: of the transport in two hops. A flat one's nodes are ranks.
        experts: other ids, of every rank.
    """
    inputs = problem.inputs(world)
    if experts is not None:
        inputs = [(ids, *others) for ids, (_, *others) in zip(experts, inputs, strict=True)]
    ids, local = [expert_TK for expert_TK, _, _ in inputs], problem.local_experts
    rows, ends = zip(*(rows_of(r, local, ids) for r in range(world)), strict=True)
    answers = [problem.answers(r, rows[r]) for r in range(world)]
    x, weight = dispatched(problem, rows[rank], inputs)
    y, number = combined(problem, rank, len(ids[rank]), rows, answers, node_size)
    return {"inputs": inputs[rank], "answers": answers[rank], "num_rows": len(rows[rank]), "ends": ends[rank],
            "end": ends[rank][-1], "x": x, "weight": weight, "y": y, "number": number}


# ---------------------------------------------------------------- comparing


def bits(x: torch.Tensor | None) -> torch.Tensor | None:
    """Bytes on the host, with one NaN for all. An empty tensor may have strides that view(dtype) refuses."""
    if x is None or not (isinstance(x, MXTensor) or x.dtype.is_floating_point or x.dtype == torch.uint8):
        return x
    return _bytes(x) if x.numel() else torch.empty(0, dtype=torch.uint8)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, MXTensor):
        return torch.cat([x.qdata.view(torch.uint8), x.scale_bytes], dim=1).cpu()
    x = torch.where(x.isnan(), float("nan"), x).cpu() if x.dtype.is_floating_point else x.cpu()
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # strides of 1 where a size is 1, too


def same(name: str, want, got) -> None:
    """The bits are equal. `want`: a tensor, or the bytes that rows should have."""
    if want.dtype != torch.uint8:
        assert (type(want), want.shape, want.dtype) == (type(got), got.shape, got.dtype), name
    a, b = bits(want), bits(got)
    if not torch.equal(a, b):
        wrong = (a != b).nonzero() if a.shape == b.shape else a.shape
        raise AssertionError(f"{name}: {len(wrong)} of {a.numel()} bytes differ, first at {list(wrong)[:4]}")


def until(x_PH: torch.Tensor, end: int) -> torch.Tensor:
    """The rows of all groups. Those behind them may hold anything."""
    return x_PH.with_parts(x_PH.qdata[:end], x_PH.scale[:end]) if isinstance(x_PH, MXTensor) else x_PH[:end]


def on_device(tensors: tuple) -> tuple:
    """Copies with the same strides, on this rank's device."""
    device = get_accelerator().current_device_name()
    return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for t in tensors)


@contextmanager
def poisoned():
    """What is left of torch.empty shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- checks


def _world(exchange: Transport) -> int:
    """The number of ranks of the transport's group."""
    if isinstance(exchange, Local):
        return 1
    return dist.get_world_size(exchange.hops.group) if isinstance(exchange, Hierarchical) else exchange.world_size


def _here(exchange: Transport) -> tuple:
    """This rank in the transport's group, and the number of ranks."""
    world = _world(exchange)
    return (dist.get_rank() % world if dist.is_initialized() else 0), world


def check(problem: Problem, exchange: Transport, node_size: int = 1, times: int = 1) -> None:
    """The whole exchange has the expected bits, `times` times, and leaves its inputs alone."""
    want = expected(problem, *_here(exchange), node_size)
    inputs, answers = on_device(want["inputs"]), on_device(want["answers"])
    before = [t.clone() for t in (*inputs, *answers)]
    (expert_TK, x_TH, weight_TK), (y_PH, number_P) = inputs, answers
    with poisoned():
        for _ in range(times):
            plan = exchange.plan(expert_TK, problem.local_experts)
            same_plan(problem, _world(exchange), want, plan)
            x_PH, weight_P = exchange.dispatch(plan, x_TH, problem.row_format, weight_TK)
            same_rows(problem, want, x_PH), same("weight", want["weight"], weight_P)
            y_TH, number_TK = exchange.combine(plan, y_PH, problem.row_format, problem.dtype, number_P)
            same("y", want["y"], y_TH), same("number", want["number"], number_TK)
            bare_PH, none = exchange.dispatch(plan, x_TH, problem.row_format)
            assert none is None
            same_rows(problem, want, bare_PH)
            bare_TH, none = exchange.combine(plan, y_PH, problem.row_format, problem.dtype)
            assert none is None
            same("y alone", want["y"], bare_TH)
    for a, b in zip(before, (*inputs, *answers), strict=True):
        same("an input", a, b)


def same_plan(problem: Problem, world: int, want: dict, plan) -> None:
    assert (plan.num_tokens, plan.top_k) == tuple(want["inputs"][0].shape)
    assert plan.num_rows == want["num_rows"]
    assert plan.group_ends_E.dtype == torch.int32 and plan.group_ends_E.tolist() == want["ends"]
    assert plan.tokens_per_expert == pytest.approx(
        sum(problem.tokens[:world]) * problem.top_k / (world * problem.local_experts))


def same_rows(problem: Problem, want: dict, x_PH) -> None:
    assert isinstance(x_PH, MXTensor) == problem.row_format.mxfp8 and x_PH.dtype == problem.dtype
    assert x_PH.shape == (want["num_rows"], problem.hidden)
    same("x", want["x"][:want["end"]], until(x_PH, want["end"]))


def check_in_flight(exchange: Transport, node_size: int = 1, reverse: bool = False) -> None:
    """Two plans are in use at once, as with layers whose backward recomputes."""
    problems = (Problem(row_format=MX128, top_k=3), Problem(routing="skewed", hidden=160, seed=8))
    wanted = [expected(problem, *_here(exchange), node_size) for problem in problems]
    inputs, answers = ([on_device(want[key]) for want in wanted] for key in ("inputs", "answers"))
    with poisoned():
        plans = [exchange.plan(i[0], p.local_experts) for i, p in zip(inputs, problems, strict=True)]
        for i, (problem, want) in enumerate(zip(problems, wanted, strict=True)):
            x_PH, weight_P = exchange.dispatch(plans[i], inputs[i][1], problem.row_format, inputs[i][2])
            same_rows(problem, want, x_PH), same("weight", want["weight"], weight_P)
        for i in reversed(range(2)) if reverse else range(2):
            y_TH, number_TK = exchange.combine(plans[i], answers[i][0], problems[i].row_format, problems[i].dtype,
                                               answers[i][1])
            same("y", wanted[i]["y"], y_TH), same("number", wanted[i]["number"], number_TK)
