# SPDX-License-Identifier: Apache-2.0
"""Plan, dispatch and combine against a naive reference: every rank knows all ranks' tokens and checks its own bits."""

import dataclasses

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.mx import MXTensor, quantize
from ds_mxfp8_moe.transport import ROW_ALIGNMENT, Transport, Wire
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.local import Local, most_rows

PLAIN, MX = Wire(False), Wire(True)
TOKENS = (50, 37, 0, 161)  # of ranks 0, 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Problem:
    """One exchange: what every rank brings, made alike on every rank."""

    tokens: tuple = TOKENS
    top_k: int = 2
    local_experts: int = 4
    routing: str = "random"
    hidden: int = 96
    dtype: torch.dtype = torch.bfloat16
    wire: Wire = PLAIN
    seed: int = 7
    contiguous: bool = True

    def inputs(self, world: int) -> list:
        """(expert_TK, x_TH, weight_TK) of each rank."""
        generator = torch.Generator().manual_seed(self.seed)
        E, K = world * self.local_experts, self.top_k
        ranks = []
        for T in self.tokens[:world]:
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
            x = torch.randn(T, self.hidden, generator=generator).to(self.dtype)
            weight = torch.rand(T, K, generator=generator)
            if not self.contiguous:
                expert, weight = (v.t().contiguous().t() for v in (expert, weight))
                x = torch.stack([x, x], dim=2)[..., 0]
            ranks.append((expert, x, weight))
        return ranks


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
    if len(experts) == 1:
        rows += [None] * (most_rows(experts[0].numel(), local_experts) - len(rows))
    return rows, tuple(ends)


def as_sent(x: torch.Tensor, wire: Wire, dtype: torch.dtype) -> torch.Tensor:
    """float32 rows as they arrive."""
    if wire.mxfp8:
        return quantize(x, wire.block_size, wire.scaling_mode).dequantize(torch.float32)
    return x.to(dtype).float()


def bits(x) -> torch.Tensor:
    if isinstance(x, MXTensor):
        return torch.cat([x.qdata.view(torch.uint8), x.scale.view(torch.uint8)], dim=1)
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def naive_dispatch(problem: Problem, rank: int, inputs: list) -> tuple:
    """Bits of x_PH, and weight_P."""
    rows, _ = rows_of(rank, problem.local_experts, [expert for expert, _, _ in inputs])
    sent = [bits(quantize(x, problem.wire.block_size, problem.wire.scaling_mode) if problem.wire.mxfp8 else x)
            for _, x, _ in inputs]
    x_P = torch.zeros(len(rows), sent[0].shape[1], dtype=torch.uint8)
    weight_P = torch.zeros(len(rows))
    for p, row in enumerate(rows):
        if row is not None:
            source, token, choice = row
            x_P[p], weight_P[p] = sent[source][token], inputs[source][2][token, choice]
    return x_P, weight_P


def outputs_of(problem: Problem, rank: int, inputs: list, dtype: torch.dtype) -> tuple:
    """What the experts of a rank answer, padding rows included (which must not count): y_PH and a number a row."""
    rows, _ = rows_of(rank, problem.local_experts, [expert for expert, _, _ in inputs])
    generator = torch.Generator().manual_seed(100 + rank)
    y = torch.randn(len(rows), problem.hidden, generator=generator).to(dtype)
    number = torch.rand(len(rows), generator=generator)
    for p, row in enumerate(rows):
        if row is None:
            y[p], number[p] = float("nan"), float("nan")
    return y, number


