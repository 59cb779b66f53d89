# SPDX-License-Identifier: Apache-2.0
"""The contract of transformers' stacked experts, and the layout in which this package holds their weights.

transformers marks the class of such a module by `use_experts_implementation` (integrations/moe.py). A MoE block calls
it as `experts(hidden_states_TH, top_k_index_TK, top_k_weights_TK)`. Flags of the module say how its weights lie:

    gate_up_proj or up_proj    [E, G, H], or [E, H, G] if is_transposed. G is 2F if has_gate, else F
    down_proj                  [E, H, F], or [E, F, H] if is_transposed
    ..._bias                   [E, G] and [E, H], if has_bias
    is_concatenated            all of gate comes before all of up in G. Else they take turns. Early releases, such as
                               5.6, lack this flag

This package holds three weights, under the names that DeepSpeed's checkpoints know: w1 and w3, [E, G / 2, H] each, and
w2 [E, H, F]. With a gate, w1 is the gate and w3 is up. Without, they are the first and the second half of `up_proj`.
"""

from dataclasses import dataclass

import torch
from torch import nn

FLAGS = ("has_gate", "has_bias", "is_transposed")
DOWN = "down_proj"
SPREAD_NAMES = ("w1", "w2", "w3")  # the names of gate, down and up in spread experts


@dataclass(frozen=True)
class Layout:
    """How a module of stacked experts holds its weights."""

    has_gate: bool
    is_transposed: bool
    is_concatenated: bool

    @classmethod
    def of(cls, experts: nn.Module) -> "Layout":
        """The layout by the module's flags."""
        return cls(experts.has_gate, experts.is_transposed, is_concatenated(experts) or not experts.has_gate)

    @property
    def up(self) -> str:
        """The name of the first GEMM's weight."""
        return "gate_up_proj" if self.has_gate else "up_proj"

    @property
    def names(self) -> tuple[str, str]:
        """The names of both weights."""
        return self.up, DOWN

    def split(self, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """w1, w2 and w3, as views of both weights."""
        w1, w3 = self.split_up(up)
        return w1, self.split_down(down), w3

    def split_up(self, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """w1 and w3, as views of the first GEMM's weight."""
        return self.halves(up.transpose(1, 2) if self.is_transposed else up)

    def split_down(self, down: torch.Tensor) -> torch.Tensor:
        """w2, as a view of the second GEMM's weight; and that weight, of w2."""
        return down.transpose(1, 2) if self.is_transposed else down

    def halves(self, up_EG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both halves along dim 1 of a tensor [E, G] or [E, G, H], as views."""
        return up_EG.chunk(2, dim=1) if self.is_concatenated else (up_EG[:, 0::2], up_EG[:, 1::2])

    def join_halves(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The inverse of `halves`."""
        halves = [first, second]
        return torch.cat(halves, dim=1) if self.is_concatenated else torch.stack(halves, dim=2).flatten(1, 2)

    def join_up(self, w1: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        """The first GEMM's weight."""
        up = self.join_halves(w1, w3)
        return up.transpose(1, 2).contiguous() if self.is_transposed else up


def is_concatenated(experts: nn.Module) -> bool | None:
    """The flag of that name. Where a release lacks it, transformers' own gate, which takes halves, is proof enough.

    None: the experts have a gate of their own and no flag.
    """
    flag = getattr(experts, "is_concatenated", None)
    if flag is None:
        gate = getattr(type(experts), "_apply_gate", None)
        flag = getattr(gate, "__module__", None) == "transformers.integrations.moe" or None
    return flag


def is_stacked(module: nn.Module) -> bool:
    """Whether a module obeys the contract."""
    if not all(isinstance(vars(module).get(flag), bool) for flag in FLAGS) or (
            not isinstance(is_concatenated(module), bool)):
        return False
    weights = [getattr(module, name, None) for name in Layout.of(module).names]
    return all(isinstance(p, nn.Parameter) and len(getattr(p, "ds_shape", p.shape)) == 3 for p in weights)


def shape_of(weight: torch.Tensor) -> torch.Size:
    """The shape of a weight, also if ZeRO-3 has partitioned it."""
    return getattr(weight, "ds_shape", weight.shape)
