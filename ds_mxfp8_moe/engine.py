# SPDX-License-Identifier: Apache-2.0
"""The JSON flag: `initialize` for deepspeed.initialize, and `enable` for libraries that call that themselves."""

import functools
import inspect
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.runtime.engine import DeepSpeedEngine

from .config import ConfigError, MXFP8MoEConfig, fingerprint, parse
from .convert import convert


def initialize(*args, **kwargs) -> tuple:
    """`deepspeed.initialize`, with its arguments and results; reads the section "mxfp8_moe" of the config.

    Where the section is enabled, the model's MoE layers take the MXFP8 path; else the engine is plain DeepSpeed's.

    Raises:
        ConfigError: the section is wrong (before any collective), or differs between ranks.
    """
    config = parse(_given_config(*args, **kwargs))
    result = deepspeed.initialize(*args, **kwargs)
    _convert_engine(result[0], config)
    return result


initialize.__signature__ = inspect.signature(deepspeed.initialize)


def enable() -> None:
    """Makes every DeepSpeed engine of this process read the section "mxfp8_moe", whoever creates it.

    For libraries that call deepspeed.initialize themselves (Hugging Face Trainer, Accelerate), imported before or
    after. Calling it twice is calling it once.
    """
    if not hasattr(DeepSpeedEngine.__init__, "mxfp8_moe"):
        DeepSpeedEngine.__init__ = _reading_the_section(DeepSpeedEngine.__init__)


def _reading_the_section(plain_init):

    @functools.wraps(plain_init)
    def init(self, *args, **kwargs):
        given = inspect.signature(plain_init).bind(self, *args, **kwargs).arguments
        config = parse(given["config"] if given.get("config") is not None else given["config_class"]._param_dict)
        plain_init(self, *args, **kwargs)
        _convert_engine(self, config)

    init.mxfp8_moe = True
    return init


def _given_config(*args, **kwargs) -> Any:
    """The config as deepspeed.initialize finds it among its arguments; None where it will complain itself."""
    given = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    for config in (given.get("config"), given.get("config_params")):
        if config is not None:
            return config
    for name in ("deepspeed_config", "deepscale_config"):
        config = getattr(given.get("args"), name, None)
        if config is not None:
            return config
    return None


def _convert_engine(engine: DeepSpeedEngine, config: MXFP8MoEConfig) -> None:
    if getattr(engine, "_mxfp8_moe_config", None) == config:  # `initialize` after `enable`: done already
        return
    engine._mxfp8_moe_config = config
    _agree(config)
    if config.enabled:
        convert(engine, config)
        _check_optimizer(engine)


def _agree(config: MXFP8MoEConfig) -> None:
    """Finds sections that differ between ranks with one all-gather; every rank raises alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, fingerprint(config))
    if len(set(digests)) > 1:
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise ConfigError(f'the section "mxfp8_moe" on ranks {different} differs from rank 0\'s: give every rank the '
                          "same config")


def _check_optimizer(engine: DeepSpeedEngine) -> None:
    """A client optimizer made before AutoEP replaced the experts would go on training the old ones, silently."""
    optimizer = engine.client_optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, module in engine.module.named_modules():
        if isinstance(module, AutoEPMoELayer) and not trained >= {id(p) for p in module.parameters()
                                                                  if p.requires_grad}:
            raise ConfigError(f"the optimizer given to initialize does not hold the parameters of {name}, which "
                              "AutoEP has made: configure the optimizer in the DeepSpeed config, or pass a callable "
                              "that makes it")
