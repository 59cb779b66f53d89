# SPDX-License-Identifier: Apache-2.0
"""The JSON flag: `initialize` for deepspeed.initialize, and `enable` for libraries that call that themselves.

Importing this module makes engines say so if their config has the section and neither of the two read it.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from .advice import about_enabled, about_expert_parallel, about_keys, explaining_transformers
from .autoep_presets import added_preset, announcement
from .autoep_transformers import named_recorders
from .config import SECTION, ConfigError, MXFP8MoEConfig, parse
from .convert import ConversionReport, convert_layers, print_report
from .engine_hooks import converted_layers, hook_engine, print_on_rank_0, remember_engine, say_if_missing
from .executor import unknown_launcher
from .expert_groups import any_groups_allowed
from .loading import leave_frozen_experts_out, load_frozen_as_saved, name_broken_files
from .lora import adapted_experts
from .ops.device import has_kernels
from .ops.op_builder import replay
from .saving import save_whole_models
from .self_check import check, kinds_of, line_about, worst
from .transport.deadline import answers_of_all, tell_peers_on_error

# Whether `initialize` or `enable` reads the config of the engine that is being made.
_READ = ContextVar("read", default=False)
UNREAD = (f'mxfp8_moe: WARNING: the DeepSpeed config has the section "{SECTION}", but nothing read it, so this is '
          "plain DeepSpeed. Call ds_mxfp8_moe.initialize in place of deepspeed.initialize. Where a library calls that "
          "(Hugging Face Trainer, Accelerate), call ds_mxfp8_moe.enable() before it does")


def initialize(*args, **kwargs) -> tuple:
    """`deepspeed.initialize`, with its arguments and results; reads the section "mxfp8_moe" of the config.

    If the section is enabled, the model's MoE layers take the MXFP8 path. Otherwise the engine is plain DeepSpeed's. A
    section that is not enabled undoes an earlier `convert`. Without a section, converted layers stay converted.

    Raises:
        ConfigError: the section is wrong (before any collective), or differs between ranks. Or AutoEP does not start
            with this version of transformers.
    """
    given = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    config = parse(_given_config(given))
    with _preparing(config, given.get("model")):
        result = deepspeed.initialize(*args, **kwargs)
    _convert_engine(result[0], config)
    return result


@contextmanager
def _preparing(config: MXFP8MoEConfig, model: torch.nn.Module | None) -> Iterator[None]:
    """What an engine is made in, so that AutoEP converts more models, and ZeRO takes more optimizers."""
    before = _READ.set(True)
    try:
        with explaining_transformers(config):
            if not config.enabled:
                yield
                return
            contexts = {"recorders": named_recorders(), "added presets": added_preset(model),
                        "LoRA on experts": adapted_experts(model), "own optimizer": any_groups_allowed()}
            with ExitStack() as stack:
                for feature, context in contexts.items():
                    if not say_if_missing(feature):
                        stack.enter_context(context)
                yield
    finally:
        _READ.reset(before)


initialize.__signature__ = inspect.signature(deepspeed.initialize)


def enable() -> None:
    """Makes every DeepSpeed engine of this process read the section "mxfp8_moe", whoever creates it.

    For libraries that call deepspeed.initialize themselves, as Hugging Face Trainer and Accelerate do. They may be
    imported before or after this call. A second call changes nothing.
    """
    if not hasattr(DeepSpeedEngine.__init__, "mxfp8_moe"):
        DeepSpeedEngine.__init__ = _reading_the_section(DeepSpeedEngine.__init__)


def _reading_the_section(plain_init):

    @functools.wraps(plain_init)
    def init(self, *args, **kwargs):
        given = inspect.signature(plain_init).bind(self, *args, **kwargs).arguments
        config = parse(_config_of(given))
        with _preparing(config, given["model"]):
            plain_init(self, *args, **kwargs)
        _convert_engine(self, config)

    init.mxfp8_moe = True
    return init


def _reminding(plain_init):
    """The engine's plain start. Then `convert` finds the engine of its model. If nobody has read the section, the
    first forward warns, or the start's own error comes with the warning."""

    @functools.wraps(plain_init)
    def init(self, *args, **kwargs):
        try:
            plain_init(self, *args, **kwargs)
        except Exception:
            given = inspect.signature(plain_init).bind(self, *args, **kwargs).arguments
            if not _READ.get() and switched_on(_config_of(given)):
                print_on_rank_0(UNREAD)
            raise
        remember_engine(self)
        if switched_on(self._config._param_dict):
            self._mxfp8_moe_reminder = self.module.register_forward_pre_hook(lambda module, inputs: remind(self))

    def switched_on(config: Any) -> bool:
        section = config.get(SECTION) if isinstance(config, dict) else None
        return isinstance(section, dict) and section.get("enabled", True) is not False

    def remind(engine: DeepSpeedEngine) -> None:
        _stop_reminder(engine)
        if not converted_layers(engine.module):  # by `convert`
            print_on_rank_0(UNREAD)

    init.mxfp8_moe_reminder = True
    return init


