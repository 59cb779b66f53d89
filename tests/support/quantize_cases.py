# SPDX-License-Identifier: Apache-2.0
"""Casts by kernels against mx.py, to the byte, on whatever device the kernels run; the reference runs on the CPU."""

from unittest import mock

import torch

from ds_mxfp8_moe.compute import mx
from ds_mxfp8_moe.compute.mx import MXTensor
from ds_mxfp8_moe.ops.mx_format import MXParts
from ds_mxfp8_moe.ops.triton_kernels import quantize as kernels
from ds_mxfp8_moe.ops.triton_kernels.transpose_tiles import transpose_tiles
from tests.support.conformance import poisoned

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def hard_values(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Every binade that the dtype has, mixed within blocks, ties and all; zeros of both signs, NaN, Inf."""
    generator = torch.Generator().manual_seed(rows + columns)
    exponents = torch.randint(-149, 128, (rows, 1), generator=generator)
    spread = torch.randint(-12, 3, (rows, columns), generator=generator)
    x = torch.randn(rows, columns, generator=generator).double() * torch.exp2((exponents + spread).double())
    x[1::4] = torch.randint(-31, 32, (rows, columns), generator=generator)[1::4] / 2
    x[::5, :32], x[7 % rows] = 0.0, -0.0
    x = x.to(dtype)
    x[3 % rows, 3], x[9 % rows, -1], x[-1, columns // 2] = float("nan"), float("inf"), float("-inf")
    return x


def equal(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = (actual != expected).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise AssertionError(f"{what}: {len(wrong)} of {expected.numel()} differ, first at {first} of "
                             f"{tuple(expected.shape)}: {actual[first].item()} instead of {expected[first].item()}")


def same(actual: MXParts, expected: MXTensor) -> None:
    assert (actual.qdata.shape, actual.scale_bytes.shape) == (expected.shape, expected.scale_bytes.shape)
    assert (actual.qdata.dtype, actual.scale_bytes.dtype) == (torch.float8_e4m3fn, torch.uint8)
    assert (actual.block_size, actual.tiled) == (expected.block_size, expected.tiled)
    equal("scales", actual.scale_bytes.cpu(), expected.scale_bytes)
    equal("data", actual.qdata.view(torch.uint8).cpu(), expected.qdata.view(torch.uint8))


def same_values(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bits, but for those of NaN."""
    actual = actual.cpu()
    assert actual.dtype == expected.dtype
    equal("NaN", actual.isnan(), expected.isnan())
    bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    equal("values", *(x.nan_to_num(0, torch.inf, -torch.inf).view(bits) for x in (actual, expected)))


def run_rows(device: str, rows: int, columns: int, dtype: torch.dtype, block: int, mode: str) -> None:
    """What starts from or returns rows; x is part of a wider tensor."""
    x = hard_values(rows, columns, dtype)
    there = torch.cat([x, x], dim=1).to(device)[:, :columns]
    expected = mx.quantize(x, block, mode)
    with poisoned():
        for k_major in (False, True):
            actual = kernels.quantize_rows(there, block, mode, k_major)
            same(actual, expected)
            assert actual.scale_bytes.stride() == ((1, rows) if k_major else (expected.scale_bytes.shape[1], 1))
            same_values(kernels.dequantize(actual, dtype), mx.dequantize(expected, dtype))
        same(kernels.quantize_rows(there.t().contiguous().t(), block, mode, False), expected)


def run_columns(device: str, rows: int, columns: int, dtype: torch.dtype, block: int, mode: str) -> None:
    x = hard_values(rows, columns, dtype)
    there = torch.cat([x, x], dim=1).to(device)[:, :columns]
    expected = mx.quantize(x.t(), block, mode)
    with poisoned():
        of_rows, actual = kernels.quantize_rows_and_columns(there, block, mode)
        same(of_rows, mx.quantize(x, block, mode))
        assert of_rows.scale_bytes.stride() == (1, rows)
        for columns_form in (actual, kernels.quantize_columns(there, block, mode)):
            same(columns_form, expected)
            assert columns_form.scale_bytes.stride() == (1, columns)


def run_rescale(device: str, rows: int, columns: int, block: int, mode: str) -> None:
    """All 256 data bytes under all 256 scales."""
    generator = torch.Generator().manual_seed(rows + columns)
    data = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    data[data & 0x7F == 0x7F] &= 0xFE  # else nearly every block had a NaN
    data[5, 5] = 0x7F
    # Scales of one block of columns lie within a few binades, so that blocks along the rows keep some bits.
    center = torch.linspace(0, 255, -(-columns // block)).int()
    spread = torch.randint(-6, 7, (rows, len(center)), generator=generator, dtype=torch.int32)
    scale = (center + spread).clamp(0, 254).to(torch.uint8)
    scale[9, 0] = 255
    x = MXTensor(data.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), block, torch.bfloat16)
    expected = mx.transpose_rescale(x, block, mode)
    with poisoned():
        for there in (scale.to(device), scale.t().contiguous().to(device).t()):
            there = MXParts(x.qdata.to(device), there, block)
            actual = kernels.rescale_transposed(there, mode)
            same(actual, expected)
            assert actual.scale_bytes.stride() == (1, columns)
            for output in DTYPES:
                same_values(kernels.dequantize(there, output), mx.dequantize(x, output))


def run_weights(device: str, heights: tuple, columns: int, layout: str, dtype: torch.dtype, block: int, mode: str,
                experts: int = 3, pointers: int = 32) -> None:
    """`layout`: "stacked", or matrices "even", "scattered", "unaligned"; at most so many pointers a launch."""
    parts = [hard_values(experts * height, columns, dtype).view(experts, height, columns) for height in heights]
    stack = torch.cat(parts, dim=1)
    there = [part.to(device) for part in parts]
    if layout != "stacked":
        # A gap that differs from matrix to matrix keeps them from lying evenly.
        gap = {"even": 0, "scattered": 64, "unaligned": 1}[layout]
        gaps = [gap * (i % 3) for i in range(experts)]
        for i, part in enumerate(there):
            flat = torch.cat([torch.cat([matrix.flatten(), matrix.flatten()[:gap]])
                              for matrix, gap in zip(part, gaps, strict=True)])
            starts = [sum(gaps[:e]) + e * part[0].numel() for e in range(experts)]
            there[i] = [flat[start:start + part[0].numel()].view(part[0].shape) for start in starts]
    if block == 128:
        expected_rows = mx.quantize_tiles(stack, mode)
        expected_columns = MXTensor(expected_rows.qdata.transpose(1, 2).contiguous(),
                                    expected_rows.scale.transpose(1, 2), 128, dtype, tiled=True)
    else:
        expected_rows = mx.quantize(stack, block, mode)
        expected_columns = mx.quantize(stack.transpose(1, 2), block, mode)
    with poisoned(), mock.patch.object(kernels, "MOST_PLACES", pointers):
        for transposed, expected in ((False, expected_rows), (True, expected_columns)):
            actual = kernels.quantize_weights(there, block, mode, transposed)
            same(actual, expected)
            assert block == 32 or actual.scale_bytes.is_contiguous()
        same_values(kernels.dequantize(actual, dtype), mx.dequantize(expected, dtype))


def run_transpose_tiles(device: str, experts: int, rows: int, columns: int) -> None:
    """All 256 data bytes under many scales, which nothing changes."""
    generator = torch.Generator().manual_seed(rows + columns)
    data = torch.randint(0, 256, (experts, rows, columns), generator=generator, dtype=torch.uint8)
    tiles = experts, -(-rows // 128), -(-columns // 128)
    scale = torch.randint(0, 256, tiles, generator=generator, dtype=torch.uint8)
    x = MXTensor(data.view(torch.float8_e4m3fn), scale, 128, torch.bfloat16, tiled=True)
    with poisoned():
        actual = transpose_tiles(MXParts(x.qdata.to(device), scale.to(device), 128, tiled=True))
        same(actual, mx.transpose_tiles(x))
        assert actual.qdata.is_contiguous() and actual.scale_bytes.is_contiguous()


def run_empty(device: str, block: int) -> None:
    x = torch.empty(0, 96, dtype=torch.bfloat16, device=device)
    rows, columns = mx.quantize(x.cpu(), block), mx.quantize(x.cpu().t(), block)
    for k_major in (False, True):
        same(kernels.quantize_rows(x, block, "rceil", k_major), rows)
    same(kernels.quantize_columns(x, block, "rceil"), columns)
    for got, wanted in zip(kernels.quantize_rows_and_columns(x, block, "rceil"), (rows, columns), strict=True):
        same(got, wanted)
    same(kernels.rescale_transposed(kernels.quantize_rows(x, block, "rceil", True), "rceil"), columns)
    assert kernels.dequantize(kernels.quantize_rows(x, block, "rceil", True), torch.float16).shape == (0, 96)
