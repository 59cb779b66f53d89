# SPDX-License-Identifier: Apache-2.0
"""Saves a model that AutoEP trains as transformers would save it: all experts, under Hugging Face's names.

AutoEP gives each rank its own experts, stacked as w1, w2, w3, and a router of its own. To find their names in the
original model, this file builds the model once more on the meta device and runs DeepSpeed's detection of MoE layers on
it.
"""

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import AutoEPConfig, MoELayerSpec
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from deepspeed.runtime.engine import DeepSpeedEngine

from ..layers.frozen_experts import WEIGHTS, frozen_layers
from ..layers.lora import ADAPTERS, base_prefix, is_peft
from ..layers.presets import CORRECTION_BIAS, added_preset, gate_and_up_in_turn, router_names
from ..layers.say import print_on_rank_0
from ..transport.deadline import deadline_for, ranks_of, tell_peers_on_error


@tell_peers_on_error
def save_pretrained(engine: Any, directory: str | os.PathLike, **kwargs) -> None:
    """Writes config and weights to `directory`, for `AutoModelForCausalLM.from_pretrained(directory)`.

    Collective: every rank calls it. Rank 0 gathers the model in its host memory, one MoE layer or one other tensor at
    a time, and writes it. The weights are those that the model computes with, in its own dtype. Works in every ZeRO
    stage, with converted layers, with DeepSpeed's own, and without MoE layers. Of a PeftModel, it writes the adapters,
    as PEFT does.

    Args:
        engine: what `initialize` or `accelerator.prepare` returned, over a transformers model or a PeftModel around
            one. Or a Hugging Face Trainer whose `train` has begun.
        directory: a folder. Only rank 0 writes to it.
        kwargs: arguments of the model's own `save_pretrained`, for example max_shard_size.

    Raises:
        TypeError: there is no engine, or it has no transformers model.
        RuntimeError: the model is split by tensor parallelism. Or rank 0 could not write; raised on every rank.
    """
    engine = _engine_of(engine)
    model, expert_parallel = engine.module, engine._config.expert_parallel_config
    if peft_model := is_peft(model):
        state, saver = whole_state_dict(model, expert_parallel, _of_adapters(model)), model
    else:
        saver = _skeleton(model)
        state = whole_state_dict(model, expert_parallel, skeleton=saver)
    outcome = [None]
    if dist.get_rank() == 0:
        try:
            if not peft_model:
                _check_complete(state, saver)
            if os.path.isfile(directory):  # transformers would log an error and write nothing
                raise NotADirectoryError("expected a folder, or a path that does not exist yet; this is a file")
            saver.save_pretrained(directory, state_dict=state, **kwargs)
        except Exception as error:  # the other ranks wait for rank 0, so they need its error
            outcome = [f"{type(error).__name__}: {error}"]
    with deadline_for(dist.get_world_group(), engine.device, "save_pretrained, while rank 0 writes"):
        dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise RuntimeError(f"the model could not be saved to {os.fspath(directory)}: {outcome[0]}")


def whole_state_dict(model: torch.nn.Module, expert_parallel: AutoEPConfig,
                     wanted: Callable[[str, torch.Tensor], bool] = lambda name, value: True,
                     skeleton: torch.nn.Module | None = None, keep: bool | None = None) -> dict | None:
    """The state dict of a model that AutoEP trains, with all experts, under Hugging Face's names, in host memory.

    Collective, unless `needs_peers` is false.

    Args:
        model: a transformers model, or a PeftModel around one. Names begin as in its own state dict.
        expert_parallel: DeepSpeed's section "expert_parallel", with which AutoEP made the layers.
        wanted: gets each tensor with its name in the model. False leaves it out.
        skeleton: the model as transformers builds it, if the caller has it already.
        keep: whether this rank gets the result. By default rank 0 does; the others get None.

    Raises:
        RuntimeError: AutoEP does not find the layers in a new model.
    """
    base, prefix = base_of(model)
    skeleton = _skeleton(base) if skeleton is None else skeleton
    specs = _specs(model, skeleton, prefix, expert_parallel)
    keep = dist.get_rank() == 0 if keep is None else keep
    state = dict(_tensors(model, skeleton, prefix, specs, wanted, keep))
    return state if keep else None


def needs_peers(model: torch.nn.Module) -> bool:
    """Whether other ranks hold parts of the model: their own experts, or their partitions of ZeRO-3."""
    return is_partitioned(model) or any(layer.ep_size > 1 for layer in autoep_layers(model).values())


def is_partitioned(model: torch.nn.Module) -> bool:
    """Whether ZeRO-3 has partitioned the model."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def autoep_layers(model: torch.nn.Module) -> dict[str, AutoEPMoELayer]:
    """AutoEP's layers by their names in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)}


