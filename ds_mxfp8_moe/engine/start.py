# SPDX-License-Identifier: Apache-2.0
"""The JSON flag: `initialize` for deepspeed.initialize, and `enable` for libraries that call that themselves.

Importing this module makes engines say so if their config has the section and neither of the two read it.
"""

import atexit
import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from ..config import SECTION, ConfigError, MXFP8MoEConfig, parse
from ..layers.found import converted_layers
from ..layers.held_experts import holds_experts, quantised_experts
from ..layers.patches import wrap
from ..layers.say import print_on_rank_0, say_if_missing
from ..ops.private_names import missing
from ..transport.agreement import compare_starts
from .attach import attach
from .hooks import remember_engine
from .moe_engine import make_moe_engine

# Whether `initialize` or `enable` reads the config of the engine that is being made.
_READ = ContextVar("read", default=False)
UNREAD = (f'mxfp8_moe: WARNING: the DeepSpeed config has the section "{SECTION}", but nothing read it, so this is '
          "plain DeepSpeed. Call ds_mxfp8_moe.initialize in place of deepspeed.initialize. Where a library calls that "
          "(Hugging Face Trainer, Accelerate), call ds_mxfp8_moe.enable() before it does, or start the program by "
          "python -m ds_mxfp8_moe.run")
NO_ENGINE = ("mxfp8_moe: WARNING: ds_mxfp8_moe.enable() was called, but nobody made a DeepSpeed engine, so nothing "
             "ran in MXFP8. Give Accelerate or the Trainer a DeepSpeed config. Accelerator(cpu=True) makes no engine")


def initialize(*args, **kwargs) -> tuple:
    """`deepspeed.initialize`, with its arguments and results; reads the section "mxfp8_moe" of the config.

    If the section is enabled, the model's MoE layers take the MXFP8 path. Otherwise the engine is plain DeepSpeed's. A
    section that is not enabled undoes an earlier `convert`. Without a section, converted layers stay converted.

    Raises:
        ConfigError: the section is wrong (before any collective), or differs between ranks. The model has no weights
            yet, or is in another engine. Or AutoEP does not start with this version of transformers.
    """
    given = inspect.signature(deepspeed.initialize).bind(*args, **kwargs)
    config = parse(_given_config(given.arguments))
    with _preparing(config, given.arguments.get("model")):
        result = deepspeed.initialize(*given.args, **given.kwargs)
    _finish(result[0], config)
    return result


initialize.__signature__ = inspect.signature(deepspeed.initialize)


