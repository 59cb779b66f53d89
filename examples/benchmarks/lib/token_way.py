# SPDX-License-Identifier: Apache-2.0
"""The picture of examples/guides/how_it_works.md: a token's way through one MoE layer, forward and backward.

`make report` draws it, or from examples/benchmarks: python -m lib.token_way
"""

from pathlib import Path
from typing import Any

MXFP8, BF16, PLAIN = "#bfe3c9", "#c9dcf5", "#eeeeee"
EDGE = "#444444"
OURS, THEIRS = 0.5, 6.1  # left edges of the boxes at the token's rank and at the expert's rank, in inches
WIDE = 3.4

# (text, color), from top to bottom. Texts of both sides stand at the height of what happens at the same time.
FORWARD = ([("router: K experts a token, and their weights", PLAIN), ("quantize each token once", MXFP8), None, None,
            ("y = fp32 sum over ranks", BF16)],
           [None, ("x: rows sorted by expert, padded to 128", MXFP8), ("pre = x W1ᵀ", MXFP8),
            ("h = weight · act(pre), quantized", MXFP8), ("y = h W2ᵀ, fp32 sum of a token's rows", MXFP8)],
           [(1, "dispatch\nMXFP8, one copy a rank", MXFP8, 1), (4, "combine\nbf16", BF16, -1)])
BACKWARD = ([("gradient of y, quantized once", MXFP8), None, None, None,
             ("dx = fp32 sum over ranks", BF16)],
            [("g: rows sorted by expert", MXFP8), ("t = g W2", MXFP8),
             ("dpre = t · weight · act'(pre), quantized", MXFP8), ("dW2 = gᵀ h, dW1 = dpreᵀ x", BF16),
             ("dx = dpre W1", MXFP8)],
            [(0, "dispatch\nMXFP8, same plan", MXFP8, 1), (4, "combine\nbf16", BF16, -1)])


def _half(axis: Any, top: float, title: str, half: tuple) -> None:
    ours, theirs, arrows = half
    axis.text(OURS - 0.35, top - 1.6, title, rotation=90, ha="center", va="center", weight="bold")
    for left, boxes in ((OURS, ours), (THEIRS, theirs)):
        previous = None
        for i, box in enumerate(boxes):
            if box is not None:
                middle = top - 0.3 - 0.65 * i
                text, color = box
                axis.add_patch(_rectangle(left, middle - 0.2, color))
                axis.text(left + WIDE / 2, middle, text, ha="center", va="center")
                if previous is not None and i - previous == 1:
                    _arrow(axis, (left + WIDE / 2, middle + 0.45), (left + WIDE / 2, middle + 0.2))
                previous = i
    for i, text, color, way in arrows:
        y = top - 0.3 - 0.65 * i
        ends = [(OURS + WIDE, y), (THEIRS, y)]
        _arrow(axis, *ends[::way], color=color, width=9)
        _arrow(axis, *ends[::way])
        axis.text((OURS + WIDE + THEIRS) / 2, y + 0.12, text, ha="center", va="bottom")


def _rectangle(left: float, bottom: float, color: str) -> Any:
    from matplotlib.patches import FancyBboxPatch
    return FancyBboxPatch((left, bottom), WIDE, 0.4, boxstyle="round,pad=0,rounding_size=0.08", facecolor=color,
                          edgecolor=EDGE, linewidth=0.8)


def _arrow(axis: Any, start: tuple, end: tuple, color: str = EDGE, width: float = 1.2) -> None:
    axis.annotate("", end, start, arrowprops={"arrowstyle": "-" if width > 2 else "-|>", "color": color,
                                              "linewidth": width, "shrinkA": 0, "shrinkB": 0})


def plot(result: dict, pyplot: Any) -> None:
    _, axis = pyplot.subplots(figsize=(10, 7.4), layout="constrained")
    axis.set(xlim=(-0.05, 9.75), ylim=(0.1, 7.5))
    axis.axis("off")
    for left, title in ((OURS, "the token's rank"), (THEIRS, "the expert's rank")):
        axis.text(left + WIDE / 2, 7.3, title, ha="center", va="center", weight="bold")
    _half(axis, 7.05, "forward", FORWARD)
    _half(axis, 3.3, "backward", BACKWARD)
    axis.axhline(3.72, color=EDGE, linewidth=0.6, linestyle=":")
    handles = [pyplot.Rectangle((0, 0), 1, 1, facecolor=color, edgecolor=EDGE, label=label) for color, label in (
        (MXFP8, "sent or multiplied in MXFP8"), (BF16, "in bf16, or the tokens' dtype"), (PLAIN, "the model's own"))]
    pyplot.gcf().legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)


if __name__ == "__main__":
    from . import results_file, show
    show.draw(plot, Path(results_file.RESULTS) / "token_way.png", {})
