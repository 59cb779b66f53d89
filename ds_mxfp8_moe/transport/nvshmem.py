# SPDX-License-Identifier: Apache-2.0
"""Exchanges over NVSHMEM: the GPU itself starts the transfers between nodes (ops/csrc/nvshmem).

NVSHMEM runs between the ranks of one expert-parallel group, since a process can start it once. Rank i of the group is
PE i. Its environment variables choose the network (examples/guides/several_nodes.md).
"""

from types import ModuleType
from typing import Any

import deepspeed.comm as dist
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup

from ..ops.log import log
from ..ops.op_builder import nvshmem as extension
from .deadline import answers_of_all, failure_of_any, ranks_of
from .peer_memory import NoStaging, PeerMemory
from .wires import HostWire, PeerWire

BLOCKS = 32  # of a kernel: more do not make a network faster

# The ranks between which this process has started NVSHMEM.
_STARTED: list = []


class Heap:
    """Staging in NVSHMEM's symmetric heap, as peer_memory.Symmetric. All ranks of the group call each method."""

    def __init__(self, module: ModuleType):
        self.module, self.address = module, 0

    def empty(self, size: int, device: torch.device) -> torch.Tensor:
        """uint8 [size] at the same place of all PEs' heaps. It replaces what this object gave before."""
        if self.address:
            self.module.free(self.address)
        self.address = self.module.allocate(size)
        if not self.address:
            raise MemoryError("NVSHMEM's symmetric heap is too small: set NVSHMEM_SYMMETRIC_SIZE")
        return torch.as_tensor(_Memory(self.address, size), device=device)

    @staticmethod
    def addresses(staging: torch.Tensor, group: ProcessGroup, ranks: list, name: str) -> list[int]:
        """Kernels get this rank's own address. NVSHMEM finds the same place at the PEs."""
        return [staging.data_ptr()]


class _Memory:
    """Lets torch make a tensor of device memory."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size, ), "typestr": "|u1", "data": (address, False), "version": 3}


class NVSHMEMWire(PeerWire):
    """Puts rows and signals into the symmetric heaps of other nodes.

    If the staging cannot grow, all ranks go on over the host, and a line says why.

    Arguments:
        memory: the hop's staging in the heap.
        sms: multiprocessors that move rows.
    """

    REGIONS = 2  # of a rank in a half: rows that come, and rows that leave

    def __init__(self, memory: PeerMemory, sms: int = BLOCKS):
        super().__init__(memory, sms)
        self.host: HostWire | None = None
        pes = [ranks_of(memory.group).index(rank) for rank in memory.ranks]
        self._pe = pes + [0] * (memory.extension.MAX_RANKS - len(pes))

    def exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, where: str, most: int,
                 compared: bool = True, row_S: torch.Tensor | None = None) -> torch.Tensor:
        if self.host is None:
            try:
                self.memory.reserve(self._half_bytes(x, most), where)
            except NoStaging as error:
                self.host = HostWire(self.memory.group, self.ranks, self.memory.node_of)
                if dist.get_rank(group=self.memory.group) == 0:
                    log(f"mxfp8_moe: WARNING: from now on the wire is host, not nvshmem: {error}")
        if self.host is not None:
            self.count(x, send_splits)
            return self.host.exchange(x, send_splits, recv_splits, where, most, compared, row_S)
        return super().exchange(x, send_splits, recv_splits, where, most, compared, row_S)

    def _launch(self, args: Any) -> None:
        ext = self.memory.extension
        ext.row_exchange(ext.ShmemExchange(rows=args, pe=self._pe), self.sms, self.memory.stream())


def wire_over_nvshmem(group: ProcessGroup, ranks: list, node_of: dict) -> NVSHMEMWire:
    """The wire of a hop. Collective in the group. `start` has returned None on all ranks."""
    module = extension.try_load()[0]
    return NVSHMEMWire(PeerMemory.of(group, module, ranks, node_of, Heap(module)))


def memory_of(group: ProcessGroup, where: str) -> PeerMemory:
    """The staging of all ranks of the group, for AllToAll. The first call starts NVSHMEM. Collective.

    Raises:
        RuntimeError: it is not possible. Raised on every rank, with the reason.
    """
    reason = "there is no CUDA device"
    if get_accelerator().device_name() == "cuda":
        reason = start(group, where)
    if reason:
        raise RuntimeError(f"{where}: NVSHMEM cannot be used here: {reason}")
    module = extension.try_load()[0]
    return PeerMemory.of(group, module, provider=Heap(module))


def start(group: ProcessGroup, where: str) -> str | None:
    """Starts NVSHMEM between the ranks of the group, if it does not run between them yet. Collective.

    Returns why it is not possible, equal on all ranks. None: it runs.
    """
    ranks, (module, failure) = ranks_of(group), extension.try_load()
    reason = failure_of_any(group, failure or _taken(module, ranks), where)
    if reason or _STARTED == ranks:
        return reason

    def attempted(step: Any) -> tuple:
        try:
            return step(), ""
        except Exception as error:  # the driver, the network or the container may refuse
            return None, f"NVSHMEM cannot be started: {type(error).__name__}: {error}"

    me = dist.get_rank(group=group)
    unique_id, failure = answers_of_all(group, attempted(module.unique_id) if me == 0 else None, where)[0]
    if failure:
        return f"rank {ranks[0]}: {failure}"
    _, failure = attempted(lambda: module.start(me, len(ranks), unique_id))
    reason = failure_of_any(group, failure, where)
    if not reason:
        _STARTED.extend(ranks)
    return reason


def _taken(module: ModuleType, ranks: list) -> str:
    if _STARTED and _STARTED != ranks:
        return f"this process has started NVSHMEM between ranks {_STARTED}, and can start it once"
    if not _STARTED and module.started():
        return "someone else in this process has started NVSHMEM already, such as torch or DeepEP"
    return ""
