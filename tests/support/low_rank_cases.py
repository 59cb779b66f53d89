# SPDX-License-Identifier: Apache-2.0
"""The kernels of adapters' products against the same in float64, and against plain torch."""

import torch

from ds_mxfp8_moe.compute import low_rank as plain
from ds_mxfp8_moe.compute.mx import dequantize, parts_of, quantize, sqnr_db

BF16 = torch.bfloat16
ENDS = 128, 128, 384, 384  # the second and the last expert have no rows, and a tile lies beyond all groups
BEYOND = 128


def run_case(device: str, block: int, W: int, R: int, rank_first: bool, ends: tuple = ENDS) -> None:
    """`block`: of rows in MXFP8. 0: plain rows."""
    from ds_mxfp8_moe.ops.triton_kernels import low_rank as kernels
    torch.manual_seed(W + R + block)
    P, E = ends[-1] + BEYOND, len(ends)
    x = (torch.randn(P, W) * torch.exp2(torch.randn(P, 1))).to(BF16)
    x[5], x[6], x[7, 3], x[8, -1] = 0, 1e-30, float("nan"), float("inf")
    x = quantize(x, block, "rceil") if block else x
    y, low = torch.randn(P, W).to(BF16), torch.randn(P, R).to(BF16)
    low[5] = 0
    factor = torch.randn(E, R, W).to(BF16) if rank_first else torch.randn(E, W, R).to(BF16).transpose(1, 2)
    ends_E = torch.tensor(ends, dtype=torch.int32)
    x_there = parts_of(
        x.with_parts(x.qdata.to(device), x.scale_bytes.to(device).t().contiguous().t()) if block else x.to(device))
    low_there, factor_there, ends_there = (one.to(device) for one in (low, factor, ends_E))

    added = y.to(device, copy=True)
    kernels.add_low_rank(added, low_there, factor_there, ends_there)
    got = (kernels.low_rank_rows(x_there, factor_there, ends_there), added,
           kernels.low_rank_wgrad(low_there, x_there, factor_there, ends_there))
    assert got[2].stride() == factor.stride()
    exact = (dequantize(x, torch.float32) if block else x).double()
    expected = [torch.zeros(P, R).double(), y.double(), torch.zeros(E, R, W).double()]
    for e, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
        rows = slice(begin, end)
        expected[0][rows] = exact[rows] @ factor[e].double().t()
        expected[1][rows] += low[rows].double() @ factor[e].double()
        expected[2][e] = low[rows].double().t() @ exact[rows]
    of_torch = (plain.low_rank_rows(x, factor, ends_E), plain.add_low_rank(y.clone(), low, factor, ends_E),
                plain.low_rank_wgrad(low, x, factor, ends_E))
    for name, one, wanted, other in zip(("rows", "add", "wgrad"), got, expected, of_torch, strict=True):
        for found in one.cpu(), other:
            finite = wanted.isfinite()
            assert torch.equal(found.isfinite(), finite), name
            decibel = sqnr_db(wanted[finite], found[finite].double())
            assert decibel > 48, f"{name}: {decibel:.1f} dB"
    assert torch.equal(added[ends[-1]:].cpu(), y[ends[-1]:])

    bias = torch.randn(E, W).to(BF16)
    products = kernels.low_rank_rows(x_there, bias.to(device).unsqueeze(1), ends_there, torch.float32).squeeze(1).cpu()
    wanted = plain.weighted_bias_backward(x, bias, ends_E)[:ends[-1]]
    finite = wanted.isfinite()
    assert torch.equal(products[:ends[-1]].isfinite(), finite) and not products[ends[-1]:].any()
    assert sqnr_db(wanted[finite], products[:ends[-1]][finite]) > 80


def run_no_rows(device: str) -> None:
    from ds_mxfp8_moe.ops.triton_kernels import low_rank as kernels
    x, y, low = (torch.empty(0, width, dtype=BF16, device=device) for width in (64, 64, 8))
    factor, ends_E = torch.ones(3, 8, 64, dtype=BF16, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    assert kernels.low_rank_rows(x, factor, ends_E).shape == (0, 8)
    kernels.add_low_rank(y, low, factor, ends_E)
    assert not kernels.low_rank_wgrad(low, x, factor, ends_E).any()
