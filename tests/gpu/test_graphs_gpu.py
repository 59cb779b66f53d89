# SPDX-License-Identifier: Apache-2.0
"""`graph_attention` with CUDA graphs: attention trains in the same bits."""

from functools import partial

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.graph_cases import (
    BF16,
    SLIDING,
    attention_kept,
    both,
    checkpointed,
    checkpointed_on_the_host,
    evaluation,
    for_good,
    half_checkpointed,
    impatient,
    kept_losses,
    kept_outputs,
    lengths,
    padded,
    pairs,
    plainly,
    reentrant,
    thrown_away,
    uneven,
)

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128}


def exactly():
    """Attention's other kernels for backward add with atomics."""
    return sdpa_kernel(SDPBackend.MATH)


@pytest.mark.parametrize("stage, steps_of, train, dropout", [
    (0, 1, plainly, 0), (1, 3, plainly, 0), (2, 2, plainly, 0.1), (1, 2, lengths, 0), (1, 1, evaluation, 0.1),
    (2, 1, pairs, 0), (1, 2, thrown_away, 0), (1, 2, kept_losses, 0), (2, 1, uneven, 0),
    (1, 1, padded, 0), (1, 1, kept_outputs, 0), (1, 2, checkpointed, 0), (1, 1, checkpointed, 0.1),
    (2, 2, reentrant, 0.1), (1, 2, half_checkpointed, 0), (2, 2, checkpointed_on_the_host, 0.1)],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_graphs_train_alike(gpu_ranks, stage, steps_of, train, dropout):
    for losses, weights, lines, _ in gpu_ranks.run(both, train, "qwen3_moe", stage, steps_of, BF16, exactly, **SIZES,
                                                   attention_dropout=dropout, seconds=120):
        assert lines and all("runs in CUDA graphs" in line for line in lines), lines
        assert losses and weights


def test_attention_that_checkpoints_keep_has_no_graphs(gpu_ranks):
    for losses, weights, lines, _ in gpu_ranks.run(both, attention_kept, "qwen3_moe", 1, 2, BF16, exactly, **SIZES,
                                                   seconds=120):
        assert losses and weights and not any("runs in CUDA graphs" in line for line in lines)


def test_layers_whose_masks_differ(gpu_ranks):
    for losses, weights, lines, _ in gpu_ranks.run(both, plainly, "qwen2_moe", 1, 2, BF16, exactly, **SIZES, **SLIDING,
                                                   seconds=120):
        assert lines and all("runs in CUDA graphs" in line for line in lines), lines
        assert losses and weights


def test_graphs_that_no_step_uses_are_freed(gpu_ranks):
    for losses, weights, lines, _ in gpu_ranks.run(impatient, for_good, exactly, **SIZES, seconds=120):
        assert losses and weights
        made, freed, again = lines
        assert "did not use the CUDA graphs" in freed and all("runs in CUDA graphs" in line for line in (made, again))


def waiting(net):
    """Attention in which the host waits for the device, as a capture cannot."""
    for layer in net.module.model.layers:
        layer.self_attn.q_proj.forward = partial(waited, layer.self_attn.q_proj.forward)
    return plainly(net)


def waited(plain, x):
    x.sum().item()  # the host waits here, as the test wants it to
    return plain(x)


def test_attention_that_waits_runs_as_before(gpu_ranks):
    for losses, weights, lines, _ in gpu_ranks.run(both, waiting, "qwen3_moe", 1, 2, BF16, exactly, **SIZES,
                                                   attention_dropout=0.1, seconds=120):
        assert lines and all("since there was an error" in line for line in lines), lines
        assert losses and weights
