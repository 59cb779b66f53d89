# SPDX-License-Identifier: Apache-2.0
"""The NVLink transport on GPUs, where ranks share one and where each has its own.

Exchanges are those of tests/support/conformance.py. Layers are compared with the collective transport. If a peer
stalls, the others raise an error that names it, and their GPU still works.

Memcheck and racecheck report nothing for the tests below, and memcheck nothing for AllToAll's tests
(test_all_to_all_gpu.py -k 2-sharing). Tests of whole layers are left out: racecheck takes the flags by which Triton's
warp-specialised GEMMs start their warps for races.

    compute-sanitizer --tool memcheck|racecheck --target-processes all \
        python -m pytest -o addopts= tests/gpu/test_nvlink_gpu.py -k "2-sharing and test_same_bits"
"""

import dataclasses
import random
from datetime import timedelta
from functools import cache

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed

from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.config import MXFP8MoEConfig
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.ops.op_builder.nvlink import try_load
from ds_mxfp8_moe.transport.choose import choose
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.deadline import GRACE_SECONDS, PeerError
from ds_mxfp8_moe.transport.nvlink import NVLink
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.gpu.capture import capture
from tests.support import nvlink_cases as cases
from tests.support.conformance import (
    MX32,
    MX128,
    OF_KERNELS,
    PLAIN,
    PROBLEMS,
    Problem,
    check,
    expected,
    on_device,
    same,
    until,
)
from tests.support.expert_ffn_cases import RECIPES, formula, make_routes
from tests.support.expert_ffn_cases import problem as ffn_problem
from tests.support.nvlink_cases import NAME, layer
from tests.support.rank_pool import set_timeout

BF16, FP32 = torch.bfloat16, torch.float32
FIRST_EPOCH = 2**32 - 24  # wraps within the first cases
DEADLINE = timedelta(seconds=8)
SECONDS = 240.0  # of a case: the first one builds the extension
CYCLES_PER_MS = 2_000_000

CASES = PROBLEMS | OF_KERNELS | {
    "one block of 32": Problem(hidden=32, row_format=MX128),
    "odd count of blocks": Problem(hidden=32 * 11, row_format=MX32),
    "hidden 2048": Problem(hidden=2048, top_k=6, local_experts=8, row_format=MX128),
    "hidden 7168": Problem(hidden=7168, top_k=8, local_experts=8, row_format=MX128),
    "hidden 7168, plain": Problem(hidden=7168, top_k=8, local_experts=8),
    "staging grows": Problem(tokens=(900, 1100, 700, 1000, 500, 600, 800, 400), hidden=2080, dtype=FP32, top_k=6),
    "many chunks": Problem(tokens=(4097, 3000, 0, 5003, 100, 2000, 900, 4096), hidden=64, row_format=MX128),
}


@cache
def memory() -> PeerMemory:
    """The staging of all cases of this process. It has a group of its own."""
    return new_memory(torch.distributed.new_group(), FIRST_EPOCH)


def new_memory(group, first_epoch: int = 1) -> PeerMemory:
    module, reason = try_load()
    assert module is not None, reason
    return PeerMemory(group, module, first_epoch)


def nvlink() -> NVLink:
    return NVLink(memory(), NAME)


def check_case(case: Problem, times: int = 2) -> None:
    check(case, nvlink(), times=times)
    memory().reports.check()


@pytest.mark.parametrize("name", CASES)
def test_same_bits(pool, name):
    pool.run(check_case, CASES[name], seconds=SECONDS)


# ---------------------------------------------------------------- random delays


@dataclasses.dataclass(frozen=True)
class Delayed(NVLink):
    """Keeps the device busy for up to 5 ms before each phase."""

    delays: random.Random = dataclasses.field(default_factory=random.Random, compare=False)

    def _wait(self):
        torch.cuda._sleep(int(self.delays.choice((0, 0.1, 1, 5)) * self.delays.random() * CYCLES_PER_MS))

    def plan(self, *args, **kwargs):
        self._wait()
        return super().plan(*args, **kwargs)

    def dispatch(self, *args, **kwargs):
        self._wait()
        return super().dispatch(*args, **kwargs)

    def combine(self, *args, **kwargs):
        self._wait()
        return super().combine(*args, **kwargs)


STRESSED = [Problem(row_format=MX128, top_k=4), Problem(), Problem(routing="skewed", row_format=MX32, hidden=160),
            Problem(routing="dropped", hidden=2048, top_k=6, row_format=MX128),
            Problem(tokens=(0, 9, 1, 0, 3, 0, 0, 2), top_k=1),
            Problem(tokens=(1300, 700, 90, 2000, 0, 400, 4, 900), hidden=512, top_k=3, local_experts=8,
                    row_format=MX128)]


