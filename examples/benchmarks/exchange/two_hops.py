# SPDX-License-Identifier: Apache-2.0
"""What two hops cost inside one host, beside the flat exchange: bytes that ranks send each other, and the device's
time, of dispatch and of combine.

Both go over peer memory. The ranks are nodes of 2 and of 4. They take the GPUs of this host in turn and share them, by
an MPS daemon that this script starts and stops. Each rank then has its share of a GPU's multiprocessors. Where ranks
share a GPU, what they send stays in its memory: times say nothing about links or networks.

    python examples/benchmarks/exchange/two_hops.py    # without a launcher: starts its ranks, stores, shows
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.transport import Transport, Wire
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from exchange.dispatch_combine import Batch, Case, stages
from exchange.two_nodes_ranks import as_sent
from lib import run, show, timing, world
from lib.show import SMALLER, Measure
from lib.timing import TOTAL, Contender, poisoned
from lib.world import BF16

FLAT, TWO_HOPS = "flat", "two hops"
MPS = "nvidia-cuda-mps-control"
SHARED_MEMORY = Path("/dev/shm")  # where DeepSpeed's CPU all-reduce leaves 66 MiB behind for every rank
RANK_BYTES = 8 << 30  # of a GPU's memory that a rank of the full case takes, rounded up
RUN_SECONDS = 300.0  # of the ranks of one case, most of which are kernels' compilation


class Nodes(NamedTuple):
    """The ranks as nodes."""

    count: int
    size: int

    @property
    def ranks(self) -> int:
        return self.count * self.size


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def transports(node_size: int) -> dict[str, Transport]:
    """Over peer memory. Without GPUs over gloo."""
    wire = "peer_memory" if world.on_gpu() else "host"
    return {FLAT: world.transport("nvlink" if world.on_gpu() else "collective"),
            TWO_HOPS: Hierarchical(Hops.of(world.group(), node_size, "the benchmark", wire, wire))}


def summed(batch: Batch, wire: Wire, node_size: int) -> torch.Tensor:
    """What combine has to give, bit for bit. Each choice brings the token back: in float32 the sum of a node is exact.

    `node_size`: 1 for the flat exchange, whose ranks each round for themselves.
    """
    total_TH = torch.zeros_like(batch.x_TH, dtype=torch.float32)
    node_TK = batch.expert_TK // (batch.local * node_size)
    for node in range(world.size() // node_size):
        choices_T1 = (node_TK == node).sum(1, keepdim=True)
        total_TH += as_sent(choices_T1 * batch.x_TH.float(), wire)
    return total_TH.to(BF16)


def check(batch: Batch, calls: dict, wire: Wire, node_size: int) -> dict:
    """Runs them on poisoned memory."""
    with poisoned():
        x_PH = calls["dispatch"]()
        y_TH = calls["combine"](None)
    return {"correct": batch.right_rows(x_PH, wire) and torch.equal(y_TH, summed(batch, wire, node_size))}


def flat_bytes(batch: Batch, wire: Wire) -> dict[str, int]:
    """Bytes that the rank with the most sends to others, of each operation: a row for each rank that a token goes to.
    Routing weights go with dispatch."""
    sent_WW = batch.rows_WW["ours"].clone().fill_diagonal_(0)
    H = batch.case.hidden
    row = H + -(-H // wire.block_size) if wire.mxfp8 else BF16.itemsize * H
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


def measure(case: Case, nodes: Nodes, budget_s: float, made: dict[str, Transport] | None = None) -> list[dict]:
    """The rows of one case, on each of its ranks. `made`: the transports. Default: those of this machine."""
    batch, made = Batch(case), made or transports(nodes.size)
    plans = {name: transport.plan(batch.expert_TK, batch.local) for name, transport in made.items()}
    rows = []
    for dtype, wire in batch.wires.items():
        calls = {name: stages(batch, transport, plans[name], wire) for name, transport in made.items()}
        found = timing.rows(
            {"nodes": f"{nodes.count} x {nodes.size}", "dtype": dtype, **asdict(case)},
            {name: Contender(calls[name], partial(check, batch, calls[name], wire, size), {
                "transport": world.name_of(made[name])}) for name, size in ((FLAT, 1), (TWO_HOPS, nodes.size))},
            budget_s)
        sent = {FLAT: flat_bytes(batch, wire), TWO_HOPS: two_hop_bytes(made[TWO_HOPS].hops, calls[TWO_HOPS])}
        rows += [{**row, "bytes": sent[row["contender"]][row["case"]["operation"]]} for row in found
                 if row["case"]["operation"] != TOTAL]
    return rows


# ---- the host of the ranks ------------------------------------------------------------------------------------------


def case_of(cases: str) -> Case:
    return Case(256, 256, 2, 8, "random") if cases == "tiny" else Case(4096, 7168, 8, 256, "random")


def all_nodes(cases: str) -> list[Nodes]:
    """Those that the GPUs have room for."""
    if cases != "full" or not world.on_gpu():
        return [Nodes(2, 2)]
    room = sum(torch.cuda.get_device_properties(i).total_memory for i in range(get_accelerator().device_count()))
    return [nodes for nodes in (Nodes(2, 2), Nodes(2, 4)) if nodes.ranks * RANK_BYTES <= room]


@contextmanager
def mps(folder: Path) -> Iterator[dict]:
    """An MPS daemon of our own, with its files in `folder`. Yields the environment of its clients."""
    if shutil.which(MPS) is None:
        sys.exit(f"{MPS} is not on PATH: ranks that share a GPU would run in turn without it")
    pipe, log = folder / "pipe", folder / "log"
    pipe.mkdir()
    log.mkdir()
    clients = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    # The daemon sees all GPUs. It would number those of its own variable anew, and the ranks select by the same one.
    daemon = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | clients
    said = folder / "start"
    with said.open("w") as out:  # no pipe, since the daemon may keep it open
        failed = subprocess.run([MPS, "-d"], env=daemon, stdin=subprocess.DEVNULL, stdout=out,
                                stderr=subprocess.STDOUT).returncode
    if failed:
        sys.exit(f"{MPS} -d failed: {said.read_text().strip()}")
    try:
        yield clients
    finally:
        subprocess.run([MPS], input="quit\n", env=daemon, text=True, timeout=60, check=True)


def environment(rank: int, ranks: int, port: int) -> dict:
    gpus = get_accelerator().device_count() if world.on_gpu() else ranks
    sharing = -(-ranks // gpus)
    return {"RANK": str(rank), "LOCAL_RANK": str(rank % gpus), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            # Without it, kernels that wait for a rank might leave that rank no multiprocessor.
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // sharing),
            # torch and NCCL refuse ranks that share a GPU. NCCL, which only checks and synchronises here, is told that
            # each rank is a machine of its own.
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_HOSTID": f"of-rank-{rank}",
            "NCCL_SOCKET_IFNAME": "lo"}


def launched(nodes: Nodes, args: argparse.Namespace, folder: Path, clients: dict) -> list[dict]:
    """The rows of one case, from ranks that this starts."""
    out = folder / f"{nodes.count}x{nodes.size}.json"
    command = [sys.executable, __file__, "--rows", out, "--node-size", nodes.size, "--cases", args.cases, "--budget",
               args.budget]
    port = world.free_port()
    ranks = [subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=sys.stderr,
                              env=os.environ | clients | environment(rank, nodes.ranks, port))
             for rank in range(nodes.ranks)]
    end = time.monotonic() + RUN_SECONDS
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > end:
                sys.exit(f"the ranks took longer than {RUN_SECONDS:.0f} s")
            time.sleep(0.1)
        for i, rank in enumerate(ranks):
            if rank.poll():
                sys.exit(f"rank {i} ended with status {rank.returncode}: see above")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for leftover in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            leftover.unlink()
    return json.loads(out.read_text())


def measured_rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with mps(folder) if world.on_gpu() else nullcontext({}) as clients:
            for nodes in world.in_time(all_nodes(args.cases), args.seconds - world.ENDING_S):
                yield launched(nodes, args, folder, clients)


# ---- how results are shown ------------------------------------------------------------------------------------------


MEASURES = [Measure(f"{operation}: {what} of two hops, of the flat exchange's", (TWO_HOPS, ), FLAT, figure,
                    lambda case, operation=operation: case["operation"] == operation, SMALLER)
            for operation in ("dispatch", "combine") for what, figure in (("bytes", "bytes"), ("time", "median_ms"))]
SHOWN = show.Shown(
    "two_hops", MEASURES, [show.MS, ("MiB sent", "bytes", show.MIB)],
    lambda result, pyplot: show.stacked(pyplot, show.parts_of_cases(result, ("dispatch", "combine")), "ms"),
    note="MiB sent: of the rank that sends the most to others, in both hops. Combine sends more in two hops, since "
         "sums travel in float32 inside a node. Ranks that share a GPU send through its memory.")


def main() -> None:
    parser = run.timed_parser(__doc__, budget=1.0, seconds=540)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of a rank that this script starts: its result
    parser.add_argument("--node-size", type=int, help=argparse.SUPPRESS)
    args = run.parse(parser, unwritten=("rows", ))
    if args.rows is None:
        run.main(SHOWN, args, lambda: measured_rows(args))
        return
    world.start()
    taken = measure(case_of(args.cases), Nodes(world.size() // args.node_size, args.node_size), args.budget)
    if world.rank() == 0:
        args.rows.write_text(json.dumps(taken))
    world.leave("")


if __name__ == "__main__":
    main()
