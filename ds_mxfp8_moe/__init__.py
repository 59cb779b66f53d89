# SPDX-License-Identifier: Apache-2.0
"""MXFP8 expert parallelism for DeepSpeed: switched on by the section "mxfp8_moe" of the DeepSpeed config."""

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
