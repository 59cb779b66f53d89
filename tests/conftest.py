# SPDX-License-Identifier: Apache-2.0
"""CPU by default, so that the suite runs alike on every machine; tests/gpu opts out. Pools of ranks and the process of
Triton's interpreter start with the first test that uses them and live until the session ends."""

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["DS_MXFP8_MOE_AUTO"] = "0"  # plain DeepSpeed, beside which cases train, does not read the section


def pytest_make_collect_report():
    """The first collection imports torch. A process that runs no tests itself, as xdist's first, does without."""
    import torch
    if not torch.cuda.is_available():
        # Tensors are too small here for more threads, which wait for each other at a processor's cost. The variable is
        # for processes that tests start; without it the Trainer gives every rank all cores.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--stress", type=int, default=20, help="repetitions of the NVLink transport's stress tests; 500 "
                     "is what it has to stand")


def pool_of(world_size: int, scope: str = "session"):
    @pytest.fixture(scope=scope)
    def fixture():
        from tests.support.rank_pool import RankPool
        pool = RankPool(world_size)
        yield pool
        pool.close()

    return fixture


ranks2, ranks3, ranks4, ranks8 = map(pool_of, (2, 3, 4, 8))
ranks1, ranks6, ranks12 = (pool_of(world_size, "module") for world_size in (1, 6, 12))


@pytest.fixture(scope="module")
def one_rank():
    """A group of this process alone: layers can run without a launcher."""
    import deepspeed
    import torch

    from tests.support.rank_pool import free_port
    with pytest.MonkeyPatch.context() as patch:
        for key, value in dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1",
                               MASTER_PORT=free_port()).items():
            patch.setenv(key, str(value))
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        yield
        torch.distributed.destroy_process_group()
        deepspeed.comm.comm.cdb = deepspeed.utils.groups._WORLD_GROUP = None


@pytest.fixture(scope="session")
def interpreter():
    """Runs a function in the process of Triton's interpreter."""
    from tests.support.interpreter import interpreter_process
    yield from interpreter_process()
