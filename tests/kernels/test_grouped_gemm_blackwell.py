# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMMs for Blackwell in Triton's interpreter, against float64 products of the dequantized operands.

The interpreter of Triton 3.6 has no dot_scaled, so these tests bring one: they check everything around it. The same
checks run on a GPU in tests/gpu; test_aot.py compiles the kernels for Blackwell.
"""

from functools import partial

import pytest
import torch

from tests.support.grouped_gemm_blackwell_cases import FORMATS, SIZES, check_grouped_mm, check_wgrad


@pytest.mark.parametrize("sizes, past", SIZES)
def test_groups(interpreter, sizes, past):
    interpreter(check_grouped_mm, "cpu", sizes, past, 160, 160, 32, 32)
    interpreter(check_wgrad, "cpu", sizes, past, 160, 96, 32, 32)


@pytest.mark.parametrize("N, K, a_block, b_block", FORMATS)
def test_formats(interpreter, N, K, a_block, b_block):
    interpreter(partial(check_grouped_mm, nans=True), "cpu", (128, 256), 0, N, K, a_block, b_block)


def test_wgrad_formats(interpreter):
    interpreter(check_wgrad, "cpu", (128, 256), 0, 288, 256, 128, 128)
    interpreter(check_wgrad, "cpu", (1280, 256), 0, 96, 64, 32, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_dtypes(interpreter, dtype):
    interpreter(check_grouped_mm, "cpu", (128, ), 128, 96, 64, 32, 32, dtype)
    interpreter(check_wgrad, "cpu", (0, 128), 0, 96, 64, 32, 32, dtype)


def test_more_rows_than_a_grid_has_tiles_are_refused():
    from ds_mxfp8_moe.ops.triton_kernels import grouped_gemm_blackwell as gemm
    with pytest.raises(ValueError, match="9437184 rows is too large: expected at most 8388480"):
        gemm._pack_scales(torch.empty(9 << 20, 1, dtype=torch.uint8), 9 << 20, 32, 32)
