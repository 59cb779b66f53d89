# SPDX-License-Identifier: Apache-2.0
"""The scaled grouped GEMM against a float32 loop over groups, and against a loop over dequantized operands."""

import pytest
import torch

from ds_mxfp8_moe.compute.mx import quantize, quantize_tiles, sqnr_db
from ds_mxfp8_moe.scaled_grouped_mm import KernelPreference, ScaleCalculationMode, _to_mxfp8_then_scaled_grouped_mm
from tests.support.scaled_grouped_mm_cases import (
    CASES,
    ENDS,
    K,
    N,
    check_that_rows_past_the_last_group_touch_nothing,
    compiled_and_eager,
    loop,
    offs,
    operands,
    run,
)


def quantize_rows(x, block, mode):
    """x rounded to MXFP8 along each group's rows, every group padded to whole blocks by itself."""
    out, start = torch.zeros(x.shape), 0
    for end in ENDS:
        part = x[start:end].float()
        pad = -part.shape[0] % block
        part = torch.nn.functional.pad(part, (0, 0, 0, pad)).t()
        if part.shape[1]:
            out[start:end] = quantize(part, block, mode).dequantize().t()[:end - start]
        start = end
    return out


@pytest.mark.parametrize("mx_input", (False, True), ids=("plain A", "MXTensor A"))
@pytest.mark.parametrize("block, mode, hp", CASES)
def test_against_dequantized_operands(block, mode, hp, mx_input):
    """The same roundings, written out a second time; only the order of float32 sums differs."""
    a, w, grad = operands(torch.float32)
    a_q = quantize(a, block, mode).dequantize()
    g_q = quantize(grad, block, mode).dequantize()
    if block == 128:
        w_k = w_n = quantize_tiles(w, mode).dequantize()
    else:
        w_k = quantize(w, block, mode).dequantize()
        w_n = quantize(w.transpose(-1, -2), block, mode).dequantize().transpose(-1, -2)
    g_w, a_w = (grad, a_q if mx_input else a) if hp else (quantize_rows(grad, block, mode),
                                                          quantize_rows(a_q, block, mode))
    expected = loop(a_q, w_k, g_q)[0], loop(a_q, w_n, g_q)[1], loop(a_w, w, g_w)[2]
    actual = run(quantize(a, block, mode) if mx_input else a, w, grad, wgrad_with_hp=hp, scale_calculation_mode=mode,
                 block_size=block, out_dtype=torch.float32)
    for name, x, y in zip(("out", "dA", "dW"), expected, actual, strict=True):
        assert sqnr_db(x, y) >= 100, name


@pytest.mark.parametrize("mx_input", (False, True), ids=("plain A", "MXTensor A"))
def test_a_kernel_that_rescales_rows_gets_rows(monkeypatch, mx_input):
    """Hopper's, with blocks of 128. On a CPU the rows are re-scaled before the product."""
    monkeypatch.setattr("ds_mxfp8_moe.scaled_grouped_mm.rescales_rows", lambda device, block: block == 128)
    a, w, grad = operands(torch.float32)
    expected = loop(*(quantize_rows(quantize(x, 128).dequantize(), 128, "rceil") if x is not w else w
                      for x in (a, w, grad)))[2]
    actual = run(quantize(a, 128) if mx_input else a, w, grad, block_size=128, out_dtype=torch.float32)[2]
    assert sqnr_db(expected, actual) >= 100


@pytest.mark.parametrize("hp", (True, False))
def test_gradient_as_mxtensor(hp):
    """The gradient of unpermute: used as it is, so dA equals that of the plain gradient which quantizes to it."""
    a, w, grad = operands()
    mx = quantize(grad.bfloat16())
    plain = run(a, w, grad, wgrad_with_hp=hp)
    given = run(a, w, mx, wgrad_with_hp=hp)
    assert torch.equal(plain[1], given[1])
    assert sqnr_db(loop(a, w, grad)[2], given[2]) >= 25


@pytest.mark.parametrize("rows, ends", ((0, [0, 0]), (300, [0, 0]), (300, [0, 300]), (300, [300, 300]), (300, [1, 2]),
                                        (300, [31, 33]), (300, [128, 256])), ids=str)
