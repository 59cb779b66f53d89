# SPDX-License-Identifier: Apache-2.0
"""The exchanges over NVSHMEM (csrc/nvshmem), built against the NVSHMEM that torch brings on Linux."""

import importlib.util
import re
from pathlib import Path

from .builder import CSRC, NvccBuilder, dotted, loading

OLDEST = (3, 4)


class NVSHMEMBuilder(NvccBuilder):
    """The op `ds_mxfp8_moe_nvshmem`."""

    NAME = "ds_mxfp8_moe_nvshmem"
    FOLDER = "nvshmem"
    HEADERS = (CSRC / "nvlink", )

    def include_paths(self) -> list[str]:
        return [*super().include_paths(), str(_nvshmem() / "include")]

    def nvcc_args(self) -> list[str]:
        return [*super().nvcc_args(), "-rdc=true"]

    def link_args(self) -> list[str]:
        """Links kernels with NVSHMEM's device library, and finds its host library where the wheel has it.

        The device library's symbols are not exported. torch has a copy of its own, and what is called here must set up
        the kernels here.
        """
        lib = _nvshmem() / "lib"
        return [*self.compute_capability_args(), "-rdc=true", f"-L{lib}", "-lnvshmem_device",
                "-l:libnvshmem_host.so.3", f"-Xlinker=-rpath={lib}", "-Xlinker=--exclude-libs=libnvshmem_device.a"]

    def _obstacle(self) -> str | None:
        obstacle = super()._obstacle()
        if obstacle:
            return obstacle
        folder = _nvshmem()
        if folder is None:
            return "NVSHMEM was not found. torch for CUDA brings it: the package nvidia-nvshmem-cu13"
        found = re.findall(r"VENDOR_M(?:AJOR|INOR)_VERSION (\d+)",
                           (folder / "include" / "non_abi" / "nvshmem_version.h").read_text())
        version = tuple(map(int, found[:2]))
        if version < OLDEST:
            return f"NVSHMEM {dotted(version)} in {folder} is too old: {dotted(OLDEST)} or newer is needed"
        return None


def _nvshmem() -> Path | None:
    """The folder of NVSHMEM's package."""
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # there is no package nvidia
        return None
    return None if found is None else Path(next(iter(found.submodule_search_locations)))


try_load = loading(lambda: NVSHMEMBuilder())
