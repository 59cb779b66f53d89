# SPDX-License-Identifier: Apache-2.0
"""MXFP8 expert parallelism for DeepSpeed: switched on by the section "mxfp8_moe" of the DeepSpeed config."""

import warnings as _warnings
from typing import Any as _Any

from .compat.private_names import importing

with importing():
    from .checkpoint.exporting import export_weights
    from .checkpoint.from_pretrained import from_pretrained
    from .checkpoint.pretrained import save_pretrained
    from .config import ConfigError, MXFP8MoEConfig
    from .engine.attach import convert
    from .engine.convert import ConversionReport
    from .engine.replay import pad_routes, record_routes, replay_routes
    from .engine.start import disable, enable, initialize
    from .layers.registries import register
    from .transport.deadline import PeerError

__version__ = "0.1.0"
__all__ = ["ConfigError", "ConversionReport", "MXFP8MoEConfig", "PeerError", "convert", "disable", "enable",
           "export_weights", "from_pretrained", "initialize", "pad_routes", "record_routes", "register",
           "replay_routes", "save_pretrained"]
_RENAMED = {"PeerFailure": "PeerError", "padded_routes": "pad_routes"}


def __getattr__(name: str) -> _Any:
    if name == "MoE":
        from deepspeed.moe.layer import MoE
        new, value = "deepspeed.moe.layer.MoE", MoE
    elif name in _RENAMED:
        new, value = f"ds_mxfp8_moe.{_RENAMED[name]}", globals()[_RENAMED[name]]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _warnings.warn(f"ds_mxfp8_moe.{name} is deprecated: use {new}", FutureWarning, stacklevel=2)
    return value
