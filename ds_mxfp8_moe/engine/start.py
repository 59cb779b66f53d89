# SPDX-License-Identifier: Apache-2.0
"""The JSON flag: `initialize` for deepspeed.initialize, and `enable` for libraries that call that themselves."""

import atexit
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ..compat.patches import patched, undo_wraps, wrap
from ..compat.private_names import missing, say_if_missing
from ..compat.sequences import for_autoep
from ..config import SECTION, ConfigError, MXFP8MoEConfig, parse
from ..layers.experts import converted_layers
from ..layers.held_experts import holds_experts, quantized_experts
from ..ops.log import log_on_rank_0
from ..transport.agreement import compare_starts
from .advice import about_enabled
from .attach import attach, print_advice
from .flash_adamw import optimizer_of
from .hooks import engines_alive
from .moe_engine import MoEEngine, make_moe_engine

# Whether `initialize` or `enable` reads the config of the engine that is being made.
_READ = ContextVar("read", default=False)
UNREAD = (f'mxfp8_moe: WARNING: the DeepSpeed config has the section "{SECTION}", but nothing read it, so the '
          "engine is plain DeepSpeed. Call ds_mxfp8_moe.initialize in place of deepspeed.initialize. Where a library "
          "calls that (Hugging Face Trainer, Accelerate), call ds_mxfp8_moe.enable() before it does")
NO_ENGINE = ("mxfp8_moe: WARNING: ds_mxfp8_moe.enable() was called, but no DeepSpeed engine was created, so nothing "
             "ran in MXFP8. Give Accelerate or the Trainer a DeepSpeed config. Accelerator(cpu=True) makes no engine")


def initialize(args: Any = None, model: torch.nn.Module | None = None,
               optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
               model_parameters: Iterable[Any] | None = None,
               training_data: torch.utils.data.Dataset | None = None, lr_scheduler: Any = None,
               distributed_port: int = 29500, mpu: Any = None, dist_init_required: bool | None = None,
               collate_fn: Callable | None = None, config: str | os.PathLike | dict | None = None,
               mesh_param: Any = None, config_params: str | os.PathLike | dict | None = None,
               **others: Any) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """`deepspeed.initialize`, which also reads the section "mxfp8_moe" of the config.

    If the section is enabled, the model's MoE layers take the MXFP8 path. Otherwise the engine is plain DeepSpeed's. A
    section that is not enabled undoes an earlier `convert`. Without a section, converted layers stay converted.

    Args:
        args: an object whose attribute `deepspeed_config` is the config, unless `config` is given.
        model: the model, before any wrapper.
        optimizer: an optimizer, or a function from parameters to one. None: the config names one.
        model_parameters: parameters, or groups of them, for the config's optimizer. None: the model's.
        training_data: a dataset, for which a loader is made.
        lr_scheduler: a scheduler, or a function from an optimizer to one.
        distributed_port: of rank 0, to start torch.distributed.
        mpu: an object that tells about model parallelism.
        dist_init_required: whether to start torch.distributed. None: if it has not been started.
        collate_fn: makes a batch of the dataset's items.
        config: the DeepSpeed config: a dict, the path of a JSON file, or its urlsafe base64.
        mesh_param: sizes of the data-parallel and sequence-parallel mesh.
        config_params: the same as `config`.
        others: arguments that later releases of DeepSpeed take.

    Returns:
        The engine, its optimizer, the loader of `training_data` or None, and the scheduler or None.

    Raises:
        ConfigError: the section is wrong (before any collective), or differs between ranks. The model has no weights
            yet, or is in another engine. Or AutoEP does not start with this version of transformers.
    """
    given = {**locals(), **others}
    del given["others"]
    section = parse(_given_config(given))
    with _preparing(section, model), patched(DeepSpeedEngine, "__init__", _becoming):
        result = deepspeed.initialize(**given)
    _finish(result[0], section)
    return result


