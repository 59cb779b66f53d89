# SPDX-License-Identifier: Apache-2.0
"""Trainings with gradients of several passes, compared bit for bit."""

from contextlib import contextmanager

import torch


def poison(engine, rank):
    """One expert's gradient on rank 1 holds a NaN."""
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if "experts.1" in n)
    if rank == 1:
        return parameter.register_hook(lambda grad: grad.index_fill(0, torch.zeros(1, dtype=torch.long), float("nan")))


def assert_same_bits_as_deepspeed(results):
    for (records, weights, states), (own_records, own_weights, own_states) in results:
        assert own_records == records
        assert [n for n in weights if not torch.equal(weights[n], own_weights[n])] == []
        assert states.keys() == own_states.keys()
        assert [n for n in states if not torch.equal(states[n], own_states[n])] == []


@contextmanager
def each_backward(engine):
    """DeepSpeed takes the second of two backward passes alone, unless it accumulates in float32."""
    yield


def no_sync(engine):
    return engine.no_sync()


def coalesced(engine):
    return engine.coalesce_grad_reduction()
