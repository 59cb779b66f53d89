# SPDX-License-Identifier: Apache-2.0
"""Presets of DeepSpeed's AutoEP for Hugging Face model types that it does not know.

DeepSpeed finds the MoE blocks of a model by a preset for its model type. For other types it raises "AutoEP detection
is ambiguous", or finds no layers. While an engine with an enabled section "mxfp8_moe" is made, this file lends AutoEP
the preset for the model's type, and mends what its layers would lose: routers with a bias under another name, or with
another rule.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_ep_presets import registry
from deepspeed.module_inject.auto_ep_presets.base import (
    ForwardContract,
    MoELayerSpec,
    MoEModelPreset,
    TransformersTopLevelRouterLogitsAdapter,
)
from torch import nn

from ..config import ConfigError
from .biased_experts import add_biases
from .patches import lent_entry, patched
from .sparse_mixer import SparseMixerRouter

CORRECTION_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class AddedPreset:
    """How AutoEP treats one model type.

    Attributes:
        like: the preset of DeepSpeed that it resembles.
        classes: how transformers' class names of this type begin. Router logits are recorded in these classes.
        changes: fields of MoEModelPreset that differ from `like`.
        gate: the linear layer's name below the router. "": the router holds the weight itself.
        correction_bias: the name, in the block, of the bias that acts on the choice of experts alone, if this is not
            CORRECTION_BIAS.
        route_scale: the name, in the router, of the factor of its weights, where AutoEP does not read it.
        sparse_mixer: whether the router is phimoe's.
        cohere: whether the router is cohere2_moe's, whose scores and weights follow keys of its own.
        gpt_oss: whether the experts are gpt-oss': with biases, and the columns of gate and up in turn. Its blocks
            return a pair.
    """

    like: str
    classes: str
    changes: dict[str, Any] = field(default_factory=dict)
    gate: str = ""
    correction_bias: str | None = None
    route_scale: str | None = None
    sparse_mixer: bool = False
    cohere: bool = False
    gpt_oss: bool = False

    def preset(self, config: Any) -> MoEModelPreset:
        """`config`: the model's."""
        changes = {**self.changes, **({"score_func": config.expert_selection_fn} if self.cohere else {})}
        return replace(registry.get_preset(self.like), hf_model_types=(config.model_type, ),
                       preset_adapter=config.model_type, unsupported_hf_model_type_notes={},
                       min_transformers_version=None, **changes)

    def adapter(self, model_type: str) -> TransformersTopLevelRouterLogitsAdapter:
        kind = _ReturnsPair if self.gpt_oss else _CohereRouter if self.cohere else (
            TransformersTopLevelRouterLogitsAdapter)
        return kind(display_name=model_type, hf_model_types=(model_type, ), class_name_fragments=(self.classes, ))

    def prepare(self, block: nn.Module, router_name: str) -> None:
        """Puts the router's tensors of a block, which AutoEP is about to replace, where AutoEP looks for them."""
        router = getattr(block, router_name)
        if self.gate:
            router.weight = router.get_submodule(self.gate).weight
        bias = None if self.correction_bias is None else getattr(block, self.correction_bias, None)
        if isinstance(bias, nn.Parameter):
            router.register_parameter(CORRECTION_BIAS, bias)
        elif bias is not None:
            router.register_buffer(CORRECTION_BIAS, bias)

    def finish(self, layer: AutoEPMoELayer, block: nn.Module, spec: MoELayerSpec) -> dict[int, list[nn.Parameter]]:
        """Mends a layer that AutoEP has made in place of `block`.

        Returns:
            For each new parameter's id, those that it was made of.
        """
        router, source = layer.router, getattr(block, spec.router_name)
        bias = router.e_score_correction_bias
        if bias is not None and bias.dim() > 1:  # [1, E]; AutoEP's router adds [E]
            bias.data = bias.data.flatten()
        if self.route_scale:
            router.route_scale = getattr(source, self.route_scale)
        if self.sparse_mixer:
            if noise := block.input_jitter_noise:
                raise ConfigError(f"{spec.model_family}: the model's input_jitter_noise is {noise}, which expert "
                                  "parallelism does not add; expected 0. Set it in the model's config")
            router.__class__ = SparseMixerRouter
            router.jitter = source.router_jitter_noise
        if self.cohere and hasattr(block, "shared_experts") and block.shared_expert_combination_strategy != "sum":
            raise ConfigError(f"{spec.model_family}: the model's shared_expert_combination_strategy is "
                              f'"{block.shared_expert_combination_strategy}", and AutoEP adds shared experts; '
                              'expected "sum". Remove the section "expert_parallel" to train it without expert '
                              "parallelism")
        return add_biases(layer, getattr(block, spec.experts_name)) if self.gpt_oss else {}