@contextmanager
def _preparing(config: MXFP8MoEConfig, model: torch.nn.Module | None) -> Iterator[None]:
    """While DeepSpeed makes an engine, its config is read, and experts are as the engine can take them."""
    before = _READ.set(True)
    try:
        with ExitStack() as stack:
            if config.enabled:
                _refuse_empty(model)
                if not say_if_missing("FP8 experts"):
                    stack.enter_context(quantized_experts(model))
            elif holds_experts(model):
                raise ConfigError("the model's experts are held quantized alone: "
                                  'write "mxfp8_moe": {"enabled": true}')
            yield
    finally:
        _READ.reset(before)


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
    imported before or after this call. A second call changes nothing. `disable` undoes it.
    """
    if wrap(DeepSpeedEngine, "__init__", _reading_the_section, until=enable):
        atexit.register(_say_no_engine)


def disable() -> None:
    """Undoes `enable`, for engines that are made from now on. Without `enable`, it changes nothing.

    Where the package is installed, a hook reads the section also without `enable`. DS_MXFP8_MOE_AUTO=0 in the
    environment switches it off.
    """
    undo_wraps(enable)
    atexit.unregister(_say_no_engine)


def is_reading() -> bool:
    """Whether the config of the engine that is being made is read, by `initialize` or after `enable`."""
    return _READ.get()


def _say_no_engine() -> None:
    if _is_rank_0() and not hasattr(sys, "last_type") and not engines_alive():  # nor after an error
        log_on_rank_0(NO_ENGINE)


def _say_unread() -> None:
    """Says once if an engine's config has the section, but nothing read it."""
    if _is_rank_0() and any(_asks_for_layers(one) and not isinstance(one, MoEEngine)
                            and not converted_layers(one.module) for one in engines_alive()):
        atexit.unregister(_say_unread)
        log_on_rank_0(UNREAD)


def _is_rank_0() -> bool:
    """Also after the end of torch.distributed."""
    return os.environ.get("RANK", "0") == "0"


def _asks_for_layers(engine: DeepSpeedEngine) -> bool:
    section = engine.config.get(SECTION)
    return isinstance(section, dict) and section.get("enabled") is not False


def _reading_the_section(plain: Callable, engine: DeepSpeedEngine, *args, **kwargs) -> None:
    atexit.unregister(_say_no_engine)
    if _READ.get():  # in `initialize`, which does the rest
        return plain(engine, *args, **kwargs)
    given = inspect.signature(plain).bind(engine, *args, **kwargs).arguments
    config = parse(given.get("config"))
    with _preparing(config, given["model"]):
        _becoming(plain, engine, *args, **kwargs)
    _finish(engine, config)


def _becoming(plain: Callable, engine: DeepSpeedEngine, *args, **kwargs) -> None:
    """Before its start, an engine becomes a MoEEngine, if its config has the section enabled. Without it, a rank still
    compares sections with the other ranks, which would wait for it otherwise."""
    bound = inspect.signature(plain).bind(engine, *args, **kwargs)
    given = bound.arguments.get("config")
    config, experts = parse(given), given.get("expert_parallel") if isinstance(given, dict) else None
    if isinstance(experts, dict) and experts.get("enabled") and missing("stacked experts") is None:
        compare_starts(config.model_dump_json())
    if config.enabled:
        make_moe_engine(engine)
        if (whole := bound.arguments.get("config_class")) is not None:
            bound.arguments["optimizer"] = optimizer_of(whole, bound.arguments.get("optimizer"))
            bound.arguments["mpu"] = for_autoep(bound.arguments.get("mpu"), whole.zero_optimization_stage)
    else:
        print_advice(about_enabled(config))  # here, since plain AutoEP may end in an error
    plain(*bound.args, **bound.kwargs)


def _finish(engine: DeepSpeedEngine, config: MXFP8MoEConfig) -> None:
    atexit.unregister(_say_unread)
    attach(engine, config)


def _given_config(given: dict) -> Any:
    """The config as deepspeed.initialize finds it among its arguments. None: there is none, and it will complain."""
    places = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    return next((config for config in places if config is not None), None)


# The import replaces nothing in DeepSpeed, so engines that start after it are only seen at the exit.
atexit.register(_say_unread)
if dist.is_initialized():
    _say_unread()
