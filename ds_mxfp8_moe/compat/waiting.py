# SPDX-License-Identifier: Apache-2.0
"""Takes a needless wait from DeepSpeed, and gives transformers' generate() one that ranks need."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from .patches import wrap
from .private_names import say_if_missing


def spare_the_host(engine: DeepSpeedEngine) -> None:
    """Keeps the host ahead of the device, which runs dry otherwise. A second call changes nothing.

    DeepSpeed's throughput timer makes the host wait for the device at the end of each micro-batch. It reads the host's
    clock instead, unless the config says "synchronized" under "timers".
    """
    if say_if_missing("sparing the host"):
        return
    timers = engine._config.timers_config
    if "synchronized" not in timers.model_fields_set:
        timers.synchronized = False


def end_generation_together(engine: DeepSpeedEngine, modules: Iterable[torch.nn.Module]) -> None:
    """Lets transformers' generate() go on, on every rank, until all ranks have ended: each needs the others' experts.

    transformers does so by itself in ZeRO-3 alone. A second call changes nothing.

    Args:
        engine: the one whose end undoes this.
        modules: those with a `generate` whose experts lie on several ranks.
    """
    for module in modules:
        wrap(module, "generate", _generate, until=engine)


def _generate(plain: Any, *args, synced_gpus: bool | None = None, **kwargs) -> Any:
    return plain(*args, synced_gpus=True if synced_gpus is None else synced_gpus, **kwargs)
