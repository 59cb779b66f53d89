# SPDX-License-Identifier: Apache-2.0
"""A tiny MoE of each architecture with a tokenizer, and data of each form that clients read: `python tiny.py FOLDER`.

Nothing is downloaded: the text is Python's own source code. Weights are drawn wide, those of experts most, so that
experts matter to the loss.
"""

import json
import random
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
TEMPLATE = r"""{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
SIZES = dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, max_position_embeddings=1024, initializer_range=0.12, num_experts_per_tok=2, pad_token_id=0,
             eos_token_id=3, bos_token_id=None)
ARCHITECTURES = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, intermediate_size=128, moe_intermediate_size=64,
                                                     num_experts=8),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, intermediate_size=64, num_local_experts=8,
                                                 sliding_window=64),
}
REWARDS = '''"""For GRPO: `--reward_funcs rewards.length`."""


def length(completions, **others):
    return [len(completion) / 20 for completion in completions]
'''


def source() -> str:
    folder = Path(json.__file__).parent
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator([source()], trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[3],
                                                chat_template=TEMPLATE)


def write_models(folder: Path) -> None:
    for name, config in ARCHITECTURES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
        with torch.no_grad():  # a model saved with the experts it began with has a loss that is 3% higher
            for parameter_name, parameter in model.named_parameters():
                parameter.mul_(2 if ".experts." in parameter_name else 1)
        # Reward models draw their head by this: as wide as the weights, it makes MXFP8's rounding percents of a loss.
        model.config.initializer_range = 0.02
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = 3, 0
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)


def write_data(folder: Path) -> None:
    """folder/data/FORM/train.jsonl with 256 rows."""
    draw = random.Random(0)
    lines = [line for line in source().splitlines() if len(line) > 30]

    def some(count: int) -> str:
        start = draw.randrange(len(lines) - count)
        return "\n".join(lines[start:start + count])

    rows: dict[str, list[dict]] = {"text": [], "chat": [], "alpaca": [], "preference": [], "prompt": []}
    for _ in range(256):
        question, answer, worse = some(2), some(3), "".join(draw.choice("xyz ") for _ in range(60))
        rows["text"].append({"text": some(6)})
        rows["chat"].append({"messages": [{"role": "user", "content": question},
                                          {"role": "assistant", "content": answer}]})
        rows["alpaca"].append({"instruction": question, "input": "", "output": answer})
        rows["preference"].append({"prompt": question, "chosen": answer, "rejected": worse})
        rows["prompt"].append({"prompt": question})
    for form, of_form in rows.items():
        (folder / "data" / form).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in of_form)
        (folder / "data" / form / "train.jsonl").write_text(text)


if __name__ == "__main__":
    to = Path(sys.argv[1])
    write_models(to)
    write_data(to)
    (to / "rewards.py").write_text(REWARDS)
