# SPDX-License-Identifier: Apache-2.0
"""Chooses on which ranks experts lie, by the tokens that they got.

Routers prefer some experts for long, and a step waits for the fullest rank. `balanced` swaps experts of that rank with
those of others, one pair after the other, and begins with the placement that is. A placement from scratch has the same
balance, within 0.1 % over zipf, lognormal and clustered loads of 64 to 256 experts, and moves three times as many.
"""

import math
import time
from collections.abc import Sequence
from statistics import mean

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups

from ..compat import optimizer_parts
from ..config import ds_setting
from ..layers.classic import MXFP8MOELayer
from ..layers.experts import MXFP8Experts
from ..layers.placement import Placement
from ..ops.log import log_on_rank_0
from ..transport.deadline import deadline_for
from .moving import move_experts, move_home

WINDOW = 4  # steps whose loads decide
EVERY = 100  # steps from one decision to the next. The first one ends the first window
SMALLEST_GAIN = 0.05  # of the fullest rank's load. A smaller one does not pay for the move before the next decision
SMALLEST_SWAP = 0.01  # of a rank's mean load, by which a swap of two experts has to lower the highest one


def obstacle(engine: DeepSpeedEngine, layers: Sequence[MXFP8Experts | MXFP8MOELayer]) -> str | None:
    """Why experts of these layers cannot be moved. None: they can."""
    if not engine._mxfp8.steps or not hasattr(engine.optimizer, "step"):
        return "the engine makes no steps of which it knows"
    if ds_setting(engine, "zero_optimization", "zenflow"):
        return "ZenFlow changes weights between the optimizer's steps"
    trained = any(is_moe_param(p) and p.requires_grad for layer in layers for p in layer.experts.parameters())
    return optimizer_parts.obstacle(engine.optimizer) if trained else None


class Placing:
    """Moves experts of an engine's layers after some of its steps.

    The loads of a window of steps are counted on the device. The host waits for them once, at the window's end.

    Args:
        layers: whose experts are spread over several ranks.
    """

    def __init__(self, engine: DeepSpeedEngine, layers: Sequence[MXFP8Experts | MXFP8MOELayer]):
        self.engine, self.layers, self.steps = engine, layers, 0
        # Users' CUDA graphs may capture both, so they stay where they are in memory.
        self._loads = []
        for layer in layers:
            of, device = (layer.ep_size, layer.num_local_experts), layer.mxfp8_settings.device
            layer.mxfp8_placement = Placement(*of, device)
            self._loads.append(torch.zeros(math.prod(of), dtype=torch.int64, device=device))
        self._count()

    def close(self) -> None:
        """Moves experts home, and ends its part in the layers. Collective over all ranks."""
        move_home(self.engine)
        for layer in self.layers:
            layer.mxfp8_placement = layer.mxfp8_loads = None

    def after_step(self) -> None:
        """Moves experts, if a window ends with this step and the move pays. Collective over all ranks then."""
        self.steps += 1
        if self._left == 0:
            self.decide()
        self._count()

    def decide(self) -> None:
        """Moves experts by the loads of the window so far, if it pays. Ends the window. Collective over all ranks."""
        if self.layers[0].mxfp8_loads is not None:
            self._place(self._loads_of_all())
            for layer in self.layers:
                layer.mxfp8_loads = None

    @property
    def _left(self) -> int:
        """Steps until the next decision."""
        return (WINDOW - self.steps) % EVERY

    def _count(self) -> None:
        """Begins or ends a window."""
        counts = (self._left or EVERY) <= WINDOW
        for layer, loads_E in zip(self.layers, self._loads, strict=True):
            if counts and layer.mxfp8_loads is None:
                layer.mxfp8_loads = loads_E.zero_()
            elif not counts:
                layer.mxfp8_loads = None

    def _loads_of_all(self) -> list[list[int]]:
        """The loads of each layer's experts, by their numbers, up to a factor. The same on all ranks that have them.
        """
        loads = torch.cat(self._loads)
        for layer in {layer.ep_size: layer for layer in self.layers}.values():
            # Over the ranks of the group, then over those that have copies of the same experts.
            for group in (layer.ep_group, groups._get_expert_data_parallel_group(f"ep_size_{layer.ep_size}")):
                with deadline_for(group, loads.device, "the sum of the experts' loads"):
                    dist.all_reduce(loads, group=group)
        return [part.tolist() for part in loads.cpu().split([len(loads_E) for loads_E in self._loads])]

    def _place(self, loads: list[list[int]]) -> None:
        wanted, before, after, moved = {}, [], [], 0
        for layer, loads_E in zip(self.layers, loads, strict=True):
            now = layer.mxfp8_placement.experts_RL
            found = better(loads_E, now)
            if found is not now:
                wanted[layer] = found
                before.append(fullest(rank_loads(loads_E, now)))
                after.append(fullest(rank_loads(loads_E, found)))
                moved += sum(a != b for rows in zip(now, found, strict=True) for a, b in zip(*rows, strict=True))
        if not wanted:
            return
        start = time.monotonic()
        move_experts(self.engine, wanted)
        get_accelerator().synchronize()
        seconds = time.monotonic() - start
        log_on_rank_0(f"mxfp8_moe: {moved} experts of {len(wanted)} layers moved to other ranks in {seconds:.2f} s. "
                      f"In the last {WINDOW} steps, the fullest rank of these layers had {mean(before):.2f} times the "
                      f"mean load, on average. With the new placement it would have had {mean(after):.2f} times")


