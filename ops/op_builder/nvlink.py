# SPDX-License-Identifier: Apache-2.0
"""The NVLink transport's kernels (csrc/nvlink). Their sources use neither torch's headers nor its libraries."""

from functools import cache
from types import ModuleType

from .builder import NvccBuilder, attempt


class NVLinkBuilder(NvccBuilder):
    """The op `ds_mxfp8_moe_nvlink`."""

    BUILD_VAR = "DS_BUILD_MXFP8_MOE_NVLINK"
    NAME = "ds_mxfp8_moe_nvlink"
    FOLDER = "nvlink"


@cache
def try_load() -> tuple[ModuleType | None, str]:
    """The extension's module and "", or None and the reason. Tries once in each process, and never raises."""
    return attempt(NVLinkBuilder())
