# SPDX-License-Identifier: Apache-2.0
"""The key `capacity_factor`: how many rows fit, and how many choices were dropped because their rows did not fit."""

import math

import torch

from . import ROW_ALIGNMENT

MOST_DROPPING = 4096  # layers of a group with a capacity
STEPS_BETWEEN_WARNINGS = 100  # about the choices that a layer dropped
RAISE = 'Raise "capacity_factor", or leave it out, or write "on_overflow": "drop"'


def padded(rows: int) -> int:
    return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


def room_of(capacity_factor: float, tokens: int, top_k: int, ranks: int, experts: int) -> int:
    """P: the rows that a rank has room for: `capacity_factor` times its even share, and the padding of its groups.

    Args:
        tokens, top_k: T and K of every rank.
        experts: E.
    """
    share = padded(math.ceil(capacity_factor * tokens * top_k))
    return padded(min(share, ranks * tokens * top_k) + experts * (ROW_ALIGNMENT - 1))


class Dropped:
    """How many choices each layer of a group has dropped, for the experts of this rank.

    Args:
        words: int64 [MOST_DROPPING] in host memory, zeros. The device writes them. CUDA graphs hold their addresses.
    """

    def __init__(self, words: torch.Tensor):
        self._words = words
        self._index: dict = {}
        self._warned: dict = {}  # of each layer: the step of its last warning, and the choices dropped until then
        self._steps = 0

    def address(self, name: str) -> int:
        """The address of the layer's int64."""
        if name not in self._index:
            if len(self._index) == MOST_DROPPING:
                raise ValueError(f"{name}: a group counts the dropped choices of {MOST_DROPPING} layers at most: "
                                 'leave "capacity_factor" out')
            self._index[name] = len(self._index)
        return self._words[self._index[name]].data_ptr()

    def total(self, name: str) -> int:
        """What this layer has dropped by now. The host does not wait."""
        return int(self._words[self._index[name]]) if name in self._index else 0

    def warn(self) -> None:
        """Called once a step. Prints a line for each layer that dropped choices, at most once in
        STEPS_BETWEEN_WARNINGS steps."""
        for name in self._index:
            step, before = self._warned.get(name, (self._steps - STEPS_BETWEEN_WARNINGS, 0))
            total = self.total(name)
            if total > before and self._steps - step >= STEPS_BETWEEN_WARNINGS:
                self._warned[name] = self._steps, total
                print(f"mxfp8_moe: WARNING: {name}: {total - before} choices for the experts of rank "
                      f"{torch.distributed.get_rank()} were dropped since the last such line: more rows came than "
                      'fit. To drop fewer, raise "capacity_factor"', flush=True)
        self._steps += 1
