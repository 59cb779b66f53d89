# SPDX-License-Identifier: Apache-2.0
"""The kernels of adapters' products on a GPU."""

import itertools

import pytest
import torch

from ds_mxfp8_moe.ops.triton_kernels import low_rank
from tests.support.low_rank_cases import BF16, run_case, run_no_rows
from tests.support.slow import slow_unless

ENDS = (128, 128, 640, 1024, 1024, 1536)


BLOCKS, WIDTHS, RANKS = (0, 32, 128), (96, 160, 2048), (8, 16, 40, 128)


# Each pair of block and rank.
@pytest.mark.parametrize("block, W, R, rank_first", slow_unless(
    lambda block, W, R, rank_first: (turn := BLOCKS.index(block) + RANKS.index(R)) % 3 == WIDTHS.index(W)
    and rank_first == bool(turn % 2),
    itertools.product(BLOCKS, WIDTHS, RANKS, (True, False))))
def test_same_as_in_float64(block, W, R, rank_first):
    run_case("cuda", block, W, R, rank_first, ENDS)


def test_no_rows():
    run_no_rows("cuda")


def test_the_same_bits_every_time():
    ends_E = torch.tensor([128 * 40, 128 * 41, 128 * 100], dtype=torch.int32, device="cuda")
    x, factor = torch.randn(128 * 100, 1408, device="cuda").to(BF16), torch.randn(3, 8, 1408, device="cuda").to(BF16)
    results = []
    for _ in range(3):
        low, y = low_rank.low_rank_rows(x, factor, ends_E), x.clone()
        low_rank.add_low_rank(y, low, factor, ends_E)
        results.append((low, y, low_rank.low_rank_wgrad(low, x, factor, ends_E)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
