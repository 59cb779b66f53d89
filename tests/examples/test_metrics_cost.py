# SPDX-License-Identifier: Apache-2.0
"""metrics_cost.py takes one sample in a block, and none in the blocks without."""

import sys
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from ds_mxfp8_moe import autoep
from training import metrics_cost


def measured() -> tuple[list[dict], int]:
    """The rows, and how many samples the layers took."""
    with mock.patch.object(autoep, "watch", wraps=autoep.watch) as watch:
        rows = next(metrics_cost.rows(Namespace(size="tiny", layers=1, pairs=2)))
    return rows, watch.call_count


@pytest.mark.slow
def test_a_block_with_a_sample_beside_one_without(ranks2):
    for rows, samples in ranks2.run(measured):
        assert samples == metrics_cost.WARM_UP_BLOCKS + 2
        off, on = rows
        assert off["contender"] == metrics_cost.OFF and on["contender"] == metrics_cost.ON
        assert off["median_ms"] > 0 and on["cost_share"] == pytest.approx(
            on["sample_ms"] / (100 * off["median_ms"] / metrics_cost.STEPS))
