# SPDX-License-Identifier: Apache-2.0
"""The transport over peer memory inside a node: ops/csrc/nvlink, where each step is one kernel.

    plan        counts, told to every peer by stores; the host waits for them once, to size what follows; places
    dispatch    every token read and quantised once, stored once to each other rank that wants it, expanded there
                meanwhile; this rank's own where they belong
    combine     partial sums at the experts' rank, stored to the owner, summed there meanwhile

The same bits as the collective transport. Nothing that backward needs stays in the staging.
"""

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from ..mx import MXTensor
from . import ROW_ALIGNMENT, Arrival, Feed, Pending, Transport, Wire
from . import overlap as model
from .peer_memory import KINDS, PeerMemory

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # kernels.h, Dtype
CHUNKS = 1024  # at most, of a rank's tokens
LEAST_CHUNK = 16  # tokens
ALIGNED = 128  # bytes, of the parts of a half
MOST_PARTS = 8  # of the order in which a GEMM computes rows
LEAST_TILES = 8  # row tiles of an owner and expert in each, for a combine: neighbours share weights
STRIP = 16  # row tiles that a GEMM computes side by side: GROUP of grouped_gemm_hopper.py


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
    choices: int = field(repr=False)  # K of the rows that travel
    group_sizes_E: int = field(repr=False)  # an address
    tables: tuple = field(repr=False)  # tensors that hold what addresses point to


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


