# SPDX-License-Identifier: Apache-2.0
"""Which MoE layers take the MXFP8 path, and why the others do not.

Conversion swaps classes in place: every Parameter object, buffer, hook and name stays. A layer that cannot be shown to
be safe stays on DeepSpeed's own path, exactly as DeepSpeed made it, and the report gives the reason.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe import layer as deepspeed_layer
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

from ..compat.private_names import missing
from ..compute.formula import Activation, ExpertFormula, ExpertWeights, NotRecognized
from ..config import ConfigError, MXFP8MoEConfig
from ..ffn.frozen_weights import FrozenWeights
from ..layers.adapters import outermost_wrapper, wrappers_of
from ..layers.classic import MXFP8MOELayer
from ..layers.experts import ExpertBlock, MXFP8Experts, expert_blocks
from ..layers.frozen_experts import frozen_layers, frozen_of
from ..layers.settings import LayerSettings
from ..recognition.activation_proof import activation_of
from ..recognition.recognize import ExpertsAtConversion, foreign_code, recognize
from ..recognition.stacked import shape_of

LEFT_OUT, SWITCHED_OFF = "left out by 'include' and 'exclude'", "'enabled' is false"  # reasons in a LayerReport


@dataclass(frozen=True)
class LayerReport:
    """Whether one MoE layer was converted, and how or why not."""

    name: str
    kind: str
    converted: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.name} {self.without_name}"

    @property
    def without_name(self) -> str:
        return f"({self.kind}) {'converted' if self.converted else 'not converted'}: {self.detail}"


@dataclass(frozen=True)
class ConversionReport:
    """One entry for each MoE layer of the model, in the order of named_modules(). As text, layers with the same reason
    share a line.

    Attributes:
        idle_patterns: patterns in `include` and `exclude` that match no layer.
    """

    layers: tuple[LayerReport, ...]
    idle_patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, layers: Iterable[LayerReport], config: MXFP8MoEConfig) -> "ConversionReport":
        """The report about all MoE layers of a model."""
        layers = tuple(layers)
        return cls(layers, tuple(config.idle_patterns(layer.name for layer in layers)))

    @property
    def converted(self) -> int:
        """How many layers were converted."""
        return sum(layer.converted for layer in self.layers)

    def __str__(self) -> str:
        if not self.layers:
            return ("mxfp8_moe: WARNING: no MoE layers found, so nothing runs in MXFP8. They are either "
                    "deepspeed.moe.layer.MoE, or stacked experts of transformers that DeepSpeed's section "
                    '"expert_parallel": {"enabled": true, "autoep_size": ...} spreads over the ranks')
        of_layers = {layer.name: layer.without_name for layer in self.layers}
        lines = [f"mxfp8_moe: {names} {text}" for names, text in alike(of_layers)]
        lines += [f"mxfp8_moe: WARNING: {pattern!r} in 'include' or 'exclude' matches no MoE layer's whole name"
                  for pattern in self.idle_patterns]
        reasons = {layer.detail for layer in self.layers}
        warning = "" if self.converted or reasons == {SWITCHED_OFF} else "WARNING: "
        cause = "; 'include' and 'exclude' leave no layer" if reasons == {LEFT_OUT} else ""
        counts = f"{self.converted} of {len(self.layers)} MoE layers converted"
        return "\n".join([*lines, f"mxfp8_moe: {warning}{counts}{cause}"])


def alike(sentences: dict[str, str]) -> list[tuple[str, str]]:
    """Layers that share a sentence, in one entry: their names, folded, and the sentence.

    Sentences that differ in a number inside a module's name are one, with the first layer's number.

    Args:
        sentences: name of a layer -> what there is to say about it.
    """
    shared: dict[str, list[str]] = {}
    for name, sentence in sentences.items():
        shared.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "", sentence), []).append(name)
    return [(folded(names), sentences[names[0]]) for names in shared.values()]


def folded(names: Iterable[str]) -> str:
    """Names of layers, in which those that differ in their first number are one: "model.layers.0-47.mlp"."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        parts = re.fullmatch(r"((?:[^.\d][^.]*\.)*)(\d+)(|\..*)", name)
        before, number, after = parts.groups() if parts else (name, None, "")
        numbers.setdefault((before, after), []).extend([] if number is None else [int(number)])
    return ", ".join(f"{before}{_ranges(found)}{after}" for (before, after), found in numbers.items())


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as "0-3,5"."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def convert_layers(model: torch.nn.Module, config: MXFP8MoEConfig, broken: str = "") -> ConversionReport:
    """Puts the model's MoE layers on the MXFP8 path, in place. `broken`: why no layer may be converted.

    Raises:
        ConfigError: a layer holds its experts quantized alone, and this section would compute them without MXFP8.
    """
    _refuse_to_leave_mxfp8(model, config, broken)
    shared, device = shared_parameters(model), torch.device(get_accelerator().device_name())
    layers = []
    for name, module in list(model.named_modules()):
        if isinstance(module, ExpertBlock):
            layers.append(_convert_experts(name, module, config, device, broken))
            continue
        if not isinstance(module, (deepspeed_layer.MoE, AutoEPMoELayer)):
            continue
        _restore_layer(module)
        kind, label = "classic" if isinstance(module, deepspeed_layer.MoE) else "AutoEP", name or "(the model itself)"
        if not config.enabled or not config.selects(name):
            layers.append(LayerReport(label, kind, False, LEFT_OUT if config.enabled else SWITCHED_OFF))
            continue
        try:
            if kind == "AutoEP":
                raise NotRecognized(_AUTOEP)
            if gone := broken or missing("classic layers"):
                raise NotRecognized(gone)
            formula = _classic_formula(module, shared)
        except NotRecognized as reason:
            layers.append(LayerReport(label, kind, False, f"{reason}; it runs DeepSpeed's own path"))
            continue
        inner = module.deepspeed_moe
        settings = LayerSettings(name=label, formula=formula, config=config,
                                 num_local_experts=inner.num_local_experts, device=device)
        inner.__class__, inner.mxfp8_settings = MXFP8MOELayer, settings
        inner.mxfp8_experts = ExpertsAtConversion(inner.experts)
        inner.mxfp8_weights = ExpertWeights(inner.experts.deepspeed_experts, formula)
        detail = f"{_placement(inner)}, {_describe(settings, str(formula))}{_trained(inner)}"
        layers.append(LayerReport(label, kind, True, detail))
    if config.merge_aware and layers and not any(block.experts.merges for _, block in expert_blocks(model)):
        raise ConfigError('"merge_aware" has nothing to merge: no layer has adapters by PEFT of frozen experts that '
                          "are held in MXFP8 or MXFP4. Name the experts in target_parameters, or leave the key out")
    return ConversionReport.of(layers, config)


