# SPDX-License-Identifier: Apache-2.0
"""What people watch while a MoE model trains: the load of its experts, and what MXFP8 does to its tokens.

In one step of `every`, each converted layer takes a sample of its first micro-batch. Evaluations are not sampled. The
samples stay on the device until the step's end. Their sums over all ranks then go to DeepSpeed's monitors
(TensorBoard, W&B, CSV, Comet), as Train/MoE/<layer>/<name>. examples/guides/metrics.md explains the figures. In other
steps nothing is computed and nothing is timed.
"""

import math
from collections.abc import Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ..transport.deadline import answers_of_all, deadline_for

PREFIX = "Train/MoE"


def load_figures(counts_E: Sequence[float], ep_size: int) -> dict[str, float]:
    """The figures of the load. `counts_E`: of the experts of the first of `ep_size` ranks, of the second, and so on.
    """
    total, E = sum(counts_E), len(counts_E)
    if not total:
        return {}
    mean, of_rank = total / E, E // ep_size
    ranks = [sum(counts_E[i:i + of_rank]) for i in range(0, E, of_rank)]
    entropy = -sum(count / total * math.log(count / total) for count in counts_E if count)
    return {"load_most": max(counts_E) / mean, "load_fewest": min(counts_E) / mean,
            "load_entropy": entropy / math.log(E) if E > 1 else 1.0, "rank_most": max(ranks) * ep_size / total}


def figures_of(sums: Sequence[float], largest: Sequence[float], ep_size: int) -> dict[str, float]:
    """A layer's figures by name.

    Args:
        sums: over ranks: of their samples, of their wait_ms and exchange_ms, and of 1 for each rank with times.
        largest: over ranks: the largest absolute value, and the longest wait_ms.
    """
    *chosen_E, dropped, tokens, blocks, zeros, saturated, signal, noise, wait_ms, exchange_ms, timed = sums
    amax, longest_wait_ms = largest
    found = load_figures(chosen_E, ep_size)
    if total := sum(chosen_E):
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
        for name, num_experts, _ in self.of_all_ranks:
            taken = self.layers[name].mxfp8_samples if name in self.layers else None
            # A layer that was not called, or only by other ranks, adds nothing.
            of_layer, amax, timed = taken[0] if taken else (torch.zeros(num_experts + 7, device=self.engine.device),
                                                            torch.zeros(1, device=self.engine.device), None)
            if name in self.layers and (placement := self.layers[name].mxfp8_placement) is not None:
                of_layer = torch.cat([placement.by_rank(of_layer[:num_experts]), of_layer[num_experts:]])
            samples.append(of_layer)
            amaxes.append(amax)
            times.append([timed.wait_ms(), timed.exchange_ms(), 1.0] if timed else [0.0, 0.0, 0.0])
        times_L3 = torch.tensor(times, device=self.engine.device)
        sums, largest = torch.cat([*samples, times_L3.flatten()]), torch.cat([*amaxes, times_L3[:, 0]])
        with deadline_for(dist.get_world_group(), sums.device, "the sum of the metrics over all ranks"):
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if dist.get_rank() > 0:
            return
        *parts, times_L3 = sums.cpu().split([*map(len, samples), times_L3.numel()])  # the host waits here
        of_layers = zip(self.of_all_ranks, parts, times_L3.view(-1, 3), largest.cpu().view(2, -1).T, strict=True)
        self.engine.monitor.write_events([
            (f"{PREFIX}/{layer}/{name}", value, self.engine.global_samples)
            for (layer, _, ep_size), part, times, most in of_layers
            for name, value in figures_of([*part.tolist(), *times.tolist()], most.tolist(), ep_size).items()])
