# SPDX-License-Identifier: Apache-2.0
"""Lets the backward of experts put gradients of their weights into ZeRO's sums, which saves memory and a pass over it.

ZeRO-1 and 2 keep a sum of the gradients of this rank's partition (zero.py). Experts that no other rank has lie in it
as a whole. `Sums.sum_of` tells their backward where. All bits are those of DeepSpeed's own way:

    ZeRO-2  Backward puts the first gradient of a step there, and autograd makes it `parameter.grad`, which is divided
            by the number of ranks in place. Backward divides later ones and adds them, and autograd gets none.
    ZeRO-1  The same, but `parameter.grad` is a view of the sum for the whole step, and is divided at the end of its
            last backward. A step of one micro-batch begins its sum after backward, as DeepSpeed does, where memory is
            free again. Who sets `parameter.grad` to None drops what the sum holds.

A parameter may also get gradients from elsewhere: its layer runs twice, or a loss reads the weights. Autograd adds all
of them up, and `parameter.grad` may then be a tensor outside of the sum. It goes the usual way, and so do all later
gradients of this parameter. The bits differ from DeepSpeed's in one case: gradients from elsewhere come for the first
time in a later micro-batch of a step. The gradient of that micro-batch is rounded once more.
"""

import math
from typing import Any

import torch
from torch.autograd.graph import Node

from ..compute.sums import Sum


class Sums:
    """Tracks which gradients are already in the optimizer's partition sums.

    Attributes:
        keys: id of a parameter -> (group, index in the group, DeepSpeed's number of the parameter).
        given: keys of parameters that `sum_of` answered for -> autograd's number of the pass.
        taken: those of them whose gradients `takes` has ended.
        made: groups whose sums began here. Others may begin on another stream.
        mixed: keys of parameters that get gradients from elsewhere, too.
    """

    def __init__(self, optimizer: Any):
        self.keys = {id(p): (i, p.param_idx_in_group, optimizer.param_id[id(p)])
                     for i, group in enumerate(optimizer.bit16_groups) for p in group}
        self.given: dict[tuple, int] = {}
        self.taken: set[tuple] = set()
        self.made: set[int] = set()
        self.mixed: set[tuple] = set()

    def sum_of(self, optimizer: Any, param: torch.nn.Parameter, node: Node) -> Sum | None:
        """Where a gradient goes that backward computes now. None: into memory of its own, as usual.

        The caller writes or adds it at once. If the sum begins with it, the caller also returns it to autograd.

        `node`: autograd's, which accumulates into `parameter.grad`.
        """
        key, each = self.keys.get(id(param)), optimizer.partition_gradients
        if key is None or optimizer.param_dict[key[2]] is not param or key in self.mixed:
            return None
        i, place, divisor = key[0], optimizer._place(*key), optimizer.mxfp8_batching.divisor
        grad = param.grad
        # Kernels multiply by 1 / divisor, which is exact for powers of two. A hook sees the gradient of one pass. One
        # hook is DeepSpeed's.
        if (not place.alone or each and math.frexp(divisor)[0] != 0.5
                or param._backward_hooks or len(param._post_accumulate_grad_hooks or ()) > 1
                or optimizer._coalesce_grad_reduction or not getattr(param, "ds_grad_is_ready", True)
                or not _runs(node)):
            return None
        number = torch._C._current_graph_task_id()
        # Without `grad`, the gradient that began the sum is on its way to it, or was dropped.
        if key in self.given and (each or self.given[key] == number or grad is None):
            return None
        exists = optimizer.all_grad_tensors.get(i) is not None
        if grad is not None and (each or not exists or not self._in_place(optimizer, param, key)):
            return None
        if not exists:
            if not each and optimizer.is_gradient_accumulation_boundary():
                return None  # nothing will be added to a sum that would begin with all activations beside it
            self.made.add(i)
        out = _part(optimizer, place, i).view(param.shape) if grad is None else grad
        fresh = i in optimizer.mxfp8_batching.fresh
        if out.dtype != param.dtype or fresh and optimizer.overlap_comm and i not in self.made:
            return None
        self.given[key] = number
        if not each:
            return Sum(out, grad is not None)
        if fresh:
            return Sum(out)
        optimizer._mark_reduced([key])  # autograd gets no gradient, with which it would be marked
        return Sum(out, True, 1 / divisor)

    def takes(self, optimizer: Any, param: torch.nn.Parameter, key: tuple) -> bool:
        """True: nothing is left to do, since the gradient is in its sum, or there is none."""
        if param.grad is None:  # autograd calls hooks without a gradient, too
            return True
        if key not in self.given:
            return False
        first = not optimizer.partition_gradients or key[0] in optimizer.mxfp8_batching.fresh
        if first and self._in_place(optimizer, param, key):
            if (divisor := optimizer.mxfp8_batching.divisor) != 1:
                param.grad.div_(divisor)
            param.grad = None
            self.taken.add(key)
            optimizer._mark_reduced([key])
            return True
        self.mixed.add(key)
        if not first and self.given[key] == torch._C._current_graph_task_id():
            optimizer.params_already_reduced[key[2]] = False
        return False

    def end(self, optimizer: Any) -> None:
        """Ends the passes since the last call, whose gradients are about to be read."""
        if optimizer.partition_gradients:
            return
        for key in self.given.keys() - self.taken:
            param = optimizer.param_dict[key[2]]
            if param.grad is None:  # it was dropped
                _part(optimizer, optimizer._place(*key), key[0]).zero_()
            self.takes(optimizer, param, key)

    def leave(self, optimizer: Any) -> None:
        """Gives gradients of the step that has begun memory of their own, as other optimizers expect it."""
        if optimizer.partition_gradients:
            return
        for key in self.given.keys() - self.taken:
            param = optimizer.param_dict[key[2]]
            if param.grad is not None and self._in_place(optimizer, param, key):
                param.grad = param.grad.clone()
        for i in self.made:
            optimizer.all_grad_tensors[i] = None

    def clear(self) -> None:
        """Forgets the passes since the last call."""
        self.given.clear()
        self.taken.clear()
        self.made.clear()

    def _in_place(self, optimizer: Any, param: torch.nn.Parameter, key: tuple) -> bool:
        flat, start = optimizer._sum(key[0]).flat_partition, optimizer._place(*key).own[1]
        return param.grad.data_ptr() == flat.data_ptr() + start * flat.element_size()


def _part(optimizer: Any, place: Any, i: int) -> torch.Tensor:
    """Of the sum of group i."""
    return optimizer._sum(i).flat_partition.narrow(0, *place.own[1:])


def _runs(node: Node) -> bool:
    """Whether the pass that runs will run a node that accumulates. torch.autograd.grad does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch does not answer within torch.autograd.grad
        return False
