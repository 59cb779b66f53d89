# SPDX-License-Identifier: Apache-2.0
"""Lets DeepSpeed's AutoEP start with transformers 5.23 and later.

For most model types, AutoEP changes transformers' registry of what models record (router logits, hidden states) while
it installs a model's hooks, and then puts it back. It reads and writes entries by the name of the model's class. From
5.23 on the registry takes models in place of names: reading raises a TypeError, and writing goes to another entry.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from deepspeed.module_inject.auto_ep_presets import base
from torch import nn

from .patches import lent


@contextmanager
def named_recorders() -> Iterator[None]:
    """Inside the context, transformers' registry also takes the names of classes, if DeepSpeed needs that.

    Models, as transformers itself gives, are treated as before.
    """
    # Not imported: as long as transformers is not, there is no model of its own.
    module = sys.modules.get("transformers.utils.output_capturing")
    registry = getattr(module, "_CAN_RECORD_REGISTRY", None)
    plain = type(registry)
    if not isinstance(registry, dict) or plain is dict or _deepspeed_restores(plain()):
        yield
        return
    # The registry itself, since modules of transformers hold it under names of their own.
    with lent(registry, "__class__", _taking_names(plain)):
        yield


def _deepspeed_restores(registry: dict) -> bool:
    """Whether DeepSpeed puts an entry of this empty registry back after it has changed it."""
    model = nn.Module()
    name = str(model.__class__)
    before, changed = {"router_logits": "before"}, {"router_logits": "changed"}
    dict.__setitem__(registry, name, before)
    transformers = SimpleNamespace(_CAN_RECORD_REGISTRY=registry, maybe_install_capturing_hooks=lambda model: None)
    try:
        base._install_instance_transformers_output_recorders(model, {name: changed}, transformers, lambda model: 0)
    except Exception:  # whatever the two libraries disagree about
        return False
    return dict(registry) == {name: before}


def _taking_names(plain: type) -> type:
    """A subclass of transformers' registry. A string is the name of a class, as in a plain dict."""

    class Registry(plain):

        def get(self, key: Any, *default: Any) -> Any:
            return dict.get(self, key, *default) if isinstance(key, str) else super().get(key, *default)

        def __setitem__(self, key: Any, value: Any) -> None:
            if isinstance(key, str):
                dict.__setitem__(self, key, value)
            else:
                super().__setitem__(key, value)

    return Registry
