# SPDX-License-Identifier: Apache-2.0
"""How many bytes an engine holds for each parameter, from the tensors that are alive during its training."""

import gc
from collections.abc import Callable
from types import FunctionType, ModuleType

import deepspeed.comm as dist
import torch

from tests.support.autoep_models import batch


def held_by(root: object) -> int:
    """Bytes of the tensors on the host that an object leads to. Others may be kept by gloo for a while."""
    known, todo, storages = set(), [root], {}
    while todo:
        one = todo.pop()
        if id(one) in known or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        known.add(id(one))
        if isinstance(one, torch.Tensor):
            if not one.is_meta:
                storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            todo.append(one.grad if one.is_leaf else None)
        todo += gc.get_referents(one)
    return sum(storages.values())


def held(started: Callable, **sizes) -> tuple[int, int, int]:
    """The most bytes at the end of a backward pass, and the parameters of the experts and of all else.

    `started`: from sizes to an engine with two micro-batches in a step. It gets two tokens at a time, so that
    activations do not count.
    """
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = started(**sizes)
    # AutoEP's layers, and ZeRO-3's, have parts of a model's parameters.
    count = {True: 0, False: 0}
    for name, p in engine.module.named_parameters():
        count[".experts." in name] += getattr(p, "ds_numel", p.numel())
    most = 0
    for step in range(4):
        ids = batch(step, size=1, length=2).to(engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        most = max(most, torch.cuda.memory_allocated() - before if ids.is_cuda else held_by(engine))
        engine.step()
    engine.destroy()
    return most, count[True], count[False]


def bytes_of_a_parameter(started: Callable, wider_experts: dict, larger_vocabulary: dict) -> tuple[float, float]:
    """Of one of this rank's experts, and of all else: by how much more wider ones need."""
    if torch.cuda.is_available():
        held(started)  # workspaces of libraries
    base, experts, others = (held(started, **sizes) for sizes in ({}, wider_experts, larger_vocabulary))
    dist.barrier()
    return (experts[0] - base[0]) / (experts[1] - base[1]), (others[0] - base[0]) / (others[2] - base[2])
