# SPDX-License-Identifier: Apache-2.0
"""The names that a model's tensors have in published checkpoints.

transformers stacks the experts of a layer as it loads a checkpoint, and renames other tensors. It undoes both as it
saves. What it does with a state dict of marked tensors tells the names: of each matrix of each expert, and of all
other tensors. Models with classic layers are the user's own, and keep their names.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ..compat.private_names import line_about, missing
from ..compute import casts
from ..compute.block_fp8 import slice_rows
from ..compute.formula import LowRank
from ..compute.mx import MXTensor
from ..config import Recipe
from ..ffn.frozen_weights import FrozenWeights
from ..layers.adapters import adapted_weights, is_peft, merged_name
from ..layers.classic import MXFP8MOELayer
from ..layers.experts import ExpertBlock, MXFP8Experts, expert_blocks
from ..layers.frozen_experts import frozen_of
from .gathering import (
    Gather,
    base_of,
    beside_held,
    check_complete,
    classic_layers,
    classic_tensors,
    held_model,
    skeleton_of,
    tensors,
)

SPREAD_NAME_OF = {"gate": "w1", "up": "w3", "down": "w2"}  # role of an expert's weight -> its name in spread experts
NAMES = "_mxfp8_published_names"  # of an engine that has exported: its Names
_FFN, _HIDDEN = 2, 3  # of marked experts


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """The experts of one layer, where each of their matrices is a tensor of its own in published checkpoints.

    Attributes:
        layer: a block, or a classic layer's inner.
        weights: role -> this rank's experts: one tensor [L, N, K], L matrices [N, K], or a tuple of two tensors, the
            upper and the lower rows of each matrix. FrozenRows, where they are held quantized alone.
        names: role -> the name of each expert's matrix, for all experts of the layer.
        own_names: of `weights`, in the engine's model.
        recipe: with which the layer computes. None: it is not converted, or always computes in bf16.
    """

    layer: Any
    weights: dict[str, Any]
    names: dict[str, list[str]]
    own_names: list[str]
    recipe: Recipe | None

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Role -> [N, K]."""
        return {role: _shape_of_each(weights) for role, weights in self.weights.items()}


@dataclass(frozen=True, eq=False)
class FrozenRows:
    """Rows [first, end) of the frozen weights of a GEMM, [L, N, K], whose experts come as tiles of MXFP8.

    `adapters`: see `FrozenWeights.tiles`.
    """

    frozen: FrozenWeights
    gemm: str
    first: int
    end: int
    adapters: Mapping[str, LowRank] | None = None

    @property
    def shape(self) -> torch.Size:
        E, H, F = self.frozen.sizes
        return torch.Size((E, self.end - self.first, F if self.gemm == "down" else H))

    def __getitem__(self, experts: slice) -> MXTensor:
        return slice_rows(self.frozen.tiles(self.gemm, experts, self.adapters), self.first, self.end)

    def plain(self, experts: slice) -> torch.Tensor:
        """Dequantized. A cut through tiles, as where gate ends, rounds nothing."""
        tiles = self.frozen.tiles(self.gemm, experts, self.adapters)
        return casts.dequantize(tiles, self.frozen.dtype)[:, self.first:self.end].contiguous()


def _shape_of_each(weights: Any) -> torch.Size:
    if isinstance(weights, tuple):
        upper, lower = map(_shape_of_each, weights)
        return torch.Size((upper[0] + lower[0], upper[1]))
    return weights[0].shape if isinstance(weights, list) else getattr(weights, "ds_shape", weights.shape)[1:]


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a model's tensors.

    Attributes:
        skeleton: the model as transformers builds it. None: it is no transformers model.
        others: name in the skeleton -> published name, for all tensors but `converted` and `experts`.
        converted: name in the skeleton -> published names, for tensors of which published ones are made one by one, as
            by a transposition.
        tied: names in the skeleton of weights that checkpoints hold under another name.
        stacked: published names of tensors that hold the experts of a whole layer.
        experts: layer -> role -> published name for each expert, where checkpoints hold experts one by one.
    """

    skeleton: torch.nn.Module | None = None
    others: dict[str, str] = field(default_factory=dict)
    converted: dict[str, list[str]] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    stacked: list[str] = field(default_factory=list)
    experts: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def has_head(self, model: torch.nn.Module) -> bool:
        """Whether the weight of the model's output embeddings is among the tensors."""
        head = model.get_output_embeddings()
        names = {f"{name}.weight" for name, module in model.named_modules() if module is head}
        return bool(names & self.others.keys() - self.tied)

    def unconverted_modules(self) -> list[str]:
        """The modules of all tensors but experts. One that also holds experts, beside a tensor of its own, is not
        among them."""
        of_experts = {name[:dot.start()] for roles in self.experts.values() for names in roles.values()
                      for name in names for dot in re.finditer(r"\.", name)}
        others = chain(self.others.values(), *self.converted.values())
        return sorted({name.rpartition(".")[0] for name in others} - of_experts)


