# SPDX-License-Identifier: Apache-2.0
"""The C++ programs of ops/csrc/tests: built by CMake for GPUs, or for the emulator of CUDA, and started by mpirun."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulator

from ds_mxfp8_moe.ops.op_builder import builder

TESTS = builder.CSRC / "tests"
SECONDS = 600.0  # of one command: on a busy machine nvcc takes minutes
# mpirun, mpicxx, cmake and ninja may be wheels of this environment, which need not be active.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess:
    """Runs a command. Its output holds stderr too. `variables`: of the environment."""
    return subprocess.run(command, env=os.environ | {"PATH": PATH} | variables, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)


def must(*command: str | Path) -> str:
    """Runs a command that must succeed. Returns its output."""
    done = run(*command)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}"
    return done.stdout


def cmake(folder: Path, *options: str) -> None:
    """Builds everything in `folder`."""
    must("cmake", "-G", "Ninja", "-S", builder.CSRC, "-B", folder, *options)
    must("ninja", "-C", folder)


def mpirun(ranks: int, *command: str | Path) -> subprocess.CompletedProcess:
    """Starts `ranks` processes of a program. Without these options, mpirun refuses root, and more ranks than cores."""
    return run("mpirun", "--oversubscribe", "-np", str(ranks), *command, OMPI_ALLOW_RUN_AS_ROOT="1",
               OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


class Emulated:
    """The programs for the emulator, built in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "nvlink").mkdir(parents=True)
        emulator.write_sources(folder / "nvlink")
        shutil.copytree(TESTS, folder / "tests")
        shutil.copy(emulator.HERE / "cuda_runtime.cpp", folder / "tests")
        self._include = must("mpicxx", "--showme:incdirs").split()
        sources = [*(folder / "nvlink").glob("*.cu"), folder / "nvlink/emulator.cpp",
                   *(folder / "tests" / f"{name}.cpp" for name in ("cuda_runtime", "ranks", "exchange"))]
        programs = [folder / "tests" / f"{name}.cpp" for name in ("test_all_to_all", "bench_all_to_all")]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self._objects = dict(pool.map(lambda path: (path.name, self._object(path)), sources + programs))
        self.test, self.bench = (self._linked(path.stem, self._objects) for path in programs)

    def changed(self, name: str, change: Callable[[str], str]) -> Path:
        """test_all_to_all with another text of one of the kernels' files."""
        path = self.folder / "nvlink" / f"changed_{name}"
        text = (self.folder / "nvlink" / name).read_text()
        assert change(text) != text
        path.write_text(change(text))
        return self._linked("test_all_to_all", self._objects | {name: self._object(path)}, "changed")

    def _object(self, path: Path) -> Path:
        made = path.with_suffix(".o")
        folders = (self.folder / "nvlink", self.folder / "tests", *self._include)
        builder._run("-c", str(path), "-o", str(made), *emulator.CPP, "-O1", *(f"-I{folder}" for folder in folders))
        return made

    def _linked(self, program: str, objects: dict, name: str = "") -> Path:
        made = self.folder / (name or program)
        others = {"test_all_to_all.cpp", "bench_all_to_all.cpp"} - {f"{program}.cpp"}
        must("mpicxx", "-pthread", *(path for of, path in objects.items() if of not in others), "-o", made)
        return made
