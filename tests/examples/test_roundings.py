# SPDX-License-Identifier: Apache-2.0
"""Simulated roundings: all of them together are the layer's own arithmetic, each can be measured and left out."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from ds_mxfp8_moe.config import MXFP8MoEConfig, resolve
from ds_mxfp8_moe.expert_ffn import ExpertFFN
from ds_mxfp8_moe.experts import ExpertFormula
from ds_mxfp8_moe.mx import quantize, sqnr_db
from ds_mxfp8_moe.routing import Routes
from ds_mxfp8_moe.transport.local import Local
from training.roundings import NAMES, WIRES, Measured, simulated

T, K, E, H, F = 200, 2, 4, 96, 160
DEFAULT = {"dispatch_fwd", "weights_fwd", "pre", "h", "combine_bwd", "weights_bwd", "dpre"}
OF_WGRAD = {"x_wgrad", "h_wgrad", "g_wgrad", "dpre_wgrad"}
ALL_WIRES = {f"{wire}_dtype": "mxfp8" for wire in WIRES}
NO_WIRES = {"dispatch_fwd_dtype": "bf16", "combine_bwd_dtype": "bf16"}


def step(dtype: torch.dtype = torch.float32, **keys) -> dict[str, torch.Tensor]:
    """The output and all gradients of one layer."""
    torch.manual_seed(5)
    weights = {role: torch.randn(E, *shape).div(shape[1]**0.5).to(dtype).requires_grad_()
               for role, shape in (("gate", (F, H)), ("up", (F, H)), ("down", (H, F)))}
    x = torch.randn(T, H).to(dtype).requires_grad_()
    weight = torch.rand(T, K).requires_grad_()
    routes = Routes(expert_TK=torch.rand(T, E).topk(K, dim=1).indices, weight_TK=weight, num_experts=E)
    formula = ExpertFormula("gated", "silu", H, F, gate="gate", up="up", down="down")
    y = ExpertFFN(formula, resolve(MXFP8MoEConfig(enabled=True, **keys), "cpu"), Local(), E)(x, routes, weights)
    y.backward(torch.randn(T, H).to(dtype))
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad} | {role: w.grad for role, w in weights.items()}


def equal(a: dict, b: dict) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("keys", [{}, {"recipe": "mxfp8"}, {"recipe": "mxfp8", "scale_block_size": 128, **ALL_WIRES},
                                  {"recipe": "bf16"}, {"scaling_mode": "floor", **NO_WIRES},
                                  {"preactivation_dtype": "bf16"}], ids=str)
def test_all_roundings_together_are_the_layers_own(keys, dtype):
    """Bit for bit on a CPU, where the layer too multiplies dequantised values."""
    own = step(dtype, **keys)
    with simulated():
        assert equal(step(dtype, **keys), own)
    assert equal(step(dtype, **keys), own)  # and the layer is itself again


@pytest.mark.parametrize("keys, expected", [
    ({"recipe": "bf16"}, set()), ({}, DEFAULT), ({"recipe": "mxfp8"}, DEFAULT | OF_WGRAD),
    (ALL_WIRES, DEFAULT | {"combine_fwd", "dispatch_bwd"}), ({"preactivation_dtype": "bf16"}, DEFAULT - {"pre"}),
    (NO_WIRES, DEFAULT - {"dispatch_fwd", "combine_bwd"} | {"x", "g"})], ids=str)
def test_what_is_rounded_is_measured(keys, expected):
    own, measured = step(**keys), Measured()
    with simulated(measured=measured):
        assert equal(step(**keys), own)
    found = measured.read()
    assert set(found["sqnr_db"]) == set(found["shrinkage"]) == expected
    for name, db in found["sqnr_db"].items():
        # Of what is rounded already, re-scaling changes almost nothing.
        least = 80 if name in ("x_wgrad", "h_wgrad") else 28
        assert least < db and (db < 40 or name.endswith("_wgrad")), name
        assert -3e-3 < found["shrinkage"][name] < 1e-3


def test_each_rounding_can_be_left_out():
    every = {"recipe": "mxfp8", **NO_WIRES, "preactivation_dtype": "bf16"}
    rounded, exact = step(**every), step(recipe="bf16")
    with simulated(off=NAMES):
        nothing_is_rounded = step(**every)
    assert all(sqnr_db(exact[name], nothing_is_rounded[name]) > 100 for name in exact)
    for name in NAMES:
        measured = Measured()
        with simulated(off={name}, measured=measured):
            changed = step(**every)
        assert not equal(changed, rounded) or name in ("x_wgrad", "h_wgrad")  # whose re-scaling is nearly exact
        assert set(measured.read()["sqnr_db"]) == set(NAMES) - {name}
        worse = [part for part in exact if sqnr_db(exact[part], changed[part]) < sqnr_db(exact[part], rounded[part])
                 - 0.2]
        assert not worse, name


def test_measures():
    measured = Measured()
    x = torch.randn(64, 128)
    measured.add("half", x, x / 2)
    measured.add("half", torch.zeros(4), torch.zeros(4))
    measured.add("exact", x, x)
    measured.add("cast", x, quantize(x).dequantize())
    measured.add("nothing", torch.zeros(4), torch.zeros(4))
    found = measured.read()
    assert found["sqnr_db"] == pytest.approx({"half": 6.0206, "exact": 200, "cast": sqnr_db(x, quantize(
        x).dequantize())}, abs=1e-3)
    assert found["shrinkage"]["half"] == pytest.approx(-0.5) and found["shrinkage"]["exact"] == 0


def test_unknown_roundings_are_refused():
    with pytest.raises(ValueError, match=r"\['pre'\] cannot be left out here; expected some of .* The config"):
        with simulated(off={"pre"}):
            pass
