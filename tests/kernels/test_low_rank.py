# SPDX-License-Identifier: Apache-2.0
"""The kernels of adapters' products in Triton's interpreter. test_aot.py compiles them."""

import pytest

from tests.support.low_rank_cases import run_case, run_no_rows


@pytest.mark.parametrize("block, W, R, rank_first", [
    (0, 128, 8, True), (0, 160, 24, False), (32, 160, 8, False), (128, 256, 40, True), (128, 96, 8, False)])
def test_same_as_in_float64(interpreter, block, W, R, rank_first):
    interpreter(run_case, "cpu", block, W, R, rank_first)


def test_no_rows(interpreter):
    interpreter(run_no_rows, "cpu")
