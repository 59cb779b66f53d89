# SPDX-License-Identifier: Apache-2.0
"""Plan, dispatch and combine of one rank on a GPU."""

from dataclasses import replace

import pytest
import torch

from tests.support.local_cases import ONE_RANK, check_local
from tests.support.permute_cases import WIRES, Problem


@pytest.mark.parametrize("name", ONE_RANK)
def test_same_bits_as_plain_torch(name):
    check_local("cuda", ONE_RANK[name])


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("routing", ["random", "dropped", "one expert"])
@pytest.mark.parametrize("tokens, experts, top_k, hidden",
                         [(3001, 64, 6, 2048), (700, 300, 8, 2880), (257, 8, 2, 160)])
def test_real_sizes(tokens, experts, top_k, hidden, routing, wire):
    problem = Problem((tokens, ), top_k=top_k, local_experts=experts, hidden=hidden, wire=WIRES[wire],
                      routing=routing, not_finite=True)
    check_local("cuda", problem)
    check_local("cuda", replace(problem, dtype=torch.float32))
