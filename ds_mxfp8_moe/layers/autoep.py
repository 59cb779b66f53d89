# SPDX-License-Identifier: Apache-2.0
"""The layers that DeepSpeed's AutoEP makes out of Hugging Face models, with the exchange and the experts in MXFP8."""

from dataclasses import replace
from typing import Any
from weakref import ReferenceType

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.ep_experts import GroupedExperts

from ..compute.formula import LowRank
from ..compute.routing import Routes, round_robin
from ..ffn.branch import Branch
from ..ffn.expert_ffn import ExpertFFN
from ..ffn.frozen_weights import REFUSED
from ..ffn.kept_weights import KeptWeights
from ..transport.deadline import tell_peers_on_error
from .classic import LayerSettings
from .extended_experts import ExtendedGroupedExperts
from .frozen_experts import WEIGHTS, dtype_of, frozen_of
from .padding import PaddingMask
from .router import as_gate_takes, route
from .routes import LayerRoutes, is_recomputed


class MXFP8GroupedExperts(GroupedExperts):
    """AutoEP's stacked experts w1, w2, w3, called with tokens and routes.

    The whole exchange happens in this module's forward, because ZeRO-3 gathers the parameters around that call.
    """

    def forward(self, x_TH: torch.Tensor, routes: Routes, ffn: ExpertFFN | None = None,
                branch: Branch | None = None) -> torch.Tensor:
        if ffn is None:  # the layer is back on DeepSpeed's path, but a wrapper (PEFT) kept these experts' class
            return super().forward(x_TH, routes)
        frozen = frozen_of(self)
        weights = {"gate": self.w1, "up": self.w3, "down": self.w2} if frozen is None else {}
        return ffn(x_TH, routes, {**weights, **self.biases()}, branch, self.adapters(), frozen)

    def biases(self) -> dict[str, torch.Tensor]:
        """Role -> [E, ...]."""
        return {}

    def adapters(self) -> dict[str, LowRank]:
        """Name of a GEMM -> its adapter."""
        return {}

    def requires_grad_(self, requires_grad: bool = True) -> GroupedExperts:
        """Raises RuntimeError if asked to train weights that are held in MXFP8 alone."""
        frozen = frozen_of(self)
        if frozen is not None:
            frozen.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in WEIGHTS and frozen_of(self) is not None:
                raise AttributeError(f"{name} of these experts {REFUSED}") from None
            raise


class MXFP8ExtendedGroupedExperts(MXFP8GroupedExperts, ExtendedGroupedExperts):
    """The same with biases and adapters."""

    biases, adapters = ExtendedGroupedExperts.biases, ExtendedGroupedExperts.adapters


# The class of a layer's experts before conversion, and after.
CONVERTED_EXPERTS = {GroupedExperts: MXFP8GroupedExperts, ExtendedGroupedExperts: MXFP8ExtendedGroupedExperts}