@pytest.mark.parametrize("hp", (True, False))
def test_groups_of_any_size(rows, ends, hp):
    a, w, grad = (x[:n] for x, n in zip(operands(), (rows, 2, rows), strict=True))
    found = run(a, w, grad, ends, wgrad_with_hp=hp)
    assert [x.shape for x in found] == [(rows, N), (rows, K), w.shape]
    for bar, x, y in zip((28, 26, 25), loop(a, w, grad, ends), found, strict=True):
        assert sqnr_db(x, y) >= bar - 1  # a bar for many rows: one row alone scatters by a dB


@pytest.mark.parametrize("a_dtype, w_dtype, out_dtype", [(torch.bfloat16, torch.bfloat16, torch.bfloat16),
                                                         (torch.float32, torch.float32, torch.bfloat16),
                                                         (torch.float32, torch.bfloat16, torch.float32),
                                                         (torch.float16, torch.float16, torch.float16)], ids=str)
@pytest.mark.parametrize("hp", (True, False))
def test_dtypes(a_dtype, w_dtype, out_dtype, hp):
    a, w, grad = operands(torch.float32)
    out, da, dw = run(a.to(a_dtype), w.to(w_dtype), grad, wgrad_with_hp=hp, out_dtype=out_dtype)
    assert (out.dtype, da.dtype, dw.dtype) == (out_dtype, a_dtype, w_dtype)
    for bar, x, y in zip((28, 26, 50 if hp else 25), loop(a, w, grad), (out, da, dw), strict=True):
        assert sqnr_db(x, y) >= bar
    assert not out[ENDS[-1]:].any() and not da[ENDS[-1]:].any() and not dw[1].any()  # past the end; an empty group


@pytest.mark.parametrize("mx_input", (False, True), ids=("plain A", "MXTensor A"))
@pytest.mark.parametrize("hp", (True, False))
def test_gradients_of_float32_operands_are_not_rounded_to_bf16(hp, mx_input, monkeypatch):
    """A bf16 result rounds the gradient that comes back to bf16, and nothing after it."""
    # Emulation would compute in float32 anyway.
    monkeypatch.setattr("ds_mxfp8_moe.compute.grouped_gemm.emulated", lambda *_: False)
    a, w, grad = operands(torch.float32)
    grad = grad.bfloat16()
    given = quantize(a) if mx_input else a
    of_bf16, of_float32 = (run(given, w, grad, wgrad_with_hp=hp, out_dtype=dtype)
                           for dtype in (torch.bfloat16, torch.float32))
    for name, x, y in zip(("dA", "dW"), of_float32[1:], of_bf16[1:], strict=True):
        assert y.dtype == torch.float32 and sqnr_db(x, y) >= 100, name


def test_rows_past_the_last_group_touch_nothing():
    check_that_rows_past_the_last_group_touch_nothing("cpu")


def test_nan_in_one_row_stays_in_its_group():
    a, w, grad = operands()
    a[60, 3] = float("nan")
    out, da, dw = run(a, w, grad)
    assert out[60].isnan().all() and not out[:60].isnan().any() and not out[61:].isnan().any()
    assert dw[2].isnan().any() and not dw[[0, 1, 3]].isnan().any() and not da.isnan().any()


@pytest.mark.parametrize("shape", ((N, ), (len(ENDS), N)), ids=str)
def test_bias(shape):
    a, w, grad = operands()
    plain, _, _ = run(a, w, grad, out_dtype=torch.float32)
    bias = torch.randn(shape, requires_grad=True)
    out = _to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), torch.tensor(ENDS, dtype=torch.int32), bias,
                                           out_dtype=torch.float32)
    out.backward(grad)
    expected_grad, start = torch.zeros(len(ENDS), N), 0
    for e, end in enumerate(ENDS):
        row = bias.detach() if bias.dim() == 1 else bias.detach()[e]
        assert torch.equal(out[start:end], plain[start:end] + row)
        expected_grad[e], start = grad[start:end].sum(0), end
    assert not out[ENDS[-1]:].any()
    torch.testing.assert_close(bias.grad, expected_grad.sum(0) if bias.dim() == 1 else expected_grad)