def _convert_experts(name: str, block: ExpertBlock, config: MXFP8MoEConfig, device: torch.device,
                     broken: str) -> LayerReport:
    """Gives the experts of one block their settings. Those that may not run MXFP8 run in the model's dtype."""
    experts = block.experts
    for ours in [key for key in vars(experts) if key.startswith("mxfp8_") and key != "mxfp8_placement"]:
        delattr(experts, ours)
    formula, frozen = stacked_formula(experts), frozen_of(experts)
    reason = broken
    if not config.enabled or not config.selects(name):
        reason = LEFT_OUT if config.enabled else SWITCHED_OFF
    elif formula.hidden_size % 32 or formula.ffn_size % 32:
        reason = f"hidden size {formula.hidden_size} and FFN size {formula.ffn_size} are not both multiples of 32"
    if reason and frozen:
        raise ConfigError(f"{name} {_held_alone(frozen)}: {reason}")
    if reason:
        config = config.model_copy(update={"enabled": False, "recipe": "bf16", "load_balance_coeff": None,
                                           "force_load_balance": False})
    if frozen:  # experts that are held quantized alone compute in MXFP8, however few tokens there are
        config = config.model_copy(update={"min_tokens_per_expert": 0})
    experts.mxfp8_settings = settings = LayerSettings(
        name=name, formula=formula, config=config, num_local_experts=experts.num_local_experts, device=device,
        open_formula=experts.open_formula() if formula.activation is None else None)
    if reason:
        return LayerReport(name, "AutoEP", False, f"{reason}; its experts run in the model's dtype")
    merged = ", merged with their adapters in every forward" if experts.merges else ""
    held = f", frozen experts in {frozen.format}{merged}" if frozen else ""
    own = "" if formula.activation else ", the model's own function between the GEMMs, since no kernel computes it"
    detail = f"{_placement(experts)}, {_describe(settings, formula.function)}{own}{held}{_trained(experts)}"
    return LayerReport(name, "AutoEP", True, detail)


