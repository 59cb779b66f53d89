# SPDX-License-Identifier: Apache-2.0
"""What the runs of the paired study (convergence.py) say: paired differences, verdicts, a table and a plot."""

import json
from statistics import fmean

from lib import paired, show
from lib.paired import Interval
from lib.show import Measure, bar

BF16, YARDSTICK, NUDGED = "bf16", "reordered", "nudged"
FLASH, FLASH_BF16 = "flash_adamw", "flash_adamw_bf16"  # bf16, but the optimizer; the latter with masters in bf16
OWN = "own"  # the size, and the recipe, of a user's model and config
LIMIT = 0.0025  # what MXFP8 may cost, as a share of the loss
JUDGED = ("default_128", "mxfp8_128")  # which must not cost more
NOT_JUDGED = {YARDSTICK: "The yardstick.", NUDGED: "A change of MXFP8's size that costs nothing."}
COMPARED = (*JUDGED, FLASH, FLASH_BF16, OWN)
SHOWN_RECIPES = (BF16, *COMPARED, *NOT_JUDGED)
SAME_START = 5e-4  # of the loss: MXFP8 changes it less than another seed does


# ---- differences in pairs -------------------------------------------------------------------------------------------


def differences(found: dict[int, dict], bases: dict[int, dict]) -> dict[int, float]:
    """(recipe - bf16) / bf16 of the held-out loss at the end, by seed."""
    return {seed: found[seed]["heldout_loss"] / bases[seed]["heldout_loss"] - 1
            for seed in sorted(found.keys() & bases.keys())}


def in_use(found: dict[int, dict]) -> Interval | None:
    """What MXFP8 does to the held-out loss of trained weights, over the same weights in bf16. None: not measured."""
    values = [one["heldout_loss"] / one["curves"]["heldout_loss_bf16"][str(one["case"]["steps"])] - 1
              for one in found.values() if one["curves"]["heldout_loss_bf16"]]
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
    above = f"at most {max(difference.high, 0):.3%} above bf16."
    if difference.high <= LIMIT:
        return above, 0.0
    if less is not None and less.low is not None and less.mean <= LIMIT and less.low <= 0:
        return f"not distinguishable from reordered bf16, at most {less.high:.3%} above that; {above}", 0.0
    return f"{'costs quality' if difference.low > 0 else 'open'}: {above}", difference.high - LIMIT


def prepare(result: dict) -> list[dict]:
    """One row for each case and recipe: means over its seeds, and paired differences.

    What else was tried is in the file alone: recipes that were dropped, and runs that were stopped.
    """
    cases: dict = {}
    for one in result["rows"]:
        if one["contender"] in SHOWN_RECIPES and "stopped_after" not in one["case"]:
            case = {key: one["case"][key] for key in ("size", "steps", "tokens_per_step", "expert_parallel")}
            cases.setdefault(json.dumps(case), {}).setdefault(one["contender"], {})[one["case"]["seed"]] = one
    rows = []
    for case, recipes in cases.items():
        right = {name: {seed: one for seed, one in found.items() if one["correct"]} for name, found in recipes.items()}
        for name, found in recipes.items():
            bases = right.get(BF16, {})
            apart = [seed for seed, one in right[name].items()
                     if name != NUDGED and seed in bases and starts_apart(one, bases[seed])]
            one = {"case": json.loads(case), "contender": name, "seeds": len(found),
                   "heldout_loss": fmean(of["heldout_loss"] for of in found.values()),
                   "correct": all(of["correct"] for of in found.values()), **comparison(name, right)}
            if apart:
                one |= {"correct": False, "failure": f"seeds {apart} do not start with the loss of {BF16}"}
            rows.append(one)
    return rows


def comparison(name: str, recipes: dict[str, dict[int, dict]]) -> dict:
    """The paired differences of a recipe. Nothing for bf16."""
    found, bases = recipes[name], recipes.get(BF16, {})
    by_seed = differences(found, bases)
    if name == BF16 or not by_seed:
        return {}
    difference = paired.interval(list(by_seed.values()))
    out = {"pairs": difference.pairs, "difference": difference.mean, "spread": difference.spread,
           "low": difference.low, "high": difference.high, "by_seed": by_seed,
           "nats": fmean(found[seed]["heldout_loss"] - bases[seed]["heldout_loss"] for seed in by_seed)}
    use = in_use(found)
    if use:
        out |= {"in_use": use.mean, "in_use_low": use.low, "in_use_high": use.high}
    if name in NOT_JUDGED:
        return out
    yardstick = differences(recipes.get(YARDSTICK, {}), bases)
    both = [by_seed[seed] - yardstick[seed] for seed in by_seed.keys() & yardstick.keys()]
    less = paired.interval(both) if both else None
    if less:
        out |= {"less": less.mean, "less_low": less.low, "less_high": less.high}
    out["verdict"], beyond = verdict(difference, less)
    return out | ({} if beyond is None else {"beyond": beyond})


