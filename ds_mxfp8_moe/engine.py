# SPDX-License-Identifier: Apache-2.0
"""The JSON flag: `initialize` for deepspeed.initialize, and `enable` for libraries that call that themselves."""

import functools
import inspect
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import parse_autoep_config
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

from .config import ConfigError, MXFP8MoEConfig, fingerprint, parse
from .convert import ConversionReport, check_before_steps, choose_transports, convert_silently, reported, restore, say
from .transport.deadline import answers_of_all, tell_peers_on_error


def initialize(*args, **kwargs) -> tuple:
    """`deepspeed.initialize`, with its arguments and results; reads the section "mxfp8_moe" of the config.

    Where the section is enabled, the model's MoE layers take the MXFP8 path; else the engine is plain DeepSpeed's. A
    section that is not enabled takes an earlier `convert` back; without the section, what `convert` did stays.

    Raises:
        ConfigError: the section is wrong (before any collective), or differs between ranks; or the optimizer given
            would train parameters that this version of AutoEP replaces.
    """
    given = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    config = _read(_given_config(given), given)
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
        raw = given["config"] if given.get("config") is not None else given["config_class"]._param_dict
        config = _read(raw, given)
        plain_init(self, *args, **kwargs)
        _convert_engine(self, config)

    init.mxfp8_moe = True
    return init


def _given_config(given: dict) -> Any:
    """The config as deepspeed.initialize finds it among its arguments; None where it will complain itself."""
    for config in (given.get("config"), given.get("config_params")):
        if config is not None:
            return config
    for name in ("deepspeed_config", "deepscale_config"):
        config = getattr(given.get("args"), name, None)
        if config is not None:
            return config
    return None


def _read(raw: Any, given: dict) -> MXFP8MoEConfig:
    config = parse(raw)
    if config.enabled:
        _refuse_stale_parameters(raw if isinstance(raw, dict) else load_ds_config(raw), given)
    return config


def _refuse_stale_parameters(raw: dict, given: dict) -> None:
    """AutoEP of 0.19.6 replaces parameters that an optimizer may hold already; it would train the old ones, silently.

    0.19.8 puts the new ones in their place.
    """
    if hasattr(deepspeed_engine, "_remap_client_optimizer_after_module_replacement"):
        return
    section, model = parse_autoep_config(raw.get("expert_parallel")), given.get("model")
    held = _held_parameters(given.get("optimizer"), given.get("model_parameters"))
    if not section.enabled or not held:
        return
    for spec in AutoEP(model, section).ep_parser():
        source = model.get_submodule(spec.moe_module_name)
        replaced = [source.get_submodule(spec.router_name), source.get_submodule(spec.experts_name)]
        if any(id(p) in held for module in replaced for p in module.parameters()):
            raise ConfigError(
                f"the optimizer or the list of model_parameters holds parameters of {spec.moe_module_name}, which "
                f"AutoEP of DeepSpeed {deepspeed.__version__} replaces: the new ones would not be trained. Put the "
                "optimizer into the DeepSpeed config and give no list, or pass a callable that makes the optimizer, "
                "or use DeepSpeed 0.19.8")


def _held_parameters(optimizer, model_parameters) -> set:
    """ids of the parameters that were collected before AutoEP ran. A generator is read after it, and holds none."""
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizer.param_groups
    elif isinstance(model_parameters, (list, tuple)):
        groups = [p if isinstance(p, dict) else {"params": [p]} for p in model_parameters]
    else:
        return set()
    return {id(p) for group in groups if isinstance(group["params"], (list, tuple)) for p in group["params"]}


def _convert_engine(engine: DeepSpeedEngine, config: MXFP8MoEConfig) -> None:
    if getattr(engine, "_mxfp8_moe_config", None) == config:  # `initialize` after `enable`: done already
        return
    engine._mxfp8_moe_config = config
    if config.model_fields_set and not config.enabled:  # without the section, what `convert` did stays
        restore(engine)
    report = ConversionReport(())
    if config.enabled:
        report = tell_peers_on_error(convert_silently)(engine, config)
    report = _agree(config, report)
    if config.enabled:
        say(report)
        choose_transports(engine.module)
        check_before_steps(engine)
    elif config.model_fields_set and "enabled" not in config.model_fields_set:
        say('mxfp8_moe: WARNING: the section lacks "enabled": true: all layers stay DeepSpeed\'s')


def _agree(config: MXFP8MoEConfig, report: ConversionReport) -> ConversionReport:
    """The layers of all ranks: those of a pipeline hold different ones. Finds sections, and layers' fates, that differ
    between ranks with one all-gather; every rank raises alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return report
    answers = answers_of_all(dist.get_world_group(), (fingerprint(config), report.layers), "the engine's start")
    sections = [section for section, _ in answers]
    if len(set(sections)) > 1:
        different = [rank for rank, section in enumerate(sections) if section != sections[0]]
        raise ConfigError(f'the section "mxfp8_moe" on ranks {different} differs from rank 0\'s: give every rank the '
                          "same config")
    held = [{layer.name: layer for layer in layers} for _, layers in answers]
    first = []
    for name in dict.fromkeys(name for layers in held for name in layers):
        by_rank = {rank: layers[name] for rank, layers in enumerate(held) if name in layers}
        first.append(next(iter(by_rank.values())))
        # The kind of a layer's path and its recipe, not the whole line: a reason may speak of one rank's experts.
        told = {rank: layer.detail if layer.converted else "not converted" for rank, layer in by_rank.items()}
        if len(set(told.values())) > 1:
            raise ConfigError(f"{name} is treated differently on different ranks, which would hang: "
                              + "; ".join(f"rank {rank}: {fate}" for rank, fate in told.items())
                              + ". Look for what was done to it on some ranks alone (hooks, adapters, devices), or "
                              "leave it out with 'exclude'; where GPUs differ, give \"min_tokens_per_expert\"")
    return reported(first, config)
