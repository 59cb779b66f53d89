# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine for MoE layers in MXFP8: all that an engine does differently, in one class.

An engine becomes a MoEEngine as its start begins, if its config has the section enabled, or later in `convert`. It
keeps what its class does, such as a pipeline engine's. `destroy` takes back what the engine has changed elsewhere. How
the model is saved stays, since the model still holds one rank's experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ..checkpoint.saving import MARK, consolidated_state_dict, save_16bit_model
from ..compat.clipping import clip_whole_model, needs_whole_norm
from ..compat.expert_groups import known_to_zero, named_groups, split_experts, split_groups, trains_experts
from ..compat.patches import undo_wraps
from ..compat.private_names import missing, say_if_missing
from ..config import parse
from ..layers.experts import expert_blocks
from ..layers.held_experts import scales_kept
from ..routing.routes import routes_of
from ..transport.deadline import tell_peers_on_error
from ..transport.peer_memory import PeerMemory
from .flash_adamw import FlashAdamWOfConfig, flash_adamw
from .keeping import stop_keeping, weights_change
from .moving import at_home
from .spreading import spread_experts
from .state import EngineState


class MoEEngine(DeepSpeedEngine):
    """A DeepSpeed engine of a model with MoE layers."""

    has_moe_layers: bool
    _mxfp8: EngineState

    # ------------------------------------------------------------ its start

    def _configure_expert_parallel(self, model: torch.nn.Module, *args, **kwargs) -> Any:
        plain = super()._configure_expert_parallel
        if say_if_missing("stacked experts"):
            return plain(model, *args, **kwargs)
        return spread_experts(self, parse(self.config), plain, model, *args, **kwargs)

    def _cast_module_mixed_precision(self, *args, **kwargs) -> None:
        with scales_kept(self.module):
            super()._cast_module_mixed_precision(*args, **kwargs)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list) -> None:
        """Takes parameter groups without names, in ZeRO-1 and 2 optimizers without groups of experts, and FlashAdamW.
        """
        with known_to_zero(*flash_adamw()):
            if say_if_missing("own optimizer"):
                return super()._configure_optimizer(client_optimizer, model_parameters)
            stage = self.zero_optimization_stage()
            if self.has_moe_layers and (client_optimizer is None or isinstance(client_optimizer, FlashAdamWOfConfig)):
                model_parameters = split_groups(named_groups(model_parameters), stage)
            client_optimizer = split_experts(self, client_optimizer)
            with self.without_moe_layers(stage in (1, 2) and not trains_experts(self)):
                return super()._configure_optimizer(client_optimizer, model_parameters)

    def _configure_bf16_optimizer(self, optimizer: Any) -> Any:
        with self.without_moe_layers(optimizer is None and missing("own optimizer") is None):
            return super()._configure_bf16_optimizer(optimizer)

    @contextmanager
    def without_moe_layers(self, hidden: bool) -> Iterator[None]:
        """Inside the context, DeepSpeed takes the model for one without MoE layers, if they are to be hidden."""
        found = self.has_moe_layers
        self.has_moe_layers = found and not hidden
        try:
            yield
        finally:
            self.has_moe_layers = found

    # ------------------------------------------------------------ steps

    @tell_peers_on_error  # the model's own code may raise one
    def backward(self, *args, **kwargs) -> Any:
        """As DeepSpeed's, in this thread. Autograd would hand it to a thread of its own, and wait for that."""
        with torch.autograd.set_multithreading_enabled(False):
            return super().backward(*args, **kwargs)

    def _take_model_step(self, *args, **kwargs) -> None:
        """The optimizer's step. Errors of exchanges that the host did not wait for are raised before it."""
        with weights_change(self):
            if not self._mxfp8.steps:
                return super()._take_model_step(*args, **kwargs)
            PeerMemory.wait_and_check_all()
            super()._take_model_step(*args, **kwargs)
            self._mxfp8.end_step()
            if (routes := routes_of(self.module)) is not None:  # those that recomputations needed
                routes.forget()

    def clip_fp32_gradients(self) -> None:
        """Clips by the norm of the whole model."""
        if needs_whole_norm(self):
            clip_whole_model(self)
        else:
            super().clip_fp32_gradients()

    def offload_states(self, *args, **kwargs) -> None:
        """As DeepSpeed's."""
        with weights_change(self, of_frozen=True):
            super().offload_states(*args, **kwargs)

    # ------------------------------------------------------------ files

    def save_checkpoint(self, *args, **kwargs) -> Any:
        """As DeepSpeed's. It is whole or without effect, on all ranks alike."""
        plain, ours = super().save_checkpoint, self._mxfp8.checkpoints
        with at_home(self):
            return plain(*args, **kwargs) if ours is None else ours.save(plain, *args, **kwargs)

    def load_checkpoint(self, *args, **kwargs) -> Any:
        """As DeepSpeed's. It is whole or without effect, on all ranks alike."""
        plain, ours = super().load_checkpoint, self._mxfp8.checkpoints
        with at_home(self), weights_change(self, of_frozen=True):
            return plain(*args, **kwargs) if ours is None else ours.load(plain, *args, **kwargs)

    def load_module_state_dict(self, checkpoint: dict, *args, **kwargs) -> None:
        """As DeepSpeed's, with this rank's frozen experts."""
        plain, ours = super().load_module_state_dict, self._mxfp8.checkpoints
        plain(checkpoint, *args, **kwargs) if ours is None else ours.load_module(plain, checkpoint, *args, **kwargs)

    def _copy_recovery_script(self, save_path: str) -> None:
        plain, ours = super()._copy_recovery_script, self._mxfp8.checkpoints
        plain(save_path) if ours is None else ours.copy_scripts(plain, save_path)

    def save_16bit_model(self, *args, **kwargs) -> bool:
        """As DeepSpeed's, with the experts of all ranks."""
        if MARK not in vars(self):
            return super().save_16bit_model(*args, **kwargs)
        return save_16bit_model(self, *args, **kwargs)

    def _zero3_consolidated_16bit_state_dict(self, *args, **kwargs) -> dict | None:
        """What the Trainer asks an engine in ZeRO-3. DeepSpeed itself refuses it for AutoEP."""
        if MARK not in vars(self) or not any(expert_blocks(self.module)):
            return super()._zero3_consolidated_16bit_state_dict(*args, **kwargs)
        return consolidated_state_dict(self, *args, **kwargs)

    # ------------------------------------------------------------ its end

    def destroy(self) -> None:
        """As DeepSpeed's."""
        stop_keeping(self)
        self._mxfp8.put("graphs", None)
        self._mxfp8.checkpoints = None
        try:
            super().destroy()
        finally:
            undo_wraps(self)


def make_moe_engine(engine: DeepSpeedEngine) -> None:
    """Makes an engine a MoEEngine, before its start or after it. A second call changes nothing."""
    if not isinstance(engine, MoEEngine):
        kind: Any = type(engine)
        engine.__class__, engine._mxfp8 = _subclass_of(kind), EngineState()


@cache
def _subclass_of(kind: type) -> type:
    return MoEEngine if kind is DeepSpeedEngine else type(kind.__name__, (MoEEngine, kind), {})
