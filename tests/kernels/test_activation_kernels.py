# SPDX-License-Identifier: Apache-2.0
"""The activation kernels in Triton's interpreter. test_aot.py compiles them."""

import pytest
import torch
from activation_cases import run_biases, run_case, run_no_rows
from slow import slow_except

from ds_mxfp8_moe.compute.activation import SLOPES
from ds_mxfp8_moe.compute.formula import ACTIVATIONS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


# Of all pairs, which the GPU's tests run, each activation with two layouts.
QUICK = ("silu", "gate_up"), ("gelu", "up_gate"), ("gelu_tanh", "mlp"), ("relu", "mlp"), ("swiglu_oai", "gate_up")


@pytest.mark.parametrize("activation, layout", slow_except(
    [*QUICK, ("silu", "mlp"), ("silu", "up_gate"), ("gelu", "gate_up"), ("gelu_tanh", "gate_up"), ("relu", "up_gate"),
     ("swiglu_oai", "up_gate")], *QUICK))
def test_every_formula(interpreter, activation, layout):
    interpreter(run_case, "cpu", activation, layout, 160, dict(ends=(128, )))  # takes half the time of more rows


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_of_the_reference_are_torch_s(activation):
    """That of relu at NaN is 1: the gradient passes."""
    x = torch.tensor([-100, -3, -1e-38, -0.0, 0, 1e-38, 0.5, 3, 7, 7.5, 100, float("nan")], requires_grad=True)
    expected, = torch.autograd.grad(ACTIVATIONS[activation](x).sum(), x)
    torch.testing.assert_close(SLOPES[activation](x.detach()), expected, equal_nan=True)


@pytest.mark.parametrize("keys", [
    dict(block=128),  # at F = 160 blocks lie across gate and up
    dict(block=128, mode="floor", dtype=F32, bias=True),
    dict(mode="floor", dtype=F16),
    dict(keep=False, bias=True, dtype=F32),
    dict(quantize=False, keep=False, bias=True),
], ids=str)
def test_every_recipe(interpreter, keys):
    interpreter(run_case, "cpu", "silu", "gate_up", 160, keys)


@pytest.mark.parametrize("activation, keys", [
    ("gelu", dict(block=128)), ("swiglu_oai", dict(block=128, keep=False, bias=True))], ids=str)
def test_blocks_across_up_and_gate(interpreter, activation, keys):
    interpreter(run_case, "cpu", activation, "up_gate", 160, keys)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_biases(interpreter, dtype):
    interpreter(run_biases, "cpu", 160, dtype)


def test_no_rows(interpreter):
    interpreter(run_no_rows, "cpu")
