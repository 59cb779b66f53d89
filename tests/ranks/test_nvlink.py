# SPDX-License-Identifier: Apache-2.0
"""The NVLink transport on ranks without GPUs, over the emulator of CUDA: the table of exchanges, rows that do not fit,
and whole layers."""

import io
import re
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed

from ds_mxfp8_moe.transport import kernel_reports
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.deadline import PeerError
from ds_mxfp8_moe.transport.nvlink import NVLink, _chunk
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.support import conformance
from tests.support import nvlink_cases as cases
from tests.support.conformance import HARD, MX32, MX128, OF_KERNELS, PLAIN, PROBLEMS, Problem, check, same
from tests.support.emulated_nvlink import Watched, new_memory, nvlink
from tests.support.expert_ffn_cases import RECIPES
from tests.support.nvlink_cases import NAME, layer
from tests.support.rank_pool import KEPT_GROUPS
from tests.support.slow import slow_except

FIRST_EPOCH = 0xFFFFFFF0  # wraps within the first cases
pytestmark = pytest.mark.usefixtures("emulated")


@cache
def memory_of_all_cases() -> Watched:
    group = torch.distributed.new_group()
    KEPT_GROUPS.add(group)
    return Watched(group, FIRST_EPOCH)


def in_case(check, *args, **keys) -> None:
    memory = memory_of_all_cases()
    memory.begin_case()
    check(*args, nvlink(memory, **keys))
    memory.end_case()
    memory.reports.check()


QUICK = [*((2, name) for name in (*HARD, "mxfp8", "floor", "floor, blocks of 128", "many scales", "float32 answers",
                                  "not contiguous, plain", *OF_KERNELS)),
         (3, "dropped, plain"), (4, "random"), (4, "many experts")]
SLOW = [(8, "skewed"), (3, "more choices than experts"), (4, "one rank has tokens"), (8, "dropped"), (8, "one rank"),
        (8, "more rows than a tile")]


@pytest.mark.parametrize("ranks, name", slow_except(QUICK + SLOW, *QUICK))
def test_same_bits(request, ranks, name):
    request.getfixturevalue(f"ranks{ranks}").run(in_case, check, (PROBLEMS | OF_KERNELS)[name])


def refused_calls(exchange: NVLink) -> None:
    memory = exchange.memory
    with pytest.raises(ValueError, match="block.3.moe: 33 choices a token, and the nvlink transport takes 32"):
        exchange.plan(torch.zeros((2, 33), dtype=torch.int64), 4)
    with mock.patch.object(PeerMemory, "capturing", True), \
         pytest.raises(RuntimeError, match="block.3.moe: a CUDA graph cannot capture .* With \"capacity_factor\""):
        exchange.plan(torch.zeros((2, 1), dtype=torch.int64), 4)
    plan = exchange.plan(torch.zeros((2, 1), dtype=torch.int64), 4)
    with pytest.raises(TypeError, match="rows of torch.bfloat16 for a result of torch.float16, expected rows of"):
        exchange.combine(plan, torch.zeros((plan.num_rows, 32), dtype=torch.bfloat16), PLAIN, torch.float16)
    check(Problem(tokens=(3, 2), top_k=32), exchange)
    assert not memory.reports.captured


def test_calls_that_it_cannot_make(ranks2):
    """Every rank refuses the call before the exchange, and can go on. 32 choices, one a lane, are possible."""
    ranks2.run(in_case, refused_calls)


def check_tokens(exchange: NVLink) -> None:
    with pytest.raises(ValueError, match="block.3.moe: 524289 tokens of 32 choices among 8 experts are more .* "
                                         "smaller micro-batches"):
        exchange.plan(torch.zeros((512 * 1024 + 1, 32), dtype=torch.int64), 4)
    assert exchange.memory.extension.fits(2, 8, 32, 512)
    assert exchange.memory.extension.fits(8, 5768, 8, 16) and not exchange.memory.extension.fits(8, 5824, 8, 16)
    check(Problem(tokens=(3, 2), top_k=2), exchange)


def test_more_tokens_than_places_holds(ranks2):
    """Every rank refuses the call before the exchange, and can go on."""
    ranks2.run(in_case, check_tokens)


@pytest.mark.parametrize("reverse", [False, True])
def test_plans_in_flight(ranks2, reverse):
    ranks2.run(in_case, in_flight, reverse)


