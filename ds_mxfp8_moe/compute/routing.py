# SPDX-License-Identifier: Apache-2.0
"""Routes: which token goes to which expert with which weight."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Routes:
    """One forward's routing of this rank's tokens.

    Attributes:
        expert_TK: int64 [T, K], global expert of each choice; -1 where the layer's capacity dropped it.
        weight_TK: float32 [T, K], the routing weight of each choice (differentiable).
        num_experts: experts across the expert-parallel group.
    """

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    num_experts: int

    def counts_E(self) -> torch.Tensor:
        """int64 [E]: choices kept for each expert."""
        return count(self.expert_TK, self.num_experts)


def count(expert: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 [E]: how often each expert id occurs, ids outside 0..E-1 left out. No host sync, integer sums only."""
    flat = expert.reshape(-1).long()
    counts = flat.new_zeros(num_experts + 1)
    counts.scatter_add_(0, torch.where((flat >= 0) & (flat < num_experts), flat, num_experts), torch.ones_like(flat))
    return counts[:num_experts]


def round_robin(routes: Routes) -> Routes:
    """Even routing for benchmarks (`force_load_balance`): choice i of all T*K goes to expert i mod E, weights stay."""
    expert_TK = torch.arange(routes.expert_TK.numel(), device=routes.expert_TK.device) % routes.num_experts
    return replace(routes, expert_TK=expert_TK.view_as(routes.expert_TK))
