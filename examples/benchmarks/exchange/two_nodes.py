# SPDX-License-Identifier: Apache-2.0
"""Two nodes: whether they see each other, whether the exchange in two hops gives the right bits, and how long it, the
flat exchange and a training over each of them take. So far it was run on one machine alone, over no network.

Start it on both nodes, from the same checkout. Node 0 writes the result file, and logs go into a folder beside it:

    python examples/benchmarks/exchange/two_nodes.py --node-rank 0 --master node1 --out two_nodes.json
    python examples/benchmarks/exchange/two_nodes.py --node-rank 1 --master node1 --out two_nodes.json

To try it without a network, start both on one machine with `--one-host --master 127.0.0.1 --out` of different names.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.config import MXFP8MoEConfig
from ds_mxfp8_moe.transport.choose import choose
from exchange import dispatch_combine, two_hops
from lib import results_file, run, show, world
from lib.show import Measure
from lib.timing import wall_ms
from lib.world import device

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs/ds/zero2_mxfp8.json"
STEP_SECONDS = 1800
LARGEST_DIFFERENCE = 0.01  # between the losses of the two transports, which add in different orders
FLAT, TWO_HOPS = "collective", "hierarchical"
RAIL_BYTES = {"tiny": (4, 1 << 20), "short": (4, 1 << 20, 256 << 20)}
REPEATS = 10
BUDGET_S = {"tiny": 0.02, "short": 0.3}


# ---- on the ranks of both nodes -------------------------------------------------------------------------------------


def meet(node_size: int, one_host: bool) -> None:
    """Every rank learns the hosts of all. Ends this rank if they are not two nodes of `node_size` ranks."""
    hosts: list = [None] * world.size()
    dist.all_gather_object(hosts, socket.gethostname())
    of_nodes = [set(hosts[first:first + node_size]) for first in range(0, len(hosts), node_size)]
    world.say(f"nodes: {' and '.join(', '.join(sorted(names)) for names in of_nodes)}")
    if not one_host and (len(of_nodes) != 2 or any(len(names) > 1 for names in of_nodes) or len(set(hosts)) != 2):
        sys.exit(f"expected two hosts of {node_size} ranks each, found ranks on {hosts}: start the script on each "
                 "node with the same --ranks, or give --one-host to try it on one machine")


def rail(node_size: int, nbytes: int) -> dict:
    """Each rank sends to the rank of its index on the next node, all at once."""
    me, size = world.rank(), world.size()
    to, source = (me + node_size) % size, (me - node_size) % size
    sent = torch.full((nbytes, ), me, dtype=torch.uint8, device=device())
    received = torch.empty_like(sent)

    def both() -> None:
        works = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
        for work in dist.batch_isend_irecv(works):
            work.wait()

    both()
    ms = statistics.median(wall_ms(both) for _ in range(REPEATS))
    return {"median_ms": ms, "gb_per_s": nbytes / ms / 1e6, "correct": bool((received == source).all())}


def rows(node_size: int, cases: str) -> Iterator[dict]:
    about = {"ranks": world.size()}
    for nbytes in RAIL_BYTES[cases]:
        yield {"case": {"operation": f"rail, {nbytes} bytes", **about}, "contender": "send and receive",
               **world.everywhere(lambda nbytes=nbytes: rail(node_size, nbytes))}

    keys = {FLAT: {}, TWO_HOPS: {"node_size": node_size}}
    transports = {name: choose(world.group(), "two nodes", MXFP8MoEConfig(transport=name, **more))
                  for name, more in keys.items()}
    if world.name_of(transports[TWO_HOPS]) != TWO_HOPS:
        sys.exit('there are no two hops here: the line "transport ..." above says why')
    exact = {TWO_HOPS: partial(two_hops.summed, node_size=node_size)}
    for case in dispatch_combine.cases(cases):
        yield from dispatch_combine.measure(case, BUDGET_S[cases], transports, exact)


def exchange_main(args: argparse.Namespace) -> None:
    """One rank of both nodes, before the training."""
    world.start()
    meet(args.ranks, args.one_host)
    taken = list(rows(args.ranks, args.cases))
    if world.rank() == 0:
        args.out.write_text(json.dumps(taken))
    world.leave("")


# ---- on each node ---------------------------------------------------------------------------------------------------


class Node:
    """One of the two nodes. It starts its ranks, step by step, together with the other node.

    Attributes:
        folder: of this node's logs.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder, self.port = args, args.out.with_suffix("").absolute(), args.port
        self.folder.mkdir(parents=True, exist_ok=True)

    def launch(self, name: str, program: list) -> None:
        """Runs a program on all ranks of both nodes. Exits with one line if it fails."""
        args, log = self.args, self.folder / f"{name}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", args.ranks,
                   "--node-rank", args.node_rank, "--master-addr", args.master, "--master-port", self.port, *program]
        self.port += 1  # the port of the step before may still be closing
        # NCCL says in a file of its own which network it takes.
        environment = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET",
                       "NCCL_DEBUG_FILE": str(self.folder / f"nccl.{name}.%h.%p"), **os.environ}
        print(f"node {args.node_rank}: {name}, log in {log}", flush=True)
        with log.open("w") as out:
            try:
                failed = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=out, env=environment,
                                        stderr=subprocess.STDOUT, timeout=STEP_SECONDS, cwd=ROOT).returncode
            except subprocess.TimeoutExpired:
                sys.exit(f"node {args.node_rank}: {name} took longer than {STEP_SECONDS} s: look at {log}. If its "
                         f"ranks never met, check that both nodes reach {args.master}:{self.port - 1}")
        if failed:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            sys.exit(f"{tail}\nnode {args.node_rank}: {name} failed: see {log}")

    def exchange(self) -> list[dict]:
        """The rows of `exchange_main`. On node 1, none."""
        args, out = self.args, self.folder / "exchange.json"
        self.launch("exchange", [__file__, "--rank", "--ranks", args.ranks, "--cases", args.cases, "--out", out,
                                 *["--one-host"] * args.one_host])
        return json.loads(out.read_text()) if args.node_rank == 0 else []

    def train(self) -> list[dict]:
        """Trains the same model over both transports."""
        args, losses, rows = self.args, {}, []
        for name in (FLAT, TWO_HOPS):
            config = json.loads(CONFIG.read_text())
            config["mxfp8_moe"] |= {"transport": name} | ({"node_size": args.ranks} if name == TWO_HOPS else {})
            path, out = self.folder / f"{name}.json", self.folder / name
            path.write_text(json.dumps(config))
            self.launch(f"train_{name}", [
                ROOT / "examples/gpt_moe/train.py", "--deepspeed_config", path, "--model", args.model, "--data",
                args.data, "--steps", args.steps, "--heldout_windows", 2 * args.ranks, "--log_every", 1,
                "--save_dir", out])
            if args.node_rank == 0:
                log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
                losses[name], seconds = [row["loss"] for row in log], [row["seconds"] for row in log]
                step_ms = 1000 * statistics.median(b - a for a, b in zip(seconds, seconds[1:], strict=False))
                apart = max(abs(a / b - 1) for a, b in zip(losses[name], losses[FLAT], strict=True))
                rows.append({"case": {"operation": "training step", "ranks": 2 * args.ranks}, "contender": name,
                             "median_ms": step_ms, "loss": losses[name][-1], "loss_difference": apart,
                             "correct": apart <= LARGEST_DIFFERENCE})
        return rows

    def network(self) -> list[str]:
        """What NCCL says that it takes between nodes. Empty without GPUs."""
        said = "".join(path.read_text(errors="replace") for path in self.folder.glob("nccl.*"))
        return sorted(set(re.findall(r"Using network (.+)", said)))


