# SPDX-License-Identifier: Apache-2.0
"""Saves the model of an engine as files that transformers and engines for serving read."""

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import deepspeed.comm as dist
from torch import Tensor

from ..compute.mx import TILE
from ..layers.adapters import saves_adapters
from ..ops.log import log_on_rank_0
from ..transport.agreement import check_same_arguments
from ..transport.deadline import tell_peers_on_error
from ..transport.rank_0 import RankZeroWrites
from . import per_expert
from .exporting import Format, checked, stream
from .gathering import (
    base_of,
    beside_held,
    check_complete,
    given_engine,
    held_model,
    restore_persistent,
    skeleton_of,
    whole_state_dict,
)
from .published import Published
from .staging import README, stage_of, staged
from .writing import ShardWriter, size_in_bytes


@tell_peers_on_error
def save_pretrained(engine: Any, save_directory: str | os.PathLike, weights: Format = "model",
                    adapters: Literal["peft", "per_expert"] = "peft", **kwargs) -> None:
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
        save_directory: a folder. Only rank 0 writes to it. An earlier model in it stays whole until the new one is:
            there has to be room for both. Other files of the folder stay.
        weights: "model" or "fp8".
        adapters: of experts, with "model". "peft": as PEFT loads them. "per_expert": with the names that vLLM
            documents for adapters of each expert's matrices.
        kwargs: with "model", arguments of the model's own `save_pretrained`, for example max_shard_size. With "fp8",
            max_shard_size alone: bytes, or a text like "5GB". With push_to_hub, files are written in place.

    Raises:
        TypeError: there is no engine, or it has no transformers model. With "fp8", nor classic layers.
        ValueError: `weights` differs between ranks, or the model has no form in this block FP8; see `export_weights`.
            Or its adapters have no form for each expert. The error says why.
        RuntimeError: the model is split by tensor parallelism. Or rank 0 could not write; raised on every rank.
        PeerError: rank 0 has died, or its files have not grown for two deadlines.
    """
    check_same_arguments("save_pretrained", weights=weights, adapters=adapters)
    engine = given_engine(engine)
    if adapters != "peft" and (adapters != "per_expert" or weights != "model" or kwargs.get("push_to_hub")):
        raise ValueError(f'adapters={adapters!r} and weights={weights!r} were given; supported are "peft", and '
                         '"per_expert" with weights="model" and without push_to_hub')
    if weights == "model":
        base_of(engine.module)
        named = per_expert.checked(engine) if adapters == "per_expert" else None
        write = partial(_write_unquantized, engine, named)
    else:
        most_bytes = size_in_bytes(kwargs.pop("max_shard_size", "5GB"))
        if kwargs:
            raise TypeError(f'with weights="fp8", save_pretrained takes max_shard_size, and not {list(kwargs)}')
        write = partial(_write_fp8, replace(checked(engine, weights), beside={}), most_bytes)
    with RankZeroWrites("save_pretrained", f"the model could not be saved to {os.fspath(save_directory)}",
                        stage_of(save_directory), engine.device) as rank_0:
        write(save_directory, rank_0, **kwargs)


def _write_unquantized(engine, named: Published | None, directory, rank_0: RankZeroWrites, **kwargs) -> None:
    model = engine.module
    held, place = held_model(model)
    prefix = f"{place}." if place else ""
    if beside := beside_held(model):
        log_on_rank_0(f"mxfp8_moe: save_pretrained writes the {type(held).__name__} that the {type(model).__name__} "
                        f"holds as {place!r}, and leaves out {len(beside)} tensors beside it "
                        f"({', '.join(list(beside)[:3])}): engine.save_16bit_model writes all of them")
    if adapters := saves_adapters(held):
        saver, is_saved = held, _saved_with_adapters(held)
    else:
        saver, is_saved = skeleton_of(model), lambda name, value: True
        vars(saver.config).pop("quantization_config", None)  # of the files that the model was loaded from
    state = whole_state_dict(
        model, lambda name, value: name.startswith(prefix) and is_saved(name.removeprefix(prefix), value))
    restore_persistent(engine)
    if dist.get_rank() > 0:
        return
    state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    if not adapters:
        check_complete(state, saver)
    pushed = kwargs.get("push_to_hub", False)
    with staged(directory, rank_0.synced, reads=[README] if adapters else (), in_place=pushed) as folder:
        saver.save_pretrained(folder, state_dict=state, **kwargs)
        if named is not None:
            per_expert.split_experts(folder, named)


def _saved_with_adapters(model) -> Callable[[str, Tensor], bool]:
    """Tells by name and value what PEFT may write: what is trained, adapters even if frozen, resized embeddings."""
    parts = [f".{adapter}." for adapter in model.peft_config]
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = tuple(f"{name}." for name, module in model.named_modules() if module in ends)
    return lambda name, value: (value.requires_grad or name.startswith(embeddings)
                                or any(part in f"{name}." for part in parts))


def _write_fp8(model: Published, most_bytes: int, directory, rank_0: RankZeroWrites) -> None:
    pairs = stream(model, "fp8", rank_0_only=True, meet=rank_0.step)
    try:
        if dist.get_rank() > 0:
            return
        with staged(directory, rank_0.synced) as folder:
            files = ShardWriter(folder, most_bytes)
            for name, tensor in pairs:
                files.add(name, tensor)
            files.finish()
            if model.names.skeleton is not None:
                _write_config(model, folder)
    finally:
        for _ in pairs:  # every rank takes part in what is left, and drops it
            pass


def _write_config(model: Published, directory) -> None:
    """What transformers' save_pretrained writes beside weights, with what engines need to know about FP8."""
    trained, unconverted = base_of(model.engine.module)[0], model.names.unconverted_modules()
    config = copy.deepcopy(trained.config)
    config.dtype = str(trained.dtype).removeprefix("torch.")
    config.architectures = [type(trained).__name__]
    if model.names.has_head(trained):  # with adapters on one of two tied weights, they differ
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    # transformers reads the first list, and vLLM the second. Scales are float32, so there is no scale_fmt.
    config.quantization_config = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [TILE, TILE],
        "modules_to_not_convert": unconverted, "ignored_layers": unconverted}
    config.save_pretrained(directory)
    if trained.can_generate():
        trained.generation_config.save_pretrained(directory)