@dataclass(frozen=True)
class Published:
    """What a published checkpoint of an engine's model holds.

    Attributes:
        stacks: the experts that it holds one by one.
        adapted: see `adapted_weights`.
        beside: see `beside_held`.
    """

    engine: DeepSpeedEngine
    names: Names
    stacks: list[ExpertStack]
    adapted: dict[str, torch.nn.Module] = field(default_factory=dict)
    beside: dict[str, torch.Tensor] = field(default_factory=dict)

    def rest(self, gather: Gather) -> Iterator[tuple[str, torch.Tensor]]:
        """(published name, tensor) of all but `stacks`, one by one. Collective. Nothing where not `gather.keep`.
        """
        of_stacks = {name for stack in self.stacks for name in stack.own_names}
        for name, tensor in _tensors(self.engine.module, self.names, gather, of_stacks):
            if name in self.names.converted:
                yield from _reverted(self.names.skeleton, {name: tensor}).items()
            elif name not in self.names.tied:
                yield self.names.others.get(name, name), tensor
        for name, value in self.beside.items():
            tensor = gather.whole(name, value)
            if gather.keep:
                yield name, tensor


def published(engine: DeepSpeedEngine) -> Published:
    """What a checkpoint of this engine's model holds. Not collective.

    Raises:
        TypeError: the model is none of transformers, and has no classic layers.
        RuntimeError: tensors were added to the model, or transformers stores them in another form.
    """
    if isinstance(engine, PipelineEngine):
        raise TypeError("the engine holds one stage of a pipeline, which is no model: use engine.save_checkpoint")
    if classic_layers(engine.module) and not is_peft(engine.module):
        return Published(engine, Names(), _classic_stacks(engine.module))
    if missing("exporting"):
        raise RuntimeError(line_about("exporting"))
    if NAMES not in vars(engine):
        vars(engine)[NAMES] = _names(engine)
    names, layers = vars(engine)[NAMES], dict(expert_blocks(engine.module))
    stacks = [ExpertStack(layers[name], _spread_weights(layers[name].experts), roles,
                          [f"{name}.experts.{key}" for key in SPREAD_NAME_OF.values()], _recipe(layers[name]))
              for name, roles in names.experts.items()]
    return Published(engine, names, stacks, adapted_weights(engine.module), beside_held(engine.module))


def _spread_weights(experts: MXFP8Experts) -> dict[str, Any]:
    """Role -> [L, N, K]: parameters, or FrozenRows where the experts hold no parameters."""
    frozen, gated = frozen_of(experts), experts.has_gate
    if frozen is None:
        weights = {role: getattr(experts, key) for role, key in SPREAD_NAME_OF.items()}
        return weights if gated else {"up": (weights["gate"], weights["up"]), "down": weights["down"]}
    _, hidden_size, ffn_size = frozen.sizes
    of_up = {"gate": (0, ffn_size), "up": (ffn_size, 2 * ffn_size)} if gated else {"up": (0, ffn_size)}
    return {role: FrozenRows(frozen, "up", *rows) for role, rows in of_up.items()} | {
        "down": FrozenRows(frozen, "down", 0, hidden_size)}


def _classic_stacks(model: torch.nn.Module) -> list[ExpertStack]:
    stacks = []
    for name, layer in classic_layers(model).items():
        if not isinstance(layer, MXFP8MOELayer):
            continue
        formula, experts = layer.mxfp8_settings.formula, layer.experts.deepspeed_experts
        roles = {role: parameter for role, parameter in formula.names().items() if role in SPREAD_NAME_OF}
        of_all = {role: [f"{name}.experts.deepspeed_experts.{i}.{parameter}"
                         for i in range(layer.num_local_experts * layer.ep_size)]
                  for role, parameter in roles.items()}
        stacks.append(ExpertStack(
            layer, {role: [one.get_parameter(parameter) for one in experts] for role, parameter in roles.items()},
            of_all, [one for names in of_all.values() for one in names[:layer.num_local_experts]], _recipe(layer)))
    return stacks


def _recipe(layer) -> Recipe | None:
    settings = vars(layer.experts if isinstance(layer, ExpertBlock) else layer).get("mxfp8_settings")
    quantizes = settings is not None and settings.recipe.quantize_gemm and not math.isinf(
        settings.min_tokens_per_expert)
    return settings.recipe if quantizes else None


