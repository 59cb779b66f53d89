# SPDX-License-Identifier: Apache-2.0
"""What the runs of the paired study (convergence.py) say: paired differences, verdicts, tables and plots."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean, median

from lib import paired, show
from lib.paired import Interval
from lib.show import Measure, bar

BF16, YARDSTICK, NUDGED = "bf16", "reordered", "nudged"
OWN = "own"  # the size, and the recipe, of a user's model and config
LIMIT = 0.0025  # what MXFP8 may cost, as a share of the loss
JUDGED = ("default_128", "mxfp8_128")  # which must not cost more
NOT_JUDGED = {YARDSTICK: "The yardstick.", NUDGED: "A change of MXFP8's size that costs nothing."}
BEGUN = 0.2  # of the steps: from there on, the training loss falls slowly enough to be compared
SAME_START = 5e-4  # of the loss: MXFP8 changes it less than another seed does
CURVES = ("loss", "grad_norm", "busiest_expert", "heldout_loss", "heldout_loss_bf16", "sqnr_db", "shrinkage",
          "gradient_sqnr_db", "gradient_shrinkage")
TRAINING = {"loss": "training loss", "grad_norm": "gradient norm", "busiest_expert": "share of the busiest expert"}
MOST_DB = 60  # that a plot shows: re-scaling is nearly exact
SHOWN_PERCENT = 2.5  # of differences to bf16, in plots: classic layers' are wider


# ---- differences in pairs -------------------------------------------------------------------------------------------


def end(one: dict) -> str:
    """The last step of a run, as its curves have it."""
    return str(one["case"].get("stopped_after") or one["case"]["steps"])


def training_differences(found: dict[int, dict], bases: dict[int, dict]) -> dict[int, float]:
    """(recipe - bf16) / bf16 of the mean training loss from BEGUN of the steps to the recipe's end, by seed.

    It has far less noise than the held-out loss of one step.
    """
    result = {}
    for seed in sorted(found.keys() & bases.keys()):
        mine, other = found[seed]["curves"]["loss"], bases[seed]["curves"]["loss"]
        steps = [step for step in mine if int(step) > BEGUN * found[seed]["case"]["steps"] and step in other]
        result[seed] = fmean(mine[step] for step in steps) / fmean(other[step] for step in steps) - 1
    return result


def base_of(contender: str) -> str:
    """The recipe that this one is compared with."""
    return f"classic_{BF16}" if contender.startswith("classic_") else BF16


def differences(found: dict[int, dict], bases: dict[int, dict], step: str | None = None) -> dict[int, float]:
    """(recipe - bf16) / bf16 of the held-out loss of a step, by seed. None: the recipe's end."""
    result = {}
    for seed in sorted(found.keys() & bases.keys()):
        at = step or end(found[seed])
        result[seed] = found[seed]["curves"]["heldout_loss"][at] / bases[seed]["curves"]["heldout_loss"][at] - 1
    return result


def in_use(found: dict[int, dict]) -> Interval | None:
    """What MXFP8 does to the held-out loss of trained weights, over the same weights in bf16. None: not measured."""
    values = [one["heldout_loss"] / one["curves"]["heldout_loss_bf16"][end(one)] - 1 for one in found.values()
              if one["curves"]["heldout_loss_bf16"]]
    return paired.interval(values) if values else None


def starts_apart(one: dict, base: dict) -> bool:
    """Whether two runs have other losses before the first step, both in bf16, so that they are no pair."""
    own = one["curves"]["heldout_loss_bf16"] or one["curves"]["heldout_loss"]
    return abs(own["0"] / base["curves"]["heldout_loss"]["0"] - 1) > SAME_START


