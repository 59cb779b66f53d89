# SPDX-License-Identifier: Apache-2.0
"""The casts in Triton's interpreter, compiled for Hopper and Blackwell, and traced."""

import pytest
import torch
from aot import launches_for
from interpreter import first_programs
from quantize_cases import DTYPES, run_columns, run_empty, run_rescale, run_rows, run_weights, same, same_values
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_mxfp8_moe import casts, mx
from ds_mxfp8_moe.mx import MXTensor
from ds_mxfp8_moe.ops.mx_format import MXParts
from ds_mxfp8_moe.ops.triton_kernels import quantize as kernels

BF16, F16, F32 = DTYPES


@pytest.mark.parametrize("dtype, mode", [(BF16, "rceil"), (BF16, "floor"), (F16, "rceil"), (F32, "floor")], ids=str)
@pytest.mark.parametrize("block", [32, 128])
def test_rows_and_columns(interpreter, dtype, block, mode):
    interpreter(run_rows, "cpu", 40, 160, dtype, block, mode)
    interpreter(run_columns, "cpu", 160, 96, dtype, block, mode)


@pytest.mark.parametrize("block_in, block, mode", [(32, 32, "rceil"), (128, 128, "floor"), (32, 128, "rceil"),
                                                   (128, 32, "floor")])
def test_rescale(interpreter, block_in, block, mode):
    interpreter(run_rescale, "cpu", 160, 160, block_in, block, mode)


@pytest.mark.parametrize("layout, dtype, heights", [("stacked", BF16, (96, 64)), ("even", F32, (96, 64)),
                                                    ("scattered", F16, (96, 64)), ("unaligned", BF16, (160, ))],
                         ids=str)
@pytest.mark.parametrize("block, mode", [(32, "floor"), (128, "rceil")])
def test_weights(interpreter, block, mode, layout, dtype, heights):
    interpreter(run_weights, "cpu", heights, 96, layout, dtype, block, mode)


def test_more_experts_than_pointers(interpreter):
    interpreter(run_weights, "cpu", (64, 64), 64, "scattered", BF16, 128, "rceil", 5, 4)  # 10 matrices


def several_dtypes(columns):
    weights = [torch.randn(64, 64).to(dtype) for dtype in (BF16, F32, BF16)]
    return kernels.quantize_weights([weights, [w.to(BF16) for w in weights]], 128, "rceil", not columns, columns)


@pytest.mark.parametrize("columns", [False, True])
def test_weights_of_several_dtypes(interpreter, columns):
    """One expert was cast after its layer was converted: its bytes are not read as another dtype's."""
    with pytest.raises(TypeError, match="are torch.bfloat16, torch.float32, expected all of them in torch.bfloat16"):
        interpreter(several_dtypes, columns)


@pytest.mark.parametrize("block", [32, 128])
def test_no_rows(interpreter, block):
    interpreter(run_empty, "cpu", block)


