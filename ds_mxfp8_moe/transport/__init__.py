# SPDX-License-Identifier: Apache-2.0
"""How tokens travel between the ranks of an expert-parallel group: plan, dispatch, combine.

A transport has three methods. `plan(expert_TK, num_local_experts, meanwhile, rows)` turns one forward's routing into
an immutable Plan; where the host has to wait for other ranks' counts, it calls `meanwhile` first, if given, to launch
what needs none of them. Ranks in the plans of different layers, or of different `rows`, a text, all raise. `dispatch`
brings every token to the ranks of its experts and lays it out in expert-sorted, padded rows; `combine` brings rows
back and adds them up. Dispatch and combine are each other's gradient over the same plan. `start_dispatch` may leave an
`Arrival`, with which a GEMM begins before all its rows are there. `start_combine` is the first half of a combine,
beside which a GEMM may run: with a `Feed`, the one that computes its rows.

Every transport gives the same bits. A token travels once to each rank that holds one of its experts. Sums: at the
expert's rank an fp32 partial per token in ascending choice, of rows as the last GEMM rounds them; one rounding to the
wire dtype; then fp32 at the owner in ascending rank.

Letters in tensor names: T tokens of this rank, K choices of a token, H hidden size, W ranks, E local experts,
S rows this rank sends, R rows it receives, P expert-sorted rows with their padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

ROW_ALIGNMENT = 128


@dataclass(frozen=True)
class Wire:
    """How rows look while they travel: as they are, or quantised to MXFP8."""

    mxfp8: bool
    block_size: int = 32
    scaling_mode: str = "rceil"


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What one forward's routing means for this rank. Immutable; carried to its own backward by autograd alone.

    Attributes:
        num_tokens, top_k: T and K.
        tokens_per_expert: mean choices per expert over the whole group, dropped ones included; equal on all ranks.
        send_splits, recv_splits: rows to and from each rank of the group, in rank order.
        send_token_S: int64 [S], the token in each row sent, ascending by (rank, token).
        sent_slot_WT: int64 [W, T], the row of `send_token_S` in which token t goes to rank w; S where it does not.
        group_ends: end of each local expert's rows among the P, on the host; multiples of ROW_ALIGNMENT.
        group_ends_E: the same as int32 on the device.
        slot_RK: int64 [R, K], where choice k of received row r stands among the P; P where another rank serves it.
        source_P: int64 [P], r * K + k for the choice that stands there; R * K in padding rows.
    """

    num_tokens: int
    top_k: int
    tokens_per_expert: float
    send_splits: tuple
    recv_splits: tuple
    send_token_S: torch.Tensor
    sent_slot_WT: torch.Tensor
    group_ends: tuple
    group_ends_E: torch.Tensor
    slot_RK: torch.Tensor
    source_P: torch.Tensor

    @property
    def num_rows(self) -> int:
        """P: expert-sorted rows on this rank, padding included."""
        return self.source_P.shape[0]


@dataclass(frozen=True)
class Pending:
    """An exchange that may still be under way, on a stream of its own.

    Attributes:
        done: event of its end. kept: what it reads, which must not be freed before.
    """

    results: tuple
    done: Any = None
    kept: tuple = ()

    def result(self) -> tuple:
        """What the exchange returns; the current stream waits for it, the host does not."""
        if self.done is not None:
            get_accelerator().current_stream().wait_event(self.done)
        return self.results


@dataclass(frozen=True)
class Feed:
    """How a grouped GEMM hands its rows to a combine that runs beside it.

    Attributes:
        sms: multiprocessors that the combine takes.
        parts: in how many runs of chunks each owner's rows are sent.
        order: int32 [P / 128], on the device: which 128 rows to compute first.
        done: int32 [P / 128], zeros: there the GEMM counts, with release, the blocks of 64 rows by 128 columns that
            are in memory.
        out_TH: what the combine writes: [T, H] of the dtype asked for.
        ready: event from which on all are there.
    """

    sms: int
    parts: int
    order: torch.Tensor
    done: torch.Tensor
    out_TH: torch.Tensor
    ready: Any


@dataclass(frozen=True)
class Arrival:
    """How a grouped GEMM begins with the rows of a dispatch that is still under way.

    Attributes:
        sms: multiprocessors that the dispatch takes.
        first: so many of `order` are computed beside it, the others behind it.
        order: int32 [P / 128], on the device: which 128 rows to compute first.
        arrived: int32 [P / 128]: of these 128 rows so many are there, padding included; 128 if none is missing.
        failed: int32 [1]: not 0 if rows that are missing will not come.
        begin: the current stream waits until the dispatch has its multiprocessors.
        end: the current stream waits until it has ended.
    """

    sms: int
    first: int
    order: torch.Tensor
    arrived: torch.Tensor
    failed: torch.Tensor
    begin: Callable[[], None]
    end: Callable[[], None]


class Transport:
    """What transports have in common that run nothing beside a GEMM."""

    def sms_beside(self, plan: Any, hidden_size: int, dtype: torch.dtype, wire: Wire, gemm_seconds: float,
                   gemm_tiles: int) -> int:
        """Multiprocessors that a combine of rows of `dtype` takes best beside a GEMM of so many seconds and tiles; 0:
        none, it runs before or after."""
        return 0

    def feed(self, plan: Any, hidden_size: int, dtype: torch.dtype, wire: Wire, gemm_seconds: float,
             gemm_tiles: int) -> Feed | None:
        """How a GEMM of so many seconds and tiles, or of 0 if it cannot, best computes the rows of a combine that
        begins with it; None: the combine comes after it."""
        return None

    def start_dispatch(self, plan: Any, x_TH: torch.Tensor, wire: Wire, weight_TK: torch.Tensor | None = None,
                       phase: str = "dispatch", gemm_seconds: float = 0) -> tuple:
        """`dispatch`, of whose rows a GEMM of so many seconds, or of 0 if it cannot, begins with those that are there,
        and the Arrival for it; None: they are all there. With an Arrival, the GEMM is the next thing on the current
        stream that reads or frees what the dispatch writes, and comes before the group's next exchange."""
        return *self.dispatch(plan, x_TH, wire, weight_TK, phase), None

    def start_combine(self, *args, sms: int = 0, feed: Feed | None = None, **kwargs) -> Pending:
        """`combine` on `sms` multiprocessors, beside what the caller launches next; 0: not beside anything. With
        `feed`, and without `weight_P`: beside the GEMM of y_PH, which has been launched. Its result is taken before
        the group's next exchange."""
        return Pending(self.combine(*args, **kwargs))
