# SPDX-License-Identifier: Apache-2.0
"""What happens with an engine whose config has the section "mxfp8_moe": `attach`. `convert` does it by hand."""

from dataclasses import astuple

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from ..checkpoint.engine_checkpoints import Checkpoints
from ..checkpoint.saving import save_whole_models
from ..compat.private_names import say_if_missing
from ..compat.sequences import balance_whole_sequences
from ..compute.block_fp8 import Rounding
from ..compute.recorded import unknown_launcher
from ..config import KEYS, SECTION, ConfigError, MXFP8MoEConfig, name_of, parse
from ..ffn.frozen_weights import FrozenWeights
from ..layers.experts import converted_layers
from ..layers.frozen_experts import frozen_layers
from ..ops.device import has_kernels
from ..ops.log import log_on_rank_0
from ..ops.op_builder import replay
from ..transport.agreement import compare_starts
from ..transport.deadline import answers_of_all
from .advice import about_expert_parallel, about_keys, about_router_keys
from .convert import ConversionReport, LayerReport, convert_layers
from .flash_adamw import about_masters
from .hooks import engine_of, engines_alive, hook_engine, model_of, remember_engine
from .moe_engine import MoEEngine, make_moe_engine
from .moving import move_home
from .self_check import check, kinds_of, line_about, worst


def attach(engine: DeepSpeedEngine, config: MXFP8MoEConfig) -> ConversionReport:
    """Converts the engine's MoE layers and installs the hooks that the section asks for. Collective over all ranks.

    A second call replaces what the first one did. A section that is not enabled takes it back. Without a section,
    converted layers stay converted.

    Returns:
        The report about the layers of all ranks.

    Raises:
        ConfigError: sections differ between ranks, or a layer was converted differently. Raised on every rank.
        RuntimeError: ranks run different code, raised on every rank. Or another rank could not convert its layers.
    """
    remember_engine(engine)
    if isinstance(engine, MoEEngine):  # DeepSpeed's own path knows no placement
        move_home(engine)
    report = _converted(engine, config)
    if config.enabled or converted_layers(engine.module):
        make_moe_engine(engine)
    if config.enabled:
        report = _checked(engine, config, report)
        log_on_rank_0(report)
        if held := list(frozen_layers(engine.module).values()):
            log_on_rank_0(f"mxfp8_moe: {_about_frozen([layer.experts.frozen for layer in held])}")
        print_advice(about_expert_parallel(engine.config, dist.get_world_size()))
        print_advice(about_router_keys(engine.config, converted_layers(engine.module)))
        print_advice(about_keys(config, converted_layers(engine.module)))
        for line in about_masters(engine.optimizer):
            log_on_rank_0(f"mxfp8_moe: {line}")
        for layer in converted_layers(engine.module):  # collective over the layers' groups
            if layer.ep_size > 1:
                layer.mxfp8_settings.choose_transport(layer.ep_group)
        build_executor(engine.module)
        save_whole_models(engine)
        balance_whole_sequences(engine)
        if not say_if_missing("loading"):
            engine._mxfp8.checkpoints = Checkpoints(engine)
    if isinstance(engine, MoEEngine):
        hook_engine(engine, config, report.converted)
    return report


def convert(model_or_engine: torch.nn.Module, config: MXFP8MoEConfig | dict | str | None = None) -> ConversionReport:
    """Puts the model's MoE layers on the MXFP8 path, in place. Rank 0 prints which, and why others not.

    Classic `deepspeed.moe.layer.MoE` layers may be converted before or after deepspeed.initialize. Stacked experts of
    transformers are spread over the ranks while `initialize` starts their engine, or any engine after `enable`. This
    call gives them other settings. The section needs no "enabled" here. Converting again replaces the earlier one.
    Converting the model of an engine is converting the engine, as `initialize` does with the section in its config.
    This is collective over all ranks.

    With `capacity_factor` the host does not wait for exchanges. An engine then raises their errors before the
    optimizer's step. Without an engine, a later exchange raises them.

    Args:
        model_or_engine: a module, or a DeepSpeed engine.
        config: the section "mxfp8_moe" (parsed or as a dict), or a whole DeepSpeed config that has it, as
            deepspeed.initialize takes it. None: the default recipe. `"enabled": false` puts every layer back on
            DeepSpeed's path.

    Raises:
        ConfigError: the section is wrong, or a whole config has none. Of an engine: ranks differ.
    """
    section = _section(config)
    if "enabled" not in section.model_fields_set:
        section = section.model_copy(update={"enabled": True})
    engine = engine_of(model_or_engine) or next(
        (one for one in engines_alive() if one.module is model_or_engine), None)
    if engine is not None:
        report = attach(engine, section)
        if not section.enabled:
            log_on_rank_0(report)
        return report
    report = convert_layers(model_of(model_or_engine), section)
    log_on_rank_0(report)
    for key, about in KEYS.items():
        if about["engine"] and report.converted and getattr(section, key) not in (None, False, "fixed"):
            log_on_rank_0(f'mxfp8_moe: "{key}" has no effect without an engine, which makes the steps')
    return report