def balanced(loads_E: Sequence[float], experts_RL: Sequence[Sequence[int]]) -> list[list[int]]:
    """A placement in which the fullest rank has less to do. The same on every rank that has the same numbers.

    Args:
        loads_E: of the experts.
        experts_RL: the placement that is, by rank and slot.
    """
    found, of_rank = [[*of_rank] for of_rank in experts_RL], rank_loads(loads_E, experts_RL)
    least = SMALLEST_SWAP * sum(loads_E) / len(found)
    while True:
        full = max(range(len(found)), key=of_rank.__getitem__)
        # (the higher load of the two ranks after the swap, other rank, slot)
        swaps = ((max(of_rank[full] - more, of_rank[r] + more), r, slot) for r in range(len(found)) if r != full
                 for slot, expert in enumerate(found[full]) if (more := loads_E[expert] - loads_E[found[r][slot]]) > 0)
        after, r, slot = min(swaps, default=(of_rank[full], 0, 0))
        if of_rank[full] - after <= least:
            return found
        mine, other = found[full][slot], found[r][slot]
        found[full][slot], found[r][slot] = other, mine
        of_rank[full] -= loads_E[mine] - loads_E[other]
        of_rank[r] += loads_E[mine] - loads_E[other]


def better(loads_E: Sequence[float], experts_RL: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """`balanced`, or the placement that is, if the fullest rank would have hardly less to do."""
    found = balanced(loads_E, experts_RL)
    before, after = (max(rank_loads(loads_E, placement)) for placement in (experts_RL, found))
    return found if before - after > SMALLEST_GAIN * before else experts_RL


def predicted(steps: Sequence[int], loads_SE: Sequence[Sequence[float]], num_ranks: int) -> list[list[float]]:
    """The loads of ranks if "balanced" had placed the experts, each time from the steps before.

    Args:
        steps: ascending, those that have loads. If that is not every step, a window lasts longer, and decisions wait
            for its end.

    Returns:
        [S - WINDOW, R], in the steps that follow the first decision.
    """
    placement, decided, found = at_home(num_ranks, len(loads_SE[0]) // num_ranks), -EVERY, []
    for s in range(WINDOW, len(steps)):
        if steps[s - 1] - decided >= EVERY:
            placement = better([sum(of_expert) for of_expert in zip(*loads_SE[s - WINDOW:s], strict=True)], placement)
            decided = steps[s - 1]
        found.append(rank_loads(loads_SE[s], placement))
    return found


def at_home(num_ranks: int, num_local_experts: int) -> Sequence[Sequence[int]]:
    """The placement of "fixed"."""
    return [range(r * num_local_experts, (r + 1) * num_local_experts) for r in range(num_ranks)]


def fullest(loads_R: Sequence[float]) -> float:
    """The load of the fullest rank over the mean. 1 if there are none."""
    return max(loads_R) * len(loads_R) / sum(loads_R) if any(loads_R) else 1.0


def rank_loads(loads_E: Sequence[float], experts_RL: Sequence[Sequence[int]]) -> list[float]:
    """The load of each rank."""
    return [sum(loads_E[expert] for expert in of_rank) for of_rank in experts_RL]
