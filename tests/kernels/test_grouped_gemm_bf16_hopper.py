# SPDX-License-Identifier: Apache-2.0
"""Where the 16-bit grouped GEMM finds its weights: addresses computed as the kernel does, without a GPU."""

import pytest
import torch

from ds_mxfp8_moe.ops.triton_kernels.grouped_gemm_bf16_hopper import MOST_MATRICES, _placed, grouped_mm_bf16
from tests.support.aot import launches_for

E, N, K = 4, 64, 96


def addresses(placed, part, e, origin):
    each = len(placed.places) // len(placed.spacings)
    place = placed.places[part * each + (e if each > 1 else 0)] + e * placed.spacings[part]
    assert 0 <= place < placed.count
    return origin + place * placed.unit


@pytest.mark.parametrize("order", [
    (0, 2, 4, 6, 1, 3, 5, 7),  # an expert's matrices side by side
    (7, 6, 5, 4, 3, 2, 1, 0), (5, 0, 3, 6, 1, 7, 2, 4)], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_matrices(order, parts):
    lying = torch.empty(2 * E, N + 1, K, dtype=torch.bfloat16)[:, :N]
    weights = [lying[i] for i in order[:parts * E]]
    placed = _placed(weights, E)
    assert len(placed.spacings) == parts and placed.unit % 16 == 0
    origin = min(w.data_ptr() for w in weights)
    for i, w in enumerate(weights):
        assert addresses(placed, i // E, i % E, origin) == w.data_ptr()


def test_stacks():
    lying = torch.empty(3, E, N, K, dtype=torch.bfloat16)
    weights = [lying[2], lying[0, :, :, :]]
    placed = _placed(weights, E)
    for part, w in enumerate(weights):
        for e in range(E):
            assert addresses(placed, part, e, lying.data_ptr()) == w[e].data_ptr()
    assert _placed([lying[0, :1]], 1).count == 1


def test_what_tma_cannot_read():
    flat = torch.empty(2 * E * N * K + 1, dtype=torch.bfloat16)
    assert _placed([flat[1:1 + E * N * K].view(E, N, K)], E) is None  # not at a multiple of 16 bytes
    stack = flat[:E * N * K].view(E, N, K)
    assert _placed([stack[..., :92].transpose(1, 2)], E) is None  # no dense rows
    assert _placed([stack, stack[:, :32]], E) is None
    many = [flat[8 * i * i:8 * i * i + 32].view(1, 32) for i in range(MOST_MATRICES + 1)]
    assert len(_placed(many[:-1], len(many) - 1).places) == MOST_MATRICES and _placed(many, len(many)) is None


@pytest.mark.slow
def test_compiles_once_wherever_the_matrices_lie():
    lying = torch.empty(64, N, K, dtype=torch.bfloat16)
    rows, ends = torch.empty(128 * E, K, dtype=torch.bfloat16), torch.empty(E, dtype=torch.int32)
    for orders in (((0, 1, 3, 4), (17, 0, 16, 48), (33, 1, 32, 0), (5, 21, 38, 4)),
                   ((0, 1, 2, 3), (3, 2, 1, 0), (6, 4, 2, 0), (1, 17, 33, 49))):  # those at equal distances
        with launches_for(90) as launches:
            for order in orders:
                grouped_mm_bf16(rows, [[lying[i] for i in order]], ends, torch.bfloat16)
        assert len(launches) == 4 and len({launch.ptx for launch in launches}) == 1


def test_weights_of_several_dtypes():
    """Not read as one: TMA takes addresses, and one dtype."""
    weights = [torch.empty(N, K, dtype=torch.bfloat16) for _ in range(E)]
    a, ends = torch.empty(128, K, dtype=torch.bfloat16), torch.zeros(E, dtype=torch.int32)
    for parts in ([weights, [*weights[1:], weights[0].float()]], [weights[:-1] + [weights[0].half()]]):
        with pytest.raises(TypeError, match="expected all of them in torch.bfloat16"):
            grouped_mm_bf16(a, parts, ends, torch.bfloat16)
