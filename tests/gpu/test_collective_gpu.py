# SPDX-License-Identifier: Apache-2.0
"""Over NCCL, one rank that goes wrong: the others do not hang, and say who it was."""

import re
import time
from datetime import timedelta

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.compute.mx import MXTensor
from ds_mxfp8_moe.transport import RowFormat
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.deadline import GRACE_SECONDS, PeerError, tell_peers_on_error
from tests.support.rank_pool import set_timeout

DEADLINE = timedelta(seconds=12)
WIRE = RowFormat(mxfp8=True, block_size=32, scaling_mode="rceil")


def exchange_once(exchange: Collective) -> None:
    plan = exchange.plan(torch.arange(6, device="cuda").view(6, 1), 3)
    x_PH, _ = exchange.dispatch(plan, torch.ones(6, 32, device="cuda", dtype=torch.bfloat16), WIRE)
    assert isinstance(x_PH, MXTensor)
    y_TH, _ = exchange.combine(plan, x_PH.dequantize(), WIRE, torch.bfloat16)
    assert torch.equal(y_TH, torch.ones_like(y_TH))


def in_different_layers() -> tuple:
    exchange_once(Collective(dist.get_world_group(), "moe"))
    with pytest.raises(PeerError) as caught:
        exchange_once(Collective(dist.get_world_group(), "ab"[dist.get_rank()]))
    exchange_once(Collective(dist.get_world_group(), "moe"))
    return caught.value.missing, str(caught.value)


def test_ranks_in_different_layers_raise_and_may_go_on(pair_of_a_case):
    for rank, (missing, text) in enumerate(pair_of_a_case.run(in_different_layers)):
        assert missing == (1 - rank, ) and f"rank {rank} is in 'counts' of {'ab'[rank]} (1 choices a token)" in text


def miss_rank_1(raises: bool) -> tuple | None:
    set_timeout(DEADLINE)
    exchange = Collective(dist.new_group([0, 1]), "moe")
    exchange_once(exchange)
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        if raises:
            with pytest.raises(ValueError):
                tell_peers_on_error(lambda: int("no number"))()
        return None
    start = time.monotonic()
    with pytest.raises(PeerError) as caught:
        exchange_once(exchange)
    return time.monotonic() - start, caught.value.missing, str(caught.value)


@pytest.mark.parametrize("raises", [False, True])
def test_a_rank_that_does_not_come_is_named_before_nccl_ends_the_process(pair_of_a_case, raises):
    (seconds, missing, text), _ = pair_of_a_case.run(miss_rank_1, raises)
    assert seconds < DEADLINE.total_seconds() + GRACE_SECONDS and missing == (1, )
    assert "rank 0 waited for rank 1 in 'counts' of moe until the deadline" in text
    assert re.search(r"rank 1 did not come; .* it raised ValueError: invalid literal" if raises else
                     "rank 1 did not come; it hangs elsewhere", text)
