# SPDX-License-Identifier: Apache-2.0
"""The casts in Triton's interpreter. test_aot.py compiles them."""

import pytest
import torch

from ds_mxfp8_moe.compute import casts, mx
from ds_mxfp8_moe.ops.triton_kernels import quantize as kernels
from tests.support.quantize_cases import (
    DTYPES,
    run_columns,
    run_empty,
    run_rescale,
    run_rows,
    run_transpose_tiles,
    run_weights,
)

BF16, F16, F32 = DTYPES


@pytest.mark.parametrize("dtype, mode", [(BF16, "rceil"), (BF16, "floor"), (F16, "rceil"), (F32, "floor")], ids=str)
@pytest.mark.parametrize("block", [32, 128])
def test_rows_and_columns(interpreter, dtype, block, mode):
    interpreter(run_rows, "cpu", 40, 160, dtype, block, mode)
    interpreter(run_columns, "cpu", 160, 96, dtype, block, mode)


@pytest.mark.parametrize("block, mode", [(32, "rceil"), (128, "floor")])
def test_rescale(interpreter, block, mode):
    interpreter(run_rescale, "cpu", 160, 160, block, mode)


@pytest.mark.parametrize("layout, dtype, heights", [("stacked", BF16, (96, 64)), ("even", F32, (96, 64)),
                                                    ("scattered", F16, (96, 64)), ("unaligned", BF16, (160, ))],
                         ids=str)
@pytest.mark.parametrize("block, mode", [(32, "floor"), (128, "rceil")])
def test_weights(interpreter, block, mode, layout, dtype, heights):
    interpreter(run_weights, "cpu", heights, 96, layout, dtype, block, mode)


@pytest.mark.parametrize("rows, columns", [(256, 128), (160, 416)])
def test_transposed_tiles(interpreter, rows, columns):
    interpreter(run_transpose_tiles, "cpu", 2, rows, columns)


def test_more_experts_than_pointers(interpreter):
    interpreter(run_weights, "cpu", (64, 64), 64, "scattered", BF16, 128, "rceil", 5, 4)  # 10 matrices


def test_what_a_recording_keeps_of_a_table_is_no_address(monkeypatch):
    """A replay repeats the numbers of a launch, for weights that lie elsewhere at the same distances."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda numbers, table, far, **options: launched.append(numbers)

    monkeypatch.setattr(kernels, "_places_kernel", Kernel())
    for memory in (torch.empty(3000, dtype=BF16), torch.empty(3000, dtype=BF16)):
        for begin in (0, 800):
            first, second = memory[begin:], memory[begin + 1500:]
            kernels._tables([[first[:64], first[192:256]], [second[64:128], second[:64]]])
    distances = [[(number - kernels.FAR) // 2 for number in numbers] for numbers in launched]
    assert distances == [[0, 192, 0, -64]] * 4 and all(number % 2 for numbers in launched for number in numbers)


def several_dtypes(columns):
    weights = [torch.randn(64, 64).to(dtype) for dtype in (BF16, F32, BF16)]
    return kernels.quantize_weights([weights, [w.to(BF16) for w in weights]], 128, "rceil", columns)


@pytest.mark.parametrize("columns", [False, True])
def test_weights_of_several_dtypes(interpreter, columns):
    """One expert was cast after its layer was converted: its bytes are not read as another dtype's."""
    with pytest.raises(TypeError, match="are torch.bfloat16, torch.float32, expected all of them in torch.bfloat16"):
        interpreter(several_dtypes, columns)


@pytest.mark.parametrize("block", [32, 128])
def test_no_rows(interpreter, block):
    interpreter(run_empty, "cpu", block)


@pytest.mark.parametrize("shape", [(17 * 10**6, 128), (128, 17 * 10**6)], ids=str)
def test_a_matrix_whose_tiles_need_offsets_beyond_int32_is_refused(shape):
    x = torch.empty(shape, dtype=BF16)
    for cast in (lambda: kernels.quantize_rows_and_columns(x, 128, "rceil"),
                 lambda: kernels.quantize_weights([x.unsqueeze(0)], 128, "rceil", False)):
        with pytest.raises(ValueError, match="17000000 .* too large for the MXFP8 kernels"):
            cast()


@pytest.mark.parametrize("shape", [(64, ), (2, 3, 2, 64)], ids=str)
def test_shapes_without_a_kernel_are_dequantized(monkeypatch, shape):
    monkeypatch.setattr(casts, "runs_triton", lambda x: True)
    x = mx.quantize(torch.randn(shape))
    assert torch.equal(casts.dequantize(x, F32), mx.dequantize(x, F32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_not_handed_to_kernels(monkeypatch, dtype):
    monkeypatch.setattr(casts, "runs_triton", lambda x: True)
    monkeypatch.setattr(casts, "_kernels", lambda: pytest.fail("was handed to a kernel"))
    x = torch.zeros(64, 64).to(dtype)
    for cast, given in ((casts.quantize, x), (casts.quantize_columns, x), (casts.quantize_both, x),
                        (casts.quantize_weights, [x.unsqueeze(0)])):
        with pytest.raises(TypeError, match=str(dtype)):
            cast(given, 32, "rceil")
