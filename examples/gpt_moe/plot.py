# SPDX-License-Identifier: Apache-2.0
"""The loss curves of training runs, from their log.jsonl and summary.json."""

import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def plot_losses(runs: dict[str, Path], target: Path) -> Path:
    """Draws the training loss of each run folder over its steps.

    Points show the held-out loss at the beginning of the run, or where it was last resumed, and at its end.
    """
    figure, axes = plt.subplots(figsize=(8, 5))
    styles = itertools.cycle(("-", "-", "--"))  # the curves of a plain and an MXFP8 run may coincide
    for (name, folder), style in zip(runs.items(), styles, strict=False):
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
        line, = axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], style, label=name)
        axes.plot([summary["first_step"], rows[-1]["step"]], [summary["heldout_before"], summary["heldout"]], "o",
                  color=line.get_color(), label=f"{name}, held-out")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats a token)")
    axes.legend()
    figure.savefig(target, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return target
