# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs against a loop over groups, for plain and MXFP8 operands of any strides."""

import pytest
import torch

from ds_mxfp8_moe.compute import grouped_gemm
from ds_mxfp8_moe.compute.grouped_gemm import emulated, grouped_mm, grouped_mm_wgrad, grouped_mm_wgrad_rows
from ds_mxfp8_moe.compute.mx import quantize, quantize_tiles, sqnr_db
from ds_mxfp8_moe.compute.sums import Sum, goal_of

P, K, N = 130, 64, 96
ENDS = torch.tensor([40, 40, 127], dtype=torch.int32)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operands(dtype):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(P, K, generator=g).to(dtype), torch.randn(3, N, K, generator=g).to(dtype),
            torch.randn(P, N, generator=g).to(dtype))


def groups():
    return enumerate(zip([0, *ENDS[:-1].tolist()], ENDS.tolist(), strict=True))


def loop(a, b):
    out = torch.zeros(P, b.shape[1])
    for e, (start, end) in groups():
        out[start:end] = a[start:end].float() @ b[e].float().t()
    return out


def loop_wgrad(g, a):
    return torch.stack([g[start:end].float().t() @ a[start:end].float() for _, (start, end) in groups()])


def same(expected, actual, dtype):
    """One rounding of the result: 8 bits in bf16 give 50 dB, 11 in fp16 69."""
    assert actual.dtype == dtype
    assert sqnr_db(expected, actual) >= {torch.bfloat16: 50, torch.float16: 65, torch.float32: 110}[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain(dtype):
    a, b, g = operands(dtype)
    out = grouped_mm(a, b, ENDS)
    same(loop(a, b), out, dtype)
    assert not out[127:].any()
    dw = grouped_mm_wgrad(g, a, ENDS)
    same(loop_wgrad(g, a), dw, dtype)
    assert not dw[1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", (32, 128))
def test_mxfp8_operands(dtype, block):
    a, b, _ = operands(dtype)
    a_mx = quantize(a, block)
    b_mx = quantize_tiles(b) if block == 128 else quantize(b, block)
    expected = loop(a_mx.dequantize(torch.float32), b_mx.dequantize(torch.float32))
    # A float16 tensor keeps its dtype outside, but is dequantized to bfloat16: products are exact, sums in float32.
    actual = grouped_mm(a_mx, b_mx, ENDS)
    assert actual.dtype == dtype and sqnr_db(expected, actual) >= (110 if dtype == torch.float32 else 50)
    same(expected, grouped_mm(a_mx, b_mx.dequantize(torch.float32), ENDS, torch.float32), torch.float32)


def test_frozen_weights_of_tiles_are_multiplied_beside_blocks_of_32_on_blackwell_alone(monkeypatch):
    a, tiles = quantize(torch.randn(128, 128), 32), quantize_tiles(torch.randn(1, 128, 128))
    for capability, multiplies in (((10, 0), True), ((9, 0), False)):
        monkeypatch.setattr(grouped_gemm, "capability", lambda device, found=capability: found)
        assert grouped_gemm._both_mxfp8(a, tiles) == multiplies


@pytest.mark.parametrize("block, capability", [(32, (0, 0)), (128, (0, 0)), (128, (9, 0))])
def test_mxfp8_wgrad(monkeypatch, block, capability):
    """Operands in column form, blocks along whole groups of rows. Hopper's kernel takes rows: it dequantizes too."""
    monkeypatch.setattr(grouped_gemm, "capability", lambda device: capability)
    gen = torch.Generator().manual_seed(1)
    ends = torch.tensor([128, 128, 384], dtype=torch.int32)
    g, a = (quantize(torch.randn(n, 512, generator=gen), block) for n in (N, K))
    dw = grouped_mm_wgrad(g, a, ends)
    assert dw.shape == (3, N, K) and not dw[1].any()
    g, a = g.dequantize(), a.dequantize()
    for e, (start, end) in ((0, (0, 128)), (2, (128, 384))):
        same(g[:, start:end] @ a[:, start:end].t(), dw[e], torch.float32)


def sums_at(*starts, begun=True, factors=(0.5, 0.5)):
    """Sums [3, 8, K] that begin at these elements of one tensor."""
    flat = torch.randn(8 * 3 * 8 * K, generator=torch.Generator().manual_seed(2)).bfloat16()
    return [Sum(flat[start:start + 3 * 8 * K].view(3, 8, K), begun, factor)
            for start, factor in zip(starts, factors, strict=False)]


def test_sums_that_kernels_can_write():
    one = 8 * K  # elements of an expert's gradient
    for distance, jump in ((3, None), (4, 4), (6, 6)):
        sums = sums_at(one, (1 + distance) * one)
        goal = goal_of(sums)
        assert goal[1:] == (jump, True, 0.5)
        for split, (out, *_) in enumerate(sums):
            written = goal.out_ENK[split * (jump or 3):][:3]
            assert torch.equal(written, out) and written.data_ptr() == out.data_ptr()
    assert goal_of(sums_at(0, factors=(1.0, )))[1:] == (None, True, None)
    for sums in (sums_at(3 * one, 0), sums_at(0, 2 * one), sums_at(0, 3 * one + 8), sums_at(4, 3 * one + 4),
                 sums_at(0, 3 * one, factors=(1.0, 0.5)), [*sums_at(0), *sums_at(3 * one)]):
        assert goal_of(sums) is None


@pytest.mark.parametrize("begun", [False, True])
def test_gradients_go_to_sums(begun):
    """Of a group without rows too, whose gradient is zero."""
    g, a = torch.randn(2, P, K, generator=torch.Generator().manual_seed(3)).bfloat16()
    sums = sums_at(0, 3 * 8 * K, begun=begun)
    before = torch.stack([one.out_ENK for one in sums])
    gradient = grouped_mm_wgrad_rows(g[:, :16], a, ENDS, splits=2)
    assert grouped_mm_wgrad_rows(g[:, :16], a, ENDS, splits=2, sums=sums) is None
    assert torch.equal(torch.stack([one.out_ENK for one in sums]), before + 0.5 * gradient if begun else gradient)


@pytest.mark.parametrize("has_bf16", (True, False))
def test_float16_and_on_some_cpus_bfloat16_are_emulated(monkeypatch, has_bf16):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if has_bf16 else "AVX2")
    assert [emulated(torch.device("cpu"), dtype) for dtype in DTYPES] == [not has_bf16, True, False]
    assert not any(emulated(torch.device("cuda"), dtype) for dtype in DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_would_be_emulated_is_multiplied_in_float32_and_rounded_once(monkeypatch, dtype):
    a, b, g = operands(dtype)
    expected = [out.to(dtype) for out in (grouped_mm(a.float(), b.float(), ENDS),
                                          grouped_mm_wgrad(g.float(), a.float(), ENDS))]
    multiplied, plain = [], torch.nn.functional.grouped_mm

    def spy(a, b, offs):
        multiplied.append((a.dtype, b.dtype))
        return plain(a, b, offs=offs)

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", spy)
    for out, want in zip((grouped_mm(a, b, ENDS), grouped_mm_wgrad(g, a, ENDS)), expected, strict=True):
        assert out.dtype == dtype and torch.equal(out, want)
    assert multiplied == [(torch.float32, torch.float32)] * 2


def test_any_strides():
    """Steps that torch refuses are copied away: every second column, odd row steps, expanded rows. Columns it
    multiplies as they lie, on some CPUs in another order of sums."""
    a, b, g = operands(torch.bfloat16)

    def spread(x):
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    def odd_rows(x):
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
        wide[..., :-3] = x
        return wide[..., :-3]

    def column_major(x):
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    for change in (spread, odd_rows, column_major):
        assert not change(a).is_contiguous()
        for want, got in ((grouped_mm(a, b, ENDS), grouped_mm(change(a), change(b), ENDS)),
                          (grouped_mm_wgrad(g, a, ENDS), grouped_mm_wgrad(change(g), change(a), ENDS))):
            if change is column_major:
                torch.testing.assert_close(got, want)
            else:
                assert torch.equal(got, want)
    one_row = a[:1].expand(P, K)
    assert torch.equal(grouped_mm(one_row, b, ENDS), grouped_mm(one_row.contiguous(), b, ENDS))