def test_hooks_on_saved_tensors_see_plain_tensors():
    """Offloading and DeepSpeed's checkpointing move saved tensors; an MXTensor among them would be dequantized."""
    a, w, _ = operands()
    seen = []

    def pack(t):
        seen.append((type(t), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for given in (a.clone().requires_grad_(), quantize(a).requires_grad_()):
            _to_mxfp8_then_scaled_grouped_mm(given, w.transpose(-2, -1), torch.tensor(ENDS, dtype=torch.int32))
    assert {t for t, _ in seen} == {torch.Tensor}
    assert [d for _, d in seen].count(torch.float8_e4m3fn) == 2


def test_no_grad_and_partial_gradients():
    a, w, grad = operands()
    offs = torch.tensor(ENDS, dtype=torch.int32)
    both = run(a, w, grad)
    with torch.no_grad():
        assert torch.equal(both[0], _to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offs))
    for index in (0, 1):
        leaves = [a.clone(), w.clone()]
        leaves[index].requires_grad_()
        _to_mxfp8_then_scaled_grouped_mm(leaves[0], leaves[1].transpose(-2, -1), offs).backward(grad.bfloat16())
        assert torch.equal(leaves[index].grad, both[1 + index]) and leaves[1 - index].grad is None


def test_accepted_for_torchao():
    a, w, grad = operands()
    expected = run(a, w, grad)
    actual = run(a, w, grad, kernel_preference=KernelPreference.EMULATED, pad_token_groups_for_grouped_mm=True,
                 scale_calculation_mode=ScaleCalculationMode.RCEIL)
    for x, y in zip(expected, actual, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("error, match, change", [
    (ValueError, "end of each group", dict(offs=offs(10, 20, dtype=torch.int64))),
    (ValueError, "end of each group", dict(offs=offs(10, 20, 30))),
    (ValueError, "must ascend", dict(offs=offs(20, 10))),
    (ValueError, "must ascend", dict(offs=offs(20, 65))),
    (ValueError, r"expected A \[M, K\]", dict(A=torch.zeros(64, 32))),
    (ValueError, "multiples of 32", dict(B_t=torch.zeros(2, 64, 40))),
    (TypeError, "B_t is .*; expected a plain tensor", dict(B_t=quantize(torch.zeros(2, 64, 32)))),
    (ValueError, "leave block_size out", dict(A=quantize(torch.zeros(64, 64)), block_size=128)),
    (ValueError, "block_size is 64", dict(block_size=64)),
    (ValueError, "kernel_preference is 'fast'", dict(kernel_preference="fast")),
    (TypeError, r"A is \[\[1.0\]\], of type list", dict(A=[[1.0]])),
    (TypeError, "out_dtype", dict(out_dtype=torch.int8)),
    (ValueError, "bias must be", dict(bias=torch.zeros(5))),
    (ValueError, "A is on cpu, B_t on meta, offs on cpu: expected all on one device",
     dict(B_t=torch.zeros(2, 64, 32, device="meta"))),
])
def test_bad_input(error, match, change):
    good = dict(A=torch.zeros(64, 64), B_t=torch.zeros(2, 64, 32), offs=offs(10, 64))
    _to_mxfp8_then_scaled_grouped_mm(**good)
    with pytest.raises(error, match=match):
        _to_mxfp8_then_scaled_grouped_mm(**good | change)


def test_double_backward_is_a_clear_error():
    a, w, _ = operands()
    a.requires_grad_()
    out = _to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), torch.tensor(ENDS, dtype=torch.int32))
    da, = torch.autograd.grad(out.sum(), a, create_graph=True)
    with pytest.raises(RuntimeError):
        da.sum().backward()


@pytest.mark.parametrize("hp", (True, False))
@pytest.mark.parametrize("block", (32, 128))
def test_compiles_in_one_graph(block, hp):
    assert all(torch.equal(x, y) for x, y in compiled_and_eager("cpu", "aot_eager", block, hp))
