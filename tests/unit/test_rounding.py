# SPDX-License-Identifier: Apache-2.0
"""Every cast rounds as a float64 oracle does, to the byte. A biased one would shift trainings."""

import pytest
import torch

from ds_mxfp8_moe.compute import casts, mx
from ds_mxfp8_moe.compute.activation import activate, activate_backward
from tests.support.float64_oracle import Bytes, cast, values

ROWS, COLUMNS = 384, 512


def normal(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)


def long_tailed(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gradients look like this: most values are far below the largest one of their block, many are subnormal."""
    x = normal()
    return (x * torch.exp(4 * normal().flip(1)) * 2.0**-20).to(dtype)


def bytes_of(x: mx.MXTensor) -> Bytes:
    return Bytes(x.qdata.view(torch.uint8), x.scale_bytes)


def same(actual: mx.MXTensor, expected: Bytes) -> None:
    data, scale = bytes_of(actual)
    assert torch.equal(scale, expected.scale) and torch.equal(data, expected.data)


@pytest.mark.parametrize("data", (normal, long_tailed))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("mode", ("rceil", "floor"))
@pytest.mark.parametrize("block", (32, 128))
def test_casts_equal_the_oracle(block, mode, dtype, data):
    x = data(dtype)
    rows, columns = casts.quantize_both(x, block, mode)
    expected = cast(x, (1, block), mode)
    for found in (mx.quantize(x, block, mode), casts.quantize(x, block, mode), rows):
        same(found, expected)
    expected_columns = cast(x.t(), (1, block), mode)
    for found in (casts.quantize_columns(x, block, mode), columns):
        same(found, expected_columns)
    # Weights: with blocks of 128, one scale serves a tile, and W and W^T round alike.
    of_weight = (128, 128) if block == 128 else (1, 32)
    for transposed in (False, True):
        found = casts.quantize_weights([x.unsqueeze(0)], block, mode, transposed)
        expected = cast(x.t() if transposed else x, of_weight, mode)
        same(found[0] if block == 32 else mx.MXTensor(found.qdata[0], found.scale[0], 128, dtype, tiled=True),
             expected)
    # The cast on the way to a weight gradient starts from rounded values, not from x.
    again = casts.rescale_columns(casts.quantize(x, block, mode), mode)
    same(again, cast(values(cast(x, (1, block), mode), (1, block)).t(), (1, block), mode))


@pytest.mark.parametrize("mode", ("rceil", "floor"))
def test_fused_casts_round_their_float32_result_once(mode):
    """h and dpre are cast from float32. A detour through bf16 would round twice."""
    pre, weight = normal(torch.bfloat16), torch.linspace(0.1, 1, ROWS)
    of_formula = {"activation": "silu", "layout": "gate_up", "block_size": 128, "scaling_mode": mode}
    h, kept = activate(pre, weight, **of_formula, quantized=True, keep=True)
    gate, up = pre.float().chunk(2, 1)
    same(h, cast(torch.nn.functional.silu(gate) * up * weight.unsqueeze(1), (1, 128), mode))
    halves = kept.flatten(0, 1) if not isinstance(kept, mx.MXTensor) else kept.view(-1, COLUMNS // 2)
    same(halves, cast(pre.view(-1, COLUMNS // 2), (1, 128), mode))
    t = normal(torch.bfloat16)[:, :COLUMNS // 2].flip(0)
    gradients = activate_backward(t, pre, weight, **of_formula, plain=True, rows=True, columns=True)
    gate.requires_grad_(), up.requires_grad_()
    (torch.nn.functional.silu(gate) * up * weight.unsqueeze(1)).backward(t.float())
    dpre = torch.cat([gate.grad, up.grad], 1)
    assert mx.sqnr_db(dpre, gradients.plain) > 50
    once, twice = (mx.sqnr_db(dpre, values(cast(x, (1, 128), mode), (1, 128))) for x in (dpre, gradients.plain))
    found = mx.sqnr_db(dpre, gradients.rows.dequantize(torch.float32))
    assert abs(found - once) < abs(found - twice)