def stress(repetitions: int) -> None:
    """Forward's exchanges, then backward's (unquantized out, quantized back) over the same plan; any order of cases.

    Differences are counted on the device, so that the host runs ahead and phases of repetitions meet.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange = Delayed(memory(), "stress", delays=random.Random(rank))
    wanted = []
    for case in STRESSED:
        there, back = (expected(dataclasses.replace(case, row_format=wire), rank, world) for wire in
                       (case.row_format, dataclasses.replace(case.row_format, mxfp8=not case.row_format.mxfp8)))
        end = there["end"]
        want = {"x": there["x"][:end], "weight": there["weight"], "y": there["y"], "number": there["number"],
                "g": back["x"][:end], "grad": back["y"], "grad_number": back["number"]}
        wanted.append({"case": case, "end": end, "bits": {key: device_bits(value) for key, value in want.items()},
                       "on_device": on_device(there["inputs"]) + on_device(there["answers"])})
    wrong = {key: torch.zeros((), dtype=torch.int64, device="cuda") for key in wanted[0]["bits"]}
    order = random.Random(7)  # alike on all ranks
    for _ in range(repetitions):
        want = order.choice(wanted)
        case, (expert_TK, x_TH, weight_TK, y_PH, number_P) = want["case"], want["on_device"]
        back = dataclasses.replace(case.row_format, mxfp8=not case.row_format.mxfp8)
        plan, got = exchange.plan(expert_TK, case.local_experts), {}
        got["x"], got["weight"] = exchange.dispatch(plan, x_TH, case.row_format, weight_TK)
        got["y"], got["number"] = exchange.combine(plan, y_PH, case.row_format, case.dtype, number_P)
        got["g"], _ = exchange.dispatch(plan, x_TH, back)
        got["grad"], got["grad_number"] = exchange.combine(plan, y_PH, back, case.dtype, number_P)
        got |= {key: until(got[key], want["end"]) for key in ("x", "g")}
        for key, value in got.items():
            wrong[key] += (device_bits(value) != want["bits"][key]).sum()
    assert {key: count.item() for key, count in wrong.items()} == dict.fromkeys(wrong, 0)
    memory().reports.check()


def device_bits(x) -> torch.Tensor:
    """`bits`, on the GPU."""
    if hasattr(x, "qdata"):
        return torch.cat([x.qdata.cuda().view(torch.uint8), x.scale_bytes.cuda()], dim=1)
    x = x.cuda()
    if x.dtype == torch.uint8:
        return x
    return torch.where(x.isnan(), float("nan"), x).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def test_random_delays(pool, request):
    repetitions = request.config.getoption("--stress")
    pool.run(stress, repetitions, seconds=SECONDS + repetitions)


def on_two_streams() -> None:
    """Rank 0 is late on the first stream. It launches both exchanges before the first one ends."""
    case, exchange = Problem(), nvlink()
    expert_TK, x_TH, weight_TK = on_device(case.inputs(dist.get_world_size())[dist.get_rank()])
    plan = exchange.plan(expert_TK, case.local_experts)
    end = int(plan.group_ends_E[-1])
    both = x_TH, x_TH.roll(1, dims=0)
    want = [exchange.dispatch(plan, x, case.row_format, weight_TK)[0].cpu() for x in both]
    torch.cuda.synchronize()
    got = []
    for i, x in enumerate(both):
        with torch.cuda.stream(torch.cuda.Stream()):
            if i == 0 and dist.get_rank() == 0:
                torch.cuda._sleep(100 * CYCLES_PER_MS)
            got.append(exchange.dispatch(plan, x, case.row_format, weight_TK)[0])
    torch.cuda.synchronize()
    memory().reports.check()
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        same(f"rows {i}", until(a, end), until(b, end))


def test_exchanges_on_several_streams_come_one_after_the_other(pool):
    pool.run(on_two_streams, seconds=SECONDS)


# ---------------------------------------------------------------- peers that fail


def with_deadline() -> NVLink:
    """Exchanges over a new group with DEADLINE."""
    group = torch.distributed.new_group()
    set_timeout(DEADLINE, group)
    return NVLink(new_memory(group), NAME)


def failing(phase: str) -> tuple | None:
    """The GPU still works afterwards, and so does the group of all cases."""
    told = cases.failing(phase, Problem(tokens=(40, ) * 8), with_deadline())
    assert (torch.ones(1000, device="cuda") * 2).sum().item() == 2000
    check_case(Problem(row_format=MX128), times=1)
    return told


@pytest.mark.parametrize("phase", ["counts", "dispatch", "combine"])
def test_a_stalled_peer_is_named_in_time(pool, phase):
    most = DEADLINE.total_seconds() + GRACE_SECONDS + 5
    cases.named_in_time(pool.run(failing, phase, seconds=SECONDS), phase, 0, most)


# ---------------------------------------------------------------- whole layers


class OnHost(Collective):
    """The collective transport for GPU tensors over gloo: kernels on the device, messages by way of the host."""

    def _exchange(self, x, send_splits, recv_splits, phase):
        return super()._exchange(x.cpu(), send_splits, recv_splits, phase).to(x.device)


def check_layer(recipe, **kwargs) -> None:
    want, got = (layer(exchange, recipe, **kwargs) for exchange in (OnHost(memory().group, "oracle"), nvlink()))
    for key, value in want.items():
        same(key, value, got[key])


@pytest.mark.parametrize("recipe_name", ["hp-128", "mxfp8-32", "bf16", "all-wires-mxfp8"])
def test_a_layer_computes_the_same_bits(pool, recipe_name):
    pool.run(check_layer, RECIPES[recipe_name], seconds=SECONDS)


@pytest.mark.parametrize("change", [{"routing": "dropped"}, {"routing": "one-expert"}, {"routing": "nowhere"},
                                    {"tokens": (0, 20, 3, 7, 0, 1, 50, 2)}, {"tokens": (0, ) * 8}, {"top_k": 3},
                                    {"calls": 2}, {"recompute": True}, {"name": "gelu"}], ids=str)
def test_a_layer_of_another_kind(pool, change):
    pool.run(check_layer, RECIPES["hp-128"], bias=True, **change, seconds=SECONDS)


def waits(recipe) -> tuple:
    """(host waits of one forward, host waits of forward and backward). CUDA itself raises at any other wait."""
    layer(nvlink(), recipe)  # sets up what is set up once
    forward, leaves, grad = cases.layer_of_this_rank(nvlink(), recipe)
    before = memory().reports.host_waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = forward(leaves["x"], leaves["weight"])
        of_forward = memory().reports.host_waits - before
        y.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return of_forward, memory().reports.host_waits - before


@pytest.mark.parametrize("recipe_name", ["hp-128", "mxfp8-32", "bf16"])
def test_the_host_waits_once(pool, recipe_name):
    assert pool.run(waits, RECIPES[recipe_name], seconds=SECONDS) == [(1, 1)] * pool.world_size


# ---------------------------------------------------------------- static: nothing waits, graphs can be captured


def overflow_in_a_replay() -> str:
    """Replays run no code on the host, but the check before the step finds rows that do not fit."""
    mine, case = new_memory(torch.distributed.new_group()), Problem(tokens=(600, ) * 8, top_k=1, local_experts=1)
    exchange, world = NVLink(mine, NAME, capacity_factor=1.0), dist.get_world_size()
    expert_TK = torch.arange(600, device="cuda").view(600, 1) % world
    x_TH = torch.randn(600, case.hidden, device="cuda", dtype=BF16)

    def step():
        return exchange.dispatch(exchange.plan(expert_TK, 1), x_TH, PLAIN)

    step()
    mine.wait_and_check()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        kept = step()
    for _ in range(2):
        graph.replay()
        mine.wait_and_check()
    expert_TK.zero_()
    graph.replay()
    with pytest.raises(PeerError) as caught:
        mine.wait_and_check()
    dist.barrier()
    del kept
    return str(caught.value)


def test_what_does_not_fit_in_a_replay_raises_before_the_step(pool):
    for text in pool.run(overflow_in_a_replay, seconds=SECONDS):
        assert "more than its capacity" in text and "capacity_factor" in text


DROPPING = {"capacity_factor": 1.0, "on_overflow": "drop"}


def dropped_in_replays() -> tuple:
    """Replays drop the same choices as eager runs, and count them. Returns how many were counted, and how often the
    host waited."""
    mine, tokens = new_memory(torch.distributed.new_group()), 600
    exchange, world, rank = NVLink(mine, NAME, **DROPPING), dist.get_world_size(), dist.get_rank()
    even = torch.arange(tokens, device="cuda").view(tokens, 1) % world
    torch.manual_seed(rank)
    x_TH, weight_TK = torch.randn(tokens, 256, device="cuda", dtype=BF16), torch.rand(tokens, 1, device="cuda")
    expert_TK = even.clone()
    rows = exchange.plan(expert_TK, 1).num_rows
    y_PH, number_P = torch.randn(rows, 256, device="cuda", dtype=BF16), torch.rand(rows, device="cuda")

    def step():
        plan = exchange.plan(expert_TK, 1)
        x_PH, weight_P = exchange.dispatch(plan, x_TH, PLAIN, weight_TK)
        y_TH, number_TK = exchange.combine(plan, y_PH, MX128, BF16, number_P)
        return plan.group_ends_E, x_PH, weight_P, y_TH, number_TK

    step()
    mine.wait_and_check()
    waited, graph = mine.reports.host_waits, torch.cuda.CUDAGraph()
    with capture(graph):
        captured = step()
    for ids in (even, torch.zeros_like(even), torch.full_like(even, world - 1), even, torch.zeros_like(even)):
        expert_TK.copy_(ids)
        graph.replay()
        got = [t.clone() for t in captured]
        want = step()
        end = int(want[0][-1])
        for name, a, b in zip(("ends", "x", "weight", "y", "number"), want, got, strict=True):
            a, b = (a[:end], b[:end]) if name == "x" else (a, b)  # nothing is written behind the last group
            same(name, a, b)
    waits = mine.reports.host_waits - waited
    mine.wait_and_check()
    dist.barrier()  # before the graph's memory goes
    return exchange.dropped, waits


def test_replays_drop_and_count(pool):
    world = pool.world_size
    lost = 600 * world - 768  # padded: 640 rows for the share of 600, and 127 that pad the group
    want = [0] * world
    want[0] += 2 * 2 * lost  # two of the routes, each in a replay and in an eager run
    want[-1] += 2 * lost
    assert pool.run(dropped_in_replays, seconds=SECONDS) == [(count, 0) for count in want]


def check_replays(recipe, transport) -> None:
    """Replays a graph of a layer's forward and backward with other tokens, weights and routes, some of them dropped.
    Compares it with eager runs."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ffn = ExpertFFN(formula("swiglu"), recipe, transport, 2)
    experts, xs, grads, routes = ffn_problem(world, "swiglu", num_experts=2 * world, dtype=BF16, tokens=(45, ) * 8)
    inputs = [(xs[rank], grads[rank], *routes[rank])]
    for routing in ("dropped", "random", "nowhere"):
        torch.manual_seed(len(inputs) * world + rank)
        x, grad = (torch.randn(45, xs[0].shape[1]).to(BF16) for _ in range(2))
        inputs.append((x, grad, *make_routes(routing, 45, 2, 2 * world)))
    inputs = [on_device(values) for values in inputs]
    weights = {role: [e[role].cuda().requires_grad_() for e in experts[2 * rank:2 * rank + 2]] for role in experts[0]}
    leaves = [w for ws in weights.values() for w in ws]
    x, grad, expert_TK, weight = (t.clone() for t in inputs[0])
    x, weight = x.requires_grad_(), weight.requires_grad_()

    def step():
        y = ffn(x, Routes(expert_TK=expert_TK, weight_TK=weight, num_experts=2 * world), weights)
        return y, *torch.autograd.grad(y, (x, weight, *leaves), grad)

    def load(values):
        with torch.no_grad():
            for t, value in zip((x, grad, expert_TK, weight), values, strict=True):
                t.copy_(value)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize(), dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        captured = step()
    for values in inputs + inputs[::-1]:
        load(values)
        graph.replay()
        got = [t.clone() for t in captured]
        want = step()
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            same(f"result {i}", a.detach().cpu(), b.detach())
    torch.cuda.synchronize(), dist.barrier()  # before the graph's memory goes


