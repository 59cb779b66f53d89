# SPDX-License-Identifier: Apache-2.0
"""What an engine does beside DeepSpeed when it loads a checkpoint, and when it saves one without frozen experts.

Errors name the file: a run that is killed while it saves leaves a file cut short. ZeRO-1 and 2 give every rank its own
frozen experts: DeepSpeed would give rank 0's to all. They read what was trained before and is frozen now: DeepSpeed
would end in a KeyError. ZeRO-3 saves what is trained beside frozen experts, as with LoRA: DeepSpeed would refuse.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.engine import DeepSpeedEngine

from .expert_groups import trains_experts
from .transport.deadline import tell_peers_on_error


def name_broken_files(engine: DeepSpeedEngine) -> None:
    """Makes the engine say which file of a checkpoint it cannot read. A second call changes nothing."""
    if engine.checkpoint_engine is None:  # ZeRO-3 without an optimizer, for evaluation
        return
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
            why = str(error).rstrip(".")
            raise RuntimeError(f"the checkpoint file {path} ({size} bytes) cannot be read: {type(error).__name__}: "
                               f"{why}. It was probably cut short while it was saved or copied: load an earlier "
                               "checkpoint (tag= of load_checkpoint), or copy it again") from error

    load.mxfp8_moe = True
    engine.checkpoint_engine.load = load


def load_frozen_as_saved(engine: DeepSpeedEngine) -> None:
    """Makes the engine load frozen parameters from where they were saved. A second call changes nothing.

    DeepSpeed first loads all parameters, experts from their own files. Then it takes all frozen ones from what rank 0
    saved as frozen.
    """
    plain = engine.load_module_state_dict
    if hasattr(plain, "mxfp8_moe") or engine.zero_optimization_partition_weights():
        return

    @functools.wraps(plain)
    def load(checkpoint: dict, *args, **kwargs) -> None:
        if (fragments := checkpoint.get(FROZEN_PARAM_FRAGMENTS)) is not None:
            frozen = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
            own = {name: checkpoint["module"][name] for name in frozen if name in checkpoint["module"]}
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: fragments | own}
        plain(checkpoint, *args, **kwargs)

    load.mxfp8_moe = True
    engine.load_module_state_dict = load


def leave_frozen_experts_out(engine: DeepSpeedEngine) -> None:
    """Lets an engine in ZeRO-3 whose experts are all frozen save and load checkpoints that are without them.

    It saves them with `exclude_frozen_parameters=True`, as the Trainer does for PEFT. When it loads one, frozen
    parameters stay as they are. A second call changes nothing.
    """
    if hasattr(engine.save_checkpoint, "mxfp8_moe") or not engine.zero_optimization_partition_weights():
        return
    for plain in (engine.save_checkpoint, engine.load_checkpoint):
        setattr(engine, plain.__name__, _without_moe_layers(engine, plain))


def _without_moe_layers(engine: DeepSpeedEngine, plain: Callable) -> Callable:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args, **kwargs) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        had = engine.has_moe_layers
        if given.arguments.get("exclude_frozen_parameters", True) and not trains_experts(engine):
            engine.has_moe_layers = False
        try:
            return plain(*args, **kwargs)
        except RuntimeError as error:
            if "does not support frozen expert" not in str(error):
                raise
            raise RuntimeError(f"{error}. If all experts are frozen, as with LoRA, pass "
                               "exclude_frozen_parameters=True to save_checkpoint, and load_module_strict=False to "
                               "load_checkpoint. If some are trained, use ZeRO-1. In every stage, "
                               "ds_mxfp8_moe.save_pretrained(engine, directory) writes the model, or a PeftModel's "
                               "adapters") from error
        finally:
            engine.has_moe_layers = had

    call.mxfp8_moe = True
    return call
