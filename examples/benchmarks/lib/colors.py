# SPDX-License-Identifier: Apache-2.0
"""One color for each contender, the same in all plots. Benchmarks name the same contender differently."""

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path

import yaml

_CONTENDERS = yaml.safe_load(Path(__file__).with_name("colors.yaml").read_text())  # color -> their names
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
