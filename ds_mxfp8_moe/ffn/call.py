# SPDX-License-Identifier: Apache-2.0
"""What forward and backward of one call of an expert FFN share: `Call`, and the weights in the order in which autograd
takes them.

expert_ffn.py explains the letters in tensor names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.utils.logging import warning_once

from ..compute import casts
from ..compute.formula import ROLES, LowRank
from ..compute.mx import MXTensor
from ..compute.mxfp4 import MXFP4Weights
from ..compute.recorded import Weights
from ..config import Recipe
from .expert_math import ExpertMath, Projection, unquantized

ROLES_OF = {"up": ("gate", "up"), "down": ("down", )}  # by GEMM
BIAS_OF = {role: f"{role}_bias" for role in ("gate", "up", "down")}


@dataclass(frozen=True, eq=False)
class Call:
    """What dispatch, arithmetic, combine and backward of one call share.

    Attributes:
        ffn: the ExpertFFN that is called.
        layout: of the weights, see `flattened`.
        adapted: the GEMMs that have adapters.
        frozen: FrozenWeights.operands. None: the weights are not held in a quantized format alone.
        autocast: the caller's dtype under autocast. None: it has none.
    """

    ffn: Any
    math: ExpertMath
    layout: tuple
    adapted: tuple[str, ...]
    frozen: dict[str, MXTensor | MXFP4Weights] | None
    autocast: torch.dtype | None = None

    def unquantized(self) -> "Call":
        """The same call where experts get few tokens."""
        _warn_of_few_tokens(self.ffn.min_tokens_per_expert)
        return replace(self, math=replace(self.math, recipe=unquantized(self.math.recipe)))

    def plan(self, expert_TK: torch.Tensor, x_TH: torch.Tensor, tensors: Sequence[torch.Tensor],
             backward: bool) -> tuple[Any, "Call", list[Projection]]:
        """The plan of a forward's exchange; the call, unquantized if experts get few tokens; and its `projections`.

        `backward`: whether a backward follows.
        """
        ffn, ahead = self.ffn, []

        def meanwhile() -> None:
            """While the host waits for the counts, the device quantizes weights."""
            if not ffn.has_few_tokens(expert_TK):  # else the call will probably run unquantized
                ahead.extend(self.projections(tensors, transposed=False, quantized=True))

        rows = _rows_in_words(x_TH.shape[1], x_TH.dtype, ffn.recipe, ffn.min_tokens_per_expert, backward)
        plan = ffn.transport.plan(expert_TK, ffn.num_local_experts, meanwhile, rows)
        call = self
        if plan.tokens_per_expert < ffn.min_tokens_per_expert:
            call = self.unquantized()
            ahead.clear()
        return plan, call, ahead or call.projections(tensors, transposed=False)

    def projections(self, tensors: Sequence[torch.Tensor], transposed: bool,
                    quantized: bool = False) -> list[Projection]:
        """The GEMMs "up" and "down". Their weights are quantized if the layer's calls share quantized weights.

        Args:
            tensors: adapters' factors, and flat weights.
            transposed: the GEMMs contract over the weights' second to last axis, as backward's do.
            quantized: quantizes the weights in any case, if the recipe does.
        """
        count = 2 * len(self.adapted)
        updates = {name: LowRank(*tensors[2 * i:2 * i + 2]) for i, name in enumerate(self.adapted)}
        by_role = unflattened(self.layout, tensors[count:])
        found = {name: self.projection(name, by_role, updates.get(name)) for name in ROLES_OF}
        kept = self.kept(tensors[count:], transposed)
        if kept is None and quantized and self.math.recipe.quantize_gemm and self.frozen is None:
            kept = {}
        return [one if kept is None else self.quantized(one, name, kept, transposed) for name, one in found.items()]

    def kept(self, weights: Sequence[torch.Tensor], transposed: bool) -> dict[str, MXTensor] | None:
        """The quantized weights that the layer's calls share, by GEMM. None: they share none."""
        if self.ffn.kept is None or not self.math.recipe.quantize_gemm or self.frozen is not None:
            return None
        matrices = sum(size or 1 for role, size in self.layout if not role.endswith("_bias"))  # biases come last
        return self.ffn.kept.of(weights[:matrices], transposed)

    def quantized(self, one: Projection, name: str, kept: dict[str, MXTensor], transposed: bool) -> Projection:
        """The projection with quantized weights, which are in `kept` afterwards."""
        held = self.ffn.kept is not None and self.ffn.kept.transposes
        if name not in kept:
            kept[name] = self.math.quantize_weights(one.weights, transposed and not held)
        return one._replace(weights=kept[name], held=held)

    def projection(self, name: str, by_role: dict, update: LowRank | None) -> Projection:
        """The GEMM of this name, with weights in high precision if they are no FrozenWeights.

        `update`: the adapter's factors, in their own dtype.
        """
        adapter = update and LowRank(*(factor.to(self.math.dtype) for factor in update))
        roles = ROLES_OF[name] if self.frozen is not None or "gate" in by_role or name == "down" else ("up", )
        biases = tuple([by_role.get(BIAS_OF[role]) for role in roles])
        if self.frozen is not None:
            weights = self.frozen[name]
            return Projection(roles, weights.dtype, weights, True, biases, adapter,
                              update if self.ffn.merge_aware else None)
        stacks = tuple([by_role[role] for role in roles])
        weights = Weights(stacks, self.math.recipe.quantize_gemm)
        return Projection(roles, casts.sample(stacks[0]).dtype, weights, False, biases, adapter)


