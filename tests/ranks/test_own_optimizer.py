# SPDX-License-Identifier: Apache-2.0
"""An optimizer made by the user trains all of the model, experts too, as scheduled."""

import functools

import accelerate
import pytest
import torch
from autoep_models import batch, ds_config, gathered, model
from rank_pool import reset_hugging_face
from slow import slow_except
from test_engine import enabled
from transformers import get_linear_schedule_with_warmup

import ds_mxfp8_moe

RATES = [0.1, 0.075, 0.05, 0.025]


def groups_of(net) -> list[dict]:
    """As scripts write them: no weight decay for norms."""
    norms = [p for name, p in net.named_parameters() if "norm" in name]
    return [{"params": [p for name, p in net.named_parameters() if "norm" not in name], "weight_decay": 0.1},
            {"params": norms, "weight_decay": 0.0}]


def prepared(stage, dtype):
    reset_hugging_face()
    config = ds_config({"enabled": True}, stage, bf16={"enabled": dtype == "bf16"})
    del config["optimizer"]
    accelerator = accelerate.Accelerator(deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=config))
    net = model()
    optimizer = torch.optim.SGD(groups_of(net), lr=RATES[0])
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(RATES))
    # By default each of two processes would make two steps of the schedule.
    accelerator.step_scheduler_with_optimizer = False
    return (accelerator, *accelerator.prepare(net, optimizer, schedule))


def step(accelerator, engine, optimizer, schedule, number):
    ids = batch(number)
    loss = engine(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss.item()


@enabled()
def trained(directory, stage, dtype):
    parts, used = prepared(stage, dtype), []
    engine, inner = parts[1], parts[1].optimizer.optimizer
    inner.register_step_pre_hook(lambda *_: used.append(
        {(group.get("moe", False), group["lr"], group["weight_decay"]) for group in inner.param_groups}))
    before = {name: gathered(p) for name, p in engine.module.named_parameters()}
    losses = [step(*parts, i) for i in range(2)]
    parts[0].save_state(directory)
    losses += [step(*parts, i) for i in range(2, 4)]
    still = [name for name, p in engine.module.named_parameters() if torch.equal(before[name], gathered(p))]
    again = prepared(stage, dtype)
    again[0].load_state(directory)
    return losses, [step(*again, i) for i in range(2, 4)], still, used


@pytest.mark.parametrize("stage, dtype", [(1, "bf16"), (2, "fp32"), (3, "fp32")])
def test_own_optimizer_and_schedule(ranks2, tmp_path, stage, dtype):
    for losses, resumed, still, used in ranks2.run(trained, tmp_path, stage, dtype):
        assert not [name for name in still if "norm" not in name]  # bf16 norms hardly move
        assert losses[2:] == resumed
        rates = sorted({rate for groups in used for _, rate, _ in groups}, reverse=True)
        assert rates == pytest.approx(RATES)
        if stage < 3:
            steps = [groups for groups in used if any(moe for moe, *_ in groups)]
            assert [rate for groups in steps for _, rate, _ in groups] == pytest.approx(RATES)
            assert {decay for groups in steps for *_, decay in groups} == {0.1}


def by_initialize(stage, made):
    config = ds_config({"enabled": True}, stage)
    del config["optimizer"], config["zero_allow_untested_optimizer"]
    net = model()
    optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
    engine, returned, *_ = ds_mxfp8_moe.initialize(
        model=net, config=config, optimizer=optimizer(net.parameters()) if made else optimizer,
        model_parameters=net.parameters())
    before = {name: gathered(p) for name, p in engine.module.named_parameters()}
    engine.backward(engine(input_ids=batch(0), labels=batch(0)).loss)
    engine.step()
    still = [name for name, p in engine.module.named_parameters() if torch.equal(before[name], gathered(p))]
    return still, isinstance(returned.optimizer, torch.optim.AdamW)


@pytest.mark.parametrize("stage, made", slow_except([(1, True), (2, False), (2, True), (3, True)], (1, True)))
def test_initialize_splits_an_own_optimizer(ranks2, stage, made):
    """Torch's AdamW needs no zero_allow_untested_optimizer."""
    assert ranks2.run(by_initialize, stage, made) == [([], True)] * 2
