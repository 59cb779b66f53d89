# SPDX-License-Identifier: Apache-2.0
"""The package where DeepSpeed lacks names that it imports, without which no layer can be converted.

`initialize` is DeepSpeed's own, after one line that says so.
"""

from typing import Any

import deepspeed

WHY = ""  # the ImportError's text, from __init__.py


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


def warning() -> str:
    return f"mxfp8_moe: WARNING: this is plain DeepSpeed: deepspeed {deepspeed.__version__}: {WHY}"


def _say() -> None:
    if not deepspeed.comm.is_initialized() or deepspeed.comm.get_rank() == 0:
        print(warning(), flush=True)