def stacked_formula(experts: MXFP8Experts) -> ExpertFormula:
    """The formula of a block's experts. Its activation is None where none of our kernels computes their function."""
    normed = getattr(experts, "has_post_expert_norm", False)
    activation = None if normed else activation_of(experts)
    frozen, up = frozen_of(experts), experts.layout.up
    if frozen is not None:
        _, hidden_size, ffn_size = frozen.sizes
    else:
        _, hidden_size, ffn_size = shape_of(experts.w2)
    biases: dict[str, Any] = {"gate_bias": f"{up}_bias", "up_bias": f"{up}_bias", "down_bias": "down_proj_bias"}
    formula = ExpertFormula("gated" if experts.has_gate else "mlp", None, hidden_size, ffn_size, gate="w1", up="w3",
                            down="w2", **(biases if experts.has_bias else {}))
    return formula.with_act(activation or Activation(None))


_AUTOEP = ("AutoEP made it: ds_mxfp8_moe did not start the engine, or the model is split by AutoTP, or its experts "
           "are not stacked as in transformers")


def _held_alone(frozen: FrozenWeights) -> str:
    return (f"holds its frozen experts in {frozen.format} alone, which nothing but an MXFP8 recipe computes. Make the "
            'engine with "frozen_experts": "keep" in the section to compute them otherwise')


def _refuse_to_leave_mxfp8(model: torch.nn.Module, config: MXFP8MoEConfig, broken: str) -> None:
    for name, layer in frozen_layers(model).items():
        if broken or not config.enabled or not config.selects(name) or config.recipe == "bf16":
            raise ConfigError(f"{name} {_held_alone(layer.experts.frozen)}{f' ({broken})' if broken else ''}")


def _placement(layer: torch.nn.Module) -> str:
    if layer.ep_size == 1:
        return f"{layer.num_local_experts} experts on every rank"
    num_experts = layer.num_local_experts * layer.ep_size
    return f"{num_experts} experts, {layer.num_local_experts} on each of {layer.ep_size} ranks"


def _trained(layer: torch.nn.Module) -> str:
    """What of the experts is trained, if it is not their weights alone."""
    if parts := [one.parameter_name for one in reversed(wrappers_of(outermost_wrapper(layer)))]:
        return f", with PEFT's adapters of {', '.join([*parts[:-2], ' and '.join(parts[-2:])])}"
    return "" if any(p.requires_grad for p in layer.experts.parameters()) else ", experts frozen, no adapters"


def _describe(settings: LayerSettings, formula: str) -> str:
    recipe = settings.recipe
    if not recipe.quantize_gemm:
        return f"recipe bf16 (no quantization), {formula}"
    threshold = f", {settings.threshold}" if settings.threshold else ""
    return f"recipe {settings.config.recipe}{threshold}, blocks of {recipe.block_size}, {formula}"


def _restore_layer(module: torch.nn.Module) -> None:
    """Undoes an earlier conversion."""
    inner = getattr(module, "deepspeed_moe", None)
    if type(inner) is MXFP8MOELayer:
        inner.__class__ = MOELayer
        for ours in [name for name in vars(inner) if name.startswith("mxfp8_")]:
            delattr(inner, ours)


def shared_parameters(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Parameters that the model holds in more than one place, with the name of the first place."""
    places: dict = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append(f"{name}.{key}")
    return {parameter: names[0] for parameter, names in places.items() if len(names) > 1}


def _refuse_foreign_code(*modules: torch.nn.Module) -> None:
    """Raises NotRecognized for modules with hooks or a replaced forward that a converted layer would skip."""
    for module in modules:
        # DeepSpeed's own hooks are not foreign.
        if foreign := foreign_code(module):
            raise NotRecognized(f"its {type(module).__name__} has {foreign}, which this path would ignore")


def _refuse_subclass(module: torch.nn.Module, kind: type) -> None:
    if type(module) is not kind:
        raise NotRecognized(f"its {kind.__name__} is a {type(module).__name__}, whose behavior is unknown")


def _classic_formula(layer: deepspeed_layer.MoE, shared: dict) -> ExpertFormula:
    inner = layer.deepspeed_moe
    _refuse_subclass(layer, deepspeed_layer.MoE)
    _refuse_subclass(inner, MOELayer)
    _refuse_subclass(inner.gate, TopKGate)
    _refuse_subclass(inner.experts, Experts)
    # One layer with tensor-parallel experts makes DeepSpeed group and exchange that way in all layers.
    if groups._get_expert_model_parallel_world_size() > 1 and bwc_tensor_model_parallel_world_size(groups.mpu) > 1:
        raise NotRecognized("its experts are tensor-parallel")
    _refuse_foreign_code(inner.experts, inner.experts.deepspeed_experts)
    if "forward" in vars(layer) or "forward" in vars(inner):
        raise NotRecognized("the layer's forward method is replaced on the instance")
    return recognize(inner.experts.deepspeed_experts, shape_of(next(inner.gate.parameters()))[1], shared)


