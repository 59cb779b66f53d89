# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of layers that plain AutoEP made in the place of MoE blocks.

Such a layer has names of its own for a block's tensors, but for the weights of experts:

    router.gate.*, router.e_score_correction_bias     the block's router
    shared_experts.*, shared_experts_gate.*           the block's shared experts
    expert_bias                                       of the load balancing, which blocks have among their experts,
                                                      if at all

A tensor's name in the block is the one of the same size that ends alike. Some layers have their router under the name
of the block's, too, so that these checkpoints hold it twice.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, PARAM
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ..layers.experts import expert_blocks
from ..ops.log import log_on_rank_0
from ..recognition.stacked import shape_of

BALANCE, ROUTER_BIAS = "expert_bias", "router.e_score_correction_bias"
EARLIER = ("router.gate.", ROUTER_BIAS, "shared_experts.", "shared_experts_gate.", BALANCE)


class EarlierNames:
    """The names of a checkpoint that a model's blocks do not have.

    Attributes:
        sources: present name -> the earlier one.
        without_place: earlier names of other tensors, which have no name in the model.
    """

    def __init__(self, model: nn.Module, sizes: Mapping[str, int]):
        """`sizes`: how many values each tensor of the checkpoint has, by name."""
        self.sources: dict[str, str] = {}
        self.without_place: list[str] = []
        self._twins: set[str] = set()  # of a router's tensors
        for name, block in expert_blocks(model):
            start = f"{name}." if name else ""
            own = {key: prod(shape_of(value)) for key, value in block.state_dict(keep_vars=True).items()}
            given = {key.removeprefix(start): size for key, size in sizes.items() if key.startswith(start)}
            twins = {key for key in given
                     if not key.startswith(EARLIER) and f"router.{key.partition('.')[2]}" in given}
            given = {key: size for key, size in given.items() if key not in twins}
            earlier = {key: size for key, size in given.items() if key.startswith(EARLIER) and key not in own}
            if not earlier:
                continue
            self._twins |= {start + key for key in twins}
            free = {key: size for key, size in own.items() if key not in given}
            places = _places(earlier, free)
            self.sources |= {start + present: start + name for present, name in places.items()}
            self.without_place += [start + key for key in earlier if key not in places.values()]

    def renamed(self, name: str) -> str:
        """The present name of a tensor that has one."""
        return next((present for present, earlier in self.sources.items() if name == earlier), name)

    def values(self, state: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """A state dict with present names. `shapes`: of the model's tensors, by present name."""
        gone = self._twins | {*self.sources.values()}
        gone |= {name for name in self.without_place if name.endswith(f".{BALANCE}")}
        found = {name: value for name, value in state.items() if name not in gone}
        for present, earlier in self.sources.items():
            if earlier in state:
                value = state[earlier]
                shape = shapes.get(present, value.shape)
                found[present] = value.reshape(shape) if value.numel() == prod(shape) else value
        return found

    def keep_order(self, groups: Iterable[Iterable[str]], model: nn.Module) -> bool:
        """Whether groups of an optimizer hold the model's parameters in the order that they have in the model."""
        places = {name: i for i, (name, _) in enumerate(model.named_parameters())}
        for group in groups:
            present = [places.get(self.renamed(name), -1) for name in group]
            if present != sorted(set(present)) or -1 in present:
                return False
        return True


def _places(earlier: dict[str, int], free: dict[str, int]) -> dict[str, str]:
    """Name in the block -> earlier name in it. `free`: names that have no tensor yet, and sizes."""
    places: dict[str, str] = {}
    if BALANCE in earlier and f"experts.{BALANCE}" in free:
        places[f"experts.{BALANCE}"] = BALANCE
    alike = [(_count_equal_ends(key, name), key, name) for key, size in earlier.items()
             for name, other in free.items() if size == other and not name.startswith("experts.") and key != BALANCE]
    taken: set[str] = set()
    for equal, key, name in sorted(alike, key=lambda one: -one[0]):
        if name not in places and key not in taken and (equal or key == ROUTER_BIAS):
            places[name] = key
            taken.add(key)
    return places


def _count_equal_ends(one: str, other: str) -> int:
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(one.count("."), other.count(".")) + 1)


