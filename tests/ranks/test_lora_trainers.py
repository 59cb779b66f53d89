# SPDX-License-Identifier: Apache-2.0
"""LoRA on experts where a library makes the engine: the Hugging Face Trainer and Accelerate."""

import accelerate
import deepspeed.comm as dist
import peft
import pytest
import torch
import transformers
from autoep_models import ds_config, model
from rank_pool import reset_hugging_face
from slow import slow_except
from test_engine import enabled
from test_lora import MXFP8, adapted, batch, held_out_loss, with_adapters
from test_saving import loss_of
from test_trainer import Sentences, config

import ds_mxfp8_moe


def partitioned_at_once(directory):
    """In ZeRO-3, what is loaded after the config was read is partitioned; the base of `adapted` elsewhere."""
    return with_adapters(transformers.AutoModelForCausalLM.from_pretrained(directory / "base"))


def trainer_of(directory, stage):
    arguments = transformers.TrainingArguments(
        output_dir=str(directory), deepspeed=config(MXFP8, stage, 2), use_cpu=True, max_steps=2, save_steps=1,
        per_device_train_batch_size=2, learning_rate=3e-3, report_to=[], disable_tqdm=True)
    return transformers.Trainer(model=partitioned_at_once(directory), args=arguments, train_dataset=Sentences(32))


@pytest.fixture
def directory(tmp_path):
    model().save_pretrained(tmp_path / "base")
    return tmp_path


@enabled()
def by_trainer(directory, stage):
    trainer = trainer_of(directory, stage)
    trainer.train()
    trainer.save_model(directory / "final")
    loss = loss_of(trainer.model_wrapped)
    reset_hugging_face()
    resumed = trainer_of(directory, stage)
    resumed.train(resume_from_checkpoint=str(directory / "checkpoint-1"))
    return loss, loss_of(resumed.model_wrapped)


@pytest.mark.parametrize("stage", slow_except([2, 3], 2))
def test_the_trainer(ranks2, directory, stage):
    results = ranks2.run(by_trainer, directory, stage)
    assert results[0] == pytest.approx(results[1])
    for loss, resumed in results:
        assert resumed == pytest.approx(loss, abs=1e-5)
    for name in ("final", "checkpoint-2"):
        net = peft.PeftModel.from_pretrained(model(), directory / name)
        assert held_out_loss(net) == pytest.approx(results[0][0], abs=1e-3), name
    assert abs(held_out_loss(adapted()) - results[0][0]) > 1e-3


@enabled()
def by_accelerate(directory, stage):
    given = ds_config(MXFP8, stage)
    del given["optimizer"]
    accelerator = accelerate.Accelerator(deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=given))
    net = partitioned_at_once(directory)
    engine, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    for step in range(2):
        ids = batch(step)
        accelerator.backward(engine(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(engine)
    accelerator.unwrap_model(engine).save_pretrained(directory / "state", state_dict=state,
                                                     is_main_process=dist.get_rank() == 0)
    ds_mxfp8_moe.save_pretrained(engine, directory / "whole")
    return loss_of(engine)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate_with_an_optimizer_of_ones_own(ranks2, directory, stage):
    for loss in ranks2.run(by_accelerate, directory, stage):
        assert abs(held_out_loss(adapted()) - loss) > 1e-3
        for name in ("state", "whole"):
            net = peft.PeftModel.from_pretrained(model(), directory / name)
            assert held_out_loss(net) == pytest.approx(loss, abs=1e-3), name
