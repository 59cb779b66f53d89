# SPDX-License-Identifier: Apache-2.0
"""The NVLink transport's kernels (csrc/nvlink). Their sources use neither torch's headers nor its libraries."""

from .builder import NvccBuilder, loading


class NVLinkBuilder(NvccBuilder):
    """The op `ds_mxfp8_moe_nvlink`."""

    NAME = "ds_mxfp8_moe_nvlink"
    FOLDER = "nvlink"


try_load = loading(lambda: NVLinkBuilder())
