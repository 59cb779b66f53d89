# SPDX-License-Identifier: Apache-2.0
"""Hops over peer memory between ranks without GPUs, on the emulator of CUDA."""

from typing import Any
from unittest import mock

import deepspeed.comm as dist

from ds_mxfp8_moe.transport import peer_memory
from ds_mxfp8_moe.transport.hops import Hops
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from ds_mxfp8_moe.transport.wires import Alone, PeerWire, RowWire
from tests.support import emulator

FIRST_EPOCH = 0xFFFFFFF0  # wraps within the first cases


def peer_hops(group: Any, node_size: int) -> Hops:
    """The group's hops, each over peer memory on one or two multiprocessors. Collective."""
    host, module = Hops.of(group, node_size), emulator.load(dist.get_rank())

    def wire(ranks: list, sms: int) -> RowWire:
        if len(ranks) == 1:
            return Alone(ranks)
        with mock.patch.object(peer_memory, "FIRST_BYTES", 1 << 20):  # so that it grows
            return PeerWire(PeerMemory(group, module, FIRST_EPOCH, emulator.Shared, ranks, host.node_of), sms)

    return Hops.over(group, host.node_of, node_size, wire(host.between.ranks, 1), wire(host.inside.ranks, 2))
