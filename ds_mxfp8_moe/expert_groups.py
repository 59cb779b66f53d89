# SPDX-License-Identifier: Apache-2.0
"""Lets an optimizer that the user made train experts in ZeRO-1 and 2.

There, experts need parameter groups of their own, marked as "moe". `AdamW(model.parameters())` has one group for all.
Where a library hands the optimizer to DeepSpeed (Accelerate), the user cannot split it: AutoEP makes the experts' new
parameters in between.
"""

from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param_group, split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.engine import DeepSpeedEngine

ORIGIN = "group_of_client"  # key of a group: the index of the user's group that it follows
OWN_KEYS = ("params", "name", "moe", ORIGIN)


def split_experts(engine: DeepSpeedEngine, optimizer: Any) -> Any:
    """What DeepSpeed shall step in place of the user's optimizer, which is returned itself where it will do."""
    needed = engine.has_moe_layers and engine.zero_optimization_stage() in (1, 2)
    if not needed or not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    return optimizer if any(map(is_moe_param_group, optimizer.param_groups)) else _with_expert_groups(optimizer)


def _with_expert_groups(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A twin that shares the optimizer's state and has experts in groups of their own.

    The optimizer keeps its groups, since a learning-rate scheduler made for it counts them. Whatever changes there
    (the learning rate above all) changes in the twin's groups too.
    """
    twin = object.__new__(type(type(optimizer).__name__, (_Twin, type(optimizer)), {}))
    vars(twin).update({key: value for key, value in vars(optimizer).items() if key != "step"})  # wrapped by schedulers
    groups = [{"name": f"group {i}", **group, ORIGIN: i} for i, group in enumerate(optimizer.param_groups)]
    twin.param_groups = split_params_into_different_moe_groups_for_optimizer(groups)
    twin._original = optimizer
    twin._start = [_values(group) for group in optimizer.param_groups]
    twin._seen = {}
    optimizer._opt_called = True  # torch's schedulers would warn that it was not stepped before them
    return twin


class _Twin:
    """Mixed into the optimizer's class. Its groups take over what has changed in the original's since the last look.

    Values that did not change there stay, so that a loaded checkpoint and DeepSpeed's own schedulers have effect.
    """

    @property
    def param_groups(self) -> list[dict]:
        for group in vars(self)["param_groups"]:
            key, given = (group[ORIGIN], group["name"]), _values(self._original.param_groups[group[ORIGIN]])
            before = self._seen.get(key, self._start[group[ORIGIN]])
            group.update({name: value for name, value in given.items() if name not in before or before[name] != value})
            self._seen[key] = given
        return vars(self)["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict]) -> None:
        vars(self)["param_groups"] = groups


def _values(group: dict) -> dict:
    """The group's settings, such as its learning rate."""
    return {key: value for key, value in group.items() if key not in OWN_KEYS}