def naive_combine(problem: Problem, owner: int, inputs: list, outputs: list, node_size: int = 1) -> tuple:
    """The order of sums, word for word: fp32 partial per token and rank in ascending choice; their fp32 sum per node
    in ascending rank; one rounding; fp32 sum in ascending node. A flat transport's nodes are ranks."""
    T = inputs[owner][0].shape[0]
    of_node = [torch.zeros(T, problem.hidden) for _ in range(0, len(outputs), node_size)]
    weight_TK = torch.zeros(T, problem.top_k)
    for rank, (y_PH, number_P) in enumerate(outputs):
        rows, _ = rows_of(rank, problem.local_experts, [expert for expert, _, _ in inputs])
        place = {row: p for p, row in enumerate(rows) if row is not None}
        for token in range(T):
            mine = [place[owner, token, k] for k in range(problem.top_k) if (owner, token, k) in place]
            if mine:
                partial = torch.zeros(problem.hidden)
                for p in mine:
                    partial += y_PH[p].float()
                of_node[rank // node_size][token] += partial
        for (source, token, choice), p in place.items():
            if source == owner:
                weight_TK[token, choice] = number_P[p]
    total_TH = sum(as_sent(sum_TH, problem.wire, problem.dtype) for sum_TH in of_node)
    return total_TH.to(problem.dtype), weight_TK


def transport() -> Transport:
    return Collective(dist.get_world_group()) if dist.is_initialized() else Local()


def check_exchange(problem: Problem, y_dtype: torch.dtype | None = None, exchange: Transport | None = None,
                   node_size: int = 1) -> None:
    """On every rank: the whole exchange equals the naive one bit for bit, and leaves its inputs alone."""
    exchange = exchange or transport()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    inputs = problem.inputs(world)
    expert_TK, x_TH, weight_TK = inputs[rank]
    before = [t.clone() for t in inputs[rank]]
    plan = exchange.plan(expert_TK, problem.local_experts)
    rows, ends = rows_of(rank, problem.local_experts, [expert for expert, _, _ in inputs])
    assert plan.num_rows == len(rows) and tuple(plan.group_ends_E.tolist()) == ends
    assert plan.group_ends_E.dtype == torch.int32 and (plan.num_tokens, plan.top_k) == tuple(expert_TK.shape)
    assert plan.tokens_per_expert == pytest.approx(
        sum(problem.tokens[:world]) * problem.top_k / (world * problem.local_experts))

    x_PH, weight_P = exchange.dispatch(plan, x_TH, problem.wire, weight_TK)
    want_x, want_weight = naive_dispatch(problem, rank, inputs)
    assert isinstance(x_PH, MXTensor) == problem.wire.mxfp8 and x_PH.dtype == problem.dtype
    assert x_PH.shape == (len(rows), problem.hidden)
    assert torch.equal(bits(x_PH), want_x) and torch.equal(weight_P, want_weight)
    bare_PH, none = exchange.dispatch(plan, x_TH, problem.wire)
    assert none is None and torch.equal(bits(bare_PH), want_x)

    outputs = [outputs_of(problem, r, inputs, y_dtype or problem.dtype) for r in range(world)]
    y_TH, back_TK = exchange.combine(plan, outputs[rank][0], problem.wire, problem.dtype, outputs[rank][1])
    want_y, want_back = naive_combine(problem, rank, inputs, outputs, node_size)
    assert y_TH.dtype == problem.dtype and back_TK.dtype == torch.float32
    assert torch.equal(bits(y_TH), bits(want_y)) and torch.equal(back_TK, want_back)
    bare_TH, none = exchange.combine(plan, outputs[rank][0], problem.wire, problem.dtype)
    assert none is None and torch.equal(bits(bare_TH), bits(want_y))
    assert all(torch.equal(a, b) for a, b in zip(before, inputs[rank], strict=True))


PROBLEMS = {
    "random": Problem(),
    "skewed": Problem(routing="skewed", wire=MX),
    "dropped": Problem(routing="dropped", wire=MX),
    "all to one expert": Problem(routing="one expert"),
    "all to one rank": Problem(routing="one rank", wire=MX),
    "nowhere": Problem(routing="nowhere", wire=MX),
    "nobody has tokens": Problem(tokens=(0, 0, 0, 0), wire=MX),
    "only one rank has tokens": Problem(tokens=(0, 9, 0, 0)),
    "one token, one expert": Problem(tokens=(1, 1, 1, 1), top_k=1, local_experts=1),
    "more choices than experts": Problem(top_k=8, local_experts=1, tokens=(20, 3, 5, 8)),
    "more rows than a tile": Problem(tokens=(300, 1, 2, 280), local_experts=1, wire=MX),
    "not contiguous": Problem(contiguous=False),
    "not contiguous, mxfp8": Problem(contiguous=False, wire=MX),
    "not contiguous, one choice": Problem(contiguous=False, top_k=1),
    "floor": Problem(wire=Wire(True, 32, "floor")),
}
PROBLEMS |= {f"top_k {k}": Problem(top_k=k, wire=MX if k % 2 else PLAIN, tokens=(20, 13, 0, 31)) for k in range(1, 9)}
PROBLEMS |= {f"{dtype}, {wire.block_size if wire.mxfp8 else 'plain'}, {hidden}":
             Problem(dtype=dtype, wire=wire, hidden=hidden, tokens=(20, 13, 0, 31))
             for dtype in (torch.float32, torch.bfloat16, torch.float16)
             for wire, hidden in ((PLAIN, 32), (Wire(True, 32), 160), (Wire(True, 128), 256), (Wire(True, 128), 160))}


@pytest.mark.parametrize("name", PROBLEMS)
def test_two_ranks(ranks2, name):
    ranks2.run(check_exchange, PROBLEMS[name])


@pytest.mark.parametrize("name", PROBLEMS)
def test_four_ranks(ranks4, name):
    ranks4.run(check_exchange, PROBLEMS[name])


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_group_of_one(name):
    check_exchange(PROBLEMS[name])


@pytest.mark.parametrize("wire", [PLAIN, MX])
def test_float32_expert_outputs_round_once(ranks2, wire):
    """Partial sums of float32 rows (expert output biases) reach the wire's dtype in one step."""
    ranks2.run(check_exchange, Problem(wire=wire, top_k=4), torch.float32)


@pytest.mark.parametrize("wire", [PLAIN, MX])
@pytest.mark.parametrize("routing", ["random", "dropped"])
def test_dispatch_and_combine_are_each_others_transpose(ranks4, routing, wire):
    """<dispatch(x), y> = <x, combine(y)>, and the same of the numbers beside the rows, exactly, in small integers."""
    problem = Problem(routing=routing, wire=wire, top_k=4)
    inner = torch.tensor(ranks4.run(inner_products, problem), dtype=torch.float64).sum(0)
    assert inner[0] == inner[1] != 0 and inner[2] == inner[3] != 0


def inner_products(problem: Problem, exchange: Transport | None = None) -> list:
    exchange, rank = exchange or transport(), dist.get_rank()
    expert_TK, x_TH, weight_TK = problem.inputs(exchange.world_size)[rank]
    x_TH, weight_TK = x_TH.float().round().clamp(-2, 2).to(problem.dtype), (weight_TK * 9).round()
    plan = exchange.plan(expert_TK, problem.local_experts)
    x_PH, weight_P = exchange.dispatch(plan, x_TH, problem.wire, weight_TK)
    y_PH = torch.randint(-2, 3, x_PH.shape).to(problem.dtype)
    v_P = torch.randint(-9, 10, weight_P.shape).float()
    y_TH, v_TK = exchange.combine(plan, y_PH, problem.wire, problem.dtype, v_P)
    x_PH = x_PH.dequantize() if problem.wire.mxfp8 else x_PH

    def inner(a, b):
        return (a.double() * b.double()).sum().item()

    return [inner(x_PH, y_PH), inner(x_TH, y_TH), inner(weight_P, v_P), inner(weight_TK, v_TK)]


@pytest.mark.parametrize("wire", [PLAIN, MX, Wire(True, 128)])
def test_one_message_a_direction_and_one_row_a_token_and_rank(ranks4, wire):
    problem = Problem(wire=wire, top_k=6, local_experts=2, routing="dropped")
    row_bytes = problem.hidden * 2 if not wire.mxfp8 else problem.hidden + -(-problem.hidden // wire.block_size)
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
    exchange, rank = transport(), dist.get_rank()
    expert_TK, x_TH, weight_TK = problem.inputs(exchange.world_size)[rank]
    sent, now, original = {}, [], dist.all_to_all_single

    def counted(output, tensor, *args, **kwargs):
        now.append(tensor.numel() * tensor.element_size())
        return original(output, tensor, *args, **kwargs)

    def step(name, fn, *args):
        result = fn(*args)
        sent[name] = list(now)
        now.clear()
        return result

    dist.all_to_all_single = counted
    try:
        plan = step("plan", exchange.plan, expert_TK, problem.local_experts)
        x_PH, weight_P = step("dispatch", exchange.dispatch, plan, x_TH, problem.wire, weight_TK)
        y_PH = x_PH.dequantize() if problem.wire.mxfp8 else x_PH
        step("combine", exchange.combine, plan, y_PH, problem.wire, problem.dtype, weight_P)
        step("dispatch bare", exchange.dispatch, plan, x_TH, problem.wire)
    finally:
        dist.all_to_all_single = original
    return sent


@pytest.mark.parametrize("wire", [PLAIN, MX, Wire(True, 128)])
def test_nan_and_inf_stay_in_their_rows(ranks2, wire):
    ranks2.run(not_finite, Problem(wire=wire, top_k=3, hidden=160))


def not_finite(problem: Problem):
    exchange, rank = transport(), dist.get_rank()
    inputs = problem.inputs(exchange.world_size)
    for _, x_TH, _ in inputs:
        x_TH[3, 40], x_TH[5, 0], x_TH[5, 100] = float("nan"), float("inf"), float("-inf")
    expert_TK, x_TH, weight_TK = inputs[rank]
    plan = exchange.plan(expert_TK, problem.local_experts)
    x_PH, _ = exchange.dispatch(plan, x_TH, problem.wire, weight_TK)
    assert torch.equal(bits(x_PH), naive_dispatch(problem, rank, inputs)[0])
    y_PH = x_PH.dequantize() if problem.wire.mxfp8 else x_PH
    y_TH, _ = exchange.combine(plan, y_PH, problem.wire, problem.dtype)
    block = problem.wire.block_size if problem.wire.mxfp8 else 1
    touched = torch.zeros(y_TH.shape, dtype=torch.bool)
    for token, column in ((3, 40), (5, 0), (5, 100)):
        touched[token, column // block * block:(column // block + 1) * block] = True
    assert torch.equal(~y_TH.isfinite(), touched)


def test_two_plans_in_flight_and_the_same_bits_again(ranks4):
    ranks4.run(two_plans)


def two_plans(exchange: Transport | None = None):
    exchange, rank = exchange or transport(), dist.get_rank()
    problems = [Problem(wire=MX), Problem(wire=MX, seed=8, routing="skewed", top_k=3)]
    inputs = [problem.inputs(exchange.world_size)[rank] for problem in problems]

    def plan(i):
        return exchange.plan(inputs[i][0], problems[i].local_experts)

    def dispatch(i, plan):
        return exchange.dispatch(plan, inputs[i][1], MX, inputs[i][2])

    def combine(i, plan, rows):
        return exchange.combine(plan, rows[0].dequantize(), MX, torch.bfloat16, rows[1])

    alone = []
    for i in range(2):
        p = plan(i)
        rows = dispatch(i, p)
        alone.append((*rows, *combine(i, p, rows)))
    plans = [plan(0), plan(1)]
    rows = [None, dispatch(1, plans[1])]
    rows[0] = dispatch(0, plans[0])
    mixed = [(*rows[i], *combine(i, plans[i], rows[i])) for i in range(2)]
    for a, b in zip(alone, mixed, strict=True):
        assert all(torch.equal(bits(left), bits(right)) for left, right in zip(a, b, strict=True))
