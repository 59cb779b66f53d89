# SPDX-License-Identifier: Apache-2.0
"""The transport over peer memory inside a node: ops/csrc/nvlink, where each step is one kernel.

    plan        counts, told to every peer by stores; the host waits for them once, to size what follows; places
    dispatch    every token read and quantised once, stored once to each rank that wants it, expanded there meanwhile
    combine     partial sums at the experts' rank, stored to the owner, summed there meanwhile

The same bits as the collective transport. Nothing that backward needs stays in the staging.
"""

import itertools
import math
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from ..mx import MXTensor
from . import ROW_ALIGNMENT, Pending, Transport, Wire
from . import overlap as model
from .peer_memory import KINDS, PeerMemory

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # kernels.h, Dtype
CHUNKS = 512  # at most, of a rank's tokens
LEAST_CHUNK = 16  # tokens
ALIGNED = 128  # bytes, of the parts of a half


@dataclass(frozen=True, kw_only=True, eq=False)
class NVLinkPlan:
    """What one forward's routing means for this rank, with the tables that the kernels read. Immutable.

    Attributes:
        num_tokens, top_k: T and K.
        tokens_per_expert: mean choices per expert over the whole group, dropped ones included; equal on all ranks.
        group_ends_E: int32, end of each local expert's rows among the P, on the device.
        group_ends: the same on the host; None where the host does not know it.
        num_rows: P. More than the last group's end where the host does not know that.
        received: rows that arrive here; a bound where the host does not know it.
        most_rows: the most rows that any rank receives, or sends; equal on all ranks.
    """

    num_tokens: int
    top_k: int
    tokens_per_expert: float
    group_ends: tuple | None
    group_ends_E: torch.Tensor
    num_rows: int
    received: int
    most_rows: int
    rows: Any = field(repr=False)  # the extension's Rows
    tables: tuple = field(repr=False)  # tensors that `rows` points into
    group_sizes_E: torch.Tensor = field(repr=False)


class _Sizes(NamedTuple):
    """What the host knows of a plan's sizes.

    Attributes:
        group_ends: end of each local expert's rows; None where only the device knows.
        rows: P. received: R, or a bound. tokens: of all ranks. most_rows: a rank receives or sends; on any rank.
        limit: rows that an expert-sorted buffer has room for, past which places are refused; 0: it has been sized.
    """

    group_ends: tuple | None
    rows: int
    received: int
    tokens: int
    most_rows: int
    limit: int


@lru_cache(maxsize=4096)
def signature(kind: str, *shape: Any) -> int:
    """Equal on ranks that make the same call: the kind in the low byte, a hash of the rest above."""
    return zlib.crc32(repr(shape).encode()) << 8 & 0xFFFFFFFF | KINDS.index(kind)


def _chunk(num_tokens: int) -> int:
    chunk = LEAST_CHUNK
    while chunk * CHUNKS < num_tokens:
        chunk *= 2
    return chunk


