# SPDX-License-Identifier: Apache-2.0
"""What two hops cost inside one host, beside the flat exchange: bytes that ranks send each other, and the device's
time, of dispatch and of combine.

Both go over peer memory. The ranks are two nodes. They take the GPUs of this host in turn, and share them if there are
fewer. Then NVIDIA's Multi-Process Service has to run, and each rank to get its share of a GPU's multiprocessors:
kernels that wait for a rank might otherwise leave it none. What ranks of one GPU send stays in its memory: times say
nothing about links or networks.

    nvidia-cuda-mps-control -d    # four ranks on one GPU, each with 100 / 4 % of it
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25 torchrun --nproc-per-node 4 examples/benchmarks/exchange/two_hops.py
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.compute import casts
from ds_mxfp8_moe.transport import RowFormat, Transport
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from exchange.dispatch_combine import Batch, Case, check, stages
from lib import run, show, timing, world
from lib.show import SMALLER, Measure, bar
from lib.timing import TOTAL, Contender
from lib.world import BF16

FLAT, TWO_HOPS = "flat", "two hops"


def transports(node_size: int) -> dict[str, Transport]:
    """Over peer memory. Without GPUs over gloo."""
    wire = "peer_memory" if world.on_gpu() else "host"
    return {FLAT: world.transport("nvlink" if world.on_gpu() else "collective"),
            TWO_HOPS: Hierarchical(Hops.of(world.group(), node_size, wire, wire))}


def as_sent(x: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """float32 rows as they arrive."""
    if row_format.mxfp8:
        return casts.quantize(x, row_format.block_size, row_format.scaling_mode).dequantize(torch.float32)
    return x.to(BF16).float()


def summed(batch: Batch, row_format: RowFormat, node_size: int) -> torch.Tensor:
    """What combine has to give, bit for bit. Each choice brings the token back: in float32 the sum of a node is exact.

    `node_size`: 1 for the flat exchange, whose ranks each round for themselves.
    """
    total_TH = torch.zeros_like(batch.x_TH, dtype=torch.float32)
    node_TK = batch.expert_TK // (batch.local * node_size)
    for node in range(world.size() // node_size):
        choices_T1 = (node_TK == node).sum(1, keepdim=True)
        total_TH += as_sent(choices_T1 * batch.x_TH.float(), row_format)
    return total_TH.to(BF16)


def flat_bytes(batch: Batch, row_format: RowFormat) -> dict[str, int]:
    """Bytes that the rank with the most sends to others, of each operation: a row for each rank that a token goes to.
    Routing weights go with dispatch."""
    sent_WW = batch.rows_WW["ours"].clone().fill_diagonal_(0)
    H = batch.case.hidden
    row = H + -(-H // row_format.block_size) if row_format.mxfp8 else BF16.itemsize * H
    return {"dispatch": int(sent_WW.sum(1).max()) * (row + 4 * batch.case.top_k),
            "combine": int(sent_WW.sum(0).max()) * row}


def two_hop_bytes(hops: Hops, calls: dict) -> dict[str, int]:
    """The same in both hops, as their wires count it."""

    def sent() -> int:
        return hops.between.sent_bytes + hops.inside.sent_bytes

    counts = [sent()]
    timing.run(calls, lambda: counts.append(sent()))
    most = world.largest(torch.tensor(counts, dtype=torch.int64).diff()).tolist()
    return dict(zip(calls, most, strict=True))


def measured_rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    node_size = world.size() // 2
    case = Case(256, 256, 2, 8, "random") if args.cases == "tiny" else Case(4096, 7168, 8, 256, "random")
    batch, made = Batch(case), transports(node_size)
    plans = {name: transport.plan(batch.expert_TK, batch.local) for name, transport in made.items()}
    for dtype in world.in_time(batch.row_formats, args.seconds):
        row_format = batch.row_formats[dtype]
        calls = {name: stages(batch, transport, plans[name], row_format) for name, transport in made.items()}
        found = timing.rows(
            {"nodes": f"{world.size() // node_size} x {node_size}", "dtype": dtype, **asdict(case)},
            {name: Contender(calls[name], partial(
                check, batch, calls[name], row_format, partial(summed, batch, row_format, size)), {
                "transport": world.name_of(made[name])}) for name, size in ((FLAT, 1), (TWO_HOPS, node_size))},
            args.budget)
        sent = {FLAT: flat_bytes(batch, row_format), TWO_HOPS: two_hop_bytes(made[TWO_HOPS].hops, calls[TWO_HOPS])}
        yield [{**row, "bytes": sent[row["contender"]][row["case"]["operation"]]} for row in found
               if row["case"]["operation"] != TOTAL]


# ---- how results are shown ------------------------------------------------------------------------------------------


# Combine sends more than dispatch's bar in two hops, since a node's sums travel in float32: its bytes have no bar.
BARS = {("dispatch", "bytes"): (bar(1.3), ), ("dispatch", "time"): (bar(1.5), ), ("combine", "time"): (bar(1.5), )}
MEASURES = [Measure(f"{operation}: {what} of two hops, of the flat exchange's", (TWO_HOPS, ), FLAT, figure,
                    lambda case, operation=operation: case["operation"] == operation, SMALLER,
                    bars=BARS.get((operation, what), ()))
            for operation in ("dispatch", "combine") for what, figure in (("bytes", "bytes"), ("time", "median_ms"))]
SHOWN = show.Shown(
    "two_hops", MEASURES, [show.MS, ("MiB sent", "bytes", show.MIB)],
    lambda result, pyplot: show.stacked(pyplot, show.parts_of_cases(result, ("dispatch", "combine")), "ms"),
    note="MiB sent: of the rank that sends the most to others, in both hops. Combine sends more in two hops, since "
         "sums travel in float32 inside a node. Ranks that share a GPU send through its memory.")


def main() -> None:
    run.main(SHOWN, run.timed_parser(__doc__, budget=1.0), measured_rows, ranks=True)


if __name__ == "__main__":
    main()