def in_flight(reverse: bool, exchange: NVLink) -> None:
    conformance.check_in_flight(exchange, reverse=reverse)


def check_waits(wanted: list, exchange: NVLink) -> None:
    """`wanted`: how often the host has waited when the plan's `meanwhile` is called, and after the plan."""
    case, memory, seen = Problem(tokens=(25, 25)), exchange.memory, []
    expert_TK = case.inputs(dist.get_world_size())[dist.get_rank()][0]
    before = memory.reports.host_waits
    exchange.plan(expert_TK, case.local_experts, lambda: seen.append(memory.reports.host_waits - before))
    assert [*seen, memory.reports.host_waits - before] == wanted


@pytest.mark.parametrize("capacity_factor, wanted", [(None, [0, 1]), (4.0, [0])])
def test_the_host_has_something_to_do_before_it_waits(ranks2, capacity_factor, wanted):
    ranks2.run(in_case, check_waits, wanted, capacity_factor=capacity_factor)


def many_chunks(exchange: NVLink) -> int:
    """There are more chunks than blocks, and more rows than the staging has room for."""
    before = exchange.memory.half_bytes
    check(Problem(tokens=(530, 390, 0, 0), hidden=512, row_format=PLAIN, dtype=torch.float32), exchange)
    grown = exchange.memory.half_bytes
    check(Problem(), exchange)
    assert before <= grown == exchange.memory.half_bytes >= 2 << 20
    return grown


def test_many_chunks_and_a_staging_that_grows(ranks2):
    ranks2.run(in_case, many_chunks)


def most_chunks(exchange: NVLink) -> None:
    """There are as many chunks as flags."""
    with mock.patch("ds_mxfp8_moe.transport.nvlink.LEAST_CHUNK", 4):
        tokens = 4 * exchange.memory.extension.MAX_CHUNKS
        check(Problem(tokens=(tokens, 1100, 0, 0), top_k=1, hidden=32, row_format=MX32), exchange)


def test_chunks_grow_with_the_tokens():
    assert [_chunk(tokens, 2, 1024) for tokens in (0, 1, 16384, 16385, 131072)] == [16, 16, 16, 32, 128]
    assert [_chunk(tokens, 8, 1024) for tokens in (8192, 8193, 32768, 131072)] == [16, 32, 32, 128]


@pytest.mark.slow
def test_a_rank_with_the_most_chunks(ranks2):
    ranks2.run(in_case, most_chunks)


def overflowing() -> str:
    memory = new_memory()
    exchange, case = nvlink(memory, capacity_factor=1.0), Problem(tokens=(600, ) * 4, routing="one expert")
    expert_TK, x_TH, _ = case.inputs(dist.get_world_size())[dist.get_rank()]
    with pytest.raises(PeerError) as caught:
        exchange.dispatch(exchange.plan(expert_TK, case.local_experts), x_TH, MX32)
        memory.reports.check()
    dist.barrier()
    return str(caught.value)


def test_too_many_rows_for_a_capacity(ranks2):
    for text in ranks2.run(overflowing):
        assert '"on_overflow": "drop"' in text
        assert re.search(rf"'counts' of {NAME}, with room for \d+ rows: rank 1 would get \d+ rows, more than", text)


# ---------------------------------------------------------------- choices that do not fit are dropped

DROPPING = {"capacity_factor": 1.0, "on_overflow": "drop"}
HOT = Problem(tokens=(160, ) * 4, top_k=2, local_experts=1, routing="one expert", hidden=32)


@pytest.mark.parametrize("change", [
    {}, {"row_format": MX128, "dtype": torch.float32}, {"local_experts": 2, "tokens": (300, ) * 2, "top_k": 3,
                                                  "routing": "skewed", "row_format": MX32},
    {"local_experts": 3, "tokens": (300, ) * 2, "routing": "one rank", "row_format": MX128}], ids=str)
def test_rows_that_do_not_fit_are_dropped(ranks2, change):
    ranks2.run(in_case, cases.check_dropped, replace(HOT, **change), **DROPPING)


@pytest.mark.parametrize("change", [{}, {"local_experts": 4, "tokens": (420, ) * 3, "routing": "skewed"}], ids=str)
def test_three_ranks_lose_the_same_share(ranks3, change):
    ranks3.run(in_case, cases.check_dropped, replace(HOT, **change), **DROPPING)


