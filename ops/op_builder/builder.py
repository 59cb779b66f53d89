# SPDX-License-Identifier: Apache-2.0
"""Builds an extension with nvcc at its first use, and keeps the result on disk.

nvcc compiles all files at the same time and links them. The result lies in torch's folder for extensions
(TORCH_EXTENSIONS_DIR), under a hash of everything that goes into it. An edited source, another nvcc, torch or Python,
or another kind of GPU therefore causes a new build. A lock lets only one rank of a node build at a time. The operating
system releases the lock if its holder dies.

A library is code that runs, so it is loaded only if nobody but this user and root can have written it, and if its
checksum, which lies beside it, is right. A damaged library is built again.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder

CSRC = Path(__file__).resolve().parents[1] / "csrc"
BOTH = ((9, 0), (10, 0))
OLDEST_NVCC = {9: (12, 0), 10: (12, 8)}  # by the major number of the compute capability
COMMAND_SECONDS = 600
LINES_OF_ERROR = 20


class NvccBuilder(CUDAOpBuilder):
    """An op made of every .cu and .cpp file of a folder. Subclasses name the op and the folder.

    Args:
        source_folder: holds the sources and their headers. Default: `FOLDER` in csrc.
        capabilities: compute capabilities to compile for. With None: that of the current GPU or, on a machine without
            a GPU, all that are supported.
    """

    NAME: str
    FOLDER: str
    HEADERS: tuple = ()  # other folders whose headers the sources include
    CUDART = "shared"  # the runtime that torch uses, so that both use the same device

    def __init__(self, source_folder: Path | None = None, capabilities: tuple | None = None):
        super().__init__(self.NAME)
        self.source_folder = source_folder or CSRC / self.FOLDER
        self._capabilities = capabilities

    def absolute_name(self) -> str:
        return f"ds_mxfp8_moe.ops.{self.NAME}_op"

    def sources(self) -> list[str]:
        return sorted(str(path) for path in self.source_folder.iterdir() if path.suffix in (".cu", ".cpp"))

    def include_paths(self) -> list[str]:
        # torch's folder holds pybind11's headers too.
        return [str(Path(torch.__file__).parent / "include"), sysconfig.get_paths()["include"]]

    def compute_capability_args(self, cross_compile_archs=None) -> list[str]:
        """nvcc's -gencode flags. The base class cannot read names such as 9.0a."""
        names = [f"{major}{minor}a" for major, minor in self.capabilities()]
        return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]

    def cxx_args(self) -> list[str]:
        return ["-O2", "-std=c++20"]

    def link_args(self) -> list[str]:
        return []

    def nvcc_args(self) -> list[str]:
        """Without the base class's --use_fast_math, which flushes the smallest scales to zero."""
        return ["-O3", "-std=c++20", "-lineinfo", "--threads=0", *self.compute_capability_args()]

    def capabilities(self) -> tuple:
        if self._capabilities is not None:
            return self._capabilities
        return (torch.cuda.get_device_capability(), ) if torch.cuda.is_available() else BOTH

    def is_compatible(self, verbose: bool = False) -> bool:
        self.error_log = self._obstacle() or _distrust(self._library())
        if self.error_log and verbose:
            self.warning(f"{self.NAME}: {self.error_log}")
        return self.error_log is None

    def is_built(self) -> bool:
        """Whether a whole build of these sources exists, so that `load` compiles nothing. The builder must be
        compatible."""
        return _is_whole(self._library())

    def last_failure(self) -> str | None:
        """The compiler's message if the last attempt to build these sources failed. The next load tries again."""
        failed = self._library().with_name("failed")
        return failed.read_text() if failed.exists() and not self.is_built() else None

    def status(self) -> tuple[bool, str]:
        """Whether this machine can use the extension, and why."""
        if not self.is_compatible():
            return False, f"the extension cannot be built: {self.error_log}"
        if failure := self.last_failure():
            return False, f"the last build of the extension failed: {failure}"
        if self.is_built():
            return True, "the extension is built"
        return True, f"the extension will be built at first use, by nvcc {dotted(nvcc_version())}"

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Builds the extension if it is not built yet, and imports it.

        Raises:
            RuntimeError: this machine cannot build it, others can write the library, or the build failed. The error
                ends with the compiler's last lines.
            OSError: nothing is built yet, and the folder cannot be written.
        """
        if not self.is_compatible():
            raise RuntimeError(self.error_log)
        library = self._library()
        if not _is_whole(library):  # a whole one may lie where this user cannot write
            self._build_in_turn(library)
            if problem := _distrust(library):
                raise RuntimeError(problem)
        spec = importlib.util.spec_from_file_location(self.NAME, library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _obstacle(self) -> str | None:
        if sys.platform != "linux" or torch.version.hip is not None:
            return "its kernels are for NVIDIA GPUs under Linux"
        for major, minor in self.capabilities():
            if major not in OLDEST_NVCC:
                return f"its kernels are for compute capability 9 and 10, and this GPU has {major}.{minor}"
        nvcc = _nvcc()
        if nvcc is None:
            return "nvcc was not found: install the CUDA toolkit, and set CUDA_HOME if nvcc is not on PATH"
        try:
            version = nvcc_version()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return f"the version of {nvcc} is unknown: {error}"
        oldest = max(OLDEST_NVCC[major] for major, _ in self.capabilities())
        if version < oldest:
            return f"{nvcc} belongs to CUDA {dotted(version)}, but CUDA {dotted(oldest)} or newer is needed"
        if torch.version.cuda is not None and int(torch.version.cuda.split(".")[0]) != version[0]:
            return f"{nvcc} belongs to CUDA {dotted(version)}, but torch is built for CUDA {torch.version.cuda}"
        if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
            return f"Python's headers were not found ({sysconfig.get_paths()['include']}/Python.h)"
        return None

    def _flags(self, source: str) -> list[str]:
        args = self.nvcc_args() if source.endswith(".cu") else self.cxx_args()
        return [*args, f"-DTORCH_EXTENSION_NAME={self.NAME}", "-Xcompiler=-fPIC,-fvisibility=hidden",
                *(f"-I{path}" for path in self.include_paths())]

    def _library(self) -> Path:
        """The path of the library that these sources and tools give, whether it exists or not."""
        from torch.utils.cpp_extension import get_default_build_root  # slow to import
        key = hashlib.sha256()
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for part in (_nvcc_says(), torch.__version__, suffix, *map(str, map(self._flags, self.sources()))):
            key.update(part.encode() + b"\0")
        for path in sorted(path for folder in (self.source_folder, *self.HEADERS) for path in folder.iterdir()):
            key.update(path.name.encode() + b"\0" + path.read_bytes())
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
        return Path(root) / f"{self.NAME}_{key.hexdigest()[:16]}" / f"{self.NAME}{suffix}"

    def _build_in_turn(self, library: Path) -> None:
        """Builds the library, unless another process builds it first."""
        import fcntl  # not on Windows, where the report imports this file
        library.parent.parent.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(mode=0o755, exist_ok=True)  # whatever the umask lets others write elsewhere
        failed = library.with_name("failed")
        before = _stamp(failed)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(library.with_name("lock"), flags, 0o644), "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(library):
                if _stamp(failed) != before:  # another rank's build failed while this one waited
                    raise RuntimeError(failed.read_text())
                if library.exists():
                    self.warning(f"{library} is damaged, probably cut short: building it again")
                try:
                    self._build(library)
                except RuntimeError as error:
                    failed.write_text(str(error))
                    raise

    def _build(self, library: Path) -> None:
        # Each attempt has a folder of its own, since nvcc outlives a killed rank, and some file systems' locks do not
        # reach other hosts.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            objects = {source: os.path.join(folder, Path(source).name + ".o") for source in self.sources()}
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda item: _run("-c", item[0], "-o", item[1], *self._flags(item[0])), objects.items()))
            half_done = Path(folder, library.name)
            _run("-shared", f"--cudart={self.CUDART}", *objects.values(), *self.link_args(), "-o", str(half_done))
            checksum = Path(folder, "checksum")
            checksum.write_text(_checksum(half_done))
            for made, place in ((half_done, library), (checksum, _checksum_file(library))):
                made.chmod(0o644)
                with open(made) as file:
                    os.fsync(file.fileno())  # else the host may go down after the new name, and before the content
                made.replace(place)


def loading(made: Callable[[], NvccBuilder]) -> Callable[[], tuple[ModuleType | None, str]]:
    """A function that returns the extension's module and "", or None and the reason. It tries once in each process."""

    @cache
    def try_load() -> tuple[ModuleType | None, str]:
        try:
            return made().load(verbose=False), ""
        except Exception as error:  # whatever goes wrong, training can go on without the extension
            return None, f"the extension cannot be built: {error}"

    return try_load


