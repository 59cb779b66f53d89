# SPDX-License-Identifier: Apache-2.0
"""One layer whose roundings are simulated, on whatever device, and the names of the roundings that act in it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from ds_mxfp8_moe.config import MXFP8MoEConfig, resolve
from ds_mxfp8_moe.expert_ffn import ExpertFFN
from ds_mxfp8_moe.experts import ExpertFormula
from ds_mxfp8_moe.routing import Routes
from ds_mxfp8_moe.transport.local import Local
from training.roundings import WIRES

TOKENS, K, E, H, F = 200, 2, 4, 96, 160
DEFAULT = {"dispatch_fwd", "weights_fwd", "pre", "h", "combine_bwd", "weights_bwd", "dpre"}
OF_WGRAD = {"x_wgrad", "h_wgrad", "g_wgrad", "dpre_wgrad"}
ALL_WIRES = {f"{wire}_dtype": "mxfp8" for wire in WIRES}
NO_WIRES = {"dispatch_fwd_dtype": "bf16", "combine_bwd_dtype": "bf16"}


def step(dtype: torch.dtype = torch.float32, device: str = "cpu", T: int = TOKENS, **keys) -> dict[str, torch.Tensor]:
    """The output and all gradients of one layer. `keys`: of the section "mxfp8_moe"."""
    torch.manual_seed(5)
    weights = {role: torch.randn(E, *shape).div(shape[1]**0.5).to(device, dtype).requires_grad_()
               for role, shape in (("gate", (F, H)), ("up", (F, H)), ("down", (H, F)))}
    x = torch.randn(T, H).to(device, dtype).requires_grad_()
    weight = torch.rand(T, K).to(device).requires_grad_()
    expert_TK = torch.rand(T, E).topk(K, dim=1).indices.to(device)
    routes = Routes(expert_TK=expert_TK, weight_TK=weight, num_experts=E)
    formula = ExpertFormula("gated", "silu", H, F, gate="gate", up="up", down="down")
    y = ExpertFFN(formula, resolve(MXFP8MoEConfig(enabled=True, **keys), "cpu"), Local(), E)(x, routes, weights)
    y.backward(torch.randn(T, H).to(device, dtype))
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad} | {role: w.grad for role, w in weights.items()}
