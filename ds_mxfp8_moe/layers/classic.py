# SPDX-License-Identifier: Apache-2.0
"""The inner layer of `deepspeed.moe.layer.MoE`: its gate and parameters, exchange and experts in MXFP8."""

from contextlib import nullcontext
from weakref import ReferenceType

import torch
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

from ..compat.patches import lent
from ..compute.formula import ExpertWeights
from ..compute.routing import Routes, round_robin
from ..ffn.kept_weights import KeptWeights
from ..recognition.recognize import ExpertsAtConversion
from ..transport.deadline import deadline_for, tell_peers_on_error
from .placement import Placement, placed
from .settings import LayerSettings


class MXFP8MOELayer(MOELayer):
    """The inner layer of a converted MoE: routes with DeepSpeed's gate, computes with `ExpertFFN`."""

    mxfp8_settings: LayerSettings
    mxfp8_experts: ExpertsAtConversion
    mxfp8_weights: ExpertWeights
    mxfp8_kept: KeptWeights | None = None
    mxfp8_sums: ReferenceType | None = None  # to an optimizer of compat/zero.py
    mxfp8_samples: list | None = None  # engine/metrics.py
    mxfp8_placement: Placement | None = None
    mxfp8_loads: torch.Tensor | None = None  # engine/placement.py

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
        # For fewer tokens than its min_capacity, the assert of the top-1 gate would stop this rank. An expert's
        # capacity is at least the number of tokens either way, so no token is dropped for it.
        fewest = min(self.gate.min_capacity, x_TH.shape[0])
        where = f"'gate' of {self.mxfp8_settings.name}"  # which reduces the capacity over ranks if it drops no tokens
        with (lent(self.gate, "min_capacity", fewest),
              deadline_for(self.ep_group, x_TH.device, where) if self.ep_size > 1 else nullcontext()):
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
        routes = placed(self, routes)
        weights = self.mxfp8_weights.current()
        tensor_parallel = bwc_tensor_model_parallel_world_size(groups.mpu)
        if tensor_parallel == 1:
            return ffn(x_TH, routes, weights)
        # Tensor-parallel ranks hold the same tokens: each takes its share, and all get every result.
        T = x_TH.shape[0]
        padding = (0, 0, 0, -T % tensor_parallel)  # rows, so that all shares have the same size
        pad = torch.nn.functional.pad
        x_TH, weight_TK = (drop_tokens(pad(v, padding), dim=0) for v in (x_TH, routes.weight_TK))
        expert_TK = drop_tokens(pad(routes.expert_TK, padding, value=-1), dim=0)
        part = Routes(expert_TK=expert_TK, weight_TK=weight_TK, num_experts=routes.num_experts)
        return gather_tokens(ffn(x_TH, part, weights), dim=0)[:T]
