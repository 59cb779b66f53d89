# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's checkpoints lack for experts, and what an engine does about it.

- A run that is killed while it saves leaves a file cut short. Errors name the file.
- In ZeRO-1 and 2, DeepSpeed loads rank 0's frozen experts on every rank. Here each rank loads its own.
- In ZeRO-1 and 2, what was trained before and is frozen now ends in a KeyError. Here it is loaded.
- In ZeRO-3, DeepSpeed refuses to save frozen experts, as with LoRA. Here what is trained is saved without them.
- In ZeRO-3, DeepSpeed gathers all parameters of experts to load them. Of those that every rank has, such as biases, a
  checkpoint has no values there: they are in the optimizer's partitions.
- Frozen experts that are held quantized are in no checkpoint. They stay as the model was loaded.
- A run that begins to balance its experts' load has biases that the checkpoint lacks. They begin with zeros.
- A save that fails, and one that is killed, leave the earlier checkpoint whole.

engine_checkpoints.py does the last of these, and calls what is here for the others.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine

from ..compat.expert_groups import trains_experts
from ..layers.adapters import bias_name
from ..layers.experts import expert_blocks
from ..layers.frozen_experts import frozen_layers
from ..ops.log import log_on_rank_0
from ..transport.deadline import tell_peers_on_error


def hide_mxfp8(engine: DeepSpeedEngine) -> None:
    """If all experts are held quantized, DeepSpeed must not look for their files and parameters."""
    if frozen_layers(engine.module) and not any(map(is_moe_param, engine.module.parameters())):
        engine.has_moe_layers = False


@tell_peers_on_error  # only some ranks read this file
def name_broken_file(plain: Callable, path: str, *args, **kwargs) -> Any:
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


def refuse_some_in_mxfp8(engine: DeepSpeedEngine) -> None:
    """Raises RuntimeError if some layers hold their experts quantized, and others train theirs."""
    held = next(iter(frozen_layers(engine.module)), None)
    if held is not None and any(map(is_moe_param, engine.module.parameters())):
        raise RuntimeError(f"{held} holds its frozen experts quantized, in no checkpoint, and other layers "
                           "train theirs, which DeepSpeed saves only for all layers alike: write "
                           '"frozen_experts": "keep" in the mxfp8_moe section')


def adapt_module(engine: DeepSpeedEngine, arguments: dict[str, Any]) -> None:
    """Changes the arguments of load_module_state_dict, after which this rank's frozen parameters are its own.

    DeepSpeed first loads all parameters, experts from their own files. Then it takes all frozen ones from what rank 0
    saved as frozen. In ZeRO-3, it fetches those that are spread alone.

    Raises:
        RuntimeError: the checkpoint has biases of "load_balance_coeff", without which experts are chosen otherwise.
    """
    checkpoint = arguments["checkpoint"]
    check_biases(engine, checkpoint, arguments["strict"])
    if biases := {bias: torch.zeros_like(own) for bias, own in _biases(engine).items() if own is not None}:
        checkpoint = arguments["checkpoint"] = {**checkpoint, "module": {**biases, **checkpoint["module"]}}
    if engine.zero_optimization_stage() == 3:
        if fetched := arguments.get("z3_params_to_fetch"):
            arguments["z3_params_to_fetch"] = [p for p in fetched if is_moe_param(p)]
    elif (fragments := checkpoint.get(FROZEN_PARAM_FRAGMENTS)) is not None:
        frozen = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
        own = {name: checkpoint["module"][name] for name in frozen if name in checkpoint["module"]}
        arguments["checkpoint"] = {**checkpoint, FROZEN_PARAM_FRAGMENTS: fragments | own}


def check_biases(engine: DeepSpeedEngine, checkpoint: dict[str, Any], strict: bool = False) -> None:
    """Raises RuntimeError if a checkpoint has biases of "load_balance_coeff" for which the model has no place. If not
    `strict`, a line says so."""
    if dropped := [bias for bias, own in _biases(engine).items() if own is None and bias in checkpoint["module"]]:
        text = f'has the biases of "load_balance_coeff" ({dropped[0]}, ...), and this run lacks the key'
        if strict:
            raise RuntimeError(f"it {text}: write it. A value of 1e-9 leaves the biases as they are")
        log_on_rank_0(f"mxfp8_moe: WARNING: the checkpoint {text}: experts are chosen without them")


def _biases(engine: DeepSpeedEngine) -> dict[str, torch.Tensor | None]:
    """The biases by which the load of experts is balanced. None: a block has none."""
    return {bias_name(name, block): getattr(block.experts, "expert_bias", None)
            for name, block in expert_blocks(engine.module)}


@contextmanager
def frozen_left_out(engine: DeepSpeedEngine, arguments: dict[str, Any]) -> Iterator[None]:
    """Around the saving or loading of a checkpoint. In ZeRO-3, if all experts are frozen, it may be without them.

    It is saved with `exclude_frozen_parameters=True`, as the Trainer does for PEFT. When it is loaded, frozen
    parameters stay as they are. `arguments`: of the call.
    """
    if engine.zero_optimization_stage() != 3:
        yield
        return
    without = arguments.get("exclude_frozen_parameters", True) and not trains_experts(engine)
    try:
        with engine.without_moe_layers(without):
            yield
    except RuntimeError as error:
        if "does not support frozen expert" not in str(error):
            raise
        raise RuntimeError(f"{error}. If all experts are frozen, as with LoRA, pass "
                           "exclude_frozen_parameters=True to save_checkpoint, and load_module_strict=False to "
                           "load_checkpoint. If some are trained, use ZeRO-1. In every stage, "
                           "ds_mxfp8_moe.save_pretrained(engine, directory) writes the model, or a PeftModel's "
                           "adapters") from error
