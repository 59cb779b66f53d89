# SPDX-License-Identifier: Apache-2.0
"""Two hops with a capacity: the bits of the naive exchange, over every wire. What does not fit is an error on all
ranks, or is dropped as the flat transport over NVLink drops it."""

import io
import math
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial, wraps
from unittest import mock

import deepspeed.comm as dist
import emulator
import nvlink_cases as cases
import pytest
import torch
from nvlink_cases import count_dropped, those_that_fit
from peer_wires import peer_hops
from rank_pool import set_timeout
from slow import slow_except
from test_expert_ffn import RECIPES
from test_hierarchical import Adversary, over, two_hops
from test_hierarchical_faults import Gone, PeerLeaving
from test_peer_wire import hops_of_all_cases, over_nvshmem
from test_transport import MX, Problem, bits, naive_combine, naive_dispatch, outputs_of, rows_of

from ds_mxfp8_moe.transport import Transport, Wire, capacity
from ds_mxfp8_moe.transport.capacity import Findings, cut, padded, room_of
from ds_mxfp8_moe.transport.choose import choose
from ds_mxfp8_moe.transport.deadline import PeerFailure
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from ds_mxfp8_moe.transport.nvlink import NVLink
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from ds_mxfp8_moe.transport.static_hops import StaticHierarchical
from ds_mxfp8_moe.transport.wires import HostWire

needs_the_emulator = pytest.mark.skipif(emulator.obstacle() is not None, reason=str(emulator.obstacle()))
FITTING = {"capacity_factor": 8.0}
DROPPING = {"capacity_factor": 1.0, "on_overflow": "drop"}
EVEN = Problem(tokens=(37, ) * 8, top_k=3)
HOT = Problem(tokens=(160, ) * 8, local_experts=1, routing="one expert", hidden=32)
SOME = {"random": EVEN, "dropped": replace(EVEN, routing="dropped", wire=MX, top_k=4),
        "skewed": replace(EVEN, routing="skewed", wire=Wire(True, 128), hidden=160),
        "one expert": replace(EVEN, routing="one expert"), "one rank": replace(EVEN, routing="one rank", wire=MX),
        "nowhere": replace(EVEN, routing="nowhere", wire=MX), "no tokens": replace(EVEN, tokens=(0, ) * 8),
        "one token": replace(EVEN, tokens=(1, ) * 8, top_k=1, local_experts=1),
        "more choices than experts": replace(EVEN, top_k=8, local_experts=1),
        "not contiguous": replace(EVEN, contiguous=False, wire=MX), "float32": replace(EVEN, dtype=torch.float32)}
CUT = {"one expert": HOT, "mxfp8": replace(HOT, wire=MX, top_k=3),
       "one of three": replace(HOT, tokens=(300, ) * 8, local_experts=3, top_k=1, wire=Wire(True, 128)),
       "one rank": replace(HOT, local_experts=3, tokens=(300, ) * 8, routing="one rank", wire=MX),
       "skewed": replace(HOT, local_experts=4, tokens=(300, ) * 8, top_k=3, routing="skewed")}


