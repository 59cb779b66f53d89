# SPDX-License-Identifier: Apache-2.0
"""Spreads a model's stacked experts over expert-parallel ranks while DeepSpeed makes its engine.

DeepSpeed makes the process groups, asks its class AutoEP which MoE blocks there are, and lets it replace them. Inside
`spread_experts`, `_Spreading` stands for that class. It replaces a block's experts and leaves the block.

A block's experts are trained, in the model's dtype, or frozen and held in MXFP8 or MXFP4 alone ("frozen_experts"). The
weights of frozen experts go to the device one expert after the other and are quantized there, and the block's own are
freed before the next block. So the start takes no memory of the host beside the user's model. On the device it takes
the memory of the quantized experts, which stay, and of two copies of one expert in the model's dtype. If ZeRO-3 has
partitioned the parameters, a layer is gathered at once.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject import auto_ep
from deepspeed.module_inject.auto_ep_layer import ReplacementSourceMap
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from torch import nn

from ..compat.patches import lent
from ..compute.formula import DTYPES
from ..config import ConfigError, MXFP8MoEConfig, is_tensor_parallel
from ..ffn.frozen_weights import FORMATS, FrozenWeights
from ..layers.adapters import check_adapters, has_adapters, register_factors, take_wrappers, unwrapped
from ..layers.experts import expert_blocks, let_zero3_reduce, spread
from ..layers.held_experts import HeldExperts
from ..ops.log import log_on_rank_0
from ..recognition.stacked import DOWN, SPREAD_NAMES, Layout, is_stacked, shape_of
from ..transport.deadline import failure_in_world, ranks_of
from .convert import alike, shared_parameters


@dataclass(frozen=True)
class Found:
    """A MoE block in which AutoEP may replace the experts. DeepSpeed's checks read some of these attributes.

    Attributes:
        moe_module_name: the block's name in the model.
        experts: the module of stacked experts, without PEFT's wrappers.
        wrapper: the outermost of PEFT's wrappers around it. None: there is none.
    """

    moe_module_name: str
    num_experts: int
    experts: nn.Module
    wrapper: nn.Module | None = None
    score_apply: str = "post"
    num_expert_groups: int | None = None
    num_limited_groups: int | None = None


def spread_experts(engine: DeepSpeedEngine, config: MXFP8MoEConfig, plain: Callable, model: nn.Module, *args,
                   **kwargs) -> Any:
    """`plain` is the engine's own call of AutoEP. With it, stacked experts are spread as MXFP8Experts.

    Raises:
        ConfigError: the model is in another engine, or its experts cannot be spread.
        RuntimeError: on every rank, if one of them cannot hold the experts of a layer.
    """
    if any(expert_blocks(model)):
        raise ConfigError("the model is in an engine already, which has spread its experts over the ranks. Make a new "
                          "model, or go on with the first engine")
    if is_tensor_parallel(engine) or not any(map(is_stacked, model.modules())):
        return plain(model, *args, **kwargs)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # as DeepSpeed does later in the start
    spreading = _Spreading(engine, config)
    with lent(auto_ep, "AutoEP", spreading.of):
        sources = plain(model, *args, **kwargs)
    spreading.end()
    if left := [name for name, one in model.named_modules() if isinstance(one, HeldExperts) and not one.original]:
        asked = engine.config.get("expert_parallel")
        raise ConfigError(f"{left[0]} is held quantized alone, and is not spread over the ranks: the section "
                          f'"expert_parallel" is {asked or "missing"}. Write the one that from_pretrained got')
    return sources


class _Spreading:
    """What stands for DeepSpeed's AutoEP while one engine starts."""

    def __init__(self, engine: DeepSpeedEngine, config: MXFP8MoEConfig):
        self.engine, self.config = engine, config
        self.device = torch.device(get_accelerator().current_device_name())
        self.frozen: list[nn.Module] = []  # experts with FrozenWeights
        self.failure: str | None = None

    def of(self, model: nn.Module, config: Any) -> "_Spreading":
        """As the constructor of AutoEP."""
        self.model, self.shared = model, shared_parameters(model)
        # Users of PEFT save the adapters. So memory decides about frozen experts, if the key does not.
        chosen = self.config.frozen_experts or ("mxfp8" if has_adapters(model) else "keep")
        self.format = None if self.config.recipe == "bf16" else FORMATS.get(chosen)
        return self

    def ep_parser(self) -> list[Found]:
        """The blocks whose experts can be spread. A line says why others stay as they are.

        Raises:
            ConfigError: PEFT has changed experts in a way that this package does not know.
        """
        check_adapters(self.model)
        found, left = [], {}
        for name, block in self.model.named_modules():
            child = block._modules.get("experts")
            experts = unwrapped(child)
            if experts is not None and is_stacked(experts):
                wrapper = None if child is experts else child
                one = Found(name, shape_of(getattr(experts, DOWN))[0], experts, wrapper)
                reason = self._obstacle(one)
                if reason and isinstance(experts, HeldExperts) and not experts.original:
                    raise ConfigError(f"{name}.experts are held quantized alone, and cannot be spread: {reason}. Load "
                                      "the model by transformers' from_pretrained")
                if reason:
                    left[name] = reason
                else:
                    found.append(one)
        for names, reason in alike(left):
            log_on_rank_0(f"mxfp8_moe: WARNING: experts of {names} stay whole on every rank, as transformers "
                            f"computes them: {reason}")
        return found

    def _obstacle(self, one: Found) -> str | None:
        block = vars(self.model.get_submodule(one.moe_module_name))
        if block.get("num_experts", one.num_experts) != one.num_experts:  # as DeepSpeed reads it of a layer
            return f"the block's num_experts is {block['num_experts']}, and it has {one.num_experts} experts"
        weights = [getattr(one.experts, name) for name in Layout.of(one.experts).names]
        if shared := [self.shared[p] for p in weights if p in self.shared]:
            return f"{shared[0]} is shared with another module"
        if not {p.dtype for p in weights} <= {*DTYPES}:
            return f"they are {weights[0].dtype}"
        if odd := [size for p in weights for size in shape_of(p)[1:] if size % 16]:
            return f"the size {odd[0]} is no multiple of 16"
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in weights):
            return "a weight has gradient hooks"
        # transformers' decorator wraps a forward. An override of it in a subclass, or on the module, is not wrapped.
        forward = vars(one.experts).get("forward")
        if forward is None and not isinstance(one.experts, HeldExperts):
            forward = None if hasattr(type(one.experts).forward, "__wrapped__") else type(one.experts).forward
        is_ligers = forward is not None and forward.__module__.startswith("liger_kernel.")  # computes the same
        return None if forward is None or is_ligers else (
            f"{forward.__module__}.{forward.__qualname__} replaces the forward of {type(one.experts).__name__}")

    def replace_moe_layers(self, specs: list[Found], ep_size: int, ep_rank: int, collect_sources: bool = False,
                           on_moe_layer_replaced: Callable | None = None) -> ReplacementSourceMap:
        """As AutoEP's method: spreads the experts of the blocks, and returns what became of their parameters."""
        sources = ReplacementSourceMap()
        for found in specs:
            block, experts = self.model.get_submodule(found.moe_module_name), found.experts
            layout = Layout.of(experts)
            whole = [getattr(experts, name) for name in layout.names]
            frozen = self._frozen(found, layout, whole, ep_size, ep_rank)
            weights = {} if frozen else share(layout, whole, found.num_experts // ep_size, ep_rank)
            spread(block, experts, weights, ep_size, ep_rank,
                   experts.leave() if isinstance(experts, HeldExperts) else None)
            if found.wrapper is not None:
                take_wrappers(experts, found.wrapper)
            if self.engine.zero_optimization_stage() == 3:
                register_factors(block)
                let_zero3_reduce(block)
            if frozen:
                experts.frozen = frozen
                self.frozen.append(experts)
                for parameter in whole:
                    if not hasattr(parameter, "ds_id"):  # ZeRO-3 frees its partitions by itself
                        parameter.data = parameter.data.new_empty(0)  # also where an optimizer holds it
            if collect_sources:
                sources.discarded |= set(map(id, whole))
                sources.sources |= {id(p): [whole[name == "w2"]] for name, p in weights.items()}
            if on_moe_layer_replaced is not None:
                on_moe_layer_replaced(SimpleNamespace(experts=nn.ParameterDict(weights)))
        return sources

    def _frozen(self, found: Found, layout: Layout, whole: list[nn.Parameter], ep_size: int,
                ep_rank: int) -> FrozenWeights | None:
        """The weights of experts that are to be held quantized alone. None: this block's are not."""
        held, name = isinstance(found.experts, HeldExperts), found.moe_module_name
        if not held and (self.format is None or not self.config.selects(name) or any(
                p.requires_grad or size % 32 for p in whole for size in shape_of(p)[1:])):
            return None
        dtype, count = self._dtype(whole[0]), found.num_experts // ep_size
        H, F = shape_of(whole[1])[1:] if not layout.is_transposed else shape_of(whole[1])[:0:-1]
        make, done = partial(self.format or FrozenWeights, count, H, F, dtype, has_gate=layout.has_gate), 0
        frozen = make("meta")
        try:
            if self.failure is None and held:
                return found.experts.take(f"{name}.experts", ep_rank * count, count, dtype, self.device,
                                          self.config.frozen_experts)
            if self.failure is None:
                frozen = make(self.device)
            for w1, w2, w3 in _one_by_one(layout, whole, count, ep_rank, self.device):  # collective in ZeRO-3
                if self.failure is None:
                    frozen.put(done, w1, w2, w3, self.config.scaling_mode)
                done += 1
        except Exception as error:  # of any kind: the other ranks go on
            at = "" if held else f", with {done} of {count} experts done"
            self.failure = f"{name}.experts{at}: {type(error).__name__}: {error}"
        return frozen

    def _dtype(self, weight: torch.Tensor) -> torch.dtype:
        """The dtype to which DeepSpeed casts a weight."""
        dtype = self.engine.get_data_types()[0]
        return weight.dtype if dtype == torch.float32 else dtype

    def end(self) -> None:
        """Raises RuntimeError on every rank, if one of them failed. Makes copies of experts on several ranks equal, as
        DeepSpeed does with parameters."""
        failure = failure_in_world(self.failure, "the start (every rank quantizes its experts)")
        if failure:
            raise RuntimeError(f"frozen experts could not be quantized: {failure}")
        for _, block in expert_blocks(self.model) if self.frozen else ():
            group = groups._get_expert_data_parallel_group(block.ep_group_name)
            if block.experts in self.frozen and dist.get_world_size(group=group) > 1:
                for buffer in block.experts.frozen.buffers():
                    dist.broadcast(buffer, ranks_of(group)[0], group=group)


def _one_by_one(layout: Layout, whole: list[nn.Parameter], count: int, rank: int,
                device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields w1, w2 and w3 of each of one rank's experts.

    Without ZeRO-3, one expert at a time is copied to `device`. With ZeRO-3, all are gathered first.
    """
    partitioned = [p for p in whole if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned), torch.no_grad():
        for i in range(rank * count, (rank + 1) * count):
            parts = (p[i:i + 1] if partitioned else p[i:i + 1].to(device) for p in whole)
            yield tuple(part[0] for part in layout.split(*parts))


def share(layout: Layout, whole: list[nn.Parameter], count: int, rank: int) -> dict[str, nn.Parameter]:
    """w1, w2 and w3 of one rank's experts, copied out of the whole weights."""
    with deepspeed.zero.GatheredParameters([p for p in whole if hasattr(p, "ds_id")]), torch.no_grad():
        parts = layout.split(*(p.narrow(0, rank * count, count) for p in whole))
        trained = whole[0].requires_grad, whole[1].requires_grad, whole[0].requires_grad
        return {name: nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad)
                for name, part, requires_grad in zip(SPREAD_NAMES, parts, trained, strict=True)}