def verdict(difference: Interval, less: Interval | None) -> tuple[str, float | None]:
    """What the intervals say, and by how much they miss LIMIT.

    Args:
        difference: of the recipe from bf16.
        less: of the same less the yardstick, paired by seed.
    """
    if difference.high is None:
        return "one pair says nothing about the spread.", None
    above = f"at most {max(difference.high, 0):.3%} above bf16.{paired.takes(difference, LIMIT)}"
    if difference.high <= LIMIT:
        return above, 0.0
    if less is not None and less.low is not None and less.mean <= LIMIT and less.low <= 0:
        return f"not distinguishable from reordered bf16, at most {less.high:.3%} above that; {above}", 0.0
    return f"{'costs quality' if difference.low > 0 else 'open'}: {above}", difference.high - LIMIT


def prepare(result: dict) -> list[dict]:
    """One row for each case and recipe: means over its seeds and paired differences. Training figures are medians of
    the last tenth."""
    cases: dict = {}
    for one in result["rows"]:
        case = {key: one["case"][key] for key in ("size", "steps", "tokens_per_step", "expert_parallel",
                                                  "stopped_after") if key in one["case"]}
        cases.setdefault(json.dumps(case), {}).setdefault(one["contender"], {})[one["case"]["seed"]] = one
    rows = []
    for key, recipes in cases.items():
        case = json.loads(key)
        whole = cases.get(json.dumps({name: value for name, value in case.items() if name != "stopped_after"}), {})
        # Runs that were stopped are compared with the first steps of whole ones.
        right = {name: {seed: one for seed, one in found.items() if one["correct"]}
                 for name, found in (whole | recipes).items()}
        for name, found in recipes.items():
            bases = right.get(base_of(name), {})
            apart = [seed for seed, one in right[name].items()
                     if name != NUDGED and seed in bases and starts_apart(one, bases[seed])]
            one = {"case": case, "contender": name, "seeds": len(found), **means(found),
                   "correct": all(one["correct"] for one in found.values()), **comparison(name, right)}
            if apart:
                one |= {"correct": False, "failure": f"seeds {apart} do not start with the loss of {base_of(name)}"}
            rows.append(one)
    return rows


