# SPDX-License-Identifier: Apache-2.0
"""Simulated roundings on a GPU: close to the kernels' results, and the same tensors are rounded as on a CPU."""

import pytest
import torch
from rounding_cases import ALL_WIRES, DEFAULT, OF_WGRAD, step

from ds_mxfp8_moe.mx import sqnr_db
from training.roundings import Measured, simulated


@pytest.mark.parametrize("block", (32, 128))
@pytest.mark.parametrize("keys, expected", [({}, DEFAULT), ({"recipe": "mxfp8"}, DEFAULT | OF_WGRAD),
                                            (ALL_WIRES, DEFAULT | {"combine_fwd", "dispatch_bwd"})],
                         ids=("default", "mxfp8", "all wires"))
def test_simulated_roundings_are_close_to_the_kernels(keys, expected, block):
    """Only the order of sums differs. So a value near the middle of two e4m3 values may be rounded to the other."""
    own, measured = step(torch.bfloat16, "cuda", **keys, scale_block_size=block), Measured()
    with simulated(measured=measured):
        found = step(torch.bfloat16, "cuda", **keys, scale_block_size=block)
    assert {name: sqnr_db(own[name], found[name]) > 30 for name in own} == dict.fromkeys(own, True)
    figures = measured.read()
    assert set(figures["sqnr_db"]) == expected
    assert all(db > 28 and abs(figures["shrinkage"][name]) < 3e-3 for name, db in figures["sqnr_db"].items())
