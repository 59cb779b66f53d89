# SPDX-License-Identifier: Apache-2.0
"""How many copies of a token cross between nodes: from rank to rank (flat transports) and in two hops (hierarchical).

A model, not a measurement: routings are drawn at random, and the copies that each transport makes of them are counted.
No time is predicted. Group-limited routing draws a token's groups of experts, and then its experts inside these.

    python examples/benchmarks/exchange/scale.py --out scale.json       # seconds, on the CPU
"""

import sys
from math import comb, isclose
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.transport.rows import wanted_by
from lib import run, show
from lib.show import Measure

FLAT, TWO_HOPS = "flat", "hierarchical"
HIDDEN = 7168
# (nodes, groups of experts, groups that a token may choose from). 1 group: any expert.
LAYOUTS = ((2, 1, 1), (4, 1, 1), (4, 8, 4), (4, 4, 2), (8, 1, 1), (8, 8, 4), (8, 8, 2), (16, 1, 1), (16, 16, 4),
           (32, 1, 1))


def routed(tokens: int, experts: int, top_k: int, groups: int, chosen: int) -> torch.Tensor:
    """int64 [tokens, top_k]: experts drawn out of `chosen` of `groups` groups, which are drawn first."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.rand(tokens, groups, generator=generator).topk(chosen, dim=1).indices
    allowed = torch.zeros(tokens, groups, dtype=torch.bool).scatter_(1, drawn, True)
    scores = torch.rand(tokens, experts, generator=generator)
    return torch.where(allowed.repeat_interleave(experts // groups, dim=1), scores, -1.0).topk(top_k, dim=1).indices


def copies(expert_TK: torch.Tensor, experts_per_rank: int, nodes: int, ranks: int) -> dict[str, float]:
    """Copies of a token that leave its node, on average. Tokens are spread evenly over all nodes.

    Args:
        ranks: of a node.
    """
    away = (nodes - 1) / nodes  # this share of the nodes and ranks that a token goes to are not of its own node
    places = {FLAT: wanted_by(expert_TK, experts_per_rank, nodes * ranks),
              TWO_HOPS: wanted_by(expert_TK, experts_per_rank * ranks, nodes)}
    return {name: away * to.sum(1).double().mean().item() for name, to in places.items()}


def expected(experts: int, top_k: int, nodes: int, ranks: int) -> dict[str, float]:
    """The same by probability, where a token's experts are any `top_k` of all."""

    def met(places: int) -> float:
        missed = comb(experts - experts // places, top_k) / comb(experts, top_k)
        return (places - places // nodes) * (1 - missed)

    return {FLAT: met(nodes * ranks), TWO_HOPS: met(nodes)}


def rows(tokens: int = 65536, layouts: tuple = LAYOUTS, ranks: int = 8, experts: int = 256, top_k: int = 8):
    """The rows of each layout, one after the other. Random routings are checked against probability."""
    for nodes, groups, chosen in layouts:
        counted = copies(routed(tokens, experts, top_k, groups, chosen), experts // (nodes * ranks), nodes, ranks)
        right = groups > 1 or all(isclose(counted[name], value, rel_tol=0.01)
                                  for name, value in expected(experts, top_k, nodes, ranks).items())
        case = {"nodes": nodes, "ranks_a_node": ranks, "experts": experts, "top_k": top_k, "hidden": HIDDEN,
                "routing": f"{chosen} of {groups} groups" if groups > 1 else "random"}
        yield [{"case": case, "contender": name, "copies": value, "correct": right,
                "dispatch_kb": value * (HIDDEN + HIDDEN // 32 + 4 * top_k) / 1000,
                "combine_kb": value * HIDDEN * 2 / 1000} for name, value in counted.items()]


def plot(result: dict, pyplot) -> None:
    show.lines(pyplot, show.points_over(result, "nodes", ("routing", ), (FLAT, TWO_HOPS), figure="copies",
                                        when=lambda case: case["routing"] == "random"),
               "nodes of 8 ranks", "copies of a token between nodes (model)")


SHOWN = show.Shown(
    "scale", [Measure("copies between nodes: hierarchical, times fewer than flat", (TWO_HOPS, ), FLAT, "copies")],
    [("copies", "copies", "{:.2f}"), ("dispatch, kB", "dispatch_kb", "{:.1f}"),
     ("combine, kB", "combine_kb", "{:.1f}")], plot,
    note="A model: counted on random routings. For each token, as an average: copies that leave its node; their bytes "
         "in dispatch in MXFP8 with blocks of 32, and in combine in bf16.")


def main() -> None:
    args = run.parse(run.parser(__doc__))
    run.main(SHOWN, args, rows)


if __name__ == "__main__":
    main()
