# SPDX-License-Identifier: Apache-2.0
"""The planner of placements: its balance, beside the best one, and how few experts it moves."""

import itertools
import math
import random

import pytest

from ds_mxfp8_moe.engine import placement
from ds_mxfp8_moe.engine.placement import at_home, balanced, predicted, rank_loads


def fullest(loads, experts_RL) -> float:
    """The highest load of a rank over the mean."""
    return placement.fullest(rank_loads(loads, experts_RL))


def best(loads, num_ranks: int, num_local_experts: int) -> float:
    """`fullest` of the best of all placements that keep slots."""
    columns = [range(slot, len(loads), num_local_experts) for slot in range(num_local_experts)]
    orders = itertools.product(*(itertools.permutations(column) for column in columns))
    return min(fullest(loads, [*zip(*order, strict=True)]) for order in orders)


def random_loads(num_experts: int, seed: int, skew: float = 1.0) -> list[int]:
    rng = random.Random(seed)
    return [int(1000 * math.exp(rng.gauss(0, skew))) for _ in range(num_experts)]


@pytest.mark.parametrize("num_ranks, num_local_experts, most", [
    (2, 4, 1.005), (2, 8, 1.015), (3, 3, 1.005), (4, 2, 1.005)])
def test_is_near_the_best(num_ranks, num_local_experts, most):
    ratios = []
    for seed in range(20):
        loads = random_loads(num_ranks * num_local_experts, seed)
        made = fullest(loads, balanced(loads, at_home(num_ranks, num_local_experts)))
        ratios.append(made / best(loads, num_ranks, num_local_experts))
    assert min(ratios) >= 1 and sum(ratios) / len(ratios) < most


@pytest.mark.parametrize("num_ranks, num_experts", [(2, 128), (4, 128), (8, 256)])
def test_skewed_loads_become_even(num_ranks, num_experts):
    """A rank has about as much to do as three, or as two of two. A quarter of the experts moves, or less than half."""
    L = num_experts // num_ranks
    home = at_home(num_ranks, L)
    for seed in range(5):
        loads = random_loads(num_experts, seed, 0.5)
        loads[:L] = [10 * load for load in loads[:L]]
        assert fullest(loads, home) > (2.9 if num_ranks > 3 else 1.7)
        made = balanced(loads, home)
        assert fullest(loads, made) < 1.03
        for slot, column in enumerate(zip(*made, strict=True)):
            assert sorted(column) == [*range(slot, num_experts, L)]
        moved = sum(a != b for rows in zip(made, home, strict=True) for a, b in zip(*rows, strict=True))
        assert moved < 0.5 * num_experts
        assert balanced(loads, made) == made


def test_even_loads_move_nothing():
    home = [[*of_rank] for of_rank in at_home(4, 4)]
    assert balanced([7] * 16, home) == home
    assert balanced([0] * 16, home) == home


def test_a_prediction_decides_from_the_steps_before():
    """Two experts with most of the load, which lie on one rank until the first decision, then on one again."""
    first, then = [5, 1, 5, 1, 1, 1, 1, 1], [5, 1, 1, 1, 1, 1, 1, 5]
    loads_SE = [first] * 54 + [then] * 60
    found = [*map(placement.fullest, predicted(range(114), loads_SE, 2))]
    assert found == [1] * 50 + [1.5] * 50 + [1] * 10
    # Recorded in one step of 50: after the fourth of them, then after every second one, with four to look back to.
    assert [*map(placement.fullest, predicted(range(50, 50 * 13, 50), [first] * 6 + [then] * 6, 2))] == [
        1, 1, 1.5, 1.5, 1, 1, 1, 1]
