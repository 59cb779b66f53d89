# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of a few tokens, by the method of pplx-kernels' table: e4m3 rows with one float32 scale for 128
values go out, bf16 rows come back; random experts; no pause between dispatch and combine.

`AllToAll` with rows that come in e4m3, and with bf16 rows that it quantizes itself, launched one by one and from CUDA
graphs. Beside it bare NCCL all-to-alls without any permute: of exactly the rows that must move, one for each choice,
and of pplx-kernels' padded layout.

    torchrun --nproc-per-node 8 examples/benchmarks/exchange/latency.py   # run, store, show
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.compute import casts
from lib import run, show, timing, world
from lib.show import Measure, bar
from lib.timing import Contender
from lib.world import BF16, device, on_gpu

A2A_E4M3, A2A_BF16 = "AllToAll, e4m3 in", "AllToAll, bf16 in"
NCCL_EXACT, NCCL_PADDED = "NCCL, exact splits", "NCCL, padded"
CONFIGS = ((256, 8, 7168), (64, 6, 2048))  # experts, top-k, hidden
TINY_CONFIGS = ((8, 2, 256), )
TOKENS = {"tiny": (1, 8), "short": (1, 8, 32, 128), "full": (1, 4, 8, 16, 32, 64, 128)}
BLOCK = 128
HOW = {"repeats": 200, "cold": False}
LEAST_SQNR_DB = 38  # of rows that were added in float32 and rounded to bf16


