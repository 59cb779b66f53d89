# SPDX-License-Identifier: Apache-2.0
"""The expert-parallel functions over NCCL, by the bars of the CPU's tests; two runs give the same bits."""

import pytest
import torch

from tests.support.ep_cases import KINDS, chain, check_chain


@pytest.mark.parametrize("block_size", (32, 128))
@pytest.mark.parametrize("kind", KINDS)
def test_chain(gpu_ranks, kind, block_size):
    results = gpu_ranks.run(chain, kind, torch.bfloat16, block_size, "rceil", wgrad_with_hp=block_size == 32,
                            device="cuda")
    check_chain(gpu_ranks.world_size, results, kind, {"y": 28, "dx": 26, "dw": 25})
    for r in results:
        assert r["grad_type"] == ["MXTensor"]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_other_dtypes(gpu_ranks, dtype):
    results = gpu_ranks.run(chain, "uneven", dtype, 32, "rceil", device="cuda")
    check_chain(gpu_ranks.world_size, results, "uneven", {"y": 28, "dx": 26, "dw": 25})


def test_two_runs_give_the_same_bits(gpu_ranks):
    first, second = (gpu_ranks.run(chain, "uneven", torch.bfloat16, 32, "rceil", wgrad_with_hp=False, device="cuda")
                     for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for name in ("y", "dx", "dw"):
            assert torch.equal(a[name], b[name]), name
