# SPDX-License-Identifier: Apache-2.0
"""Chooses `min_tokens_per_expert`: how many tokens an expert needs until MXFP8 is faster than bf16."""

import math
from functools import lru_cache

import torch

from ..config import Recipe
from ..ops.device import capability
from ..ops.mx_format import TILE
from .formula import ExpertFormula


@lru_cache
def _memory_slowness(device: torch.device) -> float:
    """The memory bandwidth of an H200 divided by this GPU's, from clock and width. 1.44 for an H100."""
    of = torch.cuda.get_device_properties(device)
    # Virtual GPUs, and some builds of torch, do not report these.
    bytes_per_s = 2 * getattr(of, "memory_clock_rate", 0) * 1e3 * getattr(of, "memory_bus_width", 0) / 8
    return 4.82e12 / bytes_per_s if bytes_per_s else 1.0


def break_even_tokens(formula: ExpertFormula, recipe: Recipe, num_local_experts: int, device: torch.device,
                      casts: float = 1) -> float:
    """The tokens per expert, on average, from which on an MXFP8 recipe is as fast as bf16 in forward and backward.

    Args:
        num_local_experts: experts of one rank.
        device: where the layer will run.
        casts: how often the weights are cast for each forward and backward. 0: they are frozen, and kept.

    Returns:
        The same number on ranks with equal GPUs. It is math.inf if the recipe is never faster. It is 0 on devices
        where nothing was measured.

    The formula was fitted to times of an H100 and of an H200 (examples/guides/measurements.md).
    """
    if capability(device) != (9, 0) or recipe.block_size != TILE:
        return 0
    shapes = formula.shapes()
    weights = sum(math.prod(shapes[role]) for role in ("gate", "up", "down") if role in shapes)
    # In seconds: what faster GEMMs save for a token, what the casts of its rows take, what the casts of an expert's
    # weights take, and what all launches take.
    if recipe.wgrad == "mxfp8":
        gemms, rows, cast, launches = 2.40e-15 * weights, 2.30e-12 * formula.hidden_size, 1.165e-12 * weights, 43e-6
    else:
        rows = 2.74e-12 * formula.hidden_size + 1.84e-12 * formula.ffn_size
        gemms, cast, launches = 2.29e-15 * weights, 1.645e-12 * weights, 40.5e-6
    slowness = _memory_slowness(device)  # casts are bound by memory
    saved, spent = gemms - slowness * rows, slowness * casts * cast + launches / num_local_experts
    return spent / saved if saved > 0 else math.inf
