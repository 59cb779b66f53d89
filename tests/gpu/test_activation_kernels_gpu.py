# SPDX-License-Identifier: Apache-2.0
"""The activation kernels on a GPU, with its exp, erf and casts."""

import pytest
import torch

from ds_mxfp8_moe.compute.activation import Gradients
from ds_mxfp8_moe.compute.formula import Activation
from tests.support.activation_cases import ALL, GATED_ONLY, problem, run_biases, run_case, run_no_rows
from tests.support.slow import slow_except, slow_unless

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ENDS = (128, 128, 640, 1024, 1024, 1536)


LAYOUTS = "mlp", "gate_up", "up_gate"


def one_layout(act, layout):
    """Each formula once, each layout several times."""
    layouts = LAYOUTS[1:] if act in GATED_ONLY else LAYOUTS
    return layout == layouts[ALL.index(act) % len(layouts)]


@pytest.mark.parametrize("act, layout", slow_unless(
    one_layout, ((act, layout) for act in ALL for layout in LAYOUTS if layout != "mlp" or act not in GATED_ONLY)),
    ids=str)
def test_every_formula(act, layout):
    for F in (160, 512):
        run_case("cuda", act, layout, F, dict(ends=ENDS))


EVERY_RECIPE = [dict(block=128), dict(block=128, mode="floor", dtype=F32), dict(mode="floor", dtype=F16),
                dict(keep=False, bias=True, dtype=F32), dict(block=128, bias=True),
                dict(quantize=False, keep=False, bias=True)]


# Of 96 columns, blocks lie across gate and up. Of 768 they do not.
@pytest.mark.parametrize("keys, F", slow_unless(
    lambda keys, F: F == 96 or F == 768 and keys is EVERY_RECIPE[0],
    ((keys, F) for keys in EVERY_RECIPE for F in (32, 96, 256, 768))), ids=str)
def test_every_recipe(keys, F):
    for act in (Activation("silu"), Activation("silu", limit=2.5)):
        run_case("cuda", act, "gate_up", F, keys | dict(ends=ENDS))


@pytest.mark.parametrize("N, dtype", slow_except(
    [(N, dtype) for N in (96, 1024) for dtype in (BF16, F16, F32)], (96, BF16), (1024, F32)), ids=str)
def test_biases(dtype, N):
    run_biases("cuda", N, dtype, ENDS)


def test_no_rows():
    run_no_rows("cuda")


def test_the_same_bits_every_time():
    from ds_mxfp8_moe.ops.triton_kernels.activation import activate_backward
    pre, t, weight, _ = problem("gate_up", 512, hard=False, ends=ENDS)
    pre, t, weight = pre.cuda(), t.cuda(), weight.cuda()
    first, second = (Gradients(*activate_backward(t, pre, weight, "silu", "gate_up", 128, rows=True, columns=True))
                     for _ in range(2))
    assert torch.equal(first.dweight_P, second.dweight_P)
    for a, b in ((first.rows, second.rows), (first.columns, second.columns)):
        assert torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
        assert torch.equal(a.scale_bytes, b.scale_bytes)


def test_past_two_to_the_31_elements():
    P, F, block = 1 << 19, 2048 + 128, 128
    from ds_mxfp8_moe.ops.triton_kernels.activation import activate, activate_backward
    pre = torch.zeros(P, 2 * F, dtype=BF16, device="cuda")
    tail, t, weight, _ = problem("gate_up", F, hard=False, ends=(256, ))
    pre[-256:] = tail.cuda()
    weights, gradient = torch.ones(P, device="cuda"), torch.zeros(P, F, dtype=BF16, device="cuda")
    weights[-256:], gradient[-256:] = weight.cuda(), t.cuda()
    options = ("silu", "gate_up", block)
    h, kept = activate(pre, weights, *options, keep=True)
    small_h, small_kept = activate(pre[-256:], weights[-256:], *options, keep=True)
    del pre
    assert torch.equal(h.qdata[-256:].view(torch.uint8), small_h.qdata.view(torch.uint8))
    assert torch.equal(kept.qdata[-256:].view(torch.uint8), small_kept.qdata.view(torch.uint8))
    got = Gradients(*activate_backward(gradient, kept, weights, *options, rows=True, columns=True))
    small = Gradients(*activate_backward(gradient[-256:], small_kept, weights[-256:], *options, rows=True,
                                         columns=True))
    assert torch.equal(got.rows.qdata[-256:].view(torch.uint8), small.rows.qdata.view(torch.uint8))
    assert torch.equal(got.columns.qdata[:, -256:].view(torch.uint8), small.columns.qdata.view(torch.uint8))
    assert torch.equal(got.dweight_P[-256:], small.dweight_P)
