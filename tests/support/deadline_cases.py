# SPDX-License-Identifier: Apache-2.0
"""Ranks that call different exchanges."""

from collections.abc import Callable

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.transport import RowFormat
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.deadline import (
    PeerError,
)

PLAIN, MX = RowFormat(False), RowFormat(True)

CONFUSIONS = ("order", "choices", "rows")


def confused(how: str, exchange_of: Callable = lambda name: Collective(dist.get_world_group(), name),
             local_experts: int = 3) -> tuple:
    """Rank 1 goes wrong `how`; then all ranks make the same calls again. What each of them raises."""
    odd, expert_TK, x_TH = dist.get_rank() == 1, torch.arange(6).view(6, 1), torch.ones(6, 32)
    exchange = exchange_of("other" if odd and how == "order" else "moe")
    with pytest.raises(PeerError) as caught:
        exchange.plan(expert_TK.expand(6, 3) if odd and how == "choices" else expert_TK, local_experts,
                      rows=f"tokens of 64 {torch.float16 if odd and how == 'rows' else torch.bfloat16}")
    exchange = exchange_of("moe")
    plan = exchange.plan(expert_TK, local_experts)
    x_PH, _ = exchange.dispatch(plan, x_TH, PLAIN)
    exchange.combine(plan, x_PH, PLAIN, torch.float32)
    return caught.value.missing, str(caught.value)
