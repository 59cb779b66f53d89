# SPDX-License-Identifier: Apache-2.0
"""CPU by default, so that the suite runs alike on every machine; tests/gpu opts out. Rank pools live for one file."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest  # noqa: E402
from ranks import RankPool  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--stress", type=int, default=20, help="repetitions of the NVLink transport's stress tests; 500 "
                     "is what it has to stand")


def _pool(world_size):
    pool = RankPool(world_size)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def ranks2():
    yield from _pool(2)


@pytest.fixture(scope="module")
def ranks3():
    yield from _pool(3)


@pytest.fixture(scope="module")
def ranks4():
    yield from _pool(4)
