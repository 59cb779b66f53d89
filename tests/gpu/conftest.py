# SPDX-License-Identifier: Apache-2.0
"""Tests that need GPUs: skipped without one."""

from collections.abc import Iterator

import pytest
import torch
from rank_pool import RankPool

GPUS = torch.cuda.device_count()  # the one question that DeepSpeed's accelerator, set to the CPU here, cannot answer
# Ranks, and whether they share the first GPU.
POOLS = {"2-sharing": (2, True), "4-sharing": (4, True), "2-gpus": (2, False), "4-gpus": (4, False),
         "8-gpus": (8, False)}


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.path.parts and GPUS == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none is visible"))


def over_nccl(world: int) -> Iterator[RankPool]:
    pool = RankPool(world, accelerator="cuda", share_gpu=GPUS < world)
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=["alone", "over-nccl"])
def gpu_ranks(request):
    """One rank, and several that exchange over NCCL: 2, or 4 where there are as many GPUs."""
    yield from over_nccl(1 if request.param == "alone" else 4 if GPUS >= 4 else 2)


@pytest.fixture(scope="module")
def pair():
    """Two ranks over NCCL."""
    yield from over_nccl(2)


@pytest.fixture
def pair_of_a_case():
    """Two ranks of one case alone: a process group that was missed once cannot be used again."""
    yield from over_nccl(2)


@pytest.fixture(scope="module")
def four():
    """Four ranks over NCCL."""
    yield from over_nccl(4)


@pytest.fixture
def four_of_a_case():
    """Four ranks of one case alone, as `pair_of_a_case`."""
    yield from over_nccl(4)


def over_gloo() -> Iterator[RankPool]:
    pool = RankPool(4, accelerator="cuda", backend="gloo", share_gpu=GPUS < 4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four_over_gloo():
    """Four ranks that exchange over peer memory, and over gloo what their oracle exchanges."""
    yield from over_gloo()


@pytest.fixture(scope="module")
def four_over_nvshmem():
    """Four ranks in which NVSHMEM is started once."""
    yield from over_gloo()


@pytest.fixture
def four_over_nvshmem_of_a_case():
    """Four ranks of one case alone, which starts NVSHMEM."""
    yield from over_gloo()


@pytest.fixture(scope="module", params=POOLS)
def pool(request):
    """Ranks that exchange over peer memory, and over gloo what their oracle exchanges."""
    world, share = POOLS[request.param]
    if GPUS < (1 if share else world):
        pytest.skip(f"needs {1 if share else world} GPUs, and {GPUS} are visible")
    pool = RankPool(world, accelerator="cuda", backend="gloo", share_gpu=share)
    yield pool
    pool.close()
