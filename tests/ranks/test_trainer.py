# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face Trainer and Accelerate, which call deepspeed.initialize themselves: train, save in each way that
they have, resume, and load in plain transformers; with adapters, and with an optimizer of one's own."""

import math

import accelerate
import deepspeed.comm as dist
import peft
import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from ds_mxfp8_moe import save_pretrained
from tests.support.autoep_models import batch, converted, gathered, model
from tests.support.engine_cases import enabled
from tests.support.pretrained_models import held_out_loss, loaded
from tests.support.rank_pool import reset_hugging_face
from tests.support.saved_models import loss_of, write_config
from tests.support.slow import slow_except
from tests.support.trainers import AUTO, config, made, trainer_of

RATES = [0.1, 0.075, 0.05, 0.025]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# ---- the Trainer


def logged_losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def directory(tmp_path):
    model().save_pretrained(tmp_path / "base")
    return tmp_path


@enabled()
def by_trainer(directory, stage, adapters, *args):
    """The held-out loss; the losses of all steps; those of a resumed run."""
    trainer = trainer_of(directory, stage, adapters, *args)
    with pytest.raises(TypeError, match=r"no DeepSpeed engine yet: call its train\(\) first"):
        save_pretrained(trainer, directory / "early")
    trainer.train()
    assert converted(trainer.model_wrapped) == 2
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    trainer.save_model(directory / "final")
    save_pretrained(trainer, directory / "whole")
    loss = loss_of(trainer.model_wrapped)
    resumed = trainer_of(directory, stage, adapters, *args)
    resumed.train(resume_from_checkpoint=str(directory / "checkpoint-2"))
    return loss, logged_losses(trainer), logged_losses(resumed)


def check_files(directory, names, adapters, dtype, expected: float) -> float:
    """Plain transformers, or PEFT, loads each of the files with the held-out loss that the engine had. Returns that of
    the last file."""
    for name in names:
        if adapters:
            net = peft.PeftModel.from_pretrained(model(), directory / name)
        else:
            net = loaded(directory / name, DTYPES[dtype])
        loss = held_out_loss(net)
        assert loss == pytest.approx(expected, rel=1e-3), name
    return loss


@pytest.mark.parametrize("stage, adapters, dtype, ep_size", slow_except(
    [(2, None, "bf16", 2), (3, None, "fp32", 2), (3, None, "bf16", 1), (0, "attention", "fp32", 2),
     (3, "attention", "fp32", 2), (2, "experts", "fp32", 2), (3, "experts", "fp32", 2)],
    (3, "attention", "fp32", 2)))
def test_the_trainer(ranks2, directory, stage, adapters, dtype, ep_size):
    results = ranks2.run(by_trainer, directory, stage, adapters, dtype, ep_size)
    assert results[0] == results[1]
    expected, losses, resumed = results[0]
    assert all(map(math.isfinite, losses)) and resumed[-2:] == losses[2:]
    loss = check_files(directory, ("final", "whole", "checkpoint-4"), adapters, dtype, expected)
    if adapters:
        assert abs(held_out_loss(made(directory, adapters)) - loss) > 1e-3
    else:
        assert losses[-1] < losses[0] - 0.5


# ---- Accelerate


def own_optimizer(net):
    """Parameter groups as scripts write them: no weight decay for norms."""
    norms = [p for name, p in net.named_parameters() if "norm" in name and p.requires_grad]
    others = [p for name, p in net.named_parameters() if "norm" not in name and p.requires_grad]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.SGD(groups if norms else groups[:1], lr=RATES[0])


