# SPDX-License-Identifier: Apache-2.0
"""What happens between an expert's two GEMMs: activation, routing weight and quantization, forward and backward.

Where the device runs Triton kernels, these functions call them (ops/triton_kernels/activation.py). Elsewhere they
compute in plain torch, which is the kernels' reference. P: rows, G: width of the first GEMM, F: FFN size, E: experts.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..ops.device import runs_triton
from .formula import Activation
from .mx import MXTensor, parts_of, quantize


def _silu_slope(x, alpha=1.0):
    s = torch.sigmoid(alpha * x)
    return s * (1 + alpha * x * (1 - s))


def _gelu_slope(x):
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh_slope(x):
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)


# Derivatives of formula.ACTIVATIONS. They take float32.
SLOPES: dict[str, Callable[..., torch.Tensor]] = {
    "relu": lambda x: torch.where(x <= 0, 0.0, 1.0),
    "relu_squared": lambda x: torch.where(x <= 0, 0.0, 2 * x),
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "silu": _silu_slope,
    "swiglu_oai": _silu_slope,
}


class Gradients(NamedTuple):
    """What `activate_backward` returns. A form of dpre that was not asked for is None.

    Attributes:
        dweight_P: float32, <t, act(pre)>.
        plain: dpre [P, G] in t's dtype.
        rows: MXTensor [P, G], blocks along G.
        columns: MXTensor [G, P], blocks along P.
    """

    dweight_P: torch.Tensor
    plain: torch.Tensor | None
    rows: MXTensor | None
    columns: MXTensor | None


def bias_rows(bias_EN: torch.Tensor, ends_E: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The bias of each row's expert, [P, N]. Rows past the last group get the last expert's."""
    row_P = torch.arange(num_rows, device=bias_EN.device, dtype=torch.int32)
    group_P = torch.searchsorted(ends_E, row_P, right=True).clamp_max(bias_EN.shape[0] - 1)
    return bias_EN.index_select(0, group_P)


def _halves(pre_PG: torch.Tensor, layout: str) -> tuple:
    """Gate and up, float32."""
    one, other = pre_PG.float().chunk(2, dim=-1)
    return (other, one) if layout == "up_gate" else (one, other)


def _activated(pre_PG: torch.Tensor, act: Activation, layout: str) -> torch.Tensor:
    if layout == "mlp":
        return act.of_gate(pre_PG.float())
    gate_PF, up_PF = _halves(pre_PG, layout)
    return act.of_gate(gate_PF) * act.of_up(up_PF)


def _slope(gate_PF: torch.Tensor, act: Activation) -> torch.Tensor:
    """The derivative of `act.of_gate`."""
    slope = SLOPES[act.name]
    clamped = gate_PF if act.limit is None else gate_PF.clamp(max=act.limit)
    slope_PF = slope(clamped) if act.alpha is None else slope(clamped, act.alpha)
    return slope_PF if act.limit is None else torch.where(gate_PF > act.limit, 0.0, slope_PF)


def _up_slope(value_PF: torch.Tensor, up_PF: torch.Tensor, act: Activation) -> torch.Tensor:
    """value_PF times the derivative of `act.of_up`."""
    return value_PF if act.limit is None else torch.where(up_PF.abs() > act.limit, 0.0, value_PF)


def activate(pre_PG: torch.Tensor, weight_P: torch.Tensor, activation: str, layout: str, block_size: int,
             scaling_mode: str, *, quantized: bool, keep: bool, alpha: float | None = None,
             limit: float | None = None, bias_EG: torch.Tensor | None = None, ends_E: torch.Tensor | None = None
             ) -> tuple:
    """h = weight * act(pre + bias), and the pre-activation kept for backward.

    Args:
        pre_PG: bf16, fp16 or fp32: the result of the first grouped GEMM.
        weight_P: float32 routing weights, 0 in padding rows.
        activation, alpha, limit: see formula.Activation.
        layout: "mlp", "gate_up" or "up_gate": the order of pre's columns.
        quantized: return h as an MXTensor. Otherwise h is a plain tensor of pre's dtype.
        keep: also return pre + bias in MXFP8, with no block across gate and up.
        bias_EG, ends_E: each expert's bias, and int32 ends of the groups. pre + bias is rounded to pre's dtype.

    Returns:
        h [P, F], and what is kept: an MXTensor [P, G / F, F], or None.
    """
    if runs_triton(pre_PG):
        from ..ops.triton_kernels import activation as kernels
        h, kept = kernels.activate(pre_PG, weight_P, activation, layout, block_size, scaling_mode, quantize=quantized,
                                   keep=keep, alpha=alpha, limit=limit, bias_EG=bias_EG, ends_E=ends_E)
        return MXTensor.of(h, pre_PG.dtype) if quantized else h, MXTensor.of(kept, pre_PG.dtype) if keep else None
    pre_PG = _with_bias(pre_PG, bias_EG, ends_E)
    h_PF = _activated(pre_PG, Activation(activation, alpha, limit), layout) * weight_P.unsqueeze(1)
    if quantized:
        h_PF = MXTensor.of(quantize(h_PF, block_size, scaling_mode).parts, pre_PG.dtype)
    else:
        h_PF = h_PF.to(pre_PG.dtype)
    if not keep:
        return h_PF, None
    # No block lies across gate and up.
    return h_PF, quantize(pre_PG.unflatten(-1, (1 if layout == "mlp" else 2, -1)), block_size, scaling_mode)


