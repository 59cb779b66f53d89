# SPDX-License-Identifier: Apache-2.0
"""A model of dispatch and combine on 8 to 512 GPUs: flat and in two hops, over several networks, beside what DeepEP
and pplx-kernels publish.

No time here was measured between nodes. Routings are drawn at random, and the ranks and nodes that a token goes to are
counted. scale_model.py makes times of them, from rates measured inside one host and assumptions about the network. It
is checked against what was measured inside one host.

    python examples/benchmarks/exchange/scale.py --out scale.json       # half a minute, on the CPU
"""

import functools
import sys
from collections.abc import Callable, Iterator
from math import comb, isclose
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.transport.rows import wanted_by
from exchange import scale_model as model
from exchange.scale_model import COMBINE, DISPATCH, FLAT, GPUS_A_NODE, HOST, INFINIBAND, NO_NETWORK, NVSHMEM
from lib import run, show
from lib.show import SMALLER, Measure

CHECK = "model"  # the contender of rows that compare predictions with measurements
EXPERTS, TOKENS = 256, 32768
MANY, FEW = 4096, 128  # tokens of a rank
GPUS = (16, 32, 64, 128, 256, 512)


def routed(tokens: int, experts: int, top_k: int, groups: int, chosen: int) -> torch.Tensor:
    """int64 [tokens, top_k]: experts drawn out of `chosen` of `groups` groups, which are drawn first."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.rand(tokens, groups, generator=generator).topk(chosen, dim=1).indices
    allowed = torch.zeros(tokens, groups, dtype=torch.bool).scatter_(1, drawn, True)
    scores = torch.rand(tokens, experts, generator=generator)
    return torch.where(allowed.repeat_interleave(experts // groups, dim=1), scores, -1.0).topk(top_k, dim=1).indices


@functools.cache
def met(gpus: int, top_k: int, groups: int, chosen: int, tokens: int = TOKENS) -> tuple[float, float, bool]:
    """To how many ranks and how many nodes a token goes, on average, its own ones included.

    Returns:
        Both, and whether they are right: a random routing's are compared with probability.
    """
    experts = max(EXPERTS, gpus)
    expert_TK = routed(tokens, experts, top_k, groups, chosen)
    counted = [wanted_by(expert_TK, experts // places, places).sum(1).double().mean().item()
               for places in (gpus, gpus // GPUS_A_NODE)]
    right = groups > 1 or all(isclose(one, expected(experts, top_k, places), rel_tol=0.01)
                              for one, places in zip(counted, (gpus, gpus // GPUS_A_NODE), strict=True))
    return *counted, right


def expected(experts: int, top_k: int, places: int) -> float:
    """To how many of `places` equal places a token goes, by probability, if it chooses any `top_k` experts."""
    return places * (1 - comb(experts - experts // places, top_k) / comb(experts, top_k))


def cases() -> Iterator[tuple[dict, tuple]]:
    """What is predicted, each with the arguments of `met`."""

    def of(gpus: int, tokens: int = MANY, fabric: str = INFINIBAND, top_k: int = 8, groups: int = 1, chosen: int = 1):
        routing = f"{chosen} of {groups} groups" if groups > 1 else "random"
        for operation in (DISPATCH, COMBINE):
            yield {"operation": operation, "gpus": gpus, "fabric": fabric, "routing": routing, "top_k": top_k,
                   "tokens": tokens}, (gpus, top_k, groups, chosen)

    for tokens in (MANY, FEW):
        yield from of(8, tokens, NO_NETWORK)
    for fabric in model.FABRICS:
        for gpus in GPUS:
            yield from of(gpus, fabric=fabric)
    for gpus in GPUS:
        yield from of(gpus, FEW)
    for gpus in GPUS:
        yield from of(gpus, groups=8, chosen=4)
    yield from of(32, groups=4, chosen=2)
    yield from of(64, groups=8, chosen=2)
    for top_k in (2, 4):
        yield from of(64, top_k=top_k)
    yield from of(64, 4 * MANY)


def predicted(case: dict, routing: tuple[int, int, int, int], rates: dict) -> list[dict]:
    """The rows of one case."""
    ranks_met, nodes_met, right = met(*routing)
    nodes = case["gpus"] // GPUS_A_NODE
    operation = case["operation"]
    sent = model.traffic(operation, ranks_met, nodes_met, nodes, case["tokens"], case["top_k"])
    times = model.times_ms(sent, rates["collective", operation], rates["nvlink", operation], nodes,
                           model.FABRICS.get(case["fabric"]))
    away = (nodes - 1) / nodes
    about = {FLAT: {"copies": ranks_met * away, "network_mb": sent.flat_network},
             HOST: {"copies": nodes_met * away, "network_mb": sent.hops_network}}
    rows = [{"case": case, "contender": name, "model_ms": ms, **about.get(name, {}), "correct": right}
            for name, ms in times.items()]
    return rows + [{"case": case, "contender": name, "published_ms": ms, "correct": right}
                   for name, ms in model.published_ms(case, nodes_met).items()]


def checked() -> list[dict]:
    """How far predictions inside one host are from what was measured there."""
    found = []
    for transport in ("collective", "nvlink"):
        for operation in (DISPATCH, COMBINE):
            measured = model.samples(transport, operation)
            for what, fitted in (model.NEAR | model.FAR).items():
                errors = model.errors(measured, fitted)
                found.append({"case": {"operation": operation, "check": f"{transport}: {what}"}, "contender": CHECK,
                              "worst_error": errors[-1], "median_error": errors[len(errors) // 2],
                              "correct": True})
    return found


def rows() -> Iterator[list[dict]]:
    yield checked()
    rates = model.rates()
    for case, routing in cases():
        yield predicted(case, routing, rates)


def is_check(of: dict) -> Callable[[dict], bool]:
    return lambda case: case.get("check", "").partition(": ")[2] in of


is_near, is_far = is_check(model.NEAR), is_check(model.FAR)


def plot(result: dict, pyplot) -> None:
    panels: dict = {}
    for tokens, routing in ((MANY, "random"), (MANY, "4 of 8 groups"), (FEW, "random")):
        def shown(case: dict, tokens=tokens, routing=routing) -> bool:
            return case.get("fabric") == INFINIBAND and case["top_k"] == 8 and (
                case["tokens"], case["routing"]) == (tokens, routing)

        for figure, names in (("model_ms", (FLAT, *model.TWO_HOPS)), ("published_ms", model.PUBLISHED)):
            found = show.points_over(result, "gpus", ("operation", "tokens", "routing"), names, figure=figure,
                                     when=shown)
            for title, series in found.items():
                panels.setdefault(title, {}).update(series)
    show.lines(pyplot, panels, "GPUs, 8 a node, InfiniBand NDR",
               "ms (model; published)", yscale="log")
    for axis in pyplot.gcf().axes:
        axis.set_xscale("log", base=2)


def sentences(result: dict) -> list[str]:
    rates = [f"{transport}, {operation}: {1000 * one.fixed_ms:.0f} us + {1 / one.ms_per_link_mb:.0f} GB/s on links + "
             f"{1 / one.ms_per_local_mb:.0f} G values/s" for (transport, operation), one in model.rates().items()]
    fabrics = [f"{name}: {one.line_gb_per_s:.0f} GB/s, of which {one.efficiency:.0%} are reached, "
               f"{one.host_latency_us:.0f} us of latency over NCCL, {one.device_latency_us:.0f} us from the device"
               for name, one in model.FABRICS.items()]
    sources = [f"{name}: {source}" for name, source in model.SOURCES.items()]
    return ["", f"Rates fitted to {' and '.join(model.MEASURED)}: {'; '.join(rates)}.", "",
            f"Assumed of the networks (reasons in published.yaml): {'; '.join(fabrics)}.", "",
            f"Published by others: {'; '.join(sources)}. The efficiency of the networks is DeepEP's on 32 GPUs. That "
            "the model agrees with DeepEP there is no test of it."]


SHOWN = show.Shown(
    "scale",
    [Measure("model, copies between nodes: two hops, times fewer than flat", (HOST, ), FLAT, "copies"),
     Measure("model, time: two hops over flat NCCL", model.TWO_HOPS, FLAT, "model_ms"),
     Measure("model, largest error inside one host, at a hidden size that was not fitted", (CHECK, ), None,
             "worst_error", is_near, SMALLER, "{:.0%}"),
     Measure("model, largest error inside one host, at a top-k, tokens or ranks that were not fitted", (CHECK, ), None,
             "worst_error", is_far, SMALLER, "{:.0%}")],
    [("copies", "copies", "{:.2f}"), ("MB over the network", "network_mb", "{:.1f}"),
     ("ms, model", "model_ms", "{:.3f}"), ("ms, published", "published_ms", "{:.3f}"),
     ("largest error", "worst_error", "{:.0%}"), ("median error", "median_error", "{:.0%}")],
    plot, ratios=((FLAT, HOST), (FLAT, NVSHMEM)), sentences=sentences,
    note="A model, except for the columns \"published\": no time was measured between nodes. Figures are of one rank "
         "at its mean load, with 8 GPUs a node, 256 experts (512 on 512 GPUs) and 7168 values a token. Copies: of a "
         "token, that leave its node. Lines with \"check\": how far the model is from times inside one host that its "
         "rates were not fitted to. Another hidden size is predicted to within 20 %. Another top-k, fewer tokens and "
         "more ranks are not, so times for few tokens or many GPUs are rough.")


def main() -> None:
    args = run.parse(run.parser(__doc__))
    run.main(SHOWN, args, rows)


if __name__ == "__main__":
    main()
