# SPDX-License-Identifier: Apache-2.0
"""The transport over peer memory inside a node. Its kernels are in ops/csrc/nvlink.

    plan        stores this rank's counts to every peer. The host waits for all counts once, to size what follows. Then
                finds the place of every choice among its expert's rows, and stores it to the expert's rank.
    dispatch    reads and quantizes each token once and stores it once to each rank that needs it. That rank copies it
                to its experts' rows meanwhile. This rank's own tokens go to their rows directly.
    combine     adds up each token's rows at the experts' rank and stores the sums to the token's rank, which adds up
                what arrives meanwhile.

It gives the same bits as the collective transport. What backward needs is copied out of the staging.
"""

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ..compute.mx import MXTensor
from ..ops.mx_format import MXParts
from ..ops.op_builder import NVLinkBuilder
from . import ROW_ALIGNMENT, RowFormat, Transport, padded, room_for
from .kernel_reports import KINDS
from .peer_memory import PeerMemory, dense

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # kernels.h, Dtype
LEAST_CHUNK = 16  # tokens
MOST_MULTIPROCESSORS = 128  # of an exchange, by default
ALIGNED = 128  # bytes to which the regions of a half are aligned


@dataclass(frozen=True, kw_only=True, eq=False)
class NVLinkPlan:
    """What one forward's routing means for this rank, with the tables that the kernels read. Immutable.

    Attributes:
        num_tokens, top_k, tokens_per_expert, group_ends_E: as in Plan.
        num_rows: P. It may be more than the last group's end.
        received: number of rows that arrive here. With a capacity it is an upper bound.
        most_rows: the most rows that any rank receives or sends. Equal on all ranks.
        rows: the kernels' struct `Rows` (ops/csrc/nvlink/kernels.h), with addresses of the plan's tables.
        group_sizes_E: address of the int32 sizes of the groups, without padding.
        tables: the tensors that hold what the addresses point to.
    """

    num_tokens: int
    top_k: int
    tokens_per_expert: float
    group_ends_E: torch.Tensor
    num_rows: int
    received: int
    most_rows: int
    rows: Any = field(repr=False)
    group_sizes_E: int = field(repr=False)
    tables: tuple = field(repr=False)


def room_of(capacity_factor: float, tokens: int, top_k: int, ranks: int, experts: int) -> int:
    """P: the rows that a rank has room for: `capacity_factor` times its even share, and the padding of its groups.

    Args:
        tokens, top_k: T and K of every rank.
        experts: E.
    """
    share = padded(math.ceil(capacity_factor * tokens * top_k))
    return padded(min(share, ranks * tokens * top_k) + experts * (ROW_ALIGNMENT - 1))


@lru_cache(maxsize=4096)
def signature(kind: str, *shape: Any) -> int:
    """A number that is equal on ranks that make the same call: the kind in the low byte, a hash of `shape` above."""
    return zlib.crc32(repr(shape).encode()) << 8 & 0xFFFFFFFF | KINDS.index(kind)


