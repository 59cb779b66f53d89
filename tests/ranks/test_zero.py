# SPDX-License-Identifier: Apache-2.0
"""Trainings whose gradients are handled together against DeepSpeed's own, bit for bit."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ds_mxfp8_moe
from ds_mxfp8_moe.compat import zero
from tests.support.models import (
    ADAM,
    DEFAULT,
    OFFLOAD,
    Layout,
    Net,
    batch,
    ds_config,
    make_engine,
    mse,
    parameters,
    state,
    train_steps,
)
from tests.support.rank_pool import reset_deepspeed_groups
from tests.support.slow import slow_except
from tests.support.zero_cases import assert_same_bits_as_deepspeed, poison

CLIPPED = {**ADAM, "gradient_clipping": 0.1}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
THREE_BATCHES = {"gradient_accumulation_steps": 3}


def zero_config(**keys):
    return {**CLIPPED, "zero_optimization": keys}


LAYOUTS = {
    "zero1-bf16": Layout(zero=1, dtype="bf16", config=CLIPPED),
    "zero1-bf16-three-batches": Layout(zero=1, dtype="bf16", config={**CLIPPED, **THREE_BATCHES}),
    "zero2-bf16": Layout(zero=2, dtype="bf16", config=CLIPPED),
    "zero2-bf16-three-batches": Layout(zero=2, dtype="bf16", config={**CLIPPED, **THREE_BATCHES}),
    "zero2-bf16-fp32-accumulation": Layout(zero=2, dtype="bf16", config={**CLIPPED, **FP32_SUMS, **THREE_BATCHES}),
    "experts-on-every-rank": Layout(ep_size=1, zero=2, dtype="bf16", config=CLIPPED),
    "frozen": Layout(zero=1, dtype="bf16", frozen=r"blocks\.0\..*experts\.0.*", config=CLIPPED),
    "buckets-smaller-than-a-weight": Layout(zero=2, dtype="bf16", config=zero_config(
        reduce_bucket_size=5000, overlap_comm=True)),
    "buckets-smaller-than-a-layer": Layout(ep_size=1, zero=2, dtype="bf16", config=zero_config(
        reduce_bucket_size=20_000)),
    "overlap": Layout(zero=1, dtype="bf16", config=zero_config(reduce_bucket_size=20_000, overlap_comm=True)),
    "one-rank-at-a-time": Layout(ep_size=1, zero=2, dtype="bf16", config=zero_config(
        use_multi_rank_bucket_allreduce=False)),
    "round-robin": Layout(ep_size=1, zero=2, dtype="bf16", config={
        **zero_config(round_robin_gradients=True, parameter_alignment=True), **THREE_BATCHES}),
    "pipeline": Layout(ep_size=1, stages=2, zero=1, dtype="bf16", config={**CLIPPED, **THREE_BATCHES}),
    "tensor-parallel": Layout(tensor_parallel=2, zero=1, config=CLIPPED),
    "four-ranks": Layout(ep_size=2, zero=2, dtype="bf16", config={**CLIPPED, **THREE_BATCHES}),
    "no-overflow-check": Layout(zero=1, dtype="bf16", config={**CLIPPED, "bf16": {"check_grad_overflow": False}}),
}


def is_batched(engine):
    return isinstance(engine.optimizer, zero.BatchedGradients)


@contextmanager
def engine_of(layout, batched, **arguments):
    reset_deepspeed_groups()
    engine = make_engine(layout, {**DEFAULT, "batch_gradients": batched}, **arguments)
    assert is_batched(engine) == batched
    yield engine
    engine.destroy()


def trained(batched, layout, poisoned=False):
    with engine_of(layout, batched) as engine:
        records = train_steps(engine, layout)
        if poisoned:
            hook = poison(engine, torch.distributed.get_rank())
            records += train_steps(engine, layout, first=layout.steps)
            if hook:
                hook.remove()
            records += train_steps(engine, layout, first=2 * layout.steps)
        return records, parameters(engine), state(engine)


def both(function, *args, at_once=zero.AT_ONCE):
    """What `function` returns with DeepSpeed's own handling of gradients, and with ours."""
    plain = function(False, *args)
    with mock.patch.object(zero, "AT_ONCE", at_once):
        return plain, function(True, *args)


@pytest.mark.parametrize("name", slow_except(
    LAYOUTS, "zero1-bf16", "zero2-bf16-three-batches", "buckets-smaller-than-a-weight"))
def test_trainings_are_deepspeeds_bit_for_bit(request, name):
    ranks = request.getfixturevalue("ranks4" if name == "four-ranks" else "ranks2")
    results = ranks.run(both, trained, LAYOUTS[name])
    assert_same_bits_as_deepspeed(results)
    assert all(record["norm"] > 0.1 for (records, *_), _ in results for record in records)  # so clipping acts


