# SPDX-License-Identifier: Apache-2.0
"""ms-swift's program: `swift sft`."""

from pathlib import Path

from client import SAVE_EVERY, STEPS, Client, Job

LORA = ["--tuner_type", "lora", "--lora_dropout", "0", "--target_modules", "q_proj", "v_proj",
        "--target_parameters", "experts.gate_up_proj", "experts.down_proj"]


class Swift(Client):
    title = distribution = "ms-swift"
    packages = (("ms-swift==4.6.0", ), )
    variables = {"NPROC_PER_NODE": "2"}

    def command(self, job: Job) -> list[str]:
        resume = ["--resume_from_checkpoint", str(job.resume)] if job.resume else []
        return ["swift", "sft", "--model", str(job.model), "--template", "qwen3_nothinking", "--dataset",
                str(job.data / "chat" / "train.jsonl"), "--output_dir", str(job.out), "--add_version", "false",
                "--deepspeed", str(job.deepspeed), *(LORA if job.lora else ["--tuner_type", "full"]), *resume,
                "--torch_dtype", "bfloat16", "--use_cpu", "true", "--per_device_train_batch_size", "4",
                "--gradient_accumulation_steps", "1", "--max_length", "128", "--max_steps", str(STEPS),
                "--save_steps", str(SAVE_EVERY), "--logging_steps", "1", "--learning_rate", "2e-3",
                "--lr_scheduler_type", "constant", "--warmup_ratio", "0", "--split_dataset_ratio", "0", "--seed", "1",
                "--dataset_num_proc", "1", "--dataloader_num_workers", "0", "--report_to", "none"]

    def checkpoint(self, job: Job) -> Path:
        return job.out / f"checkpoint-{SAVE_EVERY}"

    def saved(self, job: Job) -> Path:
        return job.out / f"checkpoint-{STEPS}"


CLIENT = Swift()