def _chunk(num_tokens: int, world_size: int, most_chunks: int) -> int:
    chunk = LEAST_CHUNK
    # With small chunks, little is left to do when the last one has arrived. Chunks with few rows for a rank leave
    # warps idle, so chunks of fewer than 4 tokens for each rank grow at half as many.
    while chunk * (most_chunks if chunk >= 4 * world_size else most_chunks // 2) < num_tokens:
        chunk *= 2
    return chunk


def _tables(device: torch.device, *sizes: int) -> tuple[torch.Tensor, list]:
    """One int32 tensor that holds tables of these sizes, and their addresses, which are multiples of 16 bytes."""
    beginnings = [0, *itertools.accumulate(-(-size // 4) * 16 for size in sizes)]
    table = torch.empty(beginnings.pop() // 4, dtype=torch.int32, device=device)
    return table, [table.data_ptr() + beginning for beginning in beginnings]


class _RowsOfAll:
    """What the kernel `totals` tells the host.

    Attributes:
        received_W: how many rows each rank receives.
        most: the most rows that any rank receives or sends.
    """

    def __init__(self, words: Any, W: int, E: int):
        """`words`: a NumPy array with what the kernel wrote to kernels.h's Totals::host."""
        width = 2 + W + W * E
        self._sizes_E = words[1 + W * width:1 + W * width + E]
        self._tokens_W, _, *to_WW = words[1:1 + W * width].reshape(W, width).T[:2 + W].tolist()
        self.received_W = list(map(sum, to_WW))
        self.most = max(*self.received_W, *map(sum, zip(*to_WW, strict=True)))

    def sizes(self, K: int) -> dict:
        """The fields of NVLinkPlan that tell the number of rows."""
        sizes, W = self._sizes_E.tolist(), len(self._tokens_W)
        return {"num_rows": room_for(sum(map(padded, sizes))),
                "tokens_per_expert": sum(self._tokens_W) * K / (W * len(sizes))}


def regions(rows: int, *row_bytes: int) -> list:
    """Offsets, within one half of the staging, of regions for `rows` rows of each size in `row_bytes`. The last number
    is the end."""
    beginnings = [0]
    for size in row_bytes:
        beginnings.append(-(-(beginnings[-1] + rows * size) // ALIGNED) * ALIGNED)
    return beginnings


@dataclass(frozen=True)
class NVLink(Transport):
    """Expert-parallel exchange between 2 to 8 ranks of one node over peer memory.

    Attributes:
        memory: the group's staging, which all layers share.
        name: of the layer, for errors.
        sms: multiprocessors that move rows at most.
        capacity_factor: sizes the buffers. None: the host waits for the counts, and buffers have room for what
            arrives. A number: each rank has room for `capacity_factor` times its even share of rows. The host then
            never waits, and CUDA graphs can capture calls. All ranks must bring equally many tokens.
        on_overflow: what happens if a rank gets more rows than fit. "error": every rank raises an error, at its next
            call or check, and before the optimizer's step. "drop": choices are dropped. The rank's experts with the
            most rows are cut to the same number of rows. Every rank keeps the same share of its choices for an expert
            that is cut, and the last ones by (token, choice) are dropped. A dropped choice counts as -1: it gets no
            row, and its token keeps its other choices.
    """

    memory: PeerMemory
    name: str = "an expert-parallel exchange"
    sms: int = MOST_MULTIPROCESSORS
    capacity_factor: float | None = None
    on_overflow: str = "error"

    @staticmethod
    def usable_here() -> tuple[bool, str]:
        if get_accelerator().device_name() != "cuda":
            return False, "no CUDA device"
        pairs = itertools.permutations(range(count := get_accelerator().device_count()), 2)
        apart = next((pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)), None)
        usable, extension = NVLinkBuilder().status()
        against = [reason for reason in (
            "fewer than two GPUs" if count < 2 else "",
            f"GPU {apart[0]} cannot reach the memory of GPU {apart[1]}" if apart else "",
            "" if usable else extension) if reason]
        return not against, "; ".join(against) or f"the GPUs reach each other's memory; {extension}"

    @property
    def world_size(self) -> int:
        return self.memory.world_size

    @property
    def dropped(self) -> int:
        """How many choices for this rank's experts the layer has dropped, in the forwards that have run by now.

        A forward that activation checkpointing repeats counts twice. The host does not wait.
        """
        return self.memory.reports.dropped.total(self.name)

    @property
    def _multiprocessors(self) -> int:
        return min(self.sms, self.memory.multiprocessors)

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int, meanwhile: Callable[[], None] | None = None,
             rows: str = "") -> NVLinkPlan:
        memory, ext = self.memory, self.memory.extension
        memory.reports.check()
        if self.capacity_factor is None and memory.capturing:
            raise RuntimeError(f"{self.name}: a CUDA graph cannot capture the nvlink transport, since the host waits "
                               'for the counts of rows. With "capacity_factor" it does not')
        expert_TK = expert_TK.contiguous()
        (T, K), W, E = expert_TK.shape, self.world_size, num_local_experts
        if K > ext.MAX_CHOICES:
            raise ValueError(f"{self.name}: {K} choices a token, and the nvlink transport takes "
                             f'{ext.MAX_CHOICES} at most: write "transport": "collective"')
        chunk = _chunk(T, W, ext.MAX_CHUNKS)
        if not ext.fits(W, W * E, K, chunk):
            raise ValueError(f"{self.name}: {T} tokens of {K} choices among {W * E} experts are more than the nvlink "
                             'transport moves at once: take smaller micro-batches, or write "transport": "collective"')
        chunks = -(-T // chunk)
        stride = -(-(chunks + 1) // 4) * 4
        tables, (ends, group_sizes, first, counts, place_base, place_end, segments, slot, arriving) = _tables(
            memory.device, E, E, (W * E + W) * stride, W * (2 + W + W * E), W * E, W * E, 4 * W, W * T,
            2 * W * ext.MAX_CHUNKS)
        ids = expert_TK.data_ptr()
        known = {"first_CB": first, "T": T, "experts": W * E, "chunks": chunks, "stride": stride}
        ext.count(ext.Count(expert_TK=ids, K=K, local_experts=E, world=W, chunk=chunk, **known), memory.stream())
        known |= {"counts_WC": counts, "segments": segments}
        sizes = self._launch_totals(T, K, E, known | {"place_base_E": place_base, "place_end_E": place_end,
                                                      "group_ends_E": ends, "group_sizes_E": group_sizes}, rows)
        if sizes is None and meanwhile is not None:
            meanwhile()
        # The device may run dry between the host's wait and the next launch. So everything that does not depend on the
        # counts comes before the wait, and what the kernel `places` does not need comes after its launch.
        known |= {"slot_WT": slot, "arriving_WC": arriving, "K": K, "chunk": chunk}
        limits = {} if self.capacity_factor is None else {"place_end_E": place_end}  # otherwise all rows fit
        places = ext.Places(local_experts=E, expert_TK=ids, place_base_E=place_base, **limits, **known)
        prepared, tag, where = ext.Rows(**known), signature("places", K, E), self._where("places")
        if sizes is None:
            memory.reports.wait_for_counts(self.name)
            read = _RowsOfAll(memory.reports.counts.numpy(), W, E)
            received, most_rows = read.received_W[memory.rank], read.most
        else:
            received = most_rows = W * T  # a token goes to a rank once at most, so the staging has room for all rows
        place_RK = torch.empty(received * K, dtype=torch.int32, device=memory.device)
        place = place_RK.data_ptr()
        _, ranges_at = regions(most_rows, 4 * K)
        memory.reserve(ranges_at + 8 * W * ext.MAX_CHUNKS, where)
        ext.places(ext.Places(places, group=memory.begin(tag, where), place_RK=place, ranges_at=ranges_at),
                   self._multiprocessors, memory.stream())
        sizes = sizes or read.sizes(K)
        return NVLinkPlan(num_tokens=T, top_k=K, group_ends_E=tables[:E], received=received, most_rows=most_rows,
                          rows=ext.Rows(prepared, P=sizes["num_rows"], place_RK=place), group_sizes_E=group_sizes,
                          tables=(tables, place_RK), **sizes)

    def _launch_totals(self, T: int, K: int, E: int, known: dict, rows: str) -> dict | None:
        """Tells every rank how many rows go where. `known`: fields of Totals.

        Returns:
            The fields of NVLinkPlan that tell the number of rows. None: the host has to read it.
        """
        memory, ext, W = self.memory, self.memory.extension, self.world_size
        static, where = self.capacity_factor is not None, self._where("counts")
        memory.reserve(4 * W * (2 + W + W * E), where)
        room = room_of(self.capacity_factor, T, K, W, E) if static else 0
        group = memory.begin(signature("counts", self.name, rows, K, E, self.capacity_factor, T if static else 0,
                                       self.on_overflow), f"{where}, with room for {room} rows" if static else where)
        if not static:
            ext.totals(ext.Totals(group=group, local_experts=E, serial=memory.reports.next_serial(),
                                  host=memory.reports.counts.data_ptr(), **known), memory.stream())
            return None
        memory.reports.unchecked = True
        dropped = memory.reports.dropped.address(self.name) if self.on_overflow == "drop" else 0
        ext.totals(ext.Totals(group=group, local_experts=E, most_rows=room, dropped=dropped, **known),
                   memory.stream())
        return {"num_rows": room, "tokens_per_expert": T * K / E}

    def _rows(self, plan: NVLinkPlan, kind: str, H: int, dtype: torch.dtype, row_format: RowFormat, weights: bool,
              phase: str):
        """The kernels' struct `Rows` for one exchange: that of the plan, and where the exchange's data lie."""
        memory, where = self.memory, self._where(phase)
        memory.reports.check()
        block = row_format.block_size if row_format.mxfp8 else 0
        scale_row = -(-H // (block * 16)) * 16 if block else 0
        data_row = H if block else H * dtype.itemsize
        data_at, scale_at, weight_at, end = regions(plan.most_rows, data_row, scale_row,
                                                     4 * plan.top_k if weights else 0)
        memory.reserve(end, where)
        group = memory.begin(signature(kind, where, H, block or str(dtype), weights, plan.top_k), where)
        return memory.extension.Rows(plan.rows, group=group, data_at=data_at, scale_at=scale_at, weight_at=weight_at,
                                     H=H, block=block, floor=row_format.scaling_mode == "floor", scale_row=scale_row,
                                     weights=weights)

    def dispatch(self, plan: NVLinkPlan, x_TH: torch.Tensor, row_format: RowFormat,
                 weight_TK: torch.Tensor | None = None, phase: str = "dispatch") -> tuple:
        """See Transport. MXFP8 scales of blocks of 128 are a view of K-block-major memory."""
        x_TH = dense(x_TH)
        (_, H), P, block, device = x_TH.shape, plan.num_rows, row_format.block_size, x_TH.device
        rows = self._rows(plan, "dispatch", H, x_TH.dtype, row_format, weight_TK is not None, phase)
        out_PH = torch.empty((P, H), dtype=torch.float8_e4m3fn if row_format.mxfp8 else x_TH.dtype, device=device)
        scale = weight_P = None
        wanted = {}
        if row_format.mxfp8:
            blocks = -(-H // block)
            strides = (1, P) if block == 128 else (blocks, 1)
            scale = torch.empty_strided((P, blocks), strides, dtype=torch.uint8, device=device)
            wanted |= {"out_scale": scale.data_ptr(), "scale_stride_p": strides[0], "scale_stride_b": strides[1]}
        if weight_TK is not None:
            weight_TK = weight_TK.float().contiguous()
            weight_P = torch.empty(P, dtype=torch.float32, device=device)
            wanted |= {"weight_TK": weight_TK.data_ptr(), "out_weight_P": weight_P.data_ptr()}
        memory, ext = self.memory, self.memory.extension
        ext.dispatch(ext.Dispatch(rows=rows, x_TH=x_TH.data_ptr(), dtype=DTYPES[x_TH.dtype], out_PH=out_PH.data_ptr(),
                                  group_ends_E=plan.group_ends_E.data_ptr(), group_sizes_E=plan.group_sizes_E,
                                  local_experts=plan.group_ends_E.shape[0], **wanted),
                     self._multiprocessors, memory.stream())
        return MXTensor.of(MXParts(out_PH, scale, block), x_TH.dtype) if row_format.mxfp8 else out_PH, weight_P

    def combine(self, plan: NVLinkPlan, y_PH: torch.Tensor, row_format: RowFormat, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        memory, ext, device = self.memory, self.memory.extension, y_PH.device
        if y_PH.dtype not in (dtype, torch.float32):
            raise TypeError(f"{self.name}: combine got rows of {y_PH.dtype} for a result of {dtype}, expected rows of "
                            f"{dtype} or torch.float32")
        y_PH = dense(y_PH)
        H = y_PH.shape[1]
        rows = self._rows(plan, "combine", H, dtype, row_format, weight_P is not None, phase)
        out_TH = torch.empty((plan.num_tokens, H), dtype=dtype, device=device)
        weight_TK = None
        weights = {}
        if weight_P is not None:
            weight_P = weight_P.contiguous()
            weight_TK = torch.empty((plan.num_tokens, plan.top_k), dtype=torch.float32, device=device)
            weights = {"weight_P": weight_P.data_ptr(), "out_weight_TK": weight_TK.data_ptr()}
        args = ext.Combine(rows=rows, y_PH=y_PH.data_ptr(), dtype=DTYPES[y_PH.dtype], out_TH=out_TH.data_ptr(),
                           out_dtype=DTYPES[dtype], **weights)
        ext.combine(args, self._multiprocessors, memory.stream())
        return out_TH, weight_TK
