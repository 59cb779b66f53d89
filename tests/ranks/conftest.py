# SPDX-License-Identifier: Apache-2.0
"""The emulator of CUDA, for tests of kernels that exchange rows."""

import pytest


@pytest.fixture(scope="session")
def emulated():
    """Builds the emulator before ranks load it while a deadline runs."""
    from tests.support import emulator
    if (obstacle := emulator.obstacle()) is not None:
        pytest.skip(f"the emulator needs nvcc: {obstacle}")
    emulator.build()