# ---- how results are shown ------------------------------------------------------------------------------------------

MEASURES = [
    Measure("held-out loss, mean of paired differences to bf16", COMPARED, figure="difference",
            better=show.SMALLER, form="{:+.2%}"),
    Measure("upper end of its 95 % interval", COMPARED, figure="high", better=show.SMALLER, form="{:+.2%}"),
    Measure("beyond 0.25 %, by its interval or less the yardstick", JUDGED,
            figure="beyond", better=show.SMALLER, form="{:.2%}", bars=(bar(0.0), ))]


def compared(prepared: dict) -> list[dict]:
    return [one for one in prepared["rows"] if "difference" in one]


def answer(prepared: dict) -> str:
    """A Markdown table of the judged recipes and of the changes that cost nothing."""
    lines = [[one["case"]["size"], one["contender"], str(one["pairs"]),
              _with_interval(one["difference"], one["low"], one["high"]),
              _with_interval(one["less"], one["less_low"], one["less_high"]) if "less" in one else "",
              _with_interval(one["in_use"], one["in_use_low"], one["in_use_high"], "+.3%") if "in_use" in one else ""]
             for one in compared(prepared)]
    return show.markdown(lines, ["size", "recipe", "seeds", "change of held-out loss to bf16, with a 95 % interval",
                                 "the same, less the change of reordered", "its weights in MXFP8 to them in bf16"])


def of_optimizers(prepared: dict) -> str:
    """A Markdown table of FlashAdamW beside torch's AdamW."""
    masters = {FLASH: "float32", FLASH_BF16: "bf16, 8 bits of correction"}
    lines = [[masters[one["contender"]], one["case"]["size"], str(one["case"]["steps"]), str(one["pairs"]),
              _with_interval(one["difference"], one["low"], one["high"])]
             for one in compared(prepared) if one["contender"] in masters]
    return show.markdown(lines, ["masters of FlashAdamW", "size", "steps", "pairs",
                                 "change of held-out loss to torch's AdamW, with a 95 % interval"])


def sentences(prepared: dict) -> list[str]:
    """One sentence for each recipe that is compared with bf16."""
    found = []
    for one in compared(prepared):
        less = "" if one.get("less_low") is None else (
            f"; less the yardstick {_with_interval(one['less'], one['less_low'], one['less_high'])}")
        of = _with_interval(one["difference"], one["low"], one["high"])
        said = one.get("verdict") or NOT_JUDGED[one["contender"]]
        found.append(f"- {one['case']['size']}, {one['contender']}: {of} of the held-out loss, {one['nats']:+.4f} "
                     f"nats a token; seeds: {one['pairs']}{less}. {said}")
    return found


def _with_interval(mean: float, low: float | None, high: float | None, form: str = "+.2%") -> str:
    """A mean and its interval, which a single value does not have."""
    return f"{mean:{form}}" if high is None else f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def plot(result: dict, pyplot) -> None:
    """A panel for each size."""
    panels: dict = {}
    for one in sorted(compared(result), key=lambda one: SHOWN_RECIPES.index(one["contender"])):
        panels.setdefault(f"{one['case']['size']} parameters", {})[one["contender"]] = [
            100 * value for value in one["by_seed"].values()]
    show.spans(pyplot, panels, "change of held-out loss to bf16, %")


SHOWN = show.Shown("convergence", MEASURES, [
    ("seeds", "seeds", "{}"), ("held-out loss", "heldout_loss", "{:.4f}"), ("to bf16", "difference", "{:+.2%}"),
    ("95 % from", "low", "{:+.2%}"), ("to", "high", "{:+.2%}"), ("spread of a pair", "spread", "{:.2%}"),
    ("less the yardstick", "less", "{:+.2%}"), ("95 % from", "less_low", "{:+.2%}"), ("to", "less_high", "{:+.2%}"),
    ("its weights in MXFP8 to them in bf16", "in_use", "{:+.3%}")], plot, wide=False, prepare=prepare,
    sentences=sentences)
