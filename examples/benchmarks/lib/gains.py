# SPDX-License-Identifier: Apache-2.0
"""Trainings beside their baselines, in one picture: a bar for each, stacked of the baseline, of what this package adds
in bf16, and of what MXFP8 adds."""

from typing import Any, NamedTuple

from . import show

LIGHT, DARK = "#8ab6e8", "#1f5fbf"
# The parts of a bar: how it is drawn, and its label.
PARTS = {"baseline": ({"facecolor": "#c4c4c4"}, "baseline, in bf16"),
         "bf16": ({"facecolor": LIGHT}, "added by this package in bf16"),
         "MXFP8": ({"facecolor": DARK}, "added by MXFP8 experts"),
         "alone": ({"facecolor": "#b7d5e3"}, "this package, no baseline"),
         "both": ({"facecolor": LIGHT, "hatch": "////", "edgecolor": DARK}, "added by both, not measured apart")}


class Gain(NamedTuple):
    """One training beside its baseline, in tokens per second of a GPU.

    Attributes:
        what: the model, and how it trained.
        over: the baseline's contender.
        base: its rate. None: not measured.
        bf16, mxfp8: of this package, with its experts in this. None: not measured.
        memory: peak memory over the baseline's. None: not measured.
    """

    what: str
    over: str
    base: float | None
    bf16: float | None
    mxfp8: float | None
    memory: float | None

    def times(self, rate: float) -> str:
        return f"{rate / self.base:.2f}x"


def plot(groups: dict[str, list[Gain]], pyplot: Any, absolute: bool = False) -> None:
    """A bar for each training.

    Args:
        groups: of bars, by their title.
        absolute: in tokens per second. Else the baseline is 1.
    """
    rows = sum(len(gains) + 1.4 for gains in groups.values())
    figure, axis = pyplot.subplots(figsize=(show.WIDTH, 1 + 0.31 * rows), layout="constrained")
    y, ticks, used, longest = 0.0, {}, set(), 0.0
    for title, gains in groups.items():
        axis.text(0, y, title, weight="bold", va="center")
        for one in gains:
            y += 1
            ticks[y] = one.what
            unit = 1 if absolute else one.base
            parts = ("baseline", "bf16", "MXFP8" if one.bf16 else "both") if one.base else ("", "alone", "alone")
            left = 0.0
            for part, rate in zip(parts, (one.base, one.bf16, one.mxfp8), strict=True):
                if rate is not None:
                    axis.barh(y, rate / unit - left, 0.72, left=left, linewidth=0, **PARTS[part][0])
                    left = rate / unit
                    used.add(part)
            rates = {"bf16": one.bf16, "MXFP8": one.mxfp8}
            speedups = ", ".join(f"{one.times(rate)} {name}" for name, rate in rates.items() if rate and one.base)
            tokens = f"{(one.mxfp8 or one.bf16 or one.base) / 1000:.1f}k tokens/s"
            axis.text(left, y, "  " + "; ".join(filter(None, [speedups, tokens])), va="center")
            longest = max(longest, left)
        y += 1.4
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.tick_params(axis="y", length=0)
    speed = "speed, baseline = 1 (beside the bars: tokens per second of a GPU)"
    axis.set(ylim=(y - 0.8, -0.7), xlim=(0, 1.55 * (longest or 1)),
             xlabel="tokens per second of a GPU" if absolute else speed)
    figure.legend(handles=[pyplot.Rectangle((0, 0), 1, 1, linewidth=0, label=label, **style)
                           for part, (style, label) in PARTS.items() if part in used],
                  loc="outside upper center", ncols=2, frameon=False)
