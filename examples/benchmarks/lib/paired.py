# SPDX-License-Identifier: Apache-2.0
"""Paired differences: their mean with a 95 % interval by Student's t."""

import argparse
import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """Of a mean. `low` and `high` are None for a single value, which says nothing about the spread.

    Attributes:
        spread: the standard deviation of one value. None for a single value.
        pairs: how many values there are.
    """

    mean: float
    low: float | None
    high: float | None
    spread: float | None
    pairs: int

    def of_pairs(self, form: str) -> str:
        """What it says beside the mean. `form`: of a number."""
        between = "" if self.low is None else f", 95 % interval {self.low:{form}} to {self.high:{form}}"
        return f"in the mean of {self.pairs} pairs{between}"


def inside(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's distribution, by its finite sum for whole degrees of freedom.

    Formulas 26.7.3 and 26.7.4 of Abramowitz and Stegun, Handbook of Mathematical Functions.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def t_quantile(freedom: int) -> float:
    """The t with P(|T| <= t) = 95 %."""
    low, high = 1.9, 13.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if inside(middle, freedom) > CONFIDENCE else (middle, high)
    return high


def interval(values: Sequence[float]) -> Interval:
    """The mean of these values with its 95 % interval."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None, None, len(values))
    spread = stdev(values)
    half = t_quantile(len(values) - 1) * spread / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, spread, len(values))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compares losses that you measured yourself, seed by seed.")
    parser.add_argument("--bf16", nargs="+", type=float, required=True, metavar="LOSS", help="one for each seed")
    parser.add_argument("--mxfp8", nargs="+", type=float, required=True, metavar="LOSS", help="of the same seeds")
    args = parser.parse_args(arguments)
    if len(args.bf16) != len(args.mxfp8) or len(args.bf16) < 2:
        parser.error(f"{len(args.bf16)} losses of bf16 and {len(args.mxfp8)} of MXFP8 were given; expected one of "
                     "each for every seed, and two seeds or more")
    found = interval([own / base - 1 for own, base in zip(args.mxfp8, args.bf16, strict=True)])
    print(f"MXFP8 costs {found.mean:+.2%} of the loss, 95 % interval {found.low:+.2%} to {found.high:+.2%}.")


if __name__ == "__main__":
    main()
