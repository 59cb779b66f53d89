# SPDX-License-Identifier: Apache-2.0
"""One color for each contender, the same in all plots. Benchmarks name the same contender differently."""

from collections.abc import Iterable
from itertools import cycle

# Color -> the contenders that have it. A name with ", ..." behind it has the color of the name.
_CONTENDERS = {
    "#1f5fbf": ("ours, mxfp8_wgrad_with_hp", "AutoEP, ours, mxfp8_wgrad_with_hp", "nvlink, mxfp8_wgrad_with_hp",
                "mxfp8_wgrad_with_hp", "default_128", "AllToAll, e4m3 in", "ours"),
    "#2a9d4b": ("ours, mxfp8", "AutoEP, ours, mxfp8", "nvlink, mxfp8", "mxfp8", "mxfp8_128", "ours, MXFP8"),
    "#8ab6e8": ("ours, bf16", "AutoEP, ours, bf16", "nvlink, bf16", "bf16", "AllToAll, bf16 in"),
    "#3ab5c6": ("ours, bf16 from MXFP8", "default_32", "collective, mxfp8_wgrad_with_hp"),
    "#17345c": ("classic, ours, mxfp8_wgrad_with_hp", "ours, mxfp8_wgrad_with_hp, classic",
                "nvlink, mxfp8_wgrad_with_hp, classic"),
    "#7fce9a": ("classic, ours, mxfp8", "collective, mxfp8"),
    "#b7d5e3": ("classic, ours, bf16", "collective, bf16"),
    "#e8852b": ("AutoEP bf16", ),
    "#8c4a2f": ("classic bf16", ),
    "#8e5bb5": ("SonicMoE bf16", "torch rowwise fp8", "NCCL bf16, MXFP8 GEMM"),
    "#777777": ("NCCL bf16", "today, NCCL bf16", "NCCL, exact splits", "torch._grouped_mm", "plain torch"),
    "#bbbbbb": ("NCCL, padded", "cuBLAS loop"),
}
_OTHERS = ("#d1495b", "#c9a227", "#5d6d7e", "#a3b18a", "#6d597a", "#e5989b", "#457b9d", "#bc6c25")
_BY_NAME = {name: color for color, names in _CONTENDERS.items() for name in names}


def color_of(name: str) -> str | None:
    """A contender's color. None: it is none of those above."""
    fitting = [known for known in _BY_NAME if name == known or name.startswith(f"{known}, ")]
    return _BY_NAME[max(fitting, key=len)] if fitting else None


def colors(names: Iterable[str]) -> dict[str, str]:
    """A color for each of the names of a plot. Those that are no contenders get the others in their order."""
    others = cycle(_OTHERS)
    return {name: color_of(name) or next(others) for name in dict.fromkeys(names)}


def tint(color: str, step: int) -> tuple[float, ...]:
    """The color, mixed with white: 0 as it is, then lighter, as the parts of a contender's bar are."""
    rgb = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    share = max(0.2, 1 - 0.36 * step)
    return tuple(1 - share * (1 - part) for part in rgb)
