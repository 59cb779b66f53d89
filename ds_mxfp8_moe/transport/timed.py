# SPDX-License-Identifier: Apache-2.0
"""A transport that takes the times of one forward's exchanges, for metrics.py.

On GPUs a time lies between two events on the device, so that nobody waits for it until it is read. On CPUs it is the
host's. In both cases it begins when this rank comes to the exchange.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from . import RowFormat, Transport


class Timed(Transport):
    """Does what `transport` does. Takes the times of the forward that uses it, and none in backward.

    `in_backward`: tells whether backward computes a part of the forward again, as with "expert_turns".
    """

    def __init__(self, transport: Transport, in_backward: Callable[[], bool]):
        self.transport, self.name, self._in_backward = transport, transport.name, in_backward
        self._plans: list = []
        self._exchanges: list = []

    def wait_ms(self) -> float:
        """From this rank's counts to those of all ranks. They are few bytes, so nearly all of it is waiting for the
        slowest rank. The host waits for the device here."""
        return sum(_ms(*pair) for pair in self._plans)

    def exchange_ms(self) -> float:
        """Of dispatch and combine, with the waits in them. The host waits for the device here."""
        return sum(_ms(*pair) for pair in self._exchanges)

    def plan(self, expert_TK: torch.Tensor, num_local_experts: int, meanwhile: Callable[[], None] | None = None,
             rows: str = "") -> Any:
        begin, ends = _now(expert_TK.device), []

        def counted() -> None:  # the counts of all ranks were exchanged, or their exchange was launched
            ends.append(_now(expert_TK.device))
            if meanwhile is not None:
                meanwhile()

        plan = self.transport.plan(expert_TK, num_local_experts, counted, rows)
        if not self._in_backward():
            self._plans.append((begin, ends[0] if ends else _now(expert_TK.device)))
        return plan

    def dispatch(self, plan: Any, x_TH: torch.Tensor, row_format: RowFormat, weight_TK: torch.Tensor | None = None,
                 phase: str = "dispatch") -> tuple:
        begin = _now(x_TH.device)
        result = self.transport.dispatch(plan, x_TH, row_format, weight_TK, phase)
        if phase == "dispatch" and not self._in_backward():
            self._exchanges.append((begin, _now(x_TH.device)))
        return result

    def combine(self, plan: Any, y_PH: torch.Tensor, row_format: RowFormat, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        begin = _now(y_PH.device)
        result = self.transport.combine(plan, y_PH, row_format, dtype, weight_P, phase)
        if phase == "combine" and not self._in_backward():
            self._exchanges.append((begin, _now(y_PH.device)))
        return result


def _now(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def _ms(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return begin.elapsed_time(end)
