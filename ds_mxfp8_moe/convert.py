# SPDX-License-Identifier: Apache-2.0
"""Which MoE layers take the MXFP8 path, and why the others do not.

Conversion swaps classes in place: every Parameter object, buffer, hook and name stays. What it cannot show to be safe
it leaves on DeepSpeed's own path and says so.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import deepspeed.comm as dist
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe import layer as deepspeed_layer
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

from .autoep import MXFP8AutoEPMoELayer, MXFP8GroupedExperts
from .config import SECTION, ConfigError, MXFP8MoEConfig, current_device, parse, resolve
from .experts import DTYPES, ExpertFormula, NotRecognised, evaluate
from .layer import CheckedGate, LayerSettings, MoE, MXFP8MOELayer
from .recognise import recognise
from .transport.peer_memory import PeerMemory
from .watch import Watch, foreign_hooks

AUTOEP_ACTIVATIONS = {"swiglu": "silu", "geglu_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class LayerReport:
    """What became of one MoE layer."""

    name: str
    kind: str
    converted: bool
    detail: str

    def __str__(self) -> str:
        state = "converted" if self.converted else "not converted"
        return f"mxfp8_moe: {self.name} ({self.kind}) {state}: {self.detail}"


@dataclass(frozen=True)
class ConversionReport:
    """One entry for each MoE layer of the model, in the order of named_modules().

    Attributes:
        idle_patterns: those of `include` and `exclude` that match no layer.
    """

    layers: tuple[LayerReport, ...]
    idle_patterns: tuple[str, ...] = ()

    @property
    def converted(self) -> int:
        return sum(layer.converted for layer in self.layers)

    def __str__(self) -> str:
        if not self.layers:
            return ("mxfp8_moe: no MoE layers found, neither deepspeed.moe.layer.MoE nor AutoEP's. Models of Hugging "
                    'Face need DeepSpeed\'s section "expert_parallel": {"enabled": true, "autoep_size": ...} too')
        lines = [str(layer) for layer in self.layers]
        lines += [f"mxfp8_moe: WARNING: {pattern!r} in 'include' or 'exclude' matches no MoE layer's whole name"
                  for pattern in self.idle_patterns]
        return "\n".join([*lines, f"mxfp8_moe: {self.converted} of {len(self.layers)} MoE layers converted"])


def convert(model_or_engine: torch.nn.Module, config: MXFP8MoEConfig | dict | str | None = None) -> ConversionReport:
    """Puts the model's MoE layers on the MXFP8 path, in place; prints one line a layer on rank 0.

    Classic `deepspeed.moe.layer.MoE` layers may be converted before or after deepspeed.initialize, AutoEP's layers
    exist only after it. Converting again settles the layers anew with the new config. Calling this is what enables;
    it is not collective, and has to be called alike on every rank. An engine given here raises what went wrong in an
    exchange that the host did not wait for (`capacity_factor`) before its optimizer's step; a module, in a later
    exchange.

    Args:
        model_or_engine: a module, or a DeepSpeed engine.
        config: the section "mxfp8_moe" (parsed or as a dict), or a whole DeepSpeed config that has it, as
            deepspeed.initialize takes it. None is the default recipe. `"enabled": false` puts every layer back on
            DeepSpeed's path.

    Raises:
        ConfigError: the section is wrong, or a whole config has none.
    """
    report = convert_silently(model_or_engine, _section(config))
    say(report)
    if isinstance(model_or_engine, DeepSpeedEngine):
        check_before_steps(model_or_engine)
    return report


def say(what: ConversionReport | str) -> None:
    """Prints on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(what, flush=True)


def convert_silently(model_or_engine: torch.nn.Module, settings: MXFP8MoEConfig) -> ConversionReport:
    """`convert`, without its lines."""
    model = getattr(model_or_engine, "module", model_or_engine)
    enabled = settings.enabled or "enabled" not in settings.model_fields_set
    recipe = resolve(settings, *current_device())
    shared = _shared_parameters(model)
    reports = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, (deepspeed_layer.MoE, AutoEPMoELayer)):
            continue
        _restore(module)
        classic = isinstance(module, deepspeed_layer.MoE)
        kind, label = "classic" if classic else "AutoEP", name or "(the model itself)"
        if not enabled or not settings.selects(name):
            detail = "left out by 'include' and 'exclude'" if enabled else "'enabled' is false"
            reports.append(LayerReport(label, kind, False, detail))
            continue
        try:
            formula = (_classic_formula if classic else _autoep_formula)(module, shared)
        except NotRecognised as reason:
            if classic and type(module.deepspeed_moe) is MOELayer and type(module.deepspeed_moe.gate) is TopKGate:
                module.deepspeed_moe.gate.__class__ = CheckedGate
            reports.append(LayerReport(label, kind, False, f"{reason}; it runs DeepSpeed's own path"))
            continue
        layer_settings = LayerSettings(label, formula, recipe, settings.min_tokens_per_expert,
                                       settings.force_load_balance, settings.transport, settings.nvlink_sms,
                                       settings.capacity_factor, settings.overlap)
        if classic:
            module.__class__ = MoE
            module.deepspeed_moe.__class__ = MXFP8MOELayer
            module.deepspeed_moe.mxfp8 = layer_settings
            module.deepspeed_moe.mxfp8_watch = Watch(module.deepspeed_moe.experts)
        else:
            module.__class__ = MXFP8AutoEPMoELayer
            module.experts.__class__ = MXFP8GroupedExperts
            module.mxfp8 = layer_settings
        reports.append(LayerReport(label, kind, True, _describe(formula, layer_settings, module.num_local_experts)))
    return reported(reports, settings)


