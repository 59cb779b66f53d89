# SPDX-License-Identifier: Apache-2.0
"""Says where the first NaN or infinity of a training began: one line, once.

DeepSpeed skips a step whose gradients are not finite. The engine's next step is then watched: a hook on each module
checks its output on the device, and the host reads the answers at the step's end. The first module in the order of the
forward is named. All other steps compute nothing for this. A NaN that does not come again in the next step is not
found, and neither is one where DeepSpeed skips no steps.
"""

from collections.abc import Collection
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils._pytree import tree_leaves

from .transport.deadline import answers_of_all


class FirstNotFinite:
    """Watches the steps of an engine. Every rank has one.

    Args:
        whole: modules whose parts are not watched, such as converted layers, which refuse hooks on experts.
    """

    def __init__(self, engine: DeepSpeedEngine, whole: Collection[torch.nn.Module]):
        self.engine = engine
        self._parts = {part for module in whole for part in module.modules()} - set(whole)
        self._skipped, self._told = engine.skipped_steps, False
        self._hooks: list[Any] = []
        self._finite: list[tuple[str, torch.Tensor]] = []  # of each output, in the order in which modules end

    def after_step(self) -> None:
        """Watches the next step, if this one was skipped. Names the first module, if this one was watched."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._tell()
            self._hooks, self._finite = [], []
        elif self.engine.skipped_steps > self._skipped and not self._told:
            self._hooks = [module.register_forward_hook(self._check(name or "the model itself"))
                           for name, module in self.engine.module.named_modules() if module not in self._parts]
        self._skipped = self.engine.skipped_steps

    def _check(self, name: str) -> Any:

        @torch.compiler.disable
        def hook(module: torch.nn.Module, inputs: tuple, output: Any) -> None:
            self._finite += [(name, value.detach().isfinite().all()) for value in tree_leaves(output)
                             if isinstance(value, torch.Tensor) and value.is_floating_point()]

        return hook

    def _tell(self) -> None:
        """Collective over all ranks. All of them skip the same steps."""
        mine = []
        for index, (name, finite) in enumerate(self._finite):
            if not finite:  # the host waits here
                weights = self._broken_weights(name)
                mine = [(index, not weights, dist.get_rank(), name, weights)]
                break
        found = mine
        if dist.get_world_size() > 1:
            found = sum(answers_of_all(dist.get_world_group(), mine, "the search for the first NaN"), [])
        self._told = bool(found)
        if found and dist.get_rank() == 0:
            _, _, rank, name, weights = min(found)
            cause = f"there is one in {weights[0]}" if weights else "its weights are finite"
            print(f"mxfp8_moe: WARNING: NaN or infinity in step {self.engine.global_steps}: the first module whose "
                  f"output has one is {name}, on rank {rank}; {cause}", flush=True)

    def _broken_weights(self, name: str) -> list[str]:
        """The module's parameters that are not finite. In ZeRO-3, this rank looks at its part of them."""
        try:
            module = self.engine.module.get_submodule(name)
        except AttributeError:
            return []
        return [f"{name}.{key}" for key, p in module.named_parameters()
                if not getattr(p, "ds_tensor", p).detach().isfinite().all()]
