# SPDX-License-Identifier: Apache-2.0
"""`graph_attention` with CUDA graphs: attention trains in the same bits."""

import pytest
from test_graphs import BF16, both, evaluation, kept_losses, lengths, pairs, plainly, thrown_away
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128}


def exactly():
    """Attention's other kernels for backward add with atomics."""
    return sdpa_kernel(SDPBackend.MATH)


@pytest.mark.parametrize("stage, steps_of, train, dropout", [
    (0, 1, plainly, 0), (1, 3, plainly, 0), (2, 2, plainly, 0.1), (1, 2, lengths, 0), (1, 1, evaluation, 0.1),
    (2, 1, pairs, 0), (1, 2, thrown_away, 0), (1, 2, kept_losses, 0)],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_graphs_train_alike(gpu_ranks, stage, steps_of, train, dropout):
    for losses, weights, lines, _ in gpu_ranks.run(both, train, "qwen3_moe", stage, steps_of, BF16, exactly, **SIZES,
                                                   attention_dropout=dropout, seconds=120):
        assert lines and all("runs in CUDA graphs" in line for line in lines), lines
        assert losses and weights