def _with_bias(pre_PG, bias_EG, ends_E) -> torch.Tensor:
    if bias_EG is None:
        return pre_PG
    return (pre_PG + bias_rows(bias_EG, ends_E, pre_PG.shape[0])).to(pre_PG.dtype)


def activate_backward(t_PF: torch.Tensor, kept: torch.Tensor, weight_P: torch.Tensor, activation: str, layout: str,
                      block_size: int, scaling_mode: str, *, plain: bool = False, rows: bool = False,
                      columns: bool = False, alpha: float | None = None, limit: float | None = None,
                      bias_EG: torch.Tensor | None = None, ends_E: torch.Tensor | None = None) -> Gradients:
    """The gradients of `activate`: of the routing weights, and of pre in the forms that are asked for.

    Args:
        t_PF: the gradient of h: bf16, fp16 or fp32.
        kept: what `activate` kept, which includes the bias. Or pre_PG itself, together with bias_EG and ends_E.
        plain, rows, columns: the forms of dpre to return, see Gradients.
    """
    if runs_triton(t_PF):
        from ..ops.triton_kernels import activation as kernels
        dweight_P, dpre, *forms = kernels.activate_backward(
            t_PF, parts_of(kept), weight_P, activation, layout, block_size, scaling_mode, plain=plain, rows=rows,
            columns=columns, alpha=alpha, limit=limit, bias_EG=bias_EG, ends_E=ends_E)
        return Gradients(dweight_P, dpre, *(MXTensor.of(form, t_PF.dtype) if form else None for form in forms))
    if isinstance(kept, MXTensor):
        pre_PG = kept.dequantize(torch.float32).flatten(-2)
    else:
        pre_PG = _with_bias(kept, bias_EG, ends_E)
    act, t = Activation(activation, alpha, limit), t_PF.float()
    dweight_P = (t * _activated(pre_PG, act, layout)).sum(-1)
    t = t * weight_P.unsqueeze(1)
    if layout == "mlp":
        dpre = t * _slope(pre_PG.float(), act)
    else:
        gate_PF, up_PF = _halves(pre_PG, layout)
        halves = [t * act.of_up(up_PF) * _slope(gate_PF, act), t * _up_slope(act.of_gate(gate_PF), up_PF, act)]
        dpre = torch.cat(halves[::-1] if layout == "up_gate" else halves, dim=-1)
    forms = (MXTensor.of(quantize(x, block_size, scaling_mode).parts, t_PF.dtype) if wanted else None
             for x, wanted in ((dpre, rows), (dpre.t(), columns)))
    return Gradients(dweight_P, dpre.to(t_PF.dtype) if plain else None, *forms)


def group_sums(x_PN: torch.Tensor, ends_E: torch.Tensor, weight_P: torch.Tensor | None = None) -> torch.Tensor:
    """Sums the rows of each group, times weight_P if given: [E, N] float32. The order of additions is fixed.

    Groups are multiples of 128 rows. Plain torch reads `ends_E` from the device, so the host waits for the device.
    """
    if runs_triton(x_PN):
        from ..ops.triton_kernels import activation as kernels
        return kernels.group_sums(x_PN.contiguous(), ends_E, weight_P)
    x_PN = x_PN.float() if weight_P is None else x_PN.float() * weight_P.unsqueeze(1)
    starts = [0, *ends_E.tolist()]
    return torch.stack([x_PN[start:end].sum(0) for start, end in zip(starts, starts[1:], strict=False)])


def add_weighted_bias(y_PN: torch.Tensor, bias_EN: torch.Tensor, weight_P: torch.Tensor, ends_E: torch.Tensor
                      ) -> torch.Tensor:
    """y + weight * bias of each row's expert, in float32."""
    if runs_triton(y_PN):
        from ..ops.triton_kernels import activation as kernels
        return kernels.add_weighted_bias(y_PN, bias_EN, weight_P, ends_E)
    return y_PN.float() + bias_rows(bias_EN, ends_E, y_PN.shape[0]) * weight_P.unsqueeze(1)
