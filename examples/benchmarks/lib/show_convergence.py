# SPDX-License-Identifier: Apache-2.0
"""Tables and plot of the convergence study."""

import json
from statistics import mean, median

from tabulate import tabulate

BF16 = "bf16"
SEEDS = 5  # of bf16, whose range counts
SQNR = {"tokens": "tokens", "output": "output", "input_gradient": "input\ngradient",
        "weight_gradient": "weight\ngradient"}


def cases(result: dict) -> list[tuple[dict, dict[str, list[dict]]]]:
    """Each case, which are alike but for their seeds, with its correct rows by recipe, one a seed."""
    found: dict = {}
    for row in result["rows"]:
        if row["correct"]:
            case = {key: value for key, value in row["case"].items() if key != "seed"}
            _, recipes = found.setdefault(json.dumps(case), (case, {}))
            recipes.setdefault(row["contender"], []).append(row)
    return list(found.values())


def verdict(losses: list[float], bf16: list[float]) -> str:
    """Where the mean of a recipe's losses lies in the range of bf16's."""
    if len(bf16) < 2:
        return "no range yet"
    place = "ABOVE" if mean(losses) > max(bf16) else "below" if mean(losses) < min(bf16) else "inside"
    return place if len(bf16) >= SEEDS else f"{place}, but of {len(bf16)} seeds"


def curve(rows: list[dict], name: str) -> dict[int, float]:
    """Step -> mean over the seeds."""
    return {int(step): mean(row["curves"][name][step] for row in rows) for step in rows[0]["curves"][name]}


def _training_table(recipes: dict[str, list[dict]]) -> str:
    lines = []
    for recipe, rows in recipes.items():
        all_steps = {name: list(curve(rows, name).values())
                     for name in ("loss", "grad_norm", "busiest_expert", "entropy")}
        tenth = max(1, len(all_steps["loss"]) // 10)
        noise = [row["curves"]["sqnr_db"] for row in rows if row["curves"]["sqnr_db"]]
        spans = [" to ".join(f"{mean(seed[step][what] for seed in noise):.1f}" for step in (first, final))
                 for what in SQNR for first, final in [(list(noise[0])[0], list(noise[0])[-1])]] if noise else []
        lines.append([recipe, *(median(values[-tenth:]) for values in all_steps.values()),
                      max(all_steps["grad_norm"][tenth:], default=None), *spans])
    return tabulate(lines, ["recipe", "training\nloss", "gradient\nnorm", "busiest\nexpert", "entropy",
                            "largest norm\nafter warm-up", *(f"{name}\ndB" for name in SQNR.values())],
                    floatfmt=("", ".4f", ".3f", ".1%", ".4f", ".3f"))


def convergence_tables(result: dict) -> list[str]:
    """For each case what training was like, medians of its last tenth; then the held-out losses of all."""
    tables, lines = [], []
    for case, recipes in cases(result):
        tables.append(f"{case['size']}: {case['parameters'] / 1e6:.0f} M parameters, {case['steps']} steps of "
                      f"{case['tokens_per_step']} tokens, EP {case['expert_parallel']}; SQNR of one layer against the "
                      f"bf16 recipe, first to last\n{_training_table(recipes)}")
        bf16 = [row["heldout_loss"] for row in recipes.get(BF16, [])]
        for recipe, rows in recipes.items():
            losses = [row["heldout_loss"] for row in rows]
            # Files of before it was measured have none.
            in_bf16 = [list(curve.values())[-1] for row in rows if (curve := row["curves"].get("heldout_loss_bf16"))]
            lines.append([case["size"], recipe, len(rows), mean(losses),
                          f"{min(bf16):.4f} to {max(bf16):.4f}" if bf16 else "", _to_mean(losses, bf16),
                          "" if recipe == BF16 else verdict(losses, bf16), mean(in_bf16) if in_bf16 else None,
                          _to_mean(in_bf16, bf16), verdict(in_bf16, bf16) if in_bf16 else ""])
    names = ["size", "recipe", "seeds", "held-out loss", "range of bf16's seeds", "to bf16's mean", "in the range",
             "the same weights\nin bf16", "to bf16's\nmean", "in the\nrange"]
    columns = len(names) if any(line[-3] is not None for line in lines) else len(names) - 3
    return [*tables, tabulate([line[:columns] for line in lines], names[:columns],
                              floatfmt=("", "", "d", ".4f", "", "", "", ".4f", "", ""))]


def _to_mean(losses: list[float], bf16: list[float]) -> str:
    return f"{mean(losses) / mean(bf16) - 1:+.2%}" if losses and bf16 else ""


def convergence_plot(result: dict, pyplot) -> None:
    found = cases(result)
    _, axes = pyplot.subplots(max(1, len(found)), 5, figsize=(24, 4.2 * max(1, len(found))), squeeze=False)
    names = list(dict.fromkeys(row["contender"] for row in result["rows"]))
    colors = {name: "black" if name == BF16 else f"C{i}" for i, name in enumerate(names)}
    for line, (case, recipes) in zip(axes, found, strict=bool(found)):
        bf16 = recipes.get(BF16, [])
        for recipe, rows in recipes.items():
            for axis, name in ((line[0], "loss"), (line[2], "grad_norm"), (line[3], "busiest_expert")):
                axis.plot(*_points(curve(rows, name)), color=colors[recipe], linewidth=0.8, label=recipe)
            if bf16:
                around = curve(bf16, "heldout_loss")
                line[1].plot(*_points({step: 100 * (value / around[step] - 1)
                                       for step, value in curve(rows, "heldout_loss").items()}),
                             color=colors[recipe], marker=".", label=recipe)
            for what, style in zip(SQNR, (":", "-.", "-", "--"), strict=True):
                noise = rows[0]["curves"]["sqnr_db"]
                if noise:
                    line[4].plot([int(step) for step in noise], [values[what] for values in noise.values()], style,
                                 color=colors[recipe], label=f"{recipe}, {what.replace('_', ' ')}")
        if bf16:
            _band(line[1], bf16)
        for axis, label in zip(line, ("training loss, nats a token", "held-out loss over bf16's mean, %",
                                      "gradient norm", "share of the busiest expert", "SQNR, dB"), strict=True):
            axis.set(xlabel="step", ylabel=label, title=case["size"])
        line[2].set(yscale="log")
        line[0].legend(fontsize=7)
        if line[4].lines:
            line[4].legend(fontsize=5, ncol=2)


def _points(values: dict[int, float]) -> tuple:
    return list(values), list(values.values())


def _band(axis, bf16: list[dict]) -> None:
    """Shades what bf16's seeds span at each step."""
    around = curve(bf16, "heldout_loss")
    seeds = [[100 * (row["curves"]["heldout_loss"][str(step)] / around[step] - 1) for row in bf16] for step in around]
    axis.fill_between(list(around), [min(values) for values in seeds], [max(values) for values in seeds],
                      color="tab:gray", alpha=0.3, label="bf16's seeds")
    axis.legend(fontsize=7)


SHOWN = {"convergence": (convergence_tables, convergence_plot)}
