# SPDX-License-Identifier: Apache-2.0
"""MXFP8 expert parallelism for DeepSpeed: switched on by the section "mxfp8_moe" of the DeepSpeed config."""

from .config import ConfigError, MXFP8MoEConfig
from .convert import ConversionReport, convert
from .engine import enable, initialize
from .layer import MoE
from .pretrained import save_pretrained
from .recognise import register_expert

__all__ = ["ConfigError", "ConversionReport", "MXFP8MoEConfig", "MoE", "convert", "enable", "initialize",
           "register_expert", "save_pretrained"]
