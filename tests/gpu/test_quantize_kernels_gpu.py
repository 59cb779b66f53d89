# SPDX-License-Identifier: Apache-2.0
"""The casts on a GPU against mx.py on the CPU; beyond 2^31 values; in a CUDA graph, without a host sync."""

import pytest
import torch
from quantize_cases import DTYPES, run_columns, run_empty, run_rescale, run_rows, run_weights, same

from ds_mxfp8_moe import mx
from ds_mxfp8_moe.mx import MXTensor
from ds_mxfp8_moe.ops.triton_kernels import quantize as kernels

BLOCKS, MODES = (32, 128), ("rceil", "floor")
BF16 = torch.bfloat16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_columns(dtype, block, mode):
    for rows, columns in ((1, 32), (40, 160), (1000, 2048)):
        run_rows("cuda", max(rows, 10), columns, dtype, block, mode)
    for rows, columns in ((32, 32), (160, 96), (1056, 2048)):
        run_columns("cuda", rows, columns, dtype, block, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("block_in", BLOCKS)
def test_rescale(block_in, block, mode):
    for rows, columns in ((32, 32), (160, 160), (1056, 2048)):
        run_rescale("cuda", rows, columns, block_in, block, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["stacked", "even", "scattered"])
def test_weights(layout, dtype, block, mode):
    for heights in ((160, ), (96, 64), (256, 128)):
        run_weights("cuda", heights, 288, layout, dtype, block, mode)
    run_weights("cuda", (64, 64), 64, layout, dtype, block, mode, 37)


@pytest.mark.parametrize("block", BLOCKS)
def test_no_rows(block):
    run_empty("cuda", block)


def test_beyond_two_to_the_31():
    """The last rows and columns of a matrix of 2.2e9 values."""
    rows, columns = 131072 + 128, 16896
    x = torch.zeros(rows, columns, dtype=BF16, device="cuda")
    corner = torch.randn(128, 256, dtype=BF16)
    x[-128:, -256:] = corner.cuda()
    expected, expected_t = mx.quantize(corner, 128), mx.quantize(corner.t(), 128)

    def same_corner(actual, expected):
        r, c = expected.shape
        same(MXTensor(actual.qdata[-r:, -c:], actual.scale_bytes[-r:, -(c // 128):], 128, BF16), expected)

    y, y_t = kernels.quantize_rows_and_columns(x, 128, "rceil", True)
    same_corner(y, expected)
    same_corner(y_t, expected_t)
    del y_t
    same_corner(kernels.quantize_columns(x, 128, "rceil"), expected_t)
    y = kernels.quantize_rows(x, 128, "rceil", True)
    same_corner(y, expected)
    same_corner(kernels.rescale_transposed(y, 128, "rceil"), mx.transpose_rescale(expected, 128))
    assert torch.equal(kernels.dequantize(y, BF16)[-128:, -256:].cpu(), expected.dequantize())


def test_graph_and_no_sync():
    x = torch.randn(256, 512, dtype=BF16, device="cuda")
    w = [torch.randn(128, 256, dtype=BF16, device="cuda") for _ in range(3)]

    def everything():
        rows, columns = kernels.quantize_rows_and_columns(x, 128, "rceil", True)
        weights = kernels.quantize_weights([w, w], 128, "rceil", True, True)
        return (kernels.quantize_rows(x, 128, "rceil", False), rows, columns, kernels.quantize_columns(x, 32, "rceil"),
                kernels.rescale_transposed(rows, 128, "rceil"), *weights), kernels.dequantize(rows, BF16)

    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, values = everything()
    for tensor in (x, *w):
        tensor.normal_()
    graph.replay()
    again, again_values = everything()
    for a, b in zip(captured, again, strict=True):
        assert torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
        assert torch.equal(a.scale_bytes, b.scale_bytes)
    assert torch.equal(values, again_values)
