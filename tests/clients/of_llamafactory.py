# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory's program: `llamafactory-cli train`, with a YAML. It trains adapters on attention alone: it has
no setting for adapters on parameters."""

import json

import yaml
from client import SAVE_EVERY, STEPS, Client, Job

SETTINGS = {
    "stage": "sft", "do_train": True, "dataset": "tiny", "template": "qwen3_nothink", "cutoff_len": 128,
    "preprocessing_num_workers": 1, "dataloader_num_workers": 0, "overwrite_cache": True, "learning_rate": 2e-3,
    "lr_scheduler_type": "constant", "per_device_train_batch_size": 4, "max_steps": STEPS, "save_steps": SAVE_EVERY,
    "logging_steps": 1, "bf16": True, "use_cpu": True, "seed": 1, "report_to": "none"}
LORA = {"finetuning_type": "lora", "lora_target": "q_proj,v_proj", "lora_rank": 8}


class LlamaFactory(Client):
    title = "LLaMA-Factory"
    packages = (("llamafactory==0.9.5", ), )
    variables = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}

    def command(self, job: Job) -> list[str]:
        (job.data / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "alpaca/train.jsonl"}}))
        settings = SETTINGS | {"model_name_or_path": str(job.model), "dataset_dir": str(job.data),
                               "output_dir": str(job.out), "deepspeed": str(job.deepspeed)}
        settings |= LORA if job.lora else {"finetuning_type": "full"}
        if job.resume:
            settings["resume_from_checkpoint"] = str(job.resume)
        file = job.out.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(settings, sort_keys=False))
        return ["llamafactory-cli", "train", str(file)]


CLIENT = LlamaFactory()
