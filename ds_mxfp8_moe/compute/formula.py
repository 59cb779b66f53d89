# SPDX-License-Identifier: Apache-2.0
"""What an expert module computes: the formulas, and the roles of an expert's parameters in them.

A user's expert is any nn.Module. It may take the MXFP8 path only if it computes one of two formulas on each row x,

    mlp      y = act(x W1^T + b1) W2^T + b2
    gated    y = (act(x Wg^T + bg) * up(x Wu^T + bu)) W2^T + b2     Wg and Wu apart, or packed into one [2F, H] weight

with weights in nn.Linear's layout [out, in] and every bias optional. recognize.py decides which one. up(v) is v. Only
the activation swiglu_oai (gpt-oss, MiniMax-M3) has another:

    act(v) = v sigmoid(alpha v)        up(v) = v + 1

With a limit, as in gpt-oss and DeepSeek-V4, act(v) becomes act(min(v, limit)), and up(v) becomes up(c) with v clamped
to c = min(max(v, -limit), limit).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

ROLES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def _at_most(x: torch.Tensor, limit: float) -> torch.Tensor:
    """x.clamp(max=limit), whose gradient is 1 at exactly the limit, as in the kernels.

    Quantized values often lie there. The gradient of torch's clamp is 1 there until 2.14, and 0 from 2.15 on.
    """
    return torch.where(x > limit, limit, x)


# act(v) without a limit. swiglu_oai takes alpha as well.
ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu_oai": lambda x, alpha: x * torch.sigmoid(alpha * x),
}
GATED_ONLY = ("swiglu_oai", )  # activations that only kind gated has


class Activation(NamedTuple):
    """act and up of a formula.

    Attributes:
        name: a key of ACTIVATIONS; None where the experts' own function is called.
        alpha: the factor inside the sigmoid of swiglu_oai; None for other activations.
        limit: where gate and up are clamped; None without a clamp.
    """

    name: str | None
    alpha: float | None = None
    limit: float | None = None

    def of_gate(self, gate: torch.Tensor) -> torch.Tensor:
        """act(gate)."""
        if self.limit is not None:
            gate = _at_most(gate, self.limit)
        act = ACTIVATIONS[self.name]
        return act(gate) if self.alpha is None else act(gate, self.alpha)

    def of_up(self, up: torch.Tensor) -> torch.Tensor:
        """up(up), the factor of act(gate)."""
        if self.limit is not None:
            up = -_at_most(-_at_most(up, self.limit), self.limit)
        return up + 1 if self.name == "swiglu_oai" else up

    def __str__(self) -> str:
        constants = {"alpha": self.alpha, "limit": self.limit}
        return ", ".join([self.name, *(f"{name} {x:g}" for name, x in constants.items() if x is not None)])


SWIGLU_OAI = Activation("swiglu_oai", 1.702, 7.0)  # gpt-oss'
PACKED = ("gate_up", "up_gate")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class NotRecognized(Exception):
    """The experts of a layer compute none of the formulas. The message gives the reason in one sentence."""


@dataclass(frozen=True)
class ExpertFormula:
    """What each expert of a layer computes, and which of its parameters plays which role.

    Attributes:
        kind: "mlp" or "gated". The formulas are at the top of this file.
        activation: "relu", "relu_squared", "gelu", "gelu_tanh", "silu", "swiglu_oai" (kind gated), or None where the
            experts' own function is called.
        hidden_size: H, width of input and output.
        ffn_size: F, width between the projections.
        gate, up, down: dotted names, inside one expert, of the weights [F, H], [F, H], [H, F]. An mlp has no `gate`,
            or the halves of its rows, [F / 2, H], as `gate` and `up`; a packed one has [2F, H] in `up` and no `gate`.
        gate_bias, up_bias, down_bias: names of the biases [F], [F] (packed: [2F]), [H].
        packed: "none", or the order of the halves of a packed `up`: "gate_up" or "up_gate".
        alpha, limit: constants of the activation, see Activation.
    """

    kind: str
    activation: str | None
    hidden_size: int
    ffn_size: int
    up: str
    gate: str | None = None
    down: str | None = None
    gate_bias: str | None = None
    up_bias: str | None = None
    down_bias: str | None = None
    packed: str = "none"
    alpha: float | None = None
    limit: float | None = None

    @property
    def act(self) -> Activation:
        """The activation with its constants."""
        return Activation(self.activation, self.alpha, self.limit)

    def with_act(self, act: Activation) -> "ExpertFormula":
        """This formula with another activation."""
        return replace(self, activation=act.name, alpha=act.alpha, limit=act.limit)

    def names(self) -> dict[str, str]:
        """Role -> parameter name, for each of ROLES that this formula has."""
        return {role: name for role in ROLES if (name := getattr(self, role)) is not None}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Role -> shape, for each role that this formula has."""
        width = self.ffn_size if self.packed == "none" else 2 * self.ffn_size
        halved = self.kind == "mlp" and self.gate is not None
        gate_width, width = (self.ffn_size // 2, width // 2) if halved else (self.ffn_size, width)
        weights = {"gate": (gate_width, self.hidden_size), "up": (width, self.hidden_size),
                   "down": (self.hidden_size, self.ffn_size)}
        all_shapes = weights | {f"{role}_bias": shape[:1] for role, shape in weights.items()}
        return {role: all_shapes[role] for role in self.names()}

    @property
    def function(self) -> str:
        """What it computes, in words, without the names of parameters."""
        return f"{self.kind}({self.act})" if self.activation else self.kind

    def __str__(self) -> str:
        packed = "" if self.packed == "none" else f" packed as {self.packed}"
        roles = ", ".join(f"{role}={name}" for role, name in self.names().items() if not role.endswith("_bias"))
        return f"{self.function}{packed} with {roles}"


class LowRank(NamedTuple):
    """A low-rank update of one GEMM's weights, as LoRA trains it: x W^T becomes x W^T + (x A^T) B^T.

    Attributes:
        a_ERK: [E, R, K]. R is a multiple of 8, as torch._grouped_mm needs it.
        b_ENR: [E, N, R].
    """

    a_ERK: torch.Tensor
    b_ENR: torch.Tensor


def evaluate(formula: ExpertFormula, x: torch.Tensor, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The formula itself, in plain PyTorch.

    Args:
        x: [..., H].
        params: parameter name -> tensor, of x's dtype.

    Returns:
        [..., H]
    """
    value = {role: params[name] for role, name in formula.names().items()}

    def project(role: str, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, value[role], value.get(f"{role}_bias"))

    act, up = formula.act, project("up", x)
    if formula.kind == "mlp":
        return project("down", act.of_gate(up))
    if formula.packed == "none":
        gate = project("gate", x)
    else:
        gate, up = up.chunk(2, dim=-1)[::1 if formula.packed == "gate_up" else -1]
    return project("down", act.of_gate(gate) * act.of_up(up))


class ExpertWeights:
    """Where the weights of a layer's experts are: in which modules, under which names. The modules have to stay."""

    def __init__(self, experts: Sequence[nn.Module], formula: ExpertFormula):
        places = {role: name.rpartition(".") for role, name in formula.names().items()}
        self._places = {role: [(expert.get_submodule(path), name) for expert in experts]
                        for role, (path, _, name) in places.items()}

    def current(self) -> dict[str, Any]:
        """For each role one tensor per expert, in their order.

        They are parameters, or the tensors that torch.func.functional_call has put in their places.
        """
        # By attributes, nn.Module.__getattr__ would take 25 times as long: 250 us for 64 gated experts.
        return {role: [module._parameters[name] for module, name in places] for role, places in self._places.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the experts."""
        module, name = self._places["up"][0]
        return module._parameters[name].dtype


def gate_then_up(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy of x, whose rows of gate and up take turns along `dim`, with all of gate before all of up."""
    return torch.cat([x.unflatten(dim, (-1, 2)).select(dim + 1, i) for i in range(2)], dim=dim)