def first_tile(what, shape, block, size, distance=0):
    """The first tile, of `size`, of a matrix so large that offsets in the tile are beyond int32; or whose rows, or
    blocks' scales, are so far apart. Nothing else is touched."""
    (rows, columns), (r, c) = shape, size
    tile = torch.randn(size).to(BF16)
    of_rows = mx.quantize_tiles(tile) if what == "weights" else mx.quantize(tile, block)
    if what in ("dequantize", "rescale"):
        data = torch.empty(shape, dtype=torch.uint8)
        scale = torch.empty(-(-columns // block), distance or rows, dtype=torch.uint8)[:, :rows].t()
        data[:r, :c], scale[:r, :-(-c // block)] = of_rows.qdata.view(torch.uint8), of_rows.scale_bytes
        x = MXTensor(data.view(torch.float8_e4m3fn), scale, block, BF16)
    else:
        x = torch.empty(rows, distance or columns, dtype=BF16)[:, :columns]
        x[:r, :c] = tile
    with first_programs():
        if what == "dequantize":
            return same_values(kernels.dequantize(x, BF16)[:r, :c], mx.dequantize(of_rows, BF16))
        if what == "rows":
            pairs = [(kernels.quantize_rows(x, block, "rceil", False), of_rows)]
        elif what == "rescale":
            pairs = [(kernels.rescale_transposed(x, block, "rceil"), mx.transpose_rescale(of_rows, block))]
        elif what == "columns":
            pairs = [(kernels.quantize_columns(x, block, "rceil"), mx.quantize(tile.t(), block))]
        elif what == "both":
            both = kernels.quantize_rows_and_columns(x, block, "rceil", True)
            pairs = zip(both, (of_rows, mx.quantize(tile.t(), block)), strict=True)
        else:
            both = (y._replace(qdata=y.qdata[0], scale_bytes=y.scale_bytes[0])
                    for y in kernels.quantize_weights([x.unsqueeze(0)], block, "rceil", True, True))
            pairs = zip(both, (of_rows, of_rows.with_parts(of_rows.qdata.t(), of_rows.scale_bytes.t())), strict=True)
    for actual, expected in pairs:
        (r, c), (scale_r, scale_c) = expected.shape, expected.scale_bytes.shape
        same(MXParts(actual.qdata[:r, :c], actual.scale_bytes[:scale_r, :scale_c], actual.block_size, actual.tiled),
             expected)


MILLION = 10**6


@pytest.mark.parametrize("case", [
    ("rows", (32, 70 * MILLION), 32, (32, 128)), ("rows", (32, 128), 32, (32, 128), 70 * MILLION),
    ("columns", (35 * MILLION, 64), 32, (256, 64)), ("columns", (256, 8500 * 1024), 128, (256, 64)),
    ("columns", (256, 64), 32, (256, 64), 8500 * 1024),
    ("both", (35 * MILLION, 64), 32, (128, 64)), ("both", (17 * MILLION, 128), 128, (128, 128)),
    ("both", (128, 17 * MILLION), 128, (128, 128)),
    ("weights", (17 * MILLION, 128), 128, (128, 128)), ("weights", (128, 17 * MILLION), 128, (128, 128)),
    ("rescale", (17 * MILLION, 128), 32, (256, 128)), ("rescale", (70 * MILLION, 32), 128, (256, 32)),
    ("rescale", (256, 8500 * 1024), 32, (256, 128)), ("rescale", (256, 128), 32, (256, 128), 800 * MILLION),
    ("dequantize", (16, 144 * MILLION), 32, (16, 128)),
    ("dequantize", (16, 128), 32, (16, 128), 800 * MILLION)], ids=str)
def test_offsets_beyond_int32_in_a_tile(interpreter, case):
    interpreter(first_tile, *case)


@pytest.mark.parametrize("shape", [(64, ), (2, 3, 2, 64)], ids=str)
def test_shapes_without_a_kernel_are_dequantised(monkeypatch, shape):
    monkeypatch.setattr(casts, "runs_triton", lambda x: True)
    x = mx.quantize(torch.randn(shape))
    assert torch.equal(casts.dequantize(x, F32), mx.dequantize(x, F32))


@pytest.mark.parametrize("error, what, change", [
    (TypeError, "torch.float64", dict(dtype=torch.float64)),
    (TypeError, "torch.float8_e4m3fn", dict(dtype=torch.float8_e4m3fn)),  # whose scales nobody gave
    (ValueError, "'even'", dict(mode="even")), (ValueError, "block_size 64", dict(block=64)),
    (ValueError, "multiple of 32", dict(rows=40))], ids=str)
@pytest.mark.parametrize("kernels_run", [False, True])
def test_what_is_no_mxfp8_is_refused_with_kernels_too(monkeypatch, kernels_run, error, what, change):
    monkeypatch.setattr(casts, "runs_triton", lambda x: kernels_run)
    monkeypatch.setattr(casts, "_kernels", lambda: pytest.fail("was handed to a kernel"))
    case = dict(dtype=BF16, mode="rceil", block=32, rows=64) | change
    x, how = torch.zeros(case["rows"], 64).to(case["dtype"]), (case["block"], case["mode"])
    calls = [lambda: casts.quantize_columns(x, *how)]
    if "rows" not in change:
        calls += [lambda: casts.quantize(x, *how), lambda: casts.quantize_both(x, *how),
                  lambda: casts.quantize_weights([x.unsqueeze(0)], *how)]
    for cast in calls:
        with pytest.raises(error, match=what):
            cast()


def every_launch(dtype, block):
    x = torch.empty(256, 512, dtype=dtype)
    rows = kernels.quantize_rows(x, block, "rceil", True)
    kernels.quantize_columns(x, block, "rceil")
    kernels.quantize_rows_and_columns(x, block, "floor", True)
    kernels.rescale_transposed(rows, block, "rceil")
    for output in DTYPES:
        kernels.dequantize(rows, output)
    scattered = torch.empty(8, 256, 512, dtype=dtype)
    for parts in ([scattered], [scattered, scattered], [[scattered[i] for i in (0, 1, 3)]] * 2):
        kernels.quantize_weights(parts, block, "rceil", True, True)
        kernels.quantize_weights(parts, block, "rceil", False, True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_compiled(arch, dtype, block):
    with launches_for(arch) as launches:
        every_launch(dtype, block)
    of_casts = [launch for launch in launches if "pointers" not in launch.kernel]
    assert (len(of_casts), len(launches)) == (13, 15)
    # 16 bytes a thread and access, on the side of the wider type at least; 8 where a warp's are a row of the tile.
    narrow = [launch for launch in of_casts if "ld.global.v4" not in launch.ptx and "st.global.v4" not in launch.ptx]
    assert len(narrow) == ((dtype, block) == (BF16, 128))  # rows and columns
    for launch in of_casts:
        assert launch.stack_bytes == 0, launch.kernel
        assert ".ftz" not in launch.ptx, launch.kernel
        if "dequantize" not in launch.kernel:
            assert "cvt.rn.satfinite.e4m3x2.f32" in launch.ptx, launch.kernel


def test_traced():
    with FakeTensorMode():
        x = torch.empty(160, 96, dtype=BF16)
        rows, columns = kernels.quantize_rows_and_columns(x, 128, "rceil", True)
        assert (rows.qdata.shape, rows.scale_bytes.shape) == ((160, 96), (160, 1))
        assert rows.scale_bytes.stride() == (1, 160) and columns.qdata.shape == (96, 160)
        assert (columns.scale_bytes.shape, columns.scale_bytes.stride()) == ((96, 2), (1, 96))
        assert kernels.rescale_transposed(rows, 32, "rceil").scale_bytes.shape == (96, 5)
        assert kernels.dequantize(rows, F16).dtype == F16
        w = torch.empty(3, 160, 96, dtype=BF16)
        rows, columns = kernels.quantize_weights([w, list(w)], 128, "rceil", True, True)
        assert (rows.qdata.shape, columns.qdata.shape) == ((3, 320, 96), (3, 96, 320))
        assert columns.scale_bytes.shape == (3, 1, 3)
