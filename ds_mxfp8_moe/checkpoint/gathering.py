# SPDX-License-Identifier: Apache-2.0
"""Collects a model from the ranks that train it, tensor by tensor: all experts, under the names of the model on one
process.

Each rank has its own experts of an MoE block, as w1, w2 and w3 in place of two stacked weights
(recognition/stacked.py). Everything else has its name. Classic layers number the experts of each rank from 0.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.engine import DeepSpeedEngine

from ..config import is_tensor_parallel
from ..layers.adapters import base_prefix, bias_name, is_peft
from ..layers.experts import ExpertBlock, expert_blocks
from ..layers.frozen_experts import frozen_layers, frozen_of
from ..layers.placement import experts_of, in_order
from ..ops.log import log_on_rank_0
from ..recognition.stacked import DOWN, SPREAD_NAMES
from ..transport.deadline import deadline_for, ranks_of

CLASSIC_EXPERT = re.compile(r"(?P<layer>.+)\.experts\.deepspeed_experts\.(?P<index>\d+)\.(?P<rest>.+)")
Wanted = Callable[[str, torch.Tensor], Any]  # gets each tensor with its name in the model; false leaves it out


@dataclass(frozen=True)
class Gather:
    """How a model's tensors are collected. The methods are collective where other ranks hold parts of a tensor.

    Attributes:
        keep: whether this rank gets them.
        on_host: they are copies in host memory. Else they lie on the model's device, and may be the model's own.
        to_all: all ranks get them. Else rank 0 gets those of other ranks.
        where: what calls this, for errors.
        meet: called before each exchange, on every rank as often.
        adapted: see `adapted_weights`. A weight that is tied is gathered once more where it has adapters.
    """

    keep: bool
    on_host: bool = True
    to_all: bool = False
    where: str = "saving the model, where rank 0 gathers experts"
    meet: Callable[[], None] = lambda: None
    adapted: dict[str, torch.nn.Module] = field(default_factory=dict)

    def unpartitioned(self, value: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer as it is without ZeRO-3, on every rank."""
        if not hasattr(value, "ds_id"):
            return value.detach()
        self.meet()
        with deepspeed.zero.GatheredParameters([value]):
            return value.detach().clone()

    def whole(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        """The same. None where it is not kept. `name`: in the model's state dict."""
        return self._placed(self.unpartitioned(value))

    def experts(self, layer: Any, weight: torch.Tensor) -> torch.Tensor | None:
        """[E, ...] of all ranks' experts. None where it is not kept. `layer`: a block."""
        parts = [self._placed(part) for part, in self.parts(layer, [self.unpartitioned(weight).contiguous()])]
        return in_order(layer, parts) if parts else None

    def layer_experts(self, layer: Any, weights: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """`experts` of each of a block's weights w1, w2 and w3. None stands for one that is not wanted."""
        return [None if weight is None else self.experts(layer, weight) for weight in weights]

    def frozen(self, block: ExpertBlock) -> Iterator[torch.Tensor]:
        """This rank's w1, w2 and w3 of a block that holds FrozenWeights."""
        return frozen_of(block.experts).dequantized()

    def parts(self, layer: Any, local: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """What each rank of the layer's group gives as `local`, in rank order, on the device. []: not kept here."""
        if layer.ep_size == 1:
            return [local] if self.keep else []
        self.meet()
        if not self.to_all and 0 not in ranks_of(layer.ep_group):  # these experts are copies of others
            return []
        flat = [tensor.contiguous().view(torch.uint8).flatten() for tensor in local]
        message = flat[0] if len(flat) == 1 else torch.cat(flat)
        received = message.new_empty(layer.ep_size if self.keep else 0, len(message))
        with deadline_for(layer.ep_group, message.device, f"{self.where} (every rank has to make this call)"):
            if self.to_all:
                dist.all_gather_into_tensor(received.flatten(), message, group=layer.ep_group)
            else:
                dist.gather(message, [*received] if self.keep else None, dst=0, group=layer.ep_group)
        pieces = (part.split([len(piece) for piece in flat]) for part in received)
        return [[piece.view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(of_rank, local, strict=True)]
                for of_rank in pieces]

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not self.keep:
            return None
        return tensor.to("cpu", copy=True) if self.on_host else tensor


def whole_state_dict(model: torch.nn.Module, wanted: Wanted = lambda name, value: True,
                     keep: bool | None = None) -> dict | None:
    """The state dict of a model with all experts, under Hugging Face's names, in host memory.

    Collective, unless `needs_peers` is false.

    Args:
        model: a transformers model, a PeftModel around one, or a module that holds one of these. Names begin as in its
            own state dict.
        keep: whether this rank gets the result. By default rank 0 does; the others get None.
    """
    keep = dist.get_rank() == 0 if keep is None else keep
    state = dict(tensors(model, Gather(keep), wanted))
    return state if keep else None


def needs_peers(model: torch.nn.Module) -> bool:
    """Whether other ranks hold parts of the model: their own experts, or their partitions of ZeRO-3."""
    layers = [*dict(expert_blocks(model)).values(), *classic_layers(model).values()]
    return is_partitioned(model) or any(layer.ep_size > 1 for layer in layers)


def is_partitioned(model: torch.nn.Module) -> bool:
    """Whether ZeRO-3 has partitioned the model."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def held_model(model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """The transformers model or PeftModel that a module is or holds, and its name there ("" if it is the module).

    Of several, it is the one that has spread experts.

    Raises:
        TypeError: there is none, or more than one. Or it has classic MoE layers, which transformers does not know.
    """
    from transformers import PreTrainedModel

    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if (is_peft(module) or isinstance(module, PreTrainedModel)) and not any(
                f"{name}.".startswith(f"{outer}." if outer else "") for outer in found):
            found[name] = module
    held = [(one, name) for name, one in found.items() if len(found) == 1 or any(expert_blocks(one))]
    classic = any(layer.ep_size > 1 for layer in classic_layers(model).values())
    if len(held) != 1 or classic:
        call = "engine.save_checkpoint" if any(expert_blocks(model)) else "engine.save_16bit_model"
        raise TypeError("expected a transformers model, a PeftModel around one, or a module that holds one of these; "
                        f"the engine has a {type(model).__name__}, which "
                        + ("has classic MoE layers" if classic else f"holds {len(held)} of them")
                        + f". Its weights are written by {call}")
    return held[0]


def base_of(model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """The transformers model in `held_model`, and its name in `model`."""
    held, _ = held_model(model)
    base = held.get_base_model() if is_peft(held) else held
    return base, next(name for name, module in model.named_modules() if module is base)


def beside_held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module that are not the `held_model`'s, such as a value head's, by their names."""
    _, name = held_model(model)
    return {} if not name else {key: value for key, value in model.state_dict(keep_vars=True).items()
                                if not key.startswith(f"{name}.")}


def restore_persistent(engine: DeepSpeedEngine) -> None:
    """Gathers the parameters that ZeRO-3 keeps whole, and that gathering has partitioned, as DeepSpeed's own
    consolidation does. Collective: every call that gathers a model ends with it."""
    if is_partitioned(engine.module) and hasattr(engine.optimizer, "checkpoint_event_epilogue"):
        engine.optimizer.checkpoint_event_epilogue()


def given_engine(given: Any) -> DeepSpeedEngine:
    """The engine of a Trainer, or the one that is given.

    Raises:
        TypeError: there is none.
        RuntimeError: AutoTP has split the model.
    """
    engine = given
    if not isinstance(given, torch.nn.Module) and hasattr(given, "model_wrapped"):  # a Trainer
        engine = given.model_wrapped
        if not isinstance(engine, DeepSpeedEngine):
            raise TypeError(f"the {type(given).__name__} has no DeepSpeed engine yet: call its train() first, or let "
                            "the model save itself by model.save_pretrained")
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError("expected the Trainer or the DeepSpeed engine (what ds_mxfp8_moe.initialize or "
                        f"accelerator.prepare returned); this is a {type(given).__name__}")
    refuse_tensor_parallelism(engine)
    return engine


def refuse_tensor_parallelism(engine: DeepSpeedEngine) -> None:
    """Raises RuntimeError if AutoTP has split the model, which this file does not gather."""
    if is_tensor_parallel(engine):
        raise RuntimeError("the model is split by tensor parallelism (autotp_size), which is not gathered here: use "
                           "engine.save_checkpoint")


def skeleton_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model of `base_of` as transformers builds it from its config, on the meta device."""
    model, _ = base_of(model)
    with torch.device("meta"):
        skeleton = type(model)(copy.deepcopy(model.config)).to(model.dtype)
    if hasattr(model, "generation_config"):  # classifiers have none
        skeleton.generation_config = copy.deepcopy(model.generation_config)
    conversions = getattr(model, "_weight_conversions", None)  # how from_pretrained renamed what it read
    done = [type(one).__name__ for of in conversions or () for one in getattr(of, "operations", ())]
    if conversions is not None and not any(name.endswith("Dequantize") for name in done):  # which cannot be undone
        skeleton._weight_conversions = conversions
    return skeleton


def tensors(model: torch.nn.Module, gather: Gather, wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) under Hugging Face's names, one MoE layer or one other tensor at a time. Collective.
    Nothing where not `gather.keep`. `wanted`: see `whole_state_dict`.
    """
    entries = {name: value for name, value in model.state_dict(keep_vars=True).items() if wanted(name, value)}
    dequantized = {name for name in frozen_layers(model) if wanted(f"{name}.experts.w1", torch.empty(0))}
    if dequantized and gather.on_host:
        log_on_rank_0(f"mxfp8_moe: the frozen experts of {len(dequantized)} layers, which are held quantized, are "
                        "saved in the model's dtype, with the values that they compute with")
    for name, block in expert_blocks(model):
        own = {key: entries.pop(f"{name}.experts.{key}", None) for key in SPREAD_NAMES}
        entries.pop(bias_name(name, block), None)  # transformers has no place for it
        weights = gather.frozen(block) if name in dequantized else own.values()
        for key, tensor in _stacks(block, gather.layer_experts(block, weights)):
            yield f"{name}.experts.{base_prefix(block)}{key}", tensor
    places = {name: (id(value), gather.adapted.get(name)) for name, value in entries.items()}
    tied, uses = {}, Counter(places.values())
    for name, value in entries.items():
        place = places[name]
        tensor = tied[place] if place in tied else gather.whole(name, value)
        if uses[place] > 1:
            tied[place] = tensor
        if gather.keep:
            yield name, tensor


def _stacks(block: ExpertBlock, weights: list[torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers' stacked weights of a block, under their names in the module of experts, of w1, w2 and w3."""
    layout, (w1, w2, w3) = block.experts.layout, weights
    if w1 is not None:
        yield layout.up, layout.join_up(w1, w3)
    if w2 is not None:
        yield DOWN, layout.split_down(w2).contiguous()


def classic_layers(model: torch.nn.Module) -> dict[str, MOELayer]:
    """The inner layers of `deepspeed.moe.layer.MoE` by their names in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MOELayer)}


def classic_tensors(model: torch.nn.Module, gather: Gather, wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a model with classic layers, as it is with `ep_size=1`. Collective. Nothing where not
    `gather.keep`."""
    layers = classic_layers(model)
    for name, value in model.state_dict(keep_vars=True).items():
        if not wanted(name, value):
            continue
        found = CLASSIC_EXPERT.fullmatch(name)
        layer = layers.get(found["layer"]) if found else None
        if layer is None:
            tensor = gather.whole(name, value)
            if gather.keep:
                yield name, tensor
            continue
        of_ranks = gather.parts(layer, [gather.unpartitioned(value)])
        for rank, (tensor, ) in enumerate(of_ranks):
            number = experts_of(layer, rank)[int(found["index"])]
            name = f"{found['layer']}.experts.deepspeed_experts.{number}.{found['rest']}"
            yield name, tensor.to("cpu" if gather.on_host else tensor.device, copy=True)


def check_complete(state: dict, skeleton) -> None:
    """Raises RuntimeError unless these are the model's tensors, all of them."""
    wanted = skeleton.state_dict()
    differing = [name for name in {**wanted, **state}
                 if name not in wanted or name not in state or wanted[name].shape != state[name].shape]
    if differing:
        given = {name: tuple(state[name].shape) if name in state else None for name in differing[:4]}
        raise RuntimeError(f"{len(differing)} tensors differ from those of {type(skeleton).__name__}: {given} ... "
                           "(None: missing). engine.save_16bit_model writes the model with what was added to it")