class _ReturnsPair(TransformersTopLevelRouterLogitsAdapter):
    """For blocks that return the hidden states and something that the model ignores."""

    def adjust_forward_contract(self, contract: ForwardContract) -> ForwardContract:
        return replace(super().adjust_forward_contract(contract), return_router_logits=True, capture_target="none")


class _CohereRouter(TransformersTopLevelRouterLogitsAdapter):
    """For cohere2_moe, which takes the softmax over the chosen experts alone, whatever its norm_topk_prob says."""

    def resolve_route_norm(self, config: AutoEPConfig, preset: MoEModelPreset, model_config: Any) -> bool:
        if config.route_norm is None and preset.score_func == "softmax":
            return True
        return super().resolve_route_norm(config, preset, model_config)


def _at(name: str) -> str:
    return rf"model\.layers\.\d+\.{name}"


_GRANITE = {"moe_layer_pattern": _at("block_sparse_moe"), "router_pattern": "router"}
PRESETS: dict[str, AddedPreset] = {
    "afmoe": AddedPreset("deepseek_v3", "Afmoe", {"router_pattern": "router", "num_experts_attr": "num_experts",
                                                  "route_norm": True},
                         gate="gate", correction_bias="expert_bias", route_scale="route_scale"),
    "cohere2_moe": AddedPreset("qwen3_moe", "Cohere2Moe", {"shared_experts_pattern": "shared_experts"}, cohere=True),
    "deepseek_v32": AddedPreset("deepseek_v3", "DeepseekV32"),
    "dots1": AddedPreset("deepseek_v3", "Dots1"),
    "ernie4_5_moe": AddedPreset("qwen3_moe", "Ernie4_5_Moe", {"shared_experts_pattern": "shared_experts"}),
    "exaone_moe": AddedPreset("deepseek_v3", "ExaoneMoe", {"num_experts_attr": "num_experts"}),
    "flex_olmo": AddedPreset("qwen3_moe", "FlexOlmo"),
    "glm4_moe": AddedPreset("deepseek_v3", "Glm4Moe"),
    "glm4_moe_lite": AddedPreset("deepseek_v3", "Glm4MoeLite"),
    "glm_moe_dsa": AddedPreset("deepseek_v3", "GlmMoeDsa"),
    "gpt_oss": AddedPreset("minimax_m3", "GptOss", {"router_pattern": "router", "score_func": "softmax"},
                           gpt_oss=True),
    "granitemoe": AddedPreset("mixtral", "GraniteMoe", _GRANITE),
    "granitemoehybrid": AddedPreset("mixtral", "GraniteMoeHybrid", _GRANITE),
    "granitemoeshared": AddedPreset("mixtral", "GraniteMoeShared", _GRANITE),
    "jamba": AddedPreset("qwen3_moe", "Jamba", {"moe_layer_pattern": _at("feed_forward"), "router_pattern": "router",
                                                "route_norm": False}),
    "lfm2_moe": AddedPreset("qwen3_moe", "Lfm2Moe", {"moe_layer_pattern": _at("feed_forward"),
                                                     "score_func": "sigmoid"}, correction_bias="expert_bias"),
    "mellum": AddedPreset("qwen3_moe", "Mellum"),
    "mimo_v2_flash": AddedPreset("deepseek_v3", "MiMoV2Flash"),
    "minimax": AddedPreset("mixtral", "MiniMax"),
    "minimax_m2": AddedPreset("mixtral", "MiniMaxM2", {"score_func": "sigmoid"}),
    "olmoe": AddedPreset("qwen3_moe", "Olmoe"),
    "phimoe": AddedPreset("mixtral", "Phimoe", {"router_pattern": "router"}, sparse_mixer=True),
    "qwen3_next": AddedPreset("qwen3_moe", "Qwen3Next"),
    "solar_open": AddedPreset("deepseek_v3", "SolarOpen"),
}


# Why AutoEP cannot replace the MoE blocks of these types.
UNSUPPORTED = {
    "dbrx": "its experts lie in one matrix for all of them",
    "gemma4_text": "its router normalises and scales its input, which AutoEP's router does not",
    "hunyuan_v1_moe": "its router may choose another number of experts in each layer, which AutoEP's cannot",
    "llama4_text": "it multiplies the tokens by the router's scores before the experts",
    "longcat_flash": "some of its experts have no weights",
}


