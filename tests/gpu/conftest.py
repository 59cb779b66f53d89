# SPDX-License-Identifier: Apache-2.0
"""Tests that need GPUs: skipped without one."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.rank_pool import RankPool

GPUS = torch.cuda.device_count()  # the one question that DeepSpeed's accelerator, set to the CPU here, cannot answer
# Ranks, and whether they share the first GPU.
POOLS = {"2-sharing": (2, True), "4-sharing": (4, True), "2-gpus": (2, False), "4-gpus": (4, False),
         "8-gpus": (8, False)}


def pytest_collection_modifyitems(config, items):
    """Without a GPU, one test stands for those of its file."""
    if GPUS:
        return
    first = {item.path: item for item in reversed(items) if "gpu" in item.path.parts}
    for item in first.values():
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device, as all tests of this file; none is visible"))
    config.hook.pytest_deselected(items=[item for item in items if first.get(item.path, item) is not item])
    items[:] = [item for item in items if first.get(item.path, item) is item]


def ranks(world: int, backend: str | None = None, share_gpu: bool | None = None) -> Iterator[RankPool]:
    """Over NCCL, or what `backend` says. They share a GPU where there are too few."""
    pool = RankPool(world, "cuda", backend, GPUS < world if share_gpu is None else share_gpu)
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=["alone", "over-nccl"])
def gpu_ranks(request):
    """One rank, and several that exchange over NCCL: 2, or 4 where there are as many GPUs."""
    yield from ranks(1 if request.param == "alone" else 4 if GPUS >= 4 else 2)


def fixture_of(scope: str, *how):
    @pytest.fixture(scope=scope)
    def fixture():
        yield from ranks(*how)

    return fixture


# Ranks of one case alone: a process group that was missed once cannot be used again, and NVSHMEM starts once. Over
# gloo goes what the oracle of ranks exchanges that exchange over peer memory or NVSHMEM.
alone = fixture_of("module", 1)
pair, pair_of_a_case, four = fixture_of("module", 2), fixture_of("function", 2), fixture_of("module", 4)
four_over_gloo, four_over_nvshmem = fixture_of("module", 4, "gloo"), fixture_of("module", 4, "gloo")
four_over_nvshmem_of_a_case = fixture_of("function", 4, "gloo")


@pytest.fixture(scope="module", params=POOLS)
def pool(request):
    """Ranks that exchange over peer memory, and over gloo what their oracle exchanges."""
    world, share = POOLS[request.param]
    if GPUS < (1 if share else world):
        pytest.skip(f"needs {1 if share else world} GPUs, and {GPUS} are visible")
    yield from ranks(world, "gloo", share)
