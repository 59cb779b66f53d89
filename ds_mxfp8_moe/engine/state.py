# SPDX-License-Identifier: Apache-2.0
"""What this package keeps of an engine, and what acts after each step of it."""

from dataclasses import dataclass, field
from typing import Any, Protocol


class AfterStep(Protocol):
    """Acts after each step of an engine's optimizer, those that DeepSpeed skipped included."""

    def after_step(self) -> None:
        """Called on every rank, when the weights are the step's."""


ORDER = ("first step", "kept weights", "balance", "metrics", "placement", "graphs", "first NaN")  # in which they act


@dataclass
class EngineState:
    """Of a MoEEngine, as its attribute `_mxfp8`. hooks.py fills it.

    Attributes:
        steps: whether anything of ours happens around the optimizer's steps.
        after_step: what acts after each of them, by its name in ORDER.
        keeping: layers that keep quantized weights.
        step_hook: of the optimizer, for them.
        checkpoints: the engine's way of saving and loading. None: DeepSpeed's.
    """

    steps: bool = False
    after_step: dict[str, AfterStep] = field(default_factory=dict)
    keeping: list = field(default_factory=list)
    step_hook: Any = None
    checkpoints: Any = None

    def put(self, name: str, hook: AfterStep | None) -> None:
        """Replaces what acts after each step under this name. None: nothing does."""
        assert name in ORDER
        self.after_step.pop(name, None)
        if hook is not None:
            self.after_step[name] = hook

    def end_step(self) -> None:
        """Lets all of them act."""
        for name in ORDER:
            if (hook := self.after_step.get(name)) is not None:
                hook.after_step()
