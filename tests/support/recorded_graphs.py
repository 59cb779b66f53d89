# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs without a GPU: a replay runs the operators again that were captured, on the same memory, as a graph does
on a GPU."""

from contextlib import ExitStack, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_mxfp8_moe.engine import graphed, graphs


class Operators(TorchDispatchMode):
    """Notes each operator with its arguments and its results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, results))
        return results


def tensors_of(values) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class Recorded:
    """In place of graphed.Capture."""

    replays = 0
    on_stream = without_waits = nullcontext

    def __call__(self, work):
        with Operators() as operators:
            work()

        def replay():
            Recorded.replays += 1
            with torch.no_grad():
                for operator, args, kwargs, results in operators.calls:
                    read = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, kwargs))}
                    made = [tensor for tensor in tensors_of(results) if tensor.untyped_storage()._cdata not in read]
                    if operator._schema.is_mutable:
                        operator(*args, **kwargs)
                    elif made:  # else they are views
                        again = zip(tensors_of(results), tensors_of(operator(*args, **kwargs)), strict=True)
                        for result, new in again:
                            if any(result is one for one in made):
                                result.copy_(new)

        return replay

    def result(self, tensor):
        return tensor.detach()


def emulated() -> ExitStack:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(graphs, "has_graphs", lambda: True))
    stack.enter_context(mock.patch.object(graphed, "Capture", Recorded))
    stack.enter_context(mock.patch.object(graphs, "free_bytes", lambda: 2**60))
    Recorded.replays = 0
    return stack