@contextmanager
def _preparing(config: MXFP8MoEConfig, model: torch.nn.Module | None) -> Iterator[None]:
    """While DeepSpeed makes an engine, its config is read, and experts are as the engine can take them."""
    before = _READ.set(True)
    try:
        with ExitStack() as stack:
            if config.enabled:
                _refuse_empty(model)
                logger.addFilter(_is_news)
                stack.callback(logger.removeFilter, _is_news)
                if not say_if_missing("FP8 experts"):
                    stack.enter_context(quantised_experts(model))
            elif holds_experts(model):
                raise ConfigError('the model\'s experts are held in MXFP8 alone: write "mxfp8_moe": {"enabled": true}')
            yield
    finally:
        _READ.reset(before)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether the start-up lines about the layers do not say the same."""
    return not record.getMessage().startswith("autoep_size=1 means every rank owns all experts")


def _refuse_empty(model: Any) -> None:
    """Raises ConfigError for a model without weights, before DeepSpeed raises an error that does not say so."""
    empty = [name for name, p in model.named_parameters() if p.is_meta] if isinstance(model, torch.nn.Module) else []
    if empty:
        raise ConfigError(f"{len(empty)} parameters are on the device meta, so they have no values: {empty[0]}, ... "
                          "Load the weights before initialize. If a rank cannot hold all of them, use ZeRO-3, and "
                          "make transformers.integrations.HfDeepSpeedConfig(config) before from_pretrained: then each "
                          "rank gets its part")


def enable() -> None:
    """Makes every DeepSpeed engine of this process read the section "mxfp8_moe", whoever creates it.

    For libraries that call deepspeed.initialize themselves, as Hugging Face Trainer and Accelerate do. They may be
    imported before or after this call. A second call changes nothing. All engines are meant, so nothing undoes it.
    """
    if wrap(DeepSpeedEngine, "__init__", _reading_the_section):
        atexit.register(_say_no_engine)


def is_reading() -> bool:
    """Whether the config of the engine that is being made is read, by `initialize` or after `enable`."""
    return _READ.get()


def _say_no_engine() -> None:
    if os.environ.get("RANK", "0") == "0" and not hasattr(sys, "last_type"):  # nor after an error
        print(NO_ENGINE, flush=True)


def _reading_the_section(plain: Callable, engine: DeepSpeedEngine, *args, **kwargs) -> None:
    atexit.unregister(_say_no_engine)
    if _READ.get():  # in `initialize`, which does the rest
        return plain(engine, *args, **kwargs)
    given = inspect.signature(plain).bind(engine, *args, **kwargs)
    config = parse(_config_of(given.arguments))
    with _preparing(config, given.arguments["model"]):
        plain(*given.args, **given.kwargs)
    _finish(engine, config)


def _reminding(plain: Callable, engine: DeepSpeedEngine, *args, **kwargs) -> None:
    """The engine's start, and `_follow`. If nobody reads the section, an error of the start ends with the warning."""
    if _READ.get():
        _become(engine, _config_of(inspect.signature(plain).bind(engine, *args, **kwargs).arguments))
    try:
        plain(engine, *args, **kwargs)
    except Exception as error:
        given = inspect.signature(plain).bind(engine, *args, **kwargs).arguments
        if not _READ.get() and _switched_on(_config_of(given)):
            error.add_note(UNREAD)
        raise
    _follow(engine)


def _follow(engine: DeepSpeedEngine) -> None:
    """`convert` finds the engine of its model. The first forward warns, if nobody reads the section until then."""
    remember_engine(engine)
    if _switched_on(engine._config._param_dict):
        engine._mxfp8_moe_reminder = engine.module.register_forward_pre_hook(lambda module, inputs: _remind(engine))


def _become(engine: DeepSpeedEngine, given: Any) -> None:
    """Before its start, an engine becomes a MoEEngine, if its config has the section enabled. Where that is off, the
    engine only compares it with the other ranks', which would wait for this rank."""
    config, experts = parse(given), given.get("expert_parallel") if isinstance(given, dict) else None
    if isinstance(experts, dict) and experts.get("enabled") and missing("stacked experts") is None:
        compare_starts(config.model_dump_json())
    if config.enabled:
        make_moe_engine(engine)


def _switched_on(config: Any) -> bool:
    if not isinstance(config, dict) or SECTION not in config:
        return False
    section = config[SECTION]
    return not isinstance(section, dict) or section.get("enabled") is not False


def _remind(engine: DeepSpeedEngine) -> None:
    _stop_reminder(engine)
    if not converted_layers(engine.module):  # by `convert`
        print_on_rank_0(UNREAD)


def _stop_reminder(engine: DeepSpeedEngine) -> None:
    if hook := vars(engine).pop("_mxfp8_moe_reminder", None):
        hook.remove()


def _finish(engine: DeepSpeedEngine, config: MXFP8MoEConfig) -> None:
    _stop_reminder(engine)
    attach(engine, config)


def _config_of(given: dict) -> Any:
    """The config among the arguments of an engine."""
    return given["config_class"]._param_dict if given.get("config_class") is not None else given.get("config")


def _given_config(given: dict) -> Any:
    """The config as deepspeed.initialize finds it among its arguments. None: there is none, and it will complain."""
    places = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    return next((config for config in places if config is not None), None)


wrap(DeepSpeedEngine, "__init__", _reminding)
if dist.is_initialized():  # there may be engines that were made before this import
    for one in gc.get_objects():
        if issubclass(type(one), DeepSpeedEngine) and hasattr(one, "module"):  # or else it is being made
            _follow(one)