def reported(layers: Iterable[LayerReport], settings: MXFP8MoEConfig) -> ConversionReport:
    """The report about these layers, which are all that there are."""
    layers = tuple(layers)
    return ConversionReport(layers, tuple(settings.idle_patterns(layer.name for layer in layers)))


def choose_transports(model: torch.nn.Module) -> None:
    """Has every converted layer's group choose its transport now; collective over those groups.

    Without this it happens in the layers' first forward. Groups that do not exist yet choose there.

    Raises:
        RuntimeError: nvlink is asked for and impossible.
    """
    for module in model.modules():
        if isinstance(module, (MXFP8MOELayer, MXFP8AutoEPMoELayer)) and module.ep_size > 1:
            module.mxfp8.exchange_over(module.ep_group)


def check_before_steps(engine: DeepSpeedEngine) -> None:
    """What went wrong in an exchange that the host did not wait for is raised before the optimizer uses its result."""
    plain = engine._take_model_step
    if hasattr(plain, "mxfp8_moe"):
        return

    @functools.wraps(plain)
    def step(*args, **kwargs):
        PeerMemory.wait_and_check_all()
        return plain(*args, **kwargs)

    step.mxfp8_moe = True
    engine._take_model_step = step


def _section(config) -> MXFP8MoEConfig:
    if config is None:
        return MXFP8MoEConfig()
    if isinstance(config, MXFP8MoEConfig) or isinstance(config, dict) and SECTION in config:
        return parse(config)
    if isinstance(config, dict):
        # No key of the section takes an object: what holds some, and no such key, is a whole config.
        if MXFP8MoEConfig.model_fields.keys() & config or not any(isinstance(v, dict) for v in config.values()):
            return parse({SECTION: config})
        name = "the config"
    else:
        settings, name = parse(config), config
        if settings.model_fields_set:
            return settings
    raise ConfigError(f'{name} has no section "mxfp8_moe", or an empty one: write {{"enabled": true}} there, or give '
                      "no config to convert in the default recipe")


def _describe(formula: ExpertFormula, settings: LayerSettings, num_local_experts: int) -> str:
    recipe = settings.recipe
    if not recipe.quantize_gemm:
        return f"recipe bf16 (no quantisation), {formula}"
    name = "mxfp8" if recipe.wgrad == "mxfp8" else "mxfp8_wgrad_with_hp"
    fewest = settings.fewest_tokens(num_local_experts, torch.device(current_device()[0]))
    few = "" if fewest == 0 else ", bf16 whatever the batch" if math.isinf(fewest) else (
        f", bf16 below {fewest:.0f} tokens per expert")
    return f"recipe {name}{few}, blocks of {recipe.block_size}, {formula}"


def restore(model_or_engine: torch.nn.Module) -> None:
    """Puts every MoE layer back on DeepSpeed's own path, without a word."""
    for module in getattr(model_or_engine, "module", model_or_engine).modules():
        if isinstance(module, (deepspeed_layer.MoE, AutoEPMoELayer)):
            _restore(module)


def _restore(module: torch.nn.Module) -> None:
    """Undoes an earlier conversion of this layer. Our MoE around DeepSpeed's inner layer is DeepSpeed's MoE."""
    swaps = {MXFP8AutoEPMoELayer: AutoEPMoELayer, MXFP8GroupedExperts: GroupedExperts, MXFP8MOELayer: MOELayer,
             CheckedGate: TopKGate}
    inner = getattr(module, "deepspeed_moe", None)
    for part in (module, inner, getattr(inner, "gate", None), getattr(module, "experts", None)):
        if type(part) in swaps:
            part.__class__ = swaps[type(part)]
            for ours in ("mxfp8", "mxfp8_watch"):
                vars(part).pop(ours, None)