@pytest.mark.parametrize("name", slow_except(
    ["zero2-bf16-fp32-accumulation", "experts-on-every-rank"], "zero2-bf16-fp32-accumulation"))
def test_in_portions(ranks2, name):
    assert_same_bits_as_deepspeed(ranks2.run(both, trained, LAYOUTS[name], at_once=15_000))


@pytest.mark.parametrize("name", slow_except(["zero1-bf16", "zero2-bf16-fp32-accumulation"], "zero1-bf16"))
def test_a_nan_in_one_experts_gradient_skips_the_step_everywhere(ranks2, name):
    results = ranks2.run(both, trained, LAYOUTS[name], True)
    assert_same_bits_as_deepspeed(results)
    steps = LAYOUTS[name].steps
    assert all([r["skipped"] for r in records] == [0] * steps + [1] * steps + [0] * steps
               for _, (records, *_) in results)


class Unusual(Net):
    """Calls one layer twice, recomputes one, calls one in some batches only, has experts' weights in its loss, and a
    parameter of an odd size."""

    calls = 0

    def __init__(self):
        super().__init__(2)
        self.blocks.append(Net(2).blocks[0])
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x, target):
        self.calls += 1
        x = self.first(x) * self.scale.mean()
        for block in [self.blocks[0], self.blocks[0]] + [self.blocks[1]] * (self.calls % 2):
            x, _ = block(x)
        x, _ = checkpoint(self.blocks[2], x, use_reentrant=False)
        decay = sum(p.float().pow(2).sum() for p in self.blocks[0].moe.deepspeed_moe.experts.parameters())
        return mse(self.last(x), target) + 1e-3 * decay


def trained_unusually(batched, layout):
    torch.manual_seed(layout.seed)
    with engine_of(layout, batched, model=Unusual()) as engine:
        return train_steps(engine, layout), parameters(engine), state(engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(
    ["zero1-bf16-three-batches", "zero2-bf16-fp32-accumulation", "buckets-smaller-than-a-weight"],
    "zero1-bf16-three-batches"))
def test_unusual_models(ranks2, name):
    assert_same_bits_as_deepspeed(ranks2.run(both, trained_unusually, replace(LAYOUTS[name], steps=3)))


def decayed(batched):
    """A client's AdamW with weight decay for matrices alone."""
    reset_deepspeed_groups()
    layout = Layout(zero=1, dtype="bf16", client=True, config=THREE_BATCHES)
    torch.manual_seed(layout.seed)
    model = Net(2)
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5, "name": "decayed"},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "name": "others"}]
    optimizer = torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer(groups), lr=1e-3, eps=1e-4)
    engine = ds_mxfp8_moe.initialize(model=model, optimizer=optimizer, config=ds_config(
        layout, {**DEFAULT, "batch_gradients": batched}))[0]
    assert len(engine.optimizer.bit16_groups) == 4 and is_batched(engine) == batched
    result = train_steps(engine, layout), parameters(engine), state(engine)
    engine.destroy()
    return result


def test_groups_of_a_clients_optimizer(ranks2):
    assert_same_bits_as_deepspeed(ranks2.run(both, decayed))


def tripled(parameter):
    parameter.grad.mul_(3)


def touched(batched, layout):
    """What users see and change: hooks, gradients between backward and step, torch.autograd.grad."""
    seen = []
    with engine_of(layout, batched) as engine:
        experts = {n: p for n, p in engine.module.named_parameters() if "experts" in n}
        first, second, third = list(experts.values())[:3]
        first.register_hook(lambda grad: grad * 2)
        second.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        third.register_post_accumulate_grad_hook(tripled)
        for step in range(2):
            torch.manual_seed(step)
            x = batch(step, layout, torch.distributed.get_rank())
            seen += torch.autograd.grad(engine.module(*x), list(experts.values()))
            assert all(p.grad is None for p in engine.module.parameters())
            engine.backward(engine(*x))
            seen += [safe_get_full_grad(p).clone() for p in engine.module.parameters()]
            third.data = third.data.clone()  # the step puts it back into ZeRO's flat weights
            safe_set_full_grad(second, torch.full_like(second, 0.25, dtype=torch.float32))
            engine.step()
        seen += state(engine).values()
    return seen


@pytest.mark.parametrize("name", slow_except(
    ["zero1-bf16", "experts-on-every-rank", "overlap", "zero2-bf16-fp32-accumulation"], "zero1-bf16"))
