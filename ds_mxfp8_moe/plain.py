# SPDX-License-Identifier: Apache-2.0
"""The package where DeepSpeed lacks names without which no layer can be converted (ops/private_names.py).

`initialize` is DeepSpeed's own, after one line that says so.
"""

from typing import Any

import deepspeed

from .layers.say import print_on_rank_0
from .ops.private_names import line_about


def initialize(*args, **kwargs) -> tuple:
    """deepspeed.initialize."""
    _say()
    return deepspeed.initialize(*args, **kwargs)


def enable() -> None:
    """Engines stay plain DeepSpeed's."""
    _say()


def convert(model_or_engine: Any, config: Any = None) -> None:
    """Layers stay DeepSpeed's."""
    _say()


def _say() -> None:
    print_on_rank_0(line_about("import"))
