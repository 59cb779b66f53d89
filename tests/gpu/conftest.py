# SPDX-License-Identifier: Apache-2.0
"""Tests that need GPUs: skipped without one. As many NCCL ranks as there are GPUs, up to 4."""

import pytest
import torch
from ranks import RankPool

GPUS = torch.cuda.device_count()  # the one question that DeepSpeed's accelerator, set to the CPU here, cannot answer


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.path.parts and GPUS == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none is visible"))


@pytest.fixture(scope="module")
def gpu_ranks():
    pool = RankPool(1 if GPUS < 2 else 2 if GPUS < 4 else 4, accelerator="cuda")
    yield pool
    pool.close()
