# SPDX-License-Identifier: Apache-2.0
"""How many multiprocessors a combine takes beside a GEMM."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ds_mxfp8_moe.transport import Wire, overlap
from ds_mxfp8_moe.transport.nvlink import NVLink


@pytest.mark.parametrize("hidden, quantises, gemm_ms, tiles, best", [
    (2048, False, 1.065, 704, range(16, 29)), (2048, False, 0.72, 704, range(28, 33)),
    (2048, True, 0.72, 704, range(36, 45)), (7168, False, 5.42, 3584, range(16, 21)),
    (7168, False, 3.67, 3584, range(24, 25)), (7168, True, 3.67, 3584, range(32, 33)),
    (8192, False, 15.5, 10240, range(8, 13)), (8192, False, 10.5, 10240, range(12, 13)),
    (8192, True, 10.5, 10240, range(16, 17))])
def test_multiprocessors_beside_a_gemm_are_the_best_of_those_measured(hidden, quantises, gemm_ms, tiles, best):
    """A combine of 131072 rows between 2 H200s, beside the weight gradients of the pipeline benchmark's 8 experts."""
    row = 131072 * hidden
    wire = row if quantises else 2 * row
    assert overlap.sms_beside(132, wire // 2, 4 * row + 2 * wire, quantises, 1, gemm_ms / 1e3, tiles) in best


@pytest.mark.parametrize("quantises, gemm_ms, best", [(False, 3.1, range(16, 21)), (False, 2.1, range(22, 29)),
                                                      (True, 2.1, (0, 28, 30, 32))])
def test_multiprocessors_beside_a_gemm_where_rows_are_sums(quantises, gemm_ms, best):
    """A layer of 64 experts of 4096 x 1024, with 16384 tokens and 8 choices, between 2 H200s. Each row that travels is
    the sum of four. 0 is right too where one after the other is within 2 % of the best."""
    y, row = 131072 * 4096 * 2, 4096 * (1 if quantises else 2)
    moved = y + 16384 * 4096 * 2 + 2 * 32640 * row
    assert overlap.sms_beside(132, 32640 * row // 2, moved, quantises, 32640 / 131072, gemm_ms / 1e3, 8192) in best


@pytest.mark.parametrize("total, most, gemm_ms, sms", [(132, 18, 5.42, 18), (132, 8, 5.42, 0), (132, None, 0, 0),
                                                       (132, None, 0.1, 0), (8, None, 5.42, 0)])
def test_multiprocessors_beside_a_gemm_have_limits(total, most, gemm_ms, sms):
    row = 131072 * 7168 * 2
    assert overlap.sms_beside(total, row // 2, 4 * row, False, 1, gemm_ms / 1e3, 3584, most) == sms


def test_a_transport_knows_what_its_combine_moves():
    """It gives what the tests above give. 0 where the overlap is off, or there is no stream for it."""
    memory = SimpleNamespace(side="a stream", multiprocessors=132, world_size=2)
    exchange, plan = NVLink(memory), SimpleNamespace(num_tokens=131072, num_rows=131072, received=131072)
    given = plan, 2048, torch.bfloat16
    for mxfp8, gemm_seconds, best in ((False, 1.065e-3, range(16, 29)), (True, 0.72e-3, range(36, 45))):
        assert exchange.sms_beside(*given, Wire(mxfp8), gemm_seconds, 704) in best
    for off in (replace(exchange, overlap=False), replace(exchange, sms=6), NVLink(SimpleNamespace(
            side=None, multiprocessors=132, world_size=2))):
        assert off.sms_beside(*given, Wire(False), 1.065e-3, 704) == 0
