# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of layers that AutoEP made in the place of MoE blocks: plain DeepSpeed's, and earlier ones of ours.

Such a layer has names of its own for a block's tensors, but for the weights of experts:

    router.gate.*, router.e_score_correction_bias     the block's router
    shared_experts.*, shared_experts_gate.*           the block's shared experts
    expert_biases.gate, .up, .down                    the stacked biases of its experts
    expert_adapters.wrapper.*                         PEFT's adapters of its experts
    expert_bias                                       of the load balancing, which blocks have among their experts,
                                                      if at all

A tensor's name in the block is the one of the same size that ends alike. Some layers have their router under the name
of the block's, too, so that these checkpoints hold it twice.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, PARAM
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ..layers.experts import ExpertBlock, expert_blocks
from ..ops.log import log_on_rank_0
from ..recognition.stacked import DOWN, shape_of

ADAPTERS, BIASES, BALANCE = "expert_adapters.wrapper.", "expert_biases.", "expert_bias"
ROUTER_BIAS = "router.e_score_correction_bias"
EARLIER = ("router.gate.", ROUTER_BIAS, "shared_experts.", "shared_experts_gate.", ADAPTERS, BIASES, BALANCE)


class EarlierNames:
    """The names of a checkpoint that a model's blocks do not have.

    Attributes:
        sources: present name -> the earlier ones. Two of them are the gate's and up's.
        without_place: earlier names of other tensors, which have no name in the model.
    """

    def __init__(self, model: nn.Module, sizes: Mapping[str, int]):
        """`sizes`: how many values each tensor of the checkpoint has, by name."""
        self.sources: dict[str, tuple[str, ...]] = {}
        self.without_place: list[str] = []
        self._blocks: dict[str, ExpertBlock] = {}
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
            places = _places(block, earlier, free)
            for present, names in places.items():
                self.sources[start + present] = tuple(start + one for one in names)
                self._blocks[start + present] = block
            placed = {one for names in places.values() for one in names}
            self.without_place += [start + key for key in earlier if key not in placed]

    def renamed(self, name: str) -> str:
        """The present name of a tensor that has one."""
        return next((present for present, earlier in self.sources.items() if name in earlier), name)

    def values(self, state: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """A state dict with present names. `shapes`: of the model's tensors, by present name."""
        gone = self._twins | {one for names in self.sources.values() for one in names}
        gone |= {name for name in self.without_place if name.endswith(f".{BALANCE}")}
        found = {name: value for name, value in state.items() if name not in gone}
        for present, earlier in self.sources.items():
            if all(name in state for name in earlier):
                value = self.joined(present, [state[name] for name in earlier])
                shape = shapes.get(present, value.shape)
                found[present] = value.reshape(shape) if value.numel() == prod(shape) else value
        return found

    def joined(self, present: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that consists of those with earlier names."""
        if len(parts) == 1:
            return parts[0]
        block = self._blocks[present]
        return block.experts.layout.join_halves(*(part.reshape(block.num_experts, -1) for part in parts))

    def keep_order(self, groups: Iterable[Iterable[str]], model: nn.Module) -> bool:
        """Whether groups of an optimizer hold the model's parameters in the order that they have in the model."""
        places = {name: i for i, (name, _) in enumerate(model.named_parameters())}
        for group in groups:
            present = [places.get(self.renamed(name), -1) for name in group]
            if present != sorted(set(present)) or -1 in present:
                return False
        return True


def _places(block: ExpertBlock, earlier: dict[str, int], free: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """Name in the block -> earlier names in it. `free`: names that have no tensor yet, and sizes."""
    places: dict[str, tuple[str, ...]] = {}
    for gemm, parts in ((block.experts.layout.up, ("gate", "up")), (DOWN, ("down", ))):
        names = tuple(f"{BIASES}{part}" for part in parts)
        bias = next((key for key in free if key.startswith("experts.") and key.endswith(f"{gemm}_bias")), None)
        if bias is not None and all(name in earlier for name in names):
            places[bias] = names
    if BALANCE in earlier and f"experts.{BALANCE}" in free:
        places[f"experts.{BALANCE}"] = (BALANCE, )
    for key in earlier:
        if key.startswith(ADAPTERS) and (name := f"experts.{key.removeprefix(ADAPTERS)}") in free:
            places[name] = (key, )
    alike = [(_count_equal_ends(key, name), key, name) for key, size in earlier.items()
             for name, other in free.items() if size == other and not name.startswith("experts.")
             and not key.startswith((ADAPTERS, BIASES)) and key != BALANCE]
    taken: set[str] = set()
    for equal, key, name in sorted(alike, key=lambda one: -one[0]):
        if name not in places and key not in taken and (equal or key == ROUTER_BIAS):
            places[name] = (key, )
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
    sizes = {name: value.numel() for name, value in checkpoint["module"].items() if isinstance(value, torch.Tensor)}
    groups = [{name: prod(shape) for name, shape in group.items()} for group in checkpoint.get("param_shapes") or ()]
    for group in groups:
        sizes |= group  # of parameters that ZeRO-3 has partitioned, the module has no values
    names = EarlierNames(engine.module, sizes)
    if not names.sources and not names.without_place:
        return checkpoint
    experts = {name: is_moe_param(p) for name, p in engine.module.named_parameters() if p.requires_grad}
    ordered = [[name for name in group if experts.get(names.renamed(name)) is of_experts]
               for group in groups or [sizes] for of_experts in (False, True)]
    if (load_optimizer or engine.zero_optimization_stage() == 3) and (
            not names.keep_order(ordered, engine.module) or any(len(one) > 1 for one in names.sources.values())):
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
    with TemporaryDirectory() as made:
        for parameter, name in before.items():
            earlier = names.sources.get(name, ())
            if len(earlier) == 1:
                remembered[parameter] = earlier[0]
            elif earlier:  # an absolute path stays what it is when it is joined
                remembered[parameter] = str(_join(names, name, [places / one for one in earlier], Path(made, name)))
        try:
            yield
        finally:
            remembered.update(before)


def _tensor_of(saved: Any) -> torch.Tensor:
    """What a file of a universal checkpoint holds. From ZeRO-3 it is flat."""
    return saved[PARAM] if isinstance(saved, dict) else saved


def _size(file: Path) -> int:
    return _tensor_of(torch.load(file, map_location="meta", weights_only=False)).numel()


def _join(names: EarlierNames, name: str, folders: list[Path], place: Path) -> Path:
    place.mkdir()
    for file in folders[0].glob("*.pt"):
        parts = [torch.load(folder / file.name, weights_only=False) for folder in folders]
        saved = parts[0]
        if file.stem != "step":
            saved = names.joined(name, [_tensor_of(part) for part in parts])
            saved = {**parts[0], PARAM: saved} if isinstance(parts[0], dict) else saved.flatten()
        torch.save(saved, place / file.name)
    return place
