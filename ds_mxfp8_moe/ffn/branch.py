# SPDX-License-Identifier: Apache-2.0
"""What a layer computes beside its routed experts: shared experts, or the dense branch of a residual MoE."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class Branch:
    """Part of a layer that needs nothing of the exchange between ranks. It runs once.

    `ExpertFFN` launches it before the host waits for other ranks' counts, so that the device has work meanwhile. Where
    the host does not wait, `result` runs it, after the routed experts as in DeepSpeed. Both orders give the same bits,
    since autograd numbers the node of the routed experts before those of the branch in both.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device):
        """`function`: computes the branch on `device`, from tensors of the caller and not of an autograd Function."""
        self._function: Callable | None = function
        self._result: Any = None
        self._grad = torch.is_grad_enabled()
        self._autocast = (device.type, torch.get_autocast_dtype(device.type), True, torch.is_autocast_cache_enabled()
                          ) if torch.is_autocast_enabled(device.type) else None

    def launch(self) -> None:
        """Runs the branch with grad mode and autocast as they were in the constructor.

        Autograd records it although an autograd Function's forward, which has no grad mode, may be the caller.
        """
        function, self._function = self._function, None
        with torch.set_grad_enabled(self._grad), torch.autocast(*self._autocast) if self._autocast else nullcontext():
            self._result = function()

    def result(self) -> Any:
        """What the function returns."""
        if self._function is not None:
            self.launch()
        return self._result
