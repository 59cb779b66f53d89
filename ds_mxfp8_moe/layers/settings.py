# SPDX-License-Identifier: Apache-2.0
"""What conversion decides for a layer, of either kind."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..compute.crossover import break_even_tokens
from ..compute.formula import DTYPES, ExpertFormula
from ..compute.routing import Routes
from ..config import MXFP8MoEConfig, Recipe, resolve
from ..ffn.expert_ffn import ExpertFFN
from ..ffn.open_ffn import OpenFFN, OpenFormula
from ..ops.device import capability
from ..routing.watch import watch
from ..transport import Transport
from ..transport.choose import choose


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What conversion decided for one layer, and what follows from it.

    Attributes:
        num_local_experts: experts of one rank.
        device: where the layer runs.
        open_formula: the model's own functions, where no kernel computes the formula. None: kernels do.
        casts: how often the weights are cast for each forward and backward. 0: they are frozen, and kept.
    """

    name: str
    formula: ExpertFormula
    config: MXFP8MoEConfig
    num_local_experts: int
    device: torch.device
    open_formula: OpenFormula | None = None
    casts: float = 1
    _chosen: dict = field(default_factory=dict, init=False, repr=False, compare=False)  # the group and its transport

    @cached_property
    def recipe(self) -> Recipe:
        return resolve(self.config, self.device.type, capability(self.device))

    @cached_property
    def min_tokens_per_expert(self) -> float:
        """With fewer rows per expert on average, the layer computes in bf16. 0: it never does."""
        if not self.recipe.quantize_gemm:
            return 0
        given = self.config.min_tokens_per_expert
        return given if given is not None else break_even_tokens(
            self.formula, self.recipe, self.num_local_experts, self.device, self.casts)

    def choose_transport(self, group: ProcessGroup | None) -> Transport:
        """The layer's transport over its expert-parallel group. The first call chooses it, later calls return it.

        `group`: None means that this rank has all experts.
        """
        if group not in self._chosen:
            self._chosen.clear()
            self._chosen[group] = choose(group, self.name, self.config)
        return self._chosen[group]

    def with_casts(self, casts: float) -> "LayerSettings":
        """These settings with another number of `casts`."""
        changed = replace(self, casts=casts)
        changed._chosen.update(self._chosen)
        return changed

    @property
    def threshold(self) -> str:
        """`min_tokens_per_expert` in words. "": the layer always runs its recipe."""
        if self.min_tokens_per_expert == 0:
            return ""
        if math.isinf(self.min_tokens_per_expert):
            return "bf16 for batches of any size"
        return f"bf16 below {self.min_tokens_per_expert:.0f} tokens per expert"

    def ffn(self, layer: Any, x_TH: torch.Tensor, routes: Routes, chosen_E: torch.Tensor | None = None) -> ExpertFFN:
        """The function from tokens to tokens for one forward of the layer that has these settings.

        `chosen_E`: choices of each expert, also those that the layer's capacity dropped. None: the layer has none.
        """
        transport = self.choose_transport(layer.ep_group if layer.ep_size > 1 else None)
        if layer.mxfp8_samples == [] and layer.training:
            transport = watch(layer, x_TH, routes, transport, routes.counts_E() if chosen_E is None else chosen_E)
        optimizer = layer.mxfp8_sums and layer.mxfp8_sums()
        kind: type = ExpertFFN if self.open_formula is None else OpenFFN
        return kind(self.open_formula or self.formula, self.recipe, transport, layer.num_local_experts,
                    self.min_tokens_per_expert, self.name, kept=layer.mxfp8_kept if layer.training else None,
                    sum_of=optimizer and optimizer.sum_of, merge_aware=self.config.merge_aware,
                    turns=self.config.expert_turns, training=layer.training)

    def check_input(self, x: torch.Tensor, experts_dtype: torch.dtype, weights_cast: bool = False) -> None:
        """Raises ValueError or TypeError for hidden states that the layer's experts cannot take.

        `weights_cast`: the experts compute in the dtype of the tokens, as AutoEP's do.
        """
        if x.shape[-1] != self.formula.hidden_size:
            raise ValueError(f"{self.name}: the input has shape {tuple(x.shape)}; expected a last axis of "
                             f"{self.formula.hidden_size}, the layer's hidden size")
        fits = x.dtype in DTYPES and (weights_cast or x.dtype == experts_dtype) or torch.is_autocast_enabled(
            x.device.type)
        if not fits or experts_dtype not in DTYPES:
            raise TypeError(f"{self.name}: the input is {x.dtype} and the experts are {experts_dtype}; cast one of "
                            "them, or enable autocast. Experts must be bfloat16, float16 or float32")
