# SPDX-License-Identifier: Apache-2.0
"""Lets DeepSpeed's gate choose given experts, and tells which ones it chose.

The functions of deepspeed/moe/sharded_moe.py choose by torch.argmax or torch.topk over the experts (dim=1). For a turn
they get a `torch` whose two functions return what the turn chooses. All else is the gate's own: scores, noise,
capacity, which tokens are dropped, and the auxiliary loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.moe import sharded_moe

from .patches import lent
from .routes import Turn


def gate_in_turn(turn: Turn, call: Callable, *args) -> Any:
    """call(*args), inside which a classic layer's gate makes this turn."""
    chooser = _Chooser(turn)
    with lent(sharded_moe, "torch", chooser):
        result = call(*args)
    turn.note(torch.cat(chooser.made, dim=1))
    return result


class _Chooser:
    """torch, but for the choice of experts."""

    def __init__(self, turn: Turn):
        self._turn = turn
        self.made: list[torch.Tensor] = []  # [T, 1] or [T, K]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def argmax(self, scores_TE: torch.Tensor, dim: int) -> torch.Tensor:
        """The first or second choice of each token, [T]."""
        return self._choose(torch.argmax(scores_TE, dim=dim, keepdim=True))[:, 0]

    def topk(self, scores_TE: torch.Tensor, k: Any, dim: int, **keys) -> tuple[torch.Tensor, torch.Tensor]:
        """All choices of each token, [T, K], and their scores. With dim=0 the gate selects the tokens of an expert."""
        if dim == 0:
            return torch.topk(scores_TE, k=k, dim=dim, **keys)
        expert_TK = self._choose(torch.topk(scores_TE.detach(), k=k, dim=dim, **keys)[1])
        return scores_TE.gather(dim, expert_TK), expert_TK

    def _choose(self, live_TK: torch.Tensor) -> torch.Tensor:
        start = sum(made.shape[1] for made in self.made)
        if self._turn.chosen_TK is not None:
            given_TK = self._turn.chosen_TK[:, start:start + live_TK.shape[1]].long()
            live_TK = torch.where(given_TK < 0, live_TK, given_TK)
        self.made.append(live_TK)
        return live_TK
