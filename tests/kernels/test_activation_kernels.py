# SPDX-License-Identifier: Apache-2.0
"""The activation kernels in Triton's interpreter, compiled for Hopper and Blackwell, and traced."""

import re

import pytest
import torch
from activation_cases import problem, run_biases, run_case, run_no_rows, same_bytes
from aot import launches_for
from interpreter import first_programs
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_mxfp8_moe.ops.mx_format import MXParts
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


def first_tile(P, F, block, size):
    """The first tile, of `size`, where offsets in the tile are beyond int32. Nothing else is touched."""
    R, C = size
    pre, t, weight, _ = problem("mlp", C, hard=False, ends=(R, ))
    far_pre, far_t, far_weight = torch.empty(P, F, dtype=BF16), torch.empty(P, F, dtype=BF16), torch.empty(P)
    far_pre[:R, :C], far_t[:R, :C], far_weight[:R] = pre, t, weight
    how = ("silu", "mlp", block)
    h, kept = kernels.activate(pre, weight, *how, keep=True)
    with first_programs():
        far_h, far_kept = kernels.activate(far_pre, far_weight, *how, keep=True)
    pairs = [(far, MXParts(near.qdata[:32], near.scale_bytes[:32], block))
             for far, near in ((far_h, h), (far_kept, kept))]
    if P > F:
        small = kernels.activate_backward(t, pre, weight, *how, columns=True)
        with first_programs():
            far = kernels.activate_backward(far_t, far_pre, far_weight, *how, columns=True)
        pairs.append((far.columns, small.columns))
    for actual, expected in pairs:
        data, scale = (x[tuple(map(slice, like.shape))] for x, like in (
            (actual.qdata, expected.qdata), (actual.scale_bytes, expected.scale_bytes)))
        same_bytes(MXParts(data, scale, block), expected)


@pytest.mark.parametrize("case", [(17 * 10**6, 128, 128, (128, 128)), (35 * 10**6, 64, 32, (64, 64)),
                                  (32, 70 * 10**6, 32, (32, 128))], ids=str)
def test_offsets_beyond_int32_in_a_tile(interpreter, case):
    interpreter(first_tile, *case)


def every_launch(F, dtype, block, activation, layout):
    P, G = 256, F if layout == "mlp" else 2 * F
    pre, t, weight = torch.empty(P, G, dtype=dtype), torch.empty(P, F, dtype=dtype), torch.empty(P)
    bias = dict(bias_EG=torch.empty(6, G, dtype=dtype), ends_E=torch.empty(6, dtype=torch.int32))
    options = (activation, layout, block)
    h, kept = kernels.activate(pre, weight, *options, keep=True)
    kernels.activate(pre, weight, *options, quantize=False, **bias)
    gradients = [kernels.activate_backward(t, pre, weight, *options, plain=True, **bias)]
    for forms in (dict(plain=True, rows=True), dict(rows=True, columns=True)):
        gradients.append(kernels.activate_backward(t, kept, weight, *options, **forms))
    return h, kept, gradients


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("dtype, block, activation, layout", [
    (BF16, 32, "silu", "gate_up"), (BF16, 128, "silu", "gate_up"), (BF16, 128, "gelu", "mlp"),
    (F16, 32, "gelu_tanh", "up_gate"), (F32, 128, "relu", "mlp")], ids=str)
def test_compiled(arch, dtype, block, activation, layout):
    with launches_for(arch) as launches:
        every_launch(512, dtype, block, activation, layout)
        x = torch.empty(256, 512, dtype=dtype)
        ends, weight = torch.empty(6, dtype=torch.int32), torch.empty(256)
        kernels.group_sums(x, ends, weight)
        kernels.add_weighted_bias(x, torch.empty(6, 512, dtype=dtype), weight, ends, torch.float32)
    assert len(launches) == 11
    for launch in launches:
        capped = "_backward" in launch.kernel and (arch, launch.registers) == (100, 128)
        assert launch.stack_bytes <= (16 if capped else 0), launch.kernel
        # What these two flush is nothing beside 1.
        assert ".ftz" not in re.sub(r"(ex2|rsqrt)\.approx\.ftz", "", launch.ptx), launch.kernel
        assert "ld.global.v4" in launch.ptx or "_sum_shares" in launch.kernel, launch.kernel


@pytest.mark.parametrize("F, block", [(256, 32), (256, 128), (160, 128)])
def test_traced(F, block):
    with FakeTensorMode():
        h, kept, gradients = every_launch(F, BF16, block, "silu", "gate_up")
    blocks = -(-F // block)
    assert h.qdata.shape == (256, F) and h.scale_bytes.shape == (256, blocks) and h.scale_bytes.stride() == (1, 256)
    assert kept.qdata.shape == (256, 2, F) and kept.scale_bytes.shape == (256, 2, blocks)
    plain, both, columns = gradients
    assert plain.dweight_P.shape == (256, ) and plain.plain.shape == both.rows.qdata.shape == (256, 2 * F)
    assert both.rows.scale_bytes.shape == (256, -(-2 * F // block)) and columns.columns.qdata.shape == (2 * F, 256)
    assert columns.columns.scale_bytes.shape == (2 * F, 256 // block)
