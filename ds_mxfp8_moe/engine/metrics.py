# SPDX-License-Identifier: Apache-2.0
"""What people watch while a MoE model trains: the load of its experts, and what MXFP8 does to its tokens.

In one step of `every`, each converted layer takes a sample of its first micro-batch. Evaluations are not sampled. The
samples stay on the device until the step's end. Their sums over all ranks then go to DeepSpeed's monitors
(TensorBoard, W&B, CSV, Comet), as Train/MoE/<layer>/<name>. The CSV monitor also gets the loads of all ranks and
experts, which engine/skew.py reads. examples/guides/metrics.md explains the figures. In other steps nothing is
computed and nothing is timed.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ..transport.deadline import answers_of_all, deadline_for
from .placement import fullest

PREFIX = "Train/MoE"
LOADS = ("rank_loads", "expert_loads")


def load_figures(loads_R: Sequence[float], loads_E: Sequence[float]) -> dict[str, float]:
    """The figures of the loads of ranks and experts."""
    total, E = sum(loads_E), len(loads_E)
    if not total:
        return {}
    entropy = -sum(load / total * math.log(load / total) for load in loads_E if load)
    return {"load_most": max(loads_E) * E / total, "load_fewest": min(loads_E) * E / total,
            "load_entropy": entropy / math.log(E) if E > 1 else 1.0, "rank_most": fullest(loads_R)}


def figures_of(sums: Sequence[float], largest: Sequence[float], ep_size: int) -> dict[str, float]:
    """A layer's figures by name.

    Args:
        sums: over ranks: the loads of the `ep_size` ranks; then of their samples, of their wait_ms and exchange_ms,
            and of 1 for each rank with times.
        largest: over ranks: the largest absolute value, and the longest wait_ms.
    """
    *loads, dropped, tokens, blocks, zeros, saturated, signal, noise, wait_ms, exchange_ms, timed = sums
    amax, longest_wait_ms = largest
    found = load_figures(loads[:ep_size], loads[ep_size:])
    if total := sum(loads[:ep_size]):
        found["dropped"] = dropped / total
    if tokens:
        found["amax"] = amax
    if blocks:
        found |= {"zero_blocks": zeros / blocks, "saturated_blocks": saturated / blocks}
    if noise and signal:
        found["sqnr_db"] = math.nan if math.isnan(signal / noise) else 10 * math.log10(signal / noise)
    if timed:
        found |= {"wait_ms": wait_ms / timed, "wait_ms_most": longest_wait_ms, "exchange_ms": exchange_ms / timed}
    return found


class Metrics:
    """Asks the layers of an engine for samples, and writes their figures. Every rank has one.

    Args:
        layers: this rank's converted layers. Each takes a sample in its next forward of training while its
            `mxfp8_samples` is an empty list. The stages of a pipeline have different ones, or none.
    """

    def __init__(self, engine: DeepSpeedEngine, layers: Sequence[Any], every: int):
        self.engine, self.every = engine, every
        self.layers = {layer.mxfp8_settings.name: layer for layer in layers}
        # The layers of any rank: name, experts and ep_size.
        self.of_all_ranks: list[tuple[str, int, int]] | None = None
        self._written = 0.0  # when, by the host's clock
        self._ask()

    def _ask(self) -> None:
        wanted = (self.engine.global_steps + 1) % self.every == 0
        for layer in self.layers.values():
            layer.mxfp8_samples = [] if wanted else None

    def after_step(self) -> None:
        """Writes the figures of the step that has ended, if it is one of `every`. Collective over all ranks then."""
        if self.engine.global_steps % self.every == 0:
            self._write()
        self._ask()

    def _write(self) -> None:
        if self.of_all_ranks is None:
            mine = [(name, layer.num_local_experts * layer.ep_size, layer.ep_size)
                    for name, layer in self.layers.items()]
            answers = answers_of_all(dist.get_world_group(), mine, "the first of the metrics' steps")
            self.of_all_ranks = list(dict.fromkeys(layer for of_rank in answers for layer in of_rank))
        if not self.of_all_ranks:
            return
        samples, amaxes, times = [], [], []
        for name, num_experts, ep_size in self.of_all_ranks:
            taken = self.layers[name].mxfp8_samples if name in self.layers else None
            # A layer that was not called, or only by other ranks, adds nothing.
            of_layer, amax, timed = taken[0] if taken else (torch.zeros(num_experts + 7, device=self.engine.device),
                                                            torch.zeros(1, device=self.engine.device), None)
            by_rank_E = of_layer[:num_experts]
            if name in self.layers and (placement := self.layers[name].mxfp8_placement) is not None:
                by_rank_E = placement.by_rank(by_rank_E)
            samples.append(torch.cat([by_rank_E.view(ep_size, -1).sum(1), of_layer]))
            amaxes.append(amax)
            times.append([timed.wait_ms(), timed.exchange_ms(), 1.0] if timed else [0.0, 0.0, 0.0])
        times_L3 = torch.tensor(times, device=self.engine.device)
        sums = torch.cat([*samples, times_L3.flatten()])
        # The largest of negative times is the shortest: one call for both.
        largest = torch.cat([*amaxes, times_L3[:, 0], torch.where(times_L3[:, 2] > 0, -times_L3[:, 1], -math.inf)])
        with deadline_for(dist.get_world_group(), sums.device, "the sum of the metrics over all ranks"):
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if dist.get_rank() > 0:
            return
        *parts, times_L3 = sums.cpu().split([*map(len, samples), times_L3.numel()])  # the host waits here
        times_L3, largest_L3 = times_L3.view(-1, 3), largest.cpu().view(3, -1).T
        figures, loads = self._figures_of_all_layers(times_L3, -largest_L3[:, 2]), []
        for (layer, _, ep_size), part, times, most in zip(
                self.of_all_ranks, map(torch.Tensor.tolist, parts), times_L3.tolist(), largest_L3[:, :2].tolist(),
                strict=True):
            found = figures_of([*part, *times], most, ep_size)
            figures |= {f"{layer}/{name}": value for name, value in found.items()}
            if "rank_most" in found:
                loads += [(f"{PREFIX}/{layer}/{name}", " ".join(f"{load:.0f}" for load in of_layer),
                           self.engine.global_steps)
                          for name, of_layer in zip(LOADS, (part[:ep_size], part[ep_size:-7]), strict=True)]
        self.engine.monitor.write_events([(f"{PREFIX}/{name}", value, self.engine.global_samples)
                                          for name, value in figures.items()])
        if self.engine.monitor.csv_monitor is not None:
            self.engine.monitor.csv_monitor.write_events(loads)

    def _figures_of_all_layers(self, times_L3: torch.Tensor, least_L: torch.Tensor) -> dict[str, float]:
        """`least_L`: the shortest exchange_ms of a rank."""
        found, now = {}, time.monotonic()
        if self._written:
            micro_batches = self.every * self.engine.gradient_accumulation_steps()
            found["micro_batch_ms"] = 1e3 * (now - self._written) / micro_batches
        self._written = now
        _, exchange_L, ranks_L = times_L3.T
        if ranks_L.any():
            waits_L = torch.where(ranks_L > 0, exchange_L - ranks_L * least_L, 0)
            found["exchange_wait_ms"] = waits_L.sum().item() / dist.get_world_size()
        return found