def test_hooks_and_gradients_that_users_see(ranks2, name):
    layout = replace(LAYOUTS[name], config={**LAYOUTS[name].config, "gradient_accumulation_steps": 1})
    for plain, own in ranks2.run(both, touched, layout):
        assert len(plain) == len(own) > 100
        assert [i for i, (a, b) in enumerate(zip(plain, own, strict=True)) if not torch.equal(a, b)] == []


class Calls(TorchDispatchMode):
    """Counts calls that copy or add."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.removeprefix("aten::") in ("copy_", "_to_copy", "add_", "_foreach_copy_",
                                                                   "_foreach_add_")
        return func(*args, **(kwargs or {}))


def calls(batched, layout):
    """How many calls follow autograd, in the passes that end an accumulation and in their steps."""
    with engine_of(layout, batched) as engine, mock.patch.object(engine, "_backward_epilogue") as epilogue:
        counted = Calls()

        def count():
            with counted:
                type(engine)._backward_epilogue(engine)

        epilogue.side_effect = count
        engine.backward(engine(*batch(0, layout, torch.distributed.get_rank())))
        with counted:
            engine.step()
        return counted.count, sum(len(group) for group in engine.optimizer.params_in_partition)


@pytest.mark.parametrize("layout", [
    Layout(zero=1, dtype="bf16", config=CLIPPED), Layout(zero=2, dtype="bf16", config={**CLIPPED, **FP32_SUMS})],
    ids=["zero1", "zero2-fp32-accumulation"])
def test_few_calls_copy_gradients(ranks2, layout):
    for (plain, count), (own, _) in ranks2.run(both, calls, layout):
        assert own < 20 < count < plain


def reason(layout):
    reset_deepspeed_groups()
    engine = make_engine(layout, DEFAULT)
    obstacle = zero.batch_gradients(engine.optimizer, True)
    assert not is_batched(engine) and not isinstance(engine.optimizer, zero.BatchedChecks)
    engine.destroy()
    return obstacle


@pytest.mark.parametrize("layout, obstacle", [
    (Layout(dtype="bf16"), None), (Layout(zero=1, dtype="bf16", config=FP32_SUMS), None),
    (Layout(zero=2, dtype="bf16", config={**ADAM, **OFFLOAD}), "ZeRO-Offload is on")],
    ids=["zero0", "BF16_Optimizer", "offload"])
def test_other_optimizers_keep_their_own_way(ranks2, layout, obstacle):
    found = ranks2.run(reason, layout)
    assert found == [None, None] if obstacle is None else all(obstacle in text for text in found)


def checks_alone(layout):
    reset_deepspeed_groups()
    engine = make_engine(layout, DEFAULT)
    kind = type(engine.optimizer)
    records = train_steps(engine, layout)
    own = records, parameters(engine), state(engine)
    engine.destroy()
    return kind, trained(False, layout), own


@pytest.mark.parametrize("layout", [
    Layout(zero=2, dtype="bf16", config={**CLIPPED, "communication_data_type": "fp32"}),
    Layout(zero=1, dtype="bf16", config=zero_config(contiguous_gradients=False))],
    ids=["fp32-communication", "not-contiguous"])
def test_unusual_buckets_are_deepspeeds_and_checks_are_batched(ranks2, layout):
    results = ranks2.run(checks_alone, layout)
    assert [kind for kind, *_ in results] == [zero.BatchedChecks] * 2
    assert_same_bits_as_deepspeed([pair for _, *pair in results])


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


def masters_and_moments_after_conversions():
    """Whether masters and moments of a weight are there for users after each conversion, and a step trains them."""
    reset_deepspeed_groups()
    layout = Layout(zero=1, config=ADAM)
    engine, found = make_engine(layout, {"enabled": True}), []
    weight = next(p for name, p in engine.module.named_parameters() if p.dim() > 1 and not is_moe_param(p))
    train_steps(engine, layout)
    moment = safe_get_full_optimizer_state(weight, "exp_avg")
    for on in (False, True):
        ds_mxfp8_moe.convert(engine, {"enabled": on})
        found.append(torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), moment))
        found.append(torch.equal(safe_get_full_fp32_param(weight), weight))
        safe_set_full_fp32_param(weight, torch.full_like(weight, 9.0))
        train_steps(engine, layout)
        found.append(bool(((weight - 9.0).abs() < 1).all()))
        moment = safe_get_full_optimizer_state(weight, "exp_avg")
    engine.destroy()
    return found


def test_masters_and_moments_stay_in_reach_after_conversions(ranks2):
    assert ranks2.run(masters_and_moments_after_conversions) == [[True] * 6] * 2
