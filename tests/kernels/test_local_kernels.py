# SPDX-License-Identifier: Apache-2.0
"""ops/triton_kernels/local.py in Triton's interpreter."""

import pytest

from tests.support.local_cases import ONE_RANK, check_local
from tests.support.slow import slow_except


@pytest.mark.parametrize("name", slow_except(ONE_RANK, *(name for name in ONE_RANK if "many" not in name)))
def test_same_bits_as_plain_torch(interpreter, name):
    interpreter(check_local, "cpu", ONE_RANK[name])
