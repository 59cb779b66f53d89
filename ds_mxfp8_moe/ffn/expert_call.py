# SPDX-License-Identifier: Apache-2.0
"""Runs the forward or the backward of an expert FFN with the quantised weights that its layer keeps.

The call can be recorded as a whole, and replayed later. Autograd and recordings take flat lists of tensors. The layout
of flat weights has a pair (role, size) for each role: `size` tensors, or one stacked tensor [E, ...] if `size` is 0.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from ..compute.executor import put_together, replayed, taken_apart
from ..compute.formula import ROLES
from ..compute.mx import MXTensor
from .kept_weights import KeptWeights


def flattened(weights: dict[str, torch.Tensor | Sequence[torch.Tensor] | None]) -> tuple[tuple, list[torch.Tensor]]:
    """The layout of weights by role, and their tensors."""
    layout, tensors = [], []
    for role in ROLES:
        value = weights.get(role)
        if value is not None:
            stacked = isinstance(value, torch.Tensor)
            layout.append((role, 0 if stacked else len(value)))
            tensors += [value] if stacked else list(value)
    return tuple(layout), tensors


def unflattened(layout: tuple, tensors: Sequence) -> dict:
    """The inverse of `flattened`: role -> one stacked tensor or a list of E."""
    sizes = dict(layout)
    return {role: of_role[0] if sizes[role] == 0 else of_role for role, of_role in _by_role(layout, tensors).items()}


def length(layout: tuple) -> int:
    """How many tensors the layout describes."""
    return sum(max(size, 1) for _, size in layout)


def _by_role(layout: tuple, tensors: Sequence) -> dict[str, list]:
    found, start = {}, 0
    for role, size in layout:
        found[role] = list(tensors[start:start + max(size, 1)])
        start += max(size, 1)
    return found


def run(function: Callable[..., tuple], inputs: tuple, weights: Sequence[torch.Tensor], layout: tuple, *, key: tuple,
        kept: KeptWeights | None, transposed: bool, quantized: bool, executor: ModuleType | None) -> tuple:
    """function(given, *inputs, *tensors of kept weights, *weights).

    Args:
        function: `given` is for `take_given`. The function returns a list of tensors, and a pair: an object without
            tensors, and what `made_by` says of the quantised weights that it made. Their tensors are the last ones.
        key: what the function depends on, beside the properties of the tensors.
        kept: the layer's quantised weights. None: the layer keeps none.
        transposed: the GEMMs contract over the weights' second to last axis.
        quantized: the GEMMs read quantised copies of the weights. If false, a kernel may compute the address of every
            weight from that of one. All distances between weights must then be the same in a replay.
        executor: records and replays the call. None: the host calls the function.

    Returns:
        The tensors, without those of quantised weights, and the object.
    """
    roles = _by_role(layout, weights)
    given, tensors, shared = None, [], None
    if kept is not None:
        shared = kept.of([w for role, of_role in roles.items() if not role.endswith("_bias") for w in of_role],
                         transposed)
    if shared is not None:
        tensors, kinds = taken_apart(shared.values())
        given = tuple(zip(shared, kinds, strict=True))
    if executor is None:
        outputs, (other, made) = function(given, *inputs, *tensors, *weights)
    else:
        key = *key, layout, given, executor.signature((*inputs, *tensors, *(role[0] for role in roles.values())))
        between = tuple(map(executor.distances, roles.values())) if quantized else executor.distances(weights)
        outputs, (other, made) = replayed(executor, key, between, lambda arguments: function(given, *arguments),
                                          [*inputs, *tensors, *weights])
    if made:
        names, kinds = zip(*made, strict=True)
        first = len(outputs) - 2 * len(made)
        shared.update(zip(names, put_together(list(outputs[first:]), kinds), strict=True))
        outputs = outputs[:first]
    return outputs, other


def take_given(given: tuple | None, tensors: list[torch.Tensor]) -> dict[str, MXTensor] | None:
    """The quantised weights that `run` gives, by name. Removes their tensors from the front of `tensors`.

    None: the layer keeps none, and the call need not hand out those that it makes.
    """
    if given is None:
        return None
    return dict(zip((name for name, _ in given), put_together(tensors, (kind for _, kind in given)), strict=True))


def made_by(quantized_weights: dict[str, MXTensor], given: tuple | None) -> tuple[list[torch.Tensor], tuple]:
    """The tensors of the quantised weights that were not given, and their names and kinds. Both are empty if the layer
    keeps none."""
    if given is None:
        return [], ()
    made = {name: mx for name, mx in quantized_weights.items() if name not in dict(given)}
    tensors, kinds = taken_apart(made.values())
    return tensors, tuple(zip(made, kinds, strict=True))
