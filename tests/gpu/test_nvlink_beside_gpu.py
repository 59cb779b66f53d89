# SPDX-License-Identifier: Apache-2.0
"""Exchanges of the NVLink transport beside GEMMs, on the ranks of test_nvlink_gpu.py: the bits of one by one."""

import dataclasses

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed
from nvlink_cases import BF16, MX128, Case, expected, same
from test_expert_ffn import RECIPES
from test_nvlink_gpu import SECONDS, Beside, device_bits, layer, memory, new_memory, nvlink, on_device

from ds_mxfp8_moe import kernels
from ds_mxfp8_moe.grouped_gemm import grouped_mm
from ds_mxfp8_moe.transport.nvlink import NVLink


def check_beside(repetitions: int) -> None:
    """A combine on a stream of its own gives the same bits, whatever runs beside it."""
    exchange, case = nvlink(), Case(tokens=(700, ) * 8, hidden=512, top_k=3, wire=MX128)
    want = expected(case, memory().group)
    (expert_TK, _, _), (y_PH, number_P) = on_device(want["inputs"]), on_device(want["answers"])
    a = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    y, number = device_bits(want["y"]), device_bits(want["number"])
    for repetition in range(repetitions):
        plan = exchange.plan(expert_TK, case.local_experts)
        rows = y_PH.clone()
        pending = exchange.start_combine(plan, rows, case.wire, case.dtype, number_P, sms=8 + 8 * (repetition % 8))
        assert pending.done is not None
        del rows
        torch.mm(a, a), torch.full_like(y_PH, float("nan"))  # on the current stream: not into memory still read
        y_TH, number_TK = pending.result()
        del pending
        wrong += (device_bits(y_TH) != y).sum() + (device_bits(number_TK) != number).sum()
    assert wrong.item() == 0
    memory().check()


def test_combine_beside_other_work(pool):
    pool.run(check_beside, 20, seconds=SECONDS)


def check_layer_beside(recipe, tokens: int, repetitions: int) -> None:
    mine = nvlink()
    want = layer(mine, recipe, tokens=(tokens, ) * 8)
    for _ in range(repetitions):
        got = layer(Beside(mine.memory, mine.name, feeds=True), recipe, tokens=(tokens, ) * 8)
        for key, value in want.items():
            same(key, value.cpu(), got[key])


@pytest.mark.parametrize("tokens, repetitions", [(300, 1), (6000, 5)])
@pytest.mark.parametrize("recipe_name", ["hp-128", "mxfp8-128", "bf16", "hp-32"])
def test_a_layer_beside_its_gemm_computes_the_same_bits(pool, recipe_name, tokens, repetitions):
    pool.run(check_layer_beside, RECIPES[recipe_name], tokens, repetitions, seconds=SECONDS)


def check_fed(case: Case, repetitions: int) -> None:
    """A combine of rows that a GEMM of MXFP8 computes meanwhile: the bits of one that comes after it."""
    mine = new_memory(torch.distributed.new_group())  # that of all cases cannot grow once a graph was captured
    exchange = Beside(mine, "block.3.moe", feeds=True)
    expert_TK, x_TH, _ = on_device(case.inputs(dist.get_world_size())[dist.get_rank()])
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(repetitions):
        w_ENK = torch.randn(case.local_experts, 1056, case.hidden, device="cuda", dtype=BF16)
        w = kernels.quantize_weights([w_ENK], 128, "rceil")
        plan = exchange.plan(expert_TK, case.local_experts)
        x_PH, _ = exchange.dispatch(plan, x_TH, MX128)
        rows = x_PH, w, plan.group_ends_E, BF16
        y_PH = grouped_mm(*rows)
        want = exchange.combine(plan, y_PH, case.wire, BF16)[0]
        y_PH.fill_(float("nan"))  # the next result may lie there
        del y_PH
        feed = exchange.feed(plan, 1056, BF16, case.wire, *kernels.fed_gemm_cost(x_PH, 1056))
        assert (feed is None) == (plan.num_rows == 0)
        got = exchange.start_combine(plan, grouped_mm(*rows, feed=feed), case.wire, BF16, feed=feed).result()[0]
        wrong += (device_bits(want) != device_bits(got)).sum()
    assert wrong.item() == 0
    mine.check()
    torch.cuda.synchronize(), dist.barrier()  # before the staging goes


@pytest.mark.parametrize("change", [{}, {"wire": MX128, "top_k": 1}, {"routing": "skewed"}, {"routing": "nowhere"},
                                    {"routing": "one expert"},
                                    {"tokens": (5000, 0, 3000, 100, 0, 70, 9, 4000)}], ids=str)
def test_a_combine_that_a_gemm_feeds(pool, change):
    pool.run(check_fed, Case(**{"tokens": (6000, ) * 8, "hidden": 512, "top_k": 3} | change), 6, seconds=SECONDS)


def check_ahead(case: Case, repetitions: int) -> None:
    """A GEMM that begins while a dispatch brings its rows: the bits of one that comes after it. What is there before
    is poison."""
    mine = new_memory(torch.distributed.new_group())  # that of all cases cannot grow once a graph was captured
    exchange, after = Beside(mine, "block.3.moe"), NVLink(mine, "block.3.moe")
    expert_TK, x_TH, weight_TK = on_device(case.inputs(dist.get_world_size())[dist.get_rank()])
    w_ENK = torch.randn(case.local_experts, 1056, case.hidden, device="cuda", dtype=BF16)
    w = kernels.quantize_weights([w_ENK], 128, "rceil")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for repetition in range(repetitions):
        x_TH, weight_TK = x_TH * 2, weight_TK + 1  # what is there from before is wrong
        plan = exchange.plan(expert_TK, case.local_experts)
        x_PH, weight_P = after.dispatch(plan, x_TH, MX128, weight_TK)
        want = grouped_mm(x_PH, w, plan.group_ends_E, BF16)
        rows = torch.full_like(x_PH.qdata.view(torch.uint8), 0x7F)  # NaN, where the next rows may come to lie
        del rows
        if repetition % 3 == 0:  # others' rows come late
            torch.cuda._sleep(int(1e6) * dist.get_rank())
        got_PH, got_P, arrival = exchange.start_dispatch(plan, x_TH, MX128, weight_TK, gemm_seconds=1.0)
        assert (arrival is None) == (plan.num_rows == 0)
        if arrival is not None:
            arrival = dataclasses.replace(arrival, first=min(arrival.order.shape[0], 16 * repetition))
        y_PH = grouped_mm(got_PH, w, plan.group_ends_E, BF16, arrival=arrival)
        for a, b in ((want, y_PH), (x_PH, got_PH), (weight_P, got_P)):
            wrong += (device_bits(a) != device_bits(b)).sum()
    assert wrong.item() == 0
    mine.check()
    torch.cuda.synchronize(), dist.barrier()  # before the staging goes


@pytest.mark.parametrize("change", [{}, {"top_k": 1}, {"routing": "skewed"}, {"routing": "nowhere"},
                                    {"routing": "one expert"},
                                    {"tokens": (5000, 0, 3000, 100, 0, 70, 9, 4000)}], ids=str)
def test_a_gemm_that_begins_while_its_rows_come(pool, change):
    pool.run(check_ahead, Case(**{"tokens": (6000, ) * 8, "hidden": 512, "top_k": 3} | change), 7, seconds=SECONDS)
