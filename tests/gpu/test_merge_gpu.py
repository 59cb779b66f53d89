# SPDX-License-Identifier: Apache-2.0
"""Merges of adapters on a GPU have the bits of plain torch on the CPU."""

import pytest
import torch

from ds_mxfp8_moe.compute.merging import merge_update
from tests.support.merge_cases import run_held, run_plain, run_tiles


@pytest.mark.parametrize("rank, dtype", [(1, torch.bfloat16), (9, torch.float32), (16, torch.bfloat16)], ids=str)
def test_tiles(rank, dtype):
    run_tiles("cuda", 256, 384, rank, dtype)


@pytest.mark.parametrize("rank, dtype", [(1, torch.float32), (8, torch.bfloat16)], ids=str)
def test_frozen_weights(rank, dtype):
    run_held("cuda", 416, 672, rank, dtype)


@pytest.mark.parametrize("rank, dtype", [(8, torch.bfloat16), (3, torch.float32), (8, torch.float16)], ids=str)
def test_plain(rank, dtype):
    run_plain("cuda", 96, 160, rank, dtype)


def test_other_weights():
    w, update = torch.randn(300, 700).bfloat16(), torch.randn(300, 700) / 500
    on_gpu = merge_update(w.cuda(), update.cuda(), "q_proj.weight", 1)
    assert torch.equal(on_gpu.cpu(), merge_update(w, update, "q_proj.weight", 1))