class _SharedExpertsCalled:
    """A layer for DeepSpeed's `_finalize_output`. Its shared experts and their gate return what they gave before."""

    def __init__(self, layer: AutoEPMoELayer, shared: torch.Tensor, gate: torch.Tensor | None):
        self._layer = layer
        self.shared_experts = lambda x: shared
        self.shared_experts_gate = None if gate is None else lambda x: gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class MXFP8AutoEPMoELayer(AutoEPMoELayer):
    """`AutoEPMoELayer` with the same router, parameters and results. Ranks may bring different numbers of tokens."""

    mxfp8_settings: LayerSettings
    mxfp8_kept: KeptWeights | None = None
    mxfp8_sums: ReferenceType | None = None  # to an optimizer of engine/zero.py
    mxfp8_samples: list | None = None  # engine/metrics.py
    mxfp8_routes: LayerRoutes | None = None
    mxfp8_padding: PaddingMask | None = None

    @torch.compiler.disable  # layers differ too much to share what is compiled
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Takes [B, S, H] and returns what AutoEPMoELayer does: [B, S, H] or [T, H], with the router's logits if the
        model asks for them. Collective over the expert-parallel group.
        """
        settings = vars(self).get("mxfp8_settings")
        if settings is None:  # the layer is back on DeepSpeed's path, but compile.autoep_non_moe holds this forward
            return AutoEPMoELayer.forward(self, hidden_states)
        self._check_input(hidden_states)
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        turn = None if self.mxfp8_routes is None else self.mxfp8_routes.turn(hidden_states.shape[:-1])
        weight_TK, expert_TK, counts_E = route(self.router, x_TH, self.expert_bias, turn)
        if turn is not None:
            turn.note(expert_TK)
        # To what they are already, tensors are not cast: on the host a call of torch takes longer than the question.
        routes = Routes(expert_TK=expert_TK if expert_TK.dtype == torch.int64 else expert_TK.long(),
                        weight_TK=weight_TK if weight_TK.dtype == torch.float32 else weight_TK.float(),
                        num_experts=self.num_experts)
        if settings.config.force_load_balance:
            routes = self._balanced(routes, x_TH)
            counts_E = routes.counts_E()
        if settings.config.load_balance_coeff is None:
            self.tokens_per_expert.add_(counts_E)  # integers have no gradients
        elif self.training and not is_recomputed():  # an evaluation does not move the balance
            self.tokens_per_expert.add_(
                counts_E if self.mxfp8_padding is None else self.mxfp8_padding.counts(routes.expert_TK, counts_E))
        ffn = settings.ffn(self, x_TH, routes, counts_E)
        shared = self._shared_experts(x_TH, hidden_states)
        output = self.experts(x_TH, routes, ffn, shared).reshape(hidden_states.shape)
        layer = self if shared is None else _SharedExpertsCalled(self, *shared.result())
        return AutoEPMoELayer._finalize_output(layer, output, x_TH, hidden_states, hidden_states.shape[-1])

    def requires_grad_(self, requires_grad: bool = True) -> AutoEPMoELayer:
        """Raises RuntimeError if asked to train experts that are held in MXFP8 alone."""
        self.experts.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def _shared_experts(self, x_TH: torch.Tensor, hidden_states: torch.Tensor) -> Branch | None:
        """What the shared experts and their gate return, as a branch. None if `_finalize_output` calls them."""
        if self.shared_experts is None:
            return None
        # With ZeRO-3, a recomputation (non-reentrant) must end inside the shared experts. If it went on, DeepSpeed
        # would release their parameters, which the backward that called for it is about to read.
        if hasattr(next(self.shared_experts.parameters(), None), "ds_id"):
            return None
        gate = self.shared_experts_gate
        x = x_TH if self.moe_output_shape == "flat" or gate is not None else hidden_states
        return Branch(lambda: (self.shared_experts(x), None if gate is None else gate(x)), x.device)

    @tell_peers_on_error
    def _check_input(self, x: torch.Tensor) -> None:
        """Raises an error, before any collective, if the experts cannot take the input or were replaced."""
        experts = self.experts
        if not isinstance(experts, MXFP8GroupedExperts):  # wrapped, as by PEFT, and called through their wrapper
            experts = next((part for part in experts.modules() if isinstance(part, MXFP8GroupedExperts)), None)
        if experts is None:
            raise RuntimeError(f"{self.mxfp8_settings.name}: its experts were replaced by a "
                               f"{type(self.experts).__name__} after conversion, which this path does not compute: "
                               "convert again")
        self.mxfp8_settings.check_input(x, dtype_of(experts), weights_cast=True)

    def _balanced(self, routes: Routes, x_TH: torch.Tensor) -> Routes:
        logits_TE = self.router.gate(as_gate_takes(self.router.gate, x_TH)).float()
        scores_TE = logits_TE.sigmoid() if self.router.score_func == "sigmoid" else logits_TE.softmax(dim=1)
        routes = round_robin(routes, scores_TE)
        weight_TK = routes.weight_TK
        if self.router.route_norm:
            weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return replace(routes, weight_TK=weight_TK * self.router.route_scale)
