# SPDX-License-Identifier: Apache-2.0
"""MXFP8 experts in models of transformers without DeepSpeed's engine, by two registries of transformers.

    ExpertsInterface             how a module of stacked experts computes its tokens: with our grouped GEMMs
    EPImplementationInterface    how tokens travel to the ranks of their experts and back: with our exchange, too

Both call the experts' module with tokens [T, H], choices [T, K] and their weights [T, K]. Flags of the module, set by
transformers' decorator `use_experts_implementation`, say how its parameters lie.
"""

from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..compute.formula import ExpertFormula
from ..compute.routing import Routes
from ..config import MXFP8MoEConfig
from ..ffn.expert_ffn import ExpertFFN
from ..ffn.open_ffn import OpenFFN, OpenFormula
from ..ops.log import log_on_rank_0
from ..recognition.activation_proof import activation_of
from ..recognition.stacked import is_concatenated
from .settings import LayerSettings

NAME = "mxfp8"


def register(**section: Any) -> None:
    """Adds "mxfp8" to the implementations of experts that transformers knows.

    `model.set_experts_implementation("mxfp8")`, or `experts_implementation="mxfp8"` in `from_pretrained`, then
    multiplies experts in MXFP8 under plain torch, DDP, FSDP2 and any expert parallelism of transformers. With
    `DistributedConfig(ep_size=N, ep_implementation="mxfp8")`, tokens travel in MXFP8 as well. That needs transformers
    5.23 or later, and a line says so where it is older.

    Args:
        section: keys of the section "mxfp8_moe" of a DeepSpeed config, such as recipe="mxfp8". Keys about engines,
            metrics and frozen experts have no effect. A later call replaces them, but not in a model whose
            `ep_implementation` is "mxfp8".

    Raises:
        ConfigError: a key or a value does not exist.
    """
    from transformers.integrations.moe import ExpertsInterface
    config = MXFP8MoEConfig(**{"enabled": True, **section})

    @torch.compiler.disable  # the host decides sizes in it
    def experts_forward(self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                        top_k_weights: torch.Tensor) -> torch.Tensor:
        return _compute(self, config, None, hidden_states, top_k_index, top_k_weights)

    ExpertsInterface.register(NAME, experts_forward)
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError:
        from transformers import __version__
        log_on_rank_0(f'mxfp8_moe: transformers {__version__} knows no ep_implementation="{NAME}", which needs 5.23 '
                        f'or later. experts_implementation="{NAME}" works')
    else:
        EPImplementationInterface.register(NAME, _exchanging(EPImplementation, config))


def _exchanging(base: type, config: MXFP8MoEConfig) -> type:
    """The EPImplementation of transformers, `base`, that exchanges tokens by our transports."""

    class MXFP8EP(base):
        """Sends tokens to the ranks of their experts, computes these, and brings the weighted sums back."""

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any):
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts
            if not dist.is_initialized():  # transports call deepspeed.comm, which takes torch's process groups over
                deepspeed.init_distributed(verbose=False)

        @torch.compiler.disable
        def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                     top_k_weights: torch.Tensor) -> torch.Tensor:
            given = hidden_states, top_k_index, top_k_weights
            shares_batch = self.tp_mesh.size() > 1
            if shares_batch:  # every rank of the TP group takes a part of the tokens that they all hold
                given = (DTensor.from_local(one, self.tp_mesh, [Replicate()], run_check=False).redistribute(
                    self.tp_mesh, [Shard(0)]).to_local() for one in given)
            y_TH = _compute(self.experts, config, self.ep_mesh.get_group(), *given)
            if shares_batch:
                y_TH = DTensor.from_local(y_TH, self.tp_mesh, [Shard(0)], run_check=False, shape=hidden_states.shape,
                                          stride=(hidden_states.shape[1], 1)).full_tensor()
            return y_TH

    return MXFP8EP


def _compute(experts: nn.Module, config: MXFP8MoEConfig, group: ProcessGroup | None, x_TH: torch.Tensor,
             expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    """[T, H], the sum of weight * expert(token) over a token's choices.

    Args:
        experts: holds this rank's experts, as many as its attribute num_experts says.
        group: the ranks that share the experts. None: this rank alone.
        expert_TK: experts of the group. Ids past the last one stand for no expert.
    """
    settings = vars(experts).get("mxfp8_settings")
    if settings is None or settings.config is not config:
        experts.mxfp8_settings = settings = _settings_of(experts, config, x_TH.device)
    kind, formula = ExpertFFN, settings.formula
    if formula.activation is None:
        after = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
        kind, formula = OpenFFN, OpenFormula(experts._apply_gate if experts.has_gate else experts.act_fn, after)
    ffn = kind(formula, settings.recipe, settings.choose_transport(group), experts.num_experts,
               settings.min_tokens_per_expert, settings.name, training=experts.training)
    num_experts = experts.num_experts * (1 if group is None else dist.get_world_size(group=group))
    routes = Routes(expert_TK=expert_TK.long().masked_fill(expert_TK >= num_experts, -1), weight_TK=weight_TK.float(),
                    num_experts=num_experts)
    return ffn(x_TH, routes, _weights_of(experts, apart=settings.formula.gate is not None))


def _settings_of(experts: nn.Module, config: MXFP8MoEConfig, device: torch.device) -> LayerSettings:
    """What the module computes, and in which recipe. A formula without an activation: its own functions run."""
    name, has_norm = type(experts).__name__, getattr(experts, "has_post_expert_norm", False)
    act = None if has_norm else activation_of(experts)
    apart = act is not None and experts.has_gate and not is_concatenated(experts)
    weights = _weights_of(experts, apart)
    _, hidden_size, ffn_size = weights["down"].shape
    formula = ExpertFormula("gated" if experts.has_gate else "mlp", None, hidden_size, ffn_size,
                            packed="gate_up" if experts.has_gate and not apart else "none",
                            **{role: role for role in weights})  # type: ignore[arg-type]
    settings = LayerSettings(name=name, formula=formula if act is None else formula.with_act(act), config=config,
                             num_local_experts=experts.num_experts, device=device)
    if settings.recipe.quantize_gemm and (hidden_size % 32 or ffn_size % 32):
        raise ValueError(f"{name}: hidden size {hidden_size} and FFN size {ffn_size} are not both multiples of 32, as "
                         'MXFP8 needs them: use experts_implementation="grouped_mm"')
    return settings


def _weights_of(experts: nn.Module, apart: bool) -> dict[str, torch.Tensor]:
    """Role -> [E, out, in] or [E, out], as views of transformers' parameters.

    `apart`: gate and up, whose rows take turns, have roles of their own. Else `up` has both, in transformers' order.
    """
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    found = {"up": getattr(experts, name), "down": experts.down_proj}
    if experts.is_transposed:
        found = {role: weight.transpose(1, 2) for role, weight in found.items()}
    if experts.has_bias:
        found |= {"up_bias": getattr(experts, f"{name}_bias"), "down_bias": experts.down_proj_bias}
    for role in ("up", "up_bias") if apart else ():
        if role in found:
            both = found[role]
            found |= {role.replace("up", "gate"): both[:, 0::2], role: both[:, 1::2]}
    return found
