# SPDX-License-Identifier: Apache-2.0
"""The casts on a GPU against mx.py on the CPU, and beyond 2^31 values.

Every case compiles kernels of its own, for seconds: all run at once, in processes of their own, on one GPU.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from ds_mxfp8_moe.compute import casts, mx
from ds_mxfp8_moe.compute.recorded import Weights, recorded
from ds_mxfp8_moe.ops.mx_format import MXParts
from ds_mxfp8_moe.ops.triton_kernels import quantize as kernels
from tests.support.mxfp4_cases import run_unpack
from tests.support.quantize_cases import (
    DTYPES,
    run_columns,
    run_empty,
    run_rescale,
    run_rows,
    run_transpose_tiles,
    run_weights,
    same,
)
from tests.support.slow import slow_except

BF16, F16, F32 = DTYPES


def beyond_two_to_the_31(rows, columns, block):
    """The last rows and columns of a matrix of 2.2e9 values."""
    x = torch.zeros(rows, columns, dtype=BF16, device="cuda")
    corner = torch.randn(128, min(columns, 256), dtype=BF16)
    x[-128:, -256:] = corner.cuda()
    expected, expected_t = mx.quantize(corner, block), mx.quantize(corner.t(), block)

    def same_corner(actual, expected):
        r, c = expected.shape
        same(MXParts(actual.qdata[-r:, -c:], actual.scale_bytes[-r:, -(c // block):], block), expected)

    y, y_t = kernels.quantize_rows_and_columns(x, block, "rceil")
    same_corner(y, expected)
    same_corner(y_t, expected_t)
    del y_t
    same_corner(kernels.quantize_columns(x, block, "rceil"), expected_t)
    y = kernels.quantize_rows(x, block, "rceil", True)
    same_corner(y, expected)
    same_corner(kernels.rescale_transposed(y, "rceil"), mx.transpose_rescale(expected, block))
    assert torch.equal(kernels.dequantize(y, BF16)[-128:, -256:].cpu(), expected.dequantize())


def replayed_where_weights_lie(block, transposed):
    """A replay casts the weights of its own call, which lie elsewhere at the same uneven distances."""
    size, kept = 64 * 96, []

    @recorded
    def cast(weights):
        return casts.quantize_weights(weights.stacks, block, "rceil", transposed)

    for turn in range(4):
        memory = torch.randn(12 * size + turn * 1024, dtype=BF16, device="cuda")[turn * 1024:]
        kept.append(memory)  # so that the next one lies elsewhere
        stacks = [[memory[place * size:][:size].view(64, 96) for place in stack]
                  for stack in ((0, 3, 4), (11, 7, 5 + turn % 2))]
        made = cast(Weights(tuple(stacks), apart=True))
        same(made.parts, cast(Weights(tuple([w.cpu() for w in stack] for stack in stacks), apart=True)))


# Tiles divide (1024, 2048), and nothing else here.
CASES = [
    (beyond_two_to_the_31, 131072 + 128, 16896, 128),
    *((run_weights, "cuda", heights, 288, layout, dtype, block, mode)
      for heights, layout, dtype, block, mode in [
          ((96, 64), "stacked", BF16, 128, "rceil"), ((96, 64), "even", F32, 128, "floor"),
          ((96, 64), "scattered", F16, 128, "rceil"), ((160, ), "unaligned", BF16, 128, "floor"),
          ((96, 64), "stacked", BF16, 32, "floor"), ((96, 64), "scattered", F32, 32, "rceil"),
          ((160, ), "even", F16, 32, "rceil")]),
    *((run_weights, "cuda", (256, 128), 512, layout, BF16, block, "rceil")
      for layout, block in [("even", 128), ("scattered", 32)]),
    *((run_weights, "cuda", (64, 64), 64, "scattered", BF16, block, "rceil", 37) for block in (32, 128)),
    *((run_rescale, "cuda", *shape, block, mode) for shape, block, mode in [
        ((32, 32), 32, "rceil"), ((160, 160), 32, "floor"), ((160, 160), 128, "rceil"), ((1024, 2048), 32, "rceil"),
        ((1024, 2048), 128, "floor")]),
    *((run_columns, "cuda", *shape, dtype, block, mode) for shape, dtype, block, mode in [
        ((32, 32), BF16, 32, "rceil"), ((160, 96), BF16, 32, "floor"), ((160, 96), BF16, 128, "rceil"),
        ((160, 96), F16, 32, "rceil"), ((160, 96), F32, 128, "floor"), ((1056, 160), F32, 32, "floor"),
        ((1024, 2048), BF16, 32, "rceil"), ((1024, 2048), BF16, 128, "floor"), ((1024, 2048), F16, 128, "rceil"),
        ((1024, 2048), F32, 32, "rceil")]),
    *((run_rows, "cuda", *shape, dtype, block, mode) for shape, dtype, block, mode in [
        ((10, 32), BF16, 32, "floor"), ((40, 160), BF16, 128, "rceil"), ((40, 160), F16, 32, "floor"),
        ((40, 160), F32, 128, "floor"), ((1000, 2048), BF16, 32, "rceil"), ((1000, 2048), BF16, 128, "floor"),
        ((1000, 2048), F16, 128, "rceil"), ((1000, 2048), F32, 32, "rceil")]),
    *((replayed_where_weights_lie, block, transposed) for block in (32, 128) for transposed in (False, True)),
    *((run_transpose_tiles, "cuda", *shape) for shape in [(2, 160, 416), (3, 1536, 2048)]),
    *((run_unpack, "cuda", *shape) for shape in [(5, 160, 416), (5, 1536, 2048)]),
    *((run_empty, "cuda", block) for block in (32, 128)),
]


# One of each cast, block, layout and dtype. The others are wide.
QUICK = [0, 1, 2, 3, 4, 5, 6, 11, 13, 16, 18, 21, 25, 29, 32, 35, 38, 40, 41, 42, 44]


def _start():
    torch.set_num_threads(2)


def _failure(function, args):
    """The reason, in a line or two, or None."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]


@pytest.fixture(scope="module")
def jobs(request):
    chosen = {item.callspec.params["case"] for item in request.session.items if item.path == request.path}
    processes = min(12, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, get_context("spawn"), _start) as pool:
        yield {case: pool.submit(_failure, *CASES[case][:1], CASES[case][1:]) for case in sorted(chosen)}


@pytest.mark.parametrize("case", slow_except(range(len(CASES)), *QUICK), ids=[
    "-".join([function.__name__, *(str(arg).removeprefix("torch.") for arg in args)]) for function, *args in CASES])
def test_casts(jobs, case):
    failure = jobs[case].result()
    if failure:
        pytest.fail(failure, pytrace=False)
