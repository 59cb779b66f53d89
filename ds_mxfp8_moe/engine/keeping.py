# SPDX-License-Identifier: Apache-2.0
"""Lets an engine's layers keep the quantized weights of their experts (ffn/kept_weights.py).

With "keep_quantized_weights": true they keep them from the start on, with false never. Without the key, the first step
decides: it shows how often a layer runs in a step, and how much memory stays free. Kept weights need fewer casts, so
that MXFP8 is faster than bf16 with fewer tokens. Where memory for the forms of forward and backward is lacking, one
form is kept, and backward transposes it. Once the device runs out of memory, a rank keeps nothing any more.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from ..compat.private_names import say_if_missing
from ..config import MXFP8MoEConfig, ds_setting
from ..ffn.kept_weights import KeptWeights
from ..layers.experts import converted_layers
from ..layers.frozen_experts import frozen_of
from ..ops.log import log, log_on_rank_0
from ..ops.mx_format import TILE
from ..transport.deadline import answers_of_all
from .flash_adamw import SMALLER_STATES

MOST_OF_FREE = 0.5  # of the memory that the first step left free, which later and longer batches may need


def keep_quantized_weights(engine: DeepSpeedEngine, config: MXFP8MoEConfig, converted: int) -> None:
    """Lets the engine's layers keep quantized weights, as their config asks for it and where the engine allows it.

    The engine clears them before and after all that changes weights, above all the optimizer's step, skipped or not.
    Steps leave those of frozen experts alone.

    Args:
        config: the section, which may be disabled. It counts on ranks without converted layers, as in a pipeline.
        converted: the number of layers that were converted on any rank.
    """
    stop_keeping(engine)
    layers = converted_layers(engine.module)
    asked = (layers[0].mxfp8_settings.config if layers else config).keep_quantized_weights
    if asked is False or not (layers or config.enabled and converted):
        return
    if say_if_missing("keep_quantized_weights"):
        return
    obstacle = _obstacle(engine)
    if obstacle:
        if asked:
            log_on_rank_0(f'mxfp8_moe: "keep_quantized_weights" has no effect: {obstacle}')
        return
    # Layers that hold frozen experts in MXFP8 cast nothing.
    layers = [layer for layer in layers
              if layer.mxfp8_settings.recipe.quantize_gemm and frozen_of(layer.experts) is None]
    if asked:
        _keep(engine, layers)
    else:
        engine._mxfp8.put("first step", _FirstStep(engine, layers))
    own = getattr(engine.optimizer, "optimizer", engine.optimizer)  # without what DeepSpeed has around it
    if isinstance(own, torch.optim.Optimizer):  # whose step somebody may call by himself
        engine._mxfp8.step_hook = own.register_step_post_hook(partial(_after_step, weakref.ref(engine)))


def _obstacle(engine: DeepSpeedEngine) -> str | None:
    if not hasattr(engine.optimizer, "step"):
        return "the engine has no optimizer, so it does not know when weights change"
    if engine.zero_optimization_stage() == 3:
        return "ZeRO-3 frees the weights after each call"
    if ds_setting(engine, "zero_optimization", "zenflow"):
        return "ZenFlow changes weights between the optimizer's steps"
    return None


class _FirstStep:
    """What the first step shows, and what follows from it.

    Attributes:
        layers: those that could keep weights.
        calls: how often the first layer's weights were multiplied in training mode: in each turn, and in repeats of
            activation checkpointing.
    """

    def __init__(self, engine: DeepSpeedEngine, layers: list):
        self.engine, self.layers, self.calls, self._hook = engine, layers, 0, None
        if layers:
            # A compiled model would be compiled again for each count.
            self._hook = layers[0].register_forward_pre_hook(torch.compiler.disable(self._count))

    def _count(self, layer: torch.nn.Module, _: Any) -> None:
        self.calls += layer.training * layer.mxfp8_settings.config.expert_turns

    def end(self) -> None:
        """Stops counting."""
        self.engine._mxfp8.put("first step", None)
        if self._hook is not None:
            self._hook.remove()

    def after_step(self) -> None:
        """Keeps weights from the second step on, where this saves casts and memory allows it. One all-gather."""
        self.end()
        saves = self.calls > 1 or any(map(_frozen, self.layers))
        answers = [(saves, _bytes(self.layers), free_bytes())]
        if dist.is_initialized() and dist.get_world_size() > 1:
            answers = answers_of_all(dist.get_world_group(), answers[0], "the first step's memory")
        if not any(saves for saves, *_ in answers):
            return
        fit, rank, size, free = min((MOST_OF_FREE * free / max(size, 1), rank, size, free)
                                    for rank, (_, size, free) in enumerate(answers))
        tiles = all(layer.mxfp8_settings.recipe.block_size == TILE for layer in self.layers)
        if fit >= 2 or fit >= 1 and tiles:
            _keep(self.engine, self.layers, transposes=fit < 2)
            self.engine._mxfp8.put("kept weights", _Memory(self.engine) if self.engine._mxfp8.keeping else None)
        else:
            size *= 1 if tiles else 2
            log_on_rank_0("mxfp8_moe: MXFP8 weights are not kept: they would take more than half of the memory that "
                          f"a step leaves free ({size / 2**30:.2f} of {free / 2**30:.2f} GiB on rank {rank}). "
                          f'"keep_quantized_weights": true keeps them anyway. {SMALLER_STATES}')


def _keep(engine: DeepSpeedEngine, layers: list, transposes: bool = False) -> None:
    """From now on, layers keep their quantized weights, except those that run in bf16 whatever the batch.

    `transposes`: in one form.
    """
    for layer in layers:
        casts = 0 if _frozen(layer) else 1 / engine.gradient_accumulation_steps()
        if transposes:  # half of the casts. A transpose moves a third of the bytes of both casts
            casts = casts / 2 + 1 / 3
        layer.mxfp8_settings = layer.mxfp8_settings.with_casts(casts)
        if not math.isinf(layer.mxfp8_settings.min_tokens_per_expert):
            layer.mxfp8_kept = KeptWeights(transposes)
            engine._mxfp8.keeping.append(layer)
    if kept := engine._mxfp8.keeping:
        often = "across steps" if all(map(_frozen, kept)) else "within each step"
        highest = max((layer.mxfp8_settings for layer in kept), key=lambda one: one.min_tokens_per_expert)
        threshold = f"; with them, {highest.threshold}" if highest.threshold else ""
        size = _bytes(kept) * (1 if transposes else 2)
        log_on_rank_0(f"mxfp8_moe: MXFP8 weights are kept {often}, up to {size / 2**30:.2f} GiB on this rank"
                        f"{threshold}")


class _Memory:
    """Gives kept weights back once the device runs out of memory, if the key did not ask for them. Torch's allocator
    would free what it has cached in each step, and wait for the device. Layers go on in MXFP8."""

    def __init__(self, engine: DeepSpeedEngine):
        self._engine, self._before = weakref.ref(engine), _retries()

    def after_step(self) -> None:
        engine = self._engine()
        if engine is not None and _retries() > self._before:
            stop_keeping(engine)
            log("mxfp8_moe: MXFP8 weights are not kept any more on this rank: the device runs out of memory with them")


def _retries() -> int:
    """How often torch's allocator had to free what it has cached."""
    on_cuda = get_accelerator().device_name() == "cuda"
    return torch.cuda.memory_stats_as_nested_dict().get("num_alloc_retries", 0) if on_cuda else 0


