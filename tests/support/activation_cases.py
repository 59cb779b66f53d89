# SPDX-License-Identifier: Apache-2.0
"""Activation kernels against the plain-torch functions, on whatever device the kernels run; those on the CPU."""

import torch

from ds_mxfp8_moe.compute import activation as plain
from ds_mxfp8_moe.compute.formula import SWIGLU_OAI, Activation
from ds_mxfp8_moe.compute.mx import MXTensor, sqnr_db

LEAST_DB = 45
ENDS = (128, 128, 256)
GATED_ONLY = [SWIGLU_OAI, Activation("swiglu_oai", 1.5, 0.75), Activation("silu", limit=2.5),
              Activation("relu_squared", limit=1.0)]
ALL = [*map(Activation, ("relu", "relu_squared", "gelu", "gelu_tanh", "silu")), *GATED_ONLY]
HUGE = 1e38  # HUGE * alpha is finite


def problem(layout, F, dtype=torch.bfloat16, bias=False, hard=True, ends=ENDS, limit=None):
    """Rows that meet an activation: pre_PG, t_PF, weight_P, and options: the bias and where groups end, or nothing."""
    generator = torch.Generator().manual_seed(F)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    P, E, G = ends[-1], len(ends), F if layout == "mlp" else 2 * F
    options = {}
    if bias:
        options = {"bias_EG": (randn(E, G) / 4).to(dtype), "ends_E": torch.tensor(ends, dtype=torch.int32)}
    pre, t = randn(P, G) * torch.exp2(randn(P, 1)), randn(P, F)
    weight = torch.rand(P, generator=generator)
    if hard:
        pre[0, 1], pre[1, 40], pre[2, -1] = float("nan"), float("inf"), float("-inf")
        pre[3], pre[4], pre[5], t[6] = 0, 1e-38, -100, 0
        t[7, 3], t[8, -2] = float("nan"), float("inf")
        if limit is not None:
            pre[9], pre[10] = limit, -limit
            pre[11, ::2], pre[12, 1::2] = HUGE, -HUGE
            pre[13], pre[14] = HUGE, -HUGE
    weight[100:128], pre[100:128], t[100:128] = 0, 0, 0  # padding
    return pre.to(dtype), t.to(dtype), weight, options


def run_case(device, act, layout, F, keys=None):
    """Runs the kernels of an Activation on `device` and compares everything they return."""
    from ds_mxfp8_moe.ops.triton_kernels import activation as kernels
    keys = {"block": 32, "mode": "rceil", "quantize": True, "keep": True, **(keys or {})}
    block, mode, quantized, keep = (keys.pop(key) for key in ("block", "mode", "quantize", "keep"))
    pre, t, weight, bias = problem(layout, F, **keys, limit=act.limit)
    how, constants = (act.name, layout, block, mode), {"alpha": act.alpha, "limit": act.limit}

    def there(x):
        return x.to(device)

    bias_there = {name: there(x) for name, x in bias.items()} | constants
    bias |= constants
    expected_h, expected_kept = plain.activate(pre, weight, *how, quantized=quantized, keep=keep, **bias)
    h, kept = kernels.activate(there(pre), there(weight), *how, quantize=quantized, keep=keep, **bias_there)
    same(h, expected_h)
    if keep:
        same_bytes(kept, expected_kept)  # casts alone: no exp in it
    else:
        assert kept is None

    source = expected_kept if keep else pre
    forms = ({"plain"}, {"rows"}, {"plain", "rows"}, {"rows", "columns"}) if quantized else ({"plain"}, )
    for wanted in ({form: True for form in some} for some in forms):
        expected = plain.activate_backward(t, source, weight, *how, **wanted, **bias)
        source_there = there(source)
        got = plain.Gradients(*kernels.activate_backward(there(t), source_there.parts if keep else source_there,
                                                         there(weight), *how, **wanted, **bias_there))
        close(got.dweight_P.cpu(), expected.dweight_P)
        for name in ("plain", "rows", "columns"):
            assert (getattr(got, name) is not None) == (name in wanted)
            if name in wanted:
                same(getattr(got, name), getattr(expected, name))


