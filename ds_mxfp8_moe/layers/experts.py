# SPDX-License-Identifier: Apache-2.0
"""Stacked experts of transformers, spread over the ranks of an expert-parallel group.

A module of stacked experts (stacked.py) stays where it is in its MoE block, under its name and with all that it has
beside its two weights: biases, activation, constants, norms, hooks. `spread` gives it this rank's share of the weights
and another class, a subclass of its own and of MXFP8Experts, whose forward exchanges tokens and multiplies MXFP8.

The rest of the block is transformers' own. DeepSpeed looks for its class AutoEPMoELayer, so the block's class becomes
a subclass of that, too. Nothing of AutoEPMoELayer runs: DeepSpeed reads the attributes that `spread` sets.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import ReferenceType

import torch
from deepspeed.checkpoint import autoep_affine, constants
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import nn
from torch.distributed import ProcessGroup

from ..compute.routing import Routes, round_robin
from ..ffn.kept_weights import KeptWeights
from ..ffn.open_ffn import OpenFormula
from ..recognition.stacked import DOWN, SPREAD_NAMES, Layout, shape_of
from ..routing.choices import Choice, run_block
from ..routing.padding import PaddingMask
from ..routing.routes import LayerRoutes, is_recomputed
from ..transport.deadline import tell_peers_on_error
from .adapters import NO_MERGE, low_rank, named_modules, outermost_wrapper
from .classic import MXFP8MOELayer
from .frozen_experts import dtype_of, frozen_of
from .placement import Placement, own_part, placed
from .settings import LayerSettings


class MXFP8Experts(nn.Module):
    """Stacked experts of which this rank holds a share, called as transformers' experts are.

    Attributes:
        ep_size, ep_rank, ep_group: of the expert-parallel group. DeepSpeed makes the group while the engine starts.
        num_local_experts: of this rank.
        layout: of the weights that transformers has in this module.
    """

    ep_size: int
    ep_rank: int
    ep_group: ProcessGroup | None
    num_local_experts: int
    layout: Layout
    mxfp8_settings: LayerSettings
    mxfp8_kept: KeptWeights | None = None
    mxfp8_sums: ReferenceType | None = None  # to an optimizer of compat/zero.py
    mxfp8_samples: list | None = None  # engine/metrics.py
    mxfp8_routes: LayerRoutes | None = None
    mxfp8_choice: Choice | None = None  # of the block's forward that runs now
    mxfp8_unbiased: bool = False  # whether the router ignored a bias of `load_balance_coeff`
    mxfp8_padding: PaddingMask | None = None
    mxfp8_placement: Placement | None = None
    mxfp8_loads: torch.Tensor | None = None  # engine/placement.py

    @torch.compiler.disable  # the host decides sizes in it
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                top_k_weights: torch.Tensor) -> torch.Tensor:
        """[T, H], the sum of weight * expert(token) over a token's choices. Collective over the group.

        Args:
            hidden_states: [T, H]. T may differ between ranks.
            top_k_index: integers [T, K], the experts of each token. An id of num_experts or more stands for none.
            top_k_weights: [T, K], of any dtype.
        """
        self._check_input(hidden_states)
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        expert_TK = top_k_index.flatten(0, -2).long()
        if self.mxfp8_choice is not None:
            self.mxfp8_choice.end(expert_TK)
        routes = Routes(expert_TK=expert_TK, weight_TK=top_k_weights.flatten(0, -2).float(),
                        num_experts=self.num_experts)
        if self.mxfp8_settings.config.force_load_balance:
            routes = round_robin(routes)
        if self.mxfp8_settings.config.load_balance_coeff is not None:
            self._count(routes)
        ffn = self.mxfp8_settings.ffn(self, x_TH, routes, None)
        frozen = frozen_of(self)
        weights = {"gate": self.w1, "up": self.w3, "down": self.w2} if frozen is None else {}
        y_TH = ffn(x_TH, placed(self, routes), {**weights, **self.biases()}, low_rank(self), frozen)
        return y_TH.reshape(hidden_states.shape)

    @tell_peers_on_error
    def _check_input(self, x: torch.Tensor) -> None:
        self.mxfp8_settings.check_input(x, dtype_of(self), weights_cast=True)

    def _count(self, routes: Routes) -> None:
        loads_E = getattr(self, "tokens_per_expert", None)  # engine/balance.py
        if loads_E is not None and self.training and not is_recomputed():  # an evaluation does not move the balance
            loads_E += self.mxfp8_padding.counts(routes.expert_TK, routes.counts_E())

    @property
    def experts(self) -> nn.Module:
        """This module: code that reads `layer.experts` takes layers of other kinds, too."""
        return self

    def biases(self) -> dict[str, torch.Tensor]:
        """Role -> [experts of this rank, ...], of whole biases that every rank holds."""
        if not self.has_bias:
            return {}
        # ZeRO-3 releases the whole biases after the call. Views would keep their memory until backward.
        part = [own_part(self, getattr(self, f"{name}_bias")) for name in self.layout.names]
        gate, up = self.layout.halves(part[0])
        return {"gate_bias": gate.contiguous(), "up_bias": up.contiguous(), "down_bias": part[1].clone()}

    @property
    def merges(self) -> bool:
        """Whether it computes with adapters merged into its frozen weights, which are exported so."""
        return self.mxfp8_settings.config.merge_aware and None not in (frozen_of(self), outermost_wrapper(self))

    def open_formula(self) -> OpenFormula:
        """What the module computes beside its GEMMs, by its own functions."""
        after = self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None
        return OpenFormula(self._apply_gate if self.has_gate else self.act_fn, after, not self.layout.is_concatenated)

    def requires_grad_(self, requires_grad: bool = True) -> nn.Module:
        """Raises RuntimeError if asked to train frozen weights that are held quantized alone."""
        if (frozen := frozen_of(self)) is not None:
            frozen.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def named_modules(self, memo: set | None = None, prefix: str = "",
                      remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        """As of any module. See `adapters.named_modules`."""
        return named_modules(self, super().named_modules, memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer" and outermost_wrapper(self) is not None:  # by the name that wrappers have
                raise RuntimeError(NO_MERGE) from None
            if name in SPREAD_NAMES and (frozen := frozen_of(self)) is not None:
                raise AttributeError(f"{name} of these experts {frozen.refusal}") from None
            raise


class ExpertBlock:
    """The class that a MoE block gets before its own one, for DeepSpeed.

    Attributes:
        ep_group_name, ep_group, expert_placement_descriptor, ep_size, ep_rank, num_experts, num_local_experts: as in
            AutoEPMoELayer. Engine and checkpoints read them.
        mxfp8_chooses: whether its choice of experts may be recorded, replayed or biased.
    """

    experts: MXFP8Experts
    num_experts: int
    ep_group: ProcessGroup | None
    ep_group_name: str
    mxfp8_chooses: bool = False

    def forward(self, *args, **kwargs) -> Any:
        """The block's own forward."""
        if self.mxfp8_chooses:
            return run_block(self, super().forward, *args, **kwargs)  # type: ignore[misc]
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    @property
    def mxfp8_settings(self) -> LayerSettings:
        return self.experts.mxfp8_settings

    def requires_grad_(self, requires_grad: bool = True) -> nn.Module:
        """Raises RuntimeError if asked to train frozen weights that are held quantized alone."""
        self.experts.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)  # type: ignore[misc]

    def set_deepspeed_parallelism(self, *args, **kwargs) -> None:
        """Takes the group that the engine has made. The engine calls this."""
        super().set_deepspeed_parallelism(*args, **kwargs)  # type: ignore[misc]
        self.experts.ep_group = self.ep_group


