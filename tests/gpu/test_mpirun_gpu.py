# SPDX-License-Identifier: Apache-2.0
"""`mpirun -np 4 ./test_all_to_all` and `./bench_all_to_all`, on one GPU or several."""

import pytest
import torch
from mpi_programs import cmake, mpirun

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("csrc")
    major, minor = torch.cuda.get_device_capability()
    cmake(folder, f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor}a-real")
    return folder


def test_exchanges_equal_the_oracle(programs):
    done = mpirun(4, programs / "test_all_to_all")
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "15 cases: all equal to the oracle"


def test_the_benchmark_times_every_size(programs):
    done = mpirun(4, programs / "bench_all_to_all", "--iterations", "10")
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("dispatch", "combine", "low-"))]
    assert len(rows) == 16
    assert all(float(p90) >= float(p50) > 0 for *_, p50, p90, _ in rows)
