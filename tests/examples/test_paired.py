# SPDX-License-Identifier: Apache-2.0
"""Intervals by Student's t, against printed tables and against what they promise."""

import math

import pytest
import torch

from lib.paired import FOUR_OF_FIVE, interval, main, pairs_needed, t_quantile, takes

# 97.5 % quantiles, as tables print them.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
         15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980, 1000: 1.962, 10**6: 1.960}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles(freedom):
    assert t_quantile(freedom) == pytest.approx(TABLE[freedom], abs=5.1e-4)


def test_an_interval_by_hand():
    found = interval([1.0, 2.0, 3.0, 6.0])
    spread = math.sqrt((4 + 1 + 0 + 9) / 3)
    assert found.mean == 3 and found.spread == pytest.approx(spread) and found.pairs == 4
    assert found.high - 3 == pytest.approx(3.18245 * spread / 2, rel=1e-5) == 3 - found.low
    assert interval([2.0]) == (2.0, None, None, None, 1)


def test_the_pairs_needed_are_the_fewest_that_suffice():
    for cost, spread in ((0.0, 0.001), (0.001, 0.005)):
        room = 0.0025 - cost
        needed = pairs_needed(spread, room)
        assert (t_quantile(needed - 1) + FOUR_OF_FIVE) * spread / math.sqrt(needed) <= room
        assert needed == 2 or (t_quantile(needed - 2) + FOUR_OF_FIVE) * spread / math.sqrt(needed - 1) > room
        draws = cost + spread * torch.randn(1000, needed, generator=torch.Generator().manual_seed(0))
        shown = [interval(one).high <= 0.0025 for one in draws.tolist()]
        assert 0.77 < sum(shown) / len(shown) < (0.83 if needed > 8 else 0.95)
    assert pairs_needed(0.0, 0.0025) == 2
    assert pairs_needed(0.01, 0.0) is None and pairs_needed(10.0, 1e-4) is None


def test_what_would_decide():
    found = interval([0.005, -0.004, 0.002, 0.001])
    needed = pairs_needed(found.spread, 0.0015)
    said = f" If it costs 0.10%, about {needed} seeds would show that it is below 0.25%, in four cases of five."
    assert takes(found, 0.0025) == said and takes(found, 0.001) == takes(found, 0.02) == ""
    assert takes(interval([-0.01, 0.005]), 0.0025).startswith(" If it costs nothing, about ")


def test_losses_on_the_command_line(capsys):
    main(["--bf16", "1.0", "2.0", "3.0", "--mxfp8", "1.01", "2.02", "3.03"])
    assert "MXFP8 costs +1.00% of the loss, 95 % interval +1.00% to +1.00%" in capsys.readouterr().out