def _tensors(model: torch.nn.Module, names: Names, gather: Gather,
             without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the skeleton, tensor) of all of the `held_model` but adapters, which are merged, and `without`.

    `without`: names in the engine's model.
    """
    if names.skeleton is None:
        yield from classic_tensors(model, gather, lambda name, value: name not in without)
        return
    (held, _), (_, prefix), without = held_model(model), base_of(model), {*without, *beside_held(model)}
    for name, tensor in tensors(model, gather,
                                lambda name, value: name not in without and merged_name(name, held, prefix)):
        yield merged_name(name, held, prefix), tensor


@dataclass(frozen=True)
class _Marks(Gather):
    """Gathers nothing. Experts are small tensors of numbers that tell them apart, others are of their shape on `meta`.
    """

    model: torch.nn.Module = None
    known: list[tuple[str, str, int]] = field(default_factory=list)  # layer, role and expert of each number

    def whole(self, name, value):
        return torch.empty(getattr(value, "ds_shape", value.shape), dtype=value.dtype, device="meta")

    def layer_experts(self, layer, weights):
        name = next(name for name, one in expert_blocks(self.model) if one is layer)
        first = {}
        for role in _roles(layer):
            first[role] = len(self.known)
            self.known.extend((name, role, i) for i in range(layer.num_experts))
        return [torch.arange(first[role], first[role] + layer.num_experts).view(-1, 1, 1).repeat(1, *shape)
                for role, shape in ((_roles(layer)[0], (_FFN, _HIDDEN)), ("down", (_HIDDEN, _FFN)),
                                    ("up", (_FFN, _HIDDEN)))]


def _roles(block: ExpertBlock) -> tuple[str, ...]:
    """Of the matrices that each expert has, as `_spread_weights` names them."""
    return ("gate", "up", "down") if block.experts.has_gate else ("up", "down")


def _mark_shape(block: ExpertBlock, role: str) -> tuple[int, int]:
    return (_HIDDEN, _FFN) if role == "down" else (_FFN * (1 if block.experts.has_gate else 2), _HIDDEN)


def _reverted(skeleton: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers saves of a state dict."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(skeleton, state)


def _names(engine: DeepSpeedEngine) -> Names:
    """Of a transformers model."""
    skeleton, layers = skeleton_of(engine.module), dict(expert_blocks(engine.module))
    found = Names(skeleton=skeleton)
    marks = _Marks(keep=True, on_host=False, model=engine.module, adapted=adapted_weights(engine.module))
    own, marked, name_of, tied = skeleton.state_dict(), {}, {}, set()
    for name, mark in _tensors(engine.module, found, marks):
        if id(mark) in name_of:
            tied.add(name)
            mark = torch.empty_like(mark)
        marked[name] = mark
        name_of[id(mark)] = name
    check_complete({name: mark if mark.is_meta else own.get(name, mark) for name, mark in marked.items()}, skeleton)
    others, experts = {}, {name: {role: {} for role in _roles(layer)} for name, layer in layers.items()}
    saved = _reverted(skeleton, dict(marked))
    for name, mark in saved.items():
        if not mark.is_meta and mark.dim() == 2 and bool((mark == mark[0, 0]).all()):
            layer, role, expert = marks.known[mark[0, 0]]
            if mark.shape == _mark_shape(layers[layer], role):
                experts[layer][role][expert] = name
        elif id(mark) in name_of:
            others[name_of[id(mark)]] = name
    one_by_one = all(len(of_role) == layers[layer].num_experts
                     for layer, roles in experts.items() for of_role in roles.values())
    if not one_by_one:
        experts = {}
    published = [*others.values(), *(name for roles in experts.values() for of_role in roles.values()
                                     for name in of_role.values())]
    lost = [name for name, mark in marked.items() if name not in others and (mark.is_meta or not one_by_one)]
    converted = {name: list(_reverted(skeleton, {name: torch.empty_like(own[name], device="meta")})) for name in lost}
    if sorted(chain(published, *converted.values())) != sorted(saved):
        raise RuntimeError(f"published checkpoints of {skeleton.config.model_type} hold {lost[0]} in a form that this "
                           "function does not know. ds_mxfp8_moe.save_pretrained(engine, directory) writes the model "
                           "without quantization")
    of_stacks = {name: converted.get(name, [others.get(name)]) for name, mark in marked.items() if not mark.is_meta}
    return replace(
        found, others=others, converted=converted, tied=tied,
        stacked=[] if one_by_one else list(chain(*of_stacks.values())),
        experts={layer: {role: [of_role[i] for i in range(len(of_role))] for role, of_role in roles.items()}
                 for layer, roles in experts.items()})