def _frozen(layer: torch.nn.Module) -> bool:
    return not any(p.requires_grad for p in layer.experts.parameters())


def _bytes(layers: list) -> int:
    """Of the quantized weights in one form."""
    return sum(p.numel() for layer in layers for p in layer.experts.parameters() if p.dim() > 1)


def free_bytes() -> int:
    """The bytes of this rank's device that were free at the peak of the rank's memory, without the gaps between."""
    device = get_accelerator()
    total, reserved = device.total_memory(), device.memory_reserved()
    of_others = max(total - device.available_memory() - reserved, 0)
    gaps = (device.memory_stats() or {}).get("inactive_split_bytes.all.peak", 0)
    return total - of_others - device.max_memory_allocated() - gaps


@contextmanager
def weights_change(engine: DeepSpeedEngine, of_frozen: bool = False) -> Iterator[None]:
    """Around all that changes an engine's weights: layers quantize them again. `of_frozen`: of frozen experts, too."""
    _clear(engine, of_frozen)
    try:
        yield
    finally:
        _clear(engine, of_frozen)


def _clear(engine: DeepSpeedEngine, of_frozen: bool) -> None:
    for layer in engine._mxfp8.keeping:
        if "mxfp8_kept" in vars(layer) and (of_frozen or not _frozen(layer)):  # another conversion removes it
            layer.mxfp8_kept.clear()


def _after_step(of: "weakref.ref[DeepSpeedEngine]", *_: Any) -> None:
    if (engine := of()) is not None:  # which its optimizer may outlive
        _clear(engine, of_frozen=False)


def stop_keeping(engine: DeepSpeedEngine) -> None:
    """From now on, the engine's layers keep nothing."""
    if isinstance(first := engine._mxfp8.after_step.get("first step"), _FirstStep):  # no step was made
        first.end()
    for layer in engine._mxfp8.keeping:
        vars(layer).pop("mxfp8_kept", None)
    engine._mxfp8.put("kept weights", None)
    if engine._mxfp8.step_hook is not None:
        engine._mxfp8.step_hook.remove()
    engine._mxfp8.keeping, engine._mxfp8.step_hook = [], None
