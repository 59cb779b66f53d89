# SPDX-License-Identifier: Apache-2.0
"""The casts and grouped GEMMs on a GPU against the same on the CPU: casts to the byte."""

import pytest
import torch

from ds_mxfp8_moe.compute.grouped_gemm import grouped_mm, grouped_mm_wgrad
from ds_mxfp8_moe.compute.mx import quantize, quantize_tiles, sqnr_db, transpose_rescale


def hard_values(dtype):
    x = torch.randn(256, 160) * torch.exp2(torch.randint(-40, 40, (256, 1)).float())
    x[0, 3], x[1, 40], x[2] = float("nan"), float("inf"), 0.0
    x[3], x[4] = -0.0, 2.0**-140
    return x.to(dtype)


def same_bytes(a, b):
    assert torch.equal(a.qdata.view(torch.uint8).cpu(), b.qdata.view(torch.uint8))
    assert torch.equal(a.scale.view(torch.uint8).cpu(), b.scale.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_casts_to_the_byte(mode, dtype):
    x = hard_values(dtype)
    for block in (32, 128):
        mx = quantize(x, block, mode)
        same_bytes(quantize(x.cuda(), block, mode), mx)
        same_bytes(transpose_rescale(quantize(x.cuda(), block, mode)), transpose_rescale(mx))
        values = quantize(x.cuda(), block, mode).dequantize().cpu()
        assert torch.equal(values.nan_to_num(), mx.dequantize().nan_to_num())
    same_bytes(quantize_tiles(x.cuda(), mode), quantize_tiles(x, mode))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(128, 0, 256, 128), (0, 0, 0, 512), (0, 0, 0, 0), (384, 128, 0, 0)])
def test_grouped_mm(sizes, dtype):
    rows, ends = 640, torch.tensor(sizes).cumsum(0).int()  # 128 rows lie past the last group
    a, g = torch.randn(rows, 96).to(dtype), torch.randn(rows, 160).to(dtype)
    b = torch.randn(4, 160, 96).to(dtype)
    turned = b.transpose(1, 2).contiguous().transpose(1, 2)
    outs = [grouped_mm(a.cuda(), weights.cuda(), ends.cuda()).cpu() for weights in (b, turned)]
    wgrad = grouped_mm_wgrad(g.cuda(), a.cuda(), ends.cuda()).cpu()
    start = 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            assert all(sqnr_db(a[start:end].float() @ b[e].float().t(), out[start:end]) > 45 for out in outs)
            assert sqnr_db(g[start:end].float().t() @ a[start:end].float(), wgrad[e]) > 45
        else:
            assert not wgrad[e].any()
        start = end
    assert not any(out[start:].any() for out in outs)
