# SPDX-License-Identifier: Apache-2.0
"""The shapes that every benchmark of one rank's experts runs, and how the tokens fall on its experts."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from lib import world

BYTES_AT_MOST = 100e9  # cases that need more are left out
TILE = 128  # rows to which every group is padded
SHAPES = ((7168, 2048), (8192, 5120), (2048, 1408), (4096, 1024), (2048, 768))  # dim, hidden
SEED_SHAPES = SHAPES[:3]
EXPERTS = (4, 8, 32)
TOKENS = (64, 256, 1024, 2048, 4096, 16384)
SPLITS = ("even", "skewed")
# Shape, experts, tokens per expert, split: what is looked at first, in well under a minute.
SHORT = (*((shape, 8, 16384, "even") for shape in SEED_SHAPES),
         ((7168, 2048), 8, 2048, "even"), ((7168, 2048), 8, 256, "even"), ((2048, 1408), 8, 2048, "skewed"),
         ((2048, 1408), 8, 64, "even"), ((2048, 768), 32, 4096, "even"), ((2048, 768), 32, 256, "skewed"),
         ((7168, 2048), 4, 16384, "even"), ((7168, 2048), 4, 16384, "skewed"),
         ((2880, 2880), 8, 4096, "even"))  # no multiple of a tile, as in gpt-oss
# What a CPU is through with in seconds.
TINY = (((256, 128), 4, 128, "even"), ((256, 128), 4, 64, "even"), ((256, 128), 4, 256, "skewed"))


@dataclass(frozen=True)
class Case:
    """One rank's experts: weights of dim x hidden, `tokens_per_expert` in the mean, split among them in some way."""

    dim: int
    hidden: int
    experts: int
    tokens_per_expert: int
    split: str

    def counts(self) -> tuple[int, ...]:
        """Tokens of each expert.

        Skewed is fixed: one expert has a third, every fourth none, and the rest falls at random, in multiples of 128.
        """
        if self.split == "even":
            return (self.tokens_per_expert, ) * self.experts
        tiles = self.experts * self.tokens_per_expert // TILE
        heavy = self.experts // 2
        others = [e for e in range(self.experts) if e != heavy and e % 4 != 1]
        counts = [0] * self.experts
        counts[heavy] = -(-tiles // 3) * TILE
        for e in random.Random(self.experts).choices(others, k=tiles - counts[heavy] // TILE):
            counts[e] += TILE
        return tuple(counts)

    def rows(self) -> int:
        """Rows of all experts, each one's padded to whole tiles."""
        return sum(padded(self.counts()))

    def __str__(self) -> str:
        return (f"{self.dim}x{self.hidden}, {self.experts} experts, {self.tokens_per_expert} tokens each, "
                f"{self.split}")


def padded(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-count // TILE) * TILE for count in counts)


def ends(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(counts))


def starts(counts: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *ends(counts)[:-1])


def padded_rows(x: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """Rows of a tensor, group after group, each group with rows of zeros up to whole tiles; a view if none has any."""
    sizes = padded(counts)
    if sizes == counts:
        return x[:sum(counts)]
    out = x.new_zeros(sum(sizes), *x.shape[1:])
    for at, start, count in zip(starts(sizes), starts(counts), counts, strict=True):
        out[at:at + count] = x[start:start + count]
    return out


def cases(which: str, bytes_of: Callable[[Case], float]) -> list[Case]:
    """Those of "tiny", "short" or "full" that need at most BYTES_AT_MOST, shape by shape: a shape's buffers are made
    once."""
    chosen = {"tiny": TINY, "short": SHORT, "full": [*product(SHAPES, EXPERTS, TOKENS, SPLITS)]}[which]
    order = list(dict.fromkeys(shape for shape, *_ in chosen))
    found = [Case(*shape, *rest) for shape, *rest in sorted(chosen, key=lambda one: order.index(one[0]))]
    return [case for case in found if bytes_of(case) <= BYTES_AT_MOST]


def with_buffers(some: list[Case], make: Callable[[list[Case]], Any], seconds: float) -> Iterator[tuple[Any, Case]]:
    """Yields each case with what `make` returned for all cases of its shape.

    Whoever takes them deletes its own reference: a shape's buffers are freed before the next one's are made.
    """
    buffers, shape = None, None
    for case in world.in_time(some, seconds):
        if shape != (case.dim, case.hidden):
            shape, buffers = (case.dim, case.hidden), None
            get_accelerator().empty_cache()
            buffers = make([other for other in some if (other.dim, other.hidden) == shape])
        yield buffers, case


# ---- for checks, plots and measures ---------------------------------------------------------------------------------


def filled(counts: tuple[int, ...]) -> list[int]:
    """The groups that have rows, the largest first."""
    return sorted((e for e, count in enumerate(counts) if count), key=lambda e: -counts[e])


def some_rows(counts: tuple[int, ...], begins: tuple[int, ...]) -> torch.Tensor:
    """Rows that are compared: some of the largest, the smallest and the last group, the first and last of each."""
    groups = filled(counts)
    parts = [begins[e] + torch.linspace(0, counts[e] - 1, min(64, counts[e]), dtype=torch.float64).round().long()
             for e in sorted({groups[0], groups[-1], max(groups)})]
    return torch.cat(parts).to(world.device())


def plotted(case: dict) -> bool:
    return case.get("split") == "even" and case["experts"] == 8  # the device's rates have no split