def _section(config) -> MXFP8MoEConfig:
    if config is None or isinstance(config, MXFP8MoEConfig):
        return parse(config)
    if isinstance(config, dict):
        return parse(config if SECTION in config else {SECTION: config})
    section = parse(config)
    if not section.model_fields_set:
        raise ConfigError(f'{name_of(config)} has no section "mxfp8_moe", or an empty one: write {{"enabled": true}} '
                          "there, or pass no config to convert in the default recipe")
    return section


def print_advice(lines: list[str]) -> None:
    for line in lines:
        log_on_rank_0(f"mxfp8_moe: WARNING: {line}")


def _about_frozen(held: list[FrozenWeights]) -> str:
    rounding = Rounding()
    for weights in held:
        rounding.include(weights.rounding)
    before, now = map(sum, zip(*(weights.bytes_held() for weights in held), strict=True))
    formats = " or ".join(sorted({weights.format for weights in held}))
    rounded = (f", rounded to an SQNR of {rounding.sqnr_db:.1f} dB (first expert of each layer)"
               if rounding.changed else "")
    return (f"frozen experts of {len(held)} layers are held in {formats} alone, in {now / 2**30:.2f} GiB on this rank "
            f"instead of {before / 2**30:.2f} GiB{rounded}. Checkpoints leave them out")


def _converted(engine: DeepSpeedEngine, config: MXFP8MoEConfig, broken: str = "") -> ConversionReport:
    """Converts an engine's layers, or takes that back. Collective: an error on any rank is one on every rank."""
    report, failure = ConversionReport(()), None
    try:
        if config.enabled:
            report = convert_layers(engine.module, config, broken)
        elif config.model_fields_set:
            report = convert_layers(engine.module, MXFP8MoEConfig(enabled=False))
    except Exception as error:  # of any kind: the other ranks wait for this one's answer
        failure = error
    return _agree_across_ranks(config, report, failure)


def _checked(engine: DeepSpeedEngine, config: MXFP8MoEConfig, report: ConversionReport) -> ConversionReport:
    """The report after the check of the kernels at their first use. If a kernel is broken on any rank, all ranks
    convert their layers again, without it."""
    device = torch.device(get_accelerator().current_device_name())
    if not config.self_check or not has_kernels(device):
        return report
    verdict = worst(check(kind, device) for kind in kinds_of(converted_layers(engine.module)))
    if dist.is_initialized() and dist.get_world_size() > 1:
        verdict = worst(answers_of_all(dist.get_world_group(), verdict, "the check of the kernels"))
    if verdict.runs == "all":
        return report
    log_on_rank_0(line_about(verdict, device))
    if verdict.runs == "bf16":
        return _converted(engine, config.model_copy(update={"recipe": "bf16"}))
    return _converted(engine, config, broken="a kernel is broken here")


def _agree_across_ranks(config: MXFP8MoEConfig, report: ConversionReport,
                        failure: Exception | None) -> ConversionReport:
    """The report about the layers of all ranks. The stages of a pipeline hold different ones. One all-gather.

    Raises:
        RuntimeError: ranks run different code. Raised on every rank.
        ConfigError: sections differ between ranks, or a layer was converted differently. Raised on every rank.
        Exception: `failure`, of this rank. Or a RuntimeError about that of another.
    """
    answers = compare_starts(config.model_dump_json(), [astuple(layer) for layer in report.layers],
                             failure and f"{type(failure).__name__}: {failure}")
    layers_of_ranks, failures = zip(*answers, strict=True)
    if failure:
        raise failure
    if failed := next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text), None):
        raise RuntimeError(f"the layers could not be converted on {failed}")
    held = [{layer.name: layer for layer in (LayerReport(*one) for one in layers)} for layers in layers_of_ranks]
    first = []
    for name in dict.fromkeys(name for layers in held for name in layers):
        by_rank = {rank: layers[name] for rank, layers in enumerate(held) if name in layers}
        first.append(next(iter(by_rank.values())))
        # Reasons for layers that are not converted may differ, as they may name one rank's experts.
        if len({layer.detail if layer.converted else "not converted" for layer in by_rank.values()}) > 1:
            details = "; ".join(f"rank {rank}: {'' if layer.converted else 'not converted: '}{layer.detail}"
                                for rank, layer in by_rank.items())
            raise ConfigError(f"{name} is treated differently on different ranks, which would hang: {details}. Look "
                              "for sizes, hooks, adapters or devices that only some ranks have, or leave the layer "
                              "out with 'exclude'. If the GPUs differ, set \"min_tokens_per_expert\"")
    return ConversionReport.of(first, config)


def build_executor(model: torch.nn.Module) -> None:
    """Builds the executor of recorded launches now, and not in the first forward of a layer that uses it."""
    tensors = (tensor for layer in converted_layers(model) for tensor in (*layer.parameters(), *layer.buffers()))
    device = next((tensor.device for tensor in tensors), None)
    if device is not None and has_kernels(device):
        reason = unknown_launcher() or replay.try_load()[1]
        if reason:
            log_on_rank_0("mxfp8_moe: WARNING: the host launches each kernel of a layer from Python, which is "
                            f"slower: {reason}")
