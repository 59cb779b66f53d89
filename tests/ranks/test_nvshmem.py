# SPDX-License-Identifier: Apache-2.0
"""When NVSHMEM is not possible, on ranks without GPUs: all ranks of the group learn the reason and take the host."""

import io
import re
from contextlib import redirect_stdout
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.config import MXFP8MoEConfig
from ds_mxfp8_moe.ops.op_builder import builder, nvshmem
from ds_mxfp8_moe.ops.op_builder.nvshmem import NVSHMEMBuilder
from ds_mxfp8_moe.transport import choose as choosing
from ds_mxfp8_moe.transport.choose import Place, choose
from ds_mxfp8_moe.transport.nvshmem import NVSHMEMWire
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.support import emulator
from tests.support.emulated_nvshmem import FAILURES, Library, machine, started
from tests.support.rank_pool import KEPT_GROUPS


def test_all_ranks_start_it_once_between_them(ranks2):
    for rank, (reasons, starts, ranks) in enumerate(ranks2.run(started)):
        assert reasons == [None, None] and starts == [(rank, 2, b"id")] and ranks == [0, 1]


@pytest.mark.parametrize("keys, reason", FAILURES, ids=lambda value: None)
def test_one_rank_that_cannot_decides_for_all(ranks2, keys, reason):
    for reasons, _, _ in ranks2.run(started, **keys):
        assert reasons[0] == reason


def chosen(wanted: str, **keys) -> tuple:
    """What the key `wire` gives on a machine with GPUs that do not reach each other."""
    group, out = dist.new_group([0, 1, 2, 3]), io.StringIO()
    with machine(Library(**keys)), mock.patch.object(choosing, "_plain_obstacle", lambda *args: None), \
         mock.patch.object(choosing, "_place", lambda: Place("a 1", f"gpu{dist.get_rank()}", frozenset())), \
         redirect_stdout(out):
        hops = choose(group, "moe", MXFP8MoEConfig(transport="hierarchical", node_size=2, wire=wanted)).hops
    return type(hops.between).__name__, type(hops.inside).__name__, out.getvalue()


def test_the_host_takes_over_and_the_line_says_why(ranks4):
    answers = ranks4.run(chosen, "nvshmem", broken="start")
    assert [answer[:2] for answer in answers] == [("HostWire", "HostWire")] * 4
    assert answers[0][2] == ("mxfp8_moe: WARNING: transport hierarchical between ranks [0, 1, 2, 3]: 2 nodes of 2 "
                             "ranks, wire host. No wire nvshmem, because rank 1: NVSHMEM cannot be started: "
                             "RuntimeError: start returned 7\n")


def test_peer_memory_between_nodes_that_do_not_reach_each_other(ranks4):
    answers = ranks4.run(chosen, "peer_memory")
    assert [answer[:2] for answer in answers] == [("HostWire", "HostWire")] * 4
    assert ("wire host. No wire peer_memory, because the GPU of rank 0 cannot reach the memory of the GPU of rank 2"
            in answers[0][2])


class Full(emulator.Shared):
    """Has room for the first staging. After that, rank 1's heap is full."""

    made = 0

    @staticmethod
    def empty(size, device):
        Full.made += 1
        if Full.made > 1 and dist.get_rank() == 1:
            raise MemoryError("NVSHMEM's symmetric heap is too small")
        return emulator.Shared.empty(size, device)


def outgrown() -> tuple:
    group, out, me = dist.new_group([0, 1, 2, 3]), io.StringIO(), dist.get_rank()
    KEPT_GROUPS.add(group)
    ranks = [me % 2, me % 2 + 2]
    memory = PeerMemory(group, emulator.load(me), 1, Full, ranks, {rank: rank // 2 for rank in range(4)})
    between = NVSHMEMWire(memory, 1)
    with redirect_stdout(out):
        for _ in range(2):
            rows = between.exchange(torch.full((2, 3 << 20), float(me)), (1, 1), (1, 1), "rows", 1)
    return rows[:, 0].tolist(), between.sent_bytes, out.getvalue()


@pytest.mark.usefixtures("emulated")
def test_a_heap_that_is_too_small_later_hands_over_to_the_host(ranks4):
    answers = ranks4.run(outgrown)
    assert [rows for rows, _, _ in answers] == [[0.0, 2.0], [1.0, 3.0]] * 2
    assert all(sent == 2 * 4 * (3 << 20) for _, sent, _ in answers)
    zero = answers[0][2]
    assert zero.startswith("mxfp8_moe: WARNING: from now on the wire is host, not nvshmem: rows: the staging of ")
    assert "on rank 1: MemoryError: NVSHMEM's symmetric heap is too small" in zero and zero.count("\n") == 1
    assert not any(out for _, _, out in answers[1:])


@pytest.mark.parametrize("found, reason", [(None, "NVSHMEM was not found"), ("2.11", "NVSHMEM 2.11 in .* is too old"),
                                           ("3.3", "3.4 or newer is needed"), ("3.4", None), ("4.0", None)])
def test_what_torch_brings_may_be_missing_or_too_old(tmp_path, monkeypatch, found, reason):
    monkeypatch.setattr(builder.NvccBuilder, "_obstacle", lambda self: None)
    if found:
        header = tmp_path / "include" / "non_abi" / "nvshmem_version.h"
        header.parent.mkdir(parents=True)
        major, minor = found.split(".")
        header.write_text(f"#define NVSHMEM_VENDOR_MAJOR_VERSION {major}\n"
                          f"#define NVSHMEM_VENDOR_MINOR_VERSION {minor}\n")
    monkeypatch.setattr(nvshmem, "_nvshmem", lambda: tmp_path if found else None)
    obstacle = NVSHMEMBuilder()._obstacle()
    if reason is None:
        assert obstacle is None
    else:
        assert re.search(reason, obstacle)
