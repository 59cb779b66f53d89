# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMMs for Blackwell on whatever GPU there is: Hopper dequantizes to bf16 for them, exactly, and has
shared memory for that in two stages."""

import pytest
import torch

from ds_mxfp8_moe.ops.triton_kernels import grouped_gemm_blackwell
from tests.support.grouped_gemm_blackwell_cases import FORMATS, SIZES, check_grouped_mm, check_wgrad
from tests.support.slow import WIDE

SKEWED = (2048, 0, 128, 0, 0, 384, 128, 0)


@pytest.fixture(autouse=True)
def stages(monkeypatch):
    if torch.cuda.get_device_capability()[0] < 10:
        monkeypatch.setitem(grouped_gemm_blackwell.GEMM_OPTIONS, "num_stages", 2)


@pytest.mark.parametrize("sizes, past", [*SIZES, (SKEWED, 256)])
def test_groups(sizes, past):
    check_grouped_mm("cuda", sizes, past, 288, 416, 32, 32)
    check_wgrad("cuda", sizes, past, 288, 416, 32, 32)


@pytest.mark.parametrize("nans", [pytest.param(False, marks=WIDE), True])
@pytest.mark.parametrize("N, K, a_block, b_block", [*FORMATS, (2048, 1536, 32, 32), (1536, 2048, 128, "tiles")])
def test_formats(N, K, a_block, b_block, nans):
    check_grouped_mm("cuda", SKEWED, 128, N, K, a_block, b_block, nans=nans)


@pytest.mark.parametrize("N, K, g_block, a_block", [(288, 256, 128, 128), (96, 64, 32, 128), (1056, 1184, 32, 32)])
def test_wgrad_formats(N, K, g_block, a_block):
    check_wgrad("cuda", SKEWED, 128, N, K, g_block, a_block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_dtypes(dtype):
    check_grouped_mm("cuda", SKEWED, 128, 96, 256, 32, 32, dtype)
    check_wgrad("cuda", SKEWED, 128, 96, 256, 32, 32, dtype)
