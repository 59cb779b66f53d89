# SPDX-License-Identifier: Apache-2.0
"""`ds_mxfp8_plot_metrics FOLDER`: one plot of a run's `metrics`, from the files of DeepSpeed's CSV monitor.

FOLDER is the output_path of "csv_monitor", with its job_name. The plot shows the load of experts, the share of dropped
choices, the quality of the tokens' cast and the time for which ranks wait, of each layer. `python -m
ds_mxfp8_moe.plot_metrics` is the same. It needs matplotlib.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .engine.metrics import PREFIX

# Of each panel: its title, the unit, and its figures with how their lines look. Those not in dB begin at 0.
PANELS = [
    ("Load of experts: most (solid) and least loaded (dotted)", "of the mean", {"load_most": "-", "load_fewest": ":"}),
    ("Dropped choices", "share", {"dropped": "-"}),
    ("Tokens in MXFP8: signal to quantization noise", "dB", {"sqnr_db": "-"}),
    ("Waiting for other ranks: mean (solid), longest (dotted)", "ms", {"wait_ms": "-", "wait_ms_most": ":"}),
]
NAMED_LAYERS = 8  # more get a color bar in place of a legend

Runs = dict[str, dict[str, list[tuple[int, float]]]]  # layer -> figure -> (training sample, value)


def read(folder: Path) -> Runs:
    """The figures below `folder`, by layer in the order of the model.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a file is not what DeepSpeed's CSV monitor writes.
    """
    start, figures = f"{PREFIX}/".replace("/", "_"), sorted({name for *_, lines in PANELS for name in lines})
    found: Runs = {}
    for path in sorted(folder.glob(f"{start}*.csv"), key=_natural):
        figure = next((name for name in figures if path.stem.endswith(f"_{name}")), None)
        if figure is None:
            continue
        with path.open(newline="") as file:
            rows = [row for row in csv.reader(file) if row[:1] != ["step"]]  # each run that appends writes the head
        try:
            points = [(int(sample), float(value)) for sample, value in rows]
        except ValueError as error:
            raise ValueError(f"{path}: expected rows of a sample and a value, as DeepSpeed's CSV monitor writes them "
                             f"({error})") from error
        found.setdefault(path.stem.removeprefix(start).removesuffix(f"_{figure}"), {})[figure] = points
    if not found:
        raise FileNotFoundError(f"{folder} has no {start}*.csv: give the folder of DeepSpeed's CSV monitor, its "
                                'output_path and job_name, of a run with "metrics" in the section "mxfp8_moe"')
    return found


def _natural(path: Path) -> list:
    """Sorts layer 10 behind layer 9."""
    return [(len(part), part) if part.isdigit() else (0, part) for part in path.stem.replace("_", ".").split(".")]


def plot(layers: Runs, target: Path) -> None:
    """Writes the plot of `read`'s figures. Panels without figures are left out.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for panel in PANELS if any(name in of_layer for of_layer in layers.values() for name in panel[2])]
    figure, axes = pyplot.subplots(len(panels), sharex=True, figsize=(9, 2.4 * len(panels) + 0.6), squeeze=False,
                                   layout="constrained")
    colors = matplotlib.colormaps["viridis"]
    shade = matplotlib.colors.Normalize(0, max(len(layers) / 0.9 - 1, 1))  # without the palest
    width = 1.4 if len(layers) <= NAMED_LAYERS else 0.8
    for (title, unit, styles), (panel, ) in zip(panels, axes, strict=True):
        for index, (layer, figures) in enumerate(layers.items()):
            for name, style in styles.items():
                if name in figures:
                    panel.plot(*zip(*figures[name], strict=True), style, color=colors(shade(index)), linewidth=width,
                               marker="." if len(figures[name]) < 30 else None,
                               label=layer if name == next(iter(styles)) else None)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_ylabel(unit)
        panel.grid(alpha=0.25)
        panel.margins(x=0.02)
        panel.set_ylim(bottom=None if unit == "dB" else 0)
    axes[-1][0].set_xlabel("training samples")
    _name_layers(figure, axes, list(layers), matplotlib.cm.ScalarMappable(shade, colors))
    figure.savefig(target, dpi=130)
    pyplot.close(figure)


def _name_layers(figure: Any, axes: Any, names: list[str], colors: Any) -> None:
    if len(names) <= NAMED_LAYERS:
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(names), 4), fontsize=8)
        return
    bar = figure.colorbar(colors, ax=axes[:, 0], label=f"MoE layer, {names[0]} to {names[-1]}",
                          boundaries=[i - 0.5 for i in range(len(names) + 1)], pad=0.01, aspect=60)
    bar.set_ticks(range(0, len(names), max(1, len(names) // 8)))


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the plot. Returns the exit status: 1 if there is nothing to plot or no matplotlib, else 0."""
    parser = argparse.ArgumentParser(prog="ds_mxfp8_plot_metrics",
                                     description='Plots what "metrics" wrote to DeepSpeed\'s CSV monitor.')
    parser.add_argument("folder", type=Path, help="output_path and job_name of the CSV monitor")
    parser.add_argument("--out", type=Path, help="the picture (default: metrics.png in the folder)")
    given = parser.parse_args(argv)
    target = given.out or given.folder / "metrics.png"
    try:
        plot(read(given.folder), target)
    except (ImportError, OSError, ValueError) as error:
        print(f"ds_mxfp8_plot_metrics: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
