# SPDX-License-Identifier: Apache-2.0
"""The permute kernels on a GPU: groups of any size on one of them, and over NCCL."""


import pytest
import torch

from ds_mxfp8_moe.ops.triton_kernels import local, permute
from ds_mxfp8_moe.transport.local import Local
from tests.support.permute_cases import FORMATS, MX32, PLAIN, PROBLEMS, Problem, bits, check_exchange
from tests.support.slow import slow_except

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("name", PROBLEMS)
def test_same_bits_as_the_plain_path(name):
    check_exchange("cuda", PROBLEMS[name])


SIZES = {2880: 4, 7168: 8, 768: 12, 5120: 40}  # hidden size and number of ranks


# Each row_format and each size once.
@pytest.mark.parametrize("row_format, hidden, ranks", slow_except(
    [(row_format, *sizes) for row_format in FORMATS for sizes in SIZES.items()],
    *((row_format, *sizes) for row_format, sizes in zip(FORMATS, SIZES.items(), strict=True))))
def test_real_sizes(row_format, hidden, ranks):
    check_exchange("cuda", Problem((300, ) * (ranks - 1) + (511, ), top_k=8, local_experts=8, hidden=hidden,
                                   row_format=FORMATS[row_format], not_finite=True, routing="dropped"))


def test_rows_that_do_not_lie_at_multiples_of_16_bytes():
    x, scale = torch.randn(70 * 96 + 3, device="cuda", dtype=BF16)[3:].view(70, 96), None
    slot, source = torch.arange(70, device="cuda").view(70, 1), torch.full((128, ), 70, device="cuda")
    source[:70] = torch.arange(70, device="cuda")
    out, _, _ = permute.expand_rows(x, scale, None, slot, source)
    assert torch.equal(out[:70], x) and not out[70:].any()
    y = torch.randn(128 * 96 + 1, device="cuda", dtype=BF16)[1:].view(128, 96)
    total, _ = local.combine_rows(y, None, slot, BF16, 0, "rceil")
    assert torch.equal(total, y[:70])


def test_more_than_2_to_the_31_values():
    P, H = 128 * 2400, 7168
    y = torch.empty((P, H), dtype=BF16, device="cuda")
    y[-128:] = torch.randn(128, H, device="cuda")
    slot = torch.arange(P - 128, P, device="cuda").view(64, 2)
    total, _ = local.combine_rows(y, None, slot, BF16, 0, "rceil")
    assert torch.equal(total, (y[-128::2].float() + y[-127::2].float()).to(BF16))
    source = torch.full((P, ), 128, device="cuda")
    source[-128:] = torch.arange(128, device="cuda")
    slot = torch.arange(P - 128, P, device="cuda").view(128, 1)
    out, _, _ = permute.expand_rows(y[-128:].float(), None, None, slot, source)
    assert torch.equal(out[-128:], y[-128:].float()) and not out[:-128].any()


@pytest.mark.parametrize("row_format", [PLAIN, MX32])
def test_in_a_cuda_graph(row_format):
    expert, x, weight = (t.cuda() for t in Problem((200, ), top_k=4, hidden=512).inputs()[0])
    transport = Local()

    def both():
        plan = transport.plan(expert, 4)
        x_PH, weight_P = transport.dispatch(plan, x, row_format, weight)
        y_PH = x_PH.dequantize() if row_format.mxfp8 else x_PH
        return x_PH, *transport.combine(plan, y_PH, row_format, BF16, weight_P)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    x.copy_(torch.randn_like(x))
    expert.copy_(expert.flip(0))
    graph.replay()
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(captured, both(), strict=True))