def _shared_parameters(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Parameters that more than one place of the model holds, with one of the places."""
    places: dict = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append(f"{name}.{key}")
    return {parameter: names[0] for parameter, names in places.items() if len(names) > 1}


def _hooks_of(modules: Iterable[torch.nn.Module]) -> str | None:
    for module in modules:
        # ZeRO-3 hooks every module. Its hooks do run: only AutoEP layers meet it, and their experts are called.
        if hooks := foreign_hooks(module):
            return f"{type(module).__name__} has hooks ({len(hooks)}) that this path would not call as they are meant"
        if "forward" in vars(module):
            return f"the forward method of {type(module).__name__} is replaced on the instance"
    return None


def _exactly(module, *classes) -> None:
    if type(module) not in classes:
        raise NotRecognised(f"its {classes[0].__name__} is a {type(module).__name__}, whose behaviour is unknown")


def _classic_formula(layer: deepspeed_layer.MoE, shared: dict) -> ExpertFormula:
    inner = layer.deepspeed_moe
    _exactly(layer, deepspeed_layer.MoE, MoE)
    _exactly(inner, MOELayer)
    _exactly(inner.gate, TopKGate)
    _exactly(inner.experts, Experts)
    if inner.use_tutel:
        raise NotRecognised("it uses Tutel")
    # One layer with tensor-parallel experts makes DeepSpeed group and exchange that way for all of them.
    split_experts = layer.enable_expert_tensor_parallelism or groups._get_expert_model_parallel_world_size() > 1
    if split_experts and bwc_tensor_model_parallel_world_size(groups.mpu) > 1:
        raise NotRecognised("its experts are tensor-parallel")
    hooks = _hooks_of([inner.experts, inner.experts.deepspeed_experts])
    if hooks or "forward" in vars(inner) or "forward" in vars(layer):
        raise NotRecognised(hooks or "the layer's forward method is replaced on the instance")
    return recognise(inner.experts.deepspeed_experts, inner.gate.wg.in_features, shared)


def _autoep_formula(layer: AutoEPMoELayer, shared: dict) -> ExpertFormula:
    experts = layer.experts
    _exactly(layer, AutoEPMoELayer)
    _exactly(experts, GroupedExperts)
    if layer.score_apply != "post":
        raise NotRecognised(f"it applies the router's scores {layer.score_apply!r} the experts")
    if getattr(layer, "comm_backend", "comm") != "comm":
        raise NotRecognised(f"its comm_backend is {layer.comm_backend!r}")
    handles = layer.folding_group_handles
    if handles is not None and handles.spec.tp_size > 1:
        raise NotRecognised("it is folded with AutoTP")
    hooks = _hooks_of([experts])
    if hooks or "forward" in vars(layer):
        raise NotRecognised(hooks or "the layer's forward method is replaced on the instance")
    activation = getattr(experts, "activation", "swiglu")
    if activation not in AUTOEP_ACTIVATIONS:
        raise NotRecognised(f"its experts' activation is {activation}; recognised are {', '.join(AUTOEP_ACTIVATIONS)}")
    for name, parameter in experts.named_parameters():
        if parameter in shared:
            raise NotRecognised(f"parameter {name} of its experts is shared with {shared[parameter]}")
        if parameter.dtype not in DTYPES:
            raise NotRecognised(f"parameter {name} of its experts is {parameter.dtype}")
    if len({p.dtype for p in experts.parameters()}) > 1:
        raise NotRecognised("the parameters of its experts have different dtypes")
    _, ffn_size, hidden_size = getattr(experts.w1, "ds_shape", experts.w1.shape)
    if hidden_size % 32 or ffn_size % 32:
        raise NotRecognised(f"hidden size {hidden_size} and FFN size {ffn_size} are not both multiples of 32")
    formula = ExpertFormula("gated", AUTOEP_ACTIVATIONS[activation], hidden_size, ffn_size, gate="w1", up="w3",
                            down="w2")
    _prove_grouped_experts(activation, formula)
    return formula


def _prove_grouped_experts(activation: str, formula: ExpertFormula) -> None:
    """Runs the installed DeepSpeed's grouped experts, small and random, against the formula."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
        keys = {} if activation == "swiglu" else {"activation": activation}
        probe = GroupedExperts(32, 64, 2, use_grouped_mm=False, **keys).float()
        for parameter in probe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) / 4)
        x = torch.randn(12, 32, generator=generator, dtype=torch.float32)
        got = probe(x, torch.tensor([5, 7]))
        wanted = torch.cat([evaluate(formula, rows, {name: p[e] for name, p in probe.named_parameters()})
                            for e, rows in enumerate(x.split([5, 7]))])
    if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-5):
        raise NotRecognised(f"this DeepSpeed's grouped experts do not compute {formula}")
