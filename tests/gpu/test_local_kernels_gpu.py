# SPDX-License-Identifier: Apache-2.0
"""Plan, dispatch and combine of one rank on a GPU."""

from dataclasses import replace

import pytest
import torch

from tests.support.local_cases import ONE_RANK, check_local
from tests.support.permute_cases import FORMATS, Problem
from tests.support.slow import slow_unless


@pytest.mark.parametrize("name", ONE_RANK)
def test_same_bits_as_plain_torch(name):
    check_local("cuda", ONE_RANK[name])


SIZES = [(3001, 64, 6, 2048), (700, 300, 8, 2880), (257, 8, 2, 160)]
ROUTINGS = ["random", "dropped", "one expert"]


# Each row_format with each size, and the routings in turn.
@pytest.mark.parametrize("sizes, routing, row_format", slow_unless(
    lambda sizes, routing, row_format: routing == ROUTINGS[(SIZES.index(sizes) + list(FORMATS).index(row_format)) % 3],
    ((sizes, routing, row_format) for sizes in SIZES for routing in ROUTINGS for row_format in FORMATS)), ids=str)
def test_real_sizes(sizes, routing, row_format):
    tokens, experts, top_k, hidden = sizes
    problem = Problem((tokens, ), top_k=top_k, local_experts=experts, hidden=hidden, row_format=FORMATS[row_format],
                      routing=routing, not_finite=True)
    check_local("cuda", problem)
    check_local("cuda", replace(problem, dtype=torch.float32))