def model_type_of(model: nn.Module | None) -> str | None:
    """Hugging Face's name of the architecture. None: the model has none."""
    return getattr(getattr(model, "config", None), "model_type", None)


def added_preset(model: nn.Module | None) -> AbstractContextManager:
    """Lets AutoEP find the MoE blocks of this model inside the context, if its type is one of PRESETS.

    A preset that DeepSpeed itself has for the type comes first. So do keys of "expert_parallel" that the user wrote.

    Raises:
        ConfigError: inside the context, AutoEP cannot detect the blocks of a type of UNSUPPORTED, or those that an
            earlier engine has replaced.
    """
    if isinstance(model, nn.Module) and any(isinstance(module, AutoEPMoELayer) for module in model.modules()):
        return _explained("the model is in an engine already: AutoEP has put its layers in the place of the MoE "
                          "blocks. Make a new model, or go on with the first engine")
    model_type = model_type_of(model)
    if registry.preset_name_for_hf_model_type(model_type) is not None:
        return nullcontext()
    if model_type in UNSUPPORTED:
        return _explained(f"{model_type}: {UNSUPPORTED[model_type]}, so \"expert_parallel\" does not work for this "
                          "model type. Remove that section to train it without expert parallelism")
    return _added(model_type, model.config) if model_type in PRESETS else nullcontext()


def _explained(reason: str) -> AbstractContextManager:
    """Inside the context, an error of AutoEP's detection of MoE blocks is a ConfigError with this reason."""

    def parser(plain, self):
        try:
            return plain(self)
        except ValueError as error:
            raise ConfigError(reason) from error

    return patched(AutoEP, "ep_parser", parser)


@contextmanager
def _added(model_type: str, config: Any) -> Iterator[None]:
    added = PRESETS[model_type]

    def replace_layer(plain, self, spec, *args, **kwargs):
        if spec.model_family != model_type:  # the user chose another preset
            return plain(self, spec, *args, **kwargs)
        block = self.model.get_submodule(spec.moe_module_name)
        added.prepare(block, spec.router_name)
        layer, sources = plain(self, spec, *args, **kwargs)
        new = added.finish(layer, block, spec)
        if sources:  # a client optimizer needs them
            sources.sources.update(new)
        return layer, sources

    with lent_entry(registry.PRESET_MODELS, model_type, added.preset(config)), \
            lent_entry(registry._PRESET_ADAPTERS, model_type, added.adapter(model_type)), \
            patched(AutoEP, "_replace_moe_layer_without_retarget", replace_layer):
        yield


def announcement(model: nn.Module) -> str | None:
    """Which preset of this file the layers of a model were made by. None: by none."""
    families = {getattr(layer, "model_family", None) for layer in model.modules() if isinstance(layer, AutoEPMoELayer)}
    model_type = model_type_of(model)
    if model_type not in PRESETS or model_type not in families:
        return None
    added = PRESETS[model_type]
    changes = "".join(f", {key} {value!r}" for key, value in added.changes.items())
    return (f"mxfp8_moe: AutoEP has no preset for {model_type}: took {added.like}'s{changes}. "
            'Keys that you write in "expert_parallel" come first')


def why_no_layers(engine: nn.Module) -> str | None:
    """Why an engine with the section "expert_parallel" has no MoE layers. None: it has no such section."""
    config = engine._config.expert_parallel_config
    if config is None or not config.enabled:
        return None
    model_type = model_type_of(engine.module) or "this model"
    reason = UNSUPPORTED.get(model_type, "DeepSpeed's AutoEP finds no MoE layers in it")
    advice = "" if model_type in UNSUPPORTED else (
        '. If it has MoE layers, name a preset that resembles them by "preset_model" in "expert_parallel" '
        f"({', '.join(registry.available_preset_names())}), and where they are by \"moe_layer_pattern\"")
    return f"mxfp8_moe: {model_type}: {reason}; its MoE layers stay Hugging Face's own{advice}"


def router_names(spec: MoELayerSpec) -> tuple[str, str]:
    """The names of the router's linear layer and of its correction bias in the block that AutoEP replaced."""
    added = PRESETS.get(spec.model_family)
    gate = f"{spec.router_name}.{added.gate}" if added and added.gate else spec.router_name
    if added and added.correction_bias:
        return gate, added.correction_bias
    return gate, ".".join(filter(None, [spec.e_score_correction_bias_path, CORRECTION_BIAS]))


def gate_and_up_in_turn(spec: MoELayerSpec) -> bool:
    """Whether the columns of gate and up alternate in the block that AutoEP replaced."""
    added = PRESETS.get(spec.model_family)
    return added is not None and added.gpt_oss
