# SPDX-License-Identifier: Apache-2.0
"""What a DeepSpeed engine does for its converted layers around the optimizer's step."""

import gc
import weakref

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ..compat.clipping import clip_by_whole_norm
from ..compat.private_names import say_if_missing
from ..compat.waiting import end_generation_together, spare_the_host
from ..config import MXFP8MoEConfig
from ..layers.classic import MXFP8MOELayer
from ..layers.experts import converted_layers, expert_blocks
from ..ops.log import log_on_rank_0
from . import balance
from .graphs import graph_attention
from .keeping import keep_quantized_weights
from .metrics import Metrics
from .moe_engine import MoEEngine
from .not_finite import FirstNotFinite
from .placement import Placing, obstacle


def engine_of(model_or_engine: torch.nn.Module) -> DeepSpeedEngine | None:
    """The engine itself, or the engine of this model. None: there is none, or the module is only a part of a model.

    An engine that started without this package is found by `engines_alive` alone.
    """
    if isinstance(model_or_engine, DeepSpeedEngine):
        return model_or_engine
    engine = vars(model_or_engine).get("_mxfp8_engine", lambda: None)()
    return engine if engine is not None and engine.module is model_or_engine else None  # a copy has the attribute, too


def engines_alive() -> list[DeepSpeedEngine]:
    """All engines of this process that have started. Takes about 0.1 s."""
    return [one for one in gc.get_objects() if issubclass(type(one), DeepSpeedEngine) and hasattr(one, "module")]


def model_of(model_or_engine: torch.nn.Module) -> torch.nn.Module:
    """The model of an engine, or the one that DistributedDataParallel contains. Any other module is the model."""
    contains = isinstance(model_or_engine, (DeepSpeedEngine, torch.nn.parallel.DistributedDataParallel))
    return model_or_engine.module if contains else model_or_engine


def remember_engine(engine: DeepSpeedEngine) -> None:
    """Lets `engine_of` find an engine."""
    vars(engine.module)["_mxfp8_engine"] = weakref.ref(engine)


def hook_engine(engine: MoEEngine, config: MXFP8MoEConfig, converted: int) -> None:
    """Installs or removes every engine hook, as configured. A second call replaces the first.

    Args:
        config: the section, which may be disabled.
        converted: the number of layers that were converted on any rank.
    """
    if config.enabled or converted_layers(engine.module):
        hook_steps(engine)
        spare_the_host(engine)
        clip_by_whole_norm(engine)
        end_generation_together(engine, [module for module in engine.module.modules() if hasattr(
            type(module), "generate") and any(block.ep_size > 1 for _, block in expert_blocks(module))])
    batch_gradients(engine, config, converted)
    keep_quantized_weights(engine, config, converted)
    balance_loads(engine)
    write_metrics(engine, config)
    place_experts(engine)
    graph_attention(engine, config, converted)


def hook_steps(engine: MoEEngine) -> None:
    """Lets the engine work around each step of its optimizer. A second call changes nothing.

    After the step, the engine moves the biases of experts, writes metrics and moves experts, as the latest
    `balance_loads`, `write_metrics` and `place_experts` decided. After the first step it decides whether to keep
    quantized weights. After a skipped step it looks for the first NaN.
    """
    if not engine._mxfp8.steps and not say_if_missing("steps"):
        engine._mxfp8.steps = True
        engine._mxfp8.put("first NaN", FirstNotFinite(engine))


def batch_gradients(engine: MoEEngine, config: MXFP8MoEConfig, converted: int) -> None:
    """Applies the key of that name to an engine with converted layers, and takes it back from others."""
    if say_if_missing("batch_gradients"):
        return
    from ..compat import zero

    obstacle = zero.batch_gradients(engine.optimizer, config.batch_gradients and converted > 0)
    sums = weakref.ref(engine.optimizer) if isinstance(engine.optimizer, zero.BatchedGradients) else None
    for layer in converted_layers(engine.module):
        layer.mxfp8_sums = sums
    if obstacle:
        log_on_rank_0(f"mxfp8_moe: DeepSpeed handles each parameter's gradient by itself: {obstacle}")


def balance_loads(engine: MoEEngine) -> None:
    """Lets the engine move the biases of experts after each step, if its layers' config asks for it."""
    coeffs = {layer: layer.mxfp8_settings.config.load_balance_coeff for layer in converted_layers(engine.module)}
    if others := [layer.mxfp8_settings.name for layer, coeff in coeffs.items()
                  if coeff is not None and isinstance(layer, MXFP8MOELayer)]:
        log_on_rank_0(f'mxfp8_moe: "load_balance_coeff" has no effect on classic layers, such as {others[0]}')
    layers = [block for _, block in expert_blocks(engine.module) if coeffs.get(block.experts) is not None]
    if isinstance(balancer := engine._mxfp8.after_step.get("balance"), balance.LoadBalancer):
        balancer.close()
    if replaced := [layer.experts.mxfp8_settings.name for layer in layers
                    if "forward" in vars(layer) and not balance.corrects(layer)]:
        log_on_rank_0(f'mxfp8_moe: WARNING: "load_balance_coeff" has no effect on {replaced[0]}, whose forward '
                        "method is replaced")
    coeff = next((coeff for coeff in coeffs.values() if coeff is not None), None)
    engine._mxfp8.put("balance", balance.LoadBalancer(engine.module, layers, coeff) if layers else None)
    if any(not balance.corrects(layer) for layer in layers):
        log_on_rank_0("mxfp8_moe: only checkpoints contain the biases that balance the experts' load: "
                        "transformers has no place for them in this model")


def place_experts(engine: MoEEngine) -> None:
    """Lets the engine move experts to other ranks after some steps, if its layers' config asks for it."""
    if isinstance(earlier := engine._mxfp8.after_step.get("placement"), Placing):
        earlier.close()
    layers = [one for one in converted_layers(engine.module)
              if one.ep_size > 1 and one.mxfp8_settings.config.expert_placement == "balanced"]
    if layers and (why := obstacle(engine, layers)):
        log_on_rank_0(f'mxfp8_moe: "expert_placement" has no effect: {why}')
        layers = []
    engine._mxfp8.put("placement", Placing(engine, layers) if layers else None)


def write_metrics(engine: MoEEngine, config: MXFP8MoEConfig) -> None:
    """Lets the engine write metrics of its layers, if their config asks for it.

    `config`: asks for them on ranks without converted layers. Stages of a pipeline write metrics together.
    """
    layers = converted_layers(engine.module)
    asked = layers[0].mxfp8_settings.config.metrics if layers else config.metrics if config.enabled else None
    if asked and say_if_missing("metrics"):
        asked = None
    if asked and not engine.monitor.enabled:
        log_on_rank_0('mxfp8_moe: "metrics" has no effect without one of DeepSpeed\'s monitors: write, for example, '
                        '"csv_monitor": {"enabled": true, "output_path": "runs", "job_name": "moe"}')
        asked = None
    engine._mxfp8.put("metrics", Metrics(engine, layers, asked.every) if asked else None)
