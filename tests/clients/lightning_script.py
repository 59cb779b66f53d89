# SPDX-License-Identifier: Apache-2.0
"""A user's script for Lightning's DeepSpeedStrategy. At its end it saves the model for transformers."""

import argparse
import json
import os
import sys

import lightning
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy

parser = argparse.ArgumentParser()
for name in ("model", "data", "out", "deepspeed", "resume"):
    parser.add_argument(f"--{name}")
parser.add_argument("--steps", type=int)
parser.add_argument("--save-every", type=int)
parser.add_argument("--lora", action="store_true")
given = parser.parse_args()
ON_CPU = os.environ.get("DS_ACCELERATOR") == "cpu"
if ON_CPU:  # for tests: Lightning lets DeepSpeed use GPUs alone
    import deepspeed
    import lightning.pytorch.strategies.deepspeed as module

    GPUStrategy, initialize = DeepSpeedStrategy, deepspeed.initialize
    module._validate_device_index_selection = lambda devices: None
    deepspeed.initialize = lambda **given: initialize(**{**given, "args": None})  # which name a GPU

    class DeepSpeedStrategy(GPUStrategy):  # noqa: F811
        def setup_environment(self) -> None:
            super(GPUStrategy, self).setup_environment()


tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
with open(given.data) as file:
    texts = [json.loads(line)["text"] for line in file]
# A checkpoint ends an epoch: Lightning goes on from one within an epoch with that epoch's first batch.
texts = texts[:2 * 4 * given.save_every]


def collate(texts: list[str]) -> dict:
    batch = dict(tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt"))
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
        if given.lora:
            import peft

            self.model = peft.get_peft_model(self.model, peft.LoraConfig(
                target_modules=["q_proj", "v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"],
                task_type="CAUSAL_LM"))

    def training_step(self, batch: dict, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        mean = self.all_gather(loss.detach().float()).mean()
        if self.global_rank == 0:
            print(f"step {self.global_step + 1} loss {mean.item():.8f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), lr=2e-3)


lightning.seed_everything(1)
trainer = lightning.Trainer(
    strategy=DeepSpeedStrategy(config=given.deepspeed), accelerator="cpu" if ON_CPU else "gpu", devices=2,
    precision="bf16-true", max_steps=given.steps, logger=False, enable_progress_bar=False, default_root_dir=given.out,
    callbacks=[ModelCheckpoint(given.out, "checkpoint-{step}", auto_insert_metric_name=False, save_top_k=-1,
                               every_n_train_steps=given.save_every)])
trainer.fit(Module(), torch.utils.data.DataLoader(texts, batch_size=4, collate_fn=collate), ckpt_path=given.resume)
engine = trainer.strategy.model
if "ds_mxfp8_moe" in sys.modules:
    import ds_mxfp8_moe

    ds_mxfp8_moe.save_pretrained(engine, given.out)
elif trainer.is_global_zero:
    trainer.lightning_module.model.save_pretrained(given.out)
