# SPDX-License-Identifier: Apache-2.0
"""The scaled grouped GEMM on a GPU: against the CPU, where only the order of sums differs, and against bf16."""

import pytest
import torch

from ds_mxfp8_moe.compute.grouped_gemm import rescales_rows
from ds_mxfp8_moe.compute.mx import quantize, sqnr_db
from ds_mxfp8_moe.ep import permute_mxfp8_fwd_hp_bwd, unpermute_hp_fwd_mxfp8_bwd
from ds_mxfp8_moe.scaled_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from tests.support.reference_moe import tiled_rows
from tests.support.scaled_grouped_mm_cases import (
    CASES,
    ENDS,
    check_that_rows_past_the_last_group_touch_nothing,
    compiled_and_eager,
    loop,
    operands,
    run,
)


def in_tiles(x, mode):
    """x as Hopper's kernel for weight gradients reads it: in MXFP8, with one scale for a tile of a group."""
    out, start = torch.zeros(x.shape), 0
    for end in ENDS:
        rows = x[start:end].float()
        mx = quantize(torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 128)), 128, mode)
        out[start:end] = tiled_rows(mx.dequantize(torch.float32), mx.scale_bytes)[:end - start]
        start = end
    return out


@pytest.mark.parametrize("mx_input", (False, True), ids=("plain A", "MXTensor A"))
@pytest.mark.parametrize("block, mode, hp", CASES)
def test_equals_the_cpu(block, mode, hp, mx_input):
    a, w, grad = operands()
    given = quantize(a, block, mode) if mx_input else a
    kwargs = dict(wgrad_with_hp=hp, scale_calculation_mode=mode, block_size=block)
    on_cpu, on_gpu = run(given, w, grad, **kwargs), run(given, w, grad, device="cuda", **kwargs)
    if not hp and rescales_rows(torch.device("cuda"), block):
        on_cpu = *on_cpu[:2], loop(in_tiles(a, mode), w, in_tiles(grad.bfloat16(), mode))[2]
    for name, x, y in zip(("out", "dA", "dW"), on_cpu, on_gpu, strict=True):
        assert sqnr_db(x, y) >= 45, name  # both rounded to bf16 once
    for bar, x, y in zip((28, 26, 25), loop(a, w, grad), on_gpu, strict=True):
        assert sqnr_db(x, y) >= bar - (1.5 if mode == "floor" else 0)


@pytest.mark.parametrize("hp", (True, False))
@pytest.mark.parametrize("ends", ([0, 0], [0, 300], [1, 2], [31, 33], [128, 256]), ids=str)
def test_groups_of_any_size(ends, hp):
    a, w, grad = operands()
    for x, y in zip(run(a, w[:2], grad, ends, wgrad_with_hp=hp),
                    run(a, w[:2], grad, ends, device="cuda", wgrad_with_hp=hp), strict=True):
        assert sqnr_db(x, y) >= 45


@pytest.mark.parametrize("hp", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_other_dtypes(dtype, hp):
    a, w, grad = operands(dtype)
    for out_dtype in (torch.bfloat16, dtype):
        kwargs = dict(wgrad_with_hp=hp, out_dtype=out_dtype)
        for x, y in zip(run(a, w, grad, **kwargs), run(a, w, grad, device="cuda", **kwargs), strict=True):
            assert x.dtype == y.dtype and sqnr_db(x, y) >= 45


def test_rows_past_the_last_group_touch_nothing():
    check_that_rows_past_the_last_group_touch_nothing("cuda")


@pytest.mark.parametrize("hp", (True, False))
def test_nothing_waits_for_the_device(hp):
    """Sorting, padding and all three products take their sizes from the device; the host never looks."""
    counts = torch.tensor([3, 0, 77, 20, 5, 64], dtype=torch.int32, device="cuda")  # 2 ranks x 3 experts
    x = quantize(torch.randn(169, 256, device="cuda").bfloat16()).requires_grad_()
    w = torch.randn(3, 160, 256, device="cuda").bfloat16().requires_grad_()

    def step():
        shape, rows, indices, _, ends = permute_mxfp8_fwd_hp_bwd(x, counts, 2, 3)
        out = _to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs=ends, wgrad_with_hp=hp)
        unpermute_hp_fwd_mxfp8_bwd(out, indices, shape).sum().backward()

    step()  # the first call may wait while libraries load
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("hp", (True, False))
@pytest.mark.parametrize("block", (32, 128))
def test_compiles_in_one_graph(block, hp):
    assert all(torch.equal(x, y) for x, y in compiled_and_eager("cuda", "inductor", block, hp))
