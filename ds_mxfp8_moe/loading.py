# SPDX-License-Identifier: Apache-2.0
"""What an engine does beside DeepSpeed when it loads a checkpoint.

Errors name the file: a run that is killed while it saves leaves a file cut short. And ZeRO-2 gives every rank its own
frozen experts: DeepSpeed would give rank 0's to all.
"""

import functools
import os
from typing import Any

from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.engine import DeepSpeedEngine

from .transport.deadline import tell_peers_on_error


def name_broken_files(engine: DeepSpeedEngine) -> None:
    """Makes the engine say which file of a checkpoint it cannot read. A second call changes nothing."""
    plain = engine.checkpoint_engine.load
    if hasattr(plain, "mxfp8_moe"):
        return

    @tell_peers_on_error  # only some ranks read this file
    @functools.wraps(plain)
    def load(path: str, *args, **kwargs) -> Any:
        try:
            return plain(path, *args, **kwargs)
        except Exception as error:
            if not os.path.isfile(path):
                raise
            size = os.path.getsize(path)
            raise RuntimeError(f"the checkpoint file {path} ({size} bytes) cannot be read: {type(error).__name__}: "
                               f"{error}. It was probably cut short while it was saved or copied: load an earlier "
                               "checkpoint (tag= of load_checkpoint), or copy it again") from error

    load.mxfp8_moe = True
    engine.checkpoint_engine.load = load


def keep_own_frozen_experts(engine: DeepSpeedEngine) -> None:
    """Makes the engine load frozen experts from their own files. A second call changes nothing.

    In ZeRO-2, DeepSpeed first loads experts from these files, and then all frozen parameters as rank 0 saved them.
    """
    plain = engine.load_module_state_dict
    if hasattr(plain, "mxfp8_moe") or engine.zero_optimization_partition_weights():
        return

    @functools.wraps(plain)
    def load(checkpoint: dict, *args, **kwargs) -> None:
        if fragments := checkpoint.get(FROZEN_PARAM_FRAGMENTS):
            own = {name: checkpoint["module"].get(name, tensor) for name, tensor in fragments.items()}
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: own}
        plain(checkpoint, *args, **kwargs)

    load.mxfp8_moe = True
    engine.load_module_state_dict = load
