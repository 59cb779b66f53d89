# SPDX-License-Identifier: Apache-2.0
"""FlashAdamW of the library flashoptim, as the optimizer of an engine: AdamW that keeps its moments in 8 bits.

    "optimizer": {"type": "FlashAdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}}

DeepSpeed knows no optimizer of this name, and takes one that a user makes only with "zero_allow_untested_optimizer".
Engines with the section "mxfp8_moe" take both. examples/guides/memory.md says what it saves.

Source: https://github.com/databricks/flashoptim (Apache-2.0).
"""

import inspect
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig

from ..config import ConfigError, shown
from ..transport.deadline import failure_in_world

NAME = "FlashAdamW"
SMALLER_STATES = (f'"optimizer": {{"type": "{NAME}"}} keeps Adam\'s two moments in a quarter of their memory: '
                  "examples/guides/memory.md")
INSTALL = "pip install flashoptim"
# Measured on an H200 with random weights, 32768 tokens a step.
ROUNDED_AWAY = ('ERROR: "bf16_master_weights_and_grads" with {name} loses most updates in rounding. After six steps '
                "of Qwen3-30B-A3B, the loss was 12.135 with this key and AdamW, and 11.912 without the key. Remove "
                f'it, or write "optimizer": {{{{"type": "{NAME}"}}}}, which keeps the bits that are rounded away')


@dataclass(frozen=True)
class FlashAdamWOfConfig:
    """Makes the optimizer that a config names. DeepSpeed calls it as a user's function from parameters to one.

    `params`: the arguments of FlashAdamW.
    """

    params: dict[str, Any]

    def __call__(self, parameters: list) -> torch.optim.Optimizer:
        from flashoptim import FlashAdamW

        groups = [one["params"] if isinstance(one, dict) else [one] for one in parameters]
        bits = {}
        if all(p.dtype == torch.float32 for group in groups for p in group):
            bits = {"master_weight_bits": None}  # there is nothing to correct, and FlashAdamW refuses its own default
        return FlashAdamW(parameters, **bits | self.params)


def optimizer_of(config: DeepSpeedConfig, given: Any) -> Any:
    """The optimizer that an engine is to be given: FlashAdamW if the config names it, else `given`.

    Raises:
        ConfigError: flashoptim is not installed on a rank, or the config has parameters that FlashAdamW does not take.
            Raised on every rank.
    """
    if given is not None or config.optimizer_name != NAME:
        return given
    params = config.optimizer_params or {}
    if problem := failure_in_world(_problem(params), "the engine's start (all ranks name the same optimizer)"):
        raise ConfigError(problem)
    return FlashAdamWOfConfig(params)


def _problem(params: dict[str, Any]) -> str | None:
    """Why this rank cannot make FlashAdamW with these arguments. None: it can."""
    if find_spec("flashoptim") is None:
        return f'the optimizer "{NAME}" is one of flashoptim, which is not installed: {INSTALL}'
    from flashoptim import FlashAdamW

    _, *known = inspect.signature(FlashAdamW).parameters
    odd = [key for key in params if key not in known]
    return f'"params" of the optimizer "{NAME}" has {shown(odd[0])}; valid are {", ".join(known)}' if odd else None


def flash_adamw() -> list[type]:
    """The class, if anything has imported it."""
    return [sys.modules["flashoptim"].FlashAdamW] if "flashoptim" in sys.modules else []


def about_masters(optimizer: Any) -> list[str]:
    """What rounding does to a training whose masters are in bf16, if nothing corrects it.

    `optimizer`: the engine's. Of ZeRO, it has the basic one as `optimizer`.
    """
    if not getattr(optimizer, "bf16_master_weights_and_gradients", False):
        return []
    basic = optimizer.optimizer
    corrected = all(group.get("master_bytewidth", 0) > 2 for group in basic.param_groups)
    return [] if corrected else [ROUNDED_AWAY.format(name=type(basic).__name__)]
