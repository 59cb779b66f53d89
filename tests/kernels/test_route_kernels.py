# SPDX-License-Identifier: Apache-2.0
"""ops/triton_kernels/route.py in Triton's interpreter."""

import pytest
from route_cases import CASES, check_odd_scores, check_route


@pytest.mark.parametrize("name", CASES)
def test_routes_as_deepspeed(interpreter, name):
    interpreter(check_route, "cpu", CASES[name])


def test_odd_scores(interpreter):
    interpreter(check_odd_scores, "cpu")
