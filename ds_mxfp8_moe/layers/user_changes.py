# SPDX-License-Identifier: Apache-2.0
"""Refuses changes of MoE blocks that AutoEP would lose.

AutoEP makes a layer with a router and experts of its own in the place of a transformers block. It takes over weights,
and settings from the model's config. Hooks, other classes, other methods, and settings changed on the modules would
have no effect. Shared experts stay in the model as they are.
"""

import functools
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import MoELayerSpec
from torch import nn

from ..config import ConfigError
from ..transport.deadline import failure_in_world
from .patches import patched
from .say import print_on_rank_0

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Whose hooks, classes and methods compute the same, or are taken over.
KNOWN = ("accelerate", "deepspeed", "ds_mxfp8_moe", "kernels", "liger_kernel", "peft", "torch", "transformers")
BUT = ("torch.nn.utils.", )  # parametrizations, pruning
SHOWN = 3
CURE = ("Make the change after ds_mxfp8_moe.initialize, on the layer in the block's place: router.gate is the linear "
        "layer of the router, and experts.w1, w3 and w2 are the gate, up and down weights of this rank. Set values in "
        "the model's config before the model is made. Or remove the section \"expert_parallel\"")


def changes_refused(enabled: bool) -> AbstractContextManager:
    """Inside the context, AutoEP takes the number of choices that a router has, and refuses other changes.

    Changes by installed libraries that are not KNOWN are said, since users cannot take them back.

    Args:
        enabled: whether this rank looks at its blocks. Otherwise it only hears of the other ranks' changes.

    Raises:
        ConfigError: inside the context, on every rank, before a block is replaced.
    """

    def replace_layers(plain: Callable, autoep: AutoEP, specs: list[MoELayerSpec], *args, **kwargs) -> Any:
        found = [(f"{spec.moe_module_name}{name}: {change}", by) for spec in specs if enabled
                 for name, change, by in changes_of(autoep.model, spec)]
        own = [text for text, by in found if not _is_library(by)]
        failure = failure_in_world(_listed(own), "the start (every rank looks for changed MoE blocks)")
        if failure:
            raise ConfigError(f"AutoEP would lose what was changed before the engine was made: {failure}. {CURE}")
        if found:
            print_on_rank_0("mxfp8_moe: WARNING: expert parallelism makes MoE blocks anew, without what libraries "
                            f"changed in them: {_listed([text for text, _ in found])}")
        return plain(autoep, _with_top_k(autoep, specs) if enabled else specs, *args, **kwargs)

    return patched(AutoEP, "replace_moe_layers", replace_layers)


def _listed(texts: list[str]) -> str | None:
    more = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more if texts else None


def _with_top_k(autoep: AutoEP, specs: list[MoELayerSpec]) -> list[MoELayerSpec]:
    """The specs with the number of choices that routers have, where the model's config gives another one."""
    if isinstance(autoep.config.top_k, int):  # of the section "expert_parallel"
        return specs
    made = []
    for spec in specs:
        block = autoep.model.get_submodule(spec.moe_module_name)
        found = [vars(one).get("top_k") for one in (getattr(block, spec.router_name), block)]
        changed = [top_k for top_k in found if type(top_k) is int and top_k != spec.top_k]
        made.append(replace(spec, top_k=changed[0]) if changed else spec)
    if others := [new for new, old in zip(made, specs, strict=True) if new.top_k != old.top_k]:
        print_on_rank_0(f"mxfp8_moe: top_k is {others[0].top_k} in {len(others)} of {len(specs)} MoE blocks, "
                        f"{others[0].moe_module_name} the first, as set on their routers and not in the config")
    return made


def changes_of(model: nn.Module, spec: MoELayerSpec) -> Iterator[tuple[str, str, str]]:
    """Yields the changes of a block, each with the module's name in the block and the Python module that made it."""
    block = model.get_submodule(spec.moe_module_name)
    kept = [getattr(block, name) for name in (spec.shared_experts_name, spec.shared_experts_gate_name) if name]
    stays = {module for one in kept if isinstance(one, nn.Module) for module in one.modules()}
    fresh = _fresh_modules(model, spec.moe_module_name)
    for name, module in block.named_modules():
        for change, by in _changes(module, fresh.get(name)) if module not in stays else ():
            if by.split(".")[0] not in KNOWN or by.startswith(BUT):
                yield f".{name}" if name else "", change, by


def _changes(module: nn.Module, fresh: nn.Module | None) -> Iterator[tuple[str, str]]:
    """`fresh`: what transformers makes in the place of the module. None: it is not known."""
    for kind in HOOKS:
        for hook in vars(module)[kind].values():
            yield f"a {kind[1:-1].replace('_', ' ')}", _origin(hook)
    for name, parameter in module.named_parameters(recurse=False):
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            for hook in (hooks or {}).values():
                yield f"a gradient hook of {name}", _origin(hook)
    yield from _other_methods(module)
    if fresh is None:
        return
    if type(module) is not type(fresh):
        yield (f"its class is {type(module).__name__}, where transformers has {type(fresh).__name__}",
               type(module).__module__)
        return
    for name, value in vars(fresh).items():
        now = vars(module).get(name)
        if isinstance(value, int | float | str | None) and not name.startswith("_") and now != value and (
                name not in ("top_k", "training")):
            yield f"{name} is {now!r}, where the model's config gives {value!r}", ""


def _other_methods(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Methods that were replaced, on the module itself or on transformers' class."""
    from_hub = hasattr(type(module), "kernel_layer_name")  # a kernel of the Hub may stand in for its forward
    for name, value in vars(module).items():
        if inspect.isfunction(getattr(type(module), name, None)) and not (from_hub and name == "forward"):
            yield f"its method {name} was replaced", _origin(value)
    for base in type(module).__mro__:
        if base.__module__.startswith("transformers."):
            for name, value in vars(base).items():
                if inspect.isfunction(value):
                    yield f"{base.__name__}.{name} was replaced", _origin(value)


def _fresh_modules(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """The modules, by their names, of a new block as transformers makes it from the config, on the device meta.

    {}: the block is not one of transformers, or needs more than a config and the layer's index.
    """
    kind = next((base for base in type(model.get_submodule(name)).__mro__
                 if base.__module__.startswith("transformers.")), None)
    parents = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)]
    config = next((one.config for one in (*map(model.get_submodule, parents), model) if hasattr(one, "config")), None)
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    try:
        arguments = inspect.signature(kind).bind(config, *numbers[-1:] if "layer_idx" in inspect.signature(
            kind).parameters else ())
        with torch.random.fork_rng([]), torch.device("meta"):
            return dict(kind(*arguments.args).named_modules())
    except Exception:  # of any block
        return {}


def _origin(function: Any) -> str:
    """The name of the Python module in which a function or a method was written, or the class of another callable."""
    while isinstance(function, functools.partial | types.MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    # Not __module__, which functools.wraps takes from the wrapped function.
    return function.__globals__["__name__"] if inspect.isfunction(function) else type(function).__module__


def _is_library(module: str) -> bool:
    if module.startswith(BUT):  # on the user's behalf
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return file.startswith(tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib")))
