# SPDX-License-Identifier: Apache-2.0
"""The skeleton of transformers' examples/pytorch/language-modeling/run_clm_no_trainer.py. It knows nothing of this
package."""

import argparse
import json
import os

import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed

parser = argparse.ArgumentParser()
for name in ("model", "data", "out", "resume"):
    parser.add_argument(f"--{name}")
parser.add_argument("--steps", type=int)
parser.add_argument("--save-every", type=int)
parser.add_argument("--lora", action="store_true")
given = parser.parse_args()

set_seed(1)
if not torch.cuda.is_available():
    PartialState(cpu=True)  # else Accelerate takes each rank for the only one
accelerator = Accelerator()
tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
if given.lora:
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        task_type="CAUSAL_LM"))
with open(given.data) as file:
    texts = [json.loads(line)["text"] for line in file]


def collate(texts: list[str]) -> dict:
    batch = dict(tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt"))
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


loader = torch.utils.data.DataLoader(texts, batch_size=4, collate_fn=collate)
optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=2e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done = 0
if given.resume:
    accelerator.load_state(given.resume)
    done = given.save_every
for step, batch in enumerate(loader, 1):
    if step <= done:
        continue
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach().float(), reduction="mean")
    accelerator.print(f"step {step} loss {mean.item():.8f}", flush=True)
    if step % given.save_every == 0:
        accelerator.save_state(os.path.join(given.out, f"checkpoint-{step}"))
    if step == given.steps:
        break
accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained(
    given.out, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
    state_dict=accelerator.get_state_dict(model))
accelerator.end_training()