def flattened(weights: dict[str, torch.Tensor | Sequence[torch.Tensor] | None]) -> tuple[tuple, list[torch.Tensor]]:
    """The tensors of weights by role in a flat list, as autograd takes them, and their layout.

    The layout has a pair (role, size) for each role: `size` tensors, or one stacked tensor [E, ...] if `size` is 0.
    """
    layout, tensors = [], []
    for role in ROLES:
        value = weights.get(role)
        if isinstance(value, torch.Tensor):
            layout.append((role, 0))
            tensors.append(value)
        elif value is not None:
            layout.append((role, len(value)))
            tensors += value
    return tuple(layout), tensors


def unflattened(layout: tuple, flat: Sequence) -> dict:
    """The inverse of `flattened`: role -> one stacked tensor, or E of them."""
    found, start = {}, 0
    for role, size in layout:
        found[role] = flat[start] if size == 0 else tuple(flat[start:start + size])
        start += size or 1
    return found


def roles_needed(layout: tuple, needs: Sequence[bool]) -> frozenset[str]:
    """The roles of which a tensor needs a gradient. `needs`: of each tensor of the layout."""
    return frozenset(role for role, need in unflattened(layout, needs).items()
                     if (need if isinstance(need, bool) else any(need)))


def flattened_gradients(layout: tuple, grads: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """Stacked gradients by role in the order of `flattened`. None: a role has none."""
    flat = []
    for role, size in layout:
        grad = grads.get(role)
        flat += [grad] if size == 0 else list(grad.unbind(0)) if grad is not None else [None] * size
    return flat


@lru_cache(maxsize=1024)
def _rows_in_words(hidden_size: int, dtype: torch.dtype, recipe: Recipe, fewest: float, backward: bool) -> str:
    """Describes the properties of rows that must be equal on all ranks: the `rows` of Transport.plan.

    `backward`: whether a backward follows. A rank that evaluates alone would meet its peers' training otherwise.
    """
    formats = f"{recipe.dispatch_fwd}/{recipe.combine_fwd}, gradients {recipe.combine_bwd}/{recipe.dispatch_bwd}"
    mode = "" if backward else ", without gradients"
    blocks = f", blocks of {recipe.block_size}" if "mxfp8" in formats else ""
    return f"tokens of {hidden_size} {dtype} as {formats}{blocks}, bf16 below {fewest:g} an expert{mode}"


def _warn_of_few_tokens(fewest: float) -> None:
    """Warns once for each threshold. The start-up lines name the threshold of each layer."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        when = "on every batch" if math.isinf(fewest) else f"where experts get fewer than {fewest:.0f} tokens each"
        warning_once(f"mxfp8_moe: MoE layers run the bf16 recipe {when}, because that is faster there. "
                     'Write "min_tokens_per_expert": 0 to have MXFP8 on every batch')