def prepared(directory, stage, adapters, dtype, own):
    """The accelerator, the engine, the optimizer and the schedule."""
    reset_hugging_face()
    given = config(stage, adapters, bf16={"enabled": dtype == "bf16"}, optimizer=AUTO)
    if own:
        del given["optimizer"]
    if stage == 2:  # otherwise it finds no GPUs and takes each rank for the main process
        accelerate.PartialState(cpu=True)
    accelerator = accelerate.Accelerator(deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=given))
    assert accelerator.is_main_process == (stage != 2 or dist.get_rank() == 0)
    net = made(directory, adapters)
    if not own:
        optimizer = accelerate.utils.DummyOptim(net.parameters(), lr=3e-3)
        return (accelerator, *accelerator.prepare(net, optimizer), None)
    optimizer = own_optimizer(net)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(RATES))
    # By default each of two processes would make two steps of the schedule.
    accelerator.step_scheduler_with_optimizer = False
    return (accelerator, *accelerator.prepare(net, optimizer, schedule))


def steps(parts, numbers) -> list[float]:
    accelerator, engine, optimizer, schedule = parts
    losses = []
    for number in numbers:
        ids = batch(number)
        loss = engine(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@enabled()
def by_accelerate(directory, stage, adapters, dtype, own):
    """The held-out loss; the losses of four steps; those of the last two after a resume. Which parameters stayed as
    they were, and what each step of the inner optimizer used: whether for experts, rate, weight decay."""
    parts, used = prepared(directory, stage, adapters, dtype, own), []
    accelerator, engine = parts[:2]
    inner = engine.optimizer.optimizer
    inner.register_step_pre_hook(lambda *_: used.append(
        {(group.get("moe", False), group["lr"], group["weight_decay"]) for group in inner.param_groups}))
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    before = {name: gathered(p) for name, p in trained.items()}
    losses = steps(parts, range(2))
    if not adapters:  # of which ZeRO-3 says how they are saved: test_saving.py
        accelerator.save_state(directory / "state")
    losses += steps(parts, range(2, 4))
    still = [name for name, p in trained.items() if torch.equal(before[name], gathered(p))]
    unwrapped = accelerator.unwrap_model(engine)
    unwrapped.save_pretrained(directory / "state_dict", is_main_process=dist.get_rank() == 0,
                              save_function=accelerator.save, state_dict=accelerator.get_state_dict(engine))
    save_pretrained(engine, directory / "whole")
    if not adapters:
        accelerator.save_model(engine, directory / "model")
        write_config(unwrapped, directory / "model")
        with pytest.raises(RuntimeError, match="pass the model that accelerator.prepare returned"):
            accelerator.get_state_dict(unwrapped)
    expected, resumed = loss_of(engine), losses[2:]
    if not adapters:
        again = prepared(directory, stage, adapters, dtype, own)
        again[0].load_state(directory / "state")
        resumed = steps(again, range(2, 4))
    return expected, losses, resumed, still, used


@pytest.mark.parametrize("stage, adapters, dtype, own", slow_except(
    [(1, None, "fp32", False), (2, None, "fp32", False), (3, None, "fp32", False), (1, None, "bf16", True),
     (2, None, "fp32", True), (3, None, "fp32", True), (1, "experts", "fp32", True), (3, "experts", "fp32", True)],
    (3, None, "fp32", True)))
def test_accelerate(ranks2, directory, stage, adapters, dtype, own):
    results = ranks2.run(by_accelerate, directory, stage, adapters, dtype, own)
    expected = results[0][0]
    for loss, losses, resumed, still, used in results:
        assert loss == expected and losses[2:] == resumed
        assert not [name for name in still if "norm" not in name]  # bf16 norms hardly move
        if own:
            rates = sorted({rate for groups in used for _, rate, _ in groups}, reverse=True)
            assert rates == pytest.approx(RATES)
        if own and stage < 3 and not adapters:
            of_experts = [groups for groups in used if any(moe for moe, *_ in groups)]
            assert [rate for groups in of_experts for _, rate, _ in groups] == pytest.approx(RATES)
            assert {decay for groups in of_experts for *_, decay in groups} == {0.1}
    loss = check_files(directory, ("state_dict", "whole") if adapters else ("state_dict", "whole", "model"), adapters,
                       dtype, expected)
    if adapters:
        assert abs(held_out_loss(made(directory, adapters)) - loss) > 1e-3