def run_biases(device, F, dtype, ends=ENDS):
    from ds_mxfp8_moe.ops.triton_kernels.activation import add_weighted_bias, group_sums
    pre, _, weight, options = problem("mlp", F, dtype, bias=True, hard=False, ends=ends)
    bias_EN, ends_E = options["bias_EG"], options["ends_E"]
    pre_there, weight_there, ends_there = (x.to(device) for x in (pre, weight, ends_E))
    close(group_sums(pre_there, ends_there).cpu(), plain.group_sums(pre, ends_E))
    close(group_sums(pre_there, ends_there, weight_there).cpu(), plain.group_sums(pre, ends_E, weight))
    expected = plain.add_weighted_bias(pre, bias_EN, weight, ends_E)
    assert torch.equal(add_weighted_bias(pre_there, bias_EN.to(device), weight_there, ends_there).cpu(), expected)


def run_no_rows(device):
    from ds_mxfp8_moe.ops.triton_kernels.activation import activate, activate_backward, add_weighted_bias, group_sums
    pre, t, weight, ends = (torch.empty(shape, device=device) for shape in ((0, 128), (0, 64), (0, ), (0, )))
    ends = torch.zeros(3, dtype=torch.int32, device=device)
    h, kept = activate(pre, weight, "silu", "gate_up", keep=True)
    assert h.qdata.shape == (0, 64) and h.scale_bytes.shape == (0, 2) and kept.qdata.shape == (0, 2, 64)
    for block in (32, 128):  # 64 columns: at 128, blocks lie across gate and up
        got = plain.Gradients(*activate_backward(t, pre, weight, "silu", "gate_up", block, plain=True, rows=True,
                                                 columns=True))
        assert got.dweight_P.shape == (0, ) and got.plain.shape == got.rows.qdata.shape == (0, 128)
        assert got.columns.qdata.shape == (128, 0) and got.rows.scale_bytes.shape == (0, 128 // block)
    assert torch.equal(group_sums(pre, ends), torch.zeros(3, 128, device=device))
    assert add_weighted_bias(pre, torch.ones(3, 128, device=device), weight, ends).shape == (0, 128)


def close(got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-5 * expected[expected.isfinite()].abs().max().item(),
                               equal_nan=True)


def _order(data):
    """e4m3 bytes as integers in the order of their values."""
    byte = data.view(torch.uint8).int()
    return torch.where(byte >= 128, 128 - byte, byte)


def same_bytes(got, expected):
    assert torch.equal(got.scale_bytes.cpu(), expected.scale_bytes)
    assert torch.equal(got.qdata.cpu().view(torch.uint8), expected.qdata.view(torch.uint8))


def same(got, expected):
    """Equal but for single steps of rounding, in fewer than one value of a thousand."""
    got = (MXTensor.of(got, expected.dtype) if isinstance(expected, MXTensor) else got).cpu()
    assert got.dtype == expected.dtype and got.shape == expected.shape
    values, expected_values = got, expected
    if isinstance(expected, MXTensor):
        values, expected_values = got.dequantize(torch.float32), expected.dequantize(torch.float32)
    values, expected_values = values.float(), expected_values.float()
    known = expected_values.nan_to_num(0, 0, 0).abs()
    distance = (values - expected_values).nan_to_num(0, 0, 0).abs()
    if isinstance(expected, MXTensor):
        assert got.block_size == expected.block_size
        scale, expected_scale = got.scale_bytes.int(), expected.scale_bytes.int()
        moved = (scale != expected_scale).repeat_interleave(got.block_size, -1)[..., :got.shape[-1]]
        assert (scale - expected_scale).abs().max() <= 1 and moved.float().mean() < 1e-3
        steps = torch.where(moved, 0, _order(got.qdata) - _order(expected.qdata)).abs()
    else:
        steps = (distance / (known * max(torch.finfo(expected.dtype).eps, 3e-6)).clamp_min(1e-30)).ceil()
    # What float32 leaves of 1 + tanh(x) and the like where they cancel.
    steps = torch.where(distance <= known.max() * 4e-6, 0, steps)
    assert torch.equal(values.isnan(), expected_values.isnan())
    finite = expected_values.isfinite()
    assert torch.equal(values[~finite].nan_to_num(), expected_values[~finite].nan_to_num())
    assert steps.max() <= 1 and (steps > 0).float().mean() < 1e-3
    assert sqnr_db(expected_values[finite], values[finite]) > LEAST_DB
