# SPDX-License-Identifier: Apache-2.0
"""What Hopper's FP8 grouped GEMM does before it launches its kernel. tests/gpu has the rest."""

import pytest
import torch

from ds_mxfp8_moe.ops.mx_format import MXParts
from ds_mxfp8_moe.ops.triton_kernels.grouped_gemm_hopper import grouped_mm_mxfp8
from tests.support.aot import launches_for

E4M3, BYTE = torch.float8_e4m3fn, torch.uint8


@pytest.mark.parametrize("P, E, N, K", [(0, 2, 64, 128), (256, 0, 64, 128), (256, 2, 0, 128), (256, 2, 64, 0)])
def test_nothing_is_launched_if_there_is_nothing_to_multiply(P, E, N, K):
    """The kernel waits for the first block along K."""
    a = MXParts(torch.empty(P, K, dtype=E4M3), torch.empty(P, K // 128, dtype=BYTE), 128, False)
    b = MXParts(torch.empty(E, N, K, dtype=E4M3), torch.empty(E, 1, K // 128, dtype=BYTE), 128, True)
    with launches_for(90) as launches:
        out = grouped_mm_mxfp8(a, b, torch.empty(E, dtype=torch.int32), torch.bfloat16)
    assert not launches
    assert torch.equal(out, torch.zeros(P, N, dtype=torch.bfloat16))
