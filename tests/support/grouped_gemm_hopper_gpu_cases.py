# SPDX-License-Identifier: Apache-2.0
"""Hopper's grouped GEMMs: where they run, and how results are compared."""

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0) if torch.cuda.is_available() else True,
                                reason="the kernels are Hopper's own")


def relative(actual, expected):
    assert actual.isfinite().all()
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
