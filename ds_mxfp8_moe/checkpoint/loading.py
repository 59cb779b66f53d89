# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's checkpoints lack for experts, and what an engine does about it.

- A run that is killed while it saves leaves a file cut short. Errors name the file.
- In ZeRO-1 and 2, DeepSpeed loads rank 0's frozen experts on every rank. Here each rank loads its own.
- In ZeRO-1 and 2, what was trained before and is frozen now ends in a KeyError. Here it is loaded.
- In ZeRO-3, DeepSpeed refuses to save frozen experts, as with LoRA. Here what is trained is saved without them.
- In ZeRO-3, DeepSpeed gathers all parameters of experts to load them. Of those that every rank has, such as biases, a
  checkpoint has no values there: they are in the optimizer's partitions.
- Frozen experts that are held in MXFP8 are in no checkpoint. They stay as the model was loaded.
- A save that fails, and one that is killed, leave the earlier checkpoint whole: engine_checkpoints.py.
"""

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine

from ..layers.found import trains_experts
from ..layers.frozen_experts import frozen_layers
from ..layers.patches import lent, wrap
from ..transport.deadline import tell_peers_on_error
from .engine_checkpoints import keep_checkpoints_whole


def hook_checkpoints(engine: DeepSpeedEngine) -> None:
    """Does the above for an engine, until it is destroyed. A second call changes nothing."""
    if engine.checkpoint_engine is not None:  # ZeRO-3 without an optimizer, for evaluation, has none
        wrap(engine.checkpoint_engine, "load", _name_broken_file, until=engine)

    frozen = frozen_layers(engine.module)
    if frozen and any(map(is_moe_param, engine.module.parameters())):
        wrap(engine, "save_checkpoint", partial(_refuse_some_in_mxfp8, next(iter(frozen))), until=engine)
    elif frozen:
        engine.has_moe_layers = False  # for DeepSpeed, which looks for files and parameters of experts
    if engine.zero_optimization_partition_weights():
        wrap(engine, "save_checkpoint", partial(_without_moe_layers, engine), until=engine)
        wrap(engine, "load_checkpoint", partial(_without_moe_layers, engine), until=engine)
        wrap(engine, "load_module_state_dict", _fetch_spread_alone, until=engine)
    else:
        wrap(engine, "load_module_state_dict", partial(_with_own_frozen, engine), until=engine)
    if engine.checkpoint_engine is not None:
        keep_checkpoints_whole(engine)


@tell_peers_on_error  # only some ranks read this file
def _name_broken_file(plain: Callable, path: str, *args, **kwargs) -> Any:
    """Reads a file of a checkpoint. An error names it."""
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


def _refuse_some_in_mxfp8(layer: str, plain: Callable, *args, **kwargs) -> None:
    raise RuntimeError(f"{layer} holds its frozen experts in MXFP8, which no checkpoint contains, and other layers "
                       "train theirs, which DeepSpeed saves only for all layers alike: write "
                       '"frozen_experts": "keep" in the mxfp8_moe section')


def _with_own_frozen(engine: DeepSpeedEngine, plain: Callable, checkpoint: dict, *args, **kwargs) -> None:
    """Loads a checkpoint, with frozen parameters from where this rank saved them.

    DeepSpeed first loads all parameters, experts from their own files. Then it takes all frozen ones from what rank 0
    saved as frozen.
    """
    if (fragments := checkpoint.get(FROZEN_PARAM_FRAGMENTS)) is not None:
        frozen = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
        own = {name: checkpoint["module"][name] for name in frozen if name in checkpoint["module"]}
        checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: fragments | own}
    plain(checkpoint, *args, **kwargs)


def _fetch_spread_alone(plain: Callable, *args, **kwargs) -> None:
    given = inspect.signature(plain).bind(*args, **kwargs)
    if fetched := given.arguments.get("z3_params_to_fetch"):
        given.arguments["z3_params_to_fetch"] = [p for p in fetched if is_moe_param(p)]
    plain(*given.args, **given.kwargs)


def _without_moe_layers(engine: DeepSpeedEngine, plain: Callable, *args, **kwargs) -> Any:
    """Saves or loads a checkpoint in ZeRO-3. If all experts are frozen, it may be without them.

    It is saved with `exclude_frozen_parameters=True`, as the Trainer does for PEFT. When it is loaded, frozen
    parameters stay as they are.
    """
    given = inspect.signature(plain).bind(*args, **kwargs)
    given.apply_defaults()
    without = given.arguments.get("exclude_frozen_parameters", True) and not trains_experts(engine)
    try:
        with lent(engine, "has_moe_layers", engine.has_moe_layers and not without):
            return plain(*args, **kwargs)
    except RuntimeError as error:
        if "does not support frozen expert" not in str(error):
            raise
        raise RuntimeError(f"{error}. If all experts are frozen, as with LoRA, pass "
                           "exclude_frozen_parameters=True to save_checkpoint, and load_module_strict=False to "
                           "load_checkpoint. If some are trained, use ZeRO-1. In every stage, "
                           "ds_mxfp8_moe.save_pretrained(engine, directory) writes the model, or a PeftModel's "
                           "adapters") from error
