# SPDX-License-Identifier: Apache-2.0
"""Trainings whose gradients are checked together against DeepSpeed's own, bit for bit."""

from unittest import mock

import pytest
import torch
from models import DEFAULT, Layout, make_engine, parameters, train_steps
from rank_pool import reset_deepspeed_groups
from test_checkpoints import ADAM, OFFLOAD, state

import ds_mxfp8_moe
from ds_mxfp8_moe import zero

CLIPPED = {**ADAM, "gradient_clipping": 0.1}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
LAYOUTS = {
    "zero1": Layout(zero=1, config=CLIPPED),
    "zero2-bf16": Layout(zero=2, dtype="bf16", config=CLIPPED),
    "zero2-bf16-fp32-accumulation": Layout(zero=2, dtype="bf16", config={
        **CLIPPED, **FP32_SUMS, "gradient_accumulation_steps": 2}),
    "experts-on-every-rank": Layout(ep_size=1, zero=2, dtype="bf16", config=CLIPPED),
    "frozen": Layout(zero=1, dtype="bf16", frozen=r"blocks\.0\..*experts\.0.*", config=CLIPPED),
    "small-buckets-overlap": Layout(zero=2, dtype="bf16", config={
        **CLIPPED, "zero_optimization": {"reduce_bucket_size": 5000, "overlap_comm": True}}),
    "tensor-parallel": Layout(tensor_parallel=2, zero=1, config=CLIPPED),
    "no-overflow-check": Layout(zero=1, dtype="bf16", config={**CLIPPED, "bf16": {"check_grad_overflow": False}}),
}


def poison(engine, rank):
    """One expert's gradient on rank 1 holds a NaN."""
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if "experts.1" in n)
    if rank == 1:
        parameter.register_hook(lambda grad: grad.index_fill(0, torch.zeros(1, dtype=torch.long), float("nan")))


def is_batched(engine):
    return isinstance(engine.optimizer, zero.BatchedGradients)


def trained(layout, batched, poisoned=False):
    reset_deepspeed_groups()
    engine = make_engine(layout, {**DEFAULT, "batch_gradient_checks": batched})
    assert is_batched(engine) == batched
    records = train_steps(engine, layout)
    if poisoned:
        poison(engine, torch.distributed.get_rank())
        records += train_steps(engine, layout, first=layout.steps)
    result = records, parameters(engine), state(engine)
    engine.destroy()
    return result


def both(layout, poisoned=False):
    return trained(layout, False, poisoned), trained(layout, True, poisoned)


def check_equal(results):
    for (records, weights, states), (own_records, own_weights, own_states) in results:
        assert own_records == records
        assert [n for n in weights if not torch.equal(weights[n], own_weights[n])] == []
        assert [n for n in states if not torch.equal(states[n], own_states[n])] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_trainings_are_deepspeeds_bit_for_bit(ranks2, name):
    results = ranks2.run(both, LAYOUTS[name])
    check_equal(results)
    assert all(record["norm"] > 0.1 for (records, *_), _ in results for record in records)  # so clipping acts


@pytest.mark.parametrize("name", ["zero1", "zero2-bf16", "zero2-bf16-fp32-accumulation"])
def test_a_nan_in_one_experts_gradient_skips_the_step_everywhere(ranks2, name):
    results = ranks2.run(both, LAYOUTS[name], True)
    check_equal(results)
    steps = LAYOUTS[name].steps
    assert all([r["skipped"] for r in records] == [0] * steps + [1] * steps for _, (records, *_) in results)


def reason(layout):
    reset_deepspeed_groups()
    engine = make_engine(layout, DEFAULT)
    obstacle = zero.batch_gradients(engine.optimizer, True)
    assert not is_batched(engine)
    engine.destroy()
    return obstacle


@pytest.mark.parametrize("layout, obstacle", [
    (Layout(dtype="bf16"), None), (Layout(zero=1, dtype="bf16", config=FP32_SUMS), None),
    (Layout(zero=2, dtype="bf16", config={**ADAM, **OFFLOAD}), "with offload")],
    ids=["zero0", "BF16_Optimizer", "offload"])
def test_other_optimizers_keep_their_own_checks(ranks2, layout, obstacle):
    found = ranks2.run(reason, layout)
    assert found == [None, None] if obstacle is None else all(obstacle in text for text in found)


def of_another_release():
    with mock.patch.object(zero, "TESTED", ("0.0.1", )):
        return reason(Layout(zero=1))


def test_other_releases_of_deepspeed_keep_their_own_checks(ranks2):
    assert all("0.0.1" in text for text in ranks2.run(of_another_release))


def converted_later():
    reset_deepspeed_groups()
    engine = make_engine(Layout(zero=1), {"enabled": False})
    found = [is_batched(engine)]
    for section in ({"enabled": True}, {"enabled": False}):
        ds_mxfp8_moe.convert(engine, section)
        found.append(is_batched(engine))
    engine.destroy()
    return found


def test_it_comes_and_goes_with_the_conversion(ranks2):
    assert ranks2.run(converted_later) == [[False, True, False]] * 2
