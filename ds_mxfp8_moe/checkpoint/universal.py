# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints, by which a run goes on with other ranks. DeepSpeed loads their parameters, but no buffers,
such as the biases of "load_balance_coeff"."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from .earlier_names import folders_found, present_buffers
from .flash_states import as_adamw, is_flash
from .loading import check_biases


@torch.no_grad()
def load_universal(engine: DeepSpeedEngine, folder: Path, plain: Callable[[], Any]) -> Any:
    """Loads a universal checkpoint by `plain`, the engine's own load_checkpoint, and returns its result.

    `folder`: of the tag.
    """
    zero = engine.optimizer
    with folders_found(engine, folder), as_adamw(zero) if is_flash(zero) else nullcontext():
        result = plain()
    file = engine.checkpoint_engine.load(result[0], map_location="cpu")
    if file["module"] is not None:  # of a pipeline, each layer has a file
        check_biases(engine, file)
        buffers = engine.module.state_dict(keep_vars=True)
        for name, value in present_buffers(engine.module, file).items():
            buffers[name].copy_(value)
    return result
