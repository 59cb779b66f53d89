# SPDX-License-Identifier: Apache-2.0
"""Saves a model that AutoEP trains as transformers would save it: all experts, under Hugging Face's names.

AutoEP gives each rank its own experts, stacked as w1, w2, w3, and a router of its own. To find their names in the
original model, this file builds the model once more on the meta device and runs DeepSpeed's detection of MoE layers on
it.
"""

import copy
import os
from collections.abc import Iterator

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import MoELayerSpec
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from deepspeed.runtime.engine import DeepSpeedEngine

from .autoep_presets import CORRECTION_BIAS, added_preset, gate_and_up_in_turn, router_names
from .transport.deadline import deadline_for, ranks_of, tell_peers_on_error


@tell_peers_on_error
def save_pretrained(engine: DeepSpeedEngine, directory: str | os.PathLike, **kwargs) -> None:
    """Writes config and weights to `directory`, for `AutoModelForCausalLM.from_pretrained(directory)`.

    Collective: every rank calls it. Rank 0 gathers the model in its host memory, one MoE layer or one other tensor at
    a time, and writes it. The weights are those that the model computes with, in its own dtype. Works in every ZeRO
    stage, with converted layers, with DeepSpeed's own, and without MoE layers.

    Args:
        engine: from initialize, over a transformers model.
        directory: a folder. Only rank 0 writes to it.
        kwargs: arguments of transformers' `save_pretrained`, for example max_shard_size.

    Raises:
        TypeError, ValueError: the engine has no transformers model, or splits it by tensor parallelism.
        RuntimeError: rank 0 could not write; raised on every rank.
    """
    model = _model_of(engine)
    skeleton = _skeleton(model)
    specs = _specs(engine, skeleton)
    state = {}
    for name, tensor in _tensors(model, skeleton, specs):
        state[name] = tensor
    outcome = [None]
    if dist.get_rank() == 0:
        try:
            _check_complete(state, skeleton)
            if os.path.isfile(directory):  # transformers would log an error and write nothing
                raise NotADirectoryError("expected a folder, or a path that does not exist yet; this is a file")
            skeleton.save_pretrained(directory, state_dict=state, **kwargs)
        except Exception as error:  # the other ranks wait for rank 0, so they need its error
            outcome = [f"{type(error).__name__}: {error}"]
    with deadline_for(dist.get_world_group(), engine.device, "save_pretrained, while rank 0 writes"):
        dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise RuntimeError(f"the model could not be saved to {os.fspath(directory)}: {outcome[0]}")


def _model_of(engine):
    from transformers import PreTrainedModel

    model = getattr(engine, "module", None)
    if not isinstance(engine, DeepSpeedEngine) or not isinstance(model, PreTrainedModel):
        raise TypeError("save_pretrained takes a DeepSpeed engine over a transformers PreTrainedModel; this is a "
                        f"{type(engine).__name__} over a {type(model).__name__}")
    if engine.autotp_size() > 1:
        raise ValueError(f"the model is split by tensor parallelism (autotp_size {engine.autotp_size()}), which "
                         "save_pretrained does not gather: use engine.save_checkpoint")
    return model


def _skeleton(model):
    """The model as transformers builds it from its config, on the meta device."""
    with torch.device("meta"):
        skeleton = type(model)(copy.deepcopy(model.config)).to(model.dtype)
    if hasattr(model, "generation_config"):  # classifiers have none
        skeleton.generation_config = copy.deepcopy(model.generation_config)
    if hasattr(model, "_weight_conversions"):  # how from_pretrained renamed what it read
        skeleton._weight_conversions = model._weight_conversions
    return skeleton


