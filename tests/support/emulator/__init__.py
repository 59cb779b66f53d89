# SPDX-License-Identifier: Apache-2.0
"""ops/csrc/nvlink for CPUs: the same sources and bindings, compiled for a small emulator of CUDA (cuda_emulator.h).

`load(rank)` returns the Python module. `Shared` provides the staging of ranks that are processes of one machine:

    PeerMemory(group, emulator.load(rank), provider=emulator.Shared)
"""

import ctypes
import mmap
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed.comm as dist
import torch

from ds_mxfp8_moe.ops.op_builder import builder, nvlink
from ds_mxfp8_moe.transport.deadline import ranks_of

HERE = Path(__file__).resolve().parent
NVLINK, NVSHMEM = builder.CSRC / "nvlink", builder.CSRC / "nvshmem"
POISON = 0x5A  # of new staging
# Plain C++ for the host's compiler. Without fused multiply-adds, which these kernels never use.
CPP = ("-x", "c++", "-std=c++20", "-Xcompiler=-fPIC,-fvisibility=hidden,-pthread,-ffp-contract=off,-U_FORTIFY_SOURCE")


class EmulatorBuilder(nvlink.NVLinkBuilder):
    """nvcc adds CUDA's headers and calls the host's compiler on what it takes for plain C++."""

    NAME = "ds_mxfp8_moe_nvlink_emulator"
    CUDART = "none"

    def __init__(self, source_folder: Path, headers: tuple = ()):
        super().__init__(source_folder, capabilities=((9, 0), ))
        self.NAME += "_nvshmem" if headers else ""
        self.HEADERS = headers

    def _flags(self, source: str) -> list[str]:
        optimized = "-O0" if source.endswith("bindings.cpp") else "-O1"  # pybind11's templates compile for minutes
        return [*CPP, optimized, f"-DTORCH_EXTENSION_NAME={self.NAME}",
                *(f"-I{path}" for path in self.include_paths())]


def obstacle() -> str | None:
    """Why the emulator cannot be built here; None where it can."""
    return EmulatorBuilder(NVLINK)._obstacle()


@cache
def build() -> ModuleType:
    """The extension's module for the emulator. Compiles its sources if they are not built yet."""
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder), NVLINK)
        return EmulatorBuilder(Path(folder)).jit_load()


@cache
def build_nvshmem() -> ModuleType:
    """The extension of ops/csrc/nvshmem for the emulator, with NVSHMEM as in the folder nvshmem here."""
    with tempfile.TemporaryDirectory() as folder:
        nvlink_folder, here = Path(folder) / "nvlink", Path(folder) / "nvshmem"
        for path, sources in ((nvlink_folder, NVLINK), (here, NVSHMEM)):
            path.mkdir()
            write_sources(path, sources)
        (here / "memory.cuh").unlink()  # that of nvlink_folder is included
        for path in here.iterdir():
            path.write_text(re.sub(r"<(nvshmemx?\.h)>", r'"\1"', path.read_text()))
        for path in (HERE / "nvshmem").iterdir():
            shutil.copy(path, here)
        return EmulatorBuilder(here, (nvlink_folder, )).jit_load()


class Heap:
    """As `Shared`, for the symmetric heap of NVSHMEM."""

    def __init__(self, module: ModuleType):
        self._library = ctypes.CDLL(module.__file__)
        self._library.emulator_heap.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p]

    def empty(self, size: int, device: torch.device) -> torch.Tensor:
        staging = Shared.empty(size, device)
        weakref.finalize(staging, self._library.emulator_drain)
        return staging

    def addresses(self, staging: torch.Tensor, group: Any, ranks: list, name: str) -> list[int]:
        for rank, mapped in zip(ranks, Shared.addresses(staging, group, ranks, name), strict=True):
            self._library.emulator_heap(staging.data_ptr(), staging.numel(), ranks_of(group).index(rank), mapped)
        return [staging.data_ptr()]


def puts(module: ModuleType) -> int:
    """How often this rank has put something into another rank's heap."""
    return ctypes.CDLL(module.__file__).emulator_puts()


def write_sources(folder: Path, csrc: Path) -> None:
    """Writes the sources in `csrc` to `folder` as the emulator needs them, and the emulator itself."""
    for path in csrc.iterdir():
        (folder / path.name).write_text(_rewritten(path))
    for name in ("cuda_emulator.h", "emulator.cpp", "memory.cuh"):
        shutil.copy(HERE / name, folder)


def load(rank: int, built: Callable = build) -> ModuleType:
    """As `built`, for one of several ranks. Ranks differ in the order in which things happen."""
    module = built()
    ctypes.CDLL(module.__file__).emulator_seed(ctypes.c_uint64(rank + 1))
    return module


def set_adversary(module: ModuleType, on: bool) -> None:
    """Whether stores and signals are late and out of order. A signal comes after the stores before it."""
    ctypes.CDLL(module.__file__).emulator_adversary(ctypes.c_bool(on))


class Shared:
    """As peer_memory.Symmetric, for processes of this machine. The memory goes when the last of them ends."""

    @staticmethod
    def empty(size: int, device: torch.device) -> torch.Tensor:
        file = os.memfd_create("nvlink staging")
        os.ftruncate(file, size)
        staging = _mapped(file, size).fill_(POISON)
        staging.file = file
        return staging

    @staticmethod
    def addresses(staging: torch.Tensor, group: Any, ranks: list, name: str) -> list[int]:
        files = [None] * dist.get_world_size(group=group)
        dist.all_gather_object(files, f"/proc/{os.getpid()}/fd/{staging.file}", group=group)
        of_rank = {dist.get_rank(): staging}
        for rank, file in zip(ranks_of(group), files, strict=True):
            if rank in ranks and rank != dist.get_rank():
                with open(file, "r+b") as opened:
                    of_rank[rank] = _mapped(opened.fileno(), staging.numel())
        dist.barrier(group=group)  # all have opened all
        os.close(staging.file)
        staging.peers = [peer for peer in of_rank.values() if peer is not staging]  # live as long as the tensor
        return [of_rank[rank].data_ptr() for rank in ranks]


def _mapped(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _rewritten(path: Path) -> str:
    """A source with its shared memory and launches rewritten in plain C++. Line numbers stay."""
    text = path.read_text()
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1 *const \2 = emulator::dynamic_shared<\1>();", text)
    text = re.sub(r"__shared__ (\w+) ([^;]+);", _shared, text)
    return re.sub(r"(\w+(?:<[^;{}]*?>)?)(\s*)<<<([^;]*)>>>(\([^;]*\));",
                  r"emulator::launch(\3, \2[=] { \1\4; });", text)


def _shared(declaration: re.Match) -> str:
    kind, text = declaration[1], ""
    for name, size in re.findall(r"(\w+)((?:\[[\w:]+\])*)(?:, |$)", declaration[2]):
        text += (f"static thread_local emulator::Shared<{kind}{size}> {name}_of_block; "
                 f"auto &{name} = {name}_of_block.value; ")
    return text


class Refusing(Shared):
    """Rank 1 has no memory left."""

    @staticmethod
    def empty(size, device):
        if dist.get_rank() == 1:
            raise MemoryError("none is left")
        return Shared.empty(size, device)
