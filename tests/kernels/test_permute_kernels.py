# SPDX-License-Identifier: Apache-2.0
"""The permute kernels in Triton's interpreter."""

import pytest

from tests.support.permute_cases import MX32, MX128, PLAIN, PROBLEMS, Problem, check_exchange
from tests.support.slow import slow_except

QUICK = ("two ranks, mxfp8", "not contiguous", "not finite", "not finite, plain", "floor", "many blocks",
         "more ranks than choices", "more choices than experts", "nowhere", "no tokens", "float32 answers, mxfp8",
         "float16, plain")


@pytest.mark.parametrize("name", slow_except(PROBLEMS, *QUICK))
def test_same_bits_as_the_plain_path(interpreter, name):
    interpreter(check_exchange, "cpu", PROBLEMS[name])


@pytest.mark.parametrize("top_k", slow_except(range(1, 9), 2, 3))
def test_every_number_of_choices(interpreter, top_k):
    row_format = MX32 if top_k % 2 else PLAIN
    interpreter(check_exchange, "cpu", Problem((5, 6, 4), top_k=top_k, row_format=row_format, hidden=64))


@pytest.mark.parametrize("row_format, node_size", [(MX128, 1), (PLAIN, 2), (MX32, 2), (MX32, 3)])
def test_two_hops(interpreter, row_format, node_size):
    tokens = (3, 2, 0, 5, 4, 1) if node_size == 3 else (3, 2, 5, 4)
    interpreter(check_exchange, "cpu", Problem(tokens, top_k=3, local_experts=2, row_format=row_format, hidden=160,
                                               routing="dropped"), node_size)
