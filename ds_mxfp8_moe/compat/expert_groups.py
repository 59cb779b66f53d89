# SPDX-License-Identifier: Apache-2.0
"""Lets the user's own parameter groups and optimizers train experts.

In ZeRO-1 and 2, experts need parameter groups of their own, marked as "moe". So they do in ZeRO-0 for DeepSpeed's
FusedAdam, which otherwise clips by each rank's own norm. `AdamW(model.parameters())` has one group for all. The user
cannot always split it: AutoEP makes the experts' new parameters while the engine is made.

Beside an optimizer in the config, DeepSpeed splits the groups of `model_parameters` itself, but only those with names.

Where experts alone are trained, the group of all else is empty or frozen. ZeRO-1 and 2 take no such group.

All experts may be frozen, as with LoRA, and an engine may have no optimizer, if its model is a reference for another.
Then no group is one of experts, which is an error in DeepSpeed, unless it does not see the MoE layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param, is_moe_param_group, split_params_into_different_moe_groups_for_optimizer
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils

from .patches import lent

NUMBER = "number"  # a group's index in the twin, by which it is known where ZeRO leaves only one group in it
OWN_KEYS = ("params", "name", "moe", NUMBER)


def named_groups(parameters: list) -> list:
    """Returns parameter groups with a name each, by which DeepSpeed splits off experts with the group's settings.

    Args:
        parameters: parameters, which are returned as they are, or groups, which are copied. Groups that share a name
            would get the settings of the last one.
    """
    if not all(isinstance(group, dict) for group in parameters) or any(map(is_moe_param_group, parameters)):
        return parameters
    given = [group.get("name") for group in parameters]
    unique = None not in given and len(set(given)) == len(given)
    return [{**group, "name": name if unique else str(i)}
            for i, (group, name) in enumerate(zip(parameters, given, strict=True))]


def split_groups(parameters: list, stage: int) -> list[dict]:
    """Returns groups with experts in groups of their own, without those that this stage of ZeRO does not take.

    `parameters`: of `named_groups`.
    """
    if any(isinstance(group, dict) and is_moe_param_group(group) for group in parameters):
        return parameters
    whole = [{"params": parameters, "name": "dense-params"}]
    groups = parameters if all(isinstance(group, dict) for group in parameters) else whole
    groups = split_params_into_different_moe_groups_for_optimizer(groups)
    if stage in (1, 2):  # which take no group without a trained parameter
        return [group for group in groups if any(p.requires_grad for p in group["params"])]
    return [group for group in groups if group["params"]]


def split_experts(engine: DeepSpeedEngine, optimizer: Any) -> Any:
    """Returns the optimizer that DeepSpeed steps: the user's, or one with expert groups split off.

    `optimizer`: may also be a function of parameters that makes one, or None.
    """
    if optimizer is None or not engine.has_moe_layers or not trains_experts(engine):
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return lambda parameters: split_experts(engine, optimizer(parameters))
    stage = engine.zero_optimization_stage()
    needs_groups = stage in (1, 2) or stage == 0 and isinstance(optimizer, FusedAdam)
    if not needs_groups or any(map(is_moe_param_group, optimizer.param_groups)):
        return optimizer
    return _with_expert_groups(optimizer, stage)


def trains_experts(engine: DeepSpeedEngine) -> bool:
    """Whether any parameter that belongs to this rank's experts alone is trained."""
    return any(is_moe_param(p) and p.requires_grad for p in engine.module.parameters())


def _with_expert_groups(optimizer: torch.optim.Optimizer, stage: int) -> torch.optim.Optimizer:
    """A twin that shares the optimizer's state and has experts in groups of their own.

    The optimizer keeps its groups, since a learning-rate scheduler made for it counts them. Whatever changes there
    (the learning rate above all) changes in the twin's groups too.
    """
    kind: Any = type(optimizer)
    twin = object.__new__(_twin_class(kind))
    vars(twin).update({key: value for key, value in vars(optimizer).items() if key != "step"})  # wrapped by schedulers
    groups = split_groups([{**group, "name": str(i), "origin": i} for i, group in enumerate(optimizer.param_groups)],
                          stage)
    twin._followed = [optimizer.param_groups[group.pop("origin")] for group in groups]
    twin._seen = [_values(group) for group in twin._followed]
    twin.param_groups = [{**group, NUMBER: i} for i, group in enumerate(groups)]
    optimizer._opt_called = True  # torch's schedulers would warn that it was not stepped before them
    return twin


@cache
def _twin_class(plain: type) -> type:
    return type(plain.__name__, (_Twin, plain), {})


@contextmanager
def known_to_zero(*kinds: type) -> Iterator[None]:
    """Inside the context, ZeRO takes optimizers of these classes, and twins of all that it takes, without
    "zero_allow_untested_optimizer"."""
    with lent(utils, "ZERO_SUPPORTED_OPTIMIZERS", _WithTwins([*utils.ZERO_SUPPORTED_OPTIMIZERS, *kinds])):
        yield


class _WithTwins(list):
    """Classes. Their twins count as contained."""

    def __contains__(self, kind: Any) -> bool:
        return super().__contains__(kind.__bases__[1] if issubclass(kind, _Twin) else kind)


class _Twin:
    """Mixed into the optimizer's class. Its groups take over what has changed in the original's since the last look.

    Values that did not change there stay, so that a loaded checkpoint and DeepSpeed's own schedulers have effect.

    Attributes:
        _followed: for each group the one of the original, and `_seen`: its values at the last look.
    """

    _followed: list[dict]
    _seen: list[dict]

    @property
    def param_groups(self) -> list[dict]:
        groups = vars(self)["param_groups"]
        if len(groups) == len(self._followed):
            for i, group in enumerate(groups):
                group.setdefault(NUMBER, i)  # loaded from a checkpoint of an optimizer without a twin
        for group in groups:
            i = group[NUMBER]
            given, before = _values(self._followed[i]), self._seen[i]
            group.update({key: value for key, value in given.items() if key not in before or before[key] != value})
            self._seen[i] = given
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict]) -> None:
        vars(self)["param_groups"] = groups


def _values(group: dict) -> dict:
    """The group's settings, such as its learning rate."""
    return {key: value for key, value in group.items() if key not in OWN_KEYS}