def _chunk(num_tokens: int, world_size: int) -> int:
    chunk = LEAST_CHUNK
    # Small chunks leave little to do when the last one has arrived; those with few rows for a rank leave warps idle.
    while chunk * (CHUNKS if chunk >= 4 * world_size else CHUNKS // 2) < num_tokens:
        chunk *= 2
    return chunk


def _padded(rows: int) -> int:
    return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _tables(device: torch.device, *sizes: int) -> tuple[torch.Tensor, list]:
    """One int32 tensor for tables of these sizes, and their addresses: multiples of 16 bytes."""
    beginnings = [0, *itertools.accumulate(-(-size // 4) * 16 for size in sizes)]
    table = torch.empty(beginnings.pop() // 4, dtype=torch.int32, device=device)
    return table, [table.data_ptr() + beginning for beginning in beginnings]


def _tables_of_tiles(tiles: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros: three int32 tables [3, tiles], and a word [1]. The tables at multiples of 16 bytes whatever the batch:
    Triton compiles anew for other pointers."""
    tables = torch.zeros((3, -(-tiles // 4) * 4 + 4), dtype=torch.int32, device=device)
    return tables[:, :tiles], tables[-1, -1:]


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
        overlap: a combine may run beside a GEMM, and a GEMM begin with the first rows of a dispatch. Not for ranks
            that share a GPU's time at once (MPS), where GEMMs that wait for rows may leave a peer's dispatch no room.
        feeds: a GEMM may feed the combine of its rows. Off: between 2 H200s the best share gained at most 6 % of a
            forward, and the model's lost (examples/benchmarks/overlap.py); between more it is not measured yet. Not
            with MPS either.
    """

    memory: PeerMemory
    name: str = "an expert-parallel exchange"
    sms: int | None = None
    capacity_factor: float | None = None
    overlap: bool = True
    feeds: bool = False

    @property
    def world_size(self) -> int:
        return self.memory.world_size

    @property
    def _alone(self) -> int:
        return min(self.sms or model.ALONE, self.memory.multiprocessors)

    def _where(self, phase: str) -> str:
        return f"'{phase}' of {self.name}"

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int, meanwhile: Callable[[], None] | None = None,
             rows: str = "", dedup: bool = True) -> NVLinkPlan:
        """Plans the exchange of tokens routed to the global experts `expert_TK` (int64 [T, K], -1: nowhere).

        Args:
            meanwhile: called before the host waits; not where it does not.
            rows: what is the same of the tokens on all ranks.
            dedup: a token goes once to each rank. False, for measurements: once to each of its experts.
        """
        memory, ext = self.memory, self.memory.extension
        memory.check()
        fanout = 1 if dedup else expert_TK.shape[1]
        expert_TK = expert_TK.contiguous() if dedup else expert_TK.reshape(-1, 1)
        (T, K), W, E = expert_TK.shape, self.world_size, num_local_experts
        if K * fanout > ext.MAX_CHOICES:
            raise ValueError(f"{self.name}: {K * fanout} choices a token, and the nvlink transport takes "
                             f'{ext.MAX_CHOICES} at most: write "transport": "collective"')
        chunk = -(-_chunk(T, self.world_size) // fanout) * fanout  # no token's rows in two chunks
        if not ext.fits(W, W * E, K, chunk):
            raise ValueError(f"{self.name}: {T} tokens of {K} choices among {W * E} experts are more than the nvlink "
                             'transport moves at once: take smaller micro-batches, or write "transport": "collective"')
        chunks = -(-T // chunk)
        stride = -(-(chunks + 1) // 4) * 4
        of_all, (ends, group_sizes, first, counts, place_base, segments) = _tables(
            memory.device, E, E, (W * E + W) * stride, W * (2 + W + W * E), W * E, 4 * W)
        ids = expert_TK.data_ptr()
        known = {"first_CB": first, "T": T, "experts": W * E, "chunks": chunks, "stride": stride}
        ext.count(ext.Count(expert_TK=ids, K=K, local_experts=E, world=W, chunk=chunk, **known), memory.stream())
        known |= {"counts_WC": counts, "segments": segments}
        sizes = self._totals(T, K, E, known | {"place_base_E": place_base, "group_ends_E": ends,
                                               "group_sizes_E": group_sizes}, rows, meanwhile)
        of_rows, (slot, place, arriving) = _tables(memory.device, W * T, sizes.received * K, 2 * W * ext.MAX_CHUNKS)
        known |= {"slot_WT": slot, "place_RK": place, "arriving_WC": arriving, "K": K, "chunk": chunk}
        self._places(K, E, known | {"expert_TK": ids, "place_base_E": place_base}, sizes)
        return NVLinkPlan(num_tokens=T // fanout, top_k=K * fanout, tokens_per_expert=sizes.tokens * K / (W * E),
                          group_ends=sizes.group_ends, group_ends_E=of_all[:E], num_rows=sizes.rows,
                          received=sizes.received, most_rows=sizes.most_rows,
                          rows=ext.Rows(P=sizes.rows, fanout=fanout, **known), choices=K, group_sizes_E=group_sizes,
                          tables=(of_all, of_rows))

    def _totals(self, T: int, K: int, E: int, known: dict, rows: str,
                meanwhile: Callable[[], None] | None) -> "_Sizes":
        """Tells every rank what goes where, and finds out how much comes here. known: fields of Totals."""
        memory, ext, W = self.memory, self.memory.extension, self.world_size
        static, where, width = self.capacity_factor is not None, self._where("counts"), 2 + W + W * E
        memory.reserve(4 * W * width, where)
        group = memory.begin(signature("counts", self.name, rows, K, E, self.capacity_factor, T if static else 0),
                             where)
        if static:
            share = _padded(math.ceil(self.capacity_factor * T * K))
            room = _padded(min(share, W * T * K) + E * (ROW_ALIGNMENT - 1))
            memory.unchecked = True
            ext.totals(ext.Totals(group=group, local_experts=E, most_rows=room, **known), memory.stream())
            return _Sizes(None, room, W * T, W * T, W * T, room)
        ext.totals(ext.Totals(group=group, local_experts=E, serial=memory.next_serial(), host=memory.host.data_ptr(),
                              **known), memory.stream())
        if meanwhile is not None:
            meanwhile()
        memory.wait_for_counts(self.name)
        end = 1 + W * width
        tokens_W, _, *to_WW = memory.host_words[1:end].reshape(W, width).T[:2 + W].tolist()
        received_W, sent_W = [sum(to_W) for to_W in to_WW], map(sum, zip(*to_WW, strict=True))
        ends = tuple(itertools.accumulate(map(_padded, memory.host_words[end:end + E].tolist())))
        return _Sizes(ends, ends[-1], received_W[memory.rank], sum(tokens_W), max(*received_W, *sent_W), 0)

    def _places(self, K: int, E: int, known: dict, sizes: "_Sizes") -> None:
        """Finds every choice's row, and tells the ranks that serve it. known: fields of Places."""
        memory, ext, where = self.memory, self.memory.extension, self._where("places")
        _, ranges_at = _parts(sizes.most_rows, 4 * K)
        memory.reserve(ranges_at + 8 * self.world_size * ext.MAX_CHUNKS, where)
        group = memory.begin(signature("places", K, E), where)
        ext.places(ext.Places(group=group, local_experts=E, ranges_at=ranges_at, most_rows=sizes.limit, **known),
                   self._alone, memory.stream())

    def _rows(self, plan: NVLinkPlan, kind: str, H: int, dtype: torch.dtype, wire: Wire, weights: bool, phase: str):
        """The kernels' Rows for one exchange."""
        memory, where = self.memory, self._where(phase)
        memory.check()
        block = wire.block_size if wire.mxfp8 else 0
        scale_row = -(-H // (block * 16)) * 16 if block else 0
        data_row = H if block else H * dtype.itemsize
        data_at, scale_at, weight_at, end = _parts(plan.most_rows, data_row, scale_row,
                                                   4 * plan.choices if weights else 0)
        memory.reserve(end, where)
        group = memory.begin(signature(kind, where, H, block or str(dtype), weights, plan.choices), where)
        return memory.extension.Rows(plan.rows, group=group, data_at=data_at, scale_at=scale_at, weight_at=weight_at,
                                     H=H, block=block, floor=wire.scaling_mode == "floor", scale_row=scale_row,
                                     weights=weights)

    def dispatch(self, plan: NVLinkPlan, x_TH: torch.Tensor, wire: Wire, weight_TK: torch.Tensor | None = None,
                 phase: str = "dispatch") -> tuple:
        """As Collective.dispatch; MXFP8 scales of blocks of 128 are a view of K-block-major memory."""
        return self.start_dispatch(plan, x_TH, wire, weight_TK, phase)[:2]

    def start_dispatch(self, plan: NVLinkPlan, x_TH: torch.Tensor, wire: Wire, weight_TK: torch.Tensor | None = None,
                       phase: str = "dispatch", gemm_seconds: float = 0) -> tuple:
        x_TH = _dense(x_TH)
        (_, H), P, block, device = x_TH.shape, plan.num_rows, wire.block_size, x_TH.device
        rows = self._rows(plan, "dispatch", H, x_TH.dtype, wire, weight_TK is not None, phase)
        out_PH = torch.empty((P, H), dtype=torch.float8_e4m3fn if wire.mxfp8 else x_TH.dtype, device=device)
        scale = weight_P = None
        wanted = {}
        if wire.mxfp8:
            blocks = -(-H // block)
            strides = (1, P) if block == 128 else (blocks, 1)
            scale = torch.empty_strided((P, blocks), strides, dtype=torch.uint8, device=device)
            wanted |= {"out_scale": scale.data_ptr(), "scale_stride_p": strides[0], "scale_stride_b": strides[1]}
        if weight_TK is not None:
            weight_TK = weight_TK.float().contiguous()
            weight_P = torch.empty(P, dtype=torch.float32, device=device)
            wanted |= {"weight_TK": weight_TK.data_ptr(), "out_weight_P": weight_P.data_ptr()}
        memory, ext = self.memory, self.memory.extension
        args = ext.Dispatch(rows=rows, x_TH=x_TH.data_ptr(), dtype=DTYPES[x_TH.dtype], out_PH=out_PH.data_ptr(),
                            group_ends_E=plan.group_ends_E.data_ptr(), group_sizes_E=plan.group_sizes_E,
                            local_experts=plan.group_ends_E.shape[0], **wanted)
        arrival = self._arrival(plan, args, x_TH, wire, gemm_seconds, weight_TK)
        if arrival is None:
            ext.dispatch(args, self._alone, memory.stream())
        return MXTensor(out_PH, scale, block, x_TH.dtype) if wire.mxfp8 else out_PH, weight_P, arrival

    def sms_ahead(self, plan: NVLinkPlan, hidden_size: int, dtype: torch.dtype, wire: Wire, gemm_seconds: float,
                  **keys: Any) -> tuple[int, float]:
        """Multiprocessors that a dispatch takes best beside the GEMM of its rows, and how much of that is computed
        meanwhile; 0: none, it runs before. keys: the model's."""
        if not self.overlap or self.memory.side is None or not wire.mxfp8 or wire.block_size != ROW_ALIGNMENT:
            return 0, 0.0
        if plan.group_ends is None:  # bounds say little of the time; and branches of a graph may come one by one
            return 0, 0.0
        if self._runs(plan, 1) < MOST_PARTS:  # most rows that are computed together come with the last ones
            return 0, 0.0
        off_rank = plan.received * (self.world_size - 1) // self.world_size
        return model.share_ahead(self.memory.multiprocessors, off_rank * hidden_size, hidden_size,
                                 dtype.itemsize * plan.num_tokens + plan.num_rows + 2 * off_rank, gemm_seconds,
                                 self.sms, **keys)

    def _arrival(self, plan: NVLinkPlan, args: Any, x_TH: torch.Tensor, wire: Wire, gemm_seconds: float,
                 *read: torch.Tensor | None) -> Arrival | None:
        """Launches a dispatch beside the GEMM that begins with its rows; None: it is not launched. args: its own, with
        which it also reads `read`."""
        memory, ext, tiles = self.memory, self.memory.extension, plan.num_rows // ROW_ALIGNMENT
        sms, share = self.sms_ahead(plan, x_TH.shape[1], x_TH.dtype, wire, gemm_seconds)
        if not sms or not tiles:
            return None
        group = memory.group_for(signature("dispatch"))
        (urgency, order, arrived), begun = _tables_of_tiles(tiles, memory.device)
        done = get_accelerator().Event()
        memory.side.wait_stream(get_accelerator().current_stream())
        ext.order(ext.Order(rows=ext.Rows(plan.rows, group=group), urgency=urgency.data_ptr(), order=order.data_ptr(),
                            tiles=tiles, parts=self._runs(plan, 1), arriving=1),
                  memory.multiprocessors - sms, memory.stream())
        # Last: whatever fails before leaves nothing under way.
        ext.dispatch(ext.Dispatch(args, arrived=arrived.data_ptr(), begun=begun.data_ptr()), sms,
                     memory.side.cuda_stream)
        done.record(memory.side)

        def begin() -> None:
            ext.begun(ext.Begun(group=group, begun=begun.data_ptr(), blocks=sms), memory.stream())

        def end(kept: tuple = (x_TH, plan, *read)) -> None:
            get_accelerator().current_stream().wait_event(done)

        first = min(tiles, math.ceil(share * tiles / STRIP) * STRIP)
        return Arrival(sms, first, order, arrived, memory.state[-1:], begin, end)

    def combine(self, plan: NVLinkPlan, y_PH: torch.Tensor, wire: Wire, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        """As Collective.combine."""
        return self.start_combine(plan, y_PH, wire, dtype, weight_P, phase).result()

    def sms_beside(self, plan: NVLinkPlan, hidden_size: int, dtype: torch.dtype, wire: Wire,
                   gemm_seconds: float, gemm_tiles: int, steps: int | None = None) -> int:
        W, total = self.world_size, self.memory.multiprocessors
        if not self.overlap or self.memory.side is None:
            return 0
        row = hidden_size if wire.mxfp8 else hidden_size * dtype.itemsize
        moved = hidden_size * dtype.itemsize * (plan.num_rows + plan.num_tokens) + 2 * row * plan.received
        return model.share(total, row * plan.received * (W - 1) // W, moved, wire.mxfp8,
                           plan.received / max(plan.num_rows, 1), gemm_seconds, gemm_tiles, self.sms, steps)

    def _runs(self, plan: NVLinkPlan, least_tiles: int) -> int:
        """Runs of chunks in whose order a GEMM computes rows; of so many row tiles of a rank and expert at least."""
        tiles, experts = plan.num_rows // ROW_ALIGNMENT, plan.group_ends_E.shape[0]
        return max(1, min(MOST_PARTS, tiles // (least_tiles * self.world_size * experts)))

    def feed(self, plan: NVLinkPlan, hidden_size: int, dtype: torch.dtype, wire: Wire, gemm_seconds: float,
             gemm_tiles: int) -> Feed | None:
        if gemm_seconds <= 0 or not self.feeds:
            return None
        memory, ext, W = self.memory, self.memory.extension, self.world_size
        tiles, parts = plan.num_rows // ROW_ALIGNMENT, self._runs(plan, LEAST_TILES)
        sms = self.sms_beside(plan, hidden_size, dtype, wire, gemm_seconds, gemm_tiles, steps=parts * W)
        if not sms:
            return None
        (urgency, order, done), _ = _tables_of_tiles(tiles, memory.device)
        rows = ext.Rows(plan.rows, group=memory.group_for(0))
        ext.order(ext.Order(rows=rows, urgency=urgency.data_ptr(), order=order.data_ptr(), tiles=tiles, parts=parts),
                  self._alone, memory.stream())
        # Now: what is allocated later may be memory that the GEMM still reads.
        out_TH = torch.empty((plan.num_tokens, hidden_size), dtype=dtype, device=memory.device)
        ready = get_accelerator().Event()
        ready.record()
        return Feed(sms, parts, order, done, out_TH, ready)

    def start_combine(self, plan: NVLinkPlan, y_PH: torch.Tensor, wire: Wire, dtype: torch.dtype,
                      weight_P: torch.Tensor | None = None, phase: str = "combine", sms: int = 0,
                      feed: Feed | None = None) -> Pending:
        memory, ext, device = self.memory, self.memory.extension, y_PH.device
        y_PH = _dense(y_PH)
        H = y_PH.shape[1]
        rows = self._rows(plan, "combine", H, dtype, wire, weight_P is not None, phase)
        weight_TK = None
        wanted = {}
        if feed is None:
            out_TH = torch.empty((plan.num_tokens, H), dtype=dtype, device=device)
        else:
            sms, out_TH = feed.sms, feed.out_TH
            assert weight_P is None and out_TH.shape[1] == H and out_TH.dtype == dtype
            wanted = {"done": feed.done.data_ptr(), "parts": feed.parts}
        if weight_P is not None:
            weight_P = weight_P.contiguous()
            weight_TK = torch.empty((plan.num_tokens, plan.top_k), dtype=torch.float32, device=device)
            wanted = {"weight_P": weight_P.data_ptr(), "out_weight_TK": weight_TK.data_ptr()}
        args = ext.Combine(rows=rows, y_PH=y_PH.data_ptr(), dtype=DTYPES[y_PH.dtype], out_TH=out_TH.data_ptr(),
                           out_dtype=DTYPES[dtype], **wanted)
        if not sms:
            ext.combine(args, self._alone, memory.stream())
            return Pending((out_TH, weight_TK))
        # All memory is the current stream's: the other one is joined before any of it is freed.
        if feed is None:
            memory.side.wait_stream(get_accelerator().current_stream())
        else:
            memory.side.wait_event(feed.ready)
        ext.combine(args, sms, memory.side.cuda_stream)
        done = get_accelerator().Event()
        done.record(memory.side)
        return Pending((out_TH, weight_TK), done, (y_PH, weight_P, plan, feed))


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x in memory that 16-byte accesses read row after row."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