class Size(NamedTuple):
    """Tokens are of one rank."""

    experts: int
    top_k: int
    hidden: int
    tokens: int

    @property
    def scale_bytes(self) -> int:
        """Of a row."""
        return 4 * -(-self.hidden // BLOCK)

    def exchange(self) -> AllToAll:
        return AllToAll.intranode(
            max_num_tokens=self.tokens, num_experts=self.experts, experts_per_token=self.top_k, rank=world.rank(),
            world_size=world.size(), dp_size=1, hidden_dim=self.hidden, hidden_dim_bytes=self.hidden,
            hidden_dim_scale_bytes=self.scale_bytes, group=world.group())


class Batch:
    """One rank's tokens.

    Attributes:
        x_TH, mx_TH: bf16, and quantized; scale_TB: its scales as float32.
        expert_TK, weight_TK: routing.
        everywhere: expert_TK of all ranks, [W, T, K].
    """

    def __init__(self, size: Size):
        self.size, self.local = size, size.experts // world.size()
        self.x_TH = world.randn(size.tokens, size.hidden)
        self.mx_TH = casts.quantize(self.x_TH, BLOCK, "rceil")
        self.scale_TB = self.mx_TH.scale.float()
        self.expert_TK = torch.rand(size.tokens, size.experts, device=device()).topk(size.top_k).indices
        self.weight_TK = torch.rand(size.tokens, size.top_k, device=device())
        self.everywhere = world.gathered(self.expert_TK)


def _bytes(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of data beside their scales, as uint8."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in (data, scale)], dim=-1)


class Ours:
    """`AllToAll` with its buffers; `quantizes`: rows come in bf16."""

    def __init__(self, batch: Batch, quantizes: bool):
        size, rows = batch.size, batch.size.tokens * world.size()
        self.batch, self.exchange = batch, size.exchange()
        self.x = (batch.x_TH, None) if quantizes else (batch.mx_TH.qdata, batch.scale_TB)
        self.indices = batch.expert_TK.to(torch.uint32)
        self.bound = torch.tensor([size.tokens], device=device()).to(torch.uint32)
        self.counts_E = torch.empty(batch.local, dtype=torch.int32, device=device())
        self.rows = torch.empty(batch.local, rows, size.hidden, dtype=torch.float8_e4m3fn, device=device())
        self.scales = torch.empty(batch.local, rows, size.scale_bytes // 4, device=device())
        self.y = torch.empty(batch.local, rows, size.hidden, dtype=BF16, device=device())
        self.out_TH = torch.empty_like(batch.x_TH)
        # Each expert multiplies by a number of its own.
        self.factors = 1 + torch.arange(size.experts, device=device()) / size.experts

    def dispatch(self, **part: bool) -> None:
        self.exchange.dispatch(self.counts_E, self.rows, self.scales, *self.x, self.indices, self.bound, **part)

    def combine(self, _=None) -> None:
        self.exchange.combine(self.out_TH, self.indices, self.batch.weight_TK, self.y, self.bound)

    def check(self, stages: dict[str, Callable]) -> dict:
        """Each local expert has the bytes of its rows, data and scales, in the order of (rank, token)."""
        batch, first = self.batch, world.rank() * self.batch.local
        for out in (self.counts_E, self.rows.view(torch.uint8), self.scales, self.out_TH):
            out.fill_(77)
        stages["dispatch"]()
        rows_WTX = world.gathered(_bytes(batch.mx_TH.qdata, batch.scale_TB))
        expected = [rows_WTX[(batch.everywhere == e).any(-1)] for e in range(first, first + batch.local)]
        right = self.counts_E.tolist() == [len(rows) for rows in expected]
        for e, rows in enumerate(expected):
            right &= torch.equal(_bytes(self.rows[e, :len(rows)], self.scales[e, :len(rows)]), rows)
        factor = self.factors[first:first + batch.local].view(-1, 1, 1)
        self.y.copy_(self.rows.float() * self.scales.repeat_interleave(BLOCK, 2)[..., :self.rows.shape[2]] * factor)
        stages["combine"](None)
        wanted = batch.mx_TH.dequantize(torch.float32) * (
            batch.weight_TK * self.factors[batch.expert_TK]).sum(1, keepdim=True)
        found = timing.close({"y": wanted}, {"y": self.out_TH}, LEAST_SQNR_DB)
        return {**found, "correct": found["correct"] and right}


class Nccl:
    """One all-to-all each way, into buffers that are there: of the rows of the choices, or of whole padded layouts."""

    def __init__(self, batch: Batch, padded: bool):
        size, W = batch.size, world.size()
        if padded:
            self.sent = self.arriving = [batch.local * size.tokens] * W  # rows to and from each rank
        else:
            rows_WW = torch.stack([torch.bincount(ids.flatten() // batch.local, minlength=W)
                                   for ids in batch.everywhere])
            self.sent, self.arriving = rows_WW[world.rank()].tolist(), rows_WW[:, world.rank()].tolist()

        def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((count, width), world.rank(), dtype=dtype, device=device())

        row_bytes = size.hidden + size.scale_bytes
        self.out, self.arrived = (rows(sum(n), row_bytes, torch.uint8) for n in (self.sent, self.arriving))
        self.y, self.back = (rows(sum(n), size.hidden, BF16) for n in (self.arriving, self.sent))

    def dispatch(self) -> None:
        dist.all_to_all_single(self.arrived, self.out, self.arriving, self.sent)

    def combine(self, _=None) -> None:
        dist.all_to_all_single(self.back, self.y, self.sent, self.arriving)

    def check(self, stages: dict[str, Callable]) -> dict:
        """Every row holds the number of the rank that it came from."""
        timing.run(stages)
        ranks = torch.arange(world.size())
        return {"correct": all(torch.equal(got[:, 0].long().cpu(), ranks.repeat_interleave(torch.tensor(splits)))
                               for got, splits in ((self.arrived, self.arriving), (self.back, self.sent)))}


class Graphed:
    """A call that is captured in a CUDA graph when it is first made."""

    def __init__(self, call: Callable[[], None]):
        self.call, self.graph = call, None

    def __call__(self, _=None) -> None:
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.call()
        self.graph.replay()


def measure(size: Size, budget_s: float, available: bool) -> list[dict]:
    """The rows of one size. `available`: AllToAll is."""
    batch = Batch(size)
    ways: dict = {NCCL_EXACT: Nccl(batch, padded=False), NCCL_PADDED: Nccl(batch, padded=True)}
    if available:
        ways |= {A2A_E4M3: Ours(batch, quantizes=False), A2A_BF16: Ours(batch, quantizes=True)}
    rows = []
    for launch in ("eager", "graph") if on_gpu() else ("eager", ):
        contenders = {}
        for name, way in ways.items():
            stages = {"dispatch": way.dispatch, "combine": way.combine}
            if launch == "graph":
                stages = {operation: Graphed(call) for operation, call in stages.items()}
            contenders[name] = Contender(stages, partial(way.check, stages))
        rows += timing.rows({"launch": launch, **size._asdict()}, contenders, budget_s, **HOW)
    return rows


def measured_rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    configs = TINY_CONFIGS if args.cases == "tiny" else CONFIGS
    sizes = [Size(*config, count) for config in configs for count in TOKENS[args.cases]]
    available = "nvlink" in world.transports()
    if available:
        for size in reversed(sizes):  # the staging cannot grow once a graph holds it
            size.exchange()
    else:
        world.say("AllToAll is left out: it needs the nvlink transport")
    for size in world.in_time(sizes, args.seconds):
        yield measure(size, args.budget, available)


# ---- how results are shown ------------------------------------------------------------------------------------------


OURS, NCCL = (A2A_E4M3, A2A_BF16), (NCCL_EXACT, NCCL_PADDED)


def prepare(result: dict) -> list[dict]:
    return [{**row, "us": 1e3 * row["median_ms"]} if "median_ms" in row else row for row in result["rows"]
            if row["case"]["operation"] in ("dispatch", "combine")]


# pplx-kernels' time, from an earlier run, by operation and experts, then by tokens.
PPLX_RANKS = 8
PPLX_US = {("dispatch", 256): {1: 25.8, 8: 25.9, 32: 35.2, 128: 65.0}, ("dispatch", 64): {1: 26.4, 128: 51.8},
           ("combine", 256): {1: 23.7, 8: 21.9, 32: 41.4, 128: 91.9}, ("combine", 64): {1: 18.4, 128: 40.8}}
MEASURES = [
    Measure("AllToAll over NCCL's all-to-all of exactly the rows that move", OURS, NCCL_EXACT),
    Measure("AllToAll over NCCL's all-to-all of padded rows", OURS, NCCL_PADDED),
    Measure("AllToAll, microseconds", OURS, figure="us", better=show.SMALLER, form="{:.1f}",
            bars=tuple(bar(us, ranks=PPLX_RANKS, operation=operation, experts=experts, tokens=tokens)
                       for (operation, experts), by_tokens in PPLX_US.items() for tokens, us in by_tokens.items()))]


def plot(result: dict, pyplot) -> None:
    panels = show.points_over(result, "tokens", ("operation", "experts"), (*OURS, *NCCL), "launch", "us")
    show.lines(pyplot, panels, "tokens of a rank", "us", xscale="log", yscale="log")


SHOWN = show.Shown("latency", MEASURES, [("us", "us", "{:.1f}")], plot, contenders=(*OURS, *NCCL), prepare=prepare)


def main() -> None:
    run.main(SHOWN, run.timed_parser(__doc__, budget=0.1, seconds=85), measured_rows, ranks=True)


if __name__ == "__main__":
    main()
