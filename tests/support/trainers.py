# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer on sentences."""

import json

import deepspeed.comm as dist
import peft
import torch
import transformers

from tests.support.adapted_models import with_adapters
from tests.support.autoep_models import batch, ds_config, model
from tests.support.rank_pool import reset_hugging_face
from tests.support.saved_models import LORA, PATTERN

AUTO = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}


class Sentences(torch.utils.data.Dataset):
    """A few sequences, over and over; of uneven lengths where `uneven`."""

    def __init__(self, size: int, uneven: bool = False):
        self.size, self.uneven = size, uneven

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        ids = batch(index % 4, rank=0, size=1, length=8 + 4 * (index % 3) if self.uneven else 16)[0]
        return {"input_ids": ids, "labels": ids}


def config(stage: int, adapters: str | None, ep_size: int = 2, section: dict | None = None, **changes) -> dict:
    return ds_config(section or {"enabled": True}, stage, ep_size, PATTERN if adapters == "attention" else None,
                     **changes)


def made(directory, adapters: str | None):
    """A new model. `adapters`: on "attention", on "experts" or none. Under ZeRO-3 it is partitioned as it is made,
    since the library has read the config before; adapters are added to a model that is loaded.
    """
    if adapters is None:
        return model()
    net = transformers.AutoModelForCausalLM.from_pretrained(directory / "base")
    return peft.get_peft_model(net, LORA) if adapters == "attention" else with_adapters(net)


def trainer_of(directory, stage, adapters, dtype="fp32", ep_size=2, section=None, optimizer=AUTO):
    reset_hugging_face()
    given = config(stage, adapters, ep_size, section, optimizer=optimizer, train_micro_batch_size_per_gpu="auto",
                   gradient_accumulation_steps="auto", bf16={"enabled": "auto"})
    if stage == 3 and dtype == "fp32":  # as a file
        path = directory / f"{dist.get_rank()}.json"
        path.write_text(json.dumps(given))
        given = str(path)
    arguments = transformers.TrainingArguments(
        output_dir=str(directory), deepspeed=given, use_cpu=True, per_device_train_batch_size=2, max_steps=4,
        save_steps=2, learning_rate=5e-3, logging_steps=1, report_to=[], bf16=dtype == "bf16",
        gradient_checkpointing=dtype == "bf16" and adapters is None, disable_tqdm=True, lr_scheduler_type="constant",
        per_device_eval_batch_size=1)
    return transformers.Trainer(model=made(directory, adapters), args=arguments, train_dataset=Sentences(32),
                                eval_dataset=Sentences(6, uneven=True))
