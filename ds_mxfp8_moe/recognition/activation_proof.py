# SPDX-License-Identifier: Apache-2.0
"""Shows by numbers which activation stands between the two GEMMs of stacked experts (transformers' contract).

The experts' own function, `_apply_gate` or without a gate `act_fn`, runs on a few hundred float32 values on the CPU.
Its outputs in eval and in training mode and its gradients must be those of an Activation.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..compute.formula import Activation
from .proof import TOLERANCE, activations, constants, isolated, relative_error
from .recognize import foreign_code
from .stacked import is_concatenated

_COLUMNS = 16
# The sizes of gate and up in a row. A clamp shows only on large values.
_ROW_SIZES = ((1, 1), (1, 1), (3, 1), (3, 3), (1e-2, 1), (1, 1e-2), (10, 1), (1, 10), (100, 100), (1e5, 1), (1, 1e5),
              (1e5, 1e5))


def activation_of(experts: nn.Module) -> Activation | None:
    """The activation that kernels may compute in place of the experts' own function. None: they may not.

    Takes about 1 ms. Leaves the module and all random states as they were, and reads no weight: weights may be on any
    device, meta included, of any dtype, and partitioned by ZeRO-3. The answer is the same on every rank.

    Args:
        experts: its class is decorated by transformers' `use_experts_implementation`.
    """
    if "_apply_gate" in vars(experts) or any(map(foreign_code, experts.children())):
        return None
    try:
        with isolated():
            return _proven(experts)
    except Exception:  # the experts' function may do anything
        return None


def _proven(experts: nn.Module) -> Activation | None:
    numbers = constants(experts)
    parts, upstream = _values(numbers)  # gate and up
    if not experts.has_gate:
        parts = parts[:1]
    x, random_state = _joined(experts, parts), torch.get_rng_state()
    given = x.clone()
    with torch.no_grad():
        y = _own(experts, training=False)(given)
        if (y.shape, y.dtype) != (upstream.shape, torch.float32) or not torch.equal(given, x):
            return None
        found = (act for act in activations(numbers, experts.has_gate) if _agree(y, _computed(act, parts)))
        if (act := next(found, None)) is None:
            return None
    expected = _differentiated(lambda parts: _computed(act, parts), parts, upstream)
    own = _own(experts, training=True)
    actual = _differentiated(lambda parts: own(_joined(experts, parts)), parts, upstream)
    drew = not torch.equal(torch.get_rng_state(), random_state)
    return None if drew or not all(map(_agree, actual, expected)) else act


def _joined(experts: nn.Module, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gate and up as the experts' function takes them."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if is_concatenated(experts) else torch.stack(parts, 2).flatten(1)


def _own(experts: nn.Module, training: bool) -> Callable:
    return getattr(_without_weights(experts, training), "_apply_gate" if experts.has_gate else "act_fn")


class _Weights(dict):
    """Parameters and buffers of a module, which must not be read."""

    def __getitem__(self, name: str) -> None:
        raise RuntimeError(f"the experts' function reads {name}")


def _without_weights(module: nn.Module, training: bool) -> nn.Module:
    """A module of the same class and attributes, without hooks. Reading a parameter or a buffer of it raises an error,
    and what it sets does not reach the original."""
    stand_in, fresh = object.__new__(type(module)), vars(nn.Module())
    own = {name: x.copy() if type(x) in (dict, list, set) else x for name, x in vars(module).items()}
    weights = [*module._parameters, *(name for name, _ in module.named_buffers(recurse=False))]
    modules = {name: child and _without_weights(child, training) for name, child in module._modules.items()}
    vars(stand_in).update(own | fresh, training=training, _parameters=_Weights.fromkeys(weights), _modules=modules)
    return stand_in


def _values(numbers: Sequence[float]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gate and up [rows, _COLUMNS], with values on both sides of each number, and a gradient of the output."""
    sizes = [*_ROW_SIZES, *((x, 1) for x in numbers), *((1, x) for x in numbers)]
    generator = torch.Generator("cpu").manual_seed(0)
    values = torch.randn(3, len(sizes), _COLUMNS, generator=generator, device="cpu", dtype=torch.float32)
    values[:2] *= torch.tensor(sizes, device="cpu", dtype=torch.float32).t().unsqueeze(2)
    gate, up, upstream = values
    return [gate.contiguous(), up.contiguous()], upstream


def _computed(act: Activation, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    gate, *up = parts
    return act.of_gate(gate) * act.of_up(*up) if up else act.of_gate(gate)


def _differentiated(function: Callable, parts: Sequence[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    """The output of `function`, and its gradients."""
    leaves = [part.clone().requires_grad_() for part in parts]
    y = function(leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def _agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return relative_error(actual, expected, by_row=True) <= TOLERANCE
