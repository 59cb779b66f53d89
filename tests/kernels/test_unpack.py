# SPDX-License-Identifier: Apache-2.0
"""The kernel that unpacks MXFP4 in Triton's interpreter. test_aot.py compiles it."""

import pytest

from tests.support.mxfp4_cases import run_unpack


@pytest.mark.parametrize("rows, columns", [(256, 256), (160, 416)])
def test_unpacked_tiles(interpreter, rows, columns):
    interpreter(run_unpack, "cpu", 5, rows, columns)