def nvcc_version() -> tuple[int, int]:
    """The installed nvcc's version as (major, minor)."""
    release = re.search(r"release (\d+)\.(\d+)", _nvcc_says())
    if release is None:
        raise ValueError(f"{_nvcc_says()!r} names no release")
    return int(release[1]), int(release[2])


def dotted(version: tuple) -> str:
    return ".".join(map(str, version))


def _nvcc() -> str | None:
    from torch.utils.cpp_extension import CUDA_HOME  # None where torch is built without CUDA
    return (CUDA_HOME and shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin"))) or shutil.which("nvcc")


@cache
def _nvcc_says() -> str:
    return subprocess.run([_nvcc(), "--version"], check=True, capture_output=True, text=True, timeout=60).stdout


def _run(*args: str) -> str:
    """Runs nvcc with these arguments. Returns its output."""
    command = [_nvcc(), *args]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvcc did not finish within {COMMAND_SECONDS} s: {' '.join(command)}") from None
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-LINES_OF_ERROR:])
        raise RuntimeError(f"{' '.join(command)}\n{last}")
    return done.stdout


def _checksum_file(library: Path) -> Path:
    return library.with_name("checksum")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(library: Path) -> bool:
    """Whether a library is there and has its checksum. One that was cut short kills the process that loads it."""
    try:
        return _checksum(library) == _checksum_file(library).read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _distrust(library: Path) -> str | None:
    """Why a library must not be loaded, and what to do: somebody else can write it or its folder. None: it may be."""
    for path in filter(Path.exists, (library.parent, library)):
        found = path.stat()
        if found.st_uid not in (os.geteuid(), 0):
            return (f"{path} is user {found.st_uid}'s, and code is loaded only from your own files or root's: set "
                    "TORCH_EXTENSIONS_DIR to a folder of your own. Let root own a cache that many users share")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return (f"others can write {path} (mode {stat.S_IMODE(found.st_mode):o}), so its code is not loaded: "
                    "delete it, or take the right away by chmod go-w")
    return None


def _stamp(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
