# SPDX-License-Identifier: Apache-2.0
"""Lines that rank 0 prints."""

from typing import Any

import deepspeed.comm as dist

from ..ops.private_names import line_about, missing


def print_on_rank_0(what: Any) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(what, flush=True)


def say_if_missing(feature: str) -> bool:
    """Whether another library lacks a name that a feature needs (ops/private_names.py). Rank 0 says so."""
    if missing(feature) is None:
        return False
    print_on_rank_0(line_about(feature))
    return True
