# SPDX-License-Identifier: Apache-2.0
"""Saves the model of an engine as files that transformers and engines for serving read."""

import copy
import os
from dataclasses import replace
from typing import Any

import deepspeed.comm as dist

from ..compute.mx import TILE
from ..layers.lora import saves_adapters
from ..layers.say import print_on_rank_0
from ..transport.deadline import PeerFailure, deadline_for, tell_peers_on_error
from .exporting import checked, stream
from .gathering import (
    base_of,
    beside_held,
    check_complete,
    engine_of,
    held_model,
    restore_persistent,
    skeleton_of,
    whole_state_dict,
)
from .published import Published
from .writing import Shards, size_in_bytes


@tell_peers_on_error
def save_pretrained(engine: Any, save_directory: str | os.PathLike, weights: str = "model", **kwargs) -> None:
    """Writes config and weights for `AutoModelForCausalLM.from_pretrained(save_directory)`.

    Collective: every rank calls it. Works in every ZeRO stage, with converted layers, with DeepSpeed's own, and
    without MoE layers.

    With "model", the weights are those that the model computes with, in its own dtype. Rank 0 gathers the model in its
    host memory, one MoE layer or one other tensor at a time, and writes it. Of a model with adapters, it writes these,
    as PEFT does.

    With "fp8", the experts are in the block FP8 that vLLM and SGLang document (not run), and that transformers reads.
    `export_weights` says which bytes these are. Rank 0 holds one file in its host memory. Adapters are merged. Of a
    model with classic layers, it writes a state dict in this format, with the names that it has with `ep_size=1`.

    Args:
        engine: what `initialize` or `accelerator.prepare` returned, over a transformers model, a PeftModel around one,
            or a module that holds one of these, which is then written without what the module has beside it. Or a
            Hugging Face Trainer whose `train` has begun.
        save_directory: a folder. Only rank 0 writes to it.
        weights: "model" or "fp8".
        kwargs: with "model", arguments of the model's own `save_pretrained`, for example max_shard_size. With "fp8",
            max_shard_size alone: bytes, or a text like "5GB".

    Raises:
        TypeError: there is no engine, or it has no transformers model. With "fp8", nor classic layers.
        ValueError: the model has no form in this block FP8; see `export_weights`.
        RuntimeError: the model is split by tensor parallelism. Or rank 0 could not write; raised on every rank.
    """
    engine = engine_of(engine)
    if weights == "model":
        outcome = _write_unquantized(engine, save_directory, **kwargs)
    else:
        outcome = _write_fp8(replace(checked(engine, weights), beside={}), save_directory, **kwargs)
    outcome = [outcome]
    with deadline_for(dist.get_world_group(), engine.device, "save_pretrained, while rank 0 writes"):
        dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise RuntimeError(f"the model could not be saved to {os.fspath(save_directory)}: {outcome[0]}")


def _write_unquantized(engine, directory, **kwargs) -> str | None:
    """Returns rank 0's error."""
    model, expert_parallel = engine.module, engine._config.expert_parallel_config
    held, place = held_model(model)
    start = f"{place}." if place else ""
    if beside := beside_held(model):
        print_on_rank_0(f"mxfp8_moe: save_pretrained writes the {type(held).__name__} that the {type(model).__name__} "
                        f"holds as {place!r}, and leaves out {len(beside)} tensors beside it "
                        f"({', '.join(list(beside)[:3])}): engine.save_16bit_model writes all of them")
    if adapters := saves_adapters(held):
        saver, wanted = held, _of_adapters(held)
    else:
        saver, wanted = skeleton_of(model), lambda name, value: True
        vars(saver.config).pop("quantization_config", None)  # of the files that the model was loaded from
    state = whole_state_dict(
        model, expert_parallel, lambda name, value: name.startswith(start) and wanted(name.removeprefix(start), value),
        skeleton=None if adapters else saver)
    restore_persistent(engine)
    if dist.get_rank() > 0:
        return None
    state = {name.removeprefix(start): tensor for name, tensor in state.items()}
    try:
        if not adapters:
            check_complete(state, saver)
        if os.path.isfile(directory):  # transformers would log an error and write nothing
            raise NotADirectoryError("expected a folder, or a path that does not exist yet; this is a file")
        saver.save_pretrained(directory, state_dict=state, **kwargs)
    except Exception as error:  # the other ranks wait for rank 0, so they need its error
        return f"{type(error).__name__}: {error}"
    return None


def _of_adapters(model):
    """What PEFT may write: everything trained; the adapters, which may be frozen too; resized embeddings."""
    parts = [f".{adapter}." for adapter in model.peft_config]
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = tuple(f"{name}." for name, module in model.named_modules() if module in ends)
    return lambda name, value: (value.requires_grad or name.startswith(embeddings)
                                or any(part in f"{name}." for part in parts))


def _write_fp8(model: Published, directory, max_shard_size: int | str = "5GB") -> str | None:
    """Returns rank 0's error."""
    files = Shards(directory, size_in_bytes(max_shard_size))
    pairs = stream(model, "fp8", rank_0_only=True)
    try:
        for name, tensor in pairs:  # of rank 0 alone
            files.add(name, tensor)
        if dist.get_rank() == 0:
            files.finish()
            if model.names.skeleton is not None:
                _write_config(model, directory)
    except PeerFailure:
        raise
    except Exception as error:  # the other ranks wait for rank 0, so they need its error
        files.remove()
        if dist.get_rank() > 0:
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        pairs.close()  # what is left is gathered, and dropped
    return None


def _write_config(model: Published, directory) -> None:
    """What transformers' save_pretrained writes beside weights, with what engines need to know about FP8."""
    trained, unconverted = base_of(model.engine.module)[0], model.names.unconverted_modules()
    config = copy.deepcopy(trained.config)
    config.dtype = str(trained.dtype).removeprefix("torch.")
    config.architectures = [type(trained).__name__]
    # transformers reads the first list, and vLLM the second. Scales are float32, so there is no scale_fmt.
    config.quantization_config = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [TILE, TILE],
        "modules_to_not_convert": unconverted, "ignored_layers": unconverted}
    config.save_pretrained(directory)
    if trained.can_generate():
        trained.generation_config.save_pretrained(directory)
