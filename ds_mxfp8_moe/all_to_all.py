# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of few tokens at low latency, for inference: the interface of pplx-kernels' AllToAll.

Every token of a rank goes to the experts of its choices, which may be on any rank; rows come out apart for each
expert, with room for every token of every rank, so that nothing but contents depends on the routing. One kernel each
way, no wait on the host: calls may be captured in a CUDA graph, whose replays may change routing and number of tokens.

    a2a = AllToAll.intranode(max_num_tokens, num_experts, experts_per_token, rank, world_size, dp_size, hidden_dim,
                             hidden_dim_bytes, hidden_dim_scale_bytes)
    a2a.dispatch(out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices, bound_m)
    ...                                                             # expert_y of out_expert_x
    a2a.combine(out_tokens, indices, weights, expert_y, bound_m)

What differs from pplx-kernels: a token travels once to each rank, not once to each expert; rows of an expert are in a
fixed order (rank, token, choice); choices may be dropped (an id that is no expert's); bf16 and fp16 rows can be
quantised to MXFP8 on the way; waits have deadlines. One data-parallel rank is one rank: dp_size is 1.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import deepspeed.comm as dist
import torch

from .ops.triton_kernels.library import operator
from .transport.choose import choose, why
from .transport.nvlink import ALIGNED, DTYPES, NVLink, signature
from .transport.peer_memory import PeerMemory

SMS = 128  # nothing runs beside it
ROW_TYPES = (torch.bfloat16, torch.float16)
BYTES, WORDS, BYTES_TO_FLOATS = range(3)  # kernels.h, ScaleKind
PREPARED = 64  # calls whose arguments are kept

# What an op of torch.compile knows an exchange by: it takes numbers, not objects.
_BY_HANDLE: WeakValueDictionary = WeakValueDictionary()


class AllToAll:
    """One rank's side of the exchange. Make it with `intranode`."""

    def __init__(self, memory: PeerMemory, max_num_tokens: int, num_experts: int, experts_per_token: int,
                 hidden_dim: int, hidden_dim_bytes: int, hidden_dim_scale_bytes: int):
        self.memory, self.sms = memory, min(SMS, memory.multiprocessors)
        self.max_num_tokens, self.num_experts, self.hidden_dim = max_num_tokens, num_experts, hidden_dim
        self.experts_per_token = experts_per_token
        self.hidden_dim_bytes, self.hidden_dim_scale_bytes = hidden_dim_bytes, hidden_dim_scale_bytes
        self._prepared: dict = {}
        self._handle = id(self)
        _BY_HANDLE[self._handle] = self
        W, T, K = memory.world_size, max_num_tokens, experts_per_token
        self._routes = torch.zeros(W * T * K + W, dtype=torch.int32, device=memory.device)
        sizes = (W * T * hidden_dim_bytes, W * T * self._scale_row(hidden_dim_scale_bytes), W * T * K * 4,
                 W * (1 + num_experts // W) * 4)
        self._regions = [0]
        for size in sizes:
            self._regions.append(-(-(self._regions[-1] + size) // ALIGNED) * ALIGNED)
        self._staged = max(self._regions[-1], T * K * hidden_dim * 2)
        memory.reserve(self._staged, "an AllToAll's staging")
        self._sizes = (T, num_experts, K, hidden_dim, hidden_dim_bytes, hidden_dim_scale_bytes)

    @staticmethod
    def intranode(max_num_tokens: int, num_experts: int, experts_per_token: int, rank: int, world_size: int,
                  dp_size: int, hidden_dim: int, hidden_dim_bytes: int, hidden_dim_scale_bytes: int,
                  group: Any = None) -> "AllToAll":
        """For ranks of one node whose GPUs reach each other's memory. Collective.

        Args:
            max_num_tokens: most tokens of a rank in one call; below 1024.
            num_experts: of all ranks, in equal shares; 4096 at most.
            experts_per_token: choices of a token, K; 32 at most.
            rank, world_size: of this rank in `group`; dp_size: 1.
            hidden_dim: H, a multiple of 32. hidden_dim_bytes, hidden_dim_scale_bytes: of a row and its scales as they
                are handed out; 0 scale bytes: none.
            group: a process group of 2 to 8 ranks; None: all ranks.

        Raises:
            ValueError: sizes that it does not take.
            RuntimeError: these ranks do not reach each other's memory, or the kernels do not build here.
        """
        group = dist.get_world_group() if group is None else group
        ranks = dist.get_world_size(group=group)
        problems = {
            f"world_size is {world_size} and rank {rank}, and the group has {ranks} ranks and this is "
            f"{dist.get_rank(group=group)}": (rank, world_size) != (dist.get_rank(group=group), ranks),
            f"the group has {ranks} ranks, expected 2 to 8": not 2 <= ranks <= 8,
            f"dp_size is {dp_size}, expected 1": dp_size != 1,
            f"num_experts is {num_experts}, expected a multiple of {ranks} ranks, 4096 at most":
                num_experts % ranks != 0 or not 1 <= num_experts <= 4096,
            f"max_num_tokens is {max_num_tokens}, expected 1 to 1023": not 1 <= max_num_tokens <= 1023,
            f"experts_per_token is {experts_per_token}, expected 1 to 32": not 1 <= experts_per_token <= 32,
            f"hidden_dim is {hidden_dim}, expected a multiple of 32": hidden_dim % 32 != 0 or hidden_dim < 32,
            f"hidden_dim_bytes is {hidden_dim_bytes}, expected {hidden_dim} or {2 * hidden_dim}":
                hidden_dim_bytes not in (hidden_dim, 2 * hidden_dim),
            f"hidden_dim_scale_bytes is {hidden_dim_scale_bytes}, expected at most {min(hidden_dim_bytes, 2048)}":
                not 0 <= hidden_dim_scale_bytes <= min(hidden_dim_bytes, 2048),
        }
        for problem, given in problems.items():
            if given:
                raise ValueError(f"AllToAll: {problem}")
        transport = choose(group, "AllToAll")
        if not isinstance(transport, NVLink):
            raise RuntimeError(f"AllToAll is for ranks whose GPUs reach each other's memory; here {why(group)}")
        return AllToAll(transport.memory, max_num_tokens, num_experts, experts_per_token, hidden_dim,
                        hidden_dim_bytes, hidden_dim_scale_bytes)

    def dispatch(self, out_expert_num_tokens: torch.Tensor, out_expert_x: torch.Tensor,
                 out_expert_x_scale: torch.Tensor | None, dp_x: torch.Tensor, dp_x_scale: torch.Tensor | None,
                 indices: torch.Tensor, bound_m: torch.Tensor | None, do_send: bool = True,
                 do_recv: bool = True) -> None:
        """Sends tokens to their experts' ranks and receives this rank's.

        Args:
            out_expert_num_tokens: int32 [E_local], out.
            out_expert_x: [E_local, max_num_tokens * ranks, H], contiguous, out; rows past an expert's count are left.
            out_expert_x_scale: [E_local, same, scales] at any strides, out: the dtype of dp_x_scale; or without that,
                uint8, float8_e8m0fnu (E8M0 bytes) or float32, for e4m3 rows made of bf16 or fp16 ones, with one scale
                for 32 or 128 values, as its last size says.
            dp_x: [m, H]: of out_expert_x's dtype, or bf16 or fp16 to be quantised.
            dp_x_scale: [m, scales], contiguous; the scales of rows that come quantised.
            indices: int32, uint32 or int64 [m, K], of a token all different; ids that are no expert's are dropped.
            bound_m: uint32 or int32 [1] on the device, read as uint32: how many of the m rows there are, all of them
                where it holds more; None: all.
            do_send, do_recv: one part alone; the same arguments go to both.

        Raises:
            ValueError: shapes or dtypes that do not fit, before anything is sent.
            PeerFailure: an earlier exchange failed.
        """
        tensors = (out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices, bound_m)
        if torch.compiler.is_compiling():
            return _all_to_all_dispatch(self._handle, *tensors, do_send, do_recv)
        self._dispatch(tensors, do_send, do_recv)

    def _dispatch(self, tensors: tuple, send: bool, receive: bool) -> None:
        self._run("low_latency_dispatch", self._dispatch_args, tensors, send, receive)

    def _dispatch_args(self, send, receive, out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale,
                       indices, bound_m) -> Any:
        """The kernel's arguments."""
        memory, E, H = self.memory, self.num_experts // self.memory.world_size, self.hidden_dim
        rows = self.max_num_tokens * memory.world_size
        row_bytes = H * out_expert_x.element_size()
        self._check({
            "out_expert_num_tokens": (out_expert_num_tokens, (E, ), (torch.int32, )),
            "out_expert_x": (out_expert_x, (E, rows, H), None), "dp_x": (dp_x, (None, H), None)},
            dp_x.shape[0], indices)
        if row_bytes != self.hidden_dim_bytes:
            raise ValueError(f"AllToAll.dispatch: rows of out_expert_x take {row_bytes} bytes, and hidden_dim_bytes "
                             f"is {self.hidden_dim_bytes}")
        quantized = dp_x.dtype != out_expert_x.dtype
        if quantized and not (dp_x.dtype in ROW_TYPES and out_expert_x.dtype == torch.float8_e4m3fn
                              and dp_x_scale is None and out_expert_x_scale is not None):
            raise ValueError(f"AllToAll.dispatch: rows of {dp_x.dtype} do not become {out_expert_x.dtype}: both "
                             "alike, or bf16 or fp16 to float8_e4m3fn with out_expert_x_scale and without dp_x_scale")
        if not quantized and (dp_x_scale is None) != (out_expert_x_scale is None):
            raise ValueError("AllToAll.dispatch: dp_x_scale and out_expert_x_scale go together")
        scales = {"scale_row": 0}
        if out_expert_x_scale is not None:
            scales = self._scales(out_expert_x_scale, dp_x_scale, (E, rows), dp_x, quantized)
        common = self._common(send, receive, indices, bound_m, "low_latency_dispatch", row_bytes, scales["scale_row"])
        return memory.extension.LowLatencyDispatch(
            common=common, x_TH=dp_x.data_ptr(), out_ERH=out_expert_x.data_ptr(), row_bytes=row_bytes,
            out_count_E=out_expert_num_tokens.data_ptr(), dtype=DTYPES[dp_x.dtype] if quantized else 0, **scales)

    def combine(self, out_tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, expert_y: torch.Tensor,
                bound_m: torch.Tensor | None, do_send: bool = True, do_recv: bool = True) -> None:
        """Brings the rows of the last dispatch back: out_tokens[t] = sum over choices of weight * row, in float32.

        Args:
            out_tokens: bf16 or fp16 [m, H], contiguous, out; zeros for a token whose choices were all dropped.
            indices, bound_m: as given to the dispatch.
            weights: float32 [m, K].
            expert_y: bf16, fp16 or float32 [E_local, max_num_tokens * ranks, H]. Rows travel in out_tokens' dtype.

        Raises:
            ValueError, PeerFailure: as in `dispatch`.
        """
        tensors = (out_tokens, indices, weights, expert_y, bound_m)
        if torch.compiler.is_compiling():
            return _all_to_all_combine(self._handle, *tensors, do_send, do_recv)
        self._combine(tensors, do_send, do_recv)

    def _combine(self, tensors: tuple, send: bool, receive: bool) -> None:
        self._run("low_latency_combine", self._combine_args, tensors, send, receive)

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
        """Raises PeerFailure where an exchange has failed by now, as every call does: for replays of CUDA graphs."""
        self.memory.check()

    def destroy(self) -> None:
        """Nothing to do: the staging goes with its process group."""

    @staticmethod
    def _scale_row(scale_bytes: int) -> int:
        return -(-scale_bytes // 16) * 16

    def _scales(self, out: torch.Tensor, given: torch.Tensor | None, shape: tuple, x: torch.Tensor,
                quantized: bool) -> dict:
        """LowLatencyDispatch's fields of scales."""
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
                      "scale_row": self._scale_row(scales)}
        else:
            self._check({"dp_x_scale": (given, (x.shape[0], scales), (out.dtype, ))})
            if width not in (1, 4) or scales * width % 4:
                raise ValueError(f"AllToAll.dispatch: a row's scales take {scales} times {width} bytes, expected "
                                 "scales of 1 or 4 bytes, and a multiple of 4 bytes in all")
            fields = {"scale_in": given.data_ptr(), "scale_kind": WORDS if width == 4 else BYTES,
                      "scale_row": scales * width}
        return fields | {"out_scale": out.data_ptr(), "scales": scales,
                         "scale_strides": [stride * width for stride in out.stride()]}

    def _run(self, kind: str, prepare: Callable, tensors: tuple, send: bool, receive: bool) -> None:
        """Launches one call, or a part of it. Arguments are made once for the same tensors: a token is as fast as the
        host."""
        memory = self.memory
        memory.check()
        name = f"AllToAll.{kind.removeprefix('low_latency_')}"
        if not send and memory.sent != (self._handle, name):
            raise ValueError(f"{name}: received, while what was sent and not received is "
                             f"{memory.sent and memory.sent[1]}")
        if send:  # there is none where another exchange's growth of it failed
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
        memory.sent = None if receive else (self._handle, name)
        getattr(memory.extension, kind)(args, self.sms, memory.stream())

    def _common(self, send: bool, receive: bool, indices: torch.Tensor, bound_m: torch.Tensor | None, kind: str,
             *shape: Any) -> Any:
        """What the kernels of both ways know. shape: what must be equal on all ranks, beside the sizes."""
        memory = self.memory
        if bound_m is not None:
            self._check({"bound_m": (bound_m, (1, ), (torch.int32, torch.uint32))})
        _, scale_at, route_at, count_at, _ = self._regions
        T, K = indices.shape
        return memory.extension.LowLatency(
            group=memory.group_for(signature(kind, *self._sizes, *shape)), send=send, receive=receive,
            index_TK=indices.data_ptr(), index_bytes=indices.element_size(),
            bound=0 if bound_m is None else bound_m.data_ptr(), routes=self._routes.data_ptr(),
            scale_at=scale_at, route_at=route_at, count_at=count_at, T=T, K=K,
            experts=self.num_experts, local_experts=self.num_experts // memory.world_size,
            max_tokens=self.max_num_tokens, H=self.hidden_dim,
            # Few rows: all warps of a block move one together.
            crew=8 if self.max_num_tokens * memory.world_size <= self.sms else 1)

    def _check(self, tensors: dict, tokens: int | None = None, indices: torch.Tensor | None = None) -> None:
        """Raises ValueError for the first tensor that is not as expected: {name: (tensor, shape, dtypes)}. Kernels
        read rows by 16 bytes, and scales by 4."""
        if indices is not None:
            if tokens > self.max_num_tokens:
                raise ValueError(f"AllToAll: {tokens} tokens, and max_num_tokens is {self.max_num_tokens}")
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


@operator(mutates_args=("out_expert_num_tokens", "out_expert_x", "out_expert_x_scale"))
def _all_to_all_dispatch(handle: int, out_expert_num_tokens: torch.Tensor, out_expert_x: torch.Tensor,
                         out_expert_x_scale: torch.Tensor | None, dp_x: torch.Tensor, dp_x_scale: torch.Tensor | None,
                         indices: torch.Tensor, bound_m: torch.Tensor | None, do_send: bool, do_recv: bool) -> None:
    _BY_HANDLE[handle]._dispatch((out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices,
                                  bound_m), do_send, do_recv)


@operator(mutates_args=("out_tokens", ))
def _all_to_all_combine(handle: int, out_tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor,
                        expert_y: torch.Tensor, bound_m: torch.Tensor | None, do_send: bool, do_recv: bool) -> None:
    _BY_HANDLE[handle]._combine((out_tokens, indices, weights, expert_y, bound_m), do_send, do_recv)