@pytest.mark.parametrize("change", [{"row_format": MX128}, {"routing": "dropped"},
                                    {"routing": "nowhere", "row_format": MX32}],
                         ids=str)
@pytest.mark.parametrize("keys", [{"capacity_factor": 2.0}, DROPPING], ids=str)
def test_nothing_is_dropped_where_all_rows_fit(ranks2, change, keys):
    ranks2.run(in_case, check_nothing_dropped, Problem(**{"tokens": (25, 25)} | change), **keys)


def check_nothing_dropped(case: Problem, exchange: NVLink) -> None:
    before = exchange.dropped
    cases.check_static(case, exchange)
    assert exchange.dropped == before


def warned() -> list:
    """What each step's check prints, if layers drop choices in some steps."""
    memory, lines = new_memory(), []
    expert_TK = HOT.inputs(dist.get_world_size())[memory.rank][0]
    with mock.patch.object(kernel_reports, "STEPS_BETWEEN_WARNINGS", 3):
        for step in range(7):
            for name in ("one", "two") if step in (1, 3) else ("one", ) if step == 5 else ():
                NVLink(memory, name, 1, **DROPPING).plan(expert_TK, HOT.local_experts)
            with redirect_stdout(io.StringIO()) as out:
                memory.wait_and_check()
            lines.append(out.getvalue().splitlines())
    assert (NVLink(memory, "one").dropped, NVLink(memory, "three").dropped) == (3 * lost(memory.rank), 0)
    return lines


def too_many_layers() -> None:
    memory = new_memory()
    with mock.patch.object(kernel_reports, "MOST_DROPPING", 1):
        assert memory.reports.dropped.address("one") == memory.reports.dropped.address("one")
        with pytest.raises(ValueError, match="two: a group counts the dropped choices of 1 layers at most"):
            memory.reports.dropped.address("two")
        memory.wait_and_check()


def test_more_layers_than_counters(ranks2):
    ranks2.run(too_many_layers)


def lost(rank: int) -> int:
    return (2 * 320 - 512) * rank  # rank 1 has the expert, and room for 320 + 127 rows, padded


def test_a_line_says_how_many_choices_were_dropped(ranks2):
    zero, one = ranks2.run(warned)
    assert zero == [[]] * 7

    def line(name, times):
        return (f"mxfp8_moe: WARNING: {name}: {times * lost(1)} choices for the experts of rank 1 were dropped since "
                'the last such line: more rows came than fit. To drop fewer, raise "capacity_factor"')

    assert one == [[], [line("one", 1), line("two", 1)], [], [], [line("one", 1), line("two", 1)], [], []]


def check_layer_dropped(recipe, exchange: NVLink) -> None:
    cases.check_layer_dropped(recipe, Collective(exchange.memory.group, "the oracle"), exchange)


@pytest.mark.parametrize("recipe_name", ["hp-128", "bf16"])
def test_a_layer_that_drops_computes_the_same_bits(ranks2, recipe_name):
    ranks2.run(in_case, check_layer_dropped, RECIPES[recipe_name], **DROPPING)


# ---------------------------------------------------------------- whole layers


def check_layer(recipe, kwargs: dict, exchange: NVLink) -> None:
    want, got = (layer(transport, recipe, **kwargs)
                 for transport in (Collective(exchange.memory.group, "the oracle"), exchange))
    for key, value in want.items():
        same(key, value, got[key])


def elsewhere_by_default() -> None:
    want = layer(Collective(torch.distributed.new_group(), "the oracle"), RECIPES["hp-128"])
    with torch.device("meta"):
        memory = new_memory()
    for key, value in layer(nvlink(memory), RECIPES["hp-128"]).items():
        same(key, want[key], value)


def test_what_is_the_host_s_is_there_whatever_the_default_device(ranks2):
    ranks2.run(elsewhere_by_default)


# A transport sees no more of a recipe than the format of rows. Here, rows of all four exchanges are MXFP8.
def test_a_layer_computes_the_same_bits(ranks2):
    ranks2.run(in_case, check_layer, RECIPES["all-wires-mxfp8"], {"bias": True, "routing": "dropped"})
