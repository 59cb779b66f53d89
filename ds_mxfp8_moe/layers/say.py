# SPDX-License-Identifier: Apache-2.0
"""The line about a feature whose names another library lacks."""

from ..ops.log import log_on_rank_0
from ..ops.private_names import line_about, missing


def say_if_missing(feature: str) -> bool:
    """Whether another library lacks a name that a feature needs (ops/private_names.py). Rank 0 says so."""
    if missing(feature) is None:
        return False
    log_on_rank_0(line_about(feature))
    return True
