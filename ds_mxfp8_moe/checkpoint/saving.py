# SPDX-License-Identifier: Apache-2.0
"""Makes the ways of saving that people already use write whole models, with the experts of all ranks.

DeepSpeed, Accelerate and transformers would save one rank's experts, without a word. transformers would load
spread ones as a model with new experts. They get Hugging Face's names here, as by `save_pretrained`. Classic
layers get the names that one process has with `ep_size=1`. With the section enabled, these calls are right or raise an
error that names the call that is:

    engine.save_16bit_model, accelerator.get_state_dict, accelerator.save_model
    trainer.save_model and the Trainer's checkpoints, which call accelerator.get_state_dict
    save_pretrained and push_to_hub of the model itself, and of a PeftModel; of the model also on rank 0 alone, if all
    ranks have saved the same weights before (earlier_saves.py)
    engine.save_checkpoint in ZeRO-3 with frozen experts, which DeepSpeed refuses
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ..compat.patches import wrap
from ..compat.private_names import say_if_missing
from ..layers.adapters import has_adapters, is_peft, saves_adapters
from ..layers.experts import expert_blocks
from ..layers.frozen_experts import frozen_layers
from ..recognition.stacked import SPREAD_NAMES
from ..transport.agreement import check_same_arguments
from ..transport.deadline import tell_peers_on_error
from ..transport.rank_0 import RankZeroWrites
from .earlier_saves import copied_from_earlier_save, remember_gathered, remember_saved
from .gathering import (
    Gather,
    classic_layers,
    classic_tensors,
    is_partitioned,
    needs_peers,
    refuse_tensor_parallelism,
    restore_persistent,
    whole_state_dict,
)
from .staging import README, stage_of, staged

# On an engine, its model and the model's parts, if they hold one rank's experts. It is True, and False on a part.
MARK = "_mxfp8_spread"
USE_INSTEAD = ("Every rank calls ds_mxfp8_moe.save_pretrained(engine, directory), where engine is what "
               "accelerator.prepare or initialize returned, or the Trainer")
COPIED = ("If you cannot change the program: rank 0 may save alone what all ranks have saved since the last step, so "
          "let it write a checkpoint at the end, as the Trainer does with save_strategy \"steps\" or \"epoch\"")


def save_whole_models(engine: DeepSpeedEngine) -> None:
    """Applies the above to an engine with MoE layers. A second call changes nothing.

    This outlives the engine, whose model still holds one rank's experts and can still be saved. The classes of other
    libraries save models without a MARK as before.

    One stage of a pipeline is no model: its engine refuses to save one.
    """
    spread = any(expert_blocks(engine.module))
    classic = bool(classic_layers(engine.module)) and not isinstance(engine, PipelineEngine)
    if MARK in vars(engine) or not (spread or classic) or say_if_missing("saving"):
        return
    vars(engine)[MARK] = True
    by_libraries = not say_if_missing("saving by Trainer and Accelerate")
    # An attribute of transformers itself may import what the script does not use.
    accelerate, modeling, peft = map(sys.modules.get, ("accelerate", "transformers.modeling_utils", "peft"))
    if accelerate and by_libraries:
        wrap(accelerate.Accelerator, "get_state_dict", _get_state_dict)
        wrap(accelerate.Accelerator, "save_model", _save_model)
    if modeling and by_libraries:
        wrap(modeling.PreTrainedModel, "save_pretrained", _save_pretrained)
    if spread or needs_peers(engine.module):
        vars(engine.module)[MARK] = True
    if not spread or not by_libraries:
        return
    if modeling:
        for name, module in engine.module.named_modules():
            saves_itself = is_peft(module) or isinstance(module, modeling.PreTrainedModel)
            if name and saves_itself and any(expert_blocks(module)):
                vars(module)[MARK] = False
    if peft:
        wrap(peft.PeftModel, "save_pretrained", _save_adapters)


@tell_peers_on_error
def consolidated_state_dict(engine: DeepSpeedEngine, exclude_frozen_parameters: bool = False) -> dict | None:
    """The whole model on rank 0, None elsewhere. Collective."""
    refuse_tensor_parallelism(engine)
    if needs_peers(engine.module):
        check_same_arguments("saving the model", exclude_frozen_parameters=exclude_frozen_parameters)
    buffers = {name for name, _ in engine.module.named_buffers()}

    held = {f"{name}.experts.{weight}" for name in frozen_layers(engine.module) for weight in SPREAD_NAMES}
    only_adapters = has_adapters(engine.module)  # who has them saves them alone

    def wanted(name: str, value: torch.Tensor) -> bool:
        if only_adapters and name in held:
            return False
        return value.requires_grad or not exclude_frozen_parameters or name in buffers

    if any(expert_blocks(engine.module)):
        state = whole_state_dict(engine.module, wanted)
    else:
        keep = dist.get_rank() == 0
        state = dict(classic_tensors(engine.module, Gather(keep), wanted))
        state = state if keep else None
    restore_persistent(engine)
    if state is not None and not exclude_frozen_parameters:
        remember_gathered(engine.module, state)
    return state


@contextmanager
def _staged_by_all(engine: DeepSpeedEngine, call: str, directory: str | os.PathLike) -> Iterator[Path]:
    """Around a call of every rank in which rank 0 writes to a folder. Yields the folder to write to instead."""
    with RankZeroWrites(call, f"the model could not be saved to {os.fspath(directory)}", stage_of(directory),
                        engine.device) as rank_0:
        if dist.get_rank() > 0:
            yield Path(directory)
        else:
            with staged(directory, rank_0.synced) as folder:
                yield folder


def save_16bit_model(engine: DeepSpeedEngine, save_dir: str | os.PathLike, save_filename: str = "pytorch_model.bin",
                     exclude_frozen_parameters: bool = False) -> bool:
    """engine.save_16bit_model, with the experts of all ranks. Collective."""
    _refuse_adapters(engine, "save_16bit_model")
    with _staged_by_all(engine, "save_16bit_model", save_dir) as folder:
        state = consolidated_state_dict(engine, exclude_frozen_parameters)
        if state is not None:
            engine.checkpoint_engine.save(state, os.path.join(folder, save_filename))
    return True


def _get_state_dict(plain: Callable, accelerator: Any, model: torch.nn.Module, *args, **kwargs) -> dict | None:
    if isinstance(model, DeepSpeedEngine) and MARK in vars(model):
        return consolidated_state_dict(model)
    if MARK in vars(model):
        raise RuntimeError(f"this {type(model).__name__} holds one rank's experts: pass the model that "
                           "accelerator.prepare returned, on every rank, to get those of all ranks")
    return plain(accelerator, model, *args, **kwargs)


def _save_model(plain: Callable, accelerator: Any, model: torch.nn.Module, save_directory: str | os.PathLike, *args,
                **kwargs) -> None:
    if not isinstance(model, DeepSpeedEngine) or MARK not in vars(model):
        return plain(accelerator, model, save_directory, *args, **kwargs)
    _refuse_adapters(model, "accelerator.save_model")
    with _staged_by_all(model, "accelerator.save_model", save_directory) as folder:
        return plain(accelerator, model, folder, *args, **kwargs)


def _refuse_adapters(engine: DeepSpeedEngine, method: str) -> None:
    """Weights beside adapters are a file that neither transformers nor PEFT loads."""
    if saves_adapters(engine.module):
        raise RuntimeError(f"{method} does not write adapters as PEFT loads them. {USE_INSTEAD}")


def _save_pretrained(plain: Callable, model: Any, *args, **kwargs) -> None:
    if MARK not in vars(model):
        return plain(model, *args, **kwargs)
    given = inspect.signature(plain).bind(model, *args, **kwargs)
    if _writes_nothing(given.arguments):
        return None
    state = given.arguments.get("state_dict")
    if state is not None and (stray := _stray_layers(model, state)):
        raise RuntimeError(f"this state dict holds one rank's experts ({stray[0]}): get it from "
                           f"accelerator.get_state_dict, called on every rank. Or: {USE_INSTEAD}")
    if state is None:
        if not vars(model)[MARK] or needs_peers(model):
            if copied_from_earlier_save(model, given.arguments):
                return None
            raise RuntimeError(f"this {type(model).__name__} holds one rank's part of what a DeepSpeed engine trains, "
                               f"so it cannot save itself. {USE_INSTEAD}. {COPIED}")
        given.arguments["state_dict"] = whole_state_dict(model, keep=True)
    directory = Path(given.arguments["save_directory"])
    files = _staged_call(plain, given, saves_adapters(model))
    if state is not None and not saves_adapters(model) and not given.arguments.get("push_to_hub"):
        remember_saved(model, state, directory, files)


def _staged_call(plain: Callable, given: inspect.BoundArguments, adapters: bool) -> list[Path]:
    """Calls a model's save_pretrained. Its files replace the folder's once all are written. Returns their paths."""
    pushed = given.arguments.get("push_to_hub", False)
    with staged(given.arguments["save_directory"], reads=[README] if adapters else (), in_place=pushed) as folder:
        given.arguments["save_directory"] = folder
        plain(*given.args, **given.kwargs)
        return [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]


def _stray_layers(model: torch.nn.Module, state: dict) -> list[str]:
    """Blocks of which a state dict has this rank's experts, or none where they are held quantized."""
    held = {} if has_adapters(model) else frozen_layers(model)
    return [name for name, _ in expert_blocks(model) if f"{name}.experts.w1" in state or (
        name in held and not any(key.startswith(f"{name}.experts.") and not key.endswith("_bias") for key in state))]


def _save_adapters(plain: Callable, model: Any, *args, **kwargs) -> None:
    # Outside ZeRO-3 each rank has all adapters. PEFT takes the state dict from the keyword arguments.
    if MARK in vars(model):
        if _writes_nothing(kwargs):
            return None
        if is_partitioned(model) and kwargs.get("state_dict") is None:
            raise RuntimeError(f"ZeRO-3 has partitioned the adapters, so this {type(model).__name__} cannot save them "
                               f"by itself. {USE_INSTEAD}")
        _staged_call(plain, inspect.signature(plain).bind(model, *args, **kwargs), adapters=True)
        return None
    return plain(model, *args, **kwargs)


def _writes_nothing(arguments: dict) -> bool:
    """Whether this rank is not the main process, or got the None that `get_state_dict` returns off rank 0.

    On CPUs, Accelerate takes every rank for the main process, so that the second case is common there.
    """
    without_state = "state_dict" in arguments and arguments["state_dict"] is None
    return not arguments.get("is_main_process", True) or (without_state and dist.get_rank() > 0)
