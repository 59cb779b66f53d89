# SPDX-License-Identifier: Apache-2.0
"""The activation kernels in Triton's interpreter. test_aot.py compiles them."""

import pytest
import torch

from ds_mxfp8_moe.compute.activation import _slope, _up_slope
from tests.support.activation_cases import ALL, GATED_ONLY, run_biases, run_case, run_no_rows
from tests.support.slow import slow_except

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RELU, RELU_SQUARED, GELU, GELU_TANH, SILU, SWIGLU_OAI, _, CLAMPED_SILU, _ = ALL

# Of all pairs, which the GPU's tests run, each activation with two layouts.
QUICK = (SILU, "gate_up"), (GELU, "up_gate"), (GELU_TANH, "mlp"), (RELU_SQUARED, "mlp"), (SWIGLU_OAI, "gate_up")


@pytest.mark.parametrize("act, layout", slow_except(
    [*QUICK, (SILU, "mlp"), (SILU, "up_gate"), (GELU, "gate_up"), (GELU_TANH, "gate_up"), (RELU, "mlp"),
     (RELU, "up_gate"), (RELU_SQUARED, "gate_up"), *((act, "up_gate") for act in GATED_ONLY)], *QUICK), ids=str)
def test_every_formula(interpreter, act, layout):
    interpreter(run_case, "cpu", act, layout, 160, dict(ends=(128, )))  # takes half the time of more rows


@pytest.mark.parametrize("act", ALL, ids=str)
def test_slopes_of_the_reference_are_torch_s(act):
    """Where an activation or a clamp is not smooth, the gradient passes at limits and NaN."""
    x = torch.tensor([-1e38, -100, -3, -1e-38, -0.0, 0, 1e-38, 0.5, 0.75, 1, 2.5, 3, 7, 7.5, 100, 1e30, float("nan"),
                      float("inf"), float("-inf")], requires_grad=True)
    gate, up = _slope(x.detach(), act), _up_slope(torch.ones_like(x), x.detach(), act)
    for value, slope in ((act.of_gate(x), gate), (act.of_up(x), up)):
        expected, = torch.autograd.grad(value.sum(), x)
        torch.testing.assert_close(slope, expected, equal_nan=True)


@pytest.mark.parametrize("keys", [
    dict(block=128),  # at F = 160 blocks lie across gate and up
    dict(block=128, mode="floor", dtype=F32, bias=True),
    dict(mode="floor", dtype=F16),
    dict(keep=False, bias=True, dtype=F32),
    dict(quantize=False, keep=False, bias=True),
], ids=str)
def test_every_recipe(interpreter, keys):
    interpreter(run_case, "cpu", SILU, "gate_up", 160, keys)


@pytest.mark.parametrize("act, keys", [
    (GELU, dict(block=128)), (CLAMPED_SILU, dict(block=128, keep=False, bias=True))], ids=str)
def test_blocks_across_up_and_gate(interpreter, act, keys):
    interpreter(run_case, "cpu", act, "up_gate", 160, keys)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_biases(interpreter, dtype):
    interpreter(run_biases, "cpu", 160, dtype)


def test_no_rows(interpreter):
    interpreter(run_no_rows, "cpu")