def _stop_reminder(engine: DeepSpeedEngine) -> None:
    if hook := vars(engine).pop("_mxfp8_moe_reminder", None):
        hook.remove()


def _config_of(given: dict) -> Any:
    """The config among the arguments of an engine."""
    return given["config_class"]._param_dict if given.get("config_class") is not None else given.get("config")


def _given_config(given: dict) -> Any:
    """The config as deepspeed.initialize finds it among its arguments. None: there is none, and it will complain."""
    places = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    return next((config for config in places if config is not None), None)


def _convert_engine(engine: DeepSpeedEngine, config: MXFP8MoEConfig) -> None:
    _stop_reminder(engine)
    if getattr(engine, "_mxfp8_moe_config", None) == config:  # `initialize` after `enable`
        return
    engine._mxfp8_moe_config = config
    if config.model_fields_set and not config.enabled:  # without a section, converted layers stay so
        convert_layers(engine, MXFP8MoEConfig(enabled=False))
    report = ConversionReport(())
    if config.enabled:
        report = _checked(engine, config, tell_peers_on_error(convert_layers)(engine, config))
    report = _agree_across_ranks(config, report)
    if config.enabled:
        if added := announcement(engine.module):
            print_on_rank_0(added)
        print_report(report, engine)
        advice = about_expert_parallel(engine._config._param_dict, dist.get_world_size())
        for line in advice + about_keys(config, converted_layers(engine.module)):
            print_on_rank_0(f"mxfp8_moe: WARNING: {line}")
        choose_transports(engine.module)
        build_executor(engine.module)
        save_whole_models(engine)
        if not say_if_missing("loading"):
            name_broken_files(engine)
            load_frozen_as_saved(engine)
            leave_frozen_experts_out(engine)
    else:
        for line in about_enabled(config):
            print_on_rank_0(f"mxfp8_moe: WARNING: {line}")
    hook_engine(engine, config, report.converted)


def _checked(engine: DeepSpeedEngine, config: MXFP8MoEConfig, report: ConversionReport) -> ConversionReport:
    """The report after the check of the kernels at their first use, by which ranks convert their layers again if one
    of them found a broken kernel."""
    device = torch.device(get_accelerator().current_device_name())
    if not config.self_check or not has_kernels(device):
        return report
    verdict = worst(check(kind, device) for kind in kinds_of(converted_layers(engine.module)))
    if dist.is_initialized() and dist.get_world_size() > 1:
        verdict = worst(answers_of_all(dist.get_world_group(), verdict, "the check of the kernels"))
    if verdict.runs == "all":
        return report
    print_on_rank_0(line_about(verdict, device))
    if verdict.runs == "bf16":
        return convert_layers(engine, config.model_copy(update={"recipe": "bf16"}))
    return convert_layers(engine, config, broken="a kernel is broken here")


def _agree_across_ranks(config: MXFP8MoEConfig, report: ConversionReport) -> ConversionReport:
    """The report about the layers of all ranks. The stages of a pipeline hold different ones. One all-gather.

    Raises:
        ConfigError: sections differ between ranks, or a layer was converted differently. Raised on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return report
    mine = config.model_dump_json(), report.layers
    answers = answers_of_all(dist.get_world_group(), mine, "the engine's start (all ranks enable ds_mxfp8_moe)")
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
        # Reasons for layers that are not converted may differ, as they may name one rank's experts.
        if len({layer.detail if layer.converted else "not converted" for layer in by_rank.values()}) > 1:
            told = "; ".join(f"rank {rank}: {'' if layer.converted else 'not converted: '}{layer.detail}"
                             for rank, layer in by_rank.items())
            raise ConfigError(f"{name} is treated differently on different ranks, which would hang: {told}. Look for "
                              "sizes, hooks, adapters or devices that only some ranks have, or leave the layer out "
                              "with 'exclude'. If the GPUs differ, set \"min_tokens_per_expert\"")
    return ConversionReport.of(first, config)


def choose_transports(model: torch.nn.Module) -> None:
    """Chooses the transport of every converted layer now. Collective over the layers' groups.

    Layers whose group does not exist yet choose in their first forward.

    Raises:
        RuntimeError: the config asks for nvlink, which is not possible here.
        ValueError: ranks of a group ask for different transports.
    """
    for module in converted_layers(model):
        if module.ep_size > 1:
            module.mxfp8_settings.choose_transport(module.ep_group)


def build_executor(model: torch.nn.Module) -> None:
    """Builds the executor of recorded launches now, and not in the first forward of a layer that uses it."""
    device = next((next(layer.parameters()).device for layer in converted_layers(model)), None)
    if device is not None and has_kernels(device):
        reason = unknown_launcher() or replay.try_load()[1]
        if reason:
            print_on_rank_0("mxfp8_moe: WARNING: the host launches each kernel of a layer from Python, which is "
                            f"slower: {reason}")


if not hasattr(DeepSpeedEngine.__init__, "mxfp8_moe_reminder"):
    DeepSpeedEngine.__init__ = _reminding(DeepSpeedEngine.__init__)
