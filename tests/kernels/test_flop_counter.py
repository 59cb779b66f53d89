# SPDX-License-Identifier: Apache-2.0
"""torch.utils.flop_counter sees the GEMMs that GPUs run: what they multiply, padding rows included."""

from importlib import import_module

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

P, N, K, E = 256, 96, 64, 2
BF16, F8 = torch.bfloat16, torch.float8_e4m3fn


def bf16(*shape):
    return torch.empty(shape, dtype=BF16)


def fp8(*shape):
    return torch.empty(shape, dtype=F8)


def scales(*shape):
    return torch.empty(shape, dtype=torch.uint8)


def ends(n=E):
    return torch.empty(n, dtype=torch.int32)


def parts():
    return [bf16(E, N // 2, K), bf16(E, N // 2, K)]


def columns():
    return fp8(N, P), scales(N, 8), 32, fp8(K, P), scales(K, 8), 32, ends()


# Module and op -> its arguments.
CASES = {
    ("grouped_gemm_bf16_hopper", "grouped_mm_bf16_hopper"): lambda: (bf16(P, K), parts(), ends(), BF16, False),
    ("grouped_gemm_bf16_hopper", "grouped_mm_bf16_hopper", "transposed"):
    lambda: (bf16(P, N), parts(), ends(), BF16, True),
    ("grouped_gemm_hopper", "grouped_mm_mxfp8_hopper"):
    lambda: (fp8(P, K), scales(1, P), fp8(E, N, K), scales(E, 1, 1), ends(), BF16),
    ("grouped_wgrad_hopper", "wgrad_mxfp8_hopper_"):
    lambda: (fp8(N, P), scales(2, N), fp8(K, P), scales(2, K), ends(), bf16(E, N, K), False),
    ("grouped_wgrad_hopper", "wgrad_bf16_hopper_"):
    lambda: (bf16(P, N), None, bf16(P, K), None, 0, ends(), bf16(E, N, K), False, 0),
    ("grouped_wgrad_rows_hopper", "wgrad_rows_hopper_"):
    lambda: (fp8(P, N), scales(1, P), False, fp8(P, K), scales(1, P), ends(), bf16(E, N, K), False, 0),
    ("grouped_gemm_blackwell", "grouped_mm_mxfp8_blackwell"):
    lambda: (fp8(P, K), scales(P, 2), 32, fp8(E, N, K), scales(E, N, 2), 32, False, ends(), BF16),
    ("grouped_gemm_blackwell", "wgrad_mxfp8_blackwell"): lambda: (*columns(), BF16),
    ("grouped_gemm_blackwell", "wgrad_mxfp8_blackwell_"): lambda: (bf16(E, N, K), *columns()),
}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_products_are_counted(case):
    import_module(f"ds_mxfp8_moe.ops.triton_kernels.{case[0]}")
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        getattr(torch.ops.ds_mxfp8_moe, case[1])(*CASES[case]())
    assert counter.get_total_flops() == 2 * P * N * K
