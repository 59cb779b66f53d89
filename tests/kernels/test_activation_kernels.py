# SPDX-License-Identifier: Apache-2.0
"""The activation kernels in Triton's interpreter, and traced. test_aot.py compiles them."""

import pytest
import torch
from activation_cases import run_biases, run_case, run_no_rows
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_mxfp8_moe.activation import Gradients
from ds_mxfp8_moe.ops.triton_kernels import activation as kernels

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("layout", ["mlp", "gate_up", "up_gate"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_every_formula(interpreter, activation, layout):
    interpreter(run_case, "cpu", activation, layout, 160, dict(ends=(128, )))  # takes half the time of more rows


@pytest.mark.parametrize("keys", [
    dict(block=128),  # at F = 160 blocks lie across gate and up
    dict(block=128, mode="floor", dtype=F32),
    dict(mode="floor", dtype=F16),
    dict(keep=False, bias=True, dtype=F32),
    dict(block=128, bias=True),
    dict(quantize=False, keep=False, bias=True),
], ids=str)
def test_every_recipe(interpreter, keys):
    interpreter(run_case, "cpu", "silu", "gate_up", 160, keys)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_biases(interpreter, dtype):
    interpreter(run_biases, "cpu", 160, dtype)


def test_no_rows(interpreter):
    interpreter(run_no_rows, "cpu")


@pytest.mark.parametrize("F, block", [(256, 32), (256, 128), (160, 128)])
def test_traced(F, block):
    options = ("silu", "gate_up", block)
    with FakeTensorMode():
        pre, t, weight = torch.empty(256, 2 * F, dtype=BF16), torch.empty(256, F, dtype=BF16), torch.empty(256)
        h, kept = kernels.activate(pre, weight, *options, keep=True)
        plain, both, columns = (Gradients(*kernels.activate_backward(t, source, weight, *options, **forms))
                                for source, forms in ((pre, dict(plain=True)), (kept, dict(plain=True, rows=True)),
                                                      (kept, dict(rows=True, columns=True))))
    blocks = -(-F // block)
    assert h.qdata.shape == (256, F) and h.scale_bytes.shape == (256, blocks) and h.scale_bytes.stride() == (1, 256)
    assert kept.qdata.shape == (256, 2, F) and kept.scale_bytes.shape == (256, 2, blocks)
    assert plain.dweight_P.shape == (256, ) and plain.plain.shape == both.rows.qdata.shape == (256, 2 * F)
    assert both.rows.scale_bytes.shape == (256, -(-2 * F // block)) and columns.columns.qdata.shape == (2 * F, 256)
    assert columns.columns.scale_bytes.shape == (2 * F, 256 // block)
