# SPDX-License-Identifier: Apache-2.0
"""What users do from start to end, by each library that they use: train, evaluate, save, resume, and load the saved
model in plain transformers."""

import math
from datetime import timedelta

import accelerate
import deepspeed.comm as dist
import peft
import pytest
import torch
import transformers
from autoep_models import batch, ds_config, model, train_engine
from rank_pool import reset_hugging_face, set_timeout
from slow import slow_except
from test_engine import enabled
from test_pretrained import HELD_OUT, held_out_loss, loaded
from test_saving import LORA, PATTERN
from test_trainer import Sentences

import ds_mxfp8_moe
from ds_mxfp8_moe import save_pretrained
from ds_mxfp8_moe.transport.deadline import IN_EVALUATION, PeerFailure, naming_evaluation

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}


def config(stage: int, expert_parallel: dict | None = None, **changes) -> dict:
    return ds_config({"enabled": True}, stage, 2, expert_parallel, bf16={"enabled": True}, optimizer=ADAMW, **changes)


def by_deepspeed(directory, stage, adapters=False) -> tuple[float, list, list]:
    """The held-out loss after two steps; the losses of the next two steps; the same after a resume."""

    def build():
        net = model(dtype=torch.bfloat16)
        net, pattern = (peft.get_peft_model(net, LORA), PATTERN) if adapters else (net, None)
        return ds_mxfp8_moe.initialize(model=net, config=config(stage, pattern))[0]

    engine = build()
    train_engine(engine, range(2))
    evaluated = held_out_loss(engine)
    engine.train()
    engine.save_checkpoint(str(directory / "state"))
    save_pretrained(engine, directory / "model")
    losses = train_engine(engine, range(2, 4))
    again = build()
    again.load_checkpoint(str(directory / "state"))
    return evaluated, losses, train_engine(again, range(2, 4))


def by_peft(directory, stage) -> tuple[float, list, list]:
    return by_deepspeed(directory, stage, adapters=True)


