# SPDX-License-Identifier: Apache-2.0
"""axolotl's program: `axolotl train`, with a YAML."""

from pathlib import Path

import yaml
from client import SAVE_EVERY, STEPS, Client, Job

SETTINGS = {
    "datasets": [{"path": "DATA", "ds_type": "json", "type": "completion", "field": "text"}], "sequence_len": 128,
    "learning_rate": 2e-3, "lr_scheduler": "constant", "optimizer": "adamw_torch", "micro_batch_size": 4,
    "gradient_accumulation_steps": 1, "max_steps": STEPS, "save_steps": SAVE_EVERY, "logging_steps": 1, "bf16": True,
    "seed": 1, "attn_implementation": "sdpa", "sample_packing": False, "pad_to_sequence_len": False,
    "dataset_num_proc": 1, "dataloader_num_workers": 0, "gradient_checkpointing": False,
    "special_tokens": {"pad_token": "<pad>"}}
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


class Axolotl(Client):
    """The release asks for Python 3.12, torch before 2.15 and GPU packages. None of them matters here."""

    title = "axolotl"
    packages = (("--no-deps", "--ignore-requires-python", "axolotl==0.21.0", "axolotl-contribs-lgpl==0.0.7",
                 "axolotl-contribs-mit==0.0.6", "bitsandbytes==0.50.2"),
                ("transformers==5.20.1", "trl==1.14.1", "datasets==5.0.1", "addict", "fire", "colorama", "art",
                 "python-dotenv", "posthog==6.7.11", "schedulefree==1.4.1", "typer==0.25.1", "requests", "einops",
                 "mistral-common==1.12.0", "evaluate==0.4.1", "numba", "fastcore", "wandb"))
    variables = {"AXOLOTL_DO_NOT_TRACK": "1",
                 "PYTHONPATH": str(Path(__file__).with_name("axolotl_without_gpu"))}

    def command(self, job: Job) -> list[str]:
        dataset = SETTINGS["datasets"][0] | {"path": str(job.data / "text" / "train.jsonl")}
        settings = SETTINGS | {"base_model": str(job.model), "datasets": [dataset], "output_dir": str(job.out),
                               "dataset_prepared_path": str(job.out.with_suffix(".prepared")),
                               "deepspeed": str(job.deepspeed), **(LORA if job.lora else {})}
        if job.resume:
            settings["resume_from_checkpoint"] = str(job.resume)
        file = job.out.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(settings, sort_keys=False))
        return ["axolotl", "train", str(file), "--launcher", "torchrun", "--", "--nproc-per-node", "2"]


CLIENT = Axolotl()
