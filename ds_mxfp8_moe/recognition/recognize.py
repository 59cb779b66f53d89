# SPDX-License-Identifier: Apache-2.0
"""Which formula the experts of a layer compute, and whether they are still what they were at conversion.

The shapes of an expert's parameters suggest which one could play which role. proof.py runs the expert and decides.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product

import torch
from torch import nn

from ..compute.formula import DTYPES, PACKED, ExpertFormula, NotRecognized
from .proof import activations, constants, prove

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

def recognize(experts: Sequence[nn.Module], hidden_size: int,
              elsewhere: Mapping[nn.Parameter, str] | None = None) -> ExpertFormula:
    """Decides what the local experts of one layer compute, and proves it on the first of them.

    Takes about 10 ms on the CPU, whatever device the experts are on (meta included). Leaves the modules, their
    parameters and gradients, and all random states as they were.

    Args:
        experts: the layer's local experts, `Experts.deepspeed_experts`.
        hidden_size: H, the width of the experts' input and output.
        elsewhere: parameters that the model uses outside of these experts, with their names. Experts that share one
            of them are refused.

    Raises:
        NotRecognized: they compute something else, or what they compute cannot be shown.
    """
    _check_alike(experts, elsewhere or {})
    if hidden_size % 32:
        raise NotRecognized(f"hidden size {hidden_size} is no multiple of 32")
    layouts = _layouts(experts[0], hidden_size)
    if layouts[0].ffn_size % 32:
        raise NotRecognized(f"FFN size {layouts[0].ffn_size} is no multiple of 32")
    numbers = constants(experts[0])
    return prove(experts[0], [layout.with_act(act) for layout in layouts
                              for act in activations(numbers, gated=layout.kind == "gated")])


def foreign_code(module: nn.Module) -> str | None:
    """What runs around or in place of the module's own forward, in words: a hook that is not DeepSpeed's (its
    profiler's, ZeRO-3's), or a `forward` that was replaced on the instance."""
    for kind in _HOOKS:
        for hook in getattr(module, kind).values():
            if not (getattr(hook, "__module__", None) or "").startswith("deepspeed."):
                return f"a {kind[1:-1].replace('_', ' ')}"
    return "a replaced forward method" if "forward" in vars(module) else None


def _signature(expert: nn.Module) -> tuple:
    modules = [(name, type(m), m.extra_repr()) for name, m in expert.named_modules(remove_duplicate=False)]
    return modules, [(name, tuple(p.shape), p.dtype, p.device) for name, p in expert.named_parameters()]


def _check_alike(experts: Sequence[nn.Module], elsewhere: Mapping[nn.Parameter, str]) -> None:
    """Refuses experts that differ from each other in structure, have hooks, buffers or a replaced forward method, or
    share parameters."""
    if len(experts) == 0:
        raise NotRecognized("the layer has no local experts")
    owners = {p: f"{name}, outside of these experts" for p, name in elsewhere.items()}
    for i, expert in enumerate(experts):
        if type(expert) is not type(experts[0]):
            raise NotRecognized(f"expert {i} is a {type(expert).__name__}, expert 0 a {type(experts[0]).__name__}")
        for name, module in expert.named_modules():
            if foreign := foreign_code(module):
                raise NotRecognized(f"expert {i}" + (f", module {name}," if name else "") + f" has {foreign}")
        for name, _ in expert.named_buffers():
            raise NotRecognized(f"expert {i} has a buffer, {name}")
        for name, param in expert.named_parameters(remove_duplicate=False):
            where = f"parameter {name} of expert {i}"
            if param in owners:
                raise NotRecognized(f"{where} is shared with {owners[param]}")
            owners[param] = f"{name} of expert {i}"
            if type(param) is not nn.Parameter or type(param.data) is not torch.Tensor:
                raise NotRecognized(f"{where} is a {type(param).__name__}, not a plain nn.Parameter")
            if param.numel() == 0:
                raise NotRecognized(f"{where} is empty here (partitioned by ZeRO-3?)")
            if param.dtype not in DTYPES:
                raise NotRecognized(f"{where} is {param.dtype}; expected bfloat16, float16 or float32")
        dtypes = {p.dtype for p in expert.parameters()}
        if len(dtypes) > 1:
            raise NotRecognized(f"the parameters of expert {i} have different dtypes: "
                                f"{', '.join(sorted(map(str, dtypes)))}")
        if _signature(expert) != _signature(experts[0]):
            raise NotRecognized(f"expert {i} differs from expert 0 in its modules, or in its parameters' names, "
                                "shapes, dtypes or devices")


def _layouts(expert: nn.Module, hidden_size: int) -> list[ExpertFormula]:
    """Every choice of roles that the shapes of the expert's parameters allow, without activations. All of one FFN
    size."""
    shapes = {name: tuple(p.shape) for name, p in expert.named_parameters()}
    weights = [name for name, shape in shapes.items() if len(shape) == 2]
    biases = [name for name, shape in shapes.items() if len(shape) == 1]
    kinds = {2: [("mlp", "none"), *(("gated", packed) for packed in PACKED)], 3: [("gated", "none")]}
    roles, found = ("gate", "up", "down")[-len(weights):], []
    complete = len(shapes) == len(weights) + len(biases) and len(biases) <= len(weights)
    for kind, packed in kinds.get(len(weights), ()) if complete else ():
        for order, biased in product(permutations(weights), permutations(roles, len(biases))):
            named = {**dict(zip(roles, order, strict=True)),
                     **{f"{role}_bias": name for role, name in zip(biased, biases, strict=True)}}
            one = ExpertFormula(kind, None, hidden_size, shapes[order[-1]][1], packed=packed, **named)
            if all(shapes[named[role]] == shape for role, shape in one.shapes().items()):
                found.append(one)
    if not found:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none"
        raise NotRecognized(f"the parameters of {type(expert).__name__} ({listed}) fit no recognized formula for "
                            f"hidden size {hidden_size}: 2 or 3 weights [out, in], with or without biases")
    return found


# ---- after conversion ---------------------------------------------------------------------------------------------


class ExpertsAtConversion:
    """The modules of a layer's experts at conversion.

    A converted layer computes from its experts' weights and never calls their modules. A hook, an adapter or another
    `forward` that a module is given later would have no effect, so the layer raises an error.
    """

    def __init__(self, experts: nn.Module):
        """`experts`: DeepSpeed's `Experts` of the layer."""
        self._modules = [(name, module, dict(module._modules))
                         for name, module in experts.named_modules(prefix="experts")]

    @torch.compiler.disable
    def check(self, layer: str, experts: nn.Module) -> None:
        """Raises RuntimeError if the modules have changed. About 12 us for 16 experts of 3 Linears.

        `experts`: what the layer of this name holds now.
        """
        change = "its experts were replaced" if experts is not self._modules[0][1] else next(self._changes(), None)
        if change is not None:
            raise RuntimeError(f"{layer}: {change} after conversion. A converted layer computes from its experts' "
                               "weights and does not call their modules, so this would have no effect. Do it before "
                               "ds_mxfp8_moe.initialize or convert, or leave the layer out with 'exclude'")

    def _changes(self) -> Iterator[str]:
        for name, module, children in self._modules:
            own = module.__dict__
            # Looks at each dict by its name, since a loop over _HOOKS takes twice as long.
            if (own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
                    or own["_backward_pre_hooks"] or "forward" in own) and (foreign := foreign_code(module)):
                yield f"{name} ({type(module).__name__}) was given {foreign}"
            if own["_modules"] != children:
                yield f"a module in {name} ({type(module).__name__}) was added, removed or replaced"