@enabled()
def by_accelerate(directory, stage, own=False) -> tuple[float, list, list]:
    accelerator = None

    def prepared():
        nonlocal accelerator
        reset_hugging_face()
        given = config(stage)
        if own:
            del given["optimizer"]
        accelerator = accelerate.Accelerator(deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=given))
        net = model(dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW if own else accelerate.utils.DummyOptim
        return accelerator.prepare(net, optimizer(net.parameters(), lr=3e-3))

    def train(engine, optimizer, steps) -> list[float]:
        engine.train()
        losses = []
        for number in steps:
            loss = engine(input_ids=batch(number), labels=batch(number)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    parts = prepared()
    train(*parts, range(2))
    evaluated = held_out_loss(parts[0])
    accelerator.save_state(directory / "state")
    accelerator.unwrap_model(parts[0]).save_pretrained(
        directory / "model", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(parts[0]))
    losses = train(*parts, range(2, 4))
    parts = prepared()
    accelerator.load_state(directory / "state")
    return evaluated, losses, train(*parts, range(2, 4))


def by_accelerate_with_an_own_optimizer(directory, stage) -> tuple[float, list, list]:
    return by_accelerate(directory, stage, own=True)


class HeldOut(torch.utils.data.Dataset):
    """The two texts of `held_out_loss`, one for each rank."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        ids = batch(HELD_OUT, rank=0)[index]
        return {"input_ids": ids, "labels": ids}


@enabled()
def by_trainer(directory, stage) -> tuple[float, list, list]:
    """Evaluates and saves after two of four steps."""

    def trainer():
        reset_hugging_face()
        arguments = transformers.TrainingArguments(
            output_dir=str(directory / "state"), deepspeed=config(stage, train_micro_batch_size_per_gpu=1),
            use_cpu=True, bf16=True, max_steps=4, per_device_train_batch_size=1, per_device_eval_batch_size=1,
            learning_rate=3e-3, logging_steps=1, save_steps=2, eval_strategy="steps", eval_steps=2, report_to=[],
            disable_tqdm=True)
        net = model(dtype=torch.bfloat16)
        return transformers.Trainer(model=net, args=arguments, train_dataset=Sentences(32), eval_dataset=HeldOut())

    def logged(of, key) -> list[float]:
        return [entry[key] for entry in of.state.log_history if key in entry]

    first = trainer()
    first.train()
    again = trainer()
    again.train(resume_from_checkpoint=str(directory / "state/checkpoint-2"))
    again.save_model(directory / "model")
    return logged(again, "eval_loss")[-1], logged(first, "loss")[2:], logged(again, "loss")[2:]


CASES = [(by_trainer, 2), (by_trainer, 3), *((front, stage) for stage in (1, 2, 3) for front in (
    by_accelerate, by_accelerate_with_an_own_optimizer)), (by_peft, 0),
    *((by_deepspeed, stage) for stage in range(4))]


@pytest.mark.parametrize("front, stage", slow_except(CASES, (by_accelerate_with_an_own_optimizer, 2)))
def test_from_training_to_the_saved_model(ranks2, tmp_path, front, stage):
    for evaluated, losses, resumed in ranks2.run(front, tmp_path, stage):
        assert len(losses) == 2 and all(map(math.isfinite, losses)) and losses == resumed
        if front is by_peft:
            net = peft.PeftModel.from_pretrained(model(dtype=torch.bfloat16), tmp_path / "model")
        else:
            net = loaded(tmp_path / "model", torch.bfloat16)
        assert held_out_loss(net) == pytest.approx(evaluated, abs=1e-3)


def checkpoint_of_adapters(directory) -> None:
    net = peft.get_peft_model(model(dtype=torch.bfloat16), LORA)
    engine = ds_mxfp8_moe.initialize(model=net, config=config(3, PATTERN))[0]
    with pytest.raises(RuntimeError, match="frozen expert .*exclude_frozen_parameters.*ds_mxfp8_moe.save_pretrained"):
        engine.save_checkpoint(str(directory))


def test_zero3_says_how_adapters_are_saved(ranks2, tmp_path):
    ranks2.run(checkpoint_of_adapters, tmp_path)


def generated(synced: bool) -> str | int:
    """Rank 1 wants more tokens than rank 0. How many it gets, or the error."""
    engine = ds_mxfp8_moe.initialize(model=model(), config=ds_config({"enabled": True}, 0))[0]
    engine.eval()
    engine.module(input_ids=batch(0))  # the ranks choose a transport
    set_timeout(timedelta(seconds=3))
    more = 2 + 3 * dist.get_rank()
    try:
        return engine.module.generate(batch(0), max_new_tokens=more, min_new_tokens=more, synced_gpus=synced).shape[1]
    except PeerFailure as failure:
        return str(failure)


@pytest.mark.slow
def test_generate_on_ranks_of_different_lengths_names_synced_gpus(ranks2):
    assert ranks2.run(generated, True) == [16 + 2, 16 + 5]
    _, failure = ranks2.run(generated, False)
    ranks2.close()  # their default group has a deadline of its own now
    assert "rank 1 waited for rank 0 in 'counts' of model.layers.0.mlp until the deadline" in failure
    assert "The layer is in evaluation mode. In generate(), " in failure and "pass synced_gpus=True" in failure


@pytest.mark.parametrize("missing, at_deadline, told", [((1, ), False, True), ((), True, True), ((), False, False)])
def test_every_lost_peer_in_evaluation_is_a_peer_failure_with_the_hint(missing, at_deadline, told):
    with pytest.raises(ds_mxfp8_moe.PeerFailure, match="rank 0 lost") as error, naming_evaluation():
        raise PeerFailure("rank 0 lost its connection", missing, at_deadline)
    assert (IN_EVALUATION in str(error.value)) is told
