# SPDX-License-Identifier: Apache-2.0
"""ops/triton_kernels/local.py in Triton's interpreter."""

import pytest
from local_cases import ONE_RANK, check_local


@pytest.mark.parametrize("name", ONE_RANK)
def test_same_bits_as_plain_torch(interpreter, name):
    interpreter(check_local, "cpu", ONE_RANK[name])