def those_that_pass(experts: list, local_experts: int, node_size: int, room: int) -> list:
    """The ids of every rank, with -1 for choices whose tokens do not fit between two ranks of a node."""
    kept = [expert_TK.clone() for expert_TK in experts]
    for rank in range(len(experts)):
        for index in range(node_size):
            there = [(ids // local_experts == rank) & (ids >= 0) for ids in kept[index::node_size]]
            tokens = [served.any(1).nonzero().squeeze(1) for served in there]
            total, before = sum(map(len, tokens)), 0
            for ids, served, rows in zip(kept[index::node_size], there, tokens, strict=True):
                upto = before + len(rows)
                if total > room:
                    for token in rows[upto * room // total - before * room // total:]:
                        ids[token, served[token]] = -1
                before = upto
    return kept


def those_kept(experts: list, local_experts: int, room: int, node_size: int, capacity_factor: float) -> list:
    T, K = experts[0].shape
    inside = min(padded(math.ceil(capacity_factor * T * K / node_size)), len(experts) // node_size * T)
    return those_that_fit(those_that_pass(experts, local_experts, node_size, inside), local_experts, room)


def static(hops: Hops, name: str = "moe", **keys) -> StaticHierarchical:
    return StaticHierarchical(hops, name, **keys)


def check(problem: Problem, keys: dict, hops: Hops, drops: bool = False,
          made: Callable[[Transport], Transport] = lambda transport: transport) -> None:
    """The whole exchange, twice, against the naive one of the choices that fit. `made`: of the transport."""
    ours, rank, world = static(hops, **keys), dist.get_rank(), dist.get_world_size()
    exchange = made(ours)
    local, K = problem.local_experts, problem.top_k
    inputs = problem.inputs(world)
    expert_TK, x_TH, weight_TK = inputs[rank]
    before = [t.clone() for t in inputs[rank]]
    room = room_of(ours.capacity_factor, problem.tokens[0], K, world, local)
    given = [expert for expert, _, _ in inputs]
    experts = those_kept(given, local, room, hops.node_size, ours.capacity_factor)
    assert drops == any(count_dropped(given, experts, r, local) for r in range(world))
    inputs = [(expert, x, weight) for expert, (_, x, weight) in zip(experts, inputs, strict=True)]
    rows, ends = rows_of(rank, local, experts)
    want_x, want_weight = naive_dispatch(problem, rank, inputs)
    outputs = [outputs_of(problem, r, inputs, problem.dtype) for r in range(world)]
    want_y, want_back = naive_combine(problem, rank, inputs, outputs, hops.node_size)
    behind = room - len(rows)
    y_PH, number_P = (torch.cat([t, t.new_full((behind, *t.shape[1:]), float("nan"))]) for t in outputs[rank])
    counted = ours.dropped
    for _ in range(2):
        plan = exchange.plan(expert_TK, local)
        assert plan.num_rows == room and tuple(plan.group_ends_E.tolist()) == ends
        assert plan.group_ends_E.dtype == torch.int32
        assert plan.tokens_per_expert == pytest.approx(problem.tokens[0] * K / local)
        x_PH, weight_P = exchange.dispatch(plan, x_TH, problem.wire, weight_TK)
        assert x_PH.shape == (room, problem.hidden) and not weight_P[len(rows):].any()
        assert torch.equal(bits(x_PH)[:len(rows)], want_x) and torch.equal(weight_P[:len(rows)], want_weight)
        bare_PH, none = exchange.dispatch(plan, x_TH, problem.wire)
        assert none is None and torch.equal(bits(bare_PH)[:len(rows)], want_x)
        y_TH, back_TK = exchange.combine(plan, y_PH, problem.wire, problem.dtype, number_P)
        assert torch.equal(bits(y_TH), bits(want_y)) and torch.equal(back_TK, want_back)
        bare_TH, none = exchange.combine(plan, y_PH, problem.wire, problem.dtype)
        assert none is None and torch.equal(bits(bare_TH), bits(want_y))
    assert ours.dropped - counted == 2 * count_dropped(given, experts, rank, local)
    hops.check()
    assert all(torch.equal(a, b) for a, b in zip(before, (expert_TK, x_TH, weight_TK), strict=True))


# ---------------------------------------------------------------- over the host


def check_over_host(problem: Problem, keys: dict, node_size: int, drops: bool = False) -> None:
    check(problem, keys, two_hops(node_size).hops, drops)


@pytest.mark.parametrize("on_overflow", ["error", "drop"])
@pytest.mark.parametrize("node_size", [2, 1])
@pytest.mark.parametrize("name", SOME)
def test_where_all_rows_fit(ranks4, name, node_size, on_overflow):
    ranks4.run(check_over_host, SOME[name], FITTING | {"on_overflow": on_overflow}, node_size)


@pytest.mark.parametrize("node_size", [2, 1])
@pytest.mark.parametrize("name", CUT)
def test_rows_that_do_not_fit_are_dropped(ranks4, name, node_size):
    ranks4.run(check_over_host, CUT[name], DROPPING, node_size, True)


@pytest.mark.parametrize("node_size", [2, 3])
@pytest.mark.parametrize("name", slow_except(["dropped", "skewed", "one rank"], "skewed"))
def test_six_ranks(ranks6, name, node_size):
    ranks6.run(check_over_host, SOME[name], FITTING, node_size)
    ranks6.run(check_over_host, CUT["skewed"], DROPPING, node_size, True)


@dataclass(frozen=True)
class ThroughOne(Problem):
    """Only the first rank of each node routes its tokens."""

    def inputs(self, world: int) -> list:
        return [(torch.full_like(ids, -1) if rank % 2 else ids, *others)
                for rank, (ids, *others) in enumerate(super().inputs(world))]


THROUGH_ONE = ThroughOne(tokens=(160, ) * 8, top_k=1, local_experts=1, routing="one expert", hidden=32)


def test_rows_that_do_not_fit_between_two_ranks_are_dropped(ranks4):
    """The expert would have room for all of them."""
    ranks4.run(check_over_host, THROUGH_ONE, DROPPING, 2, True)
    ranks4.run(check_over_host, replace(THROUGH_ONE, wire=MX, tokens=(157, ) * 8), DROPPING, 2, True)


def check_over_adversary(problem: Problem) -> None:
    class Padded(Adversary):
        """The room for rows is sent as rows are."""

        def exchange(self, x, send_splits, recv_splits, where, most, *keys):
            if isinstance(send_splits, torch.Tensor):
                send_splits = recv_splits = (most, ) * len(self.ranks)
            return super().exchange(x, send_splits, recv_splits, where, most, *keys)

    check(problem, DROPPING, over(2, between=Padded, inside=Padded).hops, True)


def test_a_wire_that_delays_and_reorders_changes_no_bit(ranks4):
    ranks4.run(check_over_adversary, CUT["skewed"])


class Poisoned(HostWire):
    """Brings anything where there are no rows, as wires of kernels do: ids of expert 0, or numbers of none."""

    byte = 0

    def exchange(self, x, send_splits, recv_splits, where, most, *keys):
        out = super().exchange(x, send_splits, recv_splits, where, most, *keys)
        if isinstance(recv_splits, torch.Tensor):
            came = (torch.arange(most) < recv_splits.view(-1, 1)).view(-1)
            out.view(torch.uint8)[~came] = self.byte
        return out


def check_poisoned(problem: Problem, byte: int) -> None:
    with mock.patch.object(Poisoned, "byte", byte):
        check(problem, FITTING, over(2, between=Poisoned, inside=Poisoned).hops)


@pytest.mark.parametrize("byte", [0, 0x7F])
@pytest.mark.parametrize("name", ["dropped", "skewed", "nowhere"])
def test_what_lies_in_room_without_rows_does_not_count(ranks4, name, byte):
    ranks4.run(check_poisoned, SOME[name], byte)


def test_cut_as_the_flat_transport_cuts():
    generator = torch.Generator().manual_seed(5)
    for _ in range(300):
        E, ranks = (int(torch.randint(1, most, (), generator=generator)) for most in (9, 4))
        experts = [((torch.rand(40 * E, 3, generator=generator)**3) * E).long() for _ in range(ranks)]
        room = 128 * int(torch.randint(E, 4 * E + 1, (), generator=generator))
        kept = those_that_fit(experts, E, room)
        sizes, want = (torch.stack([torch.stack([(ids == e).sum() for e in range(E)]) for ids in each]).sum(0)
                       for each in (experts, kept))
        assert torch.equal(cut(sizes, room), want)


# ---------------------------------------------------------------- over kernels, in the emulator


@pytest.fixture(scope="module")
def built():
    """Builds the emulator once, before ranks load it while a deadline runs."""
    emulator.build()


def check_over_peers(problem: Problem, keys: dict, node_size: int, drops: bool, adversary: bool = True) -> None:
    hops = hops_of_all_cases(node_size)
    module = (hops.between if node_size == 1 else hops.inside).memory.extension
    emulator.set_adversary(module, adversary)
    try:
        check(problem, keys, hops, drops)
    finally:
        emulator.set_adversary(module, False)


@needs_the_emulator
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("node_size", [2, 1])
@pytest.mark.parametrize("name", slow_except(SOME, "random", "dropped", "nowhere", "no tokens"))
def test_where_all_rows_fit_over_peer_memory(ranks4, name, node_size):
    ranks4.run(check_over_peers, SOME[name], FITTING, node_size, False)


@needs_the_emulator
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("node_size", [2, 1])
@pytest.mark.parametrize("name", slow_except(CUT, "mxfp8", "skewed"))
def test_rows_that_do_not_fit_are_dropped_over_peer_memory(ranks4, name, node_size):
    ranks4.run(check_over_peers, CUT[name], DROPPING, node_size, True)


def check_over_nvshmem(problem: Problem, keys: dict, node_size: int, drops: bool) -> int:
    hops = over_nvshmem(node_size)
    before = hops.between.puts
    emulator.set_adversary(hops.between.memory.extension, True)
    check(problem, keys, hops, drops)
    assert hops.between.host is None
    return hops.between.puts - before


@needs_the_emulator
@pytest.mark.slow
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("node_size", [2, 1])
@pytest.mark.parametrize("name, keys, drops", [("dropped", FITTING, False), ("nowhere", FITTING, False),
                                               ("skewed", DROPPING, True)])
def test_the_kernel_over_nvshmem(ranks4, name, keys, drops, node_size):
    emulator.build_nvshmem()
    problem, others = CUT[name] if drops else SOME[name], 4 // node_size - 1
    for puts in ranks4.run(check_over_nvshmem, problem, keys, node_size, drops):
        if name == "nowhere":  # the counts of two plans, and no room without rows
            assert puts == 2 * others
        else:
            assert puts > 2 * others


def beside_flat(problem: Problem, keys: dict) -> None:
    """The rows, weights and ends of groups that the flat transport over NVLink gives."""
    hops, rank = hops_of_all_cases(2), dist.get_rank()
    memory = PeerMemory(dist.new_group(list(range(4))), emulator.load(rank), provider=emulator.Shared)
    flat, expert_TK, x_TH, weight_TK = NVLink(memory, "moe", 1, **keys), *problem.inputs(4)[rank]
    want, got = [], []
    for exchange, into in ((flat, want), (static(hops, **keys), got)):
        plan = exchange.plan(expert_TK, problem.local_experts)
        x_PH, weight_P = exchange.dispatch(plan, x_TH, problem.wire, weight_TK)
        end = int(plan.group_ends_E[-1])
        into.extend((plan.num_rows, plan.group_ends_E, bits(x_PH)[:end], weight_P, exchange.dropped))
    assert want[0] == got[0] and all(torch.equal(*pair) for pair in zip(want[1:4], got[1:4], strict=True))


@needs_the_emulator
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("problem, keys", [(SOME["dropped"], FITTING), (replace(CUT["skewed"], top_k=8), DROPPING)])
def test_the_rows_of_the_flat_transport(ranks4, problem, keys):
    ranks4.run(beside_flat, problem, keys)


# ---------------------------------------------------------------- errors


def with_findings_of_its_own(function: Callable) -> Callable:
    """A failure stays. Engines of later cases in this process would raise it before their steps."""
    @wraps(function)
    def call(*args):
        with mock.patch.object(capacity, "_OF_GROUP", {}):
            return function(*args)
    return call


@with_findings_of_its_own
def overflowing(hops_of: Callable, problem: Problem) -> str:
    exchange, expert_TK = static(hops_of(2), "block.3.moe", capacity_factor=1.0), problem.inputs(4)[dist.get_rank()][0]
    with pytest.raises(PeerFailure) as caught:
        exchange.plan(expert_TK, 1)
    with pytest.raises(PeerFailure):  # the layer stays failed
        exchange.plan(torch.full_like(expert_TK, -1), 1)
    return str(caught.value)


def new_host_hops(node_size: int) -> Hops:
    return Hops.of(dist.new_group(list(range(4))), node_size, "moe")


def new_peer_hops(node_size: int) -> Hops:
    return peer_hops(dist.new_group(list(range(4))), node_size)


HOPS = [new_host_hops, pytest.param(new_peer_hops, marks=needs_the_emulator)]


@pytest.mark.parametrize("hops_of", HOPS)
@pytest.mark.parametrize("problem, rows", [
    (HOT, "512 rows: rank 3 would get 1280 rows, "),
    (THROUGH_ONE, "128 rows: rank 3 would get 320 rows, through one rank of its node, ")], ids=["expert", "pair"])
def test_too_many_rows_for_a_capacity(ranks4, hops_of, problem, rows):
    if hops_of is new_peer_hops:
        emulator.build()
    for rank, text in enumerate(ranks4.run(overflowing, hops_of, problem)):
        assert text == (f"rank {rank}: 'counts' of block.3.moe, with room for {rows}more than its capacity. "
                        'Raise "capacity_factor", or leave it out, or write "on_overflow": "drop"')


@with_findings_of_its_own
def mixed_up(hops_of: Callable, changes: dict) -> tuple:
    """Rank 1 makes another plan than the others."""
    keys = {"name": "a", "tokens": 8, "capacity_factor": 2.0, "top_k": 2, "rows": "", "on_overflow": "error"}
    keys |= changes if dist.get_rank() == 1 else {}
    exchange = static(hops_of(2), keys["name"], capacity_factor=keys["capacity_factor"],
                      on_overflow=keys["on_overflow"])
    with pytest.raises(PeerFailure) as caught:
        exchange.plan(torch.zeros((keys["tokens"], keys["top_k"]), dtype=torch.int64), 2, rows=keys["rows"])
    return caught.value.missing, str(caught.value)


@pytest.mark.parametrize("hops_of", HOPS)
@pytest.mark.parametrize("changes", [{"name": "b"}, {"tokens": 9}, {"capacity_factor": 3.0}, {"top_k": 3},
                                     {"rows": "tokens of 64"}, {"on_overflow": "drop"}], ids=str)
def test_ranks_in_different_calls_raise_everywhere_before_a_row_travels(ranks4, hops_of, changes):
    if hops_of is new_peer_hops:
        emulator.build()
    for rank, (missing, text) in enumerate(ranks4.run(mixed_up, hops_of, changes)):
        other = 0 if rank == 1 else 1
        assert missing == (other, )
        assert f"rank {rank}: 'counts' of {'ab'['name' in changes and rank == 1]}: rank {other} is in another" in text
        assert "equally many tokens" in text


@with_findings_of_its_own
def unnoticed(phase: str, byte: int) -> None:
    """Rank 3 does not come to `phase`, and the hosts of the others go on, as they would on GPUs."""
    group = dist.new_group(list(range(4)))
    set_timeout(timedelta(seconds=2), group)
    hops, rank = peer_hops(group, 2, PeerLeaving), dist.get_rank()
    exchange, problem = static(hops, **DROPPING), CUT["skewed"]
    expert_TK, x_TH, weight_TK = problem.inputs(4)[rank]

    def step() -> None:
        plan = exchange.plan(expert_TK, problem.local_experts)
        x_PH, weight_P = exchange.dispatch(plan, x_TH, MX, weight_TK)
        exchange.combine(plan, x_PH.dequantize(), MX, problem.dtype, weight_P)

    step()
    hops.between.at = f"'{phase}' of moe, hop between nodes" if rank == 3 else ""
    with mock.patch.object(PeerMemory, "check"), mock.patch.object(Findings, "check"), \
         mock.patch.object(torch, "empty", lambda *args, **keys: torch.full(*args, byte, **keys)), \
         pytest.raises(Gone) if rank == 3 else nullcontext():
        step()
    dist.barrier()
    if rank != 3:
        with pytest.raises(PeerFailure):
            exchange.plan(expert_TK, problem.local_experts)


@needs_the_emulator
@pytest.mark.slow
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("phase, byte", [("counts", 0x7F), ("counts", 0xFF), ("expert ids", 0x7F), ("dispatch", 0xFF),
                                         ("combine", 0x7F)])
def test_what_a_failed_exchange_leaves_breaks_nothing_before_the_host_looks(ranks4, phase, byte):
    """On a GPU, an index out of range would end the process, and hide why."""
    ranks4.run(unnoticed, phase, byte)


# ---------------------------------------------------------------- before steps


@with_findings_of_its_own
def warned() -> list:
    """What each step's check prints, if a layer drops choices in the first."""
    hops, lines = Hops.of(dist.new_group(list(range(4))), 2, "moe"), []
    expert_TK = HOT.inputs(4)[dist.get_rank()][0]
    for step in range(3):
        if step < 2:
            static(hops, "one", **DROPPING).plan(expert_TK, 1)
        with redirect_stdout(io.StringIO()) as out:
            Findings.wait_and_check_all()
        lines.append(out.getvalue())
    assert static(hops, "two", **DROPPING).dropped == 0
    return lines


def test_a_line_says_how_many_choices_were_dropped(ranks4):
    *none, three = ranks4.run(warned)
    assert none == [[""] * 3] * 3
    lost = 4 * 320 - (384 + 128)  # the share of 320 choices and 127 that pad the group, padded
    assert three == [f"mxfp8_moe: WARNING: one: {lost} choices for the experts of rank 3 were dropped since the last "
                     'such line: more rows came than fit. To drop fewer, raise "capacity_factor"\n', "", ""]


# ---------------------------------------------------------------- layers


def chosen(keys: dict) -> tuple:
    exchange = choose(dist.new_group(list(range(4))), "moe", "hierarchical", node_size=2, **keys)
    return type(exchange).__name__, getattr(exchange, "capacity_factor", None), getattr(exchange, "on_overflow", None)


@pytest.mark.parametrize("keys, wanted", [({}, ("Hierarchical", None, None)),
                                          ({"capacity_factor": 2.0}, ("StaticHierarchical", 2.0, "error")),
                                          (DROPPING, ("StaticHierarchical", 1.0, "drop"))])
def test_the_keys_choose_it(ranks4, keys, wanted):
    assert ranks4.run(chosen, keys) == [wanted] * 4


def check_layer(recipe, keys: dict) -> None:
    want, got = (cases.layer(exchange, recipe, tokens=(37, ) * 4)
                 for exchange in (two_hops(2), static(two_hops(2).hops, **keys)))
    for key, value in want.items():
        cases.same(key, value, got[key])


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_a_layer_gives_the_bits_of_buffers_that_fit(ranks4, recipe_name):
    ranks4.run(check_layer, RECIPES[recipe_name], FITTING)


def check_layer_dropped(recipe) -> None:
    hops = two_hops(2).hops
    cases.check_layer_dropped(recipe, Hierarchical(hops, "oracle"), static(hops, **DROPPING),
                              partial(those_kept, node_size=2, capacity_factor=DROPPING["capacity_factor"]))


@pytest.mark.parametrize("recipe_name", ["hp-128", "mxfp8-32", "bf16"])
def test_a_layer_that_drops_computes_the_same_bits(ranks4, recipe_name):
    ranks4.run(check_layer_dropped, RECIPES[recipe_name])
