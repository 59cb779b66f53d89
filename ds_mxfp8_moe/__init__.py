# SPDX-License-Identifier: Apache-2.0
"""MXFP8 expert parallelism for DeepSpeed: switched on by the section "mxfp8_moe" of the DeepSpeed config."""

__all__ = ["ConfigError", "ConversionReport", "MXFP8MoEConfig", "MoE", "PeerFailure", "convert", "enable",
           "initialize", "register_expert", "save_pretrained"]

try:
    from .checkpoint.pretrained import save_pretrained
    from .config import ConfigError, MXFP8MoEConfig
    from .engine.attach import convert
    from .engine.convert import ConversionReport
    from .engine.start import enable, initialize
    from .layers.classic import MoE
    from .layers.recognise import register_expert
    from .transport.deadline import PeerFailure
except ImportError as error:
    if not (error.name or "").startswith("deepspeed."):
        raise
    for name in {*__all__} & {*globals()}:  # imported before the one that is missing
        del globals()[name]
    from . import plain
    from .plain import convert, enable, initialize

    plain.WHY = str(error)


def __getattr__(name: str):
    if name in __all__:  # not imported above
        raise ImportError(f"{plain.warning()}. So there is no ds_mxfp8_moe.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
