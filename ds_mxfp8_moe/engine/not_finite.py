# SPDX-License-Identifier: Apache-2.0
"""Says where the first NaN or infinity of a training began: one line, once.

DeepSpeed skips a step whose gradients are not finite. The engine's next step is then watched: a hook on each module
checks its output on the device, and the host reads the answers at the step's end. The first module in the order of the
forward is named. All other steps compute nothing for this. A NaN that is gone in the next step is not found. Where
DeepSpeed skips no steps, nothing is found.
"""

import functools
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ..compute.mx import mapped
from ..ops.log import log_on_rank_0
from ..ops.mx_format import NAN_SCALE_BYTE
from ..transport.deadline import answers_of_all


class FirstNotFinite:
    """Watches the steps of an engine. Every rank has one."""

    def __init__(self, engine: DeepSpeedEngine):
        self.engine = engine
        self._warned = False
        self._hooks: list[Any] = []
        # Of each output, in the order in which modules end: the module, its name, and whether the output is finite.
        self._outputs: list[tuple[torch.nn.Module, str, torch.Tensor]] = []

    def after_step(self) -> None:
        """Watches the next step, if this one was skipped. Names the first module, if this one was watched."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._warn()
            self._hooks, self._outputs = [], []
        elif not self.engine.was_step_applied() and not self._warned:
            converted = {module for module in self.engine.module.modules() if "mxfp8_settings" in vars(module)}
            parts = {part for layer in converted for part in layer.modules()} - converted  # they refuse hooks
            self._hooks = [module.register_forward_hook(functools.partial(self._check, name))
                           for name, module in self.engine.module.named_modules() if module not in parts]

    @torch.compiler.disable
    def _check(self, name: str, module: torch.nn.Module, inputs: tuple, output: Any) -> None:
        tensors: list[torch.Tensor] = []
        mapped(output, tensors.append)
        self._outputs += [(module, name, value.detach().isfinite().all()) for value in tensors
                          if value.is_floating_point()]

    def _warn(self) -> None:
        """Collective over all ranks, which skip the same steps. The host waits for the device."""
        found = []
        first = next((i for i, (*_, finite) in enumerate(self._outputs) if not finite), None)
        if first is not None:
            module, name, _ = self._outputs[first]
            weights = [key for key, p in module.named_parameters(prefix=name)  # in ZeRO-3, this rank's part of them
                       if not getattr(p, "ds_tensor", p).detach().isfinite().all()]
            weights += [key for key, scale in module.named_buffers(prefix=name)  # of frozen experts
                        if key.endswith(("frozen.up_scale", "frozen.down_scale")) and (scale == NAN_SCALE_BYTE).any()]
            found = [(first, not weights, dist.get_rank(), name or "the model itself", weights)]
        if dist.get_world_size() > 1:
            found = sum(answers_of_all(dist.get_world_group(), found, "the search for the first NaN"), [])
        self._warned = bool(found)
        if found:
            _, _, rank, name, weights = min(found)
            cause = f"there is one in {weights[0]}" if weights else "its weights are finite"
            log_on_rank_0(f"mxfp8_moe: WARNING: NaN or infinity in step {self.engine.global_steps}: the first "
                            f"module whose output has one is {name}, on rank {rank}; {cause}")