@cache
def _experts_class(kind: type) -> type:
    return type(kind.__name__, (MXFP8Experts, kind), {"__module__": kind.__module__})


@cache
def _block_class(kind: type, num_experts: int, ep_size: int, ep_rank: int) -> type:
    local = num_experts // ep_size
    placement = autoep_affine.legacy_uniform_autoep_placement_descriptor(num_experts, local, ep_size)
    return type(kind.__name__, (ExpertBlock, kind, AutoEPMoELayer), {
        "__module__": kind.__module__, "ep_size": ep_size, "ep_rank": ep_rank, "num_experts": num_experts,
        "num_local_experts": local, "ep_group_name": f"ep_size_{ep_size}", "expert_placement_descriptor": placement})


def spread(block: nn.Module, experts: nn.Module, weights: dict[str, nn.Parameter], ep_size: int, ep_rank: int,
           kind: type | None = None) -> None:
    """Makes `block.experts` this rank's share of the experts, and `block` a layer that DeepSpeed knows.

    Args:
        experts: the stacked experts. They lose their two weights.
        weights: w1, w2 and w3 of this rank. Empty if the caller gives the module FrozenWeights.
        kind: the class whose code `experts` has. None: its own.
    """
    layout = Layout.of(experts)
    num_experts = shape_of(getattr(experts, DOWN))[0]
    for name in layout.names:
        delattr(experts, name)
    vars(experts).pop("forward", None)  # Liger's
    experts.__class__ = _experts_class(kind or type(experts))
    experts.layout, experts.ep_size, experts.ep_rank, experts.ep_group = layout, ep_size, ep_rank, None
    experts.num_local_experts = num_experts // ep_size
    block.experts = experts
    of_block: Any = type(block)
    block.__class__ = _block_class(of_block, num_experts, ep_size, ep_rank)
    for name, parameter in weights.items():
        experts.register_parameter(name, parameter)
        _mark(parameter, block)


