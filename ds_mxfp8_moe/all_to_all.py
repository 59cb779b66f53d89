# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of few tokens at low latency, for inference, with the interface of pplx-kernels' AllToAll.

`dispatch` sends every token of a rank to its experts, on any rank. Each expert has room for every token of every rank,
so that shapes and addresses do not depend on the routing. Each direction is one kernel, and the host does not wait.
CUDA graphs can capture the calls, and a replay may change the routing and the number of tokens.

    a2a = AllToAll.intranode(max_num_tokens, num_experts, experts_per_token, rank, world_size, dp_size, hidden_dim,
                             hidden_dim_bytes, hidden_dim_scale_bytes)
    a2a.dispatch(out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices, bound_m)
    ...                                                             # the experts compute expert_y from out_expert_x
    a2a.combine(out_tokens, indices, weights, expert_y, bound_m)

`intranode` makes it for ranks of one host, over peer memory. `internode` makes it for ranks of several hosts, over
NVSHMEM. Both give the same bits.

Differences from pplx-kernels:
- A token travels once to each rank, not once to each expert.
- An expert's rows are in a fixed order: by rank, token and choice.
- An id that belongs to no expert drops the choice.
- dispatch can quantize bf16 and fp16 rows to MXFP8.
- Waits have a deadline.
- dp_size must be 1.
"""

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import deepspeed.comm as dist
import torch
from torch.distributed import ProcessGroup

from .compute.arguments import check_int
from .config import MXFP8MoEConfig
from .ops.triton_kernels.library import operator
from .transport import nvshmem
from .transport.choose import choose
from .transport.deadline import tell_peers_on_error
from .transport.nvlink import ALIGNED, DTYPES, signature
from .transport.peer_memory import PeerMemory

__all__ = ["AllToAll"]

SMS = 128  # multiprocessors that a call takes, since nothing runs beside it
ROW_TYPES = (torch.bfloat16, torch.float16)
BYTES, WORDS, BYTES_TO_FLOATS = range(3)  # kernels.h, ScaleKind
PREPARED = 64  # how many calls' arguments are kept

# Under torch.compile an op takes numbers, not objects. So each AllToAll has a number, which is never used again.
_HANDLES = itertools.count()
_BY_HANDLE: WeakValueDictionary = WeakValueDictionary()


class AllToAll:
    """One rank's side of the exchange. Make it with `intranode` or `internode`."""

    def __init__(self, memory: PeerMemory, max_num_tokens: int, num_experts: int, experts_per_token: int,
                 hidden_dim: int, hidden_dim_bytes: int, hidden_dim_scale_bytes: int):
        self.memory, self.sms = memory, min(SMS, memory.multiprocessors)
        self.max_num_tokens, self.num_experts, self.hidden_dim = max_num_tokens, num_experts, hidden_dim
        self.experts_per_token = experts_per_token
        self.hidden_dim_bytes, self.hidden_dim_scale_bytes = hidden_dim_bytes, hidden_dim_scale_bytes
        self._prepared: dict = {}
        self._handle = next(_HANDLES)
        _BY_HANDLE[self._handle] = self
        W, T, K = memory.world_size, max_num_tokens, experts_per_token
        self._routes = torch.zeros(W * T * K + W, dtype=torch.int32, device=memory.device)
        # A message is what one rank sends to another (kernels.h, LowLatency). In dispatch it has a record for each
        # token, and the counts. In combine it has a row for each choice, and the messages of all ranks for one rank
        # share their room. Over NVSHMEM, the messages for all ranks also lie in the staging of the sender.
        route_at = hidden_dim_bytes + -(-hidden_dim_scale_bytes // 16) * 16
        record = _aligned(route_at + -(-4 * K // 16) * 16)
        message, rows = _aligned(T * record + 4 * (1 + num_experts // W)), _aligned(T * K * hidden_dim * 2)
        self._layouts = {
            "low_latency_dispatch": {"message": message, "lands_at": memory.rank * message, "outbox_at": W * message,
                                     "record": record, "count_at": T * record, "scale_at": hidden_dim_bytes,
                                     "route_at": route_at},
            "low_latency_combine": {"message": rows, "outbox_at": rows}}
        outboxes = W if memory.extension.OUTBOXES else 0
        self._staged = max((W + outboxes) * message, (1 + outboxes) * rows)
        memory.reserve(self._staged, "an AllToAll's staging")
        self._sizes = (T, num_experts, K, hidden_dim, hidden_dim_bytes, hidden_dim_scale_bytes)

    @staticmethod
    def intranode(max_num_tokens: int, num_experts: int, experts_per_token: int, rank: int, world_size: int,
                  dp_size: int, hidden_dim: int, hidden_dim_bytes: int, hidden_dim_scale_bytes: int,
                  group: ProcessGroup | None = None) -> "AllToAll":
        """Makes the exchange between ranks of one node whose GPUs reach each other's memory. Collective.

        Args:
            max_num_tokens: the most tokens that a rank brings to one call, at most 1023.
            num_experts: experts of all ranks together, at most 4096. Each rank has the same number.
            experts_per_token: K, the choices of a token, at most 32.
            rank, world_size: this rank in `group`, and the number of its ranks.
            dp_size: must be 1.
            hidden_dim: H, a multiple of 32.
            hidden_dim_bytes: bytes of a row of out_expert_x.
            hidden_dim_scale_bytes: bytes of the scales of one row. 0 means that rows have no scales.
            group: a process group of 2 to 8 ranks. None means all ranks.

        Raises:
            ValueError: a size is not supported.
            RuntimeError: deepspeed.init_distributed was not called, the ranks do not reach each other's memory, or the
                kernels cannot be built here.
        """
        sizes = (max_num_tokens, num_experts, experts_per_token, hidden_dim, hidden_dim_bytes, hidden_dim_scale_bytes)
        group = _checked(8, group, rank, world_size, dp_size, *sizes)
        transport: Any = choose(group, "AllToAll", MXFP8MoEConfig(transport="nvlink"))
        return AllToAll(transport.memory, *sizes)

    @staticmethod
    def internode(max_num_tokens: int, num_experts: int, experts_per_token: int, rank: int, world_size: int,
                  dp_size: int, hidden_dim: int, hidden_dim_bytes: int, hidden_dim_scale_bytes: int,
                  group: ProcessGroup | None = None) -> "AllToAll":
        """Makes the exchange over NVSHMEM, between ranks on any hosts. Collective.

        NVSHMEM puts rows over peer memory inside a host, and over the network that its environment variables name
        between hosts (examples/guides/several_nodes.md). The ranks of the group become its PEs, unless it already runs
        between them. A process can start it once, so all exchanges of a process over NVSHMEM take the same group.

        The arguments are those of `intranode`, but the group has 2 to 32 ranks.

        Raises:
            ValueError: a size is not supported.
            RuntimeError: deepspeed.init_distributed was not called, there is no CUDA device, NVSHMEM is missing, too
                old or used by someone else, the kernels cannot be built here, or NVSHMEM's heap is too small
                (NVSHMEM_SYMMETRIC_SIZE). Raised on every rank.
        """
        sizes = (max_num_tokens, num_experts, experts_per_token, hidden_dim, hidden_dim_bytes, hidden_dim_scale_bytes)
        group = _checked(32, group, rank, world_size, dp_size, *sizes)
        return AllToAll(nvshmem.memory_of(group, "AllToAll.internode"), *sizes)

    def dispatch(self, out_expert_num_tokens: torch.Tensor, out_expert_x: torch.Tensor,
                 out_expert_x_scale: torch.Tensor | None, dp_x: torch.Tensor, dp_x_scale: torch.Tensor | None,
                 indices: torch.Tensor, bound_m: torch.Tensor | None, do_send: bool = True,
                 do_recv: bool = True) -> None:
        """Sends tokens to the ranks of their experts, and receives the tokens for this rank's experts.

        Args:
            out_expert_num_tokens: output, int32 [E_local]: the number of rows of each expert.
            out_expert_x: output, [E_local, max_num_tokens * ranks, H], contiguous. Rows past an expert's count are not
                written.
            out_expert_x_scale: output, [E_local, max_num_tokens * ranks, scales] with any strides. With dp_x_scale it
                has the same dtype. Where dispatch quantizes, it is uint8 or float8_e8m0fnu (E8M0 bytes) or float32,
                with H / 32 or H / 128 scales, rounded up.
            dp_x: [m, H] in the dtype of out_expert_x. Or bf16 or fp16 with e4m3 outputs: dispatch quantizes it.
            dp_x_scale: [m, scales], contiguous, for rows that are quantized already.
            indices: int32, uint32 or int64 [m, K]. The ids of a token are all different. An id that belongs to no
                expert drops the choice.
            bound_m: uint32 or int32 [1] on the device, read as uint32. Only the first bound_m rows are sent, or all m
                if it is larger. None means all.
            do_send, do_recv: False leaves out one part. Make both calls with the same arguments.

        Raises:
            ValueError: shapes or dtypes do not fit. Raised before anything is sent.
            PeerError: an earlier exchange failed.
        """
        tensors = (out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices, bound_m)
        if torch.compiler.is_compiling():
            return _all_to_all_dispatch(self._handle, *tensors, do_send, do_recv)
        self._run("low_latency_dispatch", self._dispatch_args, tensors, do_send, do_recv)

    def _dispatch_args(self, send, receive, out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale,
                       indices, bound_m) -> Any:
        """Checks the tensors. Returns the kernel's arguments."""
        memory, E, H = self.memory, self.num_experts // self.memory.world_size, self.hidden_dim
        rows = self.max_num_tokens * memory.world_size
        row_bytes = H * out_expert_x.element_size()
        self._check({
            "out_expert_num_tokens": (out_expert_num_tokens, (E, ), (torch.int32, )),
            "out_expert_x": (out_expert_x, (E, rows, H), None), "dp_x": (dp_x, (None, H), None)},
            dp_x.shape[0], indices)
        if row_bytes != self.hidden_dim_bytes:
            raise ValueError(f"AllToAll.dispatch: rows of out_expert_x take {row_bytes} bytes, but hidden_dim_bytes "
                             f"is {self.hidden_dim_bytes}")
        quantized = dp_x.dtype != out_expert_x.dtype
        if quantized and not (dp_x.dtype in ROW_TYPES and out_expert_x.dtype == torch.float8_e4m3fn
                              and dp_x_scale is None and out_expert_x_scale is not None):
            raise ValueError(f"AllToAll.dispatch: rows of {dp_x.dtype} do not become {out_expert_x.dtype}. Use one "
                             "dtype for both. Or use bf16 or fp16 for dp_x and float8_e4m3fn for out_expert_x, with "
                             "out_expert_x_scale and without dp_x_scale")
        if not quantized and (dp_x_scale is None) != (out_expert_x_scale is None):
            raise ValueError("AllToAll.dispatch: give both dp_x_scale and out_expert_x_scale, or none of them")
        scales = {"scale_row": 0}
        if out_expert_x_scale is not None:
            scales = self._scales(out_expert_x_scale, dp_x_scale, (E, rows), dp_x, quantized)
        common = self._common(send, receive, indices, bound_m, "low_latency_dispatch", row_bytes, scales["scale_row"])
        return memory.extension.LowLatencyDispatch(
            common=common, x_TH=dp_x.data_ptr(), out_ERH=out_expert_x.data_ptr(), row_bytes=row_bytes,
            out_count_E=out_expert_num_tokens.data_ptr(), dtype=DTYPES[dp_x.dtype] if quantized else 0, **scales)

    def combine(self, out_tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, expert_y: torch.Tensor,
                bound_m: torch.Tensor | None, do_send: bool = True, do_recv: bool = True) -> None:
        """Brings the rows of the last dispatch back. Adds up weight * row over the choices of a token, in float32.

        Args:
            out_tokens: output, bf16 or fp16 [m, H], contiguous. Zeros for a token whose choices were all dropped.
            indices, bound_m: as in the dispatch.
            weights: float32 [m, K].
            expert_y: bf16, fp16 or float32 [E_local, max_num_tokens * ranks, H]. Rows travel in out_tokens' dtype.
            do_send, do_recv: as in `dispatch`.

        Raises:
            ValueError, PeerError: as in `dispatch`.
        """
        tensors = (out_tokens, indices, weights, expert_y, bound_m)
        if torch.compiler.is_compiling():
            return _all_to_all_combine(self._handle, *tensors, do_send, do_recv)
        self._run("low_latency_combine", self._combine_args, tensors, do_send, do_recv)

    def _combine_args(self, send, receive, out_tokens, indices, weights, expert_y, bound_m) -> Any:
        memory, H = self.memory, self.hidden_dim
        E, rows = self.num_experts // memory.world_size, self.max_num_tokens * memory.world_size
        self._check({"out_tokens": (out_tokens, (None, H), ROW_TYPES),
                     "weights": (weights, tuple(indices.shape), (torch.float32, )),
                     "expert_y": (expert_y, (E, rows, H), tuple(DTYPES))}, out_tokens.shape[0], indices)
        return memory.extension.LowLatencyCombine(
            common=self._common(send, receive, indices, bound_m, "low_latency_combine", str(out_tokens.dtype)),
            y_ERH=expert_y.data_ptr(), weight_TK=weights.data_ptr(), out_TH=out_tokens.data_ptr(),
            dtype=DTYPES[expert_y.dtype], out_dtype=DTYPES[out_tokens.dtype])

    def check(self) -> None:
        """Raises PeerError if an exchange has failed by now. Every call does this. Replays of CUDA graphs do not."""
        self.memory.reports.check()

    def destroy(self) -> None:
        """Does nothing, since the staging is freed with its process group. pplx-kernels has this method."""

    def _scales(self, out: torch.Tensor, given: torch.Tensor | None, shape: tuple, x: torch.Tensor,
                quantized: bool) -> dict:
        """Checks the scales. Returns the fields of LowLatencyDispatch that describe them."""
        scales, width = out.shape[-1], out.element_size()
        if (out.dim() != 3 or tuple(out.shape[:2]) != shape or scales * width > self.hidden_dim_scale_bytes
                or out.device != x.device):
            raise ValueError(f"AllToAll.dispatch: out_expert_x_scale is {tuple(out.shape)} of {out.dtype} on "
                             f"{out.device}, expected [{shape[0]}, {shape[1]}, scales] within "
                             f"{self.hidden_dim_scale_bytes} bytes a row on {x.device}")
        if quantized:
            blocks = {-(-self.hidden_dim // block): block for block in (32, 128)}
            if scales not in blocks or (width != 1 and out.dtype != torch.float32):
                raise ValueError(f"AllToAll.dispatch: out_expert_x_scale has {scales} scales of {out.dtype} a row, "
                                 f"expected {' or '.join(map(str, blocks))}, in bytes (E8M0) or float32")
            fields = {"block": blocks[scales], "scale_kind": BYTES if width == 1 else BYTES_TO_FLOATS,
                      "scale_row": -(-scales // 16) * 16}
        else:
            self._check({"dp_x_scale": (given, (x.shape[0], scales), (out.dtype, ))})
            if width not in (1, 4) or scales * width % 4:
                raise ValueError(f"AllToAll.dispatch: a row's scales take {scales} times {width} bytes, expected "
                                 "scales of 1 or 4 bytes, and a multiple of 4 bytes in all")
            fields = {"scale_in": given.data_ptr(), "scale_kind": WORDS if width == 4 else BYTES,
                      "scale_row": scales * width}
        return fields | {"out_scale": out.data_ptr(), "scales": scales,
                         "scale_strides": [stride * width for stride in out.stride()]}

    @tell_peers_on_error
    def _run(self, kind: str, prepare: Callable, tensors: tuple, send: bool, receive: bool) -> None:
        """Launches one call, or a part of it. The kernel's arguments are kept for the next call with the same tensors,
        since making them takes longer than moving few tokens."""
        memory = self.memory
        memory.reports.check()
        name = f"AllToAll.{kind.removeprefix('low_latency_')}"
        if not send and memory.open != (self._handle, name):
            raise ValueError(f"{name} with do_send=False receives what this AllToAll sent by the same call. Sent and "
                             f"not received yet: {memory.open and memory.open[1]}")
        if send:  # the staging is gone if it failed to grow for another exchange
            memory.reserve(self._staged, name)
        key = (kind, send, receive, memory.generation, *(
            None if x is None else (x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors))
        args = self._prepared.get(key)
        if args is None:
            args = prepare(send, receive, *tensors)
            if len(self._prepared) >= PREPARED:
                self._prepared.clear()
            self._prepared[key] = args
        if send:
            memory.advance(name)
        getattr(memory.extension, kind)(args, self.sms, memory.stream())
        memory.open = None if receive else (self._handle, name)

    def _common(self, send: bool, receive: bool, indices: torch.Tensor, bound_m: torch.Tensor | None, kind: str,
                *shape: Any) -> Any:
        """The arguments of both kernels. `shape`: what must be equal on all ranks, beside the sizes."""
        memory = self.memory
        if bound_m is not None:
            self._check({"bound_m": (bound_m, (1, ), (torch.int32, torch.uint32))})
        T, K = indices.shape
        return memory.extension.LowLatency(
            group=memory.group_for(signature(kind, *self._sizes, *shape)), send=send, receive=receive,
            index_TK=indices.data_ptr(), index_bytes=indices.element_size(),
            bound=0 if bound_m is None else bound_m.data_ptr(), routes=self._routes.data_ptr(),
            T=T, K=K, experts=self.num_experts, local_experts=self.num_experts // memory.world_size,
            max_tokens=self.max_num_tokens, H=self.hidden_dim,
            # If rows are few, all warps of a block move one row together.
            crew=8 if self.max_num_tokens * memory.world_size <= self.sms else 1, **self._layouts[kind])

    def _check(self, tensors: dict, tokens: int | None = None, indices: torch.Tensor | None = None) -> None:
        """Raises ValueError for the first of the tensors {name: (tensor, shape, dtypes)} that is not as expected.

        Kernels read rows in pieces of 16 bytes, and scales in pieces of 4.
        """
        if indices is not None:
            if tokens > self.max_num_tokens:
                raise ValueError(f"AllToAll: got {tokens} tokens, but max_num_tokens is {self.max_num_tokens}")
            tensors = {**tensors, "indices": (indices, (tokens, self.experts_per_token),
                                              (torch.int32, torch.uint32, torch.int64))}
        device = self.memory.device
        for name, (x, shape, dtypes) in tensors.items():
            fits = x.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, x.shape, strict=True))
            if not fits or (dtypes and x.dtype not in dtypes) or not x.is_contiguous() or x.device != device:
                raise ValueError(f"AllToAll: {name} is {tuple(x.shape)} of {x.dtype} on {x.device}, expected "
                                 f"contiguous {list(shape)}{f' of {dtypes}' if dtypes else ''} on {device}")
            aligned = 16 if shape[-1] == self.hidden_dim else 4
            if x.data_ptr() % aligned:
                raise ValueError(f"AllToAll: {name} begins at address {x.data_ptr():#x}, expected a multiple of "
                                 f"{aligned}")


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _checked(most_ranks: int, group: ProcessGroup, rank: int, world_size: int, dp_size: int, max_num_tokens: int,
             num_experts: int, experts_per_token: int, hidden_dim: int, hidden_dim_bytes: int,
             hidden_dim_scale_bytes: int) -> Any:
    """Raises the errors of `AllToAll.intranode` about its arguments. Returns the group."""
    if not dist.is_initialized():  # torch.distributed.init_process_group alone is not enough for deepspeed.comm
        raise RuntimeError("AllToAll: deepspeed.comm is not initialized: call deepspeed.init_distributed() first, "
                           f"under a launcher that starts 2 to {most_ranks} ranks")
    group = dist.get_world_group() if group is None else group
    ranks = dist.get_world_size(group=group)
    for name, value in (("rank", rank), ("world_size", world_size), ("dp_size", dp_size),
                        ("max_num_tokens", max_num_tokens), ("num_experts", num_experts),
                        ("experts_per_token", experts_per_token), ("hidden_dim", hidden_dim),
                        ("hidden_dim_bytes", hidden_dim_bytes), ("hidden_dim_scale_bytes", hidden_dim_scale_bytes)):
        check_int(f"AllToAll: {name}", value, 0)
    own_rank, most_scale_bytes = dist.get_rank(group=group), min(hidden_dim_bytes, 2048)
    checks = [
        ("the number of ranks of the group", ranks, 2 <= ranks <= most_ranks, f"2 to {most_ranks}"),
        ("world_size", world_size, world_size == ranks, f"{ranks}, the number of ranks of the group"),
        ("rank", rank, rank == own_rank, f"{own_rank}, the rank in the group"),
        ("dp_size", dp_size, dp_size == 1, "1"),
        ("num_experts", num_experts, num_experts % ranks == 0 and 1 <= num_experts <= 4096,
         f"a multiple of {ranks} ranks, at most 4096"),
        ("max_num_tokens", max_num_tokens, 1 <= max_num_tokens <= 1023, "1 to 1023"),
        ("experts_per_token", experts_per_token, 1 <= experts_per_token <= 32, "1 to 32"),
        ("hidden_dim", hidden_dim, hidden_dim % 32 == 0 and hidden_dim >= 32, "a multiple of 32"),
        ("hidden_dim_bytes", hidden_dim_bytes, hidden_dim_bytes in (hidden_dim, 2 * hidden_dim),
         f"{hidden_dim} or {2 * hidden_dim}"),
        ("hidden_dim_scale_bytes", hidden_dim_scale_bytes, 0 <= hidden_dim_scale_bytes <= most_scale_bytes,
         f"0 to {most_scale_bytes}"),
    ]
    for name, value, valid, expected in checks:
        if not valid:
            raise ValueError(f"AllToAll: {name} is {value}, expected {expected}")
    return group


@operator(mutates_args=("out_expert_num_tokens", "out_expert_x", "out_expert_x_scale"))
def _all_to_all_dispatch(handle: int, out_expert_num_tokens: torch.Tensor, out_expert_x: torch.Tensor,
                         out_expert_x_scale: torch.Tensor | None, dp_x: torch.Tensor, dp_x_scale: torch.Tensor | None,
                         indices: torch.Tensor, bound_m: torch.Tensor | None, do_send: bool, do_recv: bool) -> None:
    a2a = _BY_HANDLE[handle]
    tensors = (out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices, bound_m)
    a2a._run("low_latency_dispatch", a2a._dispatch_args, tensors, do_send, do_recv)


@operator(mutates_args=("out_tokens", ))
def _all_to_all_combine(handle: int, out_tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor,
                        expert_y: torch.Tensor, bound_m: torch.Tensor | None, do_send: bool, do_recv: bool) -> None:
    a2a = _BY_HANDLE[handle]
    tensors = (out_tokens, indices, weights, expert_y, bound_m)
    a2a._run("low_latency_combine", a2a._combine_args, tensors, do_send, do_recv)
