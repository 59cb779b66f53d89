# SPDX-License-Identifier: Apache-2.0
"""What two_nodes.py runs on the ranks of both nodes, except for the training."""

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe import casts
from ds_mxfp8_moe.config import MXFP8MoEConfig, current_device, resolve
from ds_mxfp8_moe.mx import MXTensor
from ds_mxfp8_moe.transport import Transport, Wire
from ds_mxfp8_moe.transport.choose import choose
from exchange import dispatch_combine
from lib import world
from lib.world import BF16, device

FLAT, TWO_HOPS = "collective", "hierarchical"
ROUTINGS = ("random", "skewed", "dropped", "one expert", "the other node", "nowhere")
LOCAL_EXPERTS, TOP_K, HIDDEN, TOKENS = 2, 4, 256, 300
RAIL_BYTES = {"tiny": (4, 1 << 20), "short": (4, 1 << 20, 256 << 20)}
REPEATS = 10
BUDGET_S = {"tiny": 0.02, "short": 0.3}


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
    seconds = []
    for _ in range(REPEATS + 1):
        world.barrier()
        get_accelerator().synchronize()
        begin = time.perf_counter()
        both = dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)
        for work in dist.batch_isend_irecv(list(both)):
            work.wait()
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - begin)
    ms = 1000 * statistics.median(world.largest(torch.tensor(seconds[1:], dtype=torch.float64)).tolist())
    return {"median_ms": ms, "gb_per_s": nbytes / ms / 1e6, "correct": bool((received == source).all())}


def choices(routing: str, tokens: int, node_size: int) -> torch.Tensor:
    """int64 [tokens, TOP_K], -1 where a choice is dropped."""
    experts = world.size() * LOCAL_EXPERTS
    expert_TK = torch.rand(tokens, experts, device=device()).topk(TOP_K).indices
    if routing == "skewed":
        return (torch.rand(tokens, TOP_K, device=device())**4 * experts).long()
    if routing == "dropped":
        return torch.where(torch.rand(expert_TK.shape, device=device()) < 0.4, -1, expert_TK)
    if routing == "the other node":
        of_node = node_size * LOCAL_EXPERTS
        return expert_TK % of_node + of_node * (1 - world.rank() // node_size)
    return {"one expert": torch.full_like(expert_TK, experts - 1), "nowhere": torch.full_like(expert_TK, -1)}.get(
        routing, expert_TK)


def bits(x: Any) -> list[torch.Tensor]:
    parts = [x.qdata, x.scale_bytes] if isinstance(x, MXTensor) else [x]
    return [part.contiguous().view(torch.uint8) for part in parts]


def as_sent(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """float32 rows as they arrive."""
    if wire.mxfp8:
        return casts.quantize(x, wire.block_size, wire.scaling_mode).dequantize(torch.float32)
    return x.to(BF16).float()


def expert_output(x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """What an expert answers here: bf16, x times a number of its own."""
    return (x.float() * (1 + expert / 16).unsqueeze(-1)).to(BF16)


def summed(x_TH: torch.Tensor, expert_TK: torch.Tensor, wire: Wire, node_size: int) -> torch.Tensor:
    """What combine has to give, in the order that hierarchical.py states."""
    x_TH = as_sent(x_TH, wire)
    answer_TKH = torch.stack([expert_output(x_TH, expert_TK[:, k]) for k in range(TOP_K)], dim=1).float()
    total_TH = torch.zeros_like(x_TH)
    for node in range(world.size() // node_size):
        node_TH = torch.zeros_like(x_TH)
        for rank in range(node * node_size, (node + 1) * node_size):
            rank_TH = torch.zeros_like(x_TH)
            for k in range(TOP_K):
                here_T1 = (expert_TK[:, k] >= 0) & (expert_TK[:, k] // LOCAL_EXPERTS == rank)
                rank_TH = rank_TH + torch.where(here_T1.unsqueeze(1), answer_TKH[:, k], 0)
            node_TH = node_TH + rank_TH
        total_TH = total_TH + as_sent(node_TH, wire)
    return total_TH.to(BF16)


def right_bits(transports: dict[str, Transport], routing: str, wire: Wire, node_size: int) -> dict:
    """Whether dispatch equals the flat transport's, and combine the sum above. One rank has no tokens."""
    tokens = 0 if world.rank() == 1 else TOKENS + 17 * world.rank()
    expert_TK, x_TH = choices(routing, tokens, node_size), world.randn(tokens, HIDDEN)
    weight_TK = torch.rand(tokens, TOP_K, device=device())
    plans = {name: transport.plan(expert_TK, LOCAL_EXPERTS) for name, transport in transports.items()}
    rows = {name: transports[name].dispatch(plan, x_TH, wire, weight_TK) for name, plan in plans.items()}
    same = all(torch.equal(a, b) for one, other in zip(rows[FLAT], rows[TWO_HOPS], strict=True)
               for a, b in zip(bits(one), bits(other), strict=True))

    plan, x_PH = plans[TWO_HOPS], rows[TWO_HOPS][0]
    sizes_E = plan.group_ends_E.long().diff(prepend=torch.zeros(1, dtype=torch.long, device=device()))
    first = world.rank() * LOCAL_EXPERTS
    expert_P = torch.arange(first, first + LOCAL_EXPERTS, device=device()).repeat_interleave(sizes_E)
    y_PH = expert_output(x_PH.dequantize() if wire.mxfp8 else x_PH, expert_P)
    y_TH, _ = transports[TWO_HOPS].combine(plan, y_PH, wire, BF16)
    summed_right = torch.equal(*(bits(y)[0] for y in (y_TH, summed(x_TH, expert_TK, wire, node_size))))
    return {"correct": same and summed_right, **({} if same and summed_right else {
        "failure": f"{routing}, {wire}: " + ("combine" if same else "dispatch") + " has other bits"})}


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
    recipe = resolve(MXFP8MoEConfig(enabled=True), *current_device())
    wires = (Wire(False), Wire(True, recipe.block_size, recipe.scaling_mode))
    found = [world.everywhere(lambda routing=routing, wire=wire: right_bits(transports, routing, wire, node_size))
             for routing in ROUTINGS for wire in wires]
    wrong = [one for one in found if not one["correct"]]
    yield {"case": {"operation": "bits", **about}, "contender": TWO_HOPS, "checked": len(found) - len(wrong),
           "correct": not wrong, **({"failure": wrong[0].get("failure", "on another rank")} if wrong else {})}

    for case in dispatch_combine.cases(cases):
        yield from dispatch_combine.measure(case, BUDGET_S[cases], transports)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node-size", type=int, required=True)
    parser.add_argument("--cases", choices=tuple(RAIL_BYTES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one-host", action="store_true")
    args = parser.parse_args()
    world.start()
    meet(args.node_size, args.one_host)
    taken = list(rows(args.node_size, args.cases))
    if world.rank() == 0:
        args.out.write_text(json.dumps(taken))
    world.leave("")


if __name__ == "__main__":
    main()