SHOWN = show.Shown(
    "two_nodes",
    [Measure(f"{what}: two hops over flat", (TWO_HOPS, "hierarchical, mxfp8", "hierarchical, bf16"), over,
             when=lambda case, what=what: case["operation"] == what)
     for what, over in (("dispatch", "today, NCCL bf16"), ("combine", "today, NCCL bf16"), ("training step", FLAT))],
    [show.MS, ("GB/s a rank", "gb_per_s", "{:.1f}"),
     ("loss", "loss", "{:.4f}"), ("loss, of collective's", "loss_difference", "{:.2%}")],
    lambda result, pyplot: show.stacked(
        pyplot, show.parts_of_cases(result, ("dispatch", "combine")), "ms"), wide=False,
    prepare=lambda result: [row for row in result["rows"] if row["case"]["operation"] != "total"],
    note="rail: each rank sends to the rank of its index on the next node, all at once. Dispatch and combine in two "
         "hops are correct if they have the bits of plain torch.")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    gpu = world.on_gpu()
    parser = run.parser(__doc__)
    parser.add_argument("--node-rank", type=int, choices=(0, 1))
    parser.add_argument("--master", help="the address of node 0, as both nodes reach it")
    parser.add_argument("--port", type=int, default=29500, help="the first of three that are used (default: 29500)")
    parser.add_argument("--ranks", type=run.one_or_more, default=get_accelerator().device_count() if gpu else 2,
                        help="of each node (default: its GPUs; without GPUs 2)")
    parser.add_argument("--one-host", action="store_true", help="both nodes are this machine: to try the script")
    parser.add_argument("--cases", choices=("tiny", "short"), default="short" if gpu else "tiny")
    parser.add_argument("--model", type=Path, default=ROOT / f"configs/models/gpt_{'small' if gpu else 'tiny'}.yaml")
    parser.add_argument("--data", default="stdlib", help="as train.py's (default: stdlib)")
    parser.add_argument("--steps", type=int, default=30, help="of each training, at least 2 (default: 30)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # this process is a rank of both nodes
    args = run.parse(SHOWN, parser, arguments)
    if not args.rank and (args.node_rank is None or not args.master):
        parser.error("name this node by --node-rank 0 or 1, and node 0's address by --master")
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: the transport in two hops needs at least two ranks on each node")
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the time of a step is taken between two of them")
    args.out = args.out or results_file.RESULTS / "two_nodes.json"
    return args


def main() -> None:
    args = parse()
    if args.rank:
        exchange_main(args)
        return
    node = Node(args)
    rows = node.exchange() + node.train()
    print(f"node {args.node_rank}: NCCL's network: {', '.join(node.network()) or 'none: these are CPU ranks on gloo'}")
    if args.node_rank == 0:
        results_file.write(SHOWN.benchmark, rows, args.out, args.commit)
        sys.exit(show.show(SHOWN, args.out, args.check) or None)


if __name__ == "__main__":
    main()
