# SPDX-License-Identifier: Apache-2.0
"""What people watch while a MoE model trains: the load of its experts, and what MXFP8 does to its tokens.

In one step of `every`, each converted layer takes a sample of its first micro-batch. Evaluations are not sampled. The
samples stay on the device until the step's end. Their sums over all ranks then go to DeepSpeed's monitors
(TensorBoard, W&B, CSV, Comet), as Train/MoE/<layer>/<name>:

    load_most, load_fewest      the most and the least loaded expert's choices, over the mean
    load_entropy                of the choices' distribution over experts: 1 if even, 0 if all go to one expert
    rank_most                   the most loaded rank's choices, over the mean
    dropped                     the share of choices that the layer's capacity dropped
    amax                        the largest absolute value among the tokens
    zero_blocks                 the share of MXFP8 blocks in which all values are 0
    saturated_blocks            the share of blocks whose largest value lies beyond what their scale can hold
    sqnr_db                     signal to quantisation noise of the tokens, in dB
    wait_ms, wait_ms_most       time for which a rank waits for its peers where a layer's forward begins: the mean over
                                ranks, and the rank that waits longest. The slowest rank waits least
    exchange_ms                 time of a rank in the forward's dispatch and combine, the mean over ranks

zero_blocks, saturated_blocks and sqnr_db come from a cast of up to SAMPLED tokens of each rank. A recipe without
quantisation lacks them. A layer whose experts are all on each rank lacks the times. transport/timed.py says what lies
between a time's beginning and its end. In other steps nothing is computed and nothing is timed.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from . import casts
from .config import Recipe
from .routing import Routes
from .transport import Transport
from .transport.deadline import answers_of_all, deadline_for
from .transport.timed import Timed

SAMPLED = 1024  # tokens of a rank
LARGEST = 448.0  # in e4m3
PREFIX = "Train/MoE"


@torch.compiler.disable
def watch(layer: Any, x_TH: torch.Tensor, routes: Routes, transport: Transport, chosen_E: torch.Tensor) -> Transport:
    """Takes a layer's sample. Returns the transport for this forward, which takes the times of its exchanges.

    Call it in training, if the layer's `mxfp8_samples` is an empty list. `chosen_E`: choices of each expert, also
    those that the layer's capacity dropped.
    """
    timed = Timed(transport) if layer.ep_size > 1 else None
    layer.mxfp8_samples.append((*sample(x_TH, routes, chosen_E, layer.mxfp8_settings.recipe), timed))
    return timed or transport


def sample(x_TH: torch.Tensor, routes: Routes, chosen_E: torch.Tensor,
           recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's sample, on the device.

    Returns:
        float32 [E + 7], to be summed over ranks: `chosen_E`; how many of them were dropped; tokens in the sample;
        blocks; blocks of zeros; saturated blocks; the sums of squares of the tokens and of their quantisation error.
        And float32 [1], of which the largest counts: the largest absolute value.
    """
    with torch.no_grad():
        dropped = chosen_E.sum() - routes.counts_E().sum()
        tokens_SH = x_TH[:SAMPLED].detach().float()
        amax = tokens_SH.abs().amax() if tokens_SH.numel() else tokens_SH.new_zeros(())
        figures = [dropped, amax.new_full((), len(tokens_SH)), *(amax.new_zeros(()) for _ in range(5))]
        if recipe.quantize_gemm and len(tokens_SH):
            figures[2:] = _of_cast(tokens_SH, recipe)
        return torch.cat([chosen_E.float(), torch.stack([x.float() for x in figures])]), amax.view(1)


def _of_cast(x_SH: torch.Tensor, recipe: Recipe) -> list[torch.Tensor]:
    quantized = casts.quantize(x_SH, recipe.block_size, recipe.scaling_mode)
    padded = torch.nn.functional.pad(x_SH, (0, -x_SH.shape[1] % recipe.block_size))
    amax_SB = padded.view(len(x_SH), -1, recipe.block_size).abs().amax(2)
    held_SB = LARGEST * torch.exp2(quantized.scale_bytes.float() - 127)
    noise_SH = x_SH - quantized.dequantize(torch.float32)
    return [amax_SB.new_full((), amax_SB.numel()), (amax_SB == 0).sum(), (amax_SB > held_SB).sum(),
            x_SH.square().sum(), noise_SH.square().sum()]


def load_figures(counts_E: Sequence[float], ep_size: int) -> dict[str, float]:
    """The figures of the load. Experts lie on ranks in their order, equally many on each of `ep_size`."""
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


class _Layer(NamedTuple):
    """What rank 0 has to know of a layer of any rank."""

    name: str
    num_experts: int
    ep_size: int


class Metrics:
    """Asks the layers of an engine for samples, and writes their figures. Every rank has one.

    Args:
        layers: this rank's converted layers. Each takes a sample in its next forward of training while its
            `mxfp8_samples` is an empty list. The stages of a pipeline have different ones, or none.
    """

    def __init__(self, engine: DeepSpeedEngine, layers: Sequence[Any], every: int):
        self.engine, self.every = engine, every
        self.layers = {layer.mxfp8_settings.name: layer for layer in layers}
        self.of_all_ranks: list[_Layer] | None = None
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
            mine = [_Layer(name, layer.num_local_experts * layer.ep_size, layer.ep_size)
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
            samples.append(of_layer)
            amaxes.append(amax)
            times.append([timed.wait_ms(), timed.exchange_ms(), 1.0] if timed else [0.0, 0.0, 0.0])
        times_L3 = torch.tensor(times, device=self.engine.device)
        sums, largest = torch.cat([*samples, times_L3.flatten()]), torch.cat([*amaxes, times_L3[:, 0]])
        with deadline_for(dist.get_world_group(), sums.device, "the sum of the metrics over all ranks"):
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            self._tell([len(of_layer) for of_layer in samples], sums.cpu(), largest.cpu())  # the host waits here

    def _tell(self, sizes: list[int], sums: torch.Tensor, largest: torch.Tensor) -> None:
        """`sizes`: of the samples of the L layers. What else is given lies behind each other in the layers' order."""
        L = len(sizes)
        *parts, times = sums.split([*sizes, 3 * L])
        self.engine.monitor.write_events([
            (f"{PREFIX}/{layer.name}/{name}", value, self.engine.global_samples)
            for layer, part, of_times, most in zip(self.of_all_ranks, parts, times.view(L, 3), largest.view(2, L).T,
                                                   strict=True)
            for name, value in figures_of([*part.tolist(), *of_times.tolist()], most.tolist(),
                                          layer.ep_size).items()])
