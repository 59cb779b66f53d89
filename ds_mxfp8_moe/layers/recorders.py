# SPDX-License-Identifier: Apache-2.0
"""Lets DeepSpeed's AutoEP start with transformers 5.23 and later.

For most model types, AutoEP changes transformers' registry of what models record (router logits, hidden states) while
it installs a model's hooks, and then puts it back. It reads and writes entries by the name of the model's class. From
5.23 on the registry takes models in place of names: reading raises a TypeError, and writing goes to another entry.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .patches import lent


@contextmanager
def named_recorders() -> Iterator[None]:
    """Inside the context, transformers' registry also takes the names of classes.

    Models, as transformers itself gives, are treated as before.
    """
    # Not imported: as long as transformers is not, there is no model of its own.
    module = sys.modules.get("transformers.utils.output_capturing")
    registry = getattr(module, "_CAN_RECORD_REGISTRY", None)
    plain = type(registry)
    if not isinstance(registry, dict) or plain is dict:
        yield
        return

    class Registry(plain):
        """A string is the name of a class, as in a plain dict."""

        def get(self, key: Any, *default: Any) -> Any:
            return dict.get(self, key, *default) if isinstance(key, str) else super().get(key, *default)

        def __setitem__(self, key: Any, value: Any) -> None:
            if isinstance(key, str):
                dict.__setitem__(self, key, value)
            else:
                super().__setitem__(key, value)

    # The registry itself, since modules of transformers hold it under names of their own.
    with lent(registry, "__class__", Registry):
        yield