def _padded(rows: int) -> int:
    return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _tables(device: torch.device, *sizes: int) -> list:
    """int32 tables of these sizes in one allocation, each at a multiple of 16 bytes."""
    rooms = [-(-size // 4) * 4 for size in sizes]
    parts = torch.empty(sum(rooms), dtype=torch.int32, device=device).split(rooms)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _parts(most_rows: int, *row_bytes: int) -> list:
    """Beginnings of regions of so many rows in a half, and their end."""
    beginnings = [0]
    for size in row_bytes:
        beginnings.append(-(-(beginnings[-1] + most_rows * size) // ALIGNED) * ALIGNED)
    return beginnings


@dataclass(frozen=True)
class NVLink(Transport):
    """Expert-parallel exchange between 2 to 8 ranks of one node over peer memory.

    Attributes:
        memory: the group's staging, shared by all layers.
        name: of the layer, for errors.
        capacity_factor: None: exact; the host waits for the counts, and memory is sized by them. A number: static; a
            rank has room for so many times its even share of rows, the host waits for nothing, and calls may be
            captured in a CUDA graph. Ranks then bring equally many tokens. What does not fit is an error on every
            rank, at its next call or check, and before the optimizer's step.
        sms: multiprocessors that move rows; None: as overlap.py has it.
        overlap: a combine may run beside a GEMM.
    """

    memory: PeerMemory
    name: str = "an expert-parallel exchange"
    sms: int | None = None
    capacity_factor: float | None = None
    overlap: bool = True

    @property
    def world_size(self) -> int:
        return self.memory.world_size

    @property
    def _alone(self) -> int:
        return min(self.sms or model.ALONE, self.memory.multiprocessors)

    def _where(self, phase: str) -> str:
        return f"'{phase}' of {self.name}"

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int, dedup: bool = True) -> NVLinkPlan:
        """Plans the exchange of tokens routed to the global experts `expert_TK` (int64 [T, K], -1: nowhere).

        Args:
            dedup: a token goes once to each rank. False, for measurements: once to each of its experts.
        """
        memory, ext = self.memory, self.memory.extension
        memory.check()
        fanout = 1 if dedup else expert_TK.shape[1]
        expert_TK = expert_TK.contiguous() if dedup else expert_TK.reshape(-1, 1)
        (T, K), W, E = expert_TK.shape, self.world_size, num_local_experts
        if K > ext.MAX_CHOICES:
            raise ValueError(f"{self.name}: {K} choices a token, and the nvlink transport takes {ext.MAX_CHOICES} at "
                             'most: write "transport": "collective"')
        chunk = -(-_chunk(T) // fanout) * fanout  # no token's rows in two chunks
        chunks = -(-T // chunk)
        stride = -(-(chunks + 1) // 4) * 4
        width = 2 + W + W * E
        first, counts, place_base, segments, ends_E, sizes_E = _tables(
            memory.device, (W * E + W) * stride, W * width, W * E, 4 * W, E, E)

        rows = ext.Rows()
        rows.first_CB, rows.counts_WC, rows.segments = first.data_ptr(), counts.data_ptr(), segments.data_ptr()
        rows.T, rows.K, rows.experts, rows.fanout = T, K, W * E, fanout
        rows.chunk, rows.chunks, rows.stride = chunk, chunks, stride
        sizes = self._count(rows, expert_TK, E, place_base, ends_E, sizes_E)

        slot_WT = torch.empty((W, T), dtype=torch.int32, device=memory.device)
        place_RK = torch.empty((sizes.received, K), dtype=torch.int32, device=memory.device)
        arriving_WC = torch.empty((W, ext.MAX_CHUNKS, 2), dtype=torch.int32, device=memory.device)
        rows.slot_WT, rows.place_RK, rows.arriving_WC = slot_WT.data_ptr(), place_RK.data_ptr(), arriving_WC.data_ptr()
        rows.P = sizes.rows
        self._place(rows, expert_TK, E, place_base, sizes)
        return NVLinkPlan(num_tokens=T // fanout, top_k=K * fanout, tokens_per_expert=sizes.tokens * K / (W * E),
                          group_ends=sizes.group_ends, group_ends_E=ends_E, num_rows=sizes.rows,
                          received=sizes.received, most_rows=sizes.most_rows, rows=rows,
                          tables=(first, slot_WT, place_RK, arriving_WC), group_sizes_E=sizes_E)

    def _count(self, rows: Any, expert_TK: torch.Tensor, E: int, place_base: torch.Tensor, ends_E: torch.Tensor,
               sizes_E: torch.Tensor) -> "_Sizes":
        """Counts what goes where, in all ranks' sight."""
        memory, ext, W, T, K = self.memory, self.memory.extension, self.world_size, rows.T, rows.K
        count = ext.Count()
        count.expert_TK, count.first_CB = expert_TK.data_ptr(), rows.first_CB
        count.T, count.K, count.experts, count.local_experts, count.world = T, K, W * E, E, W
        count.chunk, count.chunks, count.stride = rows.chunk, rows.chunks, rows.stride
        ext.count(count, memory.stream())

        static, where, width = self.capacity_factor is not None, self._where("counts"), 2 + W + W * E
        memory.reserve(4 * W * width, where)
        totals = ext.Totals()
        totals.group = memory.begin(signature("counts", K, E, self.capacity_factor, T if static else 0), where)
        totals.first_CB, totals.counts_WC, totals.segments = rows.first_CB, rows.counts_WC, rows.segments
        totals.place_base_E, totals.group_ends_E = place_base.data_ptr(), ends_E.data_ptr()
        totals.group_sizes_E, totals.T, totals.experts, totals.local_experts = sizes_E.data_ptr(), T, W * E, E
        totals.chunks, totals.stride = rows.chunks, rows.stride
        if static:
            share = _padded(math.ceil(self.capacity_factor * T * K))
            room = _padded(min(share, W * T * K) + E * (ROW_ALIGNMENT - 1))
            totals.most_rows, memory.unchecked = room, True
            ext.totals(totals, memory.stream())
            return _Sizes(None, room, W * T, W * T, W * T, room)
        totals.serial, totals.host = memory.next_serial(), memory.host.data_ptr()
        ext.totals(totals, memory.stream())
        memory.wait_for_counts(self.name)
        counts_WC = memory.host_words[1:1 + W * width].reshape(W, width)
        sent_WW = counts_WC[:, 2:2 + W]
        groups = memory.host_words[1 + W * width:1 + W * width + E].tolist()
        ends = tuple(itertools.accumulate(map(_padded, groups)))
        return _Sizes(ends, ends[-1], int(sent_WW[:, memory.rank].sum()), int(counts_WC[:, 0].sum()),
                      int(max(sent_WW.sum(0).max(), sent_WW.sum(1).max())), 0)

    def _place(self, rows: Any, expert_TK: torch.Tensor, E: int, place_base: torch.Tensor, sizes: "_Sizes") -> None:
        """Finds every choice's row, and tells the ranks that serve it."""
        memory, ext, where = self.memory, self.memory.extension, self._where("places")
        _, ranges_at = _parts(sizes.most_rows, 4 * rows.K)
        memory.reserve(ranges_at + 8 * self.world_size * ext.MAX_CHUNKS, where)
        places = ext.Places()
        places.group = memory.begin(signature("places", rows.K, E), where)
        places.expert_TK, places.place_base_E = expert_TK.data_ptr(), place_base.data_ptr()
        places.first_CB, places.counts_WC, places.segments = rows.first_CB, rows.counts_WC, rows.segments
        places.slot_WT, places.place_RK, places.arriving_WC = rows.slot_WT, rows.place_RK, rows.arriving_WC
        places.T, places.K, places.experts, places.local_experts = rows.T, rows.K, rows.experts, E
        places.chunk, places.chunks, places.stride = rows.chunk, rows.chunks, rows.stride
        places.ranges_at, places.most_rows = ranges_at, sizes.limit
        ext.places(places, self._alone, memory.stream())

    def _rows(self, plan: NVLinkPlan, kind: str, H: int, dtype: torch.dtype, wire: Wire, weights: bool, phase: str):
        """The kernels' Rows for one exchange."""
        memory, where = self.memory, self._where(phase)
        memory.check()
        block = wire.block_size if wire.mxfp8 else 0
        scale_row = -(-H // (block * 16)) * 16 if block else 0
        data_row = H if block else H * dtype.itemsize
        K = plan.rows.K
        data_at, scale_at, weight_at, end = _parts(plan.most_rows, data_row, scale_row, 4 * K if weights else 0)
        memory.reserve(end, where)
        rows = memory.extension.Rows(plan.rows)
        rows.group = memory.begin(signature(kind, H, data_row, scale_row, weights, K), where)
        rows.data_at, rows.scale_at, rows.weight_at = data_at, scale_at, weight_at
        rows.H, rows.block, rows.floor, rows.scale_row = H, block, wire.scaling_mode == "floor", scale_row
        rows.weights = weights
        return rows

    def dispatch(self, plan: NVLinkPlan, x_TH: torch.Tensor, wire: Wire, weight_TK: torch.Tensor | None = None,
                 phase: str = "dispatch") -> tuple:
        """As Collective.dispatch; MXFP8 scales of blocks of 128 are a view of K-block-major memory."""
        x_TH = _dense(x_TH.detach())
        (_, H), P, device = x_TH.shape, plan.num_rows, x_TH.device
        args = self.memory.extension.Dispatch()
        args.rows = rows = self._rows(plan, "dispatch", H, x_TH.dtype, wire, weight_TK is not None, phase)
        args.x_TH, args.dtype = x_TH.data_ptr(), DTYPES[x_TH.dtype]
        scale = weight_P = None
        if wire.mxfp8:
            out_PH = torch.empty((P, H), dtype=torch.float8_e4m3fn, device=device)
            blocks = -(-H // rows.block)
            scale = torch.empty((blocks, P) if rows.block == 128 else (P, blocks), dtype=torch.uint8, device=device)
            scale = scale.t() if rows.block == 128 else scale
            args.out_scale = scale.data_ptr()
            args.scale_stride_p, args.scale_stride_b = scale.stride()
        else:
            out_PH = torch.empty((P, H), dtype=x_TH.dtype, device=device)
        if weight_TK is not None:
            weight_TK = weight_TK.detach().float().contiguous()
            weight_P = torch.empty(P, dtype=torch.float32, device=device)
            args.weight_TK, args.out_weight_P = weight_TK.data_ptr(), weight_P.data_ptr()
        args.out_PH = out_PH.data_ptr()
        args.group_ends_E, args.group_sizes_E = plan.group_ends_E.data_ptr(), plan.group_sizes_E.data_ptr()
        args.local_experts = plan.group_ends_E.shape[0]
        self.memory.extension.dispatch(args, self._alone, self.memory.stream())
        if wire.mxfp8:
            out_PH = MXTensor(out_PH, scale.view(torch.float8_e8m0fnu), rows.block, x_TH.dtype)
        return out_PH, weight_P

    def combine(self, plan: NVLinkPlan, y_PH: torch.Tensor, wire: Wire, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        """As Collective.combine."""
        return self.start_combine(plan, y_PH, wire, dtype, weight_P, phase).result()

    def sms_beside(self, plan: NVLinkPlan, hidden_size: int, dtype: torch.dtype, wire: Wire,
                   gemm_seconds: float) -> int:
        W, total = self.world_size, self.memory.multiprocessors
        if not self.overlap or self.memory.side is None:
            return 0
        row = hidden_size if wire.mxfp8 else hidden_size * dtype.itemsize
        moved = hidden_size * dtype.itemsize * (plan.num_rows + plan.num_tokens) + 2 * row * plan.received
        return model.share(total, row * plan.received * (W - 1) // W, moved, gemm_seconds, self.sms)

    def start_combine(self, plan: NVLinkPlan, y_PH: torch.Tensor, wire: Wire, dtype: torch.dtype,
                      weight_P: torch.Tensor | None = None, phase: str = "combine", sms: int = 0) -> Pending:
        memory = self.memory
        y_PH = _dense(y_PH.detach())
        H, device = y_PH.shape[1], y_PH.device
        args = memory.extension.Combine()
        args.rows = self._rows(plan, "combine", H, dtype, wire, weight_P is not None, phase)
        args.y_PH, args.dtype, args.out_dtype = y_PH.data_ptr(), DTYPES[y_PH.dtype], DTYPES[dtype]
        out_TH = torch.empty((plan.num_tokens, H), dtype=dtype, device=device)
        args.out_TH = out_TH.data_ptr()
        weight_TK = None
        if weight_P is not None:
            weight_P = weight_P.detach().contiguous()
            weight_TK = torch.empty((plan.num_tokens, plan.top_k), dtype=torch.float32, device=device)
            args.weight_P, args.out_weight_TK = weight_P.data_ptr(), weight_TK.data_ptr()
        if not sms:
            memory.extension.combine(args, self._alone, memory.stream())
            return Pending((out_TH, weight_TK))
        # All memory is the current stream's: the other one is joined before any of it is freed.
        memory.side.wait_stream(get_accelerator().current_stream())
        memory.extension.combine(args, sms, memory.side.cuda_stream)
        done = get_accelerator().Event()
        done.record(memory.side)
        return Pending((out_TH, weight_TK), done, (y_PH, weight_P, plan))


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x in memory that 16-byte accesses read row after row."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
