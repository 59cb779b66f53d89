# SPDX-License-Identifier: Apache-2.0
"""How long dispatch and combine take between nodes, by a model. No network was measured: scale.py shows the results.

Inside one host, a call takes

    fixed + bytes on links / link rate + bytes expanded / local rate

with three numbers for each transport and operation. They are fitted to the committed result files of
dispatch_combine.py. Between nodes, the network adds a latency, a time for each message, and bytes / network rate:

    flat, NCCL                                 links and network at once
    two hops, host wire                        the network, then NCCL inside the node
    two hops, host wire, peer memory inside    the network, then kernels inside the node
    two hops, NVSHMEM                          the network and the kernels at once, latencies of device-side puts

Bytes are of one rank, as a mean: all ranks get the same load. Dispatch is in MXFP8, combine in bf16.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from lib import results_file

GPUS_A_NODE, HIDDEN = 8, 7168
FLAT, NVLINK = "flat, NCCL", "flat, nvlink"
HOST, NVSHMEM = "two hops, host wire", "two hops, NVSHMEM"
PEER = "two hops, host wire, peer memory inside"
TWO_HOPS = (HOST, PEER, NVSHMEM)
DISPATCH, COMBINE = "dispatch", "combine"
WIRE = {DISPATCH: "mxfp8", COMBINE: "bf16"}
MEASURED = ("dispatch_combine_2ranks.json", "dispatch_combine_4ranks.json")
MB = 1e6


OTHERS = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())


class Fabric(NamedTuple):
    """A network, as published.yaml describes it."""

    line_gb_per_s: float
    efficiency: float
    host_latency_us: float
    device_latency_us: float
    message_us: float


FABRICS = {name: Fabric(**figures) for name, figures in OTHERS["fabrics"].items()}
INFINIBAND = next(iter(FABRICS))
NO_NETWORK = "NVLink 4, one host"


class Sample(NamedTuple):
    """A measured call. `local_mb`: one byte for each value that is expanded or added."""

    case: dict
    link_mb: float
    local_mb: float
    ms: float


class Rates(NamedTuple):
    """What a transport costs inside a host."""

    fixed_ms: float
    ms_per_link_mb: float
    ms_per_local_mb: float

    def ms(self, link_mb: float, local_mb: float) -> float:
        return self.fixed_ms + self.ms_per_link_mb * link_mb + self.ms_per_local_mb * local_mb


def samples(transport: str, operation: str) -> list[Sample]:
    """What was measured inside one host."""
    found = []
    for name in MEASURED:
        for group in results_file.groups(results_file.read(results_file.RESULTS / name), operation):
            row, case = group.rows.get(f"{transport}, {WIRE[operation]}"), group.case
            if row and "median_ms" in row:
                local_mb = case["tokens"] * case["top_k"] * case["hidden"] / MB
                found.append(Sample(case, row["bytes"] / MB, local_mb, row["median_ms"]))
    return found


def fit(measured: Iterable[Sample]) -> Rates:
    """Least squares of relative errors."""
    terms = torch.tensor([[1, one.link_mb, one.local_mb] for one in measured], dtype=torch.float64)
    ms = torch.tensor([[one.ms] for one in measured], dtype=torch.float64)
    return Rates(*torch.linalg.lstsq(terms / ms, torch.ones_like(ms)).solution.flatten().tolist())


def rates() -> dict[tuple[str, str], Rates]:
    """By (transport, operation)."""
    return {(transport, operation): fit(samples(transport, operation))
            for transport in ("collective", "nvlink") for operation in WIRE}


# What is fitted, of all that was measured. The rest is predicted: to within 20 % (NEAR), or worse (FAR).
NEAR = {"hidden 4096 from 2048 and 7168": lambda case: case["hidden"] != 4096}
FAR = {"top-k 6 from 8": lambda case: case["top_k"] == 8,
       "4096 tokens from 16384": lambda case: case["tokens"] == 16384,
       "4 ranks from 2": lambda case: case["ranks"] == 2}


def errors(measured: list[Sample], fitted: Callable[[dict], bool]) -> list[float]:
    """Relative errors of predictions, ascending, with rates from the samples whose case is `fitted`."""
    of_them = fit([one for one in measured if fitted(one.case)])
    return sorted(abs(of_them.ms(one.link_mb, one.local_mb) / one.ms - 1) for one in measured if not fitted(one.case))


class Traffic(NamedTuple):
    """What one rank sends in one call, in MB."""

    flat_links: float
    flat_network: float
    hops_links: float
    hops_network: float
    local: float


def traffic(operation: str, ranks_met: float, nodes_met: float, nodes: int, tokens: int,
            top_k: int) -> Traffic:
    """`ranks_met`, `nodes_met`: to how many ranks and nodes a token goes on average, its own ones included."""
    row = HIDDEN + HIDDEN // 32 + 4 * top_k if operation == DISPATCH else 2 * HIDDEN
    inside = row if operation == DISPATCH else 4 * HIDDEN  # partial sums travel in float32 inside a node
    away, others = (nodes - 1) / nodes, GPUS_A_NODE - 1
    mb = tokens / MB
    return Traffic(flat_links=ranks_met * others / (nodes * GPUS_A_NODE) * row * mb,
                   flat_network=ranks_met * away * row * mb, hops_links=ranks_met * others / GPUS_A_NODE * inside * mb,
                   hops_network=nodes_met * away * row * mb, local=top_k * HIDDEN * mb)


def times_ms(sent: Traffic, collective: Rates, nvlink: Rates, nodes: int, fabric: Fabric | None) -> dict[str, float]:
    """Milliseconds of each transport. `fabric`: None for one node, where there is nothing to hop over."""
    if fabric is None:
        return {FLAT: collective.ms(sent.flat_links, sent.local), NVLINK: nvlink.ms(sent.flat_links, sent.local)}

    def network(mb: float, peers: int, latency_us: float) -> float:
        return mb / (fabric.line_gb_per_s * fabric.efficiency) + (latency_us + peers * fabric.message_us) / 1000

    flat = network(sent.flat_network, (nodes - 1) * GPUS_A_NODE, fabric.host_latency_us)
    first_hop = network(sent.hops_network, nodes - 1, fabric.host_latency_us)
    put = network(sent.hops_network, nodes - 1, fabric.device_latency_us)
    return {
        FLAT: collective.ms(0, sent.local) + max(flat, collective.ms_per_link_mb * sent.flat_links),
        # Each hop of the host's wire is a collective with its fixed part.
        HOST: collective.fixed_ms + first_hop + collective.ms(sent.hops_links, sent.local),
        PEER: collective.fixed_ms + first_hop + nvlink.ms(sent.hops_links, sent.local),
        NVSHMEM: nvlink.ms(0, sent.local) + max(put, nvlink.ms_per_link_mb * sent.hops_links),
    }


# ---- what others publish ------------------------------------------------------------------------------------------

SOURCES = OTHERS["sources"]
PUBLISHED = DEEPEP, DEEPEP_FEW, *_ = tuple(SOURCES)
DEEPEP_GB_PER_S, FEW_TOKENS_US = (OTHERS[name] for name in ("deepep_gb_per_s", "few_tokens_us"))


def published_ms(case: dict, nodes_met: float) -> dict[str, float]:
    """What others publish for a case of 7168 values a token, top-8 and InfiniBand."""
    gpus, operation = case["gpus"], case["operation"]
    if case["fabric"] not in (INFINIBAND, NO_NETWORK) or case["top_k"] != 8:
        return {}
    if case["tokens"] == 128 and case["routing"] == "random":
        return {name: of[operation][gpus] / 1000 for name, of in FEW_TOKENS_US.items() if gpus in of[operation]}
    grouped = "4 of 8 groups" if gpus == 64 else "random"
    if case["tokens"] == 4096 and case["routing"] == grouped and gpus in DEEPEP_GB_PER_S[operation]:
        row = HIDDEN * (1 + 4 / 128 if operation == DISPATCH else 2)
        return {DEEPEP: 4096 * nodes_met * row / MB / DEEPEP_GB_PER_S[operation][gpus]}
    return {}
