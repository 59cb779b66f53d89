# SPDX-License-Identifier: Apache-2.0
"""The mean loss of a saved model over the tiny data, in plain transformers: `python saved_loss.py TINY FOLDER [BASE]`.

With BASE, FOLDER has adapters for that model. Prints one line of JSON. The loss of a reward model is that of its
preferences.
"""

import json
import sys
from pathlib import Path

import torch
import transformers


def load(folder: str, base: str | None) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(base or folder)
    adapters = json.loads((Path(folder) / "adapter_config.json").read_text()) if base else {}
    rewards = "SequenceClassification" in (config.architectures or [""])[0] or adapters.get("task_type") == "SEQ_CLS"
    kind = transformers.AutoModelForSequenceClassification if rewards else transformers.AutoModelForCausalLM
    if rewards:
        config.num_labels = 1
    model, found = kind.from_pretrained(base or folder, config=config, dtype=torch.bfloat16, output_loading_info=True)
    differing = {what: sorted(names) for what, names in found.items() if names}
    if differing and not (base and rewards):  # whose head is the adapters'
        sys.exit(f"{folder}: its tensors are not the model's: {differing}")
    if base:
        import peft
        model = peft.PeftModel.from_pretrained(model, folder)
    return model.eval()


def rows(tiny: str, form: str) -> list[dict]:
    return [json.loads(line) for line in (Path(tiny) / "data" / form / "train.jsonl").read_text().splitlines()[:64]]


@torch.no_grad()
def loss_of(model: torch.nn.Module, tokenizer, tiny: str) -> float:
    def encoded(texts: list[str]) -> dict:
        return tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=128)

    if hasattr(model, "score"):
        pairs = rows(tiny, "preference")
        better, worse = (model(**encoded([row["prompt"] + row[which] for row in pairs])).logits.float()
                         for which in ("chosen", "rejected"))
        return -torch.nn.functional.logsigmoid(better - worse).mean().item()
    batch = encoded([row["text"] for row in rows(tiny, "text")])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.item()


if __name__ == "__main__":
    tiny, folder, base = (*sys.argv[1:], None)[:3]
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{tiny}/qwen3_moe")
    print(json.dumps({"loss": loss_of(load(folder, base), tokenizer, tiny)}))