def means(found: dict[int, dict]) -> dict:
    """Means over the seeds of a recipe; of training figures, the median of the last tenth."""
    rows = list(found.values())
    curves = {name: {int(step): _mean(one["curves"][name][step] for one in rows if step in one["curves"].get(name, {}))
                     for step in dict.fromkeys(step for one in rows for step in one["curves"].get(name, ()))}
              for name in CURVES}
    out = {"heldout_loss": fmean(one["heldout_loss"] for one in rows), "curves": curves,
           "roundings": ", ".join(sorted({rounding for one in rows for rounding in one.get("roundings") or ()}))}
    for name in TRAINING:
        values = list(curves[name].values())
        out[name] = median(values[-max(1, len(values) // 10):])
    if out["roundings"]:
        out["sqnr_db"] = min(curves["sqnr_db"][max(curves["sqnr_db"])].values())
    for name in ("gradient_sqnr_db", "gradient_shrinkage"):
        if curves[name]:
            out[name] = fmean(curves[name].values())
    return out


def _mean(values: Iterable) -> float | dict:
    values = list(values)
    if isinstance(values[0], dict):
        return {key: _mean(one[key] for one in values if key in one) for key in values[0]}
    return fmean(values)


def comparison(name: str, recipes: dict[str, dict[int, dict]]) -> dict:
    """The paired differences of a recipe. Nothing for one that others are compared with."""
    found, bases = recipes[name], recipes.get(base_of(name), {})
    by_seed = differences(found, bases)
    if name == base_of(name) or not by_seed:
        return {}
    difference = paired.interval(list(by_seed.values()))
    out = {"pairs": difference.pairs, "difference": difference.mean, "spread": difference.spread,
           "low": difference.low, "high": difference.high, "by_seed": by_seed,
           "nats": fmean(found[seed]["heldout_loss"] - bases[seed]["curves"]["heldout_loss"][end(found[seed])]
                         for seed in by_seed)}
    use = in_use(found)
    if use:
        out |= {"in_use": use.mean, "in_use_low": use.low, "in_use_high": use.high}
    training = training_differences(found, bases)
    mean = paired.interval(list(training.values()))
    out |= {"training": mean.mean, "training_low": mean.low, "training_high": mean.high, "training_by_seed": training}
    steps = [step for step in next(iter(found.values()))["curves"]["heldout_loss"] if step != "0"]
    out["over_steps"] = {int(step): paired.interval(list(differences(found, bases, step).values())) for step in steps}
    if name in NOT_JUDGED or "stopped_after" in next(iter(found.values()))["case"]:
        return out
    yardstick = differences(recipes.get(YARDSTICK, {}), bases) if base_of(name) == BF16 else {}
    both = [by_seed[seed] - yardstick[seed] for seed in by_seed.keys() & yardstick.keys()]
    less = paired.interval(both) if both else None
    if less:
        out |= {"less": less.mean, "less_low": less.low, "less_high": less.high}
    out["verdict"], beyond = verdict(difference, less)
    return out | ({} if beyond is None else {"beyond": beyond})


# ---- how results are shown ------------------------------------------------------------------------------------------

MEASURES = [
    Measure("held-out loss, mean of paired differences to bf16", (*JUDGED, OWN), figure="difference",
            better=show.SMALLER, form="{:+.2%}"),
    Measure("upper end of its 95 % interval", (*JUDGED, OWN), figure="high", better=show.SMALLER, form="{:+.2%}"),
    Measure("beyond 0.25 %, by its interval or less the yardstick", JUDGED,
            figure="beyond", better=show.SMALLER, form="{:.2%}", bars=(bar(0.0), ))]


def answer(prepared: dict) -> str:
    """A Markdown table of whole runs by the judged recipes and by the changes that cost nothing."""
    rows = list(filter(answers, prepared["rows"]))
    lines = [[one["case"]["size"], one["contender"], str(one["pairs"]),
              _with_interval(one["difference"], one["low"], one["high"]),
              _with_interval(one["less"], one["less_low"], one["less_high"]) if "less" in one else "",
              _with_interval(one["in_use"], one["in_use_low"], one["in_use_high"], "+.3%") if "in_use" in one else ""]
             for one in rows]
    return show.markdown(lines, ["size", "recipe", "seeds", "change of held-out loss to bf16, with a 95 % interval",
                                 "the same, less the change of reordered", "its weights in MXFP8 to them in bf16"])


def sentences(prepared: dict) -> list[str]:
    """One sentence for each recipe that is compared with bf16."""
    found = []
    for one in prepared["rows"]:
        stopped = one["case"].get("stopped_after")
        if stopped and "training" in one:
            of = _with_interval(one["training"], one["training_low"], one["training_high"])
            found.append(f"- {one['case']['size']}, stopped after {stopped} steps, {one['contender']}: {of} of the "
                         f"training loss after a fifth of the steps; seeds: {one['seeds']}.")
        elif not stopped and "difference" in one:
            less = "" if one.get("less_low") is None else (
                f"; less the yardstick {_with_interval(one['less'], one['less_low'], one['less_high'])}")
            of = _with_interval(one["difference"], one["low"], one["high"])
            found.append(f"- {one['case']['size']}, {one['contender']}: {of} of the held-out loss, "
                         f"{one['nats']:+.4f} nats a token; seeds: {one['pairs']}{less}. "
                         f"{one.get('verdict') or NOT_JUDGED[one['contender']]}")
    return found


def _with_interval(mean: float, low: float | None, high: float | None, form: str = "+.2%") -> str:
    """A mean and its interval, which a single value does not have."""
    return f"{mean:{form}}" if high is None else f"{mean:{form}} [{low:{form}}, {high:{form}}]"


# ---- plots ----------------------------------------------------------------------------------------------------------


def answers(one: dict) -> bool:
    """Whether a row is of a whole training by a recipe in question, or by a change that costs nothing."""
    return (one["contender"] in (*JUDGED, *NOT_JUDGED, OWN) and "difference" in one
            and "stopped_after" not in one["case"])


def plot(result: dict, pyplot) -> None:
    """The answer: a panel for each size."""
    panels: dict = {}
    order = (*JUDGED, *NOT_JUDGED, OWN)
    for one in sorted(filter(answers, result["rows"]), key=lambda one: order.index(one["contender"])):
        panels.setdefault(f"{one['case']['size']} parameters", {})[one["contender"]] = [
            100 * value for value in one["by_seed"].values()]
    show.spans(pyplot, panels, "change of held-out loss to bf16, %")


def more_plots(result: dict) -> dict[str, Callable]:
    """The plots of the page alone, by name: what else was tried, and for each size its curves and its roundings."""
    rows, found = result["rows"], {}
    if others := [one for one in rows if "difference" in one and not answers(one)]:
        found["others"] = partial(_others, others)
    for size in dict.fromkeys(one["case"]["size"] for one in rows):
        whole = [one for one in rows if one["case"]["size"] == size and "stopped_after" not in one["case"]]
        found[f"{size}_training"] = partial(_training, whole)
        if rounded := [one for one in whole if one["contender"] in JUDGED and one["curves"]["sqnr_db"]]:
            found[f"{size}_roundings"] = partial(_roundings, rounded)
    return found


def _others(rows: list[dict], _, pyplot) -> None:
    panels: dict = {}
    for one in rows:
        size, stopped = one["case"]["size"], one["case"].get("stopped_after")
        values, title = one["by_seed"], f"{size}: held-out loss"
        if stopped:
            values, title = one["training_by_seed"], f"{size}, {stopped} steps: training loss"
        panels.setdefault(title, {})[one["contender"]] = [100 * value for value in values.values()]
    show.spans(pyplot, panels, "change to bf16, %", SHOWN_PERCENT)


def _training(rows: list[dict], _, pyplot) -> None:
    """What the curves themselves would not show, since they coincide: their differences."""
    panels: dict = {}
    for one in rows:
        if "over_steps" in one and one["contender"] in (*JUDGED, YARDSTICK, OWN):
            panels.setdefault("held-out loss, mean over seeds with its 95 % interval", {})[one["contender"]] = [
                (step, 100 * of.mean, *(100 * (of.mean if end is None else end) for end in (of.low, of.high)))
                for step, of in one["over_steps"].items()]
    show.lines(pyplot, panels, "step", "change to bf16, %")


def _roundings(rows: list[dict], _, pyplot) -> None:
    """Of files of before, whose runs measured each rounding."""
    panels: dict = {}
    for one in rows:
        for curve, title in (("sqnr_db", "SQNR, dB"), ("shrinkage", "shrinkage")):
            for step, of in one["curves"][curve].items():
                for rounding, value in of.items():
                    panels.setdefault(f"{one['contender']}: {title}", {}).setdefault(rounding, []).append(
                        (step, min(value, MOST_DB)))
    show.lines(pyplot, panels, "step", "")


SHOWN = show.Shown("convergence", MEASURES, [
    ("seeds", "seeds", "{}"), ("held-out loss", "heldout_loss", "{:.4f}"), ("to bf16", "difference", "{:+.2%}"),
    ("95 % from", "low", "{:+.2%}"), ("to", "high", "{:+.2%}"), ("spread of a pair", "spread", "{:.2%}"),
    ("less the yardstick", "less", "{:+.2%}"), ("95 % from", "less_low", "{:+.2%}"), ("to", "less_high", "{:+.2%}"),
    ("its weights in MXFP8 to them in bf16", "in_use", "{:+.3%}"), ("training loss", "loss", "{:.4f}"),
    ("to bf16 after a fifth of the steps", "training", "{:+.2%}"), ("95 % from", "training_low", "{:+.2%}"),
    ("to", "training_high", "{:+.2%}"),
    ("gradient norm", "grad_norm", "{:.3f}"), ("busiest expert", "busiest_expert", "{:.1%}"),
    ("lowest SQNR, dB", "sqnr_db", "{:.1f}"),
    ("gradient's SQNR, dB", "gradient_sqnr_db", "{:.1f}"),
    ("its shrinkage", "gradient_shrinkage", "{:+.2%}"), ("roundings that acted", "roundings", "{}")], plot, wide=False,
    prepare=prepare, sentences=sentences, more_plots=more_plots)