def let_zero3_reduce(block: nn.Module) -> None:
    """Lets ZeRO-3 take the gradients of a block whose tokens have none, as in the first layer where experts alone are
    trained. It waits for the gradient of the tokens, and torch tells it at once if there will be none: it would then
    reduce gradients that have not come, and free their parameters."""

    def with_gradient(module: nn.Module, args: tuple) -> tuple:
        if torch.is_grad_enabled() and args and torch.is_floating_point(args[0]) and not args[0].requires_grad:
            args = args[0].detach().requires_grad_(), *args[1:]
        return args

    if any(p.requires_grad for p in block.parameters()):
        block.register_forward_pre_hook(with_gradient, prepend=True)


def _mark(parameter: nn.Parameter, block: nn.Module) -> None:
    """Lets DeepSpeed reduce, partition and save the parameter as one of this rank's experts."""
    parameter.allreduce = False
    parameter.group_name = parameter.ds_zero_partition_group_name = block.ep_group_name
    parameter.ds_zero_placement_family = "autoep_expert"
    placement, shape = block.expert_placement_descriptor, [block.num_experts, *parameter.shape[1:]]
    first = block.ep_rank * block.num_local_experts
    affine_map = autoep_affine.autoep_placement_to_affine_map(placement, shape)
    setattr(parameter, constants.DS_AUTOEP_UC_META, {
        constants.AUTOEP_EXPERT_PLACEMENT: placement, constants.AFFINE_MAP: affine_map.to_dict(),
        constants.AUTOEP_PARAM_LOGICAL_SHAPE: shape, constants.AUTOEP_PARAM_EP_RANK: block.ep_rank,
        constants.AUTOEP_PARAM_LOCAL_EXPERTS: [*range(first, first + block.num_local_experts)]})


def expert_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the blocks whose experts are MXFP8Experts, with their names in the model."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertBlock):
            yield name, module


def converted_layers(model: nn.Module) -> list[MXFP8MOELayer | MXFP8Experts]:
    """The model's layers on the MXFP8 path, classic ones too."""
    layers = [module for module in model.modules() if isinstance(module, (MXFP8MOELayer, MXFP8Experts))]
    return [layer for layer in layers if "mxfp8_settings" in vars(layer) and layer.mxfp8_settings.config.enabled]
