# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face Trainer calls deepspeed.initialize itself: `enable()` before it puts its layers on MXFP8."""

import json
import math

import deepspeed
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from autoep_models import autoep_layers, batch, ds_config, gathered, model
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_mxfp8_moe
from ds_mxfp8_moe import save_pretrained
from ds_mxfp8_moe.autoep import MXFP8AutoEPMoELayer


class Sentences(torch.utils.data.Dataset):
    """A few sequences, over and over; of uneven lengths where `uneven`."""

    def __init__(self, size: int, uneven: bool = False):
        self.size, self.uneven = size, uneven

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        ids = batch(index % 4, rank=0, size=1, length=8 + 4 * (index % 3) if self.uneven else 16)[0]
        return {"input_ids": ids, "labels": ids}


def config(section: dict, stage: int, ep_size: int) -> dict:
    auto = {key: "auto" for key in ("lr", "betas", "eps", "weight_decay")}
    return ds_config(section, stage, ep_size, optimizer={"type": "AdamW", "params": {**auto, "torch_adam": True}},
                     train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto",
                     bf16={"enabled": "auto"})


def trained(section, stage, ep_size, dtype, directory, as_file):
    AcceleratorState._reset_state(reset_partial_state=True)
    given = config(section, stage, ep_size)
    if as_file:
        given = str(directory / f"{deepspeed.comm.get_rank()}.json")
        with open(given, "w") as file:
            json.dump(config(section, stage, ep_size), file)
    unset_hf_deepspeed_config()  # of the case before
    ds_mxfp8_moe.enable()
    arguments = transformers.TrainingArguments(
        output_dir=str(directory), deepspeed=given, use_cpu=True, per_device_train_batch_size=2, max_steps=6,
        learning_rate=3e-3, logging_steps=1, report_to=[], save_strategy="no", bf16=dtype == "bf16",
        gradient_checkpointing=dtype == "bf16", disable_tqdm=True, lr_scheduler_type="constant",
        per_device_eval_batch_size=1)
    net = model()  # under ZeRO-3 partitioned as it is made, since the Trainer's arguments were made before it
    gate_up = gathered(net.model.layers[0].mlp.experts.gate_up_proj).float()
    trainer = transformers.Trainer(model=net, args=arguments, train_dataset=Sentences(32),
                                   eval_dataset=Sentences(6, uneven=True))
    trainer.train()
    layers = autoep_layers(trainer.model_wrapped.module)
    first, w1 = layers[0].ep_rank * layers[0].num_local_experts, gathered(layers[0].experts.w1).float()
    moved = not torch.allclose(w1, gate_up[first:first + len(w1), :64], atol=1e-3)
    save_pretrained(trainer.model_wrapped, directory / "saved")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return (sum(type(layer) is MXFP8AutoEPMoELayer for layer in layers), moved, losses,
            trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("ranks, ep_size, stage, dtype, as_file", [
    ("ranks2", 2, 2, "bf16", False), ("ranks2", 2, 3, "fp32", True), ("ranks2", 1, 3, "bf16", False)])
def test_the_trainer_trains_in_mxfp8(request, tmp_path, ranks, ep_size, stage, dtype, as_file):
    pool = request.getfixturevalue(ranks)
    results = pool.run(trained, {"enabled": True}, stage, ep_size, dtype, tmp_path, as_file)
    for converted, moved, losses, eval_loss in results:
        assert converted == 2 and moved
        assert all(map(math.isfinite, [*losses, eval_loss]))
        assert losses[-1] < losses[0] - 0.5
    assert results[0] == results[-1]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").num_parameters() > 0


def test_without_the_section_the_trainer_is_plain(ranks2, tmp_path):
    for converted, moved, losses, _ in ranks2.run(trained, {"enabled": False}, 2, 2, "fp32", tmp_path, False):
        assert converted == 0 and moved
        assert all(map(math.isfinite, losses))
