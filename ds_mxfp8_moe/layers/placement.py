# SPDX-License-Identifier: Apache-2.0
"""Which rank of an expert-parallel group holds which of a layer's experts.

At home, rank r holds the experts r * L, r * L + 1, ... in its slots 0, 1, ..., L - 1. engine/moving.py moves experts
to other ranks, and engine/placement.py chooses to which. An expert keeps its slot: only its rank changes. So what
belongs to it changes places with equal parts of other ranks' tensors, and all layouts stay.

All that users see has the model's own numbers of experts: routers, recorded routes, metrics, files. The numbers that
an exchange reads are those of slots, rank * L + slot. `placed` is the one place where these are made.

Letters: E experts, R ranks, L experts of a rank (E = R * L), T tokens, K choices of a token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..compute.routing import Routes
from ..routing.routes import is_recomputed


class Placement:
    """The experts of each rank.

    `move` changes tensors in place, so that a CUDA graph that has captured a layer goes on with the new placement.

    Attributes:
        home_RL: the model's numbers of the experts, by rank and slot, when they are at home.
        experts_RL: where they are.
    """

    def __init__(self, num_ranks: int, num_local_experts: int, device: torch.device):
        """They are at home. `device`: of the layer."""
        numbers = torch.arange(num_ranks * num_local_experts + 1, device=device)
        self._experts, self._slot_of = numbers[:-1], numbers.clone()  # the last one is of no expert
        self.home_RL = self.experts_RL = tuple(map(tuple, self._experts.view(num_ranks, -1).tolist()))

    def move(self, experts_RL: Sequence[Sequence[int]]) -> None:
        """From now on the experts are there."""
        self.experts_RL = tuple(map(tuple, experts_RL))
        self._experts.copy_(torch.tensor(self.experts_RL).flatten())
        self._slot_of[:-1] = self._experts.argsort()

    @property
    def is_home(self) -> bool:
        return self.experts_RL == self.home_RL

    def slots_of(self, expert_TK: torch.Tensor) -> torch.Tensor:
        """The numbers of slots of these experts. Ids outside of 0..E-1, which stand for none, stay outside."""
        return self._slot_of[expert_TK.clamp(-1, len(self._experts))]

    def by_rank(self, whole: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor [E, ...] in the order of slots."""
        return whole.index_select(0, self._experts)

    def of_rank(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A copy of the parts [L, ...] of a rank's experts in a tensor [E, ...], by slot."""
        return whole.index_select(0, self._experts.view(len(self.experts_RL), -1)[rank])


def placement_of(layer: Any) -> Placement | None:
    """None: the layer's experts are always at home. `layer`: a block, its experts, or a classic layer's inner."""
    return getattr(layer, "mxfp8_placement", None) or getattr(layer.experts, "mxfp8_placement", None)


def experts_of(layer: Any, rank: int) -> Sequence[int]:
    """The model's numbers of the experts that a rank of the layer's group holds, by slot. `layer`: as there."""
    placement, L = placement_of(layer), layer.num_local_experts
    return range(rank * L, (rank + 1) * L) if placement is None else placement.experts_RL[rank]


def in_order(layer: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[E, ...] by the model's numbers, of what each rank has of its experts, [L, ...]. `layer`: as there."""
    if len(parts) == 1 or placement_of(layer) is None:
        return parts[0] if len(parts) == 1 else torch.cat([*parts])
    found = {number: one for rank, part in enumerate(parts)
             for number, one in zip(experts_of(layer, rank), part, strict=True)}
    return torch.stack([found[number] for number in range(len(found))])


def own_part(experts: Any, whole: torch.Tensor) -> torch.Tensor:
    """Of a tensor [E, ...] the parts [L, ...] of this rank's experts. A view, if they are always at home.

    `experts`: MXFP8Experts.
    """
    if (placement := experts.mxfp8_placement) is not None:
        return placement.of_rank(whole, experts.ep_rank)
    return whole.narrow(0, experts.ep_rank * experts.num_local_experts, experts.num_local_experts)


def placed(layer: Any, routes: Routes) -> Routes:
    """The routes as the layer's exchange reads them: in numbers of slots. Counts them, if the layer is watched."""
    if layer.mxfp8_loads is not None and layer.training and not is_recomputed():
        layer.mxfp8_loads += routes.counts_E()
    placement = layer.mxfp8_placement
    return routes if placement is None else replace(routes, expert_TK=placement.slots_of(routes.expert_TK))
