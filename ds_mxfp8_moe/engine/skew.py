# SPDX-License-Identifier: Apache-2.0
"""What uneven routing costs a run, and what "expert_placement": "balanced" would change, from the files of `metrics`.

DeepSpeed's CSV monitor writes these files. `ds_mxfp8_report --metrics FOLDER` prints what `lines` says.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from .metrics import LOADS, PREFIX
from .placement import EVERY, WINDOW, at_home, fullest, predicted, rank_loads

FILES = f"{PREFIX}/".replace("/", "_")  # how their names begin


class LayerLoads(NamedTuple):
    """The loads of a layer's ranks in the recorded steps behind the first WINDOW of them, by step and rank.

    Attributes:
        recorded: as they were.
        fixed, balanced: as they would have been with this "expert_placement".
    """

    steps: list[int]
    recorded: list[list[float]]
    fixed: list[list[float]]
    balanced: list[list[float]]


def read(folder: Path) -> dict[str, LayerLoads]:
    """The layers whose experts are spread over ranks.

    Raises:
        ValueError: there are none, or too few steps, or a file is not what DeepSpeed's CSV monitor writes.
    """
    found = {}
    for path in sorted(folder.glob(f"{FILES}*_{LOADS[0]}.csv")):
        layer = path.stem.removeprefix(FILES).removesuffix(f"_{LOADS[0]}")
        ranks, experts = (_rows(folder, f"{layer}_{name}", lambda text: [*map(int, text.split())]) for name in LOADS)
        steps = sorted(ranks.keys() & experts.keys())
        sizes = {len(ranks[step]) for step in steps}
        if len(sizes) > 1:
            raise ValueError(f"{path} has rows of {sorted(sizes)} ranks: give each run a job_name of its own")
        if sizes <= {1} or len(steps) <= WINDOW:
            continue
        loads_SE, R = [experts[step] for step in steps], sizes.pop()
        home_RL = at_home(R, len(loads_SE[0]) // R)
        found[layer] = LayerLoads(steps[WINDOW:], [ranks[step] for step in steps[WINDOW:]],
                                  [rank_loads(loads_E, home_RL) for loads_E in loads_SE[WINDOW:]],
                                  predicted(steps, loads_SE, R))
    if not found:
        raise ValueError(f"{folder} has no {FILES}*_{LOADS[0]}.csv of layers on several ranks with more than {WINDOW} "
                         "steps: give the folder of DeepSpeed's CSV monitor, its output_path and job_name, of a run "
                         'with "metrics" in the section "mxfp8_moe"')
    return found


def lines(folder: Path, layers: dict[str, LayerLoads]) -> list[tuple[str, str]]:
    """What the report says of `read`'s layers, by name."""
    worst, found = most_uneven(layers), []
    for how, text in (("recorded", ""), ("fixed", ""), ("balanced", f". Predicted: experts move after {WINDOW} "
                      f"recorded steps, then every {EVERY} steps, by the loads of the last {WINDOW}")):
        of_layers = {layer: mean(map(fullest, getattr(loads, how))) for layer, loads in layers.items()}
        found.append((f"fullest rank, {how}", f"{mean(of_layers.values()):.2f} times the mean load, on average over "
                      f"layers; {of_layers[worst]:.2f} in {worst}{text}"))
    waits, micro_batches = (_rows(folder, name, float).values() for name in ("exchange_wait_ms", "micro_batch_ms"))
    if waits and micro_batches:
        wait, whole = median(waits), median(micro_batches)
        found.append(("waiting for that rank", f"{wait:.2f} ms in the forward of a micro-batch, {wait / whole:.1%} of "
                      f"the {whole:.2f} ms that a micro-batch takes. Backward is not measured"))
    return found


def most_uneven(layers: dict[str, LayerLoads]) -> str:
    """The layer with the highest load of a fullest rank, on average over the steps."""
    return max(layers, key=lambda layer: mean(map(fullest, layers[layer].recorded)))


def plot(layers: dict[str, LayerLoads], target: str) -> None:
    """Draws the loads of each rank in the layer that is most uneven, and of the fullest rank with "balanced".

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    worst = most_uneven(layers)
    loads, (figure, panel) = layers[worst], pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    for rank in range(len(loads.recorded[0])):
        panel.plot(loads.steps, [loads_R[rank] / mean(loads_R) for loads_R in loads.recorded], label=f"rank {rank}")
    panel.plot(loads.steps, [*map(fullest, loads.balanced)], "k:", label='fullest with "balanced"')
    panel.set_title(f"{worst}, the most uneven of {len(layers)} layers", loc="left", fontsize=10)
    panel.set_xlabel("step")
    panel.set_ylabel("load over the mean")
    panel.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(target, dpi=130)
    pyplot.close(figure)


def _rows(folder: Path, name: str, read_value: Callable[[str], Any]) -> dict[int, Any]:
    """The values in a file by step. {}: there is no file. A run that resumes repeats steps: the last value counts."""
    path = folder / f"{FILES}{name}.csv"
    try:
        with path.open(newline="") as file:
            return {int(step): read_value(value) for step, value in csv.reader(file) if step != "step"}
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path}: expected rows of a step and a value, as DeepSpeed's CSV monitor writes them "
                         f"({error})") from error
