# SPDX-License-Identifier: Apache-2.0
"""Notices what is done to a converted layer's experts after conversion.

A converted layer computes a formula from its experts' weights and never calls their modules: a hook, another
activation or another `forward` given to them later would have no effect. The layer raises instead.
"""

from collections.abc import Iterator
from itertools import repeat
from operator import contains, getitem
from typing import Any, NamedTuple

import torch
from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TORCH_OWN = vars(nn.Module()).keys()  # attributes that every module has


def foreign_hooks(module: nn.Module) -> list[str]:
    """The kinds of the module's hooks, one entry a hook; DeepSpeed's own (its profiler's, ZeRO-3's) left out."""
    return [kind[1:-1].replace("_", " ") for kind in HOOKS for hook in getattr(module, kind).values()
            if not (getattr(hook, "__module__", None) or "").startswith("deepspeed.")]


class _Held(NamedTuple):
    """What a module had at conversion. `store`: "_modules", "_parameters", or "__dict__" for a plain attribute."""

    module: nn.Module
    store: str
    key: str
    value: Any


def _contents(module: nn.Module) -> Iterator[_Held]:
    """All but the weights, which may change, and nn.Linear's attributes, which no forward reads."""
    yield from (_Held(module, "_modules", key, child) for key, child in module._modules.items())
    yield from (_Held(module, "_parameters", key, None) for key, p in module._parameters.items() if p is None)
    if type(module) is not nn.Linear:
        yield from (_Held(module, "__dict__", key, value) for key, value in vars(module).items()
                    if key not in TORCH_OWN)


class Watch:
    """What the modules of a layer's experts hold at conversion, to compare with at each use.

    Not watched: the weights, and what changes inside an attribute's object.
    """

    def __init__(self, experts: nn.Module):
        """`experts`: DeepSpeed's `Experts`, as it is converted."""
        self._experts = experts
        self._names = {module: name for name, module in experts.named_modules(prefix="experts")}
        self._held = [held for module in self._names for held in _contents(module)]
        self._kinds = [(type(module), len(module._modules)) for module in self._names]
        self._forwards = self._class_forwards()
        self._lookups = None

    def __getstate__(self) -> dict:
        # A copy's modules have dicts of their own, and not every function can be pickled.
        return vars(self) | {"_lookups": None, "_forwards": None}

    def _class_forwards(self) -> dict:
        """Of the user's own classes: tools that only look on wrap torch's."""
        classes = set(map(type, self._names))
        return {cls: cls.forward for cls in classes if not cls.__module__.startswith(("torch.", "deepspeed."))}

    @torch.compiler.disable
    def check(self, layer: str, experts: nn.Module) -> None:
        """Raises RuntimeError where something was changed. About 10 us for 16 experts of 4 modules where not.
        `experts`: those that the layer has now."""
        if self._lookups is None:
            self._lookups, self._forwards = self._look_up(), self._forwards or self._class_forwards()
        hooks, instances, children, stores, keys, values = self._lookups
        try:
            # A few passes in C; equality is settled by identity.
            replaced = any(map(contains, instances, repeat("forward"))) or any(
                cls.forward is not forward for cls, forward in self._forwards.items())
            same = list(zip(map(type, self._names), map(len, children), strict=True)) == self._kinds
            same = same and experts is self._experts and list(map(getitem, stores, keys)) == values
            if same and not any(hooks) and not replaced:
                return
        except Exception:  # an attribute is gone, or does not compare: below it is found and named
            pass
        change = next(self._changes(), None) if experts is self._experts else "its experts were replaced"
        if change is not None:
            raise RuntimeError(f"{layer}: {change} after conversion. A converted layer computes from its experts' "
                               "weights and does not call their modules, so that would have no effect. Do it before "
                               "ds_mxfp8_moe.initialize or convert, or leave the layer out with 'exclude'")

    def _look_up(self) -> tuple:
        return ([getattr(module, kind) for module in self._names for kind in HOOKS],
                [vars(module) for module in self._names], [module._modules for module in self._names],
                [getattr(held.module, held.store) for held in self._held],
                [held.key for held in self._held], [held.value for held in self._held])

    def _changes(self) -> Iterator[str]:
        for module, name in self._names.items():
            for kind in foreign_hooks(module):
                yield f"{name} ({type(module).__name__}) was given a {kind}"
            if "forward" in vars(module):
                yield f"the forward method of {name} ({type(module).__name__}) was replaced on the instance"
        for cls, forward in self._forwards.items():
            if cls.forward is not forward:
                yield f"the forward method of {cls.__name__} was replaced"
        for (module, name), (cls, count) in zip(self._names.items(), self._kinds, strict=True):
            if type(module) is not cls:
                yield f"the class of {name} was changed from {cls.__name__} to {type(module).__name__}"
            if len(module._modules) > count:
                yield f"{name} ({type(module).__name__}) was given a module, {list(module._modules)[-1]},"
        for module, store, key, value in self._held:
            if not _same(getattr(module, store).get(key, _Held), value):
                yield f"{key} of {self._names[module]} ({type(module).__name__}) was changed"


def _same(now: Any, then: Any) -> bool:
    try:
        return now is then or bool(now == then)
    except Exception:  # such as two tensors of several elements: not plainly equal
        return False