def present_checkpoint(engine: DeepSpeedEngine, checkpoint: dict, load_optimizer: bool) -> dict:
    """A checkpoint that DeepSpeed has read, with the names that the engine's model has.

    Args:
        load_optimizer: whether the optimizer's states are loaded, too.

    Raises:
        RuntimeError: the optimizer's states lie in another order than this engine's.
    """
    sizes, groups = _sizes(checkpoint)
    names = EarlierNames(engine.module, sizes)
    if not names.sources and not names.without_place:
        return checkpoint
    experts = {name: is_moe_param(p) for name, p in engine.module.named_parameters() if p.requires_grad}
    ordered = [[name for name in group if experts.get(names.renamed(name)) is of_experts]
               for group in groups or [sizes] for of_experts in (False, True)]
    if (load_optimizer or engine.zero_optimization_stage() == 3) and not names.keep_order(ordered, engine.module):
        raise RuntimeError(
            "it was saved by layers that AutoEP made, whose parameters lie in another order in the optimizer. Convert "
            "the checkpoint by DeepSpeed's ds_to_universal, and load that. Or, except in ZeRO-3, pass "
            "load_optimizer_states=False, which loads the weights alone")
    if dropped := [name for name in names.without_place if name.endswith(f".{BALANCE}")]:
        log_on_rank_0(f"mxfp8_moe: the checkpoint's {dropped[0]}, by which AutoEP balanced the experts' load, is "
                        "left out: the model's own router has none")
    changed = {**checkpoint, "module": names.values(checkpoint["module"], _shapes(engine.module))}
    if (frozen := checkpoint.get(FROZEN_PARAM_FRAGMENTS)) is not None:
        changed[FROZEN_PARAM_FRAGMENTS] = names.values(frozen, {})
    return changed


def present_buffers(model: nn.Module, checkpoint: dict) -> dict[str, torch.Tensor]:
    """What a checkpoint has of a model's buffers, by the names that they have in the model's state dict."""
    names = EarlierNames(model, _sizes(checkpoint)[0])
    found = names.values(checkpoint["module"], _shapes(model))
    return {name: found[name] for name, value in model.state_dict(keep_vars=True).items()
            if name in found and not isinstance(value, nn.Parameter)}


def _sizes(checkpoint: dict) -> tuple[dict[str, int], list[dict[str, int]]]:
    """How many values each tensor of a checkpoint has, by name, and the same for each group of the optimizer."""
    sizes = {name: value.numel() for name, value in checkpoint["module"].items() if isinstance(value, torch.Tensor)}
    groups = [{name: prod(shape) for name, shape in group.items()} for group in checkpoint.get("param_shapes") or ()]
    for group in groups:
        sizes |= group  # of parameters that ZeRO-3 has partitioned, the module has no values
    return sizes, groups


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict(keep_vars=True).items()}


@contextmanager
def folders_found(engine: DeepSpeedEngine, folder: Path) -> Iterator[None]:
    """Inside the context, the engine finds the folders of a universal checkpoint that have earlier names.

    DeepSpeed looks for a folder by the name that it remembers of a parameter.

    Args:
        folder: of the tag.
    """
    places = folder / "zero"
    sizes = {place.parent.relative_to(places).as_posix(): _size(place) for place in places.rglob("fp32.pt")}
    names = EarlierNames(engine.module, sizes)
    remembered: dict[Any, str] = engine.param_names
    before = dict(remembered)
    remembered.update({parameter: names.sources.get(name, name) for parameter, name in before.items()})
    try:
        yield
    finally:
        remembered.update(before)


def _size(file: Path) -> int:
    """Of a tensor in a universal checkpoint. From ZeRO-3 it is flat."""
    saved = torch.load(file, map_location="meta", weights_only=False)
    return (saved[PARAM] if isinstance(saved, dict) else saved).numel()
