# SPDX-License-Identifier: Apache-2.0
"""Which formula the experts of a layer compute, and whether they are still what they were at conversion.

The structure of an expert suggests which parameter could play which role. proof.py runs the expert and decides. Users
register experts of other structures.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..compute.formula import (
    ACTIVATIONS,
    DTYPES,
    GATED_ONLY,
    PACKED,
    SWIGLU_OAI,
    Activation,
    ExpertFormula,
    NotRecognised,
)
from .proof import prove

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# ---- registration -------------------------------------------------------------------------------------------------

_registered: dict[type, ExpertFormula] = {}


def register_expert(cls: type[nn.Module], *, kind: str, activation: str | None = None, up: str,
                    gate: str | None = None, down: str | None = None, gate_bias: str | None = None,
                    up_bias: str | None = None, down_bias: str | None = None, packed: str = "none",
                    alpha: float | None = None, limit: float | None = None) -> None:
    """Says which formula the experts of a class compute, for classes that hold weights outside of plain nn.Linears.

    The weights may be plain nn.Parameters, or belong to subclasses of nn.Linear. A registration holds for exactly this
    class, not for its subclasses. It is proven by running an expert, as everything else is. Registering a class again
    replaces its registration.

    Args:
        cls: the expert's class.
        kind, activation, packed: see ExpertFormula.
        up, gate, down, gate_bias, up_bias, down_bias: dotted parameter names inside one expert; weights are
            [out, in], as in nn.Linear. Every parameter of the expert must be named.
        alpha, limit: constants of the activation, see Activation. Without both, swiglu_oai has gpt-oss' constants.

    Raises:
        TypeError: cls is no nn.Module class.
        ValueError: kind, activation, its constants, packed and the named roles don't fit together.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register_expert: expected a class derived from torch.nn.Module, got {cls!r}")
    formula = ExpertFormula(kind, activation, 32, 32, up, gate, down, gate_bias, up_bias, down_bias, packed)
    if packed not in ("none", *PACKED) or (packed != "none" and kind != "gated"):
        raise ValueError(f"register_expert: packed={packed!r} with kind={kind!r}; expected 'none', or for kind "
                         f"'gated' one of {', '.join(map(repr, PACKED))}")
    weights = {"mlp": {"up", "down"}, "gated": {"gate", "up", "down"} if packed == "none" else {"up", "down"}}
    if kind not in weights:
        raise ValueError(f"register_expert: kind={kind!r}; expected one of {', '.join(weights)}")
    names = [act.name for act in _activations(kind)]
    if activation not in names:
        raise ValueError(f"register_expert: activation={activation!r} with kind {kind!r}; expected one of "
                         f"{', '.join(names)}")
    if activation in GATED_ONLY and alpha is limit is None:
        alpha, limit = SWIGLU_OAI.alpha, SWIGLU_OAI.limit
    if (alpha is not None) != (activation in GATED_ONLY) or (limit is not None and kind != "gated"):
        raise ValueError(f"register_expert: alpha={alpha} and limit={limit} with kind {kind!r} and activation="
                         f"{activation!r}; only {', '.join(GATED_ONLY)} has an alpha, and only kind 'gated' a limit")
    given = {role for role in formula.names() if not role.endswith("_bias")}
    biases = {role.removesuffix("_bias") for role in formula.names()} - given
    if given != weights[kind] or biases:
        raise ValueError(f"register_expert: kind {kind!r} with packed={packed!r} names the weights "
                         f"{sorted(weights[kind])} and biases of these; got {sorted(formula.names())}")
    _registered[cls] = replace(formula, alpha=alpha, limit=limit)


def _activations(kind: str) -> list[Activation]:
    """The activations that a kind may have."""
    return [*(Activation(name) for name in ACTIVATIONS if name not in GATED_ONLY), *[SWIGLU_OAI] * (kind == "gated")]


# ---- recognition --------------------------------------------------------------------------------------------------


