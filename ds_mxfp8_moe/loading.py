# SPDX-License-Identifier: Apache-2.0
"""Errors of loading a checkpoint that name the file. A run that is killed while it saves leaves a file cut short."""

import functools
import os
from typing import Any

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
