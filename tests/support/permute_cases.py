# SPDX-License-Identifier: Apache-2.0
"""The kernels of permute.py and unpermute.py against the plain path of the transports that use them, on whatever
device the kernels run.

A group of any size lives in one process: its ranks are threads that take turns and swap their messages.
"""

import threading
from dataclasses import dataclass
from unittest import mock

import torch

from ds_mxfp8_moe.transport import collective, hierarchical, rows
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from ds_mxfp8_moe.transport.wires import RowWire
from tests.support import conformance
from tests.support.conformance import BF16, FP16, FP32, MX32, MX128, PLAIN, bits, poisoned  # noqa: F401
from tests.support.conformance import FLOOR32 as FLOOR

FORMATS = {"plain": PLAIN, "mxfp8-32": MX32, "mxfp8-128": MX128, "floor": FLOOR}


class Peers:
    """Ranks that are threads, of which one runs at a time."""

    def __init__(self, size: int):
        self.size, self._messages = size, [None] * size
        self._all_here, self._turn = threading.Barrier(size, timeout=60), threading.Lock()

    def run(self, body) -> list:
        """body(rank) on every rank; the results in rank order."""
        results, errors = [None] * self.size, []

        def work(rank):
            try:
                with self._turn:
                    results[rank] = body(rank)
            except BaseException as error:  # raised below
                self._all_here.abort()
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank, )) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return results

    def _wait(self):
        self._turn.release()
        try:
            self._all_here.wait()
        finally:
            self._turn.acquire()

    def swap(self, rank: int, parts: tuple) -> torch.Tensor:
        self._messages[rank] = parts
        self._wait()
        arrived = torch.cat([self._messages[peer][rank] for peer in range(self.size)])
        self._wait()
        return arrived


@dataclass(frozen=True)
class Member(Collective):
    """The transport of one such rank."""

    rank: int = 0
    peers: Peers | None = None

    @property
    def world_size(self) -> int:
        return self.peers.size

    def _exchange(self, x, send_splits, recv_splits, phase, call=""):
        arrived = self.peers.swap(self.rank, x.split(list(send_splits)))
        assert arrived.shape[0] == sum(recv_splits)
        return arrived


class Hop(RowWire):
    """One hop of the rank `rank`, whose exchanges `peers` carries. `ranks`: the ranks of the hop."""

    def __init__(self, rank: int, ranks: range, peers: Peers):
        self.rank, self.ranks, self.peers = rank, ranks, peers

    def exchange(self, x, send_splits, recv_splits, where, most, compared=True, row_S=None):
        x = x if row_S is None else x.index_select(0, row_S)
        parts = dict(zip(self.ranks, x.split(list(send_splits)), strict=True))
        arrived = self.peers.swap(self.rank, [parts.get(peer, x[:0]) for peer in range(self.peers.size)])
        assert arrived.shape[0] == sum(recv_splits)
        return arrived


def two_hops(rank: int, peers: Peers, node_size: int) -> Hierarchical:
    first = rank - rank % node_size
    between, inside = range(rank % node_size, peers.size, node_size), range(first, first + node_size)
    return Hierarchical(Hops(lambda: None, rank, {}, node_size, Hop(rank, between, peers), Hop(rank, inside, peers)))


@dataclass(frozen=True)
class Problem(conformance.Problem):
    """An exchange between as many ranks as `tokens` has numbers."""

    not_finite: bool = False


