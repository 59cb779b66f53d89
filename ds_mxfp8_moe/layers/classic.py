# SPDX-License-Identifier: Apache-2.0
"""The inner layer of `deepspeed.moe.layer.MoE`: its gate and parameters, exchange and experts in MXFP8."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ReferenceType

import torch
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch.distributed import ProcessGroup

from ..compute.formula import DTYPES, ExpertFormula, ExpertWeights
from ..compute.routing import Routes, round_robin
from ..config import MXFP8MoEConfig, Recipe
from ..ffn.expert_ffn import ExpertFFN
from ..ffn.kept_weights import KeptWeights
from ..ffn.open_ffn import OpenFFN, OpenFormula
from ..transport import Transport
from ..transport.choose import choose
from ..transport.deadline import deadline_for, tell_peers_on_error
from .patches import lent
from .recognise import ExpertsAtConversion
from .watch import watch


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What conversion decided for one layer.

    Attributes:
        min_tokens_per_expert: with fewer rows per expert on average, the layer computes in bf16. 0: it never does.
        open_formula: the model's own functions, where no kernel computes the formula. None: kernels do.
    """

    name: str
    formula: ExpertFormula
    recipe: Recipe
    config: MXFP8MoEConfig
    min_tokens_per_expert: float
    open_formula: OpenFormula | None = None
    _chosen: dict = field(default_factory=dict, init=False, repr=False, compare=False)  # the group and its transport

    def choose_transport(self, group: ProcessGroup | None) -> Transport:
        """The layer's transport over its expert-parallel group. The first call chooses it, later calls return it.

        `group`: None means that this rank has all experts.
        """
        if group not in self._chosen:
            self._chosen.clear()
            self._chosen[group] = choose(group, self.name, self.config)
        return self._chosen[group]

    def below(self, fewest: float) -> "LayerSettings":
        """These settings with another `min_tokens_per_expert`."""
        changed = replace(self, min_tokens_per_expert=fewest)
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
                    sum_of=optimizer and optimizer.sum_of, training=layer.training)

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


class MXFP8MOELayer(MOELayer):
    """The inner layer of a converted MoE: routes with DeepSpeed's gate, computes with `ExpertFFN`."""

    mxfp8_settings: LayerSettings
    mxfp8_experts: ExpertsAtConversion
    mxfp8_weights: ExpertWeights
    mxfp8_kept: KeptWeights | None = None
    mxfp8_sums: ReferenceType | None = None  # to an optimizer of engine/zero.py
    mxfp8_samples: list | None = None  # engine/metrics.py

    @torch.compiler.disable  # layers differ too much to share what is compiled
    def forward(self, *input: torch.Tensor, **kwargs) -> torch.Tensor:
        """As in MOELayer: `input` is the hidden states [..., H] and an optional mask of used tokens [T].

        Collective over the expert-parallel group. Ranks may bring different numbers of tokens, or none.
        """
        hidden_states, used_token = input[0], input[1] if len(input) > 1 else None
        self._check_input(hidden_states)
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        y_TH = self._compute(x_TH, self._route(x_TH, used_token))
        return y_TH.reshape(hidden_states.shape)

    @tell_peers_on_error
    def _check_input(self, x: torch.Tensor) -> None:
        """Raises an error, before any collective, if the experts cannot take the input or have changed."""
        settings = self.mxfp8_settings
        self.mxfp8_experts.check(settings.name, self.experts)
        settings.check_input(x, self.mxfp8_weights.dtype)
        if self.ep_size > 1 and self.ep_group is None:
            raise RuntimeError(f"{settings.name}: expert parallelism over {self.ep_size} ranks has no process group "
                               "yet: pass the model to deepspeed.initialize, or call set_deepspeed_parallelism()")
        if groups._get_expert_model_parallel_world_size() > 1 and bwc_tensor_model_parallel_world_size(groups.mpu) > 1:
            raise RuntimeError(f"{settings.name}: its experts have become tensor-parallel, which this path does not "
                               "compute: convert after deepspeed.initialize, which leaves such layers as they are")

    def _route(self, x_TH: torch.Tensor, used_token) -> Routes:
        """DeepSpeed's own gating, bit for bit; sets l_aux and exp_counts."""
        # Where it drops no tokens, DeepSpeed's gate reduces the capacity over the ranks.
        reduces = self.ep_size > 1 and not self.gate.drop_tokens
        where = f"'gate' of {self.mxfp8_settings.name}"
        # For fewer tokens than its min_capacity, the assert of the top-1 gate would stop this rank. An expert's
        # capacity is at least the number of tokens either way, so no token is dropped for it.
        fewest = min(self.gate.min_capacity, x_TH.shape[0]) if self.gate.k == 1 else self.gate.min_capacity
        with (lent(self.gate, "min_capacity", fewest),
              deadline_for(self.ep_group, x_TH.device, where) if reduces else nullcontext()):
            l_aux, _, num_experts, expert_KT, _, weight_KT, exp_counts = self.gate(x_TH, used_token, True, False)
        # A mean over no tokens is NaN. This zero still reaches the gate's weight, so that it gets a gradient.
        self.l_aux = l_aux if x_TH.shape[0] else weight_KT.sum()
        self.exp_counts = exp_counts
        routes = Routes(expert_TK=expert_KT.t().long(), weight_TK=weight_KT.t(), num_experts=num_experts)
        if self.mxfp8_settings.config.force_load_balance:
            routes = round_robin(routes)
            self.exp_counts = routes.counts_E()
        return routes

    def _compute(self, x_TH: torch.Tensor, routes: Routes) -> torch.Tensor:
        settings = self.mxfp8_settings
        ffn = settings.ffn(self, x_TH, routes, self.exp_counts)
        weights = self.mxfp8_weights.current()
        tensor_parallel = bwc_tensor_model_parallel_world_size(groups.mpu)
        if tensor_parallel == 1:
            return ffn(x_TH, routes, weights)
        # Tensor-parallel ranks hold the same tokens: each takes its share, and all get every result.
        T = x_TH.shape[0]
        share = -T % tensor_parallel
        pad = torch.nn.functional.pad
        x_TH, weight_TK = (drop_tokens(pad(v, (0, 0, 0, share)), dim=0) for v in (x_TH, routes.weight_TK))
        expert_TK = drop_tokens(pad(routes.expert_TK, (0, 0, 0, share), value=-1), dim=0)
        part = Routes(expert_TK=expert_TK, weight_TK=weight_TK, num_experts=routes.num_experts)
        return gather_tokens(ffn(x_TH, part, weights), dim=0)[:T]