def _specs(engine, skeleton) -> dict[str, MoELayerSpec]:
    """AutoEP's description of each of its layers in the original model, by the layer's name."""
    names = [name for name, module in engine.module.named_modules() if isinstance(module, AutoEPMoELayer)]
    if not names:
        return {}
    with added_preset(skeleton):
        found = AutoEP(skeleton, engine._config.expert_parallel_config).ep_parser()
    specs = {spec.moe_module_name: spec for spec in found}
    missing = [name for name in names if name not in specs]
    if missing:
        raise ValueError(f"AutoEP finds no MoE layer at {missing[0]} of a new {type(skeleton).__name__}: give the "
                         "engine a model as its config makes it")
    return {name: specs[name] for name in names}


def _tensors(model, skeleton, specs: dict[str, MoELayerSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor in host memory) under Hugging Face's names. Collective; yields on rank 0 only."""
    entries = model.state_dict(keep_vars=True)
    for name, spec in specs.items():
        start = f"{name}."
        own = {key.removeprefix(start): entries.pop(key) for key in list(entries) if key.startswith(start)}
        for key, tensor in _layer_tensors(model.get_submodule(name), skeleton.get_submodule(name), spec, own):
            yield start + key, tensor
    seen = {}
    for name, value in entries.items():
        if id(value) not in seen:  # tied weights once
            seen[id(value)] = _at_rank_0(_whole(value))
        if dist.get_rank() == 0:
            yield name, seen[id(value)]


def _layer_tensors(layer, source, spec: MoELayerSpec, own: dict) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one AutoEP layer under their names in `source`, the layer that AutoEP replaced."""
    gate, correction_bias = router_names(spec)
    shapes = {key: tensor.shape for key, tensor in source.state_dict().items()}
    renamed = {"router.gate.": f"{gate}.", f"router.{CORRECTION_BIAS}": correction_bias,
               "shared_experts.": f"{spec.shared_experts_name}.",
               "shared_experts_gate.": f"{spec.shared_experts_gate_name}."}
    for key, value in own.items():
        for prefix, name in renamed.items():
            if key.startswith(prefix):
                tensor = _at_rank_0(_whole(value))
                if tensor is not None:
                    original = name + key.removeprefix(prefix)
                    yield original, tensor.reshape(shapes.get(original, tensor.shape))
    biases = [_at_rank_0(_whole(own[key])) for role in ("gate", "up", "down")
              if (key := f"expert_biases.{role}") in own]
    weights = [_all_experts(layer, own[f"experts.{key}"]) for key in ("w1", "w2", "w3")]
    if dist.get_rank() == 0:
        for key, tensor in _unpacked(*weights, getattr(source, spec.experts_name), spec):
            yield f"{spec.experts_name}.{key}", tensor
        if biases:
            yield f"{spec.experts_name}.{spec.expert_w1_name}_bias", torch.stack(biases[:2], dim=2).flatten(1)
            yield f"{spec.experts_name}.{spec.expert_w2_name}_bias", biases[2]


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
                yield f"{i}.{name}.weight" if linear else f"{i}.{name}", part[i]


def _whole(value: torch.Tensor) -> torch.Tensor:
    """A parameter as it is without ZeRO-3. Collective."""
    if not hasattr(value, "ds_id"):
        return value.detach()
    with deepspeed.zero.GatheredParameters([value]):
        return value.detach().clone()


def _at_rank_0(tensor: torch.Tensor) -> torch.Tensor | None:
    """In host memory on rank 0, None elsewhere. Devices keep no gathered tensors."""
    return tensor.cpu() if dist.get_rank() == 0 else None


def _all_experts(layer: AutoEPMoELayer, weight: torch.Tensor) -> torch.Tensor | None:
    """[E, ...] of all ranks' experts in host memory on rank 0, None elsewhere. Collective."""
    local = _whole(weight).contiguous()
    if layer.ep_size == 1:
        return _at_rank_0(local)
    if 0 not in ranks_of(layer.ep_group):  # these experts are copies of others
        return None
    parts = [torch.empty_like(local) for _ in range(layer.ep_size)] if dist.get_rank() == 0 else None
    with deadline_for(layer.ep_group, local.device, "save_pretrained, where rank 0 gathers experts"):
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
