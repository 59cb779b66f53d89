# SPDX-License-Identifier: Apache-2.0
"""Matrices of which `make test` runs some cases and `make test-slow` the others. CI leaves these out."""

from collections.abc import Callable, Iterable

import pytest

WIDE = pytest.mark.slow, pytest.mark.wide


def slow_except(cases: Iterable, *quick) -> list:
    """Parameters for pytest.mark.parametrize: `cases`, of which all but `quick` are marked slow and wide."""
    cases = list(cases)
    assert set(quick) < set(cases), f"{quick} are not some of {cases}"
    return [case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case, )),
                                                    marks=WIDE) for case in cases]


def slow_unless(quick: Callable, cases: Iterable) -> list:
    """As `slow_except`, with a question: `quick(*case)` is whether `make test` runs a case."""
    cases = list(cases)
    chosen = [case for case in cases if quick(*case)]
    assert 0 < len(chosen) < len(cases), f"{len(chosen)} of {len(cases)} cases are quick"
    return [case if quick(*case) else pytest.param(*case, marks=WIDE) for case in cases]
