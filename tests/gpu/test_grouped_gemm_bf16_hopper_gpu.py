# SPDX-License-Identifier: Apache-2.0
"""The Gluon grouped GEMM of 16-bit operands against float64 products, with weights lying in memory in many ways."""

import pytest
import torch

from tests.support import conformance
from tests.support.grouped_gemm_hopper_gpu_cases import relative
from tests.support.slow import slow_except

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E = 4
# N x K of one part; the last two are multiples of 32 alone.
SHAPES = [(2048, 1024), (1408, 2048), (96, 160), (160, 32)]
SIZES = {"few": (0, 256, 0, 128), "skewed": (0, 1024, 128, 384), "large": (6400, 3200, 0, 12800), "none": (0, 0, 0, 0)}


def grouped_mm(*args, **kwargs):
    from ds_mxfp8_moe.ops.triton_kernels.grouped_gemm_bf16_hopper import grouped_mm_bf16
    return grouped_mm_bf16(*args, **kwargs)


@pytest.fixture(autouse=True)
def poisoned():
    """What torch.empty returns is NaN, so that a value that is not written shows."""
    with conformance.poisoned():
        yield


def placed(w_AENK: torch.Tensor, layout: str) -> list:
    """The parts of [parts, E, N, K], lying in memory in some way."""
    parts, (N, K) = w_AENK.shape[0], w_AENK.shape[2:]
    if layout == "stacked":
        return list(w_AENK.unbind(0))
    if layout == "parameters":  # as ZeRO lays them: an expert's matrices side by side
        flat = w_AENK.transpose(0, 1).contiguous()
        return [[flat[e, part] for e in range(E)] for part in range(parts)]
    if layout == "unaligned":
        flat = torch.empty(w_AENK.numel() + 1, dtype=w_AENK.dtype, device="cuda")[1:].copy_(w_AENK.flatten())
        return list(flat.view(w_AENK.shape).unbind(0))
    if layout == "wide":  # rows of a wider matrix
        return list(torch.cat([w_AENK, w_AENK], dim=3)[..., :K].unbind(0))
    assert layout == "scattered"
    gaps = torch.zeros(parts * E, 2 * N, K, dtype=w_AENK.dtype, device="cuda")
    matrices = [[gaps[3 * (part * E + e) % (parts * E), 8 * e:8 * e + N] for e in range(E)] for part in range(parts)]
    for mine, theirs in zip(matrices, w_AENK, strict=True):
        for matrix, w_NK in zip(mine, theirs, strict=True):
            matrix.copy_(w_NK)
    return matrices


def expected(a, w_AENK, sizes, transposed):
    out, start = [], 0
    for e, size in enumerate(sizes):
        w = w_AENK[:, e].flatten(0, 1).double()
        out.append(a[start:start + size].double() @ (w if transposed else w.t()))
        start += size
    return torch.cat([*out, torch.zeros(a.shape[0] - start, out[0].shape[1], dtype=torch.float64, device="cuda")])


def operands(N, K, parts, rows, transposed, dtype=BF16):
    generator = torch.Generator("cuda").manual_seed(N + parts)
    w_AENK = torch.randn(parts, E, N, K, device="cuda", generator=generator).to(dtype)
    return torch.randn(rows, parts * N if transposed else K, device="cuda", generator=generator).to(dtype), w_AENK


# Each shape, each distribution of rows, and both directions of a wide tile.
@pytest.mark.parametrize("N, K, transposed, sizes", slow_except(
    [(*shape, transposed, sizes) for shape in SHAPES for transposed in (False, True) for sizes in SIZES],
    (2048, 1024, False, "few"), (2048, 1024, True, "skewed"), (1408, 2048, False, "large"),
    (1408, 2048, True, "large"), (96, 160, False, "skewed"), (160, 32, True, "skewed"), (160, 32, False, "none")))
def test_products(N, K, transposed, sizes):
    sizes = SIZES[sizes]
    ends = torch.tensor(sizes).cumsum(0).int().cuda()
    for parts in (1, 2):
        a, w = operands(N, K, parts, sum(sizes) + 128, transposed)
        right = expected(a, w, sizes, transposed)
        out = grouped_mm(a, placed(w, "parameters"), ends, F32, transposed)
        assert relative(out, right) < 1e-5
        assert not out[sum(sizes):].any()
        out = grouped_mm(a, placed(w, "parameters"), ends, BF16, transposed)
        assert relative(out, right) < 3e-3
        assert not out[sum(sizes):].any()
        assert torch.equal(out, grouped_mm(a, placed(w, "stacked"), ends, BF16, transposed))


@pytest.mark.parametrize("layout", ["scattered", "unaligned", "wide"])
def test_weights_anywhere(layout):
    sizes = (128, 256, 0, 384)
    ends = torch.tensor(sizes).cumsum(0).int().cuda()
    for transposed in (False, True):
        a, w = operands(288, 192, 2, sum(sizes), transposed, F16)
        out = grouped_mm(a, placed(w, layout), ends, F32, transposed)
        assert relative(out, expected(a, w, sizes, transposed)) < 1e-5


def test_beyond_two_to_the_31():
    """Values of the result, and bytes between the weights' places."""
    N, K, rows = 8192, 128, 128 * 2100
    a = torch.randn(rows, K, dtype=BF16, device="cuda")
    far = torch.empty(3 << 30, dtype=BF16, device="cuda")
    w = [far[:N * K].view(N, K).normal_(), far[-N * K:].view(N, K).normal_()]
    ends = torch.tensor([128, rows], dtype=torch.int32, device="cuda")
    out = grouped_mm(a, [w], ends, BF16)
    assert out.numel() > 2**31
    assert relative(out[-64:], a[-64:].double() @ w[1].double().t()) < 3e-3
    assert relative(out[:128], a[:128].double() @ w[0].double().t()) < 3e-3
