# SPDX-License-Identifier: Apache-2.0
"""The kernel that rounds weights to MXFP4 in Triton's interpreter. test_aot.py compiles it."""

import pytest
import torch

from tests.support.mxfp4_cases import run_pack


@pytest.mark.parametrize("shape, dtype", [((256, 256), torch.bfloat16), ((2, 160, 416), torch.float32)])
def test_packed_weights(interpreter, shape, dtype):
    interpreter(run_pack, "cpu", shape, dtype)