def base_of(model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """The transformers model, and its name in `model`, which is "" unless a PeftModel holds it.

    Raises:
        TypeError: there is none.
    """
    from transformers import PreTrainedModel

    base = model.get_base_model() if is_peft(model) else model
    if not isinstance(base, PreTrainedModel):
        raise TypeError("the model is no transformers PreTrainedModel, and no PeftModel around one: it is a "
                        f"{type(base).__name__}. Its weights are written by engine.save_16bit_model")
    return base, next(name for name, module in model.named_modules() if module is base)


def _engine_of(given: Any) -> DeepSpeedEngine:
    engine = given
    if not isinstance(given, torch.nn.Module) and hasattr(given, "deepspeed"):  # a Trainer
        engine = given.deepspeed
        if engine is None:
            raise TypeError(f"the {type(given).__name__} has no DeepSpeed engine yet: call its train() first, or let "
                            "the model save itself by model.save_pretrained")
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError("save_pretrained takes the Trainer or the DeepSpeed engine (what ds_mxfp8_moe.initialize or "
                        f"accelerator.prepare returned); this is a {type(given).__name__}")
    base_of(engine.module)
    refuse_tensor_parallelism(engine)
    return engine


def refuse_tensor_parallelism(engine: DeepSpeedEngine) -> None:
    """Raises RuntimeError if AutoTP has split the model, which this file does not gather."""
    if engine.autotp_size() > 1:
        raise RuntimeError(f"the model is split by tensor parallelism (autotp_size {engine.autotp_size()}), which is "
                           "not gathered here: use engine.save_checkpoint")


def _of_adapters(model) -> Callable[[str, torch.Tensor], bool]:
    """What PEFT writes: everything trained, and the adapters, which may be frozen too."""
    parts = [f".{adapter}." for adapter in model.peft_config]
    return lambda name, value: value.requires_grad or any(part in f"{name}." for part in parts)


def _skeleton(model):
    """The model as transformers builds it from its config, on the meta device."""
    with torch.device("meta"):
        skeleton = type(model)(copy.deepcopy(model.config)).to(model.dtype)
    if hasattr(model, "generation_config"):  # classifiers have none
        skeleton.generation_config = copy.deepcopy(model.generation_config)
    if hasattr(model, "_weight_conversions"):  # how from_pretrained renamed what it read
        skeleton._weight_conversions = model._weight_conversions
    return skeleton


def _below(prefix: str, skeleton):
    """A module in which the skeleton has the name `prefix`."""
    root = skeleton
    for part in filter(None, reversed(prefix.split("."))):
        inner, root = root, torch.nn.Module()
        root.add_module(part, inner)
    root.config = skeleton.config
    return root


def _specs(model, skeleton, prefix: str, expert_parallel: AutoEPConfig) -> dict[str, MoELayerSpec]:
    """AutoEP's description of each of its layers in the original model, by the layer's name in `model`."""
    names = list(autoep_layers(model))
    if not names:
        return {}
    if prefix and expert_parallel.moe_layer_pattern is not None:  # a pattern for the names in `model`
        skeleton, prefix = _below(prefix, skeleton), ""
    with added_preset(skeleton):
        found = AutoEP(skeleton, expert_parallel).ep_parser()
    specs = {".".join(filter(None, [prefix, spec.moe_module_name])): spec for spec in found}
    missing = [name for name in names if name not in specs]
    if missing:
        raise RuntimeError(f"AutoEP finds no MoE layer at {missing[0]} of a new {type(model).__name__}: give the "
                           "engine a model as its config makes it")
    return {name: specs[name] for name in names}


def _tensors(model, skeleton, prefix: str, specs: dict[str, MoELayerSpec], wanted: Callable,
             keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor in host memory) under Hugging Face's names. Collective; yields where `keep` alone."""
    entries = {name: value for name, value in model.state_dict(keep_vars=True).items() if wanted(name, value)}
    dequantised = {name for name in frozen_layers(model) if wanted(f"{name}.experts.w1", torch.empty(0))}
    if dequantised:
        print_on_rank_0(f"mxfp8_moe: the frozen experts of {len(dequantised)} layers, which are held in MXFP8, are "
                        "saved in the model's dtype, with the values that they compute with")
    for name, spec in specs.items():
        start = f"{name}."
        own = {key.removeprefix(start): entries.pop(key) for key in list(entries) if key.startswith(start)}
        source = skeleton.get_submodule(name[len(prefix) + 1:] if prefix else name)
        for key, tensor in _layer_tensors(model.get_submodule(name), source, spec, own, keep, name in dequantised):
            yield start + key, tensor
    seen = {}
    for name, value in entries.items():
        if id(value) not in seen:  # tied weights once
            seen[id(value)] = on_host(_whole(value), keep)
        if keep:
            yield name, seen[id(value)]


def _layer_tensors(layer, source, spec: MoELayerSpec, own: dict, keep: bool,
                   dequantised: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one AutoEP layer under their names in `source`, the layer that AutoEP replaced.

    `dequantised`: its experts are held in MXFP8, and wanted.
    """
    gate, correction_bias = router_names(spec)
    shapes = {key: tensor.shape for key, tensor in source.state_dict().items()}
    renamed = {"router.gate.": f"{gate}.", f"router.{CORRECTION_BIAS}": correction_bias,
               "shared_experts.": f"{spec.shared_experts_name}.",
               "shared_experts_gate.": f"{spec.shared_experts_gate_name}.",
               ADAPTERS: ADAPTERS}  # PEFT looks for them under their modules' names
    for key, value in own.items():
        for prefix, name in renamed.items():
            if key.startswith(prefix):
                tensor = on_host(_whole(value), keep)
                if tensor is not None:
                    original = name + key.removeprefix(prefix)
                    yield original, tensor.reshape(shapes.get(original, tensor.shape))
    biases = {role: on_host(_whole(own[key]), keep) for role in ("gate", "up", "down")
              if (key := f"expert_biases.{role}") in own}
    start = f"{spec.experts_name}.{base_prefix(layer)}"
    if keep and "up" in biases:
        both = torch.stack([biases["gate"], biases["up"]], dim=2).flatten(1)
        yield f"{start}{spec.expert_w1_name}_bias", both
    if keep and "down" in biases:
        yield f"{start}{spec.expert_w2_name}_bias", biases["down"]
    if "experts.w1" not in own and not dequantised:  # not wanted
        return
    weights = layer.experts.frozen.dequantized() if dequantised else (own[f"experts.{key}"] for key in WEIGHTS)
    weights = [all_experts(layer, weight, keep) for weight in weights]
    if keep:
        for key, tensor in _unpacked(*weights, getattr(source, spec.experts_name), spec):
            yield start + key, tensor


def _unpacked(gate_EFH, down_EHF, up_EFH, source, spec: MoELayerSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """The inverse of AutoEP's repacking: (name below the module of experts, tensor)."""
    names = (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name)
    if names[2] is None:  # one tensor for both projections
        both = (torch.stack([gate_EFH, up_EFH], dim=2).flatten(1, 2) if gate_and_up_in_turn(spec) else
                torch.cat([gate_EFH, up_EFH], dim=1))
        parts = [both, down_EHF]
    else:
        parts = [gate_EFH, down_EHF, up_EFH]
    if spec.expert_storage == "fused_3d":
        layout = classify_fused_gate_up_layout(tuple(getattr(source, names[0]).shape),
                                               tuple(getattr(source, names[1]).shape)) if names[2] is None else None
        for name, part in zip(names, parts, strict=False):
            yield name, part.transpose(1, 2).contiguous() if layout and layout.needs_transpose else part
    else:
        for i, expert in enumerate(source):
            for name, part in zip(names, parts, strict=False):
                linear = isinstance(getattr(expert, name), torch.nn.Module)
                yield f"{i}.{name}.weight" if linear else f"{i}.{name}", part[i].clone()  # in storage of its own


def _whole(value: torch.Tensor) -> torch.Tensor:
    """A parameter as it is without ZeRO-3. Collective."""
    if not hasattr(value, "ds_id"):
        return value.detach()
    with deepspeed.zero.GatheredParameters([value]):
        return value.detach().clone()


def on_host(tensor: torch.Tensor, keep: bool) -> torch.Tensor | None:
    """A copy in host memory, or None. Devices keep no gathered tensors."""
    return tensor.to("cpu", copy=True) if keep else None


def all_experts(layer: Any, weight: torch.Tensor, keep: bool) -> torch.Tensor | None:
    """[E, ...] of all ranks' experts in host memory on rank 0, None elsewhere. Collective. `layer`: AutoEP's, or the
    inner one of a classic layer."""
    local = _whole(weight).contiguous()
    if layer.ep_size == 1:
        return on_host(local, keep)
    if 0 not in ranks_of(layer.ep_group):  # these experts are copies of others
        return None
    parts = [torch.empty_like(local) for _ in range(layer.ep_size)] if keep else None
    where = "saving the model, where rank 0 gathers experts (every rank has to make this call)"
    with deadline_for(layer.ep_group, local.device, where):
        dist.gather(local, parts, dst=0, group=layer.ep_group)
    return torch.cat([part.cpu() for part in parts]) if parts else None


def _check_complete(state: dict, skeleton) -> None:
    """Raises RuntimeError unless these are the model's tensors, all of them."""
    wanted = skeleton.state_dict()
    differing = [name for name in {**wanted, **state}
                 if name not in wanted or name not in state or wanted[name].shape != state[name].shape]
    if differing:
        given = {name: tuple(state[name].shape) if name in state else None for name in differing[:4]}
        raise RuntimeError(f"{len(differing)} tensors differ from those of {type(skeleton).__name__}: {given} ... "
                           "(None: missing). Merge or remove what was added to the model, for example PEFT adapters")