def recognise(experts: Sequence[nn.Module], hidden_size: int,
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
        NotRecognised: they compute something else, or what they compute cannot be shown.
    """
    _check_alike(experts, elsewhere or {})
    if hidden_size % 32:
        raise NotRecognised(f"hidden size {hidden_size} is no multiple of 32")
    candidates = _registered_candidates(experts[0], hidden_size) or _linear_candidates(experts[0], hidden_size)
    if candidates[0].ffn_size % 32:
        raise NotRecognised(f"FFN size {candidates[0].ffn_size} is no multiple of 32")
    return prove(experts[0], candidates)


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
        raise NotRecognised("the layer has no local experts")
    owners = {p: f"{name}, outside of these experts" for p, name in elsewhere.items()}
    for i, expert in enumerate(experts):
        if type(expert) is not type(experts[0]):
            raise NotRecognised(f"expert {i} is a {type(expert).__name__}, expert 0 a {type(experts[0]).__name__}")
        for name, module in expert.named_modules():
            if foreign := foreign_code(module):
                raise NotRecognised(f"expert {i}" + (f", module {name}," if name else "") + f" has {foreign}")
        for name, _ in expert.named_buffers():
            raise NotRecognised(f"expert {i} has a buffer, {name}")
        for name, param in expert.named_parameters(remove_duplicate=False):
            where = f"parameter {name} of expert {i}"
            if param in owners:
                raise NotRecognised(f"{where} is shared with {owners[param]}")
            owners[param] = f"{name} of expert {i}"
            if type(param) is not nn.Parameter or type(param.data) is not torch.Tensor:
                raise NotRecognised(f"{where} is a {type(param).__name__}, not a plain nn.Parameter")
            if param.numel() == 0:
                raise NotRecognised(f"{where} is empty here (partitioned by ZeRO-3?)")
            if param.dtype not in DTYPES:
                raise NotRecognised(f"{where} is {param.dtype}; expected bfloat16, float16 or float32")
        dtypes = {p.dtype for p in expert.parameters()}
        if len(dtypes) > 1:
            raise NotRecognised(f"the parameters of expert {i} have different dtypes: "
                                f"{', '.join(sorted(map(str, dtypes)))}")
        if _signature(expert) != _signature(experts[0]):
            raise NotRecognised(f"expert {i} differs from expert 0 in its modules, or in its parameters' names, "
                                "shapes, dtypes or devices")


def _registered_candidates(expert: nn.Module, hidden_size: int) -> list[ExpertFormula]:
    """The one formula registered for this class with its sizes filled in; [] without one."""
    if type(expert) not in _registered:
        return []
    registered = _registered[type(expert)]
    shapes = {name: tuple(p.shape) for name, p in expert.named_parameters()}
    names = registered.names()
    if set(names.values()) != set(shapes):
        raise NotRecognised(f"{type(expert).__name__} is registered with parameters {sorted(names.values())}, "
                            f"but has {sorted(shapes)}")
    ffn_size = shapes[registered.up][0] // (1 if registered.packed == "none" else 2)
    formula = replace(registered, hidden_size=hidden_size, ffn_size=ffn_size)
    for role, expected in formula.shapes().items():
        if shapes[names[role]] != expected:
            raise NotRecognised(f"{type(expert).__name__} is registered with {role}={names[role]} of shape "
                                f"{expected}, but has {shapes[names[role]]}")
    return [formula]


def _linear_candidates(expert: nn.Module, hidden_size: int) -> list[ExpertFormula]:
    """Every formula that the shapes of the expert's nn.Linears allow; all of one FFN size."""
    linears = {}
    for name, module in expert.named_modules():
        if any(p is not None for p in module._parameters.values()) and type(module) is not nn.Linear:
            raise NotRecognised(f"module {name or type(expert).__name__} is a {type(module).__name__} with "
                                "parameters of its own; only plain nn.Linear may have some "
                                "(register_expert() adds other classes)")
        if type(module) is nn.Linear:
            linears[name] = module
    if not 2 <= len(linears) <= 3:
        listed = f" ({', '.join(linears)})" if any(linears) else ""
        raise NotRecognised(f"{type(expert).__name__} has {len(linears)} nn.Linear modules{listed}; a recognised "
                            "expert has 2 or 3")

    def formula(kind: str, ffn_size: int, packed: str = "none", **roles: str) -> ExpertFormula:
        named = {}
        for role, name in roles.items():
            named[role] = f"{name}.weight"
            named[f"{role}_bias"] = f"{name}.bias" if linears[name].bias is not None else None
        return ExpertFormula(kind, None, hidden_size, ffn_size, packed=packed, **named)

    layouts = []
    shapes = {name: tuple(m.weight.shape) for name, m in linears.items()}
    for order in itertools.permutations(linears):
        out_sizes, in_sizes = zip(*(shapes[name] for name in order), strict=True)
        ffn_size = in_sizes[-1]
        ends_fit = in_sizes[0] == hidden_size and out_sizes[-1] == hidden_size
        if len(order) == 2 and ends_fit and out_sizes[0] == ffn_size:
            layouts.append(formula("mlp", ffn_size, up=order[0], down=order[1]))
        elif len(order) == 2 and ends_fit and out_sizes[0] == 2 * ffn_size:
            layouts += [formula("gated", ffn_size, packed, up=order[0], down=order[1]) for packed in PACKED]
        elif len(order) == 3 and ends_fit and shapes[order[0]] == shapes[order[1]] == (ffn_size, hidden_size):
            layouts.append(formula("gated", ffn_size, gate=order[0], up=order[1], down=order[2]))
    if not layouts:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise NotRecognised(f"the shapes of its nn.Linear modules ({listed}) fit no recognised formula for hidden "
                            f"size {hidden_size}")
    return [layout.with_act(act) for layout in layouts for act in _activations(layout.kind)]


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
