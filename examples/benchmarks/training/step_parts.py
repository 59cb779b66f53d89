# SPDX-License-Identifier: Apache-2.0
"""Where the time of a training step goes, by the modules of a Hugging Face model and by what DeepSpeed does around."""

import functools
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast  # kernels are linked to it, and not to record_function

from lib.world import on_gpu

EXPERTS, ATTENTION, LINEARS, LOSS = "experts", "attention", "linears", "loss"
ELEMENTWISE, GRADIENTS, OPTIMIZER, IDLE = "elementwise", "gradients", "optimizer", "idle"
PARTS = {EXPERTS: "experts with their routing", ATTENTION: "attention", LINEARS: "dense linears",
         LOSS: "head and loss", ELEMENTWISE: "norms and other elementwise", GRADIENTS: "gradients and ZeRO",
         OPTIMIZER: "optimizer", IDLE: "idle"}
PREFIX = "part of a step: "
OF_BACKWARD = 1  # the scope of operators that are nodes of the graph


def part(name: str) -> Any:
    """A context whose operators and kernels are of this part."""
    return _RecordFunctionFast(PREFIX + name)


def mark(model: nn.Module) -> None:
    """Has each module of an engine's model run as the part that it is of. What only transformers calls is the loss."""
    causal = next(module for module in model.modules() if "lm_head" in module._modules)
    _mark(causal, LOSS)
    _mark(causal.model, ELEMENTWISE)
    parts = {"": ELEMENTWISE}
    for name, module in causal.model.named_modules():
        around = parts[name.rpartition(".")[0]]
        parts[name] = _part_of(name, module, around)
        if parts[name] != around:
            _mark(module, parts[name])


def _part_of(name: str, module: nn.Module, around: str) -> str:
    """`around`: the part of the module that holds this one."""
    kind = type(module).__name__
    if isinstance(getattr(module, "experts", None), nn.Module):
        return EXPERTS
    if around == EXPERTS:  # routers and adapters too
        return LINEARS if name.endswith("shared_experts") else EXPERTS
    if kind.endswith("Attention"):
        return ATTENTION
    if kind.endswith("Norm"):
        return ELEMENTWISE
    return LINEARS if isinstance(module, nn.Linear) or "lora_A" in module._modules else around


def _mark(module: nn.Module, name: str) -> None:
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        with part(name):
            return plain(*args, **kwargs)

    module.forward = forward


def spent_ms(profiler: torch.profiler.profile) -> tuple[dict[str, float], float]:
    """The time of each part, and of all: of kernels, on a CPU of operators.

    An operator is of the innermost part around it. One of backward, where no module is called, is of the part that
    its node's operator was of in forward: both have the same thread and sequence number.

    Returns:
        ms of each part but IDLE; and how long the device ran anything, the union of its kernels, copies and fills.
    """
    # As the profiler has them. Its own lists of them take a minute for a large model.
    events = profiler.profiler.kineto_results.events()
    operators = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU
                 and event.start_thread_id() == event.end_thread_id() and event.linked_correlation_id() == 0
                 and not event.name().startswith("cu")]  # of CUDA's runtime
    spent = {name: 0.0 for name in PARTS if name != IDLE}
    part_of: dict[int, str] = {}  # by the operator's number, which its kernels name
    of_node: dict[tuple, str] = {}
    begun: dict[int, list] = defaultdict(list)  # of each thread: when operators end that have begun, and their parts
    for event in sorted(operators, key=lambda event: (event.start_ns(), -event.end_ns())):
        inside, ms = begun[event.start_thread_id()], event.duration_ns() / 1e6
        while inside and inside[-1][0] <= event.start_ns():
            inside.pop()
        around = inside[-1][1] if inside else GRADIENTS
        found = part_of[event.correlation_id()] = _part_of_operator(event, around, of_node)
        if not on_gpu():
            spent[found] += ms
            spent[around] -= ms if inside else 0
        inside.append((event.end_ns(), found))
    kernels = sorted((event.start_ns(), event.end_ns(), event.linked_correlation_id()) for event in events
                     if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation())
    busy_ns = until = 0
    for start, end, operator in kernels:
        spent[part_of.get(operator, GRADIENTS)] += (end - start) / 1e6
        busy_ns += max(0, end - max(start, until))
        until = max(until, end)
    return spent, busy_ns / 1e6 if on_gpu() else sum(spent.values())


def _part_of_operator(event: Any, around: str, of_node: dict[tuple, str]) -> str:
    """`around`: the part of the operator that this one is in. `of_node`: the parts of nodes by thread and number."""
    name = event.name()
    if name.startswith(PREFIX):
        return name.removeprefix(PREFIX)
    if name.startswith("Optimizer.step"):
        return OPTIMIZER
    if "AccumulateGrad" in name:  # with ZeRO's hooks
        return GRADIENTS
    if name.startswith("autograd::engine::evaluate_function"):
        return ELEMENTWISE  # sums of gradients from several places
    if event.scope() == OF_BACKWARD:
        return of_node.get((event.fwd_thread_id(), event.sequence_nr()), around)
    if event.sequence_nr() >= 0:  # the last operator with a number makes the node of this number
        of_node[event.start_thread_id(), event.sequence_nr()] = around
    return around