PROBLEMS = {
    "two ranks": Problem((21, 13)),
    "two ranks, mxfp8": Problem((21, 13), row_format=MX32),
    "not contiguous": Problem((9, 5), contiguous=False, row_format=MX128),
    "not finite": Problem((9, 8), not_finite=True, row_format=MX32, top_k=3),
    "not finite, plain": Problem((9, 8), not_finite=True, top_k=3),
    "floor": Problem((9, 5), row_format=FLOOR, routing="dropped"),
    "short last block": Problem((9, 5), row_format=MX128, hidden=160),
    "many blocks": Problem((6, 7), row_format=MX32, hidden=1184, top_k=3),
    "many blocks, plain": Problem((2, 3), hidden=2080, dtype=FP32),
    "more ranks than choices": Problem((5, 0, 3, 7, 1, 2), local_experts=2, top_k=3, row_format=MX128,
                                        routing="dropped"),
    "more choices than experts": Problem((7, 3), local_experts=1, top_k=8),
    "one choice": Problem((7, 3), top_k=1, row_format=MX32),
    "one expert": Problem((20, 13), routing="one expert", row_format=MX32, hidden=32),
    "nowhere": Problem((4, 3), routing="nowhere", row_format=MX32),
    "no tokens": Problem((0, 0), row_format=MX128),
    "float32 answers": Problem((9, 5), y_dtype=FP32, top_k=4),
    "float32 answers, mxfp8": Problem((9, 5), y_dtype=FP32, top_k=4, row_format=MX32),
    "float16": Problem((9, 5), dtype=FP16, row_format=MX32),
    "float16, plain": Problem((9, 5), dtype=FP16),
    "float32": Problem((9, 5), dtype=FP32, row_format=MX128),
}


def moved(transport, problem: Problem, inputs: tuple, slots: str, device: str) -> tuple:
    """The plan, and (x_PH, weight_P, y_TH, weight_TK, and x_PH and y_TH without numbers beside them) of one rank.

    slots: which of the plan's tensors has the slots. A row whose source is their number is padding.
    """
    expert_TK, x_TH, weight_TK = (t.to(device) for t in inputs)
    plan = transport.plan(expert_TK, problem.local_experts)
    x_PH, weight_P = transport.dispatch(plan, x_TH, problem.row_format, weight_TK)
    bare_PH, none = transport.dispatch(plan, x_TH, problem.row_format)
    assert none is None
    y_PH = (x_PH.dequantize(torch.float32) if problem.row_format.mxfp8 else x_PH) * 1.37
    y_PH = y_PH.to(problem.y_dtype or problem.dtype)
    number_P = weight_P + 1
    padding = plan.source_P == getattr(plan, slots).numel()
    y_PH[padding], number_P[padding] = float("nan"), float("nan")
    y_TH, back_TK = transport.combine(plan, y_PH, problem.row_format, problem.dtype, number_P)
    bare_TH, none = transport.combine(plan, y_PH, problem.row_format, problem.dtype)
    assert none is None
    return plan, (x_PH, weight_P, y_TH, back_TK, bare_PH, bare_TH)


def exchange(problem: Problem, device: str, in_kernels: bool, node_size: int | None = None) -> list:
    """What `moved` returns beside the plan, of each rank. `node_size`: of the transport in two hops."""
    inputs, peers = problem.inputs(), Peers(len(problem.tokens))

    def body(rank):
        transport = Member(None, rank=rank, peers=peers)
        if node_size:
            transport = two_hops(rank, peers, node_size)
        return moved(transport, problem, inputs[rank], "slot_RK", device)[1]

    def read_counts(counts, group, where, meanwhile, node_of=None):
        """Without events: the accelerator of this process may be the CPU."""
        meanwhile()
        return counts.tolist()

    with mock.patch.object(rows, "runs_kernels", lambda *_: in_kernels), poisoned(), \
            mock.patch.object(collective, "read_counts", read_counts), \
            mock.patch.object(hierarchical, "read_counts", read_counts):
        return peers.run(body)


def check_exchange(device: str, problem: Problem, node_size: int | None = None) -> None:
    """Both paths give the same bits, dtypes and shapes."""
    plain, with_kernels = (exchange(problem, device, in_kernels, node_size) for in_kernels in (False, True))
    for rank, (expected, actual) in enumerate(zip(plain, with_kernels, strict=True)):
        for name, a, b in zip(("x", "weight", "y", "back", "bare x", "bare y"), expected, actual, strict=True):
            assert (type(a), a.shape, a.dtype) == (type(b), b.shape, b.dtype), (rank, name)
            assert torch.equal(bits(a), bits(b)), (rank, name, (bits(a) != bits(b)).nonzero()[:4].tolist())
        x_PH = actual[0]
        if problem.row_format.mxfp8 and x_PH.shape[0]:
            assert x_PH.scale_bytes.stride() == (1, x_PH.shape[0]) and x_PH.qdata.is_contiguous()
