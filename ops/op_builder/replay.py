# SPDX-License-Identifier: Apache-2.0
"""The executor of recorded launches (csrc/replay). It is C++ against torch's headers, without kernels of its own."""

from pathlib import Path

import torch

from .builder import NvccBuilder, loading

LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


class ReplayBuilder(NvccBuilder):
    """The op `ds_mxfp8_moe_replay`."""

    NAME = "ds_mxfp8_moe_replay"
    FOLDER = "replay"

    def include_paths(self) -> list[str]:
        torchs = Path(torch.__file__).parent / "include"
        return [*super().include_paths(), str(torchs / "torch" / "csrc" / "api" / "include")]

    def link_args(self) -> list[str]:
        return [f"-L{Path(torch.__file__).parent / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]


try_load = loading(lambda: ReplayBuilder())
