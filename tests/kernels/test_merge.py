# SPDX-License-Identifier: Apache-2.0
"""Merges of adapters in Triton's interpreter. test_aot.py compiles them."""

import pytest
import torch

from tests.support.merge_cases import run_held, run_plain, run_tiles


@pytest.mark.parametrize("rank, dtype", [(1, torch.bfloat16), (9, torch.float32)], ids=str)
def test_tiles(interpreter, rank, dtype):
    interpreter(run_tiles, "cpu", 128, 256, rank, dtype)


@pytest.mark.parametrize("rank, dtype", [(1, torch.float32), (8, torch.bfloat16)], ids=str)
def test_frozen_weights(interpreter, rank, dtype):
    interpreter(run_held, "cpu", 160, 416, rank, dtype)


@pytest.mark.parametrize("rank, dtype", [(8, torch.bfloat16), (3, torch.float32), (8, torch.float16)], ids=str)
def test_plain(interpreter, rank, dtype):
    interpreter(run_plain, "cpu", 96, 160, rank, dtype)