def replayed(recipe) -> int:
    """How often the host waited."""
    waited = memory().reports.host_waits
    check_replays(recipe, NVLink(memory(), NAME, capacity_factor=3.0))
    waits = memory().reports.host_waits - waited
    memory().wait_and_check()
    return waits


@pytest.mark.parametrize("recipe_name", ["hp-128", "mxfp8-128", "bf16"])
def test_graphs_replay_with_other_routes(pool, recipe_name):
    assert pool.run(replayed, RECIPES[recipe_name], seconds=SECONDS) == [0] * pool.world_size


# ---------------------------------------------------------------- as users have it


def beside_nccl(recipe, repetitions: int) -> None:
    """The usual setup: NCCL for everything else, and the transport that is chosen. Gradients are reduced while layers
    exchange, as with ZeRO's overlap_comm."""
    group = torch.distributed.new_group()
    collective, exchange = (choose(group, "moe", MXFP8MoEConfig(transport=requested))
                            for requested in ("collective", "nvlink"))
    want = layer(collective, recipe, tokens=(300, ) * 8)
    traffic = torch.zeros(32 << 20, device="cuda", dtype=BF16)
    for _ in range(repetitions):
        reductions = [dist.all_reduce(traffic, async_op=True) for _ in range(4)]
        for key, value in layer(exchange, recipe, tokens=(300, ) * 8).items():
            same(key, want[key], value)
        for reduction in reductions:
            reduction.wait()


@pytest.mark.parametrize("recipe_name", ["hp-128", "mxfp8-128", "bf16"])
def test_the_same_bits_as_nccl_and_beside_it(gpu_ranks, recipe_name):
    gpu_ranks.run(beside_nccl, RECIPES[recipe_name], 20, seconds=SECONDS)
